"""Block formats of the first presets: laws, and slow scalar versions of each scale rule as oracles.

The laws of every other scheme are in ``test_quant_schemes.py``.

The oracles work on Python floats and numpy fp32 scalars, one block at a time, and share no code with
the product but the grids.
"""

from bisect import bisect_left
from collections.abc import Callable
from fractions import Fraction
from math import copysign

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdraft.quant.block import dequantize, quantize
from bitdraft.quant.scale_rules import fp32_scale, nvfp4_global_scale
from bitdraft.quant.schemes import (
    FP8_CHANNEL,
    FP8_TOKEN,
    MXFP4_EVEN,
    MXFP4_RCEIL,
    NVFP4,
    NVFP4_KERNEL,
    Scheme,
)
from bitdraft.quant.smallfloat import E4M3

PRESETS = (FP8_CHANNEL, FP8_TOKEN, MXFP4_EVEN, MXFP4_RCEIL, NVFP4, NVFP4_KERNEL)
ALL = [pytest.param(s, id=s.name) for s in PRESETS]
MX = [pytest.param(s, id=s.name) for s in (MXFP4_EVEN, MXFP4_RCEIL)]
TWO_LEVEL = [pytest.param(s, id=s.name) for s in (NVFP4, NVFP4_KERNEL)]
FP8 = [pytest.param(s, id=s.name) for s in (FP8_CHANNEL, FP8_TOKEN)]
BLOCKED = [pytest.param(s, id=s.name) for s in PRESETS if s.block]

LAW = settings(max_examples=40, deadline=None)
COLUMNS = 32
E2M1_GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1_MIDDLES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]


def numbers(lowest: int = -40, highest: int = 30) -> st.SearchStrategy[float]:
    """fp32 numbers whose exponents spread evenly, few-bit mantissas (ties and exact maxima) among them."""
    mantissas = st.one_of(st.integers(-(2**24), 2**24), st.integers(-16, 16).map(lambda m: m << 20))
    return st.builds(lambda m, e: m / 2.0**24 * 2.0**e, mantissas, st.integers(lowest, highest))


def rows(elements: st.SearchStrategy[float] | None = None) -> st.SearchStrategy[Tensor]:
    """One or two rows of ``COLUMNS`` numbers, each within a few binades of a random size."""
    row = st.lists(elements or numbers(), min_size=COLUMNS, max_size=COLUMNS)
    near = st.builds(
        lambda values, e: [v * 2.0**e for v in values],
        st.lists(numbers(-4, 1), min_size=COLUMNS, max_size=COLUMNS),
        st.integers(-25, 25),
    )
    either = row if elements is not None else st.one_of(row, near)
    return st.lists(either, min_size=1, max_size=2).map(lambda r: torch.tensor(r, dtype=torch.float32))


def rounded(x: Tensor, scheme: Scheme, global_scale: Tensor | None = None) -> Tensor:
    return dequantize(quantize(x, scheme, global_scale=global_scale))


def e2m1(v: float) -> float:
    """Ties to the even code, by the table of midpoints."""
    size = min(abs(v), 6.0)
    code = bisect_left(E2M1_MIDDLES, size)
    if code < len(E2M1_MIDDLES) and size == E2M1_MIDDLES[code] and code % 2:
        code += 1
    return copysign(E2M1_GRID[code], v)


def e4m3(v: np.float32) -> np.float32:
    clamped = torch.tensor(np.clip(v, np.float32(-448), np.float32(448)))
    return np.float32(clamped.to(torch.float8_e4m3fn).float().item())


def encode_scale(amax: np.float32) -> np.float32:
    """2688 / amax as torch divides a number by a tensor, and so as compressed-tensors does: by the reciprocal."""
    return np.float32(2688) * (np.float32(1) / amax) if amax > 0 else np.float32(1)


def mx_exponent(amax: float, scheme: Scheme) -> int:
    """The scale's exponent, by search: where 1.75 · 2^e begins (even), or the first k with 6 · 2^k ≥ A (rceil)."""
    if amax == 0:
        return -127
    size = Fraction(amax)
    e = next(e for e in range(-130, 130) if size < Fraction(2) ** (e + 1))
    if scheme is MXFP4_EVEN:
        return e + (size >= Fraction(7, 4) * Fraction(2) ** e) - 2
    return next(k for k in range(e - 4, e + 1) if 6 * Fraction(2) ** k >= size)


