"""Laws that hold for every row of the scheme table, and what every row does at the edges.

The reference is a search over the whole grid in float64. Each generated tensor goes through all schemes.
"""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdraft.quant.block import dequantize, quantize, spread
from bitdraft.quant.codes import Encoded, decode, e8m0_bytes, e8m0_scales, encode
from bitdraft.quant.fake import fake
from bitdraft.quant.scale_rules import power_of_two_above
from bitdraft.quant.schemes import (
    E5M2_KV,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_GROUP,
    FP8_KV,
    FP8_TENSOR,
    FP8_TENSOR_STATIC,
    INT4_GROUP,
    INT4_GROUP_ASYM,
    INT8_GROUP,
    MXFP4_EVEN,
    NVFP4_KERNEL,
    SCHEMES,
    Scheme,
    scheme_named,
)
from bitdraft.quant.smallfloat import E5M2, SmallFloat
from bitdraft.quant.smallint import SmallInt

EVERY = tuple(SCHEMES.values())
ROWS = [pytest.param(s, id=s.name) for s in EVERY]
LAW = settings(max_examples=25, deadline=None)
K = 128
STATIC = 0.03


def static_scale(scheme: Scheme) -> Tensor | None:
    return torch.tensor(STATIC) if scheme.scale == "static" else None


def enc(x: Tensor, scheme: Scheme) -> Encoded:
    return encode(x, scheme, global_scale=static_scale(scheme))


def rounded(x: Tensor, scheme: Scheme) -> Tensor:
    return dequantize(quantize(x, scheme, global_scale=static_scale(scheme)))


def numbers() -> st.SearchStrategy[float]:
    """fp32 numbers with exponents from 2^-30 to 2^12, few-bit mantissas (ties, exact maxima) among them."""
    mantissas = st.one_of(st.integers(-(2**24), 2**24), st.integers(-16, 16).map(lambda m: m << 20))
    near = st.builds(lambda m, e: m / 2.0**24 * 2.0**e, mantissas, st.integers(-3, 3))
    far = st.builds(lambda m, e: m / 2.0**24 * 2.0**e, mantissas, st.integers(-30, 12))
    return st.one_of(near, near, far)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """``[2, 128]``: two rows of the same numbers at different sizes, repeated with both signs."""
    some = torch.tensor(draw(st.lists(numbers(), min_size=16, max_size=16)), dtype=torch.float32)
    row = torch.cat([some, some.flip(0) / 2, -some, some * 1.25, some * 0, some * 3, some.roll(3), some / 64])
    return torch.stack([row, row.roll(5) * 2.0 ** draw(st.integers(-12, 3))])


def steps_and_zeros(e: Encoded) -> tuple[Tensor, Tensor]:
    """What one unit of every element's code is worth, and its zero point, in float64: ``[N, K]`` each."""
    scheme, shape = e.scheme, e.codes.shape
    scale = e.scale.double()
    if scheme.scale_format == "e8m0":
        scale = e8m0_scales(e.scale).double()
    elif scheme.scale_format == "e4m3":
        scale = e.scale.view(torch.float8_e4m3fn).double()
    if scheme.rows is not None and scheme.rows > 1:
        scale = scale.repeat_interleave(scheme.rows, dim=-2)[: shape[-2]]
    if scheme.block is not None:
        scale = spread(scale, scheme.block, shape[-1])
    if e.global_scale is not None:
        outer = e.global_scale.double()
        scale = scale * (outer if scheme.stores_decode_scale else 1 / outer)
    zero = torch.zeros(()) if e.zero_point is None else e.zero_point.double()
    zero = spread(zero, scheme.block, shape[-1]) if scheme.block is not None and zero.ndim else zero
    return scale.expand(shape), zero.expand(shape)


def grid_of(scheme: Scheme) -> Tensor:
    """Every finite value of the element, ascending, in float64."""
    element = scheme.element
    if isinstance(element, SmallInt):
        return torch.arange(element.min, element.max + 1, dtype=torch.float64)
    return torch.cat([-element.magnitudes.flip(0), element.magnitudes[1:]]).double()


