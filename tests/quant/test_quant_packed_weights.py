"""Weights laid out once: the same bits, for as long as the block lasts and no longer."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from bitdraft.quant import packed_weights as module
from bitdraft.quant.linear import ActivationQuantizer, LowBitLinear
from bitdraft.quant.packed_weights import packed_weights
from bitdraft.quant.schemes import SCHEMES

pytestmark = pytest.mark.skipif(not module._can_pack(), reason="this torch has no oneDNN products with packed weights")


def layer(bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(96, 160, bias=bias, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 31, 32, 33, 64, 129, 500, 3000])
def test_products_have_the_same_bits(rows: int, bias: bool) -> None:
    model = nn.Sequential(layer(bias))
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows)).bfloat16()
    expected = model(x)
    with packed_weights(model) as count:
        assert count == 1
        assert torch.equal(model(x), expected)
        assert torch.equal(model(x[None].expand(1, rows, 96)), expected[None])
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("scheme", ["mxfp4-even", "fp8-channel"])
def test_low_bit_layers_have_the_same_bits(scheme: str) -> None:
    low = LowBitLinear(layer(), SCHEMES[scheme], SCHEMES["fp8-token"], ActivationQuantizer(compiled=False))
    model, x = nn.ModuleList([low]), torch.randn(7, 96).bfloat16()
    expected = low(x)
    with packed_weights(model) as count:
        assert count == 1 and low.packed is not None
        assert torch.equal(low(x), expected)
    assert low.packed is None


def test_the_packed_weight_is_what_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = nn.Sequential(layer()), []

    def counting(*arguments: torch.Tensor) -> torch.Tensor:
        calls.append(len(arguments[0]))
        return linear(*arguments)

    monkeypatch.setattr(module, "linear", counting)
    with packed_weights(model):
        model(torch.zeros(1, 96).bfloat16())
        model(torch.zeros(300, 96).bfloat16())
        assert calls == []
        with torch.autocast("cpu", torch.float16):
            model(torch.zeros(2, 96).bfloat16())
        assert calls == [2]


def test_an_error_within_the_block_undoes_it() -> None:
    model = nn.Sequential(layer())
    with pytest.raises(KeyError), packed_weights(model):
        raise KeyError
    assert "forward" not in vars(model[0])
    copy.deepcopy(model)


def test_what_gains_nothing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = layer().requires_grad_(True)
    with packed_weights(nn.ModuleList([layer(dtype=torch.float32), trained, nn.Embedding(4, 4)])) as count:
        assert count == 0
    monkeypatch.setattr(module, "_MOST_BYTES", 96 * 160 * 2 - 1)
    with packed_weights(nn.Sequential(layer())) as count:
        assert count == 0


def test_no_row_is_no_product() -> None:
    model = nn.Sequential(layer())
    with packed_weights(model):
        assert model(torch.zeros(0, 96).bfloat16()).shape == (0, 160)
