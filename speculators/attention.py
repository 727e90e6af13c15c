"""Attention of the training-time test.

Li et al. 2025 (arXiv:2503.01840): step ``k`` at row ``t`` sees the step-0 keys of rows ``≤ t`` and the keys of
steps ``1 … k`` at its own row only, exactly what drafting ``k`` tokens after row ``t`` sees.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# B sequence, R wanted row, T row, N attention head, G query heads per key head, D head dimension.


def training_time_test_attention(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Attention of step ``k = len(keys) - 1`` at the wanted rows, ``[B, N, R, D]``.

    ``q``: ``[B, N, R, D]``, of positions ``rows`` ``[B, R]``. ``keys[0]``, ``values[0]``: ``[B, N_kv, T, D]``
    of all rows; those of later steps ``[B, N_kv, R, D]``. A row at ``t`` attends to step-0 keys of rows ``≤ t``
    and to its own keys of later steps, in one softmax.
    """
    length = keys[0].shape[2]
    seen = torch.arange(length, device=q.device) <= rows[..., None]  # [B, R, T]
    if len(keys) == 1:
        return scaled_dot_product_attention(q, keys[0], values[0], attn_mask=seen[:, None], enable_gqa=True)
    groups = q.shape[1] // keys[0].shape[1]
    q = q.unflatten(1, (-1, groups)) * q.shape[-1] ** -0.5  # [B, N_kv, G, R, D]
    past = q @ keys[0][:, :, None].transpose(-1, -2)  # [B, N_kv, G, R, T]
    past = past.masked_fill(~seen[:, None, None], float("-inf"))
    own = torch.stack([(q * key[:, :, None]).sum(-1) for key in keys[1:]], dim=-1)  # [B, N_kv, G, R, k]
    weights = torch.cat([past, own], dim=-1).float().softmax(-1).to(q.dtype)
    out = weights[..., :length] @ values[0][:, :, None]
    for i, value in enumerate(values[1:]):
        out = out + weights[..., length + i, None] * value[:, :, None]
    return out.flatten(1, 2)