@LAW
@given(x=tensors())
def test_every_value_becomes_the_nearest_of_the_whole_grid(x: Tensor) -> None:
    """Up to the rounding of the quotient, at most three times 2^-24: only values that close to a middle may differ."""
    for scheme in EVERY:
        e = enc(x, scheme)
        step, zero = steps_and_zeros(e)
        candidates = (grid_of(scheme) - zero[..., None]) * step[..., None]
        if scheme.has_zero_point:  # the range starts at a whole zero point, up to half a step away from the data
            candidates = torch.cat([candidates, candidates + step[..., None] / 2, candidates - step[..., None] / 2], -1)
        best = (candidates - x.double()[..., None]).abs().amin(-1)
        error = (rounded(x, scheme).double() - x.double()).abs()
        slack = x.double().abs() * 2.0**-21 + step * 2.0**-30
        limit = best + slack if not scheme.has_zero_point else step / 2 + slack + step * (zero.abs() * 2.0**-20)
        assert (error <= limit).all(), scheme.name


@LAW
@given(x=tensors())
def test_the_error_is_at_most_half_a_step_within_the_range(x: Tensor) -> None:
    for scheme in EVERY:
        e = enc(x, scheme)
        step, zero = steps_and_zeros(e)
        grid = grid_of(scheme)
        q = x.double() / step + zero
        inside = (q >= grid[0]) & (q <= grid[-1])
        above = torch.searchsorted(grid, q.nan_to_num(0).contiguous()).clamp(1, len(grid) - 1)
        half = (grid[above] - grid[above - 1]) / 2 * step
        error = (rounded(x, scheme).double() - x.double()).abs()
        assert (error <= half * (1 + 2.0**-10))[inside].all(), scheme.name


@LAW
@given(x=tensors())
def test_larger_values_never_become_smaller(x: Tensor) -> None:
    for scheme in EVERY:
        width = scheme.block or K
        blocks, y = x.unflatten(-1, (-1, width)), rounded(x, scheme).unflatten(-1, (-1, width))
        order = blocks.argsort(dim=-1)
        assert (y.gather(-1, order).diff(dim=-1) >= 0).all(), scheme.name


@LAW
@given(x=tensors())
def test_floats_are_odd_and_integers_are_but_for_their_ends(x: Tensor) -> None:
    for scheme in EVERY:
        if scheme.has_zero_point:
            continue
        y, mirrored = rounded(x, scheme), rounded(-x, scheme)
        if isinstance(scheme.element, SmallInt):
            codes = enc(x, scheme).codes
            middle = (codes > scheme.element.min) & (codes < scheme.element.max)
            y, mirrored = y[middle], mirrored[middle]
        assert torch.equal(y, -mirrored), scheme.name


def is_idempotent(scheme: Scheme) -> bool:
    """MX, but for the rule whose exponent can grow by rounding FP8 to FP4's mantissa, and for the stretched grid."""
    return scheme.scale_format == "e8m0" and scheme.scale not in ("even-fp4", "floor-stretched")


@LAW
@given(x=tensors())
def test_quantizing_twice_changes_nothing(x: Tensor) -> None:
    """MX values as a whole, FP8 codes; everything else under the scales of the first time."""
    for scheme in EVERY:
        e = enc(x, scheme)
        y = decode(e)
        if is_idempotent(scheme):
            assert torch.equal(rounded(y, scheme), y), scheme.name
        elif scheme.scale == "static":
            assert torch.equal(enc(y, scheme).codes, e.codes), scheme.name
        step, zero = steps_and_zeros(e)
        quotient = torch.where(step > 0, y.double() / step + zero, 0)
        again = scheme.element.round(quotient.float(), ties=scheme.ties)
        assert torch.equal(scheme.element.encode(again)[step > 0], e.codes[step > 0]), scheme.name


@LAW
@given(x=tensors())
def test_decoding_what_is_stored_gives_the_fused_result_bit_for_bit(x: Tensor) -> None:
    for scheme in EVERY:
        e = enc(x, scheme)
        assert torch.equal(decode(e), rounded(x, scheme)), scheme.name
        assert torch.equal(fake(x, scheme, global_scale=static_scale(scheme)), decode(e)), scheme.name


def sample(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = torch.where(torch.rand(shape, generator=generator) < 0.02, 20 * x, x)
    return x * 2.0 ** torch.randint(-8, 9, (*shape[:-1], 1), generator=generator)


def same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all()) and a.shape == b.shape


@pytest.mark.parametrize("scheme", ROWS)
def test_what_is_stored_has_the_documented_types(scheme: Scheme) -> None:
    e = enc(sample(3, 256), scheme)
    assert e.codes.dtype == (torch.int8 if isinstance(scheme.element, SmallInt) else torch.uint8)
    assert e.codes.shape == (3, 256)
    assert e.scale.dtype == (torch.float32 if scheme.scale_format == "fp32" else torch.uint8)
    groups = 256 // scheme.block if scheme.block else 1
    rows = 3 if scheme.rows == 1 else 1
    assert list(e.scale.shape) == ([] if scheme.rows is None else [rows, groups])
    assert (e.zero_point is not None) == scheme.has_zero_point
    assert (e.global_scale is not None) == (scheme.has_global_scale or scheme.scale == "floor-stretched")


