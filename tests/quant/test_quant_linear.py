"""The low-bit linear layer against a float64 product of the operands it stands for.

Bounds are the textbook ones: a sum of K products in fp32, in any order, is off by at most K · 2^-24 of the sum
of magnitudes; each rounding of a result to bf16 (8 significant bits) adds 2^-8 of it.
"""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bitdraft.quant.block import dequantize, quantize
from bitdraft.quant.linear import ActivationQuantizer, LowBitLinear
from bitdraft.quant.schemes import (
    FP8_CHANNEL,
    FP8_TOKEN,
    MXFP4_EVEN,
    MXFP4_RCEIL,
    NVFP4,
    NVFP4_KERNEL,
    Scheme,
    scheme_named,
)
from bitdraft.quant.target import LowBitTarget

K, M = 96, 40
INPUT_SCALE = 2688 / 2.0  # inputs beyond 2 saturate
PAIRS = [
    pytest.param(weights, activations, id=f"{weights.name}+{activations.name if activations else 'a16'}")
    for weights, activations in [
        (FP8_CHANNEL, FP8_TOKEN),
        (MXFP4_EVEN, FP8_TOKEN),
        (MXFP4_EVEN, MXFP4_RCEIL),
        (MXFP4_EVEN, None),
        (NVFP4, NVFP4_KERNEL),
        (NVFP4, None),
    ]
]


def sample(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_layer(
    weights: Scheme,
    activations: Scheme | None,
    *,
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
    quantizer: ActivationQuantizer | None = None,
    seed: int = 0,
) -> tuple[LowBitLinear, nn.Linear]:
    """The layer and a copy of the linear layer it was made from."""
    source = nn.Linear(K, M, bias=bias, dtype=dtype)
    with torch.no_grad():
        for number, parameter in enumerate(source.parameters()):
            parameter.copy_(sample(*parameter.shape, seed=seed + number, dtype=dtype))
    copy = nn.Linear(K, M, bias=bias, dtype=dtype)
    copy.load_state_dict(source.state_dict())
    has_static_scale = activations is not None and activations.has_global_scale
    layer = LowBitLinear(
        source,
        weights,
        activations,
        quantizer or ActivationQuantizer(compiled=False),
        input_global_scale=torch.tensor(INPUT_SCALE) if has_static_scale else None,
    )
    return layer, copy


def exactly(x: Tensor, scheme: Scheme | None, global_scale: Tensor | None = None) -> Tensor:
    """``x`` as ``scheme`` sees it, in float64: nothing is rounded when the two factors are multiplied."""
    if scheme is None:
        return x.double()
    q = quantize(x, scheme, global_scale=global_scale)
    return q.values.double() if q.outer is None else q.values.double() * q.outer.double()


def operands(layer: LowBitLinear, source: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    weight = exactly(source.weight.detach(), layer.weights)
    return exactly(x.detach(), layer.activations, layer.input_global_scale), weight


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("weights", "activations"), PAIRS)
def test_forward_in_fp32_is_the_exact_product_up_to_fp32_summation(
    weights: Scheme, activations: Scheme | None, bias: bool
) -> None:
    layer, source = make_layer(weights, activations, bias=bias)
    x = sample(7, K, seed=5)
    low_x, low_w = operands(layer, source, x)
    exact, magnitude = low_x @ low_w.T, low_x.abs() @ low_w.abs().T
    if bias:
        exact, magnitude = exact + source.bias.double(), magnitude + source.bias.double().abs()
    error = (layer(x).double() - exact).abs()
    assert (error <= (K + 4) * 2.0**-24 * magnitude).all()
    assert (error.norm() / exact.norm()) < 1e-6


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("weights", "activations"), PAIRS)
def test_forward_in_bf16_rounds_as_often_as_documented(weights: Scheme, activations: Scheme | None, bias: bool) -> None:
    """Once; once more where an outer scale is applied (FP8, NVFP4); and once more for a bias."""
    layer, source = make_layer(weights, activations, bias=bias, dtype=torch.bfloat16)
    x = sample(7, K, seed=5, dtype=torch.bfloat16)
    low_x, low_w = operands(layer, source, x)
    product, magnitude = low_x @ low_w.T, low_x.abs() @ low_w.abs().T
    has_outer = layer.weight_outer is not None or (activations is not None and activations.block is None)
    has_outer |= activations is not None and activations.has_global_scale
    bound = (1 + has_outer) * 2.0**-8 * product.abs() + (K + 4) * 2.0**-24 * magnitude
    exact = product
    if bias:
        exact = product + source.bias.double()
        bound = bound + 2.0**-8 * exact.abs()
    y = layer(x)
    assert y.dtype == torch.bfloat16
    assert ((y.double() - exact).abs() <= bound * (1 + 2.0**-6)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("weights", "activations"), PAIRS)
