"""From the largest magnitude of a block to its scale: one small function per published rule.

Scales here are *decode* scales: a value is code times scale. Everything is computed in fp32 or, where the
scheme says so (``Scheme.arithmetic``), rounded to the input's dtype; E8M0 rules read the exponent off fp32 bits,
because ``log2`` is one off just below powers of two. Shapes: one number per block, whatever the shape.
"""

import torch
from torch import Tensor

from bitdraft.quant.schemes import Scheme
from bitdraft.quant.smallfloat import E2M1, E4M3, SmallFloat

NVFP4_RANGE = E4M3.max * E2M1.max  # 2688: the largest magnitude that one fp32 scale can reach
_NVFP4_ZERO_BLOCK_SCALE = 0.125  # what compressed-tensors stores for a block of zeros
_SMALLEST_AMAX = {"amax-1e-10": 1e-10, "pow2-1e-10": 1e-10, "amax-1e-4": 1e-4, "pow2-1e-4": 1e-4}
_MANTISSA, _EXPONENT = 0x7FFFFF, 0x7F800000  # the bits of an fp32 number
_SMALLEST_E8M0 = 0x00400000  # the bits of 2^-127, which is subnormal


def fp32_scale(amax: Tensor, scheme: Scheme, dtype: torch.dtype = torch.float32) -> Tensor:
    """Scale of rows, groups and two-dimensional blocks from their largest magnitudes (all one-level fp32 rules).

    ``amax``: fp32. ``dtype``: what the scale is rounded to (``amax``, ``range``).

    A block of zeros gets some scale above 0 where the rule has no floor, so that it stays zero instead of 0/0.
    """
    largest = scheme.element.max
    if scheme.scale in _SMALLEST_AMAX:
        scale = amax.clamp(min=_SMALLEST_AMAX[scheme.scale]) / largest
        if scheme.scale.startswith("pow2"):
            return power_of_two_above(scale.clamp(min=1e-10)) + 0.0 * scale
        return scale
    if scheme.scale == "amax-reciprocal":
        return amax.clamp(min=1e-10) * torch.tensor(1.0 / largest, dtype=torch.float32)
    if scheme.scale == "amax-or-zero":
        return amax / largest
    if scheme.scale == "amax-floored":
        # vLLM's csrc/quantization/w8a8/fp8: tokens whose largest magnitude is below 1/512 share this scale.
        return (amax / largest).clamp(min=1.0 / (largest * 512.0))
    if scheme.scale == "hf-inverse":
        scale = 1.0 / _finite(largest / amax)
    elif scheme.scale == "range":
        scale = rounded_to(amax / ((largest - scheme.element.min) / 2), dtype)
    else:
        scale = rounded_to(amax / largest, dtype)
    # A subnormal scale is too coarse to keep amax / scale within the range.
    limits = torch.finfo(dtype)
    return torch.where(amax == 0, _of_zeros(scheme, limits), scale.clamp(min=limits.tiny))


def _of_zeros(scheme: Scheme, limits: torch.finfo) -> float:
    """The scale of a block of zeros: any will do; libraries that compute in the weights' dtype take its epsilon."""
    return limits.eps if scheme.arithmetic == "input" else 1.0


def multiplier(amax: Tensor, scale: Tensor, scheme: Scheme) -> Tensor | None:
    """What values are multiplied by to become codes, or ``None`` where the rule divides them by ``scale``."""
    if scheme.scale in ("amax-reciprocal", "hf-inverse"):
        amax = amax.clamp(min=1e-10) if scheme.scale == "amax-reciprocal" else torch.where(amax == 0, 1.0, amax)
        return _finite(scheme.element.max / amax)
    if not scheme.reciprocal:
        return None
    return torch.where(scale == 0, torch.zeros_like(scale), _finite(1.0 / scale))


def _finite(x: Tensor) -> Tensor:
    """The inverse of a scale, at most that of the smallest normal one: infinity times zero is no number."""
    return x.clamp(max=1.0 / torch.finfo(x.dtype).tiny)


