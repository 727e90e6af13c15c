"""The straight-through estimator: quantized forward, the gradient of the identity backward."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bitdraft.quant.block import dequantize, quantize
from bitdraft.quant.fake import fake_quantize, saturates_above, straight_through
from bitdraft.quant.schemes import FP8_TOKEN, MXFP4_RCEIL, NVFP4, NVFP4_KERNEL, SCHEMES, Scheme

ALL = [pytest.param(s, id=s.name) for s in SCHEMES.values() if s.scale != "static"]
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
    y = fake_quantize(x, scheme, global_scale=torch.tensor(2688.0), clip_gradient=False)
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
