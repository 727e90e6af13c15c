"""A linear layer that is trained as an engine will compute it: low-bit weight and inputs, straight-through gradients.

The layer's parameters are the masters, of the same names and types as in the 16-bit layer, so that checkpoints,
optimizers, DDP and FSDP2 see nothing new. What multiplies is quantized from them by the very functions that quantize a
head for export, and multiplied by ``LowBitLinear``. With ``x̂`` and ``Ŵ`` for what the engine multiplies by,

    y = x̂ Ŵᵀ        ∂L/∂x = ∂L/∂y Ŵ, zero where a static scale saturates        ∂L/∂W = ∂L/∂yᵀ x̂

The scales count as constants (``quant/straight_through.py``). Those of weights follow their largest value, so nothing
of a weight's gradient is held back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from bitdraft.quant.at_load import AtLoad, loaded
from bitdraft.quant.block import Quantized, dequantize, stand_for, to_grid
from bitdraft.quant.linear import ActivationQuantizer, LowBitLinear
from bitdraft.quant.recipe import Rule
from bitdraft.quant.schemes import Scheme
from bitdraft.quant.straight_through import saturates_above
from bitdraft.quant.weights import scaled_weights
from bitdraft.speculators.products import Linear

# N row, M output channel, K input channel.


@dataclass(frozen=True)
class Computation:
    """How layers that engines fuse are stored, and how they are computed then."""

    rule: Rule
    inputs: Scheme | None
    """The format that inputs are quantized to: the rule's, or what a profile puts in its place."""
    at_load: AtLoad = "decode"
    exact_product: bool = False


class Inputs(NamedTuple):
    """Quantized inputs of layers that engines fuse."""

    values: Tensor  # [N, K] as ``LowBitLinear.multiply`` takes them
    outer: Tensor | None  # [N, 1], [N, G], [] or none
    passes: Tensor | None  # [N, K] bool: where gradients pass; ``None`` where all do


class FusedLayers:
    """Layers that engines fuse, or one alone: their weights and their common input are quantized together, and once.

    Weights are quantized again when one of them has changed, and after every backward pass: FSDP2 where it gathers
    parameters, and optimizers that write through ``.data``, leave no trace in their versions. So it happens once for
    all draft steps of a forward pass, and never while drafting. (Activation checkpointing does it again where it
    repeats a pass.)
    """

    def __init__(self, layers: Sequence["TrainedLinear"], names: Sequence[str], how: Computation) -> None:
        self.layers, self.names, self.how = list(layers), list(names), how
        self.quantizations = 0  # of the weights: what the tests of the cache count
        self._weights: tuple[object, list[LowBitLinear]] | None = None
        self._inputs: tuple[ref[Tensor], object, Inputs] | None = None  # the input itself holds a graph
        self._quantizer = ActivationQuantizer(compiled=False)  # of which the layers use ``rescale_``
        for place, layer in enumerate(layers):
            layer.fused, layer.place = self, place

    def weights(self, dtype: torch.dtype) -> list[LowBitLinear]:
        """The layers as engines compute them in ``dtype``, without their biases."""
        masters = [layer.weight for layer in self.layers]
        key = (dtype, *((w._version, w.data_ptr(), w.dtype, w.device) for w in masters))
        if self._weights is None or self._weights[0] != key:
            with torch.no_grad():
                self._weights = key, self._quantized([w.detach() for w in masters], dtype)
        return self._weights[1]

    def inputs(self, x: Tensor, dtype: torch.dtype) -> Inputs:
        """``x`` ``[..., K]`` in ``dtype``, quantized; remembered for the other layers that read this very tensor."""
        key = None if x.is_inference() else (x._version, dtype, torch.is_grad_enabled())
        last = self._inputs
        if last is not None and key is not None and last[0]() is x and last[1] == key:
            return last[2]
        differentiates = torch.is_grad_enabled() and x.requires_grad
        with torch.no_grad():
            inputs = self._quantized_inputs(x.detach().reshape(-1, x.shape[-1]).to(dtype), differentiates)
        self._inputs = None if key is None else (ref(x), key, inputs)
        return inputs

    def forget(self) -> None:
        """Quantize anew at the next call."""
        self._weights = self._inputs = None

    def _quantized(self, masters: list[Tensor], dtype: torch.dtype) -> list[LowBitLinear]:
        self.quantizations += 1
        for name, weight in zip(self.names, masters, strict=True):
            if not torch.isfinite(weight).all():
                raise ValueError(f"module {name}: the weight holds NaN or infinity, so the training has diverged")
        rule, inputs = self.how.rule, self.how.inputs
        scheme = rule.weight_scheme
        assert scheme is not None
        computed = []
        for layer, q in zip(self.layers, loaded(scaled_weights(masters, rule), self.how.at_load, dtype), strict=True):
            scale = layer.input_global_scale if inputs else None
            low = LowBitLinear(layer, scheme, inputs, self._quantizer, input_global_scale=scale, quantized=q)
            low.weight.data = low.weight.data.to(dtype)  # exact, where values and scale are kept apart
            low.bias = None  # trained as it is
            low.exact_product = self.how.exact_product
            computed.append(low)
        return computed

    def _quantized_inputs(self, rows: Tensor, differentiates: bool) -> Inputs:
        scheme = self.how.inputs
        if scheme is None:
            return Inputs(rows, None, None)
        scale = self.layers[0].input_global_scale
        q = stand_for(to_grid(rows, scheme, scale), scheme, rows.shape, rows.dtype)
        limit = saturates_above(scheme, scale) if differentiates else None
        return Inputs(q.values, q.outer, None if limit is None else rows.abs().float() <= limit)


