"""Compiled fake-quantization has the bits of the eager one: one scheme of each kind of arithmetic.

A compilation takes seconds, so everything that could go differently stands in one input.
"""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from bitdraft.quant.fake import fake
from bitdraft.quant.schemes import INT4_GROUP, Scheme, scheme_named
from bitdraft.quant.target import can_compile

KINDS = ["fp8-group128-sglang", "fp8-block128", "mxfp6-e2m3-floor", "mxfp4-rceil-away", "nvfp4-modelopt", "int8-token"]


@pytest.fixture
def _compiler() -> Iterator[None]:
    if not can_compile():
        pytest.skip("no C++ compiler on the PATH")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def hard_rows() -> Tensor:
    """``[24, 256]``: sizes from 2^-12 to 2^11, ties, subnormals, zeros of both signs, NaN and infinity."""
    x = torch.randn(24, 256, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(-12, 12)[:, None]
    x[3], x[4], x[7] = 0, -0.0, 1e-40
    x[5] = torch.arange(-128, 128) / 16  # every tie of E2M1 and many of the finer grids
    x[8] *= 1e-38
    x[10, 3], x[11, 200] = torch.nan, torch.inf
    return x


def bits(x: Tensor) -> Tensor:
    words = x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32).long()
    return torch.where(x.isnan(), -1, words)


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_the_compiled_result_has_the_same_bits(name: str, dtype: torch.dtype) -> None:
    scheme, x = scheme_named(name), hard_rows().to(dtype)
    x = x if scheme.block != 16 else x[:10]  # one NaN makes all of a tensor under a dynamic global scale NaN
    compiled = torch.compile(partial(fake, scheme=scheme), fullgraph=True, dynamic=False)
    assert torch.equal(bits(compiled(x)), bits(fake(x, scheme)))


def compiled(scheme: Scheme, x: Tensor) -> Tensor:
    return torch.compile(partial(fake, scheme=scheme), fullgraph=True)(x)


@pytest.mark.usefixtures("_compiler")
def test_arithmetic_in_bf16_is_not_compiled_because_it_would_not_be_in_bf16() -> None:
    x = hard_rows()
    assert torch.equal(bits(compiled(INT4_GROUP, x)), bits(fake(x, INT4_GROUP)))
    with pytest.raises(Exception, match=r"computes in that dtype, which torch\.compile would not"):
        compiled(INT4_GROUP, x.bfloat16())
