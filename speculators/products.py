"""Matrix products of heads in training.

In fp32 on a CPU torch multiplies with MKL, which uses AVX-512 on one maker's processors only; oneDNN, which torch
carries too, uses it on all, in the same fp32 and up to twice as fast. In every other dtype and place torch's own choice
is the fast one.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

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
        product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
        return product
    return linear(a, b, bias)


def add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """``into += a b`` for ``into [N, M]`` in fp32, ``a [N, K]`` and ``b [K, M]``; no gradient."""
    if a.dtype == torch.float32 and not prefers_onednn(a):
        into.addmm_(a, b)
    else:
        into.add_(times(a, b.T))


class Linear(nn.Linear):
    """``nn.Linear``, whose three products run where they are fast."""

    def forward(self, input: Tensor) -> Tensor:
        if not prefers_onednn(input) or self.weight.dtype != input.dtype or input.numel() == 0:
            return super().forward(input)
        y: Tensor = _Product.apply(input.reshape(-1, input.shape[-1]), self.weight, self.bias)
        return y.view(*input.shape[:-1], -1)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return times(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (grad,) = grads  # [N, M]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            times(grad, weight.T) if needs_x else None,
            times(grad.T, x.T) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )
