"""Quantization and dequantization of blocks; the scale rules are in ``quant/scale_rules.py``.

Everything is computed in fp32 from the input's own values, whatever its dtype, as the engines' kernels
do (a scheme's ``arithmetic`` names the exceptions). A quantized tensor is kept as two factors, so that a matrix
product can be computed the way the engines compute it (unscaled products accumulated in fp32, one scaling, one
rounding):

* ``values``: element codes times the *inner* scale (power-of-two or E4M3 block scale). At most eight
  significant bits, so they are exact in bf16.
* ``outer``: the fp32 scale that cannot be folded in without rounding: per tensor, per row, or per block (FP8 and
  integer groups); ``None`` where there is none (MX formats).

Rows are vectors along the last dimension; shapes below write them ``[..., K]``, or ``[..., N, K]`` where blocks
span several rows, with G blocks along the last dimension.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitdraft.quant.extremes import extreme
from bitdraft.quant.scale_rules import (
    beside,
    e4m3_scale,
    e8m0_scale,
    fp32_scale,
    integer_quotient,
    kept,
    multiplier,
    nvfp4_codes,
    nvfp4_decode_scale,
    nvfp4_global_scale,
    rounded_to,
    stored,
    zero_point_scale,
)
from bitdraft.quant.schemes import Scheme
from bitdraft.quant.smallint import SmallInt


@dataclass(frozen=True)
class Quantized:
    """``values · outer`` is the dequantized tensor. ``scale`` is the block scale, for inspection and storage."""

    values: Tensor  # [..., K] fp32: codes (less their zero point) · inner scale, exact in bf16
    outer: Tensor | None  # fp32: [] per tensor, [..., 1] per row, [..., G] per block, or None
    scale: Tensor  # [..., G] fp32 decode scales of the blocks; [..., ceil(N / rows), G] where they span rows
    block: int | None = None  # what one entry of ``outer`` [..., G] covers; None where ``outer`` broadcasts as it is


@dataclass(frozen=True)
class OnGrid:
    """Codes as numbers, still cut into blocks, and the scales that belong to them: what is stored."""

    codes: Tensor  # [..., G, block] fp32 ([..., N', rows, G, block] where blocks span rows, [..., G / 2, 2 block] where
    # they stand in pairs): grid values
    scale: Tensor  # the same with 1 for every dimension inside a block, fp32
    zero_point: Tensor | None  # as ``scale``: integers
    global_scale: Tensor | None  # [] fp32, in the convention of the scheme's owner


def check_divides(columns: int, scheme: Scheme) -> None:
    """``ValueError`` where rows of ``columns`` elements cannot be cut into whole blocks of ``scheme``."""
    if scheme.block and columns % scheme.block and not scheme.allows_short_blocks:
        raise ValueError(f"{columns} columns do not divide into blocks of {scheme.block} ({scheme.name})")


def quantize(
    x: Tensor, scheme: Scheme, *, global_scale: Tensor | None = None, largest: Tensor | None = None
) -> Quantized:
    """Quantize ``x`` along its last dimension.

    ``x``: ``[..., K]``, bf16, fp16 or fp32; ``[..., N, K]`` where blocks span rows. ``global_scale``, fp32 ``[]``:
    for NVFP4 an *encode* scale that is fixed beforehand (an activation's, from calibration; a weight's, shared by
    fused layers), by default ``2688 / amax`` of ``x`` itself; for static FP8 the decode scale, which is required.
    ``largest``, fp32 ``[]``: the largest magnitude of the whole tensor that ``x`` is a part of.
    Raises ``ValueError`` if ``K`` does not divide into blocks or a static scale is missing.
    """
    return stand_for(to_grid(x, scheme, global_scale, largest), scheme, x.shape)


def dequantize(q: Quantized) -> Tensor:
    """``[..., K]`` fp32: the values that ``q`` stands for, one fp32 rounding per element."""
    if q.outer is None:
        return q.values
    return q.values * (q.outer if q.block is None else spread(q.outer, q.block, q.values.shape[-1]))


def spread(scales: Tensor, block: int, columns: int) -> Tensor:
    """``[..., G]`` → ``[..., columns]``: every scale in all the places of its block; the last may be shorter."""
    return scales.unsqueeze(-1).expand(*scales.shape, block).flatten(-2)[..., :columns]


def to_grid(x: Tensor, scheme: Scheme, global_scale: Tensor | None = None, largest: Tensor | None = None) -> OnGrid:
    """``x`` divided by its scales and rounded to the element; arguments and errors as in ``quantize``."""
    one_level = scheme.scale_format == "fp32"
    if scheme.arithmetic != "fp32" and not one_level and x.dtype != torch.float32 and torch.compiler.is_compiling():
        # Compilers keep fp32 between fused operations, where these formats round each result.
        raise ValueError(f"{scheme.name} in {x.dtype} computes in that dtype, which torch.compile would not")
    blocks, inner = _cut(x, scheme)
    rounds_codes, rounds_scales = scheme.arithmetic == "input", scheme.arithmetic != "fp32"
    work = blocks if rounds_codes and not one_level else blocks.float()
    code_dtype, scale_dtype = x.dtype if rounds_codes else torch.float32, x.dtype if rounds_scales else torch.float32
    round_to_element = scheme.element.round
    if scheme.has_zero_point:
        lowest, highest = extreme(blocks, inner, "lowest"), extreme(blocks, inner, "highest")
        scale, zero = (kept(x, scheme) for x in zero_point_scale(lowest, highest, scheme, scale_dtype))
        shifted = rounded_to(integer_quotient(work, scale, scheme, code_dtype) + zero, code_dtype, bounded=True)
        assert isinstance(scheme.element, SmallInt)
        # The zero point puts the lowest value at min - 0.5 or above, if rounded to a dtype that has this number.
        capped = 2**scheme.element.bits * torch.finfo(code_dtype).eps <= 1
        return OnGrid(scheme.element.round_capped(shifted) if capped else round_to_element(shifted), scale, zero, None)

    if largest is not None and scheme.rows is None:
        amax = largest.reshape((1,) * blocks.ndim)
    else:
        amax = _block_maxima(blocks, inner, scheme)
    if scheme.has_global_scale:
        amax = amax.to(scale_dtype)
        encode, decode = _global_scales(amax if largest is None else largest.to(scale_dtype), global_scale, scheme)
        scale = stored(e4m3_scale(amax, scheme, encode, decode))
        codes = round_to_element(nvfp4_codes(work, scale, scheme, encode, decode).float(), ties=scheme.ties)
        return OnGrid(codes, scale, None, (decode if scheme.stores_decode_scale else encode).float())
    if scheme.scale_format == "e8m0":
        scale = e8m0_scale(amax, scheme)
        if scheme.scale == "floor-stretched":
            stretch = torch.tensor(4 / 3, dtype=work.dtype, device=x.device)
            codes = round_to_element((work / (scale.to(work.dtype) * stretch)).float())
            return OnGrid(codes, scale, None, stretch.float())
        # The inverse of a power of two is exact, so this is the quotient.
        return OnGrid(round_to_element(work * (1.0 / scale), ties=scheme.ties), scale, None, None)
    if scheme.scale == "static":
        if global_scale is None:
            raise ValueError(f"{scheme.name} needs a static scale")
        scale = global_scale.float().reshape((1,) * blocks.ndim)
    else:
        scale = fp32_scale(amax, scheme, scale_dtype)
    if scheme.scale == "range":  # -7.5 rounds to -8, which is a code, and 7.5 to 8, which is none
        scale = kept(scale, scheme)
        codes = cast(SmallInt, scheme.element).round_capped(integer_quotient(work, scale, scheme, code_dtype))
        return OnGrid(codes, scale, None, None)
    factor = multiplier(amax, scale, scheme)
    quotient = rounded_to(work / scale if factor is None else work * factor, code_dtype, bounded=True)
    # A scale from the maximum keeps |quotient| so near max that it rounds to max: no clamp is needed.
    saturate = scheme.scale == "static" or rounds_scales
    return OnGrid(round_to_element(quotient, saturate=saturate), scale, None, None)


def two_factors(grid: OnGrid, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """Values and outer scale as in ``Quantized``, still cut into blocks: each broadcasts to the other."""
    codes = grid.codes if grid.zero_point is None else grid.codes - grid.zero_point
    if scheme.scale_format == "fp32":
        return codes, grid.scale
    outer = grid.global_scale
    if outer is not None and not scheme.stores_decode_scale:
        outer = 1.0 / outer
    return codes * beside(grid.scale, codes, scheme), outer


def stand_for(grid: OnGrid, scheme: Scheme, shape: torch.Size, dtype: torch.dtype = torch.float32) -> Quantized:
    """The two factors of a tensor of ``shape`` from its codes and scales, ``values`` in ``dtype``."""
    blocks, outer = two_factors(grid, scheme)
    # Converted before they are joined: inductor would store the whole tensor in fp32 in between.
    values = paste(blocks.to(dtype), scheme, shape)
    scale = drop_inner(grid.scale, scheme)
    if scheme.scale_format != "fp32":
        return Quantized(values, outer, scale)
    if scheme.rows is not None and scheme.rows > 1:
        outer = scale.repeat_interleave(scheme.rows, dim=-2)[..., : shape[-2], :]
        return Quantized(values, outer, scale, scheme.block)
    return Quantized(values, scale, scale, scheme.block)


def _global_scales(amax: Tensor, given: Tensor | None, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """NVFP4's global scale as encode and as decode scale: the owner's is computed, the other is its inverse."""
    if given is not None:
        encode = given.to(amax.dtype)
        return encode, 1.0 / encode
    largest = amax.amax() if amax.numel() else amax.new_zeros(())
    if scheme.stores_decode_scale:
        decode = nvfp4_decode_scale(largest)
        return 1.0 / decode, decode
    encode = nvfp4_global_scale(largest)
    return encode, 1.0 / encode


def _block_maxima(blocks: Tensor, inner: tuple[int, ...], scheme: Scheme) -> Tensor:
    """The largest magnitude of every block, fp32: ``blocks``' shape with 1 for the dimensions inside a block."""
    if scheme.block is None or scheme.rows != 1 or blocks.shape[-1] == scheme.block:
        return extreme(blocks, inner, "magnitude")
    return extreme(blocks.unflatten(-1, (2, scheme.block)), (-1,), "magnitude").flatten(-3, -2)  # pairs


