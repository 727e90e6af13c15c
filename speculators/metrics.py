"""What acceptance means here, and how sure a measurement is.

Counts are kept per prompt and added, so that batches, sets and processes merge exactly. Definitions (those of
vLLM's counters): a *pass* is one target pass that verifies drafts; the prefill, which yields the first token,
is none. Every pass counts whole, also the last one, and emits the accepted drafts and one token more, the bonus.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FEWEST_PROMPTS = 8
"""Prompts below which a bootstrap interval is far too narrow to be given."""


@dataclass(frozen=True)
class Acceptance:
    """Counts of one or more prompts at one draft length (of a tree: its depth)."""

    draft_length: int
    prompts: int
    passes: int
    drafted: int
    """Drafted tokens, all nodes of a tree."""
    accepted_at: tuple[int, ...]
    """Passes in which the drafts at positions ``0 … i`` were all accepted."""
    tried_at: tuple[int, ...]
    """Passes that accepted all positions before ``i`` and had a draft there."""

    def __add__(self, other: "Acceptance") -> "Acceptance":
        if self.draft_length != other.draft_length:
            raise ValueError(f"draft lengths {self.draft_length} and {other.draft_length} do not add up")
        return Acceptance(
            self.draft_length,
            self.prompts + other.prompts,
            self.passes + other.passes,
            self.drafted + other.drafted,
            tuple(a + b for a, b in zip(self.accepted_at, other.accepted_at, strict=True)),
            tuple(a + b for a, b in zip(self.tried_at, other.tried_at, strict=True)),
        )

    @classmethod
    def none(cls, draft_length: int, *, prompts: int = 0) -> "Acceptance":
        return cls(draft_length, prompts, 0, 0, (0,) * draft_length, (0,) * draft_length)

    @classmethod
    def of_pass(cls, draft_length: int, *, drafted: int, accepted: int, refused: bool) -> "Acceptance":
        """One pass. ``refused``: whether it ended at a draft that was not accepted, rather than at the drafts' end."""
        reached = range(draft_length)
        return cls(
            draft_length,
            0,
            1,
            drafted,
            tuple(int(i < accepted) for i in reached),
            tuple(int(i < accepted + refused) for i in reached),
        )

    @classmethod
    def of_row(cls, row: Sequence[int]) -> "Acceptance":
        """One prompt's counts back from its ``row``, of chains: behind every accepted draft stands another."""
        passes, drafted, *accepted = row
        return cls(len(accepted), 1, passes, drafted, tuple(accepted), (passes, *accepted[:-1]))

    @property
    def row(self) -> list[int]:
        """``[passes, drafted, *accepted_at]``: what a file keeps of one prompt."""
        return [self.passes, self.drafted, *self.accepted_at]

    @property
    def accepted(self) -> int:
        return sum(self.accepted_at)

    @property
    def emitted(self) -> int:
        return self.passes + self.accepted

    @property
    def rate(self) -> float:
        """Accepted / drafted."""
        return self.accepted / max(self.drafted, 1)

    @property
    def length(self) -> float:
        """Tokens per target pass, bonus included; 1.0 is plain decoding."""
        return self.emitted / max(self.passes, 1)

    @property
    def drafted_per_pass(self) -> float:
        return self.drafted / max(self.passes, 1)

    @property
    def per_position(self) -> list[float]:
        """Share of passes in which position ``i`` was accepted (and so all before it)."""
        return [a / max(self.passes, 1) for a in self.accepted_at]

    @property
    def conditional(self) -> list[float]:
        """Share accepted at position ``i`` among passes that accepted all positions before it and drafted there."""
        return [a / max(t, 1) for a, t in zip(self.accepted_at, self.tried_at, strict=True)]


def total(parts: Sequence[Acceptance], draft_length: int) -> Acceptance:
    return sum(parts, Acceptance.none(draft_length))


def length_interval(parts: Sequence[Acceptance], *, resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the acceptance length over prompts (percentile method)."""
    return ratio_interval([p.emitted for p in parts], [p.passes for p in parts], resamples=resamples, seed=seed)


def rate_interval(parts: Sequence[Acceptance], *, resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the acceptance rate over prompts (percentile method)."""
    return ratio_interval([p.accepted for p in parts], [p.drafted for p in parts], resamples=resamples, seed=seed)


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], *, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """95 % bootstrap interval of ``Σ numerators / Σ denominators`` (percentile method), one pair per prompt.

    What belongs to one prompt is not independent, so whole prompts are drawn.
    """
    ratios = _resampled_ratios(numerators, denominators, bootstrap_draws(len(numerators), resamples, seed))
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def length_difference(
    parts: Sequence[Acceptance], others: Sequence[Acceptance], *, resamples: int = 5000, seed: int = 0
) -> tuple[float, tuple[float, float]]:
    """Acceptance length of ``parts`` less that of ``others``, and its 95 % bootstrap interval over the prompts that
    both were measured on, in the same order."""
    draws = bootstrap_draws(len(parts), resamples, seed)
    resampled = [_resampled_ratios([p.emitted for p in s], [p.passes for p in s], draws) for s in (parts, others)]
    low, high = np.quantile(resampled[0] - resampled[1], [0.025, 0.975])
    k = parts[0].draft_length
    return total(parts, k).length - total(others, k).length, (float(low), float(high))


def bootstrap_draws(prompts: int, resamples: int, seed: int) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
    """``[resamples, prompts]``: indices of the prompts that each resample draws."""
    return np.random.default_rng(seed).integers(0, prompts, size=(resamples, prompts))


def _resampled_ratios(numerators: Sequence[float], denominators: Sequence[float], draws: np.ndarray) -> np.ndarray:
    above, below = (np.array(numbers, dtype=np.float64) for numbers in (numerators, denominators))
    return above[draws].sum(1) / np.maximum(below[draws].sum(1), 1e-12)  # nothing over nothing is 0