@LAW
@given(x=rows())
@pytest.mark.parametrize("scheme", MX)
def test_mxfp4_equals_the_slow_exact_version(scheme: Scheme, x: Tensor) -> None:
    q = quantize(x, scheme)
    for row, scales, values in zip(x.tolist(), q.scale.tolist(), dequantize(q).tolist(), strict=True):
        scale = 2.0 ** mx_exponent(max(abs(v) for v in row), scheme)
        assert scales == [scale]
        assert values == [e2m1(v / scale) * scale for v in row]


@pytest.mark.parametrize("exponent", [-60, -3, 0, 1, 40])
@pytest.mark.parametrize(
    ("scheme", "boundary"),
    [(MXFP4_EVEN, 7.0), (MXFP4_EVEN, 3.5), (MXFP4_RCEIL, 6.0), (MXFP4_RCEIL, 12.0)],
    ids=["even-7", "even-3.5", "rceil-6", "rceil-12"],
)
def test_mx_scales_step_exactly_at_the_boundary_of_their_rule(scheme: Scheme, boundary: float, exponent: int) -> None:
    at = torch.tensor(boundary * 2.0**exponent)
    below, above = at.nextafter(torch.tensor(0.0)), at.nextafter(torch.tensor(torch.inf))
    scales = [quantize(a.expand(1, 32), scheme).scale.item() for a in (below, at, above)]
    assert scales == [2.0 ** mx_exponent(a.item(), scheme) for a in (below, at, above)]
    assert scales[2] == 2 * scales[0]


@pytest.mark.parametrize(
    ("scheme", "largest", "exponent"),
    [
        (MXFP4_RCEIL, 6.0, -127),
        (MXFP4_RCEIL, 6.0 * (1 + 2.0**-20), -126),
        (MXFP4_RCEIL, 2.0**-20, -127),
        (MXFP4_EVEN, 7.0 * (1 - 2.0**-22), -127),
        (MXFP4_EVEN, 7.0, -126),
        (MXFP4_EVEN, 2.0**-20, -127),
    ],
)
def test_mx_scales_end_at_two_to_the_minus_127(scheme: Scheme, largest: float, exponent: int) -> None:
    """The smallest E8M0 scale is subnormal in fp32, and so is what decides between it and the next."""
    x = torch.tensor(largest * 2.0**-127).expand(1, 32)
    assert quantize(x, scheme).scale.item() == 2.0**exponent


@LAW
@given(x=rows())
def test_nvfp4_equals_the_slow_version_of_compressed_tensors_rule(x: Tensor) -> None:
    q = quantize(x, NVFP4)
    blocks = x.reshape(-1, 16).numpy()
    amax = np.abs(blocks).max()
    g = encode_scale(amax)
    for block, scale, values in zip(blocks, q.scale.flatten(), q.values.reshape(-1, 16), strict=True):
        s8 = e4m3(g * (np.abs(block).max() / np.float32(6)))
        s8 = s8 if s8 > 0 else np.float32(0.125)
        assert scale.item() == s8
        assert values.tolist() == [e2m1(float(v / (s8 / g))) * float(s8) for v in block]


@LAW
@given(x=rows(), g=st.sampled_from([1.0, 0.37, 2688.0, 41.5, 1e-3, 3e4]))
def test_nvfp4_kernel_equals_the_slow_version_of_the_kernels_rule(x: Tensor, g: float) -> None:
    encode = np.float32(g)
    q = quantize(x, NVFP4_KERNEL, global_scale=torch.tensor(g))
    sixth = np.float32(1) / np.float32(6)
    blocks = x.reshape(-1, 16).numpy()
    for block, scale, values in zip(blocks, q.scale.flatten(), q.values.reshape(-1, 16), strict=True):
        s8 = e4m3(encode * (np.abs(block).max() * sixth))
        inverse = np.float32(1) / (s8 * (np.float32(1) / encode)) if s8 > 0 else np.float32(0)
        assert scale.item() == s8
        assert values.tolist() == [e2m1(float(v * inverse)) * float(s8) for v in block]


def divided(x: np.ndarray, s8: np.float32, g: np.float32) -> np.ndarray:
    return x / (s8 / g)


def by_reciprocals(x: np.ndarray, s8: np.float32, g: np.float32) -> np.ndarray:
    return x * (np.float32(1) / (s8 * (np.float32(1) / g)))


