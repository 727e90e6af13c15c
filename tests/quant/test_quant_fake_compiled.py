"""Compiled fake-quantization has the bits of the eager one: one scheme of each kind of arithmetic.

A compilation takes seconds, so everything that could go differently stands in one input.
"""

from functools import partial

import pytest
import torch
from bits import bits
from torch import Tensor

from bitdraft.quant.fake import fake
from bitdraft.quant.scale_rules import rounded_to
from bitdraft.quant.schemes import NVFP4_CT, scheme_named

KINDS = [
    "fp8-group128-sglang", "fp8-block128", "mxfp6-e2m3-floor", "mxfp4-rceil-away", "nvfp4", "nvfp4-modelopt",
    "int8-token", "int4-g128-asym", "fp8-channel-ct",
]  # fmt: skip


def hard_rows() -> Tensor:
    """``[24, 256]``: sizes from 2^-12 to 2^11, ties, subnormals, zeros of both signs, NaN and infinity."""
    x = torch.randn(24, 256, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(-12, 12)[:, None]
    x[3], x[4], x[7] = 0, -0.0, 1e-40
    x[5] = torch.arange(-128, 128) / 16  # every tie of E2M1 and many of the finer grids
    x[8] *= 1e-38
    x[10, 3], x[11, 200] = torch.nan, torch.inf
    return x


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_the_compiled_result_has_the_same_bits(name: str, dtype: torch.dtype) -> None:
    scheme, x = scheme_named(name), hard_rows().to(dtype)
    x = x if scheme.block != 16 else x[:10]  # one NaN makes all of a tensor under a dynamic global scale NaN
    compiled = torch.compile(partial(fake, scheme=scheme), fullgraph=True, dynamic=False)
    assert torch.equal(bits(compiled(x)), bits(fake(x, scheme)))


@pytest.mark.usefixtures("fresh_compiler")
def test_blocks_of_sixteen_that_make_no_pairs_have_the_same_bits_too() -> None:
    x = hard_rows()[:10, :240].bfloat16()
    scheme = scheme_named("nvfp4-kernel")
    compiled = torch.compile(partial(fake, scheme=scheme), fullgraph=True, dynamic=False)
    assert torch.equal(bits(compiled(x)), bits(fake(x, scheme)))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bounded", [False, True], ids=["scale", "quotient"])
def test_compiled_arithmetic_rounds_as_a_cast(bounded: bool, dtype: torch.dtype) -> None:
    """Every mantissa of one binade, both signs; at the edges of the range what a code can depend on."""
    mantissas = torch.arange(2**23, dtype=torch.int32) + (127 << 23)
    x = mantissas.view(torch.float32)[:: 7 if bounded else 5]
    edges = torch.tensor([0.0, 65503.0, 65519.99, 2.0**-14, 1.0 - 2.0**-12, 2.0 - 2.0**-9])
    if not bounded:
        edges = torch.cat([edges, torch.tensor([65520.0, 1e5, 3.3e38, 3.39e38, 3.4e38, torch.inf, torch.nan])])
        edges = torch.cat([edges, torch.tensor([-1, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)])  # NaN
    middles = 1 + torch.arange(1, 2**12) * 2.0**-12
    x = torch.cat([x, edges, middles, 3 * middles])
    x = torch.cat([x, -x])
    compiled = torch.compile(partial(rounded_to, dtype=dtype, bounded=bounded), fullgraph=True, dynamic=False)
    assert torch.equal(bits(compiled(x)), bits(x.to(dtype).float()))


@pytest.mark.usefixtures("fresh_compiler")
def test_two_levels_in_bf16_arithmetic_are_not_compiled_because_they_would_not_be_in_bf16() -> None:
    x = hard_rows()[:10]
    compiled = torch.compile(partial(fake, scheme=NVFP4_CT), fullgraph=True)
    assert torch.equal(bits(compiled(x)), bits(fake(x, NVFP4_CT)))
    with pytest.raises(Exception, match=r"computes in that dtype, which torch\.compile would not"):
        compiled(x.bfloat16())
