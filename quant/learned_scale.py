"""Scales that are trained along with the weights: learned step sizes.

Esser et al. 2020 (arXiv:1902.08153, LSQ). With the value in steps ``z = x / s`` and its code ``q = round(clip(z))``
between ``-Qn`` and ``Qp``, the fake-quantized ``y = q s`` has straight-through gradients

    ∂y/∂x = 1 where -Qn ≤ z ≤ Qp, else 0          ∂y/∂s = q - z where -Qn ≤ z ≤ Qp, else q (that is, -Qn or Qp)

that is, those of ``y`` with the rounding error ``q - z`` held constant. ``∂y/∂s`` is summed over the N elements that
share ``s`` and multiplied by ``1 / sqrt(N · Qp)``, so that a step of the optimizer moves scales by about the same share
as it moves weights.

A scale is a parameter in fp32, kept positive (its magnitude is what counts) and rounded, straight through, to what the
format stores. NVFP4's block scales go on following the maximum of their block; learned is the fp32 scale above them,
``d``. It acts through the rounding of the E4M3 scales ``e = round(A / (6 d))`` and through their largest value:

    ∂(e d)/∂d = e - A / (6 d), or e = 448 where A / (6 d) lies above it
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bitdraft.quant.block import Quantized, check_divides, dequantize, quantize, spread
from bitdraft.quant.scale_rules import multiplier
from bitdraft.quant.schemes import Scheme
from bitdraft.quant.smallfloat import E4M3
from bitdraft.quant.smallint import SmallInt
from bitdraft.quant.straight_through import Saturation, saturates_above, straight_through

Start = Literal["maximum", "mean"]

_LEARNABLE = ("amax", "amax-floored", "amax-or-zero", "amax-1e-10", "amax-1e-4", "static", "range")


class _Step(torch.autograd.Function):
    """``y`` in ``x``'s dtype with the gradients of the module's docstring for ``x`` and for the step ``s``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, step: Tensor, y: Tensor, inside: Tensor, reached: Tensor | None, masks: bool, weight: float
    ) -> Tensor:
        ctx.save_for_backward(x, step, y, inside, *([] if reached is None else [reached]))
        ctx.masks, ctx.weight = masks, weight
        return y.to(x.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None, None]:
        (grad,) = grads
        x, step, y, inside, *reached = ctx.saved_tensors
        # (q - z) s is y - x; a step of 0 has only zeros under it.
        moved = (y - x.float() * inside) / step.clamp(min=torch.finfo(torch.float32).tiny)
        return (
            grad * (reached[0] if reached else inside) if ctx.masks else grad,
            (grad.float() * moved * ctx.weight).sum_to_size(step.shape),
            None,
            None,
            None,
            None,
            None,
        )