def _cut(x: Tensor, scheme: Scheme) -> tuple[Tensor, tuple[int, ...]]:
    """``x`` as blocks, and the dimensions that lie inside a block."""
    columns = x.shape[-1]
    check_divides(columns, scheme)
    if scheme.rows is None:
        return x, tuple(range(x.ndim))
    if scheme.block is None:
        return x, (-1,)
    if scheme.rows == 1:
        # Inductor loads and stores half a vector for a block of 16 numbers of 16 bits, and slowly: two at a time.
        pairs = torch.compiler.is_compiling() and x.element_size() == 2 and columns % (2 * scheme.block) == 0
        block = scheme.block * (2 if pairs and scheme.has_global_scale else 1)
        return x.unflatten(-1, (columns // block, block)), (-1,)
    if x.ndim < 2:
        raise ValueError(f"{scheme.name} has blocks of {scheme.rows} rows, so a matrix is needed, not {list(x.shape)}")
    down, right = -(-x.shape[-2] // scheme.rows), -(-columns // scheme.block)
    padded = pad(x, (0, right * scheme.block - columns, 0, down * scheme.rows - x.shape[-2]))
    return padded.unflatten(-1, (right, scheme.block)).unflatten(-3, (down, scheme.rows)), (-3, -1)


def paste(blocks: Tensor, scheme: Scheme, shape: torch.Size) -> Tensor:
    """Blocks as ``to_grid`` cuts them → ``[..., K]`` of ``shape``; what filled up short blocks goes."""
    if scheme.block is None or scheme.rows is None:
        return blocks
    if scheme.rows == 1:
        return blocks.flatten(-2)
    return blocks.flatten(-2).flatten(-3, -2)[..., : shape[-2], : shape[-1]]


def drop_inner(scale: Tensor, scheme: Scheme) -> Tensor:
    """Scales ``[..., G]`` without the dimensions inside a block; whole rows keep their last one, a tensor has none."""
    if scheme.rows is None:
        return scale.reshape(())
    if scheme.block is None:
        return scale
    return scale.squeeze(-1) if scheme.rows == 1 else scale.squeeze(-1).squeeze(-2)
