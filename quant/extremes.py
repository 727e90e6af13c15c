"""The largest and smallest values of blocks, found the way that is fast on CPU; the same values on every way.

PyTorch's own reductions are not vectorized for 16-bit types, nor over as few as 16 elements; inductor handles half a
vector at a time where 16 elements have 16 bits. Results are fp32, NaN wherever there is one, and 0 for blocks without
elements.
"""

from typing import Literal

import torch
from torch import Tensor

from bitdraft.quant.scale_rules import stored

Extreme = Literal["magnitude", "highest", "lowest"]


def largest_magnitude(x: Tensor) -> Tensor:
    """``[]`` fp32: the largest magnitude of a whole tensor of any floating-point dtype."""
    return extreme(x, tuple(range(x.ndim)), "magnitude").reshape(())


def extreme(x: Tensor, inner: tuple[int, ...], which: Extreme) -> Tensor:
    """The largest magnitude, the highest or the lowest value over the dimensions ``inner``, which stay as 1; fp32."""
    if x.numel() == 0:
        shape = [1 if i - x.ndim in inner or i in inner else n for i, n in enumerate(x.shape)]
        return x.new_zeros(shape, dtype=torch.float32)
    sixteen = inner == (-1,) and x.shape[-1] == 16
    if torch.compiler.is_compiling():
        if sixteen and which == "magnitude" and x.element_size() == 2:
            # The bits of magnitudes are ordered as they are, NaN above all.
            return stored((x.view(torch.int16) & 0x7FFF).amax(dim=-1, keepdim=True).view(x.dtype).float())
    elif x.device.type == "cpu":
        x = x.float()
    if which == "magnitude":
        x = x.abs()
    if sixteen and not torch.compiler.is_compiling():
        pick = torch.minimum if which == "lowest" else torch.maximum
        x = pick(x[..., :8], x[..., 8:])
    return (x.amin(dim=inner, keepdim=True) if which == "lowest" else x.amax(dim=inner, keepdim=True)).float()
