"""Batches of equally long sequences as packs."""

import torch
from torch import Tensor

from bitdraft.quant.target import TargetStates
from bitdraft.speculators.base import DraftHead, rows_at
from bitdraft.speculators.documents import Documents


def packed_states(states: TargetStates) -> TargetStates:
    """``[B, T, …]`` → ``[B·T, …]``."""
    return TargetStates(states.captured.flatten(0, 1), states.last_hidden.flatten(0, 1))


def outputs_at(head: DraftHead, states: TargetStates, tokens: Tensor, rows: Tensor) -> Tensor:
    """``[K, B, R, H]``: training outputs of sequences ``[B, T]`` at ``rows`` ``[B, R]``; drafts begin at all."""
    batch, length = tokens.shape
    documents = Documents.whole([length] * batch)
    flat = head.training_outputs(packed_states(states), tokens.flatten(), documents)  # [K, B·T, H]
    outputs = flat.unflatten(1, (batch, length))
    return torch.stack([rows_at(step, rows) for step in outputs])
