"""Attention of a pass over a few tokens, as verification needs it: query heads that share a key are packed into rows.

transformers' ``sdpa`` expands keys and values to every query head when it is given a mask and several query rows,
which copies the whole cache in every layer of every verification pass. Packed, the cache is read in place: the same
products and sums in less time.

In bf16 on a CPU torch's fused attention takes longer for few query rows than two batched products do. Scores and their
softmax are in fp32 here as there, and weights are rounded to bf16 before they meet the values: here behind their
division by the sum, which makes the mean error somewhat larger. So products are taken within ``quick_attention``
alone, where answers are written; where decodings are compared with each other, all attention is torch's.

A recipe's low-bit attention has its place here too: a module's ``LowBitAttention`` computes in its stead.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED_SDPA = "packed_sdpa"
"""Give this to transformers as ``attn_implementation``."""
LOW_BIT_ATTENTION = "low_bit_attention"
"""The implementation under which every attention module computes with what ``place_low_bit`` gave it."""
_WATCHED = "watched_attention"
_PLACE = "low_bit_attention"
_NOT_COMPUTED = ("softcap", "position_bias", "s_aux")  # options that add to scores what is not computed here
_FEW = 16  # query rows up to which the cache, not the product, is the cost
_MANY_KEYS = 2**17  # elements from which two products take less time than torch's fused attention in bf16
_QUICK = ContextVar("quick attention", default=False)
_NEAR_BYTES = 2**21  # of keys in fp32 at a time: what two cores' own caches hold, so that the copy stays there


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """``query`` ``[B, N, T, D]`` over ``key``, ``value`` ``[B, N_kv, S, D]`` with ``mask`` ``[B, 1, T, S]`` (True:
    attend): ``[B, N, T, D]``, equal to ``scaled_dot_product_attention(…, enable_gqa=True)``."""
    batch, heads, rows, width = query.shape
    groups = heads // key.shape[1]
    packed = query.reshape(batch, heads // groups, groups * rows, width)
    attend = by_products if _products_gain(query, key) else scaled_dot_product_attention
    out = attend(packed, key, value, attn_mask=mask.repeat(1, 1, groups, 1), scale=scale)
    return out.reshape(batch, heads, rows, -1)


def by_products(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, scale: float | None = None) -> Tensor:
    """``scaled_dot_product_attention`` as it is defined, with scores and softmax in fp32: ``[B, N, T, E]``."""
    scaled = query.float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    few = max(1, _NEAR_BYTES // max(1, 4 * key[0].numel()))
    parts = zip(scaled.split(few), key.split(few), strict=True)
    scores = torch.cat([torch.matmul(q, k.float().transpose(2, 3)) for q, k in parts])  # [B, N, T, S]
    weights = scores.masked_fill_(~attn_mask, -torch.inf).softmax(-1)
    return torch.matmul(weights.to(value.dtype), value)


@contextmanager
def quick_attention() -> Iterator[None]:
    """Within the block attention of few rows in bf16 goes by two products where that takes less time."""
    before = _QUICK.set(True)
    try:
        yield
    finally:
        _QUICK.reset(before)


def _products_gain(query: Tensor, key: Tensor) -> bool:
    if not _QUICK.get():
        return False
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and key.numel() >= _MANY_KEYS


def _packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    few = query.shape[2] <= _FEW and not options.get("dropout")
    plain = all(options.get(name) is None for name in _NOT_COMPUTED)
    gains = query.shape[1] != key.shape[1] if query.shape[2] > 1 else _products_gain(query, key)
    if few and plain and gains and _is_shared(attention_mask):
        out = grouped_attention(query, key, value, attention_mask, scaling)
        return out.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)


def _is_shared(mask: Tensor | None) -> TypeGuard[Tensor]:
    """Whether this is a boolean mask that all heads have in common."""
    return mask is not None and mask.dtype == torch.bool and mask.shape[1] == 1


def _low_bit(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return getattr(module, _PLACE)(query, key, value, attention_mask, scale), None


def place_low_bit(module: nn.Module, attention: nn.Module) -> None:
    """Let ``attention`` compute for the attention module ``module``: ``(query [B, N, T, D], key [B, M, S, D], value
    [B, M, S, E], mask, scale)`` → ``[B, T, N, E]``."""
    module.add_module(_PLACE, attention)


@contextmanager
def attention_calls(model: nn.Module) -> Iterator[list[nn.Module]]:
    """The attention modules of ``model``, in the order in which they ask for their attention while the block runs.

    Raises ``ValueError`` for attention that has more to it than ``LowBitAttention`` computes.
    """
    called: list[nn.Module] = []

    def note(module: nn.Module, *tensors: Any, **options: Any) -> Any:
        more = [name for name in _NOT_COMPUTED if options.get(name) is not None]
        if more:
            raise ValueError(f"{type(module).__name__} has {more[0]}, which low-bit attention does not compute")
        called.append(module)
        return _packed_sdpa(module, *tensors, **options)

    before: str = model.config._attn_implementation  # type: ignore[union-attr, assignment]
    _register(_WATCHED, note)
    _switch(model, _WATCHED)
    try:
        yield called
    finally:
        _switch(model, before)


def use_low_bit(model: nn.Module) -> None:
    """From now on every attention module computes with what was placed in it."""
    _switch(model, LOW_BIT_ATTENTION)


def _switch(model: Any, implementation: str) -> None:
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation


def _register(name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)


_register(PACKED_SDPA, _packed_sdpa)
_register(LOW_BIT_ATTENTION, _low_bit)
