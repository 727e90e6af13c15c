"""Checking that decoding with drafts wrote what plain decoding writes.

In fp32 the two must be identical. A pass over several tokens rounds differently from a pass over one, though,
and two things make that visible: bf16, and quantized activations, where a sum that differs in its last bit can
fall on the other side of a code's boundary. Either can flip the choice between two tokens whose logits are
equal up to that. Such a flip is excused, counted and shown; nothing else is. How far rounding moves logits is
measured where it matters, at the very prefix: the same tokens in several batch shapes, without any cache, so
that a fault of the cache or of the loop cannot excuse itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitdraft.quant.target import LowBitTarget


@dataclass(frozen=True)
class Lossless:
    """Outcome of the check. ``excused`` answers differ from a near-tie on; ``failures`` say what differs and where."""

    checked: int
    excused: int
    failures: tuple[str, ...]

    @property
    def failed(self) -> int:
        return len(self.failures)


def compare_with_plain(
    target: LowBitTarget,
    ids: Sequence[str],
    prompts: Sequence[Sequence[int]],
    drafted: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
) -> Lossless:
    """Compare answers written with drafts and without, prompt by prompt."""
    excused, failures = 0, []
    for name, prompt, mine, its in zip(ids, prompts, drafted, plain, strict=True):
        if list(mine) == list(its):
            continue
        shared = min(len(mine), len(its))
        at = next((i for i in range(shared) if mine[i] != its[i]), shared)
        if at == shared:
            failures.append(f"{name}: one answer ends after {at} tokens, the other goes on")
            continue
        gap, noise = gap_and_noise(target, [*prompt, *its[:at]], mine[at], its[at])
        if not must_be_identical(target) and gap <= 2 * noise:
            excused += 1
        else:
            failures.append(
                f"{name}: token {at} differs from plain decoding, where the two logits lie {gap:.3g} apart and "
                f"rounding moves logits by {noise:.3g}"
            )
    return Lossless(len(ids), excused, tuple(failures))


def must_be_identical(target: LowBitTarget) -> bool:
    """Whether nothing excuses a difference: fp32, and no activation, key or value is rounded to a few bits."""
    recipe = target.recipe
    quantizes = any(rule.activations for rule in recipe.rules) or recipe.kv is not None or recipe.attention is not None
    return target.dtype == torch.float32 and not quantizes


@torch.no_grad()
def gap_and_noise(target: LowBitTarget, prefix: list[int], a: int, b: int) -> tuple[float, float]:
    """Distance of the logits of tokens ``a`` and ``b`` after ``prefix``, and how far rounding moves logits.

    The latter is the largest change of any logit between batch shapes, and at least two bf16 units in the last
    place. Two logits can change places through rounding only if they lie within twice that.
    """
    row = torch.tensor([prefix], device=target.device)
    padding = torch.zeros_like(row[:, :1]).expand(1, 13)
    shapes = [row, row.expand(7, -1), row.expand(24, -1), torch.cat([row, padding], dim=1)]
    logits = [_next_logits(target, ids, len(prefix)) for ids in shapes]
    measured = max(float((other - logits[0]).abs().max()) for other in logits[1:])
    magnitude = max(float(logits[0][[a, b]].abs().max()), 1.0)
    units = 2 * torch.finfo(torch.bfloat16).eps * 2.0 ** math.floor(math.log2(magnitude))
    return min(abs(float(one[a] - one[b])) for one in logits), max(measured, units)


def _next_logits(target: LowBitTarget, ids: Tensor, length: int) -> Tensor:
    return target.logits(target.states(ids).last_hidden[0, length - 1]).float()