@pytest.mark.parametrize("scheme", ROWS)
def test_memory_layout_does_not_matter(scheme: Scheme) -> None:
    for view in (sample(128, 128).t(), sample(8, 256)[:, ::2], sample(4, 2, 128).transpose(0, 1)):
        assert not view.is_contiguous()
        assert torch.equal(rounded(view, scheme), rounded(view.contiguous(), scheme))
        assert torch.equal(enc(view, scheme).codes, enc(view.contiguous(), scheme).codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ROWS)
def test_16_bit_input_is_computed_in_the_named_arithmetic(scheme: Scheme, dtype: torch.dtype) -> None:
    x = sample(8, 128).to(dtype)
    y = rounded(x, scheme)
    assert y.dtype == torch.float32
    assert fake(x, scheme, global_scale=static_scale(scheme)).dtype == dtype
    assert torch.equal(decode(enc(x, scheme)), y)
    if scheme.arithmetic == "fp32":
        assert torch.equal(y, rounded(x.float(), scheme))
    else:
        assert ((y - x.float()).abs() <= x.float().abs() / 2 + x.float().abs().amax(-1, keepdim=True) / 7).all()
        assert torch.equal(rounded(x.float(), scheme), rounded(x.float(), replace(scheme, arithmetic="input")))


@pytest.mark.parametrize("scheme", [s for s in ROWS if SCHEMES[str(s.id)].arithmetic != "fp32"])
def test_scales_in_the_inputs_dtype_can_be_stored_in_it(scheme: Scheme) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        scale = enc(sample(4, 128).to(dtype), scheme).scale
        if scheme.scale_format == "fp32":
            assert torch.equal(scale.to(dtype).float(), scale)


@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 128), (2, 0), (0, 0)])
@pytest.mark.parametrize("scheme", ROWS)
def test_empty_tensors_stay_empty(scheme: Scheme, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    assert rounded(x, scheme).shape == shape
    e = enc(x, scheme)
    assert e.codes.shape == shape
    assert decode(e).shape == shape


@pytest.mark.parametrize("scheme", ROWS)
def test_zeros_of_both_signs_stay_zero(scheme: Scheme) -> None:
    x = torch.cat([torch.zeros(2, 128), -torch.zeros(2, 128)], dim=1)
    assert (rounded(x, scheme) == 0).all()
    x[1, :128] = sample(1, 128)[0]
    y = rounded(x, scheme)
    assert (y[x == 0] == 0).all()
    assert decode(enc(x, scheme))[0].tolist() == [0.0] * 256


@pytest.mark.parametrize("scheme", ROWS)
def test_subnormal_input_gives_finite_numbers_no_further_off_than_zero(scheme: Scheme) -> None:
    x = torch.linspace(-1, 1, 128).expand(2, 128) * 1e-38
    y = rounded(x, scheme)
    assert torch.isfinite(y).all()
    assert ((y - x).abs() <= x.abs() + 1e-38 / 7).all()


@pytest.mark.parametrize("scheme", ROWS)
def test_nan_is_never_laundered_into_a_number(scheme: Scheme) -> None:
    x = sample(4, 256)
    x[2, 5] = torch.nan
    y = rounded(x, scheme)
    assert y[2, 5].isnan()
    if scheme.element not in (FP8_CHANNEL.element, E5M2) and scheme.block:
        assert enc(x, scheme).codes[2, 5] == 0, "formats without NaN store it in the scale"
    assert same(decode(enc(x, scheme)), y)
    if scheme.scale_format == "e8m0":
        assert enc(x, scheme).scale[2, 0] == 255


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf])
@pytest.mark.parametrize("scheme", ROWS)
def test_infinity_saturates_under_a_static_scale_and_spoils_its_block_otherwise(scheme: Scheme, bad: float) -> None:
    x = sample(4, 256)
    x[2, 5] = bad
    y = rounded(x, scheme)
    if scheme.scale == "static":
        assert y[2, 5] == torch.tensor(scheme.element.max) * torch.tensor(STATIC) * (1 if bad > 0 else -1)
    else:
        assert y[2, 5].isnan()
        assert not y[2, :16].isfinite().any()
    assert same(decode(enc(x, scheme)), y)