@pytest.mark.parametrize(("scheme", "rule"), [(NVFP4, divided), (NVFP4_KERNEL, by_reciprocals)])
def test_the_two_nvfp4_rules_are_told_apart_at_ties(
    scheme: Scheme, rule: Callable[[np.ndarray, np.float32, np.float32], np.ndarray]
) -> None:
    """Values at and just beside the midpoints of a block: the order of arithmetic decides many of them."""
    rng = np.random.default_rng(0)
    decided = 0
    for g in rng.uniform(0.5, 2, 60).astype(np.float32):
        s8 = e4m3(np.float32(rng.uniform(8, 448)))
        at = np.float32(s8 / g) * np.array(E2M1_MIDDLES, dtype=np.float32)
        block = np.concatenate([[6 * s8 / g], at, np.nextafter(at, np.float32(np.inf)), [0]]).astype(np.float32)
        q = quantize(torch.tensor(block), scheme, global_scale=torch.tensor(g))
        assert q.scale.item() == s8
        assert q.values.tolist() == [e2m1(float(v)) * float(s8) for v in rule(block, s8, g)]
        other = by_reciprocals if rule is divided else divided
        decided += sum(
            e2m1(float(a)) != e2m1(float(b)) for a, b in zip(rule(block, s8, g), other(block, s8, g), strict=True)
        )
    assert decided > 20


@pytest.mark.parametrize("scheme", FP8)
def test_fp8_rows_are_divided_by_their_scale_also_at_ties(scheme: Scheme) -> None:
    """Multiplying by the reciprocal, as other engines do, would round many of these differently."""
    middles = (E4M3.magnitudes[:-1] + E4M3.magnitudes[1:]) / 2
    largest = torch.rand(50, 1, generator=torch.Generator().manual_seed(0)) + 1
    scale = largest / 448
    x = torch.cat([largest, scale * middles], dim=1)
    assert torch.equal(quantize(x, scheme).values, (x / scale).to(torch.float8_e4m3fn).float())
    by_reciprocal = (x * (1 / scale)).to(torch.float8_e4m3fn).float()
    assert ((x / scale).to(torch.float8_e4m3fn).float() != by_reciprocal).sum() > 100


@LAW
@given(x=rows())
@pytest.mark.parametrize("scheme", FP8)
def test_fp8_rows_equal_the_slow_version(scheme: Scheme, x: Tensor) -> None:
    q = quantize(x, scheme)
    for row, scale, codes in zip(x.numpy(), q.scale.flatten(), q.values, strict=True):
        expected = np.abs(row).max() / np.float32(448)
        if scheme is FP8_TOKEN:
            expected = max(expected, np.float32(1) / np.float32(448 * 512))
        elif expected == 0:
            expected = np.float32(1)
        assert scale.item() == expected
        assert codes.tolist() == [float(e4m3(v / expected)) for v in row]


@LAW
@given(x=rows())
@pytest.mark.parametrize("scheme", ALL)
def test_quantization_is_odd(scheme: Scheme, x: Tensor) -> None:
    assert torch.equal(rounded(-x, scheme), -rounded(x, scheme))


@LAW
@given(x=rows())
@pytest.mark.parametrize("scheme", MX)
def test_mx_values_quantize_to_themselves(scheme: Scheme, x: Tensor) -> None:
    once = rounded(x, scheme)
    assert torch.equal(rounded(once, scheme), once)


@LAW
@given(x=rows())
@pytest.mark.parametrize("scheme", FP8)
def test_fp8_codes_quantize_to_themselves(scheme: Scheme, x: Tensor) -> None:
    """The codes are stable; the scale, recomputed from its own product with 448, may move by its last bit."""
    once = quantize(x, scheme)
    twice = quantize(dequantize(once), scheme)
    assert torch.equal(twice.values, once.values)
    if scheme is FP8_TOKEN:
        torch.testing.assert_close(twice.scale, once.scale, rtol=2.0**-23, atol=0)


@LAW
@given(x=rows(), k=st.integers(-20, 20))
@pytest.mark.parametrize("scheme", [p for p in ALL if p.id != "fp8-token"])
def test_powers_of_two_pass_through(scheme: Scheme, x: Tensor, k: int) -> None:
    """Exact for MX; for the others as well, because their fp32 scale follows the data (no floor)."""
    assert torch.equal(rounded(x * 2.0**k, scheme), rounded(x, scheme) * 2.0**k)


