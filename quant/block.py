"""Scale rules, quantization and dequantization of blocks along the last dimension.

Everything is computed in fp32 from the input's own values, whatever its dtype, as the engines' kernels
do. A quantized tensor is kept as two factors, so that a matrix product can be computed the way the
engines compute it (unscaled products accumulated in fp32, one scaling, one rounding):

* ``values``: element codes times the *inner* scale (power-of-two or E4M3 block scale). At most six
  significant bits, so they are exact in bf16.
* ``outer``: the fp32 scale that cannot be folded in without rounding: per row (FP8) or per tensor
  (NVFP4); ``None`` where there is none (MX formats).

Rows are vectors along the last dimension; shapes below write them ``[..., K]``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bitdraft.quant.schemes import Scheme
from bitdraft.quant.smallfloat import E2M1, E4M3

# vLLM's csrc/quantization/w8a8/fp8: tokens whose largest magnitude is below 1/512 share this scale.
_FP8_TOKEN_SMALLEST_SCALE = 1.0 / (448.0 * 512.0)
_NVFP4_RANGE = E4M3.max * E2M1.max  # 2688: the largest magnitude that one fp32 scale can reach
_NVFP4_ZERO_BLOCK_SCALE = 0.125  # what compressed-tensors stores for a block of zeros


@dataclass(frozen=True)
class Quantized:
    """``values · outer`` is the dequantized tensor. ``scale`` is the block scale, for inspection and storage."""

    values: Tensor  # [..., K] fp32: codes · inner scale, exact in bf16
    outer: Tensor | None  # [..., 1] fp32 per row, [] fp32 per tensor, or None
    scale: Tensor  # [..., K / block] fp32 decode scales of the blocks


def check_divides(columns: int, scheme: Scheme) -> None:
    """``ValueError`` where rows of ``columns`` elements cannot be cut into whole blocks of ``scheme``."""
    if scheme.block and columns % scheme.block:
        raise ValueError(f"{columns} columns do not divide into blocks of {scheme.block} ({scheme.name})")


def row_scale(amax: Tensor, scheme: Scheme) -> Tensor:
    """fp32 decode scale of whole rows from their largest magnitudes (rules ``amax``, ``amax-floored``).

    A row of zeros under ``amax`` gets scale 1, so that it stays zero instead of becoming 0/0.
    """
    scale = amax / scheme.element.max
    if scheme.scale == "amax-floored":
        return scale.clamp(min=_FP8_TOKEN_SMALLEST_SCALE)
    # A subnormal scale is too coarse to keep amax / scale within the range.
    return torch.where(amax == 0, torch.ones_like(scale), scale.clamp(min=torch.finfo(torch.float32).tiny))


def e8m0_scale(amax: Tensor, scheme: Scheme) -> Tensor:
    """Power-of-two decode scale of MX blocks (OCP MX v1.0 §6.3 with the rule's own rounding).

    ``even`` adds half a unit of the element's mantissa to the bits of ``amax`` before its exponent is
    taken; ``rceil`` rounds the exponent of ``amax · fl(1/max)`` up. Exponents saturate at the E8M0 range;
    a block with NaN or infinity becomes NaN as a whole (E8M0 byte 255; engines do not agree here).
    """
    if scheme.scale == "even":
        half_unit = 1 << (22 - scheme.element.mantissa_bits)
        byte = ((amax.view(torch.int32) + half_unit) >> 23) - scheme.element.max_exponent
    else:
        bits = (amax * torch.tensor(1.0 / scheme.element.max, dtype=torch.float32)).view(torch.int32)
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        # A subnormal ratio lies above 2^-127 (byte 0) only if its mantissa exceeds 2^22.
        up = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
        byte = exponent + up
    byte = byte.clamp(0, 254)
    scale = torch.where(byte == 0, 0x00400000, byte << 23).view(torch.float32)  # 2^(byte - 127)
    return torch.where(torch.isfinite(amax), scale, torch.nan)


def nvfp4_global_scale(amax: Tensor) -> Tensor:
    """NVFP4's fp32 *encode* scale ``2688 / amax`` (compressed-tensors' ``weight_global_scale``).

    1 for zeros and for what is so small (below 8e-36) that the quotient overflows; NaN stays NaN.
    """
    smallest = _NVFP4_RANGE / torch.finfo(torch.float32).max
    return torch.where(amax <= smallest, torch.ones_like(amax), _NVFP4_RANGE / amax)


def quantize(x: Tensor, scheme: Scheme, *, global_scale: Tensor | None = None) -> Quantized:
    """Quantize ``x`` along its last dimension.

    ``x``: ``[..., K]``, bf16, fp16 or fp32. ``global_scale``: NVFP4 only, an fp32 encode scale that is
    fixed beforehand (an activation's, from calibration; a weight's, shared by fused layers); by default
    ``2688 / amax`` of ``x`` itself. Raises ``ValueError`` if ``K`` does not divide into blocks.
    """
    if scheme.block is None:
        amax = x.abs().amax(dim=-1, keepdim=True).float()
        scale = row_scale(amax, scheme)
        # |x / scale| is at most max · (1 + 2^-23), which rounds to max: no clamp is needed.
        values = scheme.element.round(x.float() / scale, saturate=False)
        return Quantized(values, outer=scale, scale=scale)

    check_divides(x.shape[-1], scheme)
    blocks = x.unflatten(-1, (-1, scheme.block))  # [..., K/block, block]
    amax = blocks.abs().amax(dim=-1, keepdim=True).float()
    if scheme.has_global_scale:
        encode = nvfp4_global_scale(amax.amax()) if global_scale is None else global_scale
        return _quantize_two_level(blocks.float(), amax, encode, scheme)
    scale = e8m0_scale(amax, scheme)
    values = scheme.element.round(blocks.float() / scale) * scale
    return Quantized(values.flatten(-2), outer=None, scale=scale.squeeze(-1))


def _quantize_two_level(blocks: Tensor, amax: Tensor, encode: Tensor, scheme: Scheme) -> Quantized:
    """NVFP4: the E4M3 scale of each block under the fp32 scale ``1 / encode``; two orders of arithmetic."""
    if scheme.scale == "two-level":
        scale = E4M3.round(encode * (amax / scheme.element.max))
        scale = torch.where(scale == 0, _NVFP4_ZERO_BLOCK_SCALE, scale)
        codes = scheme.element.round(blocks / (scale / encode))
    else:
        scale = E4M3.round(encode * (amax * torch.tensor(1.0 / scheme.element.max, dtype=torch.float32)))
        inverse = torch.where(scale == 0, 0.0, 1.0 / (scale * (1.0 / encode)))
        codes = scheme.element.round(blocks * inverse)
    return Quantized((codes * scale).flatten(-2), outer=1.0 / encode, scale=scale.squeeze(-1))


def dequantize(q: Quantized) -> Tensor:
    """``[..., K]`` fp32: the values that ``q`` stands for, one fp32 rounding per element."""
    return q.values if q.outer is None else q.values * q.outer
