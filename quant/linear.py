"""The linear layer as a low-bit engine computes it.

Weights are quantized once, when the layer is made. Activations are quantized at every call, once per
input: the layers of one model share an ``ActivationQuantizer`` that remembers the last input, so q, k and
v (or gate and up) do the work once.

The product follows the engines' order: products of unscaled values are accumulated in fp32, then scaled,
then rounded. In fp32 that is what happens here. In bf16 the matrix product rounds its result to bf16 once
*before* the outer scale is applied (PyTorch's CPU kernels return no fp32 from bf16 inputs): one more
rounding of at most 2^-8 than the engine's for formats that have an outer scale (FP8, NVFP4), none for MX formats.
``LowBitLinear.exact_product`` leaves that rounding out, at the price of multiplying in fp32.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from bitdraft.quant.block import Quantized, dequantize, quantize, spread, stand_for, to_grid
from bitdraft.quant.schemes import Scheme
from bitdraft.quant.smallint import SmallInt
from bitdraft.quant.straight_through import saturates_above


def quantize_into(values: Tensor, x: Tensor, global_scale: Tensor | None, scheme: Scheme) -> Tensor | None:
    """Quantize ``x`` ``[N, K]`` to ``scheme``: write the values, return the outer scale (``[N, 1]``, ``[N, G]`` for
    groups, ``[]``, or none)."""
    q = stand_for(to_grid(x, scheme, global_scale), scheme, x.shape, values.dtype)
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


_WORTH_COMPILING = 2**16
"""Elements below which calling a compiled kernel (0.1 to 0.2 ms) costs more than it saves; the bits are the same."""


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` for any sizes of tensors, with the numbers of the scheme as constants.

    Left to itself dynamo takes an element's bits and a block's size for inputs that may change, and inductor then
    computes powers of two with ``std::pow`` in the innermost loop. Fails instead of falling back to eager when it has
    recompiled too often.
    """
    # All schemes are one code object to dynamo: dtypes and single rows of each need more than its default of 8.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    compiled = torch.compile(function, dynamic=True, fullgraph=True)
    constants = torch._dynamo.config.patch(specialize_int=True, specialize_float=True)

    def call(*arguments: Any) -> Any:
        with constants, torch._C.DisableTorchFunction():  # dynamo would trace whatever mode the caller has set
            return compiled(*arguments)

    return call