def test_the_gradient_of_the_input_is_that_of_the_low_bit_weight(
    weights: Scheme, activations: Scheme | None, dtype: torch.dtype
) -> None:
    layer, source = make_layer(weights, activations, dtype=dtype)
    x = sample(3, 5, K, seed=5, dtype=dtype).requires_grad_()
    grad_y = sample(3, 5, M, seed=6, dtype=dtype)
    (grad_x,) = torch.autograd.grad(layer(x), x, grad_y)
    _, low_w = operands(layer, source, x)
    exact, magnitude = grad_y.double() @ low_w, grad_y.double().abs() @ low_w.abs()
    if activations is NVFP4_KERNEL:
        saturated = x.abs() > 2
        assert saturated.any()
        assert (grad_x[saturated] == 0).all()
        exact = exact.masked_fill(saturated, 0)
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-24
    assert grad_x.dtype == dtype
    assert ((grad_x.double() - exact).abs() <= (2 * unit + (M + 4) * 2.0**-24) * magnitude).all()


@pytest.mark.parametrize(("weights", "activations"), PAIRS)
def test_the_value_does_not_depend_on_whether_a_gradient_is_wanted(weights: Scheme, activations: Scheme | None) -> None:
    layer, _ = make_layer(weights, activations)
    x = sample(2, 3, K, seed=5)
    with_gradient = layer(x.clone().requires_grad_())
    assert with_gradient.requires_grad
    without = layer(x)
    assert not without.requires_grad
    assert torch.equal(with_gradient, without)
    assert without.shape == (2, 3, M)


def test_the_layer_is_frozen() -> None:
    layer, source = make_layer(MXFP4_EVEN, FP8_TOKEN)
    assert not any(p.requires_grad for p in [layer.weight])
    before = layer.weight.clone()
    x = sample(2, K).requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert torch.equal(layer.weight, before)
    assert torch.equal(layer.bias, source.bias) if layer.bias is not None else False


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_is_refused(bad: float) -> None:
    source = nn.Linear(K, M)
    with torch.no_grad():
        source.weight[3, 4] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        LowBitLinear(source, MXFP4_EVEN, None, ActivationQuantizer(compiled=False))


def test_a_width_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="48 columns do not divide into blocks of 32"):
        LowBitLinear(nn.Linear(48, 8), MXFP4_EVEN, None, ActivationQuantizer(compiled=False))


def test_layers_of_one_input_quantize_it_once() -> None:
    quantizer = ActivationQuantizer(compiled=False)
    layers = [make_layer(MXFP4_EVEN, FP8_TOKEN, quantizer=quantizer, seed=s)[0] for s in range(3)]
    x = sample(2, K)
    for layer in layers:
        layer(x)
    assert quantizer.quantizations == 1
    layers[0](x.clone())
    assert quantizer.quantizations == 2


def test_sharing_holds_while_a_gradient_is_recorded() -> None:
    quantizer = ActivationQuantizer(compiled=False)
    layers = [make_layer(MXFP4_EVEN, FP8_TOKEN, quantizer=quantizer, seed=s)[0] for s in range(3)]
    x = sample(2, K).requires_grad_()
    torch.stack([layer(x) for layer in layers]).sum().backward()
    assert quantizer.quantizations == 1


def change_by_view(x: Tensor) -> None:
    x[0, :8] = 3.0


def change_whole(x: Tensor) -> None:
    x.mul_(2)


@pytest.mark.parametrize("change", [change_by_view, change_whole])
def test_sharing_does_not_survive_a_change_of_the_input_in_place(change: Callable[[Tensor], None]) -> None:
    layer, _ = make_layer(MXFP4_EVEN, FP8_TOKEN)
    fresh, _ = make_layer(MXFP4_EVEN, FP8_TOKEN)
    x = sample(2, K)
    layer(x)
    change(x)
    assert torch.equal(layer(x), fresh(x.clone()))
    assert layer.quantizer.quantizations == 2


def test_sharing_tells_formats_and_static_scales_apart() -> None:
    quantizer = ActivationQuantizer(compiled=False)
    x = sample(2, K)
    pairs = [(FP8_TOKEN, None), (MXFP4_RCEIL, None), (NVFP4_KERNEL, torch.tensor(9.0))]
    pairs.append((NVFP4_KERNEL, torch.tensor(1000.0)))
    for scheme, scale in pairs:
        values, outer = quantizer(x, scheme, scale)
        expected = quantize(x, scheme, global_scale=scale)
        assert torch.equal(values, expected.values)
        assert (outer is None) == (expected.outer is None)
    assert quantizer.quantizations == 4


