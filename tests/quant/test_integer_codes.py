"""Integer codes: what is computed more cheaply than it is written down gives the same codes, compiled and not."""

from functools import partial

import pytest
import torch
from bits import bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdraft.quant.fake import fake
from bitdraft.quant.scale_rules import integer_quotient
from bitdraft.quant.schemes import INT4_GROUP, INT4_GROUP_ASYM, scheme_named
from bitdraft.quant.smallint import INT4, INT8, SmallInt

ELEMENTS = [pytest.param(e, id=e.name) for e in (INT4, INT8)]


def every_bf16() -> Tensor:
    """``[512, 128]``: all 65536 bit patterns; shuffled, so that groups hold sizes far apart, NaN and infinity."""
    words = torch.randperm(2**16, generator=torch.Generator().manual_seed(0)) - 2**15
    return words.to(torch.int16).view(torch.bfloat16).view(512, 128)


def weights_like() -> Tensor:
    """``[512, 128]`` bf16: rows whose every quotient matters, at many scales."""
    x = torch.randn(512, 128, generator=torch.Generator().manual_seed(1))
    return (x * torch.rand(512, 1, generator=torch.Generator().manual_seed(2)).mul(20).sub(10).exp2()).bfloat16()


def test_the_product_with_the_inverse_is_the_rounded_quotient_for_every_pair_of_bf16_mantissas() -> None:
    """Both are the same function in every binade, as long as nothing is subnormal, so that these are all."""
    mantissas = 1 + torch.arange(128) / 128
    for exponent in (-120, -40, 0, 7, 100):
        scale = mantissas[:, None] * 2.0**exponent
        work = mantissas * 2.0**exponent * torch.tensor([1.0, -1.0, 16.0])[:, None, None]
        exact = (work.double() / scale.double()).float().bfloat16().float()
        native = work.bfloat16() / scale.bfloat16()
        assert torch.equal(exact, native.float())
        assert torch.equal(integer_quotient(work, scale, INT4_GROUP, torch.bfloat16), exact)


def test_the_product_with_the_inverse_is_the_rounded_quotient_for_every_bf16_number() -> None:
    x = every_bf16().flatten().float()
    x = x[x.abs() < 2.0**100]
    for scale in torch.rand(64, generator=torch.Generator().manual_seed(3)).mul(20).sub(10).exp2().bfloat16():
        quotient = integer_quotient(x, scale.float(), INT4_GROUP, torch.bfloat16)
        within = (x / scale.float()).abs() > torch.finfo(torch.float32).tiny
        assert torch.equal(quotient[within], (x.bfloat16() / scale).float()[within])
        assert (quotient[~within].abs() < 2.0**-100).all()


def test_in_fp32_and_fp16_it_is_the_quotient_itself() -> None:
    """There the product with the inverse is another number now and then."""
    work, scale = weights_like().float() / 3, torch.tensor(0.0071)
    assert torch.equal(integer_quotient(work, scale, INT4_GROUP, torch.float32), work / scale)
    assert not torch.equal(work * (1 / scale), work / scale)
    half = work.half()
    assert torch.equal(integer_quotient(half.float(), scale.half().float(), INT4_GROUP, torch.float16).half(),
                       half / scale.half())  # fmt: skip


