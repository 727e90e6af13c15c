"""Products through oneDNN are torch's own, with their gradients."""

import pytest
import torch
from torch import nn

from bitdraft.speculators import products
from bitdraft.speculators.products import Linear, times


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 12), (1, 12), (2, 3, 12), (0, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_layer_and_its_gradients_are_torch_s(bias: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mine = Linear(12, 5, bias=bias, dtype=dtype)
    its = nn.Linear(12, 5, bias=bias, dtype=dtype)
    its.load_state_dict(mine.state_dict())
    x = torch.randn(shape, dtype=dtype)
    found = []
    for layer in (mine, its):
        given = x.clone().requires_grad_()
        y = layer(given)
        y.square().sum().backward()
        found.append([y, given.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_strided_operands_multiply_as_they_stand() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(9, 6), torch.randn(6, 4)
    torch.testing.assert_close(times(a, b.T), a @ b)
    torch.testing.assert_close(times(a.T, b.T[:, :0].T.new_ones(3, 9)), a.T @ torch.ones(9, 3))


def test_autocast_keeps_its_dtype() -> None:
    layer, x = Linear(8, 4), torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_frozen_parameters_get_no_gradient() -> None:
    layer = Linear(8, 4).requires_grad_(False)
    x = torch.randn(3, 8, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None


@pytest.mark.skipif(not products.prefers_onednn(torch.zeros(1)), reason="this processor has no AVX-512, or no oneDNN")
def test_onednn_is_really_called() -> None:
    with torch.profiler.profile() as profile:
        Linear(64, 64)(torch.randn(32, 64, requires_grad=True)).sum().backward()
    names = {event.name for event in profile.events()}
    assert "mkldnn::_linear_pointwise" in names
    assert not {"aten::mm", "aten::addmm"} & names
