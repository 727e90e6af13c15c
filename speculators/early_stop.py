"""Ending a chain before its full length: where the drafter's calibrated confidence is too low, or drafts do not pay.

Only the distributions' highest probabilities decide, never the tokens drawn from them, so that speculative sampling
stays lossless (``confidence.py``).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bitdraft.speculators.confidence import Calibration
from bitdraft.speculators.draft_length import CostModel, fixed_best_length, next_step_pays

# B sequence, K depth.


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """When a chain ends."""

    calibration: Calibration
    threshold: float = 0.0
    """Least survival, the product of the calibrated confidences so far, of a draft that is kept."""
    cost: CostModel | None = None
    """What passes cost: with it, drafts that cost more than they promise are not made. The batch decides together."""
    per_position: tuple[float, ...] = ()
    """The share of fixed-length passes that accepted each position; ``cost`` needs it."""

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"the confidence threshold must lie in [0, 1], got {self.threshold}")
        if self.cost and not self.per_position:
            raise ValueError("the choice of draft lengths by cost needs the acceptance at each position")

    def check(self, length: int) -> None:
        """``ValueError`` unless chains of ``length`` tokens are covered."""
        covered = len(self.calibration.temperature)
        if self.cost:
            covered = min(covered, len(self.per_position))
        if covered < length:
            raise ValueError(f"the early stop was calibrated for drafts of {covered} tokens, not {length}")


class ChainLengths:
    """How far each sequence's chain of one pass goes."""

    def __init__(self, stop: EarlyStop, batch: int, device: torch.device) -> None:
        self.stop = stop
        self.drafted = torch.zeros(batch, dtype=torch.int64, device=device)  # [B]
        self.survival = torch.ones(batch, device=device)  # [B]; 0 where a chain has ended
        # What a unit of cost is worth: the tokens that the best fixed length gets for it.
        self.rate = fixed_best_length(stop.per_position, stop.cost, batch)[1] if stop.cost else 0.0

    def reach(self, depth: int, confidences: Tensor) -> bool:
        """Extend chains to ``depth`` (from 0) where that is wanted, by the ``confidences`` ``[B, depth + 1]``; whether
        any is."""
        calibrated = self.stop.calibration.calibrated(confidences)[:, -1]
        survival = self.survival * calibrated
        going = (survival >= self.stop.threshold) & (self.survival > 0)
        if self.stop.cost:
            going &= next_step_pays(survival * going, self._tokens(), self.stop.cost, self.rate, drafted=True)
        self.survival = survival * going
        self.drafted = torch.where(going, depth + 1, self.drafted)
        return bool(going.any())

    def worth_another(self, depth: int) -> bool:
        """Whether the draft step to ``depth`` promises more than it costs, before its confidences are known."""
        if self.stop.cost is None:
            return True
        before, at = self.stop.per_position[depth - 1 : depth + 1]
        expected = self.survival * (at / max(before, 1e-9))
        return bool(next_step_pays(expected, self._tokens(), self.stop.cost, self.rate).any())

    def _tokens(self) -> int:
        return len(self.drafted) + int(self.drafted.sum())
