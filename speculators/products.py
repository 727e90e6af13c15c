"""Matrix products of heads in training, with their gradients (``quant/fp32_products.py`` says where they run)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from bitdraft.quant.fp32_products import prefers_onednn, times

# N row, M output channel, K input channel.


def add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """``into += a b`` for ``into [N, M]`` in fp32, ``a [N, K]`` and ``b [K, M]``; no gradient."""
    if a.dtype == torch.float32 and not prefers_onednn(a):
        into.addmm_(a, b)
    else:
        into.add_(times(a, b.T))


class Linear(nn.Linear):
    """``nn.Linear``, whose three products run where they are fast."""

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``[..., K]`` by ``[M, K]`` → ``[..., M]``, with gradients."""
    if not prefers_onednn(x) or weight.dtype != x.dtype or x.numel() == 0:
        return linear(x, weight, bias)
    y: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], -1)


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
