"""The error that a scale search minimises, block by block.

With ``d = ŵ - w`` a block's error is ``dᵀ H d``. ``H`` is what the layer's inputs say about its columns
(GPTQ's Hessian ``E[x xᵀ]``, arXiv:2210.17323): left out (plain squared error), a diagonal (one weight per input
channel), or one ``E × E`` matrix per block of columns, cut from the diagonal of the full Hessian.

The letters: M rows (output channels), K columns (input channels), B blocks per row, E elements per block, K = B · E.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from bitdraft.quant.block import check_divides
from bitdraft.quant.schemes import Element, Scheme

_CHUNK = 2**16
"""Elements per chunk: 256 KiB of fp32, so the passes of a search stay in the cache."""


def by_rows(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """``function`` of ``tensors`` ``[M, ...]``, called on a few rows at a time, its results joined again."""
    rows = max(1, _CHUNK // tensors[0][0].numel())
    parts = [function(*chunk) for chunk in zip(*(t.split(rows) for t in tensors), strict=True)]
    return tuple(torch.cat(results) for results in zip(*parts, strict=True))


def blocks_of(weight: Tensor, scheme: Scheme) -> Tensor:
    """``[M, K]`` of any float dtype → ``[M, B, E]`` fp32; ``ValueError`` where K does not divide into blocks."""
    assert scheme.block is not None
    check_divides(weight.shape[-1], scheme)
    return weight.float().unflatten(-1, (-1, scheme.block))


def block_hessian(hessian: Tensor | None, columns: int, scheme: Scheme) -> Tensor | None:
    """``[K]`` → ``[B, E]`` and ``[B, E, E]`` as it is, in fp32; ``ValueError`` for another shape or a bad diagonal."""
    if hessian is None:
        return None
    block = scheme.block
    assert block is not None
    if hessian.shape not in ((columns,), (columns // block, block, block)):
        raise ValueError(
            f"a Hessian for {columns} columns in blocks of {block} has shape [{columns}] (its diagonal) or "
            f"[{columns // block}, {block}, {block}] (its diagonal blocks), got {list(hessian.shape)}"
        )
    diagonal = hessian if hessian.ndim == 1 else hessian.diagonal(dim1=-2, dim2=-1)
    if not (torch.isfinite(hessian).all() and (diagonal >= 0).all()):
        raise ValueError("the Hessian must be finite and its diagonal must not be negative")
    return hessian.float() if hessian.ndim == 3 else hessian.float().view(-1, block)


def dot(a: Tensor, b: Tensor, hessian: Tensor | None) -> Tensor:
    """``aᵀ H b`` of every block: ``[M, B, E]`` twice → ``[M, B]``. ``hessian`` as ``block_hessian`` returns it."""
    if hessian is None:
        return (a * b).sum(dim=-1)
    if hessian.ndim == 2:
        return (a * b * hessian).sum(dim=-1)
    return (a * torch.einsum("mbe,bef->mbf", b, hessian)).sum(dim=-1)


def rounding_error(blocks: Tensor, step: Tensor, element: Element, hessian: Tensor | None) -> Tensor:
    """``[M, B]``: the error of ``blocks`` ``[M, B, E]`` rounded to the nearest multiple in ``element`` of ``step``."""
    wide = step[..., None]
    difference = element.round(blocks / wide) * wide - blocks
    return dot(difference, difference, hessian)


def best_scale(
    blocks: Tensor, candidates: Iterable[Tensor], encode: Tensor, element: Element, hessian: Tensor | None
) -> Tensor:
    """Of the block scales ``candidates`` (``[M, B]`` each, under the encode scale ``encode``) the one of least error.

    On a tie the earlier candidate stays, so the first one is what the search falls back to.
    """
    best = least = None
    for scale in candidates:
        error = rounding_error(blocks, scale / encode, element, hessian)
        if best is None or least is None:
            best, least = scale, error
        else:
            best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    assert best is not None
    return best
