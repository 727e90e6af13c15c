"""A quantized tensor as it is stored: codes, block scales as bytes, zero points, the global scale.

``encode`` and ``decode`` are the two halves of ``quant/fake.py``'s ``fake``: decoding gives, bit for bit, what
``dequantize(quantize(x))`` gives. ``quant/pack.py`` lays codes out in the bytes of checkpoints.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bitdraft.quant.block import Quantized, dequantize, drop_inner, paste, spread, to_grid
from bitdraft.quant.scale_rules import e8m0_values
from bitdraft.quant.schemes import Scheme
from bitdraft.quant.smallfloat import E4M3


@dataclass(frozen=True)
class Encoded:
    """A tensor in ``scheme``; G blocks along the last dimension.

    NaN lives in the scale: a block that holds NaN (or, in MX, infinity) has scale byte 255 (E8M0), 127 (E4M3) or
    an fp32 NaN, and formats without a NaN code store 0 for its elements.
    """

    scheme: Scheme
    codes: Tensor  # [..., K]: uint8 bit patterns in the low bits (floats), int8 (integers)
    scale: Tensor  # uint8 E8M0 or E4M3 bytes, or fp32: [..., G], [ceil(N / 128), G] (2-D blocks), [..., 1], []
    zero_point: Tensor | None = None  # int8 [..., G]
    global_scale: Tensor | None = None  # fp32 []: NVFP4, encode or decode as Scheme.stores_decode_scale says


def encode(x: Tensor, scheme: Scheme, *, global_scale: Tensor | None = None) -> Encoded:
    """``x`` ``[..., K]`` (bf16, fp16, fp32) in codes and stored scales; arguments and errors as in ``quantize``."""
    grid = to_grid(x, scheme, global_scale)
    scale = drop_inner(grid.scale, scheme)
    stored = {"e8m0": e8m0_bytes, "e4m3": E4M3.encode, "fp32": lambda s: s}[scheme.scale_format](scale)
    zero = None if grid.zero_point is None else drop_inner(grid.zero_point, scheme)
    return Encoded(
        scheme,
        scheme.element.encode(paste(grid.codes, scheme, x.shape)),
        stored,
        None if zero is None else scheme.element.encode(zero),
        grid.global_scale,
    )


def to_quantized(e: Encoded) -> Quantized:
    """The two factors that a matrix product uses, from what is stored."""
    scheme, columns = e.scheme, e.codes.shape[-1]
    values = scheme.element.decode(e.codes)
    if scheme.scale_format == "fp32":
        zero = e.zero_point
        if zero is not None:
            zero = zero.float()
            values = values - (zero if scheme.block is None else spread(zero, scheme.block, columns))
        outer = e.scale
        if scheme.rows is not None and scheme.rows > 1:
            outer = outer.repeat_interleave(scheme.rows, dim=-2)[..., : e.codes.shape[-2], :]
        return Quantized(values, outer, e.scale, None if scheme.rows is None else scheme.block)
    scale = E4M3.decode(e.scale) if scheme.scale_format == "e4m3" else e8m0_scales(e.scale)
    assert scheme.block is not None
    outer_scale = e.global_scale
    if outer_scale is not None and not scheme.stores_decode_scale:
        outer_scale = 1.0 / outer_scale
    return Quantized(values * spread(scale, scheme.block, columns), outer_scale, scale)


def decode(e: Encoded) -> Tensor:
    """``[..., K]`` fp32: what the codes stand for."""
    return dequantize(to_quantized(e))


def e8m0_bytes(scale: Tensor) -> Tensor:
    """fp32 powers of two → E8M0 bytes (uint8): the exponent plus 127; 2^-127 (subnormal) is 0, NaN is 255."""
    return (scale.view(torch.int32) >> 23 & 0xFF).to(torch.uint8)


def e8m0_scales(byte: Tensor) -> Tensor:
    """E8M0 bytes (uint8) → fp32 powers of two; 255 is NaN."""
    return torch.where(byte == 255, torch.nan, e8m0_values(byte.clamp(max=254)))
