"""Matrix products in fp32 on CPUs.

torch multiplies fp32 with MKL, which uses AVX-512 on one maker's processors only; oneDNN, which torch carries too, uses
it on all, in the same fp32. In every other dtype and place torch's own choice is the fast one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from bitdraft.quant.linear import LowBitLinear, multiplied_by

# N row, M output channel, K input channel.


def prefers_onednn(x: Tensor) -> bool:
    """Whether products of ``x`` go through oneDNN here."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # torch's own compiler calls it; no promise is made of it
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()  # which chooses for itself
    )


def times(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a bᵀ + bias`` for ``a [N, K]`` and ``b [M, K]``, in any layout; no gradient."""
    if prefers_onednn(a):
        product: Tensor = torch.ops.mkldnn._linear_pointwise(_dense(a), _dense(b), bias, "none", [], "")
        return product
    return linear(a, b, bias)


def _dense(x: Tensor) -> Tensor:
    """A whole matrix, or the transpose of one. On some columns of another one oneDNN is very slow."""
    return x if x.is_contiguous() or x.mT.is_contiguous() else x.contiguous()


def frozen_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear`` where it is fast, ``[..., K]`` by ``[M, K]``; torch's own where ``x`` wants a gradient."""
    wants_gradient = torch.is_grad_enabled() and x.requires_grad
    if wants_gradient or not prefers_onednn(x) or x.dtype != weight.dtype or x.numel() == 0:
        return linear(x, weight, bias)
    return times(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)


@contextmanager
def fast_fp32(model: nn.Module) -> Iterator[int]:
    """Within the block the frozen linear layers of ``model`` in fp32 multiply where it is fast; yields how many those
    are."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | LowBitLinear) and _gains(m)]
    with multiplied_by(layers, lambda weight, bias: partial(frozen_product, weight=weight, bias=bias)):
        yield len(layers)


def _gains(layer: nn.Linear | LowBitLinear) -> bool:
    return type(layer) in (nn.Linear, LowBitLinear) and prefers_onednn(layer.weight) and not layer.weight.requires_grad