class _Product(torch.autograd.Function):
    """``x̂ Ŵᵀ`` with the gradients of the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, master: Tensor, inputs: Inputs, computed: LowBitLinear, fused: FusedLayers
    ) -> Tensor:
        ctx.save_for_backward(*inputs)  # in place of x itself, and shared by the layers that read it
        ctx.computed, ctx.fused = computed, fused
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, master.dtype)
        return computed.multiply(inputs.values, inputs.outer).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad = grads[0].reshape(-1, grads[0].shape[-1])  # [N, M]
        inputs, computed = Inputs(*ctx.saved_tensors), ctx.computed
        ctx.fused.forget()
        grad_x = grad_master = None
        if ctx.needs_input_grad[0]:
            grad_x = _times_weight(grad, computed)
            if inputs.passes is not None:
                grad_x = grad_x * inputs.passes
            grad_x = grad_x.view(ctx.shape).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            grad_master = (grad.T @ _dequantized(inputs, computed.activations)).to(ctx.dtypes[1])
        return grad_x, grad_master, None, None, None


def _times_weight(grad: Tensor, computed: LowBitLinear) -> Tensor:
    """``[N, M]`` → ``[N, K]``."""
    if computed.weight_block is not None:
        return grad @ computed.dequantized().to(grad.dtype)
    if computed.weight_outer is not None:
        grad = (grad.float() * computed.weight_outer).to(grad.dtype)
    return grad @ computed.weight


def _dequantized(inputs: Inputs, scheme: Scheme | None) -> Tensor:
    """``[N, K]`` in the values' dtype."""
    values, outer, _ = inputs
    if outer is None or scheme is None:
        return values
    block = scheme.block if outer.ndim else None
    return dequantize(Quantized(values.float(), outer, outer, block)).to(values.dtype)


class TrainedLinear(nn.Linear):
    """A linear layer whose parameters are masters; it computes what the engine will make of them."""

    input_global_scale: Tensor | None
    """The static scale that its inputs are trained with; no part of the state dict, which is the 16-bit layer's."""
    fused: FusedLayers
    place: int

    def __init__(self, source: nn.Linear, input_global_scale: Tensor | None) -> None:
        """Take over the parameters of ``source``, the very objects. ``FusedLayers`` makes it ready to compute."""
        super().__init__(source.in_features, source.out_features, bias=source.bias is not None, device="meta")
        self.weight, self.bias = source.weight, source.bias
        self.register_buffer("input_global_scale", input_global_scale, persistent=False)
        self.train(source.training)

    def forward(self, input: Tensor) -> Tensor:
        """``[..., K]`` → ``[..., M]``, under autocast in its dtype, whatever dtype the masters have."""
        kind = input.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        with torch.autocast(kind, enabled=False):
            computed = self.fused.weights(cast or self.weight.dtype)[self.place]
            inputs = self.fused.inputs(input, cast or input.dtype)
            y: Tensor = _Product.apply(input, self.weight, inputs, computed, self.fused)
            return y if self.bias is None else y + self.bias.to(y.dtype)

    def scale_for(self, rule: Rule) -> Tensor | None:
        """The static scale that its inputs are trained with, if ``rule`` puts them in the same format."""
        return self.input_global_scale if rule.activations == self.fused.how.rule.activations else None

    def plain(self) -> Linear:
        """The 16-bit layer with the masters, the very objects."""
        layer = Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        layer.weight, layer.bias = self.weight, self.bias
        return layer.train(self.training)

    def extra_repr(self) -> str:
        rule = self.fused.how.rule
        return f"{super().extra_repr()}, {rule.formats}"