class ActivationQuantizer:
    """Quantizes activations for the layers of one model, each distinct input once.

    ``compiled`` runs the two elementwise kernels through ``torch.compile``; the bits are the same.
    """

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        self.quantizations = 0  # how often work was really done: what the sharing test counts
        self._compiled_rescale = _compile(rescale_) if compiled else rescale_
        self._functions: dict[Scheme, Callable[[Tensor, Tensor, Tensor | None], Tensor | None]] = {}
        self._scratch = torch.empty(0)
        self._last: tuple[Tensor, int, Scheme, Tensor | None] | None = None
        self._result: tuple[Tensor, Tensor | None] | None = None

    def __call__(self, x: Tensor, scheme: Scheme, global_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """``x`` ``[..., K]`` → values ``[N, K]`` in ``x``'s dtype and the outer scale, remembered for the next layer.

        The values lie in a buffer that the next different input overwrites: use them at once.
        """
        if self._result is None or not self._is_last(x, scheme, global_scale):
            self.quantizations += 1
            rows = x.detach().reshape(-1, x.shape[-1])
            values = self._buffer_like(rows)
            self._result = values, self._function(scheme, rows)(values, rows, global_scale)
            self._last = None if x.is_inference() else (x, x._version, scheme, global_scale)
        return self._result

    def _is_last(self, x: Tensor, scheme: Scheme, global_scale: Tensor | None) -> bool:
        """Whether this very tensor, unchanged, was quantized last. Inference tensors keep no count of changes."""
        last = self._last
        return (
            last is not None
            and last[0] is x
            and last[1] == x._version
            and last[2] is scheme
            and last[3] is global_scale
        )

    def _buffer_like(self, rows: Tensor) -> Tensor:
        """Memory that stays: on CPU, fresh pages for every input cost as much as the quantization itself."""
        if (
            self._scratch.numel() < rows.numel()
            or self._scratch.dtype != rows.dtype
            or self._scratch.device != rows.device
        ):
            self._scratch = torch.empty(rows.numel(), dtype=rows.dtype, device=rows.device)
        return self._scratch[: rows.numel()].view(rows.shape)

    def _function(self, scheme: Scheme, rows: Tensor) -> Callable[[Tensor, Tensor, Tensor | None], Tensor | None]:
        if not self.compiled or rows.numel() < _WORTH_COMPILING:
            return partial(quantize_into, scheme=scheme)
        if scheme not in self._functions:
            self._functions[scheme] = _compile(partial(quantize_into, scheme=scheme))
        return self._functions[scheme]

    def rescale_(self, y: Tensor, outer_activation: Tensor | None, outer_weight: Tensor | None) -> None:
        """``rescale_``, compiled where it pays."""
        function = rescale_ if y.numel() < _WORTH_COMPILING else self._compiled_rescale
        function(y, outer_activation, outer_weight)

    def forget(self) -> None:
        """Drop the remembered input, so that its memory can be freed."""
        self._last = self._result = None


class _Product(torch.autograd.Function):
    """``y = x̂ Ŵᵀ`` with the gradient of ``x Ŵᵀ`` for ``x`` (straight through) and none for the frozen weight.

    A residual correction has its own gradient besides.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "LowBitLinear") -> Tensor:
        ctx.layer = layer
        limit = layer.saturates_above
        ctx.passes = None if limit is None else x.abs().float() <= limit
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        layer: LowBitLinear = ctx.layer
        corrected = None  # what the residual correction hands back: it reads the input as it is and saturates nowhere
        if layer.residual_in is not None and layer.residual_out is not None:
            corrected = grad @ layer.residual_out @ layer.residual_in
        if layer.weight_block is not None:
            grad_x = grad @ layer.dequantized().to(grad.dtype)
        else:
            if layer.weight_outer is not None:
                grad = (grad.float() * layer.weight_outer).to(grad.dtype)
            grad_x = grad @ layer.weight
        if ctx.passes is not None:
            grad_x = grad_x * ctx.passes
        return (grad_x if corrected is None else grad_x + corrected), None


class LowBitLinear(nn.Module):
    """A frozen linear layer with a quantized weight and, if the rule says so, quantized inputs."""

    weight_outer: Tensor | None
    input_global_scale: Tensor | None
    bias: Tensor | None
    residual_in: Tensor | None
    residual_out: Tensor | None
    exact_product = False
    """Whether 16-bit products are accumulated, scaled and only then rounded, as engines do it."""

    def __init__(
        self,
        source: nn.Linear,
        weights: Scheme,
        activations: Scheme | None,
        quantizer: ActivationQuantizer,
        *,
        weight_global_scale: Tensor | None = None,
        input_global_scale: Tensor | None = None,
        quantized: Quantized | None = None,
    ) -> None:
        """Take over ``source``: its weight ``[M, K]`` is quantized to ``weights`` in place, its bias kept.

        ``quantized`` is that weight where a scale method has already quantized it (``quant/scales``), or where a
        checkpoint holds its codes (``quant/checkpoints``). ``input_global_scale`` is required where
        ``activations`` has a static scale. Raises ``ValueError`` if ``K`` does not divide into blocks or the
        weight holds NaN or infinity.
        """
        super().__init__()
        static = activations is not None and (activations.has_global_scale or activations.scale == "static")
        if activations is not None and static and input_global_scale is None:
            raise ValueError(f"activations in {activations.name} need a static scale from calibration")
        if not torch.isfinite(source.weight).all():
            raise ValueError("the weight holds NaN or infinity")
        q = quantized
        if q is None:
            q = quantize(source.weight.detach(), weights, global_scale=weight_global_scale)
        outer, values = q.outer, q.values
        if activations is None and q.block is not None and isinstance(weights.element, SmallInt):
            values, outer = dequantize(q), None  # integer groups: W4A16 kernels multiply rounded codes · scale (Marlin)
        if outer is not None and outer.ndim and outer.shape[-1] == 1:
            outer = outer.squeeze(-1)
        self.weight = nn.Parameter(values.to(source.weight.dtype), requires_grad=False)
        self.register_buffer("weight_outer", outer)  # [M], [], or [M, G] where blocks of the row have their own
        self.weight_block = q.block if outer is not None and outer.ndim == 2 else None
        self.register_buffer("input_global_scale", input_global_scale)
        self.bias = source.bias
        self.packed: Callable[[Tensor], Tensor] | None = None  # the product, while ``packed_weights`` makes it faster
        self.register_buffer("residual_in", None)  # [r, K] and [M, r] once ``correct`` was called
        self.register_buffer("residual_out", None)
        self.weights, self.activations, self.quantizer = weights, activations, quantizer
        self.in_features, self.out_features = source.in_features, source.out_features

    def correct(self, residual_in: Tensor, residual_out: Tensor) -> None:
        """Add ``residual_out · residual_in · x`` to the outputs from now on (``quant/residual.py``).

        ``residual_in``: ``[r, K]``; ``residual_out``: ``[M, r]``; kept in the layer's dtype. ``x`` is the input before
        it is quantized.
        """
        self.residual_in, self.residual_out = residual_in.to(self.weight.dtype), residual_out.to(self.weight.dtype)

    @property
    def saturates_above(self) -> Tensor | None:
        return saturates_above(self.activations, self.input_global_scale) if self.activations else None

    def product(self, x: Tensor) -> Tensor:
        """The forward computation, without a gradient."""
        outer = None
        rows = x.reshape(-1, x.shape[-1])  # [N, K]
        if self.activations is not None:
            rows, outer = self.quantizer(x, self.activations, self.input_global_scale)
        y = self.multiply(rows, outer).view(*x.shape[:-1], self.out_features)
        if self.residual_in is None or self.residual_out is None:
            return y
        return y + linear(linear(x, self.residual_in), self.residual_out)

    def multiply(self, values: Tensor, outer: Tensor | None) -> Tensor:
        """Inputs that are already quantized, ``values`` ``[N, K]`` and their outer scale → ``[N, M]``, no gradient."""
        input_block = self.activations.block if self.activations and outer is not None and outer.ndim else None
        if self.weight_block is not None or (input_block is not None and input_block < self.in_features):
            y = self._sum_over_blocks(values, outer, input_block or self.in_features)
        else:
            scaled = outer is not None or self.weight_outer is not None
            if scaled and self.exact_product:  # a copy of this one weight in fp32, for the length of the call
                y = linear(values.float(), self.weight.float())
            else:
                y = linear(values, self.weight) if self.packed is None else self.packed(values)
            if scaled:
                self.quantizer.rescale_(y, outer, self.weight_outer)
            y = y.to(values.dtype)
        return y if self.bias is None else y + self.bias

    def _sum_over_blocks(self, values: Tensor, outer: Tensor | None, input_block: int) -> Tensor:
        """The product where fp32 scales differ along K: block-wise FP8. Products of one block are accumulated, scaled
        and added in fp32, as DeepGEMM does, and rounded once."""
        weight_block = self.weight_block or self.in_features
        step = math.gcd(input_block, weight_block)
        y = values.new_zeros(len(values), self.out_features, dtype=torch.float32)
        for start in range(0, self.in_features, step):
            part = slice(start, min(start + step, self.in_features))
            product = linear(values[:, part].float(), self.weight[:, part].float())
            if outer is not None:
                at = start // input_block
                product *= outer[:, at : at + 1] if outer.ndim else outer
            if self.weight_outer is not None:
                product *= self.weight_outer[:, start // weight_block] if self.weight_block else self.weight_outer
            y += product
        return y.to(values.dtype)

    def dequantized(self) -> Tensor:
        """``[M, K]`` fp32: the weight that this layer stands for."""
        outer = self.weight_outer
        if outer is None:
            return self.weight.float()
        if self.weight_block is not None:
            return self.weight.float() * spread(outer, self.weight_block, self.in_features)
        return self.weight.float() * (outer[:, None] if outer.ndim else outer)

    def forward(self, x: Tensor) -> Tensor:
        # Autocast would compute an fp32 target in bf16: its dtype is a choice that was made at load.
        with torch.autocast(x.device.type, enabled=False):
            if torch.is_grad_enabled() and x.requires_grad:
                return _Product.apply(x, self)
            with torch.no_grad():
                return self.product(x)

    def extra_repr(self) -> str:
        activations = self.activations.name if self.activations else "as they come"
        return f"{self.in_features}, {self.out_features}, weights={self.weights.name}, activations={activations}"


@contextmanager
def multiplied_by(
    layers: Iterable[nn.Linear | LowBitLinear],
    product_of: Callable[[Tensor, Tensor | None], Callable[..., Tensor]],
) -> Iterator[None]:
    """Within the block each of ``layers`` multiplies by ``product_of(weight, bias)``: ``[..., K]`` → ``[..., M]``."""
    with ExitStack() as undo:
        for layer in layers:
            if isinstance(layer, LowBitLinear):  # which adds its bias behind the scales
                layer.packed = product_of(layer.weight, None)
                undo.callback(setattr, layer, "packed", None)
            else:
                layer.forward = product_of(layer.weight, layer.bias)  # type: ignore[method-assign]
                undo.callback(delattr, layer, "forward")
        yield