@pytest.mark.parametrize("element", ELEMENTS)
def test_capped_rounding_is_rounding_from_the_tie_under_the_range_upwards(element: SmallInt) -> None:
    x = torch.cat([torch.arange(2 * element.min - 1, 4 * element.max) / 2, torch.tensor([-0.0, 1e-30, torch.nan])])
    assert torch.equal(bits(element.round_capped(x)), bits(element.round(x)))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_rounding_is_the_eager_one_for_whatever_number() -> None:
    """Ties and their neighbours, zeros, what the sum with the constant swallows, infinities and NaN, in odd lengths."""
    ties = torch.arange(-600, 600) / 2
    x = torch.cat(
        [ties, ties.nextafter(torch.tensor(1e9)), ties.nextafter(torch.tensor(-1e9)), 2.0 ** torch.arange(127)]
    )
    x = torch.cat([x, -(2.0 ** torch.arange(127)), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45])])

    def both(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return INT4.round(x), INT8.round(x), INT4.round_capped(x)

    found = torch.compile(both, fullgraph=True, dynamic=False)(x)
    assert torch.equal(bits(found[0]), bits(INT4.round(x)))
    assert torch.equal(bits(found[1]), bits(INT8.round(x)))
    at_least = ~(x < INT4.min - 0.5)
    assert torch.equal(bits(found[2][at_least]), bits(INT4.round_capped(x)[at_least]))


def shifted(lowest: Tensor, element: SmallInt, dtype: torch.dtype) -> Tensor:
    """Where the zero point puts the lowest quotient of a block, every step rounded to ``dtype``."""
    zero = element.round((element.min - lowest.float()).to(dtype).float())
    return (lowest.float() + zero).to(dtype).float()


@pytest.mark.parametrize(
    ("element", "dtype"), [(INT4, torch.bfloat16), (INT4, torch.float16), (INT8, torch.float16)], ids=str
)
def test_no_lowest_quotient_lies_below_the_tie_under_the_range(element: SmallInt, dtype: torch.dtype) -> None:
    every = torch.arange(2**15, dtype=torch.int16).view(dtype)
    lowest = -every[every.float() <= element.max - element.min + 0.4]
    assert shifted(lowest, element, dtype).min() == element.min - 0.5


@settings(deadline=None)
@given(st.integers(0, 254), st.integers(-40, 40))
def test_nor_in_fp32_around_every_tie(half_steps: int, ulps: int) -> None:
    near = (torch.tensor(half_steps / 2).view(torch.int32) + max(ulps, -half_steps)).view(torch.float32)
    for element in (INT4, INT8):
        if near <= element.max - element.min + 0.4:
            assert shifted(-near, element, torch.float32) >= element.min - 0.5


def test_eight_bits_in_bf16_do_fall_below_and_are_saturated() -> None:
    every = torch.arange(2**15, dtype=torch.int16).view(torch.bfloat16)
    assert shifted(-every[every <= 255], INT8, torch.bfloat16).min() < INT8.min - 0.5
    scheme = scheme_named("int8-g128-asym")
    for lowest in every[(every > 0.5) & (every < 2)].float():
        x = torch.linspace(-lowest.item(), 1.0, 128).bfloat16()[None]
        assert torch.equal(fake(x, scheme), native_bf16(x, "int8-g128-asym"))


def native_bf16(x: Tensor, name: str) -> Tensor:
    """compressed-tensors' arithmetic written down in torch's own bf16 operations; ``x`` ``[G, 128]``, no NaN."""
    scheme = scheme_named(name)
    low, high = scheme.element.min, scheme.element.max
    eps, tiny = torch.finfo(torch.bfloat16).eps, torch.finfo(torch.bfloat16).tiny
    if scheme.has_zero_point:
        lowest, highest = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
        scale = ((highest - lowest) / (high - low)).clamp(min=tiny)
        zero = (low - lowest / scale).clamp(low, high).round()
        scale, zero = torch.where(highest == lowest, eps, scale), torch.where(highest == lowest, 0, zero)
        return ((x / scale + zero).clamp(low, high).round() - zero) * scale
    amax = x.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, eps, (amax / ((high - low) / 2)).clamp(min=tiny))
    return (x / scale).clamp(low, high).round() * scale + 0.0


@pytest.mark.parametrize("name", ["int4-g128", "int4-g128-asym", "int8-g128", "int8-g128-asym", "int8-channel"])
def test_bf16_weights_get_the_values_of_bf16_arithmetic(name: str) -> None:
    x = every_bf16()
    groups = torch.cat(
        [x[(x.float().abs() < 2.0**100).all(-1)], weights_like(), torch.where(x.float().abs() < 1e6, x, 1)]
    )
    assert torch.equal(fake(groups, scheme_named(name)), native_bf16(groups, name))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["int4-g128", "int8-channel", "int8-g128-asym"])
def test_compiled_values_of_every_bf16_number_are_the_eager_ones(name: str) -> None:
    x = every_bf16()
    x = torch.cat([x, weights_like(), torch.where(x.float().abs() < 1e6, x, 1), torch.zeros(3, 128).bfloat16()])
    compiled = torch.compile(partial(fake, scheme=scheme_named(name)), fullgraph=True, dynamic=False)
    assert torch.equal(bits(compiled(x)), bits(fake(x, scheme_named(name))))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_values_of_fp32_numbers_are_the_eager_ones() -> None:
    shape = (16, 128)
    compiled = torch.compile(partial(fake, scheme=INT4_GROUP_ASYM), fullgraph=True, dynamic=False)

    @settings(deadline=None, max_examples=200)
    @given(st.integers(0, 2**31), st.floats(-140, 120), st.floats(-1, 1))
    def check(seed: int, exponent: float, middle: float) -> None:
        x = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + middle) * 2.0**exponent
        assert torch.equal(bits(compiled(x)), bits(fake(x, INT4_GROUP_ASYM)))

    check()
