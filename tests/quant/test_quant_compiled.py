"""The compiled kernels compute the bits of the eager ones.

Each scheme and dtype is one compilation of some seconds, so everything that could go differently stands in one
input: ties, subnormals, zeros of both signs, saturation, NaN and infinity.
"""

from collections.abc import Iterator

import pytest
import torch
from bits import bits
from torch import Tensor, nn
from torch._dynamo import config, reset
from torch._dynamo.utils import counters

from bitdraft.quant import linear
from bitdraft.quant.linear import ActivationQuantizer, LowBitLinear
from bitdraft.quant.schemes import FP8_CHANNEL, FP8_TOKEN, MXFP4_RCEIL, NVFP4_KERNEL, Scheme
from bitdraft.quant.target import can_compile

K = 96


@pytest.fixture
def _compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A compiler without memory of other tests, used for the smallest input, which would rather fail than fall back."""
    if not can_compile():
        pytest.skip("no C++ compiler on the PATH")
    monkeypatch.setattr(linear, "_WORTH_COMPILING", 0)
    reset()
    with config.patch(fail_on_recompile_limit_hit=True):
        yield
    reset()


def graphs_compiled() -> int:
    return counters["stats"]["unique_graphs"]


def hard_rows(dtype: torch.dtype) -> Tensor:
    x = torch.randn(24, K, generator=torch.Generator().manual_seed(0))
    x = x * 2.0 ** torch.arange(-12, 12)[:, None]
    x[3] = 0
    x[4] = -0.0
    x[5] = torch.linspace(-6, 6, 97)[:K]  # every tie of E2M1 under scale 1
    x[6] = torch.linspace(-448, 448, 97)[:K]
    x[7] = 1e-40
    x[8] *= 1e-38
    x[9, ::7] = 1e38
    x[10, 3] = torch.nan
    x[11, 50] = torch.inf
    x[12, 60] = -torch.inf
    x[13] = 6.0
    x[14] = 7.0
    return x.to(dtype)


def assert_quantizers_agree(scheme: Scheme, x: Tensor, compiled: ActivationQuantizer) -> None:
    eager = ActivationQuantizer(compiled=False)
    scale = torch.tensor(500.0) if scheme.has_global_scale else None
    values, outer = compiled(x, scheme, scale)
    expected, expected_outer = eager(x, scheme, scale)
    assert torch.equal(bits(values), bits(expected))
    assert (outer is None) == (expected_outer is None)
    if outer is not None and expected_outer is not None:
        assert torch.equal(bits(outer), bits(expected_outer))


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("scheme", [FP8_TOKEN, MXFP4_RCEIL, NVFP4_KERNEL], ids=lambda s: s.name)
def test_the_compiled_quantizer_computes_the_same_bits(scheme: Scheme) -> None:
    compiled, before = ActivationQuantizer(compiled=True), graphs_compiled()
    for dtype in (torch.bfloat16, torch.float32):
        x = hard_rows(dtype)
        assert_quantizers_agree(scheme, x, compiled)
        assert_quantizers_agree(scheme, x[5:16], compiled)
    assert graphs_compiled() - before == 2, "one compilation per dtype, none for another number of rows"


@pytest.mark.usefixtures("_compiler")
def test_a_compiled_layer_computes_the_same_bits() -> None:
    """FP8 on both sides: the scales of rows and of columns are applied by a compiled kernel too."""
    compiled, eager = ActivationQuantizer(compiled=True), ActivationQuantizer(compiled=False)
    before = graphs_compiled()
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        source = nn.Linear(K, 40, dtype=dtype)
        layers = [LowBitLinear(source, FP8_CHANNEL, FP8_TOKEN, q) for q in (compiled, eager)]
        x = torch.randn(2, 7, K).to(dtype)
        assert torch.equal(bits(layers[0](x)), bits(layers[1](x)))
    assert graphs_compiled() - before == 4