@pytest.mark.parametrize("scheme", [s for s in ROWS if SCHEMES[str(s.id)].has_global_scale])
def test_infinity_saturates_under_a_given_global_scale(scheme: Scheme) -> None:
    x = sample(4, 64)
    x[2, 5], x[1, 3] = torch.inf, torch.nan
    y = dequantize(quantize(x, scheme, global_scale=torch.tensor(4.0)))
    assert y[2, 5] == 2688 / 4
    assert y[1, :16].isnan().all()
    assert torch.isfinite(y).sum() == y.numel() - 16


@pytest.mark.parametrize("scheme", ROWS)
def test_widths_that_do_not_divide_are_refused_where_engines_refuse_them(scheme: Scheme) -> None:
    x = sample(3, 200)
    if scheme.block is None or scheme.allows_short_blocks:
        assert rounded(x, scheme).shape == x.shape
    elif 200 % scheme.block:
        with pytest.raises(
            ValueError, match=rf"200 columns do not divide into blocks of {scheme.block} \({scheme.name}\)"
        ):
            rounded(x, scheme)


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (200, 300), (1, 1), (130, 128), (2, 200, 129)])
@pytest.mark.parametrize("name", [s.name for s in EVERY if s.rows == 128])
def test_two_dimensional_blocks_are_small_matrices_of_their_own(name: str, shape: tuple[int, ...]) -> None:
    scheme, x = scheme_named(name), sample(*shape)
    y, scale = rounded(x, scheme), quantize(x, scheme).scale
    assert scale.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    for i in range(0, shape[-2], 128):
        for j in range(0, shape[-1], 128):
            block = x[..., i : i + 128, j : j + 128]
            own = quantize(block, scheme)
            assert torch.equal(y[..., i : i + 128, j : j + 128], dequantize(own))
            assert torch.equal(scale[..., i // 128, j // 128], own.scale[..., 0, 0])
            if scheme.scale == "amax":
                assert torch.equal(own.scale[..., 0, 0], block.abs().amax((-2, -1)) / 448)


def test_two_dimensional_blocks_need_a_matrix() -> None:
    with pytest.raises(ValueError, match=r"fp8-block128 has blocks of 128 rows, so a matrix is needed, not \[128\]"):
        quantize(sample(128), FP8_BLOCK)


def test_one_scale_per_tensor_is_the_row_rule_on_one_row() -> None:
    x = sample(4, 5, 96)
    flat = quantize(x.reshape(1, -1), FP8_CHANNEL)
    q = quantize(x, FP8_TENSOR)
    assert q.outer is not None
    assert q.outer.shape == ()
    assert torch.equal(dequantize(q), dequantize(flat).reshape(x.shape))


def test_groups_are_rows_of_their_own() -> None:
    x = sample(4, 384)
    apart = [rounded(part, FP8_GROUP) for part in x.split(128, dim=-1)]
    assert torch.equal(rounded(x, FP8_GROUP), torch.cat(apart, dim=-1))
    assert quantize(x, FP8_GROUP).outer is not None
    assert torch.equal(quantize(x, FP8_GROUP).scale, x.unflatten(-1, (3, 128)).abs().amax(-1) / 448)


@pytest.mark.parametrize("scheme", [FP8_KV, FP8_TENSOR_STATIC, E5M2_KV])
def test_static_scales_must_be_given_and_saturate(scheme: Scheme) -> None:
    with pytest.raises(ValueError, match=f"{scheme.name} needs a static scale"):
        quantize(sample(2, 64), scheme)
    x = torch.tensor([[1e9, -1e9, 0.5, 0.0]])
    y = dequantize(quantize(x, scheme, global_scale=torch.tensor(0.5)))
    assert y.tolist() == [[scheme.element.max / 2, -scheme.element.max / 2, 0.5, 0.0]]


def test_nvfp4_activations_have_a_static_or_a_dynamic_global_scale() -> None:
    x = sample(4, 64)
    dynamic = 2688 / x.abs().amax()
    assert torch.equal(
        dequantize(quantize(x, NVFP4_KERNEL)), dequantize(quantize(x, NVFP4_KERNEL, global_scale=dynamic))
    )
    static = quantize(x, NVFP4_KERNEL, global_scale=dynamic * 4)
    assert dequantize(static).abs().amax() == pytest.approx(x.abs().amax().item() / 4, rel=1e-6)


def test_symmetric_integers_equal_the_slow_version() -> None:
    x = sample(4, 256)
    e = encode(x, INT4_GROUP)
    for row, scales, codes in zip(x, e.scale, e.codes, strict=True):
        for group in range(2):
            part = row[128 * group : 128 * group + 128]
            scale = part.abs().max() / 7.5
            assert scales[group] == scale
            expected = [min(7, max(-8, round((v / scale).item()))) for v in part]
            assert codes[128 * group : 128 * group + 128].tolist() == expected


def test_asymmetric_integers_use_their_whole_range_and_hold_zero() -> None:
    x = torch.rand(4, 256, generator=torch.Generator().manual_seed(0))
    x[:, 0] = 0
    e = encode(x, INT4_GROUP_ASYM)
    assert e.zero_point is not None
    assert (e.zero_point == -8).all()
    assert (e.codes.unflatten(-1, (2, 128)).amax(-1) == 7).all()
    assert (decode(e)[:, 0] == 0).all()
    symmetric = (decode(encode(x, INT4_GROUP)) - x).square().sum()
    assert (decode(e) - x).square().sum() < symmetric / 2


def test_a_power_of_two_scale_never_clips_and_is_less_than_twice_what_is_needed() -> None:
    x = sample(64, 256)
    scale = quantize(x, scheme_named("fp8-group128-ue8m0")).scale
    needed = x.unflatten(-1, (2, 128)).abs().amax(-1) / 448
    assert torch.equal(scale, 2.0 ** torch.log2(needed).ceil())


def test_the_power_of_two_above_is_right_at_and_around_every_power() -> None:
    powers = 2.0 ** torch.arange(-149, 127, dtype=torch.float64)
    x = powers.float()
    up, down = x.nextafter(torch.tensor(torch.inf)), x.nextafter(torch.tensor(0.0))
    floor = torch.tensor(2.0**-127)
    assert torch.equal(power_of_two_above(x), x.maximum(floor))
    assert torch.equal(power_of_two_above(up), torch.where(x < floor, floor, 2 * x))
    assert torch.equal(power_of_two_above(down), x.maximum(floor))
    assert power_of_two_above(torch.tensor([0.0, 3e-45])).tolist() == [floor.item()] * 2


def test_e8m0_bytes_and_scales_are_inverse() -> None:
    every = torch.arange(256).to(torch.uint8)
    scales = e8m0_scales(every)
    assert torch.equal(e8m0_bytes(scales), every)
    assert scales[:255].double().tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert scales[255].isnan()


def test_an_unknown_scheme_is_an_error_that_names_the_nearest() -> None:
    assert scheme_named("mxfp4-even") is MXFP4_EVEN
    with pytest.raises(ValueError, match=r"unknown number format 'mxfp4-evn': did you mean 'mxfp4-even'\?"):
        scheme_named("mxfp4-evn")


@pytest.mark.parametrize(("name", "size"), [("int4-g64", 64), ("int8-g16", 16), ("int4-g48-asym", 48), ("int4-g1", 1)])
def test_integer_groups_have_any_size(name: str, size: int) -> None:
    scheme = scheme_named(name)
    assert scheme is scheme_named(name)
    assert (scheme.name, scheme.block) == (name, size)
    assert scheme.has_zero_point == name.endswith("asym")
    assert encode(sample(2, 3 * size), scheme).scale.shape == (2, 3)


@pytest.mark.parametrize("name", ["int4-g0", "int4-g064", "int3-g64", "int4-g64-sym", "int4-g"])
def test_what_is_no_group_size_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown number format"):
        scheme_named(name)


def test_the_sizes_of_the_table_are_its_own_rows() -> None:
    assert scheme_named("int8-g128") is INT8_GROUP
    assert scheme_named("int4-g128-asym") is INT4_GROUP_ASYM


def test_schemes_are_listed_under_their_own_names_and_say_whose_they_are() -> None:
    assert all(scheme.name == name and scheme.used_by for name, scheme in SCHEMES.items())
    assert all(re.fullmatch(r"(fp8|mxfp[468]|nvfp4|int[48])[a-z0-9-]*", name) for name in SCHEMES)
    rules = {(s.element, s.block, s.rows, s.scale, s.ties, s.reciprocal, s.arithmetic) for s in EVERY}
    names_for_one_rule = len(EVERY) - len(rules)
    assert names_for_one_rule == 1, "fp8-channel-ct and fp8-token-ct are one rule under two names"
    assert {s.name for s in EVERY if s.has_global_scale} == {
        "nvfp4",
        "nvfp4-kernel",
        "nvfp4-ct",
        "nvfp4-modelopt",
        "nvfp4-torchao",
    }
    assert isinstance(FP8_CHANNEL.element, SmallFloat)