def test_layers_that_take_turns_do_not_read_each_others_inputs() -> None:
    """Every new input overwrites the buffer; sizes and dtypes change in between."""
    quantizer = ActivationQuantizer(compiled=False)
    shared, _ = make_layer(NVFP4, NVFP4_KERNEL, quantizer=quantizer)
    other, _ = make_layer(MXFP4_EVEN, FP8_TOKEN, quantizer=quantizer, seed=3, dtype=torch.bfloat16)
    alone, _ = make_layer(NVFP4, NVFP4_KERNEL)
    inputs = [sample(n, K, seed=n) for n in (3, 9, 1, 4)]
    for x in [*inputs, *reversed(inputs)]:
        assert torch.equal(shared(x), alone(x.clone()))
        other(x.bfloat16())
        assert torch.equal(shared(x), alone(x.clone()))


def test_forgetting_frees_the_input() -> None:
    layer, _ = make_layer(MXFP4_EVEN, FP8_TOKEN)
    x = sample(2, K)
    layer(x)
    alive = weakref.ref(x)
    layer.quantizer.forget()
    del x
    assert alive() is None


@pytest.mark.parametrize(
    ("preset", "per_layer"),
    [("mxfp4", 4), ("fp8", 4), ("mxfp4a4", 4), ("nvfp4", 4), ("mxfp4a16", 0), ("nvfp4a16", 0), ("none", 0)],
)
def test_a_decoder_layer_quantizes_four_inputs(
    tiny_target: Callable[[str], LowBitTarget], preset: str, per_layer: int
) -> None:
    """q, k and v share one; o has one; gate and up share one; down has one."""
    target = tiny_target(preset)
    before = target.applied.quantizer.quantizations
    target.states(torch.arange(12)[None])
    assert target.applied.quantizer.quantizations - before == per_layer * target.layers


@pytest.mark.parametrize(("weights", "activations"), PAIRS)
def test_the_layer_says_what_it_is(weights: Scheme, activations: Scheme | None) -> None:
    text = repr(make_layer(weights, activations)[0])
    assert f"{K}, {M}, weights={weights.name}" in text
    assert f"activations={activations.name if activations else 'as they come'}" in text


@pytest.mark.parametrize(
    ("weights", "activations"),
    [
        ("fp8-block128", "fp8-group128"),
        ("fp8-channel", "fp8-group128"),
        ("mxfp4-even", "fp8-group128"),
        ("fp8-block128", "fp8-token"),
        ("fp8-block128", None),
        ("fp8-tensor", "fp8-tensor-static"),
        ("int4-g128", None),
        ("int4-g128-asym", None),
        ("int8-channel", "int8-token"),
    ],
)
def test_scales_that_differ_along_the_row_are_applied_block_by_block(weights: str, activations: str | None) -> None:
    """Against fp64 products of the dequantized factors; 40 rows and 384 columns leave a short block of rows."""
    torch.manual_seed(0)
    source = nn.Linear(384, 40).requires_grad_(False)
    x = torch.randn(7, 384) * torch.logspace(-2, 2, 384)
    scheme, inputs = scheme_named(weights), scheme_named(activations) if activations else None
    static = torch.tensor(0.5) if activations == "fp8-tensor-static" else None
    expected = dequantize(quantize(source.weight, scheme)).double()
    rounded = dequantize(quantize(x, inputs, global_scale=static)).double() if inputs else x.double()
    layer = LowBitLinear(source, scheme, inputs, ActivationQuantizer(compiled=False), input_global_scale=static)
    torch.testing.assert_close(layer.dequantized().double(), expected, rtol=1e-6, atol=0)
    product = rounded @ expected.T + source.bias.double()
    torch.testing.assert_close(layer(x).double(), product, rtol=1e-4, atol=1e-4)
    wanting = x.clone().requires_grad_()
    layer(wanting).sum().backward()
    assert wanting.grad is not None
    passes = 1.0 if static is None else x.abs() <= 448 * static
    torch.testing.assert_close(wanting.grad.double(), expected.sum(0).expand(7, -1) * passes, rtol=1e-4, atol=1e-4)


def test_a_static_input_scale_is_required() -> None:
    quantizer = ActivationQuantizer(compiled=False)
    with pytest.raises(ValueError, match="fp8-tensor-static need a static scale"):
        LowBitLinear(nn.Linear(32, 8), scheme_named("fp8-tensor"), scheme_named("fp8-tensor-static"), quantizer)
