"""Fake-quantization with a straight-through gradient.

Forward: quantize and dequantize. Backward: the gradient passes as if nothing had happened, except where
the value saturated (Bengio et al. 2013, arXiv:1308.3432; clipping as in PACT, arXiv:1805.06085). A scale that
follows the largest magnitude never saturates; a static scale (NVFP4 activations, FP8 KV cache) does.
"""

from typing import Any

import torch
from torch import Tensor

from bitdraft.quant.block import dequantize, quantize
from bitdraft.quant.schemes import Scheme
from bitdraft.quant.smallfloat import E4M3


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, passes: Tensor | None) -> Tensor:
        ctx.passes = passes
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        return (grad if ctx.passes is None else grad * ctx.passes), None, None


def straight_through(x: Tensor, y: Tensor, passes: Tensor | None = None) -> Tensor:
    """``y`` in the forward pass, the gradient of ``x`` in the backward pass, zero where ``passes`` is False."""
    return _StraightThrough.apply(x, y, passes)


def saturates_above(scheme: Scheme, global_scale: Tensor | None) -> Tensor | None:
    """The magnitude above which ``scheme`` clips, or ``None`` where its scale follows the maximum."""
    if global_scale is None:
        return None
    if scheme.scale == "static":
        return scheme.element.max * global_scale
    if not scheme.has_global_scale:
        return None
    return E4M3.max * scheme.element.max / global_scale


def fake(x: Tensor, scheme: Scheme, *, global_scale: Tensor | None = None) -> Tensor:
    """``x`` rounded to ``scheme``, in ``x``'s own dtype and shape ``[..., K]``, without a gradient: quantization and
    dequantization fused, equal to ``decode(encode(x))`` in ``quant/codes.py`` rounded to ``x``'s dtype.

    Arguments and errors as in ``quant/block.py``'s ``quantize``. ``torch.compile`` makes one vectorized pass of it,
    with the same bits.
    """
    return dequantize(quantize(x, scheme, global_scale=global_scale)).to(x.dtype)


def fake_quantize(
    x: Tensor, scheme: Scheme, *, global_scale: Tensor | None = None, clip_gradient: bool = True
) -> Tensor:
    """``x`` rounded to ``scheme``, in ``x``'s own dtype and shape ``[..., K]``, differentiable straight through.

    ``clip_gradient=False`` keeps the gradient of saturated values too.
    """
    with torch.no_grad():
        y = fake(x, scheme, global_scale=global_scale)
        limit = saturates_above(scheme, global_scale) if clip_gradient else None
        passes = None if limit is None else x.abs().float() <= limit
    if not (torch.is_grad_enabled() and x.requires_grad):
        return y  # a tensor of its own already
    return straight_through(x, y, passes)
