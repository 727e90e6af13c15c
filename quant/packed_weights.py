"""Weights laid out once for many products, as decoding has them.

On a CPU torch multiplies bf16 through oneDNN, which copies the weight into a layout of its own in every call. For the
few rows of a decoding step the copy is a good part of the product, for those of a short prompt a small one; made once,
the product has the same bits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from bitdraft.quant.linear import LowBitLinear, multiplied_by

# N row, M output channel, K input channel.

_USUAL_ROWS = 32  # the layout suits any number of rows; oneDNN wants to know of one
_MOST_BYTES = 2 * 1024**3  # of weights that are held twice


@contextmanager
def packed_weights(model: nn.Module) -> Iterator[int]:
    """Within the block, the model's linear layers multiply by weights that are laid out for it; yields how many
    layers that is. None where it brings nothing: on other devices and in other dtypes, and for models whose
    weights are too large to be held twice. No gradient flows through such a product.
    """
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | LowBitLinear) and _gains(m)]
    if not _can_pack() or sum(m.weight.nbytes for m in layers) > _MOST_BYTES:
        layers = []
    with multiplied_by(layers, _packed_product):
        yield len(layers)


def _packed_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _USUAL_ROWS)
    return partial(_product, packed, weight, bias)


def _can_pack() -> bool:
    names = ("_reorder_linear_weight", "_linear_pointwise")  # torch's own compiler calls them; no promise is made
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)


def _gains(layer: nn.Linear | LowBitLinear) -> bool:
    by_blocks = isinstance(layer, LowBitLinear) and layer.weight_block is not None
    weight = layer.weight
    suits = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and not weight.requires_grad
    return suits and not by_blocks and type(layer) in (nn.Linear, LowBitLinear)


def _product(packed: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """``[..., K]`` → ``[..., M]``."""
    rows = x.numel() // x.shape[-1]
    if rows == 0 or x.dtype != packed.dtype or torch.is_autocast_enabled("cpu"):
        return linear(x, weight, bias)
    flat = x.reshape(rows, x.shape[-1])
    product: Tensor = torch.ops.mkldnn._linear_pointwise(flat, packed, bias, "none", [], "")
    return product.view(*x.shape[:-1], -1)