@LAW
@given(x=rows())
@pytest.mark.parametrize("scheme", MX)
def test_mx_error_is_at_most_a_quarter(scheme: Scheme, x: Tensor) -> None:
    """Half a step of the element's own binade: a quarter of it, or of the scale below the first step."""
    q = quantize(x, scheme)
    error = (dequantize(q).double() - x.double()).abs()
    assert (error <= torch.maximum(x.double().abs(), q.scale.double()) / 4).all()
    filled = (x.abs().amax(-1) / q.scale[:, 0])[x.abs().amax(-1) > 0]
    lowest, highest = (3.5, 7.0) if scheme is MXFP4_EVEN else (3.0, 6.0)
    assert ((filled >= lowest) & (filled <= highest)).all()


@LAW
@given(x=rows())
@pytest.mark.parametrize("scheme", FP8)
def test_fp8_error_is_at_most_half_a_step(scheme: Scheme, x: Tensor) -> None:
    q = quantize(x, scheme)
    error = (dequantize(q).double() - x.double()).abs()
    half_step = torch.maximum(x.double().abs() * 2.0**-4, q.scale.double() * 2.0**-10)
    assert (error <= half_step * (1 + 2.0**-19)).all()


@LAW
@given(x=rows())
@pytest.mark.parametrize("scheme", TWO_LEVEL)
def test_nvfp4_error_is_at_most_a_quarter_where_block_scales_are_normal(scheme: Scheme, x: Tensor) -> None:
    q = quantize(x, scheme)
    assert q.outer is not None
    error = (dequantize(q).double() - x.double()).abs()
    step = (q.scale.double() * q.outer.double()).repeat_interleave(16, dim=-1)
    quarter = torch.maximum(x.double().abs(), step) / 4 * (1 + 2.0**-19)
    normal = (q.scale >= 2.0**-6).repeat_interleave(16, dim=-1)
    assert (error <= quarter)[normal].all()
    # A block far below the tensor's maximum has a coarse scale or none: at worst its values become zero.
    assert (error <= torch.maximum(x.double().abs(), quarter)).all()


@LAW
@given(x=rows())
@pytest.mark.parametrize("scheme", ALL)
def test_values_are_exact_in_bf16(scheme: Scheme, x: Tensor) -> None:
    values = quantize(x, scheme).values
    assert torch.equal(values.bfloat16().float(), values)


def sample(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers with rows of very different sizes and a few outliers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = torch.where(torch.rand(shape, generator=generator) < 0.02, 20 * x, x)
    return x * 2.0 ** torch.randint(-8, 9, (*shape[:-1], 1), generator=generator)


@pytest.mark.parametrize("scheme", ALL)
def test_memory_layout_does_not_matter(scheme: Scheme) -> None:
    square = sample(64, 64)
    wide = sample(8, 128)
    for view in (square.t(), wide[:, ::2], wide[::2, 32:], sample(4, 2, 64).transpose(0, 1)):
        assert not view.is_contiguous()
        assert torch.equal(rounded(view, scheme), rounded(view.contiguous(), scheme))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ALL)
def test_16_bit_input_is_computed_in_fp32(scheme: Scheme, dtype: torch.dtype) -> None:
    x = sample(8, 64).to(dtype)
    ours, reference = quantize(x, scheme), quantize(x.float(), scheme)
    assert torch.equal(ours.values, reference.values)
    assert torch.equal(ours.scale, reference.scale)
    assert ours.values.dtype == dequantize(ours).dtype == torch.float32


@pytest.mark.parametrize("scheme", ALL)
def test_every_row_stands_for_itself(scheme: Scheme) -> None:
    """Batching must not change a row; NVFP4's tensor-wide scale has to be fixed for that."""
    x = sample(3, 5, 64)
    g = torch.tensor(3.7) if scheme.has_global_scale else None
    together = rounded(x, scheme, g)
    assert together.shape == x.shape
    for i in range(3):
        for j in range(5):
            assert torch.equal(together[i, j], rounded(x[i, j], scheme, g))


@pytest.mark.parametrize("scheme", BLOCKED)
def test_every_block_stands_for_itself(scheme: Scheme) -> None:
    assert scheme.block is not None
    x = sample(4, 3 * 32)
    g = torch.tensor(3.7) if scheme.has_global_scale else None
    apart = [rounded(part, scheme, g) for part in x.split(scheme.block, dim=-1)]
    assert torch.equal(rounded(x, scheme, g), torch.cat(apart, dim=-1))


