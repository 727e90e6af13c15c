"""Accepting and rejecting drafted tokens: pure functions of tensors."""

from torch import Tensor

# B sequence, K drafted token.


def accepted_lengths(draft_BK: Tensor, target_BK: Tensor) -> Tensor:
    """Drafted tokens kept by greedy verification, per sequence ``[B]``: the length of the agreeing prefix.

    ``target_BK``: what the target itself would have written at the drafted positions.
    """
    agrees_BK = draft_BK == target_BK
    return agrees_BK.long().cumprod(dim=1).sum(dim=1)
