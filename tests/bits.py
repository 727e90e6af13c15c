"""Tensors by their bits."""

import torch
from torch import Tensor


def bits(x: Tensor) -> Tensor:
    """The words of ``x``, with one word for every NaN."""
    words = x.view(torch.int32 if x.dtype == torch.float32 else torch.int16).long()
    return torch.where(x.isnan(), -1, words)
