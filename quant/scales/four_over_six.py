"""FourOverSix: map a block's largest magnitude to 6 or to 4, whichever errs less (arXiv:2512.02010).

E2M1 has nothing between 4 and 6, so a block with values at 80 % of its maximum rounds them badly. With the scale
1.5 times as large the maximum lands on 4, code 6 goes unused, and the grid is even up to the top. The global scale
leaves room for it: 256 · 6 / amax instead of 448 · 6, because 1.5 · 256 = 384 is still an E4M3 number. The result is
an ordinary NVFP4 tensor.

The trap: the 1.5 multiplies the block scale *before* it is rounded to E4M3. Codes come from reciprocals, as in the
paper's reference; unlike it, codes saturate at 6 (there, blocks of subnormal scale can lose their largest value).
"""

from typing import Literal

import torch
from torch import Tensor

from bitdraft.quant.block import Quantized
from bitdraft.quant.scales.error import blocks_of, by_rows
from bitdraft.quant.schemes import Scheme
from bitdraft.quant.smallfloat import E4M3

Criterion = Literal["mse", "mae", "abs_max"]

_LARGEST_BLOCK_SCALE = 256.0  # E4M3's 448 would leave no room for 1.5 times as much


def four_over_six(weight: Tensor, scheme: Scheme, *, criterion: Criterion = "mse") -> Quantized:
    """``weight`` ``[M, K]``, finite, of any float dtype, in NVFP4 with the better of two scales per block.

    ``criterion``: a block's error is the sum of squares, the sum of magnitudes or the largest magnitude of its
    differences, in the weight's own units. On a tie the maximum goes to 6. Raises ``ValueError`` if K does not divide.
    """
    amax = weight.abs().amax().float()
    span = _LARGEST_BLOCK_SCALE * scheme.element.max
    # As in nvfp4_global_scale: zeros, and what is so small that the quotient overflows, get 1.
    encode = torch.where(amax <= span / torch.finfo(torch.float32).max, torch.ones_like(amax), span / amax)
    values, scale = by_rows(lambda rows: _better_of_two(blocks_of(rows, scheme), encode, scheme, criterion), weight)
    return Quantized(values, outer=1.0 / encode, scale=scale)


def _better_of_two(blocks: Tensor, encode: Tensor, scheme: Scheme, criterion: Criterion) -> tuple[Tensor, Tensor]:
    """``[M, B, E]`` → values ``[M, K]`` and block scales ``[M, B]``."""
    decode = 1.0 / encode
    unrounded = blocks.abs().amax(dim=-1, keepdim=True) / scheme.element.max * encode
    scales, values, errors = [], [], []
    for stretch in (1.0, 1.5):
        scale = E4M3.round(unrounded * stretch)
        inverse = torch.where(scale == 0, 0.0, 1.0 / (decode * scale))
        values.append(scheme.element.round(blocks * inverse) * scale)
        errors.append(_error(values[-1] * decode - blocks, criterion))
        scales.append(scale)
    four = errors[1] < errors[0]
    scale, value = torch.where(four, scales[1], scales[0]), torch.where(four, values[1], values[0])
    return value.flatten(-2), scale.squeeze(-1)


def _error(difference: Tensor, criterion: Criterion) -> Tensor:
    """``[..., E]`` → ``[..., 1]``."""
    if criterion == "mse":
        return difference.square().sum(dim=-1, keepdim=True)
    magnitudes = difference.abs()
    return magnitudes.sum(dim=-1, keepdim=True) if criterion == "mae" else magnitudes.amax(dim=-1, keepdim=True)


def blocks_at_four(q: Quantized) -> Tensor:
    """``[M, B]`` bool: the blocks of an NVFP4 tensor whose largest code is 4, that is those FourOverSix scaled to 4.

    Rounding to a normal E4M3 scale moves the maximum by at most 1/16: from 4 to no further than 4.25, from 6 to no
    less than 5.6, so the code tells the two apart.
    """
    codes = q.values.unflatten(-1, (q.scale.shape[-1], -1)).abs() / q.scale[..., None]
    return codes.amax(dim=-1) == 4
