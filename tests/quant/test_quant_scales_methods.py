"""The names of scale methods: what they stand for, and what is refused."""

import pytest
import torch
from torch import Tensor

from bitdraft.quant.block import Quantized, quantize
from bitdraft.quant.scales.four_over_six import four_over_six
from bitdraft.quant.scales.methods import SCALE_METHODS, quantize_together, scale_method
from bitdraft.quant.scales.mx_exponent import exponent_bias, exponent_search
from bitdraft.quant.scales.soar import soar
from bitdraft.quant.scales.sweep import sweep
from bitdraft.quant.schemes import (
    FP8_CHANNEL,
    INT4_GROUP,
    MXFP4_EVEN,
    MXFP4_FP_QUANT,
    MXFP4_RCEIL,
    MXFP4_RCEIL_AWAY,
    MXFP8_EVEN,
    NVFP4,
    NVFP4_CT,
    NVFP4_MODELOPT,
    Scheme,
)

FOR_NVFP4 = ["four-over-six", "four-over-six-mae", "four-over-six-abs-max", "soar", "sweep"]
FOR_MX = ["sweep-exponent", "exponent-bias"]


def sample(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def equal(a: Quantized, b: Quantized) -> bool:
    outers = a.outer is None and b.outer is None
    if a.outer is not None and b.outer is not None:
        outers = torch.equal(a.outer, b.outer)
    return outers and torch.equal(a.values, b.values) and torch.equal(a.scale, b.scale)


def test_the_methods_are_these() -> None:
    assert list(SCALE_METHODS) == ["amax", *FOR_NVFP4, *FOR_MX]
    assert all(method.name == name for name, method in SCALE_METHODS.items())


def test_each_name_stands_for_its_function() -> None:
    x = sample(0, 16, 64)
    expected = {
        "amax": quantize(x, NVFP4),
        "four-over-six": four_over_six(x, NVFP4, criterion="mse"),
        "four-over-six-mae": four_over_six(x, NVFP4, criterion="mae"),
        "four-over-six-abs-max": four_over_six(x, NVFP4, criterion="abs_max"),
        "soar": soar(x, NVFP4),
        "sweep": sweep(x, NVFP4),
    }
    for name, q in expected.items():
        assert equal(scale_method(name, NVFP4).quantize(x, NVFP4), q)
        assert [other for other, o in expected.items() if equal(o, q)] == [name], "all differ from each other"
    assert equal(scale_method("sweep-exponent", MXFP4_EVEN).quantize(x, MXFP4_EVEN), exponent_search(x, MXFP4_EVEN))
    assert equal(scale_method("exponent-bias", MXFP4_RCEIL).quantize(x, MXFP4_RCEIL), exponent_bias(x, MXFP4_RCEIL))


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("four-over-sic", "four-over-six"), ("swep", "sweep"), ("soer", "soar")]
)
def test_an_unknown_name_is_answered_with_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"unknown scale method '{wrong}': did you mean '{nearest}'"):
        scale_method(wrong, NVFP4)


@pytest.mark.parametrize("scheme", [FP8_CHANNEL, MXFP4_EVEN, INT4_GROUP, NVFP4_CT, NVFP4_MODELOPT])
@pytest.mark.parametrize("name", FOR_NVFP4)
def test_methods_for_nvfp4_refuse_other_formats(name: str, scheme: Scheme) -> None:
    with pytest.raises(ValueError, match=f"scales '{name}' belong to NVFP4 weights .*, not to '{scheme.name}'"):
        scale_method(name, scheme)


@pytest.mark.parametrize("scheme", [FP8_CHANNEL, NVFP4, INT4_GROUP, MXFP4_FP_QUANT, MXFP4_RCEIL_AWAY])
@pytest.mark.parametrize("name", FOR_MX)
def test_methods_for_exponents_refuse_other_formats(name: str, scheme: Scheme) -> None:
    with pytest.raises(ValueError, match=f"scales '{name}' belong to MX weights .*, not to '{scheme.name}'"):
        scale_method(name, scheme)


@pytest.mark.parametrize("name", ["amax", *FOR_NVFP4])
def test_weights_together_share_the_global_scale_and_are_the_rows_of_their_stack(name: str) -> None:
    weights = [sample(1, 8, 32), sample(2, 4, 32) * 3, sample(3, 16, 32) * 0.1]
    parts = quantize_together(weights, NVFP4, scale_method(name, NVFP4))
    stacked = scale_method(name, NVFP4).quantize(torch.cat(weights), NVFP4)
    assert [tuple(q.values.shape) for q in parts] == [(8, 32), (4, 32), (16, 32)]
    assert [tuple(q.scale.shape) for q in parts] == [(8, 2), (4, 2), (16, 2)]
    assert torch.equal(torch.cat([q.values for q in parts]), stacked.values)
    assert all(q.outer is not None and stacked.outer is not None and q.outer == stacked.outer for q in parts)


@pytest.mark.parametrize("scheme", [MXFP4_EVEN, MXFP4_RCEIL, MXFP8_EVEN])
@pytest.mark.parametrize("name", FOR_MX)
def test_methods_for_exponents_err_no_more_than_the_rule_in_any_mx_format(name: str, scheme: Scheme) -> None:
    x = sample(4, 32, 128)
    ours, rule = scale_method(name, scheme).quantize(x, scheme).values, quantize(x, scheme).values
    assert (ours - x).square().sum() <= (rule - x).square().sum()
