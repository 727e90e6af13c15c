"""The linear layer as a low-bit engine computes it.

Weights are quantized once, when the layer is made. Activations are quantized at every call, once per
input: the layers of one model share an ``ActivationQuantizer`` that remembers the last input, so q, k and
v (or gate and up) do the work once.

The product follows the engines' order: products of unscaled values are accumulated in fp32, then scaled,
then rounded. In fp32 that is what happens here. In bf16 the matrix product rounds its result to bf16 once
*before* the outer scale is applied (PyTorch's CPU kernels return no fp32 from bf16 inputs): one more
rounding of 2^-9 than the engine's for formats that have an outer scale (FP8, NVFP4), none for MX formats.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from bitdraft.quant.block import quantize
from bitdraft.quant.fake import saturates_above
from bitdraft.quant.schemes import Scheme


def quantize_into(values: Tensor, x: Tensor, global_scale: Tensor | None, scheme: Scheme) -> Tensor | None:
    """Quantize ``x`` ``[N, K]`` to ``scheme``: write the values, return the outer scale (``[N, 1]``, ``[]`` or
    none)."""
    q = quantize(x, scheme, global_scale=global_scale)
    values.copy_(q.values)
    return q.outer


def rescale_(y: Tensor, outer_activation: Tensor | None, outer_weight: Tensor | None) -> None:
    """Multiply ``y`` ``[N, M]`` by the outer scales (``[N, 1]`` or ``[]``; ``[M]`` or ``[]``) in place,
    rounding once."""
    scaled = y.float()
    if outer_activation is not None:
        scaled = scaled * outer_activation
    if outer_weight is not None:
        scaled = scaled * outer_weight
    y.copy_(scaled)


class ActivationQuantizer:
    """Quantizes activations for the layers of one model, each distinct input once.

    ``compiled`` runs the two elementwise kernels through ``torch.compile``; the bits are the same.
    """

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        self.quantizations = 0  # how often work was really done: what the sharing test counts
        self.rescale_ = torch.compile(rescale_, dynamic=True) if compiled else rescale_
        self._functions: dict[Scheme, Callable[[Tensor, Tensor, Tensor | None], Tensor | None]] = {}
        self._scratch = torch.empty(0)
        self._last: tuple[Tensor, int, Scheme, Tensor | None] | None = None
        self._result: tuple[Tensor, Tensor | None] | None = None

    def __call__(self, x: Tensor, scheme: Scheme, global_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """``x`` ``[..., K]`` → values ``[N, K]`` in ``x``'s dtype and the outer scale, remembered for the next layer.

        The values lie in a buffer that the next different input overwrites: use them at once.
        """
        last = self._last
        if (
            last is None
            or last[0] is not x
            or last[1] != x._version
            or last[2] is not scheme
            or last[3] is not global_scale
        ):
            self.quantizations += 1
            rows = x.detach().reshape(-1, x.shape[-1])
            values = self._buffer_like(rows)
            self._result = values, self._function(scheme)(values, rows, global_scale)
            self._last = (x, x._version, scheme, global_scale)
        assert self._result is not None
        return self._result

    def _buffer_like(self, rows: Tensor) -> Tensor:
        """Memory that stays: on CPU, fresh pages for every input cost as much as the quantization itself."""
        if (
            self._scratch.numel() < rows.numel()
            or self._scratch.dtype != rows.dtype
            or self._scratch.device != rows.device
        ):
            self._scratch = torch.empty(rows.numel(), dtype=rows.dtype, device=rows.device)
        return self._scratch[: rows.numel()].view(rows.shape)

    def _function(self, scheme: Scheme) -> Callable[[Tensor, Tensor, Tensor | None], Tensor | None]:
        if scheme not in self._functions:
            function = partial(quantize_into, scheme=scheme)
            self._functions[scheme] = torch.compile(function, dynamic=True) if self.compiled else function
        return self._functions[scheme]

    def forget(self) -> None:
        """Drop the remembered input, so that its memory can be freed."""
        self._last = self._result = None


class _Product(torch.autograd.Function):
    """``y = x̂ Ŵᵀ`` with the gradient of ``x Ŵᵀ`` for ``x`` (straight through) and none for the frozen weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "LowBitLinear") -> Tensor:
        ctx.layer = layer
        limit = layer.saturates_above
        ctx.passes = None if limit is None else x.abs() <= limit
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        layer: LowBitLinear = ctx.layer
        if layer.weight_outer is not None:
            grad = (grad.float() * layer.weight_outer).to(grad.dtype)
        grad_x = grad @ layer.weight
        return (grad_x if ctx.passes is None else grad_x * ctx.passes), None


class LowBitLinear(nn.Module):
    """A frozen linear layer with a quantized weight and, if the rule says so, quantized inputs."""

    weight_outer: Tensor | None
    input_global_scale: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        source: nn.Linear,
        weights: Scheme,
        activations: Scheme | None,
        quantizer: ActivationQuantizer,
        *,
        weight_global_scale: Tensor | None = None,
        input_global_scale: Tensor | None = None,
    ) -> None:
        """Take over ``source``: its weight ``[M, K]`` is quantized to ``weights`` in place, its bias kept.

        ``input_global_scale`` is required where ``activations`` has a global scale. Raises ``ValueError``
        if ``K`` does not divide into blocks or the weight holds NaN or infinity.
        """
        super().__init__()
        if not torch.isfinite(source.weight).all():
            raise ValueError("the weight holds NaN or infinity")
        q = quantize(source.weight.detach(), weights, global_scale=weight_global_scale)
        self.weight = nn.Parameter(q.values.to(source.weight.dtype), requires_grad=False)
        outer = q.outer.squeeze(-1) if q.outer is not None and q.outer.ndim else q.outer  # [M] or []
        self.register_buffer("weight_outer", outer)
        self.register_buffer("input_global_scale", input_global_scale)
        self.bias = source.bias
        self.weights, self.activations, self.quantizer = weights, activations, quantizer
        self.in_features, self.out_features = source.in_features, source.out_features

    @property
    def saturates_above(self) -> Tensor | None:
        return saturates_above(self.activations, self.input_global_scale) if self.activations else None

    def product(self, x: Tensor) -> Tensor:
        """The forward computation, without a gradient."""
        outer = None
        rows = x.reshape(-1, x.shape[-1])  # [N, K]
        if self.activations is not None:
            rows, outer = self.quantizer(x, self.activations, self.input_global_scale)
        y = linear(rows, self.weight)  # [N, M]
        if outer is not None or self.weight_outer is not None:
            self.quantizer.rescale_(y, outer, self.weight_outer)
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            return _Product.apply(x, self)
        with torch.no_grad():
            return self.product(x)

    def extra_repr(self) -> str:
        activations = self.activations.name if self.activations else "as they come"
        return f"{self.in_features}, {self.out_features}, weights={self.weights.name}, activations={activations}"
