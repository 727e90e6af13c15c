"""How many tokens to draft, from what a pass costs and how probable acceptance is.

A pass emits one token per sequence and every draft that survives; it costs its draft steps, which the batch takes
together, and the verification of all tokens at once. Two ways to choose:

* ``fixed_best_length``: one length for a run, from measured acceptance.
* ``next_step_pays``: step by step while drafting, which saves draft steps too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# B sequence, K drafted position, n token added.


@dataclass(frozen=True)
class CostModel:
    """What the parts of a pass cost, all in one unit: seconds, or plain target passes."""

    draft: float
    """One draft step of the whole batch."""
    verified: tuple[tuple[int, float], ...]
    """Measured target passes: (tokens of all sequences together, cost), ascending in tokens."""

    def __post_init__(self) -> None:
        if not (isfinite(self.draft) and self.draft >= 0):
            raise ValueError(f"cost.draft must not be negative, got {self.draft}")
        tokens, costs = zip(*self.verified, strict=True) if self.verified else ((), ())
        if not tokens or any(a >= b for a, b in pairwise(tokens)):
            raise ValueError(f"cost.verified must list passes of more and more tokens, got {list(tokens)}")
        if not all(isfinite(c) and c > 0 for c in costs):
            raise ValueError(f"cost.verified must hold positive costs, got {list(costs)}")

    def verify(self, tokens: int | NDArray[np.int64]) -> NDArray[np.float64]:
        """Cost of verifying so many tokens in one pass, linear between the measured sizes; outside: ``ValueError``."""
        sizes, costs = np.array(self.verified, dtype=np.float64).T
        low, high = np.min(tokens), np.max(tokens)
        if low < sizes[0] or high > sizes[-1]:
            raise ValueError(
                f"cost.verified covers passes of {sizes[0]:.0f} to {sizes[-1]:.0f} tokens, "
                f"but the batch needs {low} to {high}: measure those too"
            )
        return np.asarray(np.interp(np.asarray(tokens, dtype=np.float64), sizes, costs))

    def of_pass(self, steps: int | NDArray[np.int64], tokens: int | NDArray[np.int64]) -> NDArray[np.float64]:
        """Cost of a pass of so many draft steps that verifies so many tokens."""
        return self.draft * np.asarray(steps) + self.verify(tokens)


def fixed_best_length(per_position: Sequence[float], cost: CostModel, batch: int) -> tuple[int, float]:
    """The draft length with the most tokens per cost for ``batch`` sequences, and how many; 0: drafting does not pay.

    ``per_position``: the share of passes that accept position ``j`` and all before it (``Acceptance.per_position``).
    """
    lengths = np.arange(len(per_position) + 1)
    emitted = batch * (1 + np.cumsum([0.0, *per_position]))
    rates = emitted / cost.of_pass(lengths, batch * (1 + lengths))
    return int(np.argmax(rates)), float(np.max(rates))


def next_step_pays(survival: Tensor, tokens: int, cost: CostModel, rate: float, *, drafted: bool = False) -> Tensor:
    """For which sequences, ``[B]`` bool, one more draft earns more than its cost; for none: go and verify.

    ``survival``: ``[B]``, the probability that the coming draft is accepted, 0 where a sequence has stopped.
    ``tokens``: what the target would verify without it, newest tokens included. ``rate``: what a unit of cost is worth,
    the tokens per cost that decoding achieves anyway; the best policy is the one that is best at its own rate
    (Dinkelbach 1967), and starting from plain decoding's ``B / cost.of_pass(0, B)`` and following the measured one
    leads there. A drafting loop asks twice per depth::

        going = next_step_pays(survival * conditional[j], tokens, cost, rate)   # an estimate; none going: no step
        ...                                                                     # the step, hence calibrated [B]
        survival = survival * going * calibrated
        going = next_step_pays(survival, tokens, cost, rate, drafted=True)      # the step's cost is spent
        survival, tokens = survival * going, tokens + int(going.sum())

    Optimal if the cost of verification is linear. As it reads no later depth and no token drawn at this one,
    it keeps speculative sampling lossless.
    """
    probable = survival.double().cpu().numpy()
    order = np.argsort(-probable, kind="stable")
    added = np.arange(np.count_nonzero(probable) + 1)  # [n]
    gained = np.cumsum([0.0, *probable[order]])[: len(added)]
    spent = cost.verify(tokens + added) + (0.0 if drafted else cost.draft) * (added > 0)
    pays = np.zeros(len(probable), dtype=bool)
    pays[order[: np.argmax(gained - rate * spent)]] = True
    return torch.from_numpy(pays).to(survival.device)