class LearnedScale(nn.Module):
    """Fake-quantization to ``scheme`` under a scale that is a parameter.

    For formats with one fp32 scale per tensor, row or group (FP8, integers without zero points), and for the global
    scale of NVFP4. Power-of-two scales cannot be learned in steps: ``quant/scales`` searches them.
    """

    def __init__(
        self,
        x: Tensor,
        scheme: Scheme,
        *,
        start: Start = "maximum",
        saturation: Saturation = "mask",
        sharing: int | None = None,
    ) -> None:
        """Scales for tensors like ``x`` ``[..., K]``: one for each of its rows or groups, or one for all.

        ``start``: "maximum" begins with the scales of ``fake`` (for a static format with those that just reach the
        largest value), "mean" with LSQ's ``2 mean|x| / sqrt(Qp)``, for integers. ``saturation`` as in
        ``fake_quantize``. ``sharing``: the N of the gradient, by default the elements of ``x`` per scale; for
        activations the paper counts those of one token.

        Raises ``ValueError`` for a format whose scale cannot be learned, a ``K`` that does not divide into groups,
        and an ``x`` that is not finite.
        """
        super().__init__()
        _check(x, scheme, start)
        self.scheme, self.saturation, self.dtype = scheme, saturation, x.dtype
        scale = _mean_scale(x.detach(), scheme) if start == "mean" else _maximum_scale(x.detach(), scheme)
        self.scale = nn.Parameter(scale.float().clone())  # [], [..., 1] or [..., G] decode scales; NVFP4: 1 / encode
        largest = scheme.element.max * (E4M3.max if scheme.has_global_scale else 1.0)
        self.gradient_weight = 1.0 / math.sqrt((sharing or x.numel() // scale.numel()) * largest)

    def stored(self) -> Tensor:
        """The scales as the format stores them, in fp32 and positive; differentiable straight through."""
        positive = self.scale.abs().clamp(min=torch.finfo(torch.float32).tiny)
        if self.scheme.arithmetic == "fp32":
            return positive
        kept = positive.detach().to(self.dtype).clamp(min=torch.finfo(self.dtype).tiny).float()
        return straight_through(positive, kept)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` rounded to the format, in its own dtype; equal to ``dequantize(self.quantized(x))`` in it."""
        with torch.autocast(x.device.type, enabled=False):
            stored = self.stored()
            q = self._quantize(x, stored)
            y = dequantize(q)
            step = self._step(x, q, stored)
            with torch.no_grad():
                z = x.float() / step.clamp(min=torch.finfo(torch.float32).tiny)
                inside = (z >= self.scheme.element.min) & (z <= self.scheme.element.max)
                # NVFP4's block scales follow the maximum: only what the largest of them cannot reach saturates.
                limit = saturates_above(self.scheme, 1.0 / stored) if self.scheme.has_global_scale else None
                reached = None if limit is None else x.abs().float() <= limit
            return _Step.apply(x, step, y, inside, reached, self.saturation == "mask", self.gradient_weight)

    @torch.no_grad()
    def quantized(self, x: Tensor) -> Quantized:
        """``x`` in two factors, as ``LowBitLinear`` takes its weight."""
        return self._quantize(x, self.stored())

    @torch.no_grad()
    def _quantize(self, x: Tensor, stored: Tensor) -> Quantized:
        scheme = self.scheme
        if scheme.arithmetic != "fp32" and x.dtype != torch.float32 and torch.compiler.is_compiling():
            raise ValueError(f"{scheme.name} in {x.dtype} computes in that dtype, which torch.compile would not")
        if scheme.has_global_scale:
            return quantize(x, scheme, global_scale=1.0 / stored)
        if scheme.scale == "static":
            return quantize(x, scheme, global_scale=stored)
        if self.scale.ndim and self.scale.shape[:-1] != x.shape[:-1]:
            raise ValueError(f"scales of shape {list(self.scale.shape)} do not fit a tensor of {list(x.shape)}")
        work = x.float() if scheme.arithmetic != "input" else x
        step, factor = self._spread(stored, x).to(work.dtype), multiplier(stored, stored, scheme)
        quotient = work / step if factor is None else work * self._spread(factor, x)
        return Quantized(scheme.element.round(quotient.float()), stored, stored, scheme.block)

    def _spread(self, scale: Tensor, x: Tensor) -> Tensor:
        return scale if self.scheme.block is None else spread(scale, self.scheme.block, x.shape[-1])

    def _step(self, x: Tensor, q: Quantized, stored: Tensor) -> Tensor:
        """What one code is worth, for every element (or broadcast to it), differentiable in the learned scale."""
        scheme = self.scheme
        if not scheme.has_global_scale:
            return self._spread(stored, x)
        assert scheme.block is not None
        amax = x.detach().float().unflatten(-1, (-1, scheme.block)).abs().amax(-1)
        exact = (amax / (scheme.element.max * stored)).clamp(max=E4M3.max)
        return spread(straight_through(exact, q.scale) * stored, scheme.block, x.shape[-1])

    def extra_repr(self) -> str:
        return f"{self.scheme.name}, {self.scale.numel()} scales"


def _check(x: Tensor, scheme: Scheme, start: Start) -> None:
    learnable = scheme.scale in _LEARNABLE and scheme.rows in (1, None)
    if not learnable and not scheme.has_global_scale:
        raise ValueError(
            f"the scales of {scheme.name} cannot be learned: only fp32 scales of a tensor, row or group without zero "
            "points can, and the global scale of NVFP4"
        )
    if start == "mean" and not isinstance(scheme.element, SmallInt):
        raise ValueError(f"start 'mean' is for integers: {scheme.name} begins with 'maximum'")
    check_divides(x.shape[-1], scheme)
    if x.numel() == 0 or not torch.isfinite(x).all():
        raise ValueError(f"a scale for {scheme.name} cannot begin from a tensor that is empty, or not finite")


def _maximum_scale(x: Tensor, scheme: Scheme) -> Tensor:
    if scheme.scale == "static":
        return x.abs().amax().float() / scheme.element.max
    q = quantize(x, scheme)
    if scheme.has_global_scale:
        assert q.outer is not None
        return q.outer
    return q.scale


def _mean_scale(x: Tensor, scheme: Scheme) -> Tensor:
    if scheme.rows is None:
        mean = x.float().abs().mean()
    else:
        mean = x.float().abs().unflatten(-1, (-1, scheme.block or x.shape[-1])).mean(-1)
    return 2 * mean / math.sqrt(scheme.element.max)
