"""SOAR: global and block scales of NVFP4 by least squares, then a search with two scales (arXiv:2605.12245).

The model is ``w ≈ α · Δ · q`` with the fp32 scale ``α`` of the tensor, the E4M3 scale ``Δ`` of a block and its
codes ``q``. For fixed codes the squared error has closed-form minima,

    α* = Σ Δ ⟨w, q⟩ / Σ Δ² ⟨q, q⟩      (sums over all blocks)
    Δ* = ⟨w, q⟩ / (α ⟨q, q⟩)           (per block, then rounded to E4M3)

*Joint*: alternate between the two and new codes, and keep the best state seen. *Decoupled*: the scale that assigns
codes becomes a real number of its own, searched on a grid around ``Δ*``, while the stored one is one of the two E4M3
neighbours of ``Δ*``. (The paper's code was not published. Searching around the rounded ``Δ*`` instead, with it and the
next lower value as stored scales, errs more.)

Under plain squared error the second step gains only through the stored scales that it tries: nearest codes are
the best for any stored scale, so searching the stored scale alone (``sweep.py``) finds more for less.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitdraft.quant.block import Quantized, nvfp4_global_scale
from bitdraft.quant.scales.error import block_hessian, blocks_of, by_rows, dot
from bitdraft.quant.schemes import Element, Scheme
from bitdraft.quant.smallfloat import E4M3

_SMALLEST_SCALE = 2.0**-9  # E4M3's smallest value above 0
_FACTORS = tuple(i / 100 for i in range(50, 151))
_ITERATIONS = 20


@dataclass(frozen=True)
class Fit:
    """``α · scale · codes`` stands for the blocks with this error."""

    codes: Tensor  # [M, B, E] fp32
    scale: Tensor  # [M, B] fp32, E4M3 values
    error: Tensor  # [M, B] fp32

    @staticmethod
    def of(blocks: Tensor, codes: Tensor, scale: Tensor, alpha: Tensor, hessian: Tensor | None) -> "Fit":
        difference = codes * (alpha * scale)[..., None] - blocks
        return Fit(codes, scale, dot(difference, difference, hessian))

    @staticmethod
    def nearest(blocks: Tensor, scale: Tensor, alpha: Tensor, element: Element, hessian: Tensor | None) -> "Fit":
        """With the codes nearest to ``blocks``."""
        return Fit.of(blocks, element.round(blocks / (alpha * scale)[..., None]), scale, alpha, hessian)


def soar(
    weight: Tensor,
    scheme: Scheme,
    *,
    hessian: Tensor | None = None,
    iterations: int = _ITERATIONS,
    factors: Sequence[float] = _FACTORS,
) -> Quantized:
    """``weight`` ``[M, K]``, finite, of any float dtype, in NVFP4 with scales by least squares and search.

    ``hessian`` as in ``sweep``. ``factors`` times the least-squares scale assign codes in the decoupled search; none
    leave it out. The error never exceeds that of the rule ``two-level``. Raises ``ValueError`` if K does not divide or
    the Hessian does not fit.
    """
    blocks = blocks_of(weight, scheme)
    h = block_hessian(hessian, weight.shape[-1], scheme)
    alpha, fit = joint_fit(blocks, scheme.element, h, iterations)

    def search(part: Tensor, codes: Tensor, scale: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        start = Fit(codes, scale, error)
        found = search_around_least_squares(part, start, alpha, scheme.element, h, factors)
        return (found.codes * found.scale[..., None]).flatten(-2), found.scale

    values, scale = by_rows(search, blocks, fit.codes, fit.scale, fit.error)
    return Quantized(values, outer=alpha, scale=scale)


def joint_fit(blocks: Tensor, element: Element, hessian: Tensor | None, iterations: int) -> tuple[Tensor, Fit]:
    """The global scale ``α`` (fp32 ``[]``) and the fit of ``blocks`` ``[M, B, E]`` under it, by alternation.

    Starts from the largest magnitudes, so the error is at most that of the rule ``two-level``; stops early where
    nothing changes any more.
    """
    amax = blocks.abs().amax(dim=-1)
    encode = nvfp4_global_scale(amax.amax())
    alpha = 1.0 / encode
    scale = E4M3.round(encode * (amax / element.max)).clamp(min=_SMALLEST_SCALE)
    fit = Fit.nearest(blocks, scale, alpha, element, hessian)
    best_alpha, best = alpha, fit
    for _ in range(iterations):
        before = fit
        alpha = least_squares_global(blocks, fit, alpha, hessian)
        moved = Fit.nearest(blocks, fit.scale, alpha, element, hessian)
        target = least_squares_scale(blocks, moved.codes, alpha, hessian, otherwise=moved.scale)
        scale = E4M3.round(target).clamp(min=_SMALLEST_SCALE)
        fit = Fit.nearest(blocks, scale, alpha, element, hessian)
        if fit.error.double().sum() < best.error.double().sum():
            best_alpha, best = alpha, fit
        if torch.equal(fit.scale, before.scale) and torch.equal(fit.codes, before.codes):
            break
    return best_alpha, best


def least_squares_global(blocks: Tensor, fit: Fit, alpha: Tensor, hessian: Tensor | None) -> Tensor:
    """``α*`` (fp32 ``[]``) for fixed codes and block scales; ``alpha`` where it is not defined or not positive.

    Rounded so that its reciprocal, which some checkpoints store instead, gives it back.
    """
    numerator = (fit.scale * dot(blocks, fit.codes, hessian)).double().sum()
    denominator = (fit.scale.square() * dot(fit.codes, fit.codes, hessian)).double().sum()
    optimum = 1.0 / (denominator / numerator).float()
    return torch.where(torch.isfinite(optimum) & (optimum > 0), optimum, alpha)


def least_squares_scale(
    blocks: Tensor, codes: Tensor, alpha: Tensor, hessian: Tensor | None, *, otherwise: Tensor
) -> Tensor:
    """``Δ*`` ``[M, B]``, not yet rounded, for fixed codes and ``alpha``; ``otherwise`` where all codes are 0."""
    energy = dot(codes, codes, hessian)
    return torch.where(energy > 0, dot(blocks, codes, hessian) / (alpha * energy), otherwise)


def bracket(scale: Tensor) -> tuple[Tensor, Tensor]:
    """The E4M3 values on both sides of ``scale`` ``[M, B]``: the largest not above it, the smallest not below it.

    Never 0, which is no scale; beyond the range both are the nearest end.
    """
    grid = E4M3.magnitudes.to(scale.device)
    above = torch.searchsorted(grid, scale.contiguous()).clamp(1, len(grid) - 1)
    below = torch.where(grid[above] > scale, above - 1, above).clamp(min=1)
    return grid[below], grid[above]


def search_around_least_squares(
    blocks: Tensor,
    start: Fit,
    alpha: Tensor,
    element: Element,
    hessian: Tensor | None,
    factors: Sequence[float],
) -> Fit:
    """The decoupled search around the real-valued least-squares scale of ``start``, its two E4M3 neighbours stored."""
    centre = least_squares_scale(blocks, start.codes, alpha, hessian, otherwise=start.scale)
    centre = centre.clamp(min=_SMALLEST_SCALE)
    neighbours = bracket(centre)
    assigning = [centre * factor for factor in factors]
    return decoupled_search(blocks, start, assigning, lambda _codes: neighbours, alpha, element, hessian)


def decoupled_search(
    blocks: Tensor,
    start: Fit,
    assigning: Iterable[Tensor],
    stored: Callable[[Tensor], tuple[Tensor, ...]],
    alpha: Tensor,
    element: Element,
    hessian: Tensor | None,
) -> Fit:
    """Per block the best of ``start`` and of codes by any of ``assigning`` ``[M, B]`` with any of ``stored(codes)``."""
    assigned, kept, least = start.scale, start.scale, start.error
    for scale in assigning:
        codes = element.round(blocks / (alpha * scale)[..., None])
        for candidate in stored(codes):
            error = Fit.of(blocks, codes, candidate, alpha, hessian).error
            better = error < least
            assigned, kept = torch.where(better, scale, assigned), torch.where(better, candidate, kept)
            least = torch.minimum(error, least)
    # Codes are made once more at the end: keeping those of every winner would double the time.
    found = (least < start.error)[..., None]
    codes = torch.where(found, element.round(blocks / (alpha * assigned)[..., None]), start.codes)
    return Fit(codes, kept, least)