def zero_point_scale(
    lowest: Tensor, highest: Tensor, scheme: Scheme, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Scale and zero point (an integer of the element's range) of ``range-zero-point``, compressed-tensors' order.

    fp32 with every result rounded to ``dtype``. The range always contains zero, so that zero is a code of its own.
    """
    element, limits = scheme.element, torch.finfo(dtype)
    lowest, highest = lowest.clamp(max=0), highest.clamp(min=0)
    scale = rounded_to(rounded_to(highest - lowest, dtype) / (element.max - element.min), dtype)
    scale = scale.clamp(min=limits.tiny)
    zero = element.round(rounded_to(element.min - rounded_to(lowest / scale, dtype), dtype))
    scale = torch.where(torch.isfinite(scale), scale, torch.nan)  # else codes would mean infinity, not NaN
    zeros = highest == lowest
    return torch.where(zeros, _of_zeros(scheme, limits), scale), torch.where(zeros, 0.0, zero)


def integer_quotient(work: Tensor, scale: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """``work / scale`` rounded to ``dtype``, on its way to an integer code; ``work`` fp32, ``scale`` as it broadcasts.

    Where everything is bf16, the product with the fp32 inverse rounds to the same number and costs less: a quotient of
    two 8-bit mantissas is at least 2^-17 of itself away from every middle of two bf16 numbers, the product within 2^-22
    of the quotient.
    """
    if dtype == torch.bfloat16:
        return rounded_to(work * kept(1.0 / scale, scheme), dtype, bounded=True)
    return rounded_to(work / scale, dtype, bounded=True)


def rounded_to(v: Tensor, dtype: torch.dtype, *, bounded: bool = False) -> Tensor:
    """``v`` (fp32) rounded to ``dtype`` as a cast rounds, and still fp32: what a library computes that never leaves
    its weights' dtype. ``bounded`` says that ``v`` is a quotient on its way to a code, far below 2^100.

    Compilers drop a cast there and back, so that there the rounding is arithmetic. What is subnormal in ``dtype`` may
    then keep more bits than it should: no code depends on them.
    """
    if dtype == torch.float32 or not torch.compiler.is_compiling():
        return v.to(dtype).float()
    dropped = 16 if dtype == torch.bfloat16 else 13
    if bounded:
        scaled = v * (2.0**dropped + 1)  # Veltkamp's splitting; a middle goes to even, as v has no bits below it
        return scaled - (scaled - v)
    bits = v.view(torch.int32)
    half = (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)
    rounded = ((bits + half) & -(1 << dropped)).view(torch.float32)
    if dtype == torch.bfloat16:
        return torch.where(v.isnan(), v, rounded)  # the sum makes zero of the NaN whose bits are all ones
    return torch.where(v.abs() < 65520.0, rounded, v * torch.inf)


def e8m0_scale(amax: Tensor, scheme: Scheme) -> Tensor:
    """Power-of-two scale of MX blocks (OCP MX v1.0 §6.3 with the rule's own rounding), fp32.

    Exponents saturate at the E8M0 range; a block with NaN or infinity becomes NaN as a whole (byte 255; engines
    do not agree here).
    """
    element, rule = scheme.element, scheme.scale
    assert isinstance(element, SmallFloat)
    if rule == "rceil":
        scale = power_of_two_above(amax * torch.tensor(1.0 / element.max, dtype=torch.float32))
    else:
        bits = amax.view(torch.int32)
        if rule == "ceil":
            bits = bits + _MANTISSA
        elif rule in ("even", "even-fp4"):
            bits = bits + (1 << (22 - (element.mantissa_bits if rule == "even" else E2M1.mantissa_bits)))
        exponent = (bits & _EXPONENT) - (element.max_exponent << 23)
        scale = exponent.clamp(min=_SMALLEST_E8M0).view(torch.float32)
    return scale + 0.0 * amax  # NaN where amax is no finite number


def power_of_two_above(x: Tensor) -> Tensor:
    """The smallest power of two from 2^-127 up that is not below ``x``, fp32 and not negative, up to 2^127."""
    bits = x.view(torch.int32)
    above = (bits + _MANTISSA) & _EXPONENT
    return torch.where(bits <= _SMALLEST_E8M0, _SMALLEST_E8M0, above).view(torch.float32)


def e8m0_values(byte: Tensor) -> Tensor:
    """``2^(byte - 127)`` in fp32 for integers 0 to 254; 2^-127 is subnormal."""
    byte = byte.to(torch.int32)
    return torch.where(byte == 0, _SMALLEST_E8M0, byte << 23).view(torch.float32)


def nvfp4_global_scale(amax: Tensor) -> Tensor:
    """NVFP4's fp32 *encode* scale ``2688 / amax`` (compressed-tensors' ``weight_global_scale``).

    1 for zeros and for what is so small (below 8e-36) that the quotient overflows; NaN stays NaN.
    """
    smallest = NVFP4_RANGE / torch.finfo(torch.float32).max
    return torch.where(amax <= smallest, torch.ones_like(amax), NVFP4_RANGE / amax)


def nvfp4_decode_scale(amax: Tensor) -> Tensor:
    """NVFP4's fp32 *decode* scale ``amax / 2688`` (modelopt's ``weight_scale_2``); 1 where its inverse overflows."""
    smallest = NVFP4_RANGE / torch.finfo(torch.float32).max
    return torch.where(amax <= smallest, torch.ones_like(amax), amax / NVFP4_RANGE)


def e4m3_scale(amax: Tensor, scheme: Scheme, encode: Tensor, decode: Tensor) -> Tensor:
    """NVFP4's E4M3 block scale, as fp32 values, under a global scale given in both conventions."""
    largest = scheme.element.max
    if scheme.scale == "two-level":
        # compressed-tensors keeps its global scale in fp32, so this product is exact to fp32 for 16-bit weights too.
        scale = E4M3.round(encode.float() * (amax / largest).float())
        return torch.where(scale == 0, _NVFP4_ZERO_BLOCK_SCALE, scale)
    if scheme.scale == "two-level-kernel":
        return E4M3.round(encode * (amax * torch.tensor(1.0 / largest, dtype=torch.float32)))
    if scheme.scale == "two-level-modelopt":
        ratio = amax / (largest * decode)
        return torch.where(ratio == 0, 1.0, E4M3.round(ratio.clamp(min=2.0**-9)))
    return E4M3.round(((amax / largest) / decode).clamp(min=E4M3.min_normal))


def nvfp4_codes(blocks: Tensor, scale: Tensor, scheme: Scheme, encode: Tensor, decode: Tensor) -> Tensor:
    """Values divided by both scales, in the order of the scheme's owner, not yet rounded to the element."""
    if scheme.scale == "two-level":
        return blocks / beside(stored(scale.to(blocks.dtype) / encode), blocks, scheme)
    if scheme.scale == "two-level-modelopt":
        return blocks / beside(stored(scale * decode), blocks, scheme)
    if scheme.scale == "two-level-kernel":
        factor = torch.where(scale == 0, 0.0, 1.0 / (scale * (1.0 / encode)))
    else:
        factor = (1.0 / decode) / scale
    return blocks * beside(stored(factor), blocks, scheme)


def beside(scale: Tensor, blocks: Tensor, scheme: Scheme) -> Tensor:
    """``scale`` ``[..., G, 1]`` as it broadcasts to ``blocks``: ``[..., G, block]``, or ``[..., G / 2, 2 block]`` where
    blocks stand in pairs."""
    if scheme.block is None or scale.ndim != blocks.ndim or blocks.shape[-1] != 2 * scheme.block:
        return scale
    first = torch.arange(2 * scheme.block, device=scale.device) < scheme.block
    return torch.where(first, scale[..., 0::2, :], scale[..., 1::2, :])


def stored(x: Tensor) -> Tensor:
    """``x``; inductor computes it once and keeps it, instead of anew in the loop over elements."""
    return x.as_strided(x.shape, x.stride()) if torch.compiler.is_compiling() else x


def kept(scale: Tensor, scheme: Scheme) -> Tensor:
    """``scale``, fp32; compiled for a CPU it is computed once, those of groups many at a time.

    That of a row is computed between the two readings of the row, which so stays in the cache: inductor puts into one
    loop over rows only what it does not vectorize over rows, and it vectorizes nothing that is uint32.
    """
    if not torch.compiler.is_compiling() or scale.device.type != "cpu":
        return scale
    if scheme.block is None:
        scale = scale.view(torch.int32).to(torch.uint32).view(torch.float32)
    return stored(scale)
