"""How often each example is drawn: weights from a file, and, on request, more where the head accepts least."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bitdraft.data.chat import Example
from bitdraft.data.sampling import epoch_order
from bitdraft.data.weights_file import Weights

# n example, G group (cluster of the weights file).


@dataclass
class Weighting:
    """Weights of one run's examples, epoch by epoch.

    With a ``cap`` above 1, an epoch's weights are those of the file times ``headroom`` of the example's group, which
    comes from what drafts from its rows were accepted in the epoch before (teacher-forced, on the training text).
    """

    weights: np.ndarray  # [n] fp64, mean 1
    groups: np.ndarray  # [n] int64 in 0 … G − 1
    cap: float = 1.0
    factors: list[list[float]] = field(default_factory=list)  # of every epoch begun so far, [G] each
    accepted: np.ndarray = field(default_factory=lambda: np.zeros(0))  # [G] drafts since the epoch before began
    possible: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if not len(self.accepted):
            self.accepted, self.possible = np.zeros(self.group_count), np.zeros(self.group_count)

    @classmethod
    def even(cls, count: int) -> "Weighting":
        """Every example once an epoch."""
        return cls(np.ones(count), np.zeros(count, np.int64))

    @classmethod
    def read(cls, examples: Sequence[Example], weights: Weights, cap: float) -> "Weighting":
        """By the records that the examples are turns of, all of which have a weight (``Weights.of``)."""
        clusters = np.array([weights.clusters[e.asked] for e in examples])
        _, groups = np.unique(clusters, return_inverse=True)
        drawn = np.array([weights.by_key[e.asked] for e in examples])
        if not drawn.sum() > 0:
            raise ValueError("weights.file: all of these records have weight 0: nothing would be trained on")
        return cls(drawn / drawn.mean(), groups, cap)

    @property
    def group_count(self) -> int:
        return int(self.groups.max(initial=0)) + 1

    def of_epoch(self, epoch: int) -> np.ndarray:
        """``[n]``; epochs are asked for in order, those before a resumption again."""
        if self.cap == 1:
            return self.weights
        assert epoch <= len(self.factors)
        if epoch == len(self.factors):
            self.factors.append(headroom(self.accepted, self.possible, self._shares(), self.cap).tolist())
            self.accepted, self.possible = np.zeros(self.group_count), np.zeros(self.group_count)
        return self.weights * np.array(self.factors[epoch])[self.groups]

    def first_draws(self, examples: Sequence[Example], seed: int) -> list[int]:
        """The first epoch's draws: the text that a fresh head starts from."""
        return epoch_order([e.key for e in examples], self.weights, seed=seed, epoch=0).tolist()

    def take_in(self, accepted: Sequence[float], possible: Sequence[float]) -> None:
        """One step's drafts by group, over all packs and processes."""
        self.accepted, self.possible = self.accepted + accepted, self.possible + possible

    def state(self) -> dict[str, Any]:
        return {
            "factors": self.factors,
            "accepted": self.accepted.tolist(),
            "possible": self.possible.tolist(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        if state:
            self.factors = [list(f) for f in state["factors"]]
            self.accepted, self.possible = np.array(state["accepted"]), np.array(state["possible"])

    def _shares(self) -> np.ndarray:
        return np.bincount(self.groups, self.weights, self.group_count) / self.weights.sum()  # [G]


def headroom(accepted: np.ndarray, possible: np.ndarray, shares: np.ndarray, cap: float) -> np.ndarray:
    """``[G]`` factors between 1 / cap and cap: a group's share of refused drafts over the mean share.

    Groups of which nothing was drafted yet have the factor 1. ``shares``: of the draws, by which the mean is weighted.
    """
    seen = possible > 0
    if not seen.any():
        return np.ones(len(possible))
    refused = 1 - accepted[seen] / possible[seen]
    mean = np.average(refused, weights=shares[seen]) if shares[seen].sum() > 0 else refused.mean()
    factors = np.ones(len(possible))
    if mean > 0:
        factors[seen] = np.clip(refused / mean, 1 / cap, cap)
    return factors
