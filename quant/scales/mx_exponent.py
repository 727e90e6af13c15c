"""Power-of-two block scales of MX formats, chosen by error instead of by rule.

A scale rule (``even``, ``rceil``) picks the exponent from the block's largest magnitude alone. Two better-informed
choices, both stored as ordinary MX tensors:

* ``exponent_search``: per block the exponent of least error among the rule's and its neighbours. One lower clips the
  maximum and gives the rest a finer grid, one higher is finer where E2M1 is coarse.
* ``exponent_bias``: one small integer added to the rule's exponents of a whole group of modules.

A zero stays exactly zero under every exponent.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bitdraft.quant.block import Quantized, quantize
from bitdraft.quant.scales.error import best_scale, block_hessian, blocks_of, by_rows, rounding_error
from bitdraft.quant.schemes import Scheme

_OFFSETS = (0, -1, 1)
_SMALLEST, _LARGEST = 2.0**-127, 2.0**127  # what an E8M0 byte can hold


def exponent_search(
    weight: Tensor, scheme: Scheme, *, hessian: Tensor | None = None, offsets: Sequence[int] = _OFFSETS
) -> Quantized:
    """``weight`` ``[M, K]``, finite, of any float dtype, in an MX format with the best exponent per block.

    ``offsets`` from the exponent of the scheme's own rule are tried, on a tie the earlier one stays. ``hessian``:
    ``[K]`` (diagonal) or ``[K / block, block, block]``. Raises ``ValueError`` if K does not divide or the Hessian does
    not fit.
    """
    h = block_hessian(hessian, weight.shape[-1], scheme)

    def best(rows: Tensor) -> tuple[Tensor, Tensor]:
        blocks, start = blocks_of(rows, scheme), quantize(rows, scheme).scale
        candidates = [shifted(start, offset) for offset in offsets]
        scale = best_scale(blocks, candidates, torch.ones_like(start[0, 0]), scheme.element, h)
        return _values(blocks, scale, scheme), scale

    values, scale = by_rows(best, weight)
    return Quantized(values, outer=None, scale=scale)


def exponent_bias(weight: Tensor, scheme: Scheme, *, offsets: Sequence[int] = _OFFSETS) -> Quantized:
    """``weight`` ``[M, K]`` in an MX format, all exponents shifted by the one of ``offsets`` that errs least.

    Rows of several modules stacked into one ``weight`` share the shift. Raises ``ValueError`` if K does not divide.
    """
    bias = best_bias([weight], scheme, offsets=offsets)

    def biased(rows: Tensor) -> tuple[Tensor, Tensor]:
        scale = shifted(quantize(rows, scheme).scale, bias)
        return _values(blocks_of(rows, scheme), scale, scheme), scale

    values, scale = by_rows(biased, weight)
    return Quantized(values, outer=None, scale=scale)


def best_bias(weights: Sequence[Tensor], scheme: Scheme, *, offsets: Sequence[int] = _OFFSETS) -> int:
    """The shift of all exponents that makes the squared error over all ``weights`` ``[M, K]`` least; ties: the earlier.

    The modules of a group may differ in shape.
    """

    def errors(rows: Tensor) -> tuple[Tensor, ...]:
        blocks, start = blocks_of(rows, scheme), quantize(rows, scheme).scale
        shifts = [rounding_error(blocks, shifted(start, offset), scheme.element, None) for offset in offsets]
        return tuple(error.double().sum(dim=-1) for error in shifts)  # one [M] per offset

    totals = torch.zeros(len(offsets), dtype=torch.float64)
    for weight in weights:
        totals += torch.stack([error.sum() for error in by_rows(errors, weight)]).cpu()
    return offsets[int(totals.argmin())]


def shifted(scale: Tensor, offset: int) -> Tensor:
    """Power-of-two ``scale`` times ``2^offset``, within what E8M0 holds."""
    return (scale * 2.0**offset).clamp(_SMALLEST, _LARGEST)


def _values(blocks: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    wide = scale[..., None]
    return (scheme.element.round(blocks / wide) * wide).flatten(-2)
