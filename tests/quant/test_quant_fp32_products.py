"""fp32 products through oneDNN: torch's numbers in every layout, for as long as the block lasts and no longer."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from bitdraft.quant import fp32_products as module
from bitdraft.quant.fp32_products import fast_fp32, prefers_onednn, times
from bitdraft.quant.linear import ActivationQuantizer, LowBitLinear
from bitdraft.quant.schemes import SCHEMES
from bitdraft.quant.target import LowBitTarget

onednn = pytest.mark.skipif(not prefers_onednn(torch.zeros(1)), reason="this processor has no AVX-512, or no oneDNN")


def layer(bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(96, 160, bias=bias, dtype=dtype).requires_grad_(False)


def test_operands_may_be_columns_of_a_matrix() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(9, 2, 6), torch.randn(4, 3, 6)
    torch.testing.assert_close(times(a[:, 1], b[:, 2]), a[:, 1] @ b[:, 2].T)


@onednn
def test_onednn_never_sees_columns_of_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take a thousand times as long."""
    dense: list[bool] = []

    def noting(a: torch.Tensor, b: torch.Tensor, *_: object) -> torch.Tensor:
        dense.extend(x.is_contiguous() or x.mT.is_contiguous() for x in (a, b))
        return a @ b.mT

    monkeypatch.setattr(module.torch.ops.mkldnn, "_linear_pointwise", noting)
    times(torch.randn(9, 2, 6)[:, 1], torch.randn(6, 8)[:, :4].T)
    assert dense == [True, True]


@onednn
@pytest.mark.parametrize("bias", [True, False])
def test_frozen_layers_multiply_by_onednn_within_the_block_alone(bias: bool) -> None:
    model, x = nn.Sequential(layer(bias)), torch.randn(2, 5, 96)
    expected = model(x)
    with fast_fp32(model) as count, torch.profiler.profile() as profile:
        assert count == 1
        torch.testing.assert_close(model(x), expected)
        assert model(x[:, :0]).shape == (2, 0, 160)
    assert "mkldnn::_linear_pointwise" in {event.name for event in profile.events()}
    assert "forward" not in vars(model[0])
    with pytest.raises(KeyError), fast_fp32(model):
        raise KeyError
    assert "forward" not in vars(model[0])


@onednn
@pytest.mark.parametrize("scheme", ["mxfp4-even", "fp8-channel"])
def test_low_bit_layers_take_part(scheme: str) -> None:
    low = LowBitLinear(layer(), SCHEMES[scheme], SCHEMES["fp8-token"], ActivationQuantizer(compiled=False))
    model, x = nn.ModuleList([low]), torch.randn(7, 96)
    expected = low(x)
    with fast_fp32(model) as count:
        assert count == 1 and low.packed is not None
        torch.testing.assert_close(low(x), expected)
    assert low.packed is None


def test_what_is_trained_or_in_16_bit_is_left_alone() -> None:
    with fast_fp32(nn.ModuleList([layer(dtype=torch.bfloat16), layer().requires_grad_(True)])) as count:
        assert count == 0


def test_the_teacher_s_logits_are_the_target_s(tiny_target: Callable[..., LowBitTarget]) -> None:
    target = tiny_target("none")
    ids, hidden = torch.arange(3, target.vocab_size, 2), torch.randn(5, target.hidden_size, dtype=target.dtype)
    with torch.no_grad():
        expected = target.logits(hidden)[:, ids]
        torch.testing.assert_close(target.logits_of(ids)(hidden), expected)
