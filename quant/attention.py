"""Attention of a pass over a few tokens, as verification needs it: query heads that share a key are packed into rows.

transformers' ``sdpa`` expands keys and values to every query head when it is given a mask and several query rows,
which copies the whole cache in every layer of every verification pass. Packed, the cache is read in place: the same
products and sums in less time.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED_SDPA = "packed_sdpa"
"""Give this to transformers as ``attn_implementation``."""
_FEW = 16  # query rows up to which the cache, not the product, is the cost


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """``query`` ``[B, N, T, D]`` over ``key``, ``value`` ``[B, N_kv, S, D]`` with ``mask`` ``[B, 1, T, S]`` (True:
    attend): ``[B, N, T, D]``, equal to ``scaled_dot_product_attention(…, enable_gqa=True)``."""
    batch, heads, rows, width = query.shape
    groups = heads // key.shape[1]
    packed = query.reshape(batch, heads // groups, groups * rows, width)
    out = scaled_dot_product_attention(packed, key, value, attn_mask=mask.repeat(1, 1, groups, 1), scale=scale)
    return out.reshape(batch, heads, rows, width)


def _packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    grouped = query.shape[1] != key.shape[1] and 1 < query.shape[2] <= _FEW and not options.get("dropout")
    if grouped and _is_shared(attention_mask):
        out = grouped_attention(query, key, value, attention_mask, scaling)
        return out.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)


def _is_shared(mask: Tensor | None) -> TypeGuard[Tensor]:
    """Whether this is a boolean mask that all heads have in common."""
    return mask is not None and mask.dtype == torch.bool and mask.shape[1] == 1


AttentionInterface.register(PACKED_SDPA, _packed_sdpa)
AttentionMaskInterface.register(PACKED_SDPA, sdpa_mask)
