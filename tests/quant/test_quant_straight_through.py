"""The straight-through estimator: quantized forward, the gradient of the identity backward."""

import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError
from torch.utils.checkpoint import checkpoint

from bitdraft.quant.block import dequantize, quantize
from bitdraft.quant.fake import fake
from bitdraft.quant.schemes import FP8_KV, FP8_TOKEN, MXFP4_RCEIL, NVFP4, NVFP4_KERNEL, SCHEMES, Scheme
from bitdraft.quant.straight_through import Saturation, fake_quantize, saturates_above, straight_through
from bitdraft.quant.target import can_compile

ALL = [pytest.param(s, id=s.name) for s in SCHEMES.values() if s.scale != "static"]
SATURATIONS: tuple[Saturation, ...] = ("mask", "identity")
TWO_LEVEL = [pytest.param(s, id=s.name) for s in (NVFP4, NVFP4_KERNEL)]


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def gradient(y: Tensor, x: Tensor, upstream: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(y, x, upstream)
    return grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ALL)
def test_forward_is_quantization_and_the_gradient_is_the_identity(scheme: Scheme, dtype: torch.dtype) -> None:
    x = sample(2, 3, 128, dtype=dtype).requires_grad_()
    upstream = sample(2, 3, 128, dtype=dtype, seed=1)
    y = fake_quantize(x, scheme)
    assert y.dtype == dtype
    assert torch.equal(y, dequantize(quantize(x.detach(), scheme)).to(dtype))
    assert not torch.equal(y, x)
    assert torch.equal(gradient(y, x, upstream), upstream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [0.25, 1.0, 2.0])
@pytest.mark.parametrize("scheme", TWO_LEVEL)
def test_a_static_scale_stops_the_gradient_exactly_where_it_saturates(
    scheme: Scheme, limit: float, dtype: torch.dtype
) -> None:
    g = torch.tensor(2688 / limit)
    edge = torch.tensor([limit], dtype=dtype)
    outside, inside = edge.nextafter(edge * 2), edge.nextafter(edge * 0)
    x = sample(8, 64, dtype=dtype)
    x[0, :6] = torch.cat([edge, outside, inside, -edge, -outside, -inside])
    x.requires_grad_()
    upstream = sample(8, 64, dtype=dtype, seed=1)
    y = fake_quantize(x, scheme, global_scale=g)
    passes = x.abs() <= limit
    assert passes[0, :6].tolist() == [True, False, True] * 2
    assert not passes[1:].all()
    assert passes[1:].any()
    assert torch.equal(gradient(y, x, upstream), torch.where(passes, upstream, 0))
    assert (y.abs()[~passes] == limit).all()


@pytest.mark.parametrize("scheme", TWO_LEVEL)
def test_the_gradient_of_saturated_values_passes_on_request(scheme: Scheme) -> None:
    x = sample(4, 128).requires_grad_()
    upstream = sample(4, 128, seed=1)
    y = fake_quantize(x, scheme, global_scale=torch.tensor(2688.0), saturation="identity")
    assert torch.equal(y, fake_quantize(x, scheme, global_scale=torch.tensor(2688.0)))
    assert torch.equal(gradient(y, x, upstream), upstream)


@pytest.mark.parametrize("scheme", ALL)
def test_a_scale_that_follows_the_maximum_saturates_nowhere(scheme: Scheme) -> None:
    assert saturates_above(scheme, None) is None
    limit = saturates_above(scheme, torch.tensor(26.88))
    assert limit is None if not scheme.has_global_scale else limit == pytest.approx(100, rel=1e-6)


