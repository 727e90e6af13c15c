"""Try every E4M3 block scale in a window around the usual one and keep the one of least error.

Mapping a block's maximum to 6 is one choice among few: from 0.75 to 1.85 times that scale E4M3 has eleven values, and
among them is the best of all 126 (tested on Gaussian, Laplace, Student-t and uniform weights). The same idea:
ScaleSweep (arXiv:2606.07618). The global scale stays ``2688 / amax``, so the tensor's own largest block cannot get a
larger scale. An ordinary NVFP4 tensor comes out.

Under a Hessian a few columns can outweigh all others, and the best scale lies further away: the window is wider.

Under a Hessian the scale that *assigns* codes may differ from the one that is *stored*. Under a diagonal Hessian
that cannot help: the error is a sum over elements, and each is least at the nearest code. Under the blocks of a full
Hessian it can.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bitdraft.quant.block import Quantized, nvfp4_global_scale
from bitdraft.quant.scales.error import best_scale, block_hessian, blocks_of, by_rows
from bitdraft.quant.scales.soar import Fit, bracket, decoupled_search, least_squares_scale
from bitdraft.quant.schemes import Scheme
from bitdraft.quant.smallfloat import E4M3

# Steps on the E4M3 number line, eight per binade; the nearest first, because ties keep what came earlier.
_WINDOW = (0, 1, -1, 2, -2, 3, -3, 4, 5, 6, 7)
_WIDE_WINDOW = tuple(sorted(range(-16, 25), key=abs))
_FACTORS = tuple(0.7 + 0.05 * i for i in range(13))


def sweep(
    weight: Tensor, scheme: Scheme, *, hessian: Tensor | None = None, offsets: Sequence[int] | None = None
) -> Quantized:
    """``weight`` ``[M, K]``, finite, of any float dtype, in NVFP4 with the best block scale of the window.

    ``hessian``: ``[K]`` (diagonal, one weight per input channel) or ``[K / 16, 16, 16]`` (diagonal blocks); plain
    squared error without it. ``offsets``: which neighbours of the usual scale on the E4M3 number line are tried; the
    first should be 0, the usual one. The error of no block then exceeds that of the rule ``two-level``.
    Raises ``ValueError`` if K does not divide or the Hessian does not fit.
    """
    encode = nvfp4_global_scale(weight.abs().amax().float())
    h = block_hessian(hessian, weight.shape[-1], scheme)
    window = offsets or (_WINDOW if h is None else _WIDE_WINDOW)

    def best(rows: Tensor) -> tuple[Tensor, Tensor]:
        blocks = blocks_of(rows, scheme)
        scale = best_scale(blocks, neighbours(blocks, encode, scheme, window), encode, scheme.element, h)
        codes = scheme.element.round(blocks / (scale / encode)[..., None])
        return (codes * scale[..., None]).flatten(-2), scale

    values, scale = by_rows(best, weight)
    return Quantized(values, outer=1.0 / encode, scale=scale)


def neighbours(blocks: Tensor, encode: Tensor, scheme: Scheme, offsets: Sequence[int]) -> list[Tensor]:
    """E4M3 scales ``[M, B]``, ``offsets`` steps from the one that maps the maximum of each block to E2M1's 6."""
    grid = E4M3.magnitudes.to(blocks.device)
    largest = blocks.abs().amax(dim=-1)
    start = torch.searchsorted(grid, E4M3.round(encode * (largest / scheme.element.max)))
    return [grid[(start + offset).clamp(1, len(grid) - 1)] for offset in offsets]  # 0 is no scale


def sweep_decoupled(
    weight: Tensor, scheme: Scheme, *, hessian: Tensor | None = None, factors: Sequence[float] = _FACTORS
) -> Quantized:
    """As ``sweep``, and then codes assigned by ``factors`` times that scale, each with the best stored scale for them.

    For fixed codes the error is a parabola in the stored scale, so one of the two E4M3 values around its lowest point
    is the best there is. The error of no block exceeds that of ``sweep``.
    """
    encode = nvfp4_global_scale(weight.abs().amax().float())
    alpha = 1.0 / encode
    h = block_hessian(hessian, weight.shape[-1], scheme)
    window = _WINDOW if h is None else _WIDE_WINDOW

    def best(rows: Tensor) -> tuple[Tensor, Tensor]:
        blocks = blocks_of(rows, scheme)
        scale = best_scale(blocks, neighbours(blocks, encode, scheme, window), encode, scheme.element, h)

        def stored(codes: Tensor) -> tuple[Tensor, Tensor]:
            return bracket(least_squares_scale(blocks, codes, alpha, h, otherwise=scale))

        start = Fit.nearest(blocks, scale, alpha, scheme.element, h)
        fit = decoupled_search(blocks, start, [scale * f for f in factors], stored, alpha, scheme.element, h)
        return (fit.codes * fit.scale[..., None]).flatten(-2), fit.scale

    values, scale = by_rows(best, weight)
    return Quantized(values, outer=alpha, scale=scale)
