"""Rounding to a small grid, against a search over the whole grid in float64, where every distance is exact."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from bitdraft.quant.smallfloat import E2M1, E2M3, E3M2, E4M3, E5M2, SmallFloat, Ties, unit_in_first_place
from bitdraft.quant.smallint import INT4, INT8, SmallInt

FORMATS = (E2M1, E2M3, E3M2, E4M3, E5M2)
GRIDS = [pytest.param(f, id=f.name) for f in FORMATS]
INTEGERS = [pytest.param(f, id=f.name) for f in (INT4, INT8)]
TIES: tuple[Ties, ...] = ("even", "away", "zero")


def nearest(x: Tensor, grid: SmallFloat, ties: Ties = "even") -> Tensor:
    """The obvious search: the distance to every magnitude; of two that are equally near, the one ``ties`` names."""
    magnitudes = grid.magnitudes.double()
    distances = (x.double().abs().clamp(max=grid.max)[:, None] - magnitudes).abs()
    candidates = distances == distances.amin(dim=1, keepdim=True)
    codes = torch.arange(len(magnitudes))
    preferred = {"even": -(codes % 2), "away": codes, "zero": -codes}[ties]
    score = preferred - len(magnitudes) * 2 * (~candidates).int()
    code = score.argmax(dim=1)
    rounded = magnitudes[code].copysign(x.double()).float()
    return torch.where(x.isnan(), torch.nan, rounded)


def differing(ours: Tensor, reference: Tensor) -> Tensor:
    return (ours != reference) & ~(ours.isnan() & reference.isnan())


def assert_rounds_to(x: Tensor, expected: Tensor, grid: SmallFloat, ties: Ties = "even") -> None:
    rounded = grid.round(x, ties=ties)
    wrong = differing(rounded, expected)
    first = wrong.nonzero()[:3].flatten()
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {x.numel()} wrong, e.g. {x[first].tolist()} gave "
        f"{rounded[first].tolist()}, not {expected[first].tolist()}"
    )


def neighbourhoods(grid: SmallFloat) -> Tensor:
    """Every grid value and every midpoint, with the fp32 numbers just below and above, in both signs."""
    middles = (grid.magnitudes[:-1] + grid.magnitudes[1:]) / 2
    points = torch.cat([grid.magnitudes, middles])
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    points = torch.cat([points, points.nextafter(up), points.nextafter(down)])
    return torch.cat([points, -points])


def all_values_of(dtype: torch.dtype) -> Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float()


def fp32_patterns() -> Tensor:
    """Each upper half of an fp32 word with five lower halves: every sign, exponent and upper mantissa."""
    upper = torch.arange(2**16, dtype=torch.int64)[:, None] << 16
    lower = torch.tensor([0x0000, 0x0001, 0x7FFF, 0x8000, 0xFFFF])
    return (upper + lower).flatten().to(torch.int32).view(torch.float32)


def test_e2m1_has_the_eight_magnitudes_of_the_format() -> None:
    assert E2M1.magnitudes.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_e4m3_magnitudes_are_what_torch_decodes_from_the_same_codes() -> None:
    codes = torch.arange(0x7F, dtype=torch.uint8)
    assert torch.equal(E4M3.magnitudes, codes.view(torch.float8_e4m3fn).float())


def test_the_derived_constants_are_those_of_the_formats() -> None:
    assert (E2M1.bias, E2M1.max_exponent, E2M1.min_normal) == (1, 2, 1.0)
    assert (E4M3.bias, E4M3.max_exponent, E4M3.min_normal) == (7, 8, 2.0**-6)
    assert (E2M3.bias, E2M3.max_exponent, E2M3.min_normal, E2M3.magnitudes[1].item()) == (1, 2, 1.0, 0.125)
    assert (E3M2.bias, E3M2.max_exponent, E3M2.min_normal, E3M2.magnitudes[1].item()) == (3, 4, 0.25, 0.0625)
    assert (E5M2.bias, E5M2.max_exponent, E5M2.min_normal, E5M2.magnitudes[1].item()) == (15, 15, 2.0**-14, 2.0**-16)
    assert all(grid.magnitudes[-1] == grid.max == -grid.min for grid in FORMATS)
    assert [grid.bits for grid in FORMATS] == [4, 6, 6, 8, 8]


def test_every_midpoint_of_e2m1_ties_to_even() -> None:
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert E2M1.round(middles).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert E2M1.round(-middles).tolist() == [0, -1, -1, -2, -2, -4, -4]


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("grid", GRIDS)
def test_round_is_right_on_both_sides_of_every_midpoint_and_grid_value(grid: SmallFloat, ties: Ties) -> None:
    x = neighbourhoods(grid)
    assert_rounds_to(x, nearest(x, grid, ties), grid, ties)


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("grid", GRIDS)
def test_grid_values_round_to_themselves(grid: SmallFloat, ties: Ties) -> None:
    x = torch.cat([grid.magnitudes, -grid.magnitudes])
    assert torch.equal(grid.round(x, ties=ties), x)


@pytest.mark.parametrize("grid", GRIDS)
def test_every_code_is_decoded_and_encoded_again(grid: SmallFloat) -> None:
    codes = torch.arange(2**grid.bits).to(torch.uint8)
    values = grid.decode(codes)
    finite = torch.isfinite(values)
    assert torch.equal(
        values[finite].unique().double(), torch.cat([-grid.magnitudes, grid.magnitudes]).unique().double()
    )
    again = grid.encode(values)
    negative_zero = 2 ** (grid.bits - 1)
    expected = torch.where(codes == negative_zero, 0, codes)
    assert torch.equal(again[finite], expected[finite].to(torch.uint8))


@pytest.mark.parametrize(("grid", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
def test_fp8_codes_mean_what_torch_says_they_mean(grid: SmallFloat, dtype: torch.dtype) -> None:
    codes = torch.arange(256).to(torch.uint8)
    assert not differing(grid.decode(codes), codes.view(dtype).float()).any()


@pytest.mark.parametrize("grid", GRIDS)
def test_nan_is_a_code_where_the_format_has_one_and_zero_elsewhere(grid: SmallFloat) -> None:
    code = grid.encode(torch.tensor([torch.nan]))
    assert grid.decode(code).isnan().item() == (grid.bits == 8)
    assert code.item() == (0x7F if grid.bits == 8 else 0)


def test_codes_are_sign_exponent_mantissa() -> None:
    assert E2M1.encode(torch.tensor([0.0, -0.0, 0.5, 6.0, -0.5, -6.0])).tolist() == [0, 0, 1, 7, 9, 15]
    assert E2M3.encode(torch.tensor([0.125, 1.0, 7.5, -7.5])).tolist() == [1, 8, 31, 63]
    assert E3M2.encode(torch.tensor([0.0625, 0.25, 28.0, -28.0])).tolist() == [1, 4, 31, 63]


@pytest.mark.parametrize("element", INTEGERS)
def test_integers_round_to_even_saturate_and_keep_nan(element: SmallInt) -> None:
    x = torch.cat([torch.arange(-300, 301) / 2, torch.tensor([1e9, -torch.inf])])
    expected = x.double().round().clamp(element.min, element.max)
    rounded = element.round(x)
    assert torch.equal(rounded.double(), expected)
    assert not rounded[rounded == 0].signbit().any()
    assert element.round(torch.tensor([torch.nan])).isnan().all()
    assert torch.equal(element.decode(element.encode(rounded)), rounded)
    assert element.encode(torch.tensor([torch.nan])).tolist() == [0]


def test_integers_refuse_other_dtypes_and_ties() -> None:
    with pytest.raises(ValueError, match=r"int4\.round works in fp32 with ties to even"):
        INT4.round(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="ties 'away'"):
        INT8.round(torch.ones(2), ties="away")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grid", GRIDS)
def test_round_is_right_for_every_16_bit_input(grid: SmallFloat, dtype: torch.dtype) -> None:
    x = all_values_of(dtype)
    assert_rounds_to(x, nearest(x, grid), grid)


@settings(deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=64))
def test_e2m1_rounds_any_fp32_number_to_the_nearest(values: list[float]) -> None:
    x = torch.tensor(values)
    assert_rounds_to(x, nearest(x, E2M1), E2M1)


@settings(deadline=None)
@given(st.lists(st.floats(-600, 600, width=32), min_size=1, max_size=64))
def test_e4m3_rounds_any_fp32_number_to_the_nearest(values: list[float]) -> None:
    x = torch.tensor(values)
    assert_rounds_to(x, nearest(x, E4M3), E4M3)


def test_e4m3_equals_the_cast_of_torch_on_every_clamped_exponent_and_upper_mantissa() -> None:
    x = fp32_patterns().clamp(-448, 448)
    assert_rounds_to(x, x.to(torch.float8_e4m3fn).float(), E4M3)


@pytest.mark.parametrize("grid", GRIDS)
def test_large_numbers_saturate_and_nan_passes(grid: SmallFloat) -> None:
    above = torch.tensor([grid.max, grid.max * 1.01, grid.max * 2, 3e38, torch.inf])
    assert set(grid.round(above).tolist()) == {grid.max}
    assert set(grid.round(-above).tolist()) == {-grid.max}
    assert grid.round(torch.tensor([torch.nan])).isnan().all()


@pytest.mark.parametrize("grid", GRIDS)
def test_whatever_rounds_to_zero_is_plus_zero(grid: SmallFloat) -> None:
    smallest = grid.magnitudes[1].item()
    tiny = torch.tensor([0.0, -0.0, -1e-45, -1e-38, -smallest / 4, -smallest / 2])
    rounded = grid.round(tiny)
    assert (rounded == 0).all()
    assert not rounded.signbit().any()


@pytest.mark.parametrize("grid", GRIDS)
def test_without_saturation_the_result_is_the_same_within_the_range(grid: SmallFloat) -> None:
    x = neighbourhoods(grid)
    x = torch.cat([x[x.abs() <= grid.max], torch.tensor([torch.nan, 0.0, -0.0, 1e-45])])
    assert not differing(grid.round(x, saturate=False), grid.round(x)).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_round_refuses_what_is_not_fp32(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="works in fp32"):
        E2M1.round(torch.ones(3, dtype=dtype))


def exponent_part(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def test_unit_in_first_place_is_the_exponent_for_every_mantissa() -> None:
    for part in torch.arange(2**23, dtype=torch.int32).split(2**20):
        x = (part | 0x3F800000).view(torch.float32)
        assert torch.equal(unit_in_first_place(x), exponent_part(x))


def test_unit_in_first_place_is_the_exponent_in_every_binade_of_its_range() -> None:
    mantissas = torch.cat([torch.tensor([0, 1, 2**22 - 1, 2**22, 2**23 - 2, 2**23 - 1]), 2 ** torch.arange(23)])
    exponents = torch.arange(-100, 100)[:, None] + 127
    x = ((exponents << 23) | mantissas).flatten().to(torch.int32).view(torch.float32)
    x = x[x > 2.0**-100]
    assert torch.equal(unit_in_first_place(x), exponent_part(x))
    assert torch.equal(unit_in_first_place(-x), exponent_part(x))


def test_unit_in_first_place_stays_small_below_its_range() -> None:
    x = torch.tensor([0.0, 1e-45, 1e-40, 1.1754944e-38, 2.0**-110, 2.0**-101, 2.0**-100])
    assert (unit_in_first_place(x) <= 2.0**-100).all()


@pytest.fixture
def casts(shared: Path) -> dict[str, Tensor]:
    return load_file(shared / "golden" / "casts.safetensors")


@pytest.mark.parametrize(
    ("grid", "key"),
    [
        (E2M1, "e2m1/rne_spec_value"),
        (E2M1, "e2m1/compressed_tensors_value"),
        (E4M3, "e4m3/spec_value"),
        pytest.param(E2M1, "e2m1/ties_away_gptoss_value", id="away"),
        pytest.param(E2M1, "e2m1/ties_zero_modelopt_mxfp4_value", id="zero"),
    ],
)
def test_round_equals_the_reference_casts(casts: dict[str, Tensor], grid: SmallFloat, key: str) -> None:
    ties: Ties = "away" if "away" in key else "zero" if "zero" in key else "even"
    assert_rounds_to(casts["x"], casts[key], grid, ties)


def test_e4m3_equals_the_bytes_that_torch_and_ml_dtypes_wrote(casts: dict[str, Tensor]) -> None:
    x = casts["x"]
    assert_rounds_to(x, casts["e4m3/torch"].view(torch.float8_e4m3fn).float(), E4M3)
    # ml_dtypes does not saturate: 464 and above are NaN there.
    inside = ~(x.abs() >= 464)
    assert_rounds_to(x[inside], casts["e4m3/ml_dtypes"].view(torch.float8_e4m3fn).float()[inside], E4M3)


@pytest.mark.parametrize("peer", ["torchao", "ml_dtypes"])
def test_e2m1_equals_the_codes_of_peers_but_for_nan(casts: dict[str, Tensor], peer: str) -> None:
    decoded = torch.cat([E2M1.magnitudes, -E2M1.magnitudes])[casts[f"e2m1/{peer}"].long()]
    number = ~casts["x"].isnan()
    assert_rounds_to(casts["x"][number], decoded[number], E2M1)


@pytest.mark.parametrize(
    ("key", "ties"),
    [
        ("e2m1/ties_away_gptoss_value", [0.25, 1.25, 2.5, 5.0]),
        ("e2m1/ties_zero_modelopt_mxfp4_value", [0.75, 1.75, 3.5]),
    ],
)
def test_peers_with_other_tie_rules_part_from_ours_at_those_ties_only(
    casts: dict[str, Tensor], key: str, ties: list[float]
) -> None:
    wrong = differing(E2M1.round(casts["x"]), casts[key])
    assert sorted(casts["x"][wrong].tolist()) == sorted([*ties, *(-t for t in ties)])