@pytest.mark.parametrize("scheme", ALL)
def test_autocast_changes_neither_value_nor_gradient(scheme: Scheme) -> None:
    x = sample(4, 128).requires_grad_()
    upstream = sample(4, 128, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = fake_quantize(x, scheme)
    assert y.dtype == torch.float32
    assert torch.equal(y, fake_quantize(x, scheme))
    assert torch.equal(gradient(y, x, upstream), upstream)


def test_a_low_bit_layer_trains_under_autocast_and_checkpointing_alike() -> None:
    """A head's own layer: both operands fake-quantized, run plain and recomputed in the backward pass."""
    weight, x = sample(16, 128).requires_grad_(), sample(4, 128, seed=1).requires_grad_()
    g = torch.tensor(2688 / 1.5)

    def layer(x: Tensor) -> Tensor:
        low_bit_x = fake_quantize(x, NVFP4_KERNEL, global_scale=g)
        return torch.nn.functional.linear(low_bit_x, fake_quantize(weight, MXFP4_RCEIL)).square()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = layer(x)
        recomputed = checkpoint(layer, x, use_reentrant=False)
    assert torch.equal(plain, recomputed)
    expected = torch.autograd.grad(plain.float().sum(), [x, weight])
    computed = torch.autograd.grad(recomputed.float().sum(), [x, weight])
    for a, b in zip(expected, computed, strict=True):
        assert torch.equal(a, b)
        assert a.abs().sum() > 0
    assert (expected[0][x.abs() > 1.5] == 0).all()


def test_straight_through_takes_the_value_of_one_and_the_gradient_of_the_other() -> None:
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    y = straight_through(x, torch.tensor([7.0, 8.0, 9.0]), torch.tensor([True, False, True]))
    assert y.tolist() == [7, 8, 9]
    y.mul(torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 0, 100]


def test_the_result_may_be_changed_in_place() -> None:
    """The forward value is a copy: an in-place operation on it must not write into the input."""
    x = torch.ones(1, 32, requires_grad=True)
    with torch.no_grad():
        fake_quantize(x, FP8_TOKEN).zero_()
    y = fake_quantize(x, FP8_TOKEN)
    y.mul_(3).sum().backward()
    assert (x == 1).all()
    assert x.grad is not None
    assert (x.grad == 3).all()


def everything(dtype: torch.dtype = torch.float32) -> Tensor:
    """``[8, 128]`` with zeros of both signs, subnormals, huge values, infinity and NaN, each in rows of their own."""
    x = sample(8, 128)
    x[1], x[2, ::2], x[3] = 0, -0.0, x[3] * 1e-39
    x[4] *= 1e30 if dtype == torch.float32 else 1e3
    x[5, 7], x[6, 9] = torch.inf, torch.nan
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda s: s.name)
def test_the_values_are_those_of_fake_bit_for_bit(scheme: Scheme, dtype: torch.dtype) -> None:
    g = torch.tensor(0.75) if scheme.scale == "static" else None
    x = everything(dtype)
    expected = fake(x, scheme, global_scale=g)
    for saturation in SATURATIONS:
        y = fake_quantize(x.clone().requires_grad_(), scheme, global_scale=g, saturation=saturation)
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(y.detach().view(bits), expected.view(bits))


@pytest.mark.parametrize(("scheme", "limit"), [(FP8_KV, 448 * 0.01), (NVFP4_KERNEL, 2688 * 0.001), (MXFP4_RCEIL, None)])
def test_gradcheck_where_the_rounding_error_stands_still(
    scheme: Scheme, limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Straight-through gradients are the true ones of the function whose rounding error is held constant."""
    error = sample(4, 32, seed=7).double()

    def smooth(x: Tensor, scheme: Scheme, *, global_scale: Tensor | None) -> Tensor:
        return (x if limit is None else x.clamp(-limit, limit)) + error

    monkeypatch.setattr("bitdraft.quant.straight_through.fake", smooth)
    g = None if limit is None else torch.tensor(0.01 if scheme is FP8_KV else 1000.0)
    x = sample(4, 32).double() * 4
    x = torch.where((x.abs() - (limit or 0)).abs() < 1e-2, 0.5, x).requires_grad_()  # finite differences at the edge
    assert limit is None or (x.abs() > limit).any()
    assert torch.autograd.gradcheck(lambda x: fake_quantize(x, scheme, global_scale=g), x)
    if limit is not None:  # and the identity is not the gradient of a function that saturates
        with pytest.raises(GradcheckError):
            torch.autograd.gradcheck(lambda x: fake_quantize(x, scheme, global_scale=g, saturation="identity"), x)


@pytest.mark.parametrize("saturation", SATURATIONS)
def test_a_static_fp8_scale_saturates_beyond_448_steps(saturation: Saturation) -> None:
    scale, x = torch.tensor(0.5), torch.tensor([[224.0, -224.0, 224.1, -300.0, torch.inf, 1.0]]).requires_grad_()
    y = fake_quantize(x, FP8_KV, global_scale=scale, saturation=saturation)
    assert y[0, :5].tolist() == [224, -224, 224, -224, 224]
    expected = [1, 1, 0, 0, 0, 1] if saturation == "mask" else [1] * 6
    assert gradient(y, x, torch.ones(1, 6)).tolist() == [expected]


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("saturation", SATURATIONS)
def test_checkpointing_computes_the_same_gradient_in_both_ways(use_reentrant: bool, saturation: Saturation) -> None:
    x, g = sample(4, 128).requires_grad_(), torch.tensor(2688 / 1.5)

    def layer(x: Tensor) -> Tensor:
        return fake_quantize(x * 1.5, NVFP4_KERNEL, global_scale=g, saturation=saturation).square().sum()

    (expected,) = torch.autograd.grad(layer(x), x)
    checkpoint(layer, x, use_reentrant=use_reentrant).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)
    assert (expected[x.abs() > 1] == 0).all() == (saturation == "mask")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_without_a_break_it_has_the_same_values_and_gradients(dtype: torch.dtype) -> None:
    if not can_compile():
        pytest.skip("no C++ compiler on the PATH")
    g, x, upstream = torch.tensor(2688 / 1.5), sample(4, 128, dtype=dtype), sample(4, 128, dtype=dtype, seed=1)

    def layer(x: Tensor) -> Tensor:
        return fake_quantize(x, NVFP4_KERNEL, global_scale=g)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    eager_x, compiled_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = compiled(compiled_x), layer(eager_x)
    assert torch.equal(y, expected)
    computed = gradient(y, compiled_x, upstream)
    assert torch.equal(computed, gradient(expected, eager_x, upstream))
    assert torch.equal(computed == 0, x.abs() > 1.5)
    torch._dynamo.reset()
