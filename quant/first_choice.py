"""The first choice of many rows of logits, and their log-normaliser, fast on CPUs too."""

import torch
from torch import Tensor

# n row, V vocabulary.

_BLOCK = 128  # vocabulary entries per block of the two-stage argmax


def first_choice(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest entry of ``[n, V]`` and its index (the first of equals), ``[n]`` each."""
    if logits.device.type != "cpu" or logits.shape[-1] % _BLOCK:
        largest = logits.max(-1)
        return largest.values, largest.indices
    # Torch's CPU reductions are vectorised without an index only: first the block, then the place within it.
    blocks = logits.unflatten(-1, (-1, _BLOCK))
    top, block = blocks.amax(-1).max(-1)
    within = blocks[torch.arange(len(logits)), block].argmax(-1)
    return top, block * _BLOCK + within


def log_normaliser(top: Tensor, choice: Tensor, softmax: Tensor) -> Tensor:
    """``logsumexp`` of logits ``[n, V]`` from their softmax: the largest has ``e^(top − logsumexp)``, never 0."""
    return top - softmax.gather(1, choice[:, None]).squeeze(1).log()