@pytest.mark.parametrize("scheme", ALL)
def test_zeros_stay_zero(scheme: Scheme) -> None:
    assert (rounded(torch.zeros(2, 64), scheme) == 0).all()
    x = sample(2, 64)
    x[:, :32] = 0
    x[1] = 0
    assert (rounded(x, scheme)[x == 0] == 0).all()


@pytest.mark.parametrize("columns", [1, 31, 48, 33, 72])
@pytest.mark.parametrize("scheme", BLOCKED)
def test_a_width_that_does_not_divide_is_refused(scheme: Scheme, columns: int) -> None:
    x = torch.ones(2, columns)
    assert scheme.block is not None
    if columns % scheme.block == 0:
        assert rounded(x, scheme).shape == x.shape
    else:
        with pytest.raises(ValueError, match=rf"{columns} columns .* blocks of {scheme.block} \({scheme.name}\)"):
            quantize(x, scheme)


@pytest.mark.parametrize("columns", [1, 7, 33])
@pytest.mark.parametrize("scheme", FP8)
def test_rows_of_any_width_fit_a_row_scheme(scheme: Scheme, columns: int) -> None:
    assert rounded(torch.ones(2, columns), scheme).tolist() == [[1.0] * columns] * 2


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("scheme", MX)
def test_an_mx_block_with_a_number_that_is_not_finite_becomes_nan(scheme: Scheme, bad: float) -> None:
    x = sample(2, 96)
    spoiled = x.clone()
    spoiled[0, 40] = bad
    y = rounded(spoiled, scheme)
    assert y[0, 32:64].isnan().all()
    y[0, 32:64] = rounded(x, scheme)[0, 32:64]
    assert torch.equal(y, rounded(x, scheme))


@pytest.mark.parametrize("scheme", ALL)
def test_nan_is_never_laundered_into_a_number(scheme: Scheme) -> None:
    x = sample(4, 64)
    x[2, 5] = torch.nan
    g = torch.tensor(3.7) if scheme.has_global_scale else None
    assert rounded(x, scheme, g)[2, 5].isnan()
    assert rounded(x, scheme)[2, 5].isnan()


@pytest.mark.parametrize("size", [1e-3, 1 / 512, 1e-9, 0.0])
def test_small_tokens_share_the_floor_of_the_scale(size: float) -> None:
    assert quantize(torch.full((1, 8), size), FP8_TOKEN).scale.item() == np.float32(1 / (448 * 512))


def test_tokens_above_the_floor_use_their_own_scale() -> None:
    above = torch.tensor(1 / 512).nextafter(torch.tensor(1.0))
    scale = quantize(above.expand(1, 8), FP8_TOKEN).scale.item()
    assert scale == (above / 448).item() > np.float32(1 / (448 * 512))


def test_the_scale_of_a_zero_row_of_weights_is_one() -> None:
    assert fp32_scale(torch.tensor([0.0, 448.0]), FP8_CHANNEL).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("scheme", TWO_LEVEL)
def test_the_default_global_scale_maps_the_maximum_to_the_end_of_the_range(scheme: Scheme) -> None:
    x = sample(4, 64)
    g = nvfp4_global_scale(x.abs().amax())
    assert g.item() == encode_scale(x.abs().numpy().max())
    assert torch.equal(rounded(x, scheme), rounded(x, scheme, g))
    q = quantize(x, scheme)
    assert q.scale.amax() == 448
    assert q.values.abs().amax() == 2688


@pytest.mark.parametrize("scheme", TWO_LEVEL)
def test_a_static_global_scale_saturates(scheme: Scheme) -> None:
    x = torch.full((1, 16), 1000.0)
    x[0, 1::2] *= -1
    limit = 2688 / 4.0
    assert torch.equal(rounded(x, scheme, torch.tensor(4.0)), x.sign() * limit)


def test_nvfp4_blocks_of_zeros_store_what_compressed_tensors_and_the_kernels_store() -> None:
    x = sample(1, 32)
    x[:, :16] = 0
    assert quantize(x, NVFP4).scale[0, 0] == 0.125
    assert quantize(x, NVFP4_KERNEL).scale[0, 0] == 0
