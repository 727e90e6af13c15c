"""Sums in fp64 within fp32: a row's result does not depend on the rows beside it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bitdraft.quant.linear import ActivationQuantizer, LowBitLinear
from bitdraft.quant.schemes import scheme_named
from bitdraft.quant.steady_sums import can_steady, steady_sums

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "matmul": lambda x: x @ torch.linspace(-1, 1, 333).view(333, 1).expand(-1, 70),
    "softmax": lambda x: torch.softmax(x, dim=-1, dtype=torch.float32),
    "mean": lambda x: x.pow(2).mean(-1, keepdim=True),
    "silu": functional.silu,
    "sdpa": lambda x: functional.scaled_dot_product_attention(*x[None, None, :, :330].split(110, dim=-1)),
    "einsum": lambda x: torch.einsum("nk,mk->nm", x, torch.linspace(0, 1, 3330).view(10, 333)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_fp64_rounded_once(name: str) -> None:
    x = torch.randn(5, 333, generator=torch.Generator().manual_seed(1))
    function = FUNCTIONS[name]
    if name in ("matmul", "einsum", "softmax"):
        wide = {
            "matmul": lambda y: y @ torch.linspace(-1, 1, 333).view(333, 1).expand(-1, 70).double(),
            "softmax": lambda y: torch.softmax(y, dim=-1),
            "einsum": lambda y: torch.einsum("nk,mk->nm", y, torch.linspace(0, 1, 3330).view(10, 333).double()),
        }[name](x.double())
    else:
        wide = function(x.double())
    with steady_sums(nn.Identity()):
        steady = function(x)
    assert steady.dtype == torch.float32
    assert torch.equal(steady, wide.float())


@pytest.mark.parametrize("activations", [None, "fp8-token", "mxfp4-even"])
def test_a_row_alone_is_computed_as_among_others(activations: str | None) -> None:
    torch.manual_seed(0)
    source = nn.Linear(1536, 576, bias=False)
    scheme = None if activations is None else scheme_named(activations)
    layer = LowBitLinear(source, scheme_named("mxfp4-even"), scheme, ActivationQuantizer(compiled=False))
    x = torch.randn(37, 1536)
    with steady_sums(layer):
        together = layer(x)
        alone = torch.cat([layer(row[None]) for row in x])
        in_fours = torch.cat([layer(rows) for rows in x.split(4)])
    assert torch.equal(together, alone) and torch.equal(together, in_fours)


def test_the_weights_are_widened_once_and_stay_what_they_are() -> None:
    layer = nn.Linear(8, 4)
    before = layer.weight.detach().clone()
    x = torch.randn(3, 8)
    with steady_sums(layer), torch.no_grad():
        inside = layer(x)
        layer.weight.mul_(2)  # the copies were made at the start: nobody trains in here
        again = layer(x)
        layer.weight.div_(2)
    assert torch.equal(inside, again)
    assert torch.equal(layer.weight, before) and layer.weight.dtype == torch.float32
    assert torch.equal(inside, functional.linear(x.double(), layer.weight.double(), layer.bias.double()).float())


def test_other_dtypes_and_other_functions_are_left_alone() -> None:
    x = torch.randn(4, 8)
    with steady_sums(nn.Identity()):
        assert functional.linear(x.bfloat16(), x.bfloat16()).dtype == torch.bfloat16
        assert (x.double() @ x.T.double()).dtype == torch.float64
        assert torch.arange(4).sum().dtype == torch.int64
        assert torch.equal(x + x, 2 * x)


def test_only_models_without_16_bit_weights_can_be_steady() -> None:
    assert can_steady(nn.Linear(2, 2))
    assert not can_steady(nn.Linear(2, 2).bfloat16())
    assert not can_steady(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half()))
