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

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitdraft.quant.scale_rules import (
    e4m3_scale,
    e8m0_scale,
    fp32_scale,
    multiplier,
    nvfp4_codes,
    nvfp4_decode_scale,
    nvfp4_global_scale,
    zero_point_scale,
)
from bitdraft.quant.schemes import Scheme


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

    codes: Tensor  # [..., G, block] fp32 ([..., N', rows, G, block] where blocks span rows): grid values
    scale: Tensor  # the same with 1 for every dimension inside a block, fp32
    zero_point: Tensor | None  # as ``scale``: integers
    global_scale: Tensor | None  # [] fp32, in the convention of the scheme's owner


def check_divides(columns: int, scheme: Scheme) -> None:
    """``ValueError`` where rows of ``columns`` elements cannot be cut into whole blocks of ``scheme``."""
    if scheme.block and columns % scheme.block and not scheme.allows_short_blocks:
        raise ValueError(f"{columns} columns do not divide into blocks of {scheme.block} ({scheme.name})")


def quantize(x: Tensor, scheme: Scheme, *, global_scale: Tensor | None = None) -> Quantized:
    """Quantize ``x`` along its last dimension.

    ``x``: ``[..., K]``, bf16, fp16 or fp32; ``[..., N, K]`` where blocks span rows. ``global_scale``, fp32 ``[]``:
    for NVFP4 an *encode* scale that is fixed beforehand (an activation's, from calibration; a weight's, shared by
    fused layers), by default ``2688 / amax`` of ``x`` itself; for static FP8 the decode scale, which is required.
    Raises ``ValueError`` if ``K`` does not divide into blocks or a static scale is missing.
    """
    return stand_for(to_grid(x, scheme, global_scale), scheme, x.shape)


def dequantize(q: Quantized) -> Tensor:
    """``[..., K]`` fp32: the values that ``q`` stands for, one fp32 rounding per element."""
    if q.outer is None:
        return q.values
    return q.values * (q.outer if q.block is None else spread(q.outer, q.block, q.values.shape[-1]))


def spread(scales: Tensor, block: int, columns: int) -> Tensor:
    """``[..., G]`` → ``[..., columns]``: every scale in all the places of its block; the last may be shorter."""
    return scales.unsqueeze(-1).expand(*scales.shape, block).flatten(-2)[..., :columns]


def to_grid(x: Tensor, scheme: Scheme, global_scale: Tensor | None = None) -> OnGrid:
    """``x`` divided by its scales and rounded to the element; arguments and errors as in ``quantize``."""
    if scheme.arithmetic != "fp32" and x.dtype != torch.float32 and torch.compiler.is_compiling():
        # Compilers keep fp32 between fused operations, where these formats round each result.
        raise ValueError(f"{scheme.name} in {x.dtype} computes in that dtype, which torch.compile would not")
    blocks, inner = _cut(x, scheme)
    exact = scheme.arithmetic == "fp32"
    work = blocks if scheme.arithmetic == "input" else blocks.float()
    round_to_element = scheme.element.round
    if scheme.has_zero_point:
        lowest, highest = _over(blocks, inner, "amin"), _over(blocks, inner, "amax")
        scale, zero = zero_point_scale(_as_is(lowest, exact), _as_is(highest, exact), scheme)
        codes = round_to_element((work / scale.to(work.dtype) + zero.to(work.dtype)).float())
        return OnGrid(codes, scale.float(), zero, None)

    amax = _as_is(_over(blocks.abs(), inner, "amax"), exact)
    if scheme.has_global_scale:
        encode, decode = _global_scales(amax, global_scale, scheme)
        scale = e4m3_scale(amax, scheme, encode, decode)
        codes = round_to_element(nvfp4_codes(work, scale, scheme, encode, decode).float(), ties=scheme.ties)
        return OnGrid(codes, scale, None, (decode if scheme.stores_decode_scale else encode).float())
    if scheme.scale_format == "e8m0":
        scale = e8m0_scale(amax.float(), scheme)
        if scheme.scale == "floor-stretched":
            stretch = torch.tensor(4 / 3, dtype=work.dtype, device=x.device)
            codes = round_to_element((work / (scale.to(work.dtype) * stretch)).float())
            return OnGrid(codes, scale, None, stretch.float())
        return OnGrid(round_to_element(work / scale, ties=scheme.ties), scale, None, None)
    if scheme.scale == "static":
        if global_scale is None:
            raise ValueError(f"{scheme.name} needs a static scale")
        scale = global_scale.float().reshape((1,) * blocks.ndim)
    else:
        scale = fp32_scale(amax, scheme)
    factor = multiplier(amax, scale, scheme)
    quotient = work / scale.to(work.dtype) if factor is None else work * factor.to(work.dtype)
    # A scale from the maximum keeps |quotient| so near max that it rounds to max: no clamp is needed.
    saturate = scheme.scale in ("static", "range") or not exact
    return OnGrid(round_to_element(quotient.float(), saturate=saturate), scale.float(), None, None)


def stand_for(grid: OnGrid, scheme: Scheme, shape: torch.Size) -> Quantized:
    """The two factors of a tensor of ``shape`` from its codes and scales."""
    codes = grid.codes if grid.zero_point is None else grid.codes - grid.zero_point
    scale = drop_inner(grid.scale, scheme)
    if scheme.scale_format != "fp32":
        values = paste(codes * grid.scale, scheme, shape)
        outer = grid.global_scale
        if outer is not None and not scheme.stores_decode_scale:
            outer = 1.0 / outer
        return Quantized(values, outer, scale)
    values = paste(codes, scheme, shape)
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


def _as_is(x: Tensor, exact: bool) -> Tensor:
    return x.float() if exact else x


def _cut(x: Tensor, scheme: Scheme) -> tuple[Tensor, tuple[int, ...]]:
    """``x`` as blocks, and the dimensions that lie inside a block."""
    columns = x.shape[-1]
    check_divides(columns, scheme)
    if scheme.rows is None:
        return x, tuple(range(x.ndim))
    if scheme.block is None:
        return x, (-1,)
    if scheme.rows == 1:
        return x.unflatten(-1, (columns // scheme.block, scheme.block)), (-1,)
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


def _over(x: Tensor, inner: tuple[int, ...], reduce: str) -> Tensor:
    """Maximum or minimum over the dimensions inside a block; 0 for blocks without elements."""
    if x.numel() == 0:
        shape = [1 if i - x.ndim in inner or i in inner else n for i, n in enumerate(x.shape)]
        return x.new_zeros(shape)
    return x.amax(dim=inner, keepdim=True) if reduce == "amax" else x.amin(dim=inner, keepdim=True)
