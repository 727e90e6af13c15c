"""Fake-quantization: a tensor rounded to a number format, as ordinary floating-point values.

No gradient passes here: ``quant/straight_through.py`` adds one.

Compiled, it is one or two passes over memory. Eager, every operation is a pass, so that a large tensor on CPU is
worked on in strips whose temporaries stay in the cache of one core, without a second copy of the tensor in fp32. A
strip consists of whole blocks; what blocks share, the largest magnitude of the tensor, is found first.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from bitdraft.quant.block import check_divides, paste, to_grid, two_factors
from bitdraft.quant.extremes import largest_magnitude
from bitdraft.quant.schemes import Scheme

_STRIP = 2**17
"""Elements of a strip: its fp32 temporaries of 512 KiB stay in L2, and calling an operation costs little beside it."""


@torch.no_grad()
def fake(x: Tensor, scheme: Scheme, *, global_scale: Tensor | None = None) -> Tensor:
    """``x`` rounded to ``scheme``, in ``x``'s own dtype and shape ``[..., K]``, without a gradient: quantization and
    dequantization fused, equal to ``decode(encode(x))`` in ``quant/codes.py`` rounded to ``x``'s dtype.

    Arguments and errors as in ``quant/block.py``'s ``quantize``. Beside the result it needs little memory.
    ``torch.compile`` makes vectorized passes of it, with the same bits.
    """
    largest = None
    in_strips = not torch.compiler.is_compiling() and x.device.type == "cpu" and x.numel() > _STRIP
    if not in_strips or (global_scale is None and scheme.scale == "static"):
        return _fake(x, scheme, global_scale, None)
    if (scheme.has_global_scale and global_scale is None) or (scheme.rows is None and scheme.scale != "static"):
        largest = _largest_magnitude(x.contiguous().view(-1))
    # glibc gives freed memory back to the system, and takes it again page by page, beyond twice the largest piece that
    # was ever freed: this piece, never touched, makes the temporaries of one strip those of the next.
    torch.empty(16 * _STRIP)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for part, result in zip(_strips(x, scheme), _strips(y, scheme), strict=True):
        result.copy_(_fake(part, scheme, global_scale, largest))
    return y


def _largest_magnitude(x: Tensor) -> Tensor:
    parts = x.split(_STRIP)
    maxima = torch.empty(len(parts))  # written in place: a list of small tensors would lie between the temporaries
    for i, part in enumerate(parts):
        maxima[i] = largest_magnitude(part)
    return maxima.amax()


def _fake(x: Tensor, scheme: Scheme, global_scale: Tensor | None, largest: Tensor | None) -> Tensor:
    blocks, outer = two_factors(to_grid(x, scheme, global_scale, largest), scheme)
    return paste((blocks if outer is None else blocks * outer).to(x.dtype), scheme, x.shape)


def _strips(x: Tensor, scheme: Scheme) -> Iterator[Tensor]:
    """``x`` ``[..., K]`` in views of about ``_STRIP`` elements, each of whole blocks."""
    check_divides(x.shape[-1], scheme)
    if scheme.rows is None:
        yield from x.contiguous().view(-1).split(_STRIP)
    elif scheme.rows == 1:
        width = scheme.block or x.shape[-1]
        yield from x.contiguous().view(-1, width).split(max(1, _STRIP // width))
    elif x.ndim == 1:
        yield x  # to be refused
    else:
        assert scheme.block is not None
        for band in x.split(scheme.rows, dim=-2):
            blocks = max(1, _STRIP * x.shape[-1] // (band.numel() * scheme.block))
            yield from band.split(blocks * scheme.block, dim=-1)
