"""Straight-through gradients: how low-bit tensors are trained.

Forward: quantize and dequantize. Backward: the gradient passes as if nothing had happened, except where the value
saturated (Bengio et al. 2013, arXiv:1308.3432; clipping as in PACT, arXiv:1805.06085). A scale that follows the
largest magnitude never saturates, so that everything passes, the largest value included, which a clamp would stop;
a static scale (NVFP4 activations, FP8 KV cache) does saturate. The scale itself counts as a constant here; scales
that are trained are in ``quant/learned_scale.py``.

The gradient never depends on the quantized values, and is not quantized itself: libraries that differentiate through
the scale and cast the gradient to the element lose small gradients entirely.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from bitdraft.quant.fake import fake
from bitdraft.quant.schemes import Scheme
from bitdraft.quant.smallfloat import E4M3

Saturation = Literal["mask", "identity"]
"""What becomes of the gradient where the value saturates: nothing of it passes, or all of it."""


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, passes: Tensor | None) -> Tensor:
        if passes is not None:  # saved, not kept as an attribute: so checkpointing can drop it and make it again
            ctx.save_for_backward(passes)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        saved = ctx.saved_tensors  # asked for once: checkpointing hands them out only once
        return (grad * saved[0] if saved else grad), None, None


def straight_through(x: Tensor, y: Tensor, passes: Tensor | None = None) -> Tensor:
    """``y`` in the forward pass, the gradient of ``x`` in the backward pass, zero where ``passes`` is False.

    ``y`` has ``x``'s shape and dtype, ``passes`` is bool of that shape.
    """
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


def fake_quantize(
    x: Tensor, scheme: Scheme, *, global_scale: Tensor | None = None, saturation: Saturation = "mask"
) -> Tensor:
    """``x`` rounded to ``scheme``, in ``x``'s own dtype and shape ``[..., K]``, differentiable straight through.

    The values are those of ``fake``, bit for bit; arguments and errors as there. ``saturation``: whether the gradient
    of saturated values is zero ("mask") or passes too ("identity").
    """
    with torch.no_grad():
        y = fake(x, scheme, global_scale=global_scale)
        limit = saturates_above(scheme, global_scale) if saturation == "mask" else None
        passes = None if limit is None else x.abs().float() <= limit
    if not (torch.is_grad_enabled() and x.requires_grad):
        return y  # a tensor of its own already
    return straight_through(x, y, passes)
