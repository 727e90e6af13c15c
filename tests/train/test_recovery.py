"""Gap recovery against its literal definition, its laws, and what it refuses to put into a number."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_matrix import cell, matrix, realistic, result, simulated

from bitdraft.speculators.metrics import Acceptance, bootstrap_draws, total
from bitdraft.train.report.recovery import Comparison, Document, comparisons, measurements

Rows = list[list[int]]


def length_difference_interval(a: Sequence[Acceptance], b: Sequence[Acceptance]) -> tuple[float, float, float]:
    """Acceptance length of ``a`` minus that of ``b`` with its paired bootstrap interval, written out."""
    draws = bootstrap_draws(len(a), 2000, 0)

    def resampled(parts: Sequence[Acceptance]) -> np.ndarray:
        emitted, passes = (np.array([getattr(p, name) for p in parts]) for name in ("emitted", "passes"))
        return emitted[draws].sum(1) / passes[draws].sum(1)

    low, high = np.quantile(resampled(a) - resampled(b), [0.025, 0.975])
    return total(a, a[0].draft_length).length - total(b, b[0].draft_length).length, float(low), float(high)


def compared(*cells: Document) -> list[Comparison]:
    return comparisons(measurements(matrix(*cells)))


def two_by_two(qq: Rows, bq: Rows, bb: Rows) -> Comparison:
    (comparison,) = compared(
        cell("mxfp4", "mxfp4", [result("demo", qq)]),
        cell("none", "mxfp4", [result("demo", bq)]),
        cell("none", "none", [result("demo", bb)]),
    )
    return comparison


QQ, BQ, BB = (simulated([p] * 3, 30, seed=i) for i, p in enumerate((0.6, 0.45, 0.65)))


def literal(qq: Rows, bq: Rows, bb: Rows, measure: Callable[[Rows], float]) -> tuple[float, ...]:
    """R with its interval: one Python loop per resample."""
    rng = np.random.default_rng(0)
    draws = rng.integers(0, len(qq), size=(2000, len(qq))).tolist()

    def ratio(prompts: list[int]) -> float:
        high, low, full = (measure([rows[i] for i in prompts]) for rows in (qq, bq, bb))
        return (high - low) / (full - low)

    values = sorted(ratio(draw) for draw in draws)
    # 0.025 · 1999 and 0.975 · 1999 lie between two values; the interval takes the outer ones.
    return ratio(list(range(len(qq)))), values[49], values[1950]


def length(rows: Rows) -> float:
    return 1 + sum(sum(row[2:]) for row in rows) / sum(row[0] for row in rows)


def rate(rows: Rows) -> float:
    return sum(sum(row[2:]) for row in rows) / sum(row[1] for row in rows)


def test_equals_the_literal_definition() -> None:
    stopped = [[passes, drafted - i, *accepted] for i, (passes, drafted, *accepted) in enumerate(QQ)]
    c = two_by_two(stopped, BQ, BB)
    for recovery, measure in ((c.length, length), (c.rate, rate)):
        assert recovery.ratio is not None
        found = (recovery.ratio.point, recovery.ratio.low, recovery.ratio.high)
        assert found == pytest.approx(literal(stopped, BQ, BB, measure), rel=1e-9)
    assert c.length.ratio != c.rate.ratio, "drafts were left out, so that the rate recovers more than the length"


def test_gain_and_gap_are_the_paired_differences_of_the_metrics() -> None:
    c = two_by_two(QQ, BQ, BB)

    def parts(rows: Rows) -> list[Acceptance]:
        return [
            Acceptance(3, 1, passes, drafted, tuple(accepted), (passes, *accepted[:-1]))
            for passes, drafted, *accepted in rows
        ]

    for estimate, other in ((c.length.gain, QQ), (c.length.gap, BB)):
        assert estimate is not None
        expected = length_difference_interval(parts(other), parts(BQ))
        assert (estimate.point, estimate.low, estimate.high) == pytest.approx(expected, rel=1e-9)


def test_at_a_fixed_draft_length_both_measures_recover_the_same() -> None:
    c = two_by_two(QQ, BQ, BB)
    assert c.length.ratio and c.rate.ratio
    assert c.length.ratio.point == pytest.approx(c.rate.ratio.point, rel=1e-12)
    assert c.length.gain.point == pytest.approx(3 * c.rate.gain.point, rel=1e-12)


def test_all_and_nothing_are_recovered_without_doubt() -> None:
    whole, nothing = two_by_two(BB, BQ, BB).length.ratio, two_by_two(BQ, BQ, BB).length
    assert whole is not None
    assert (whole.point, whole.low, whole.high) == (1.0, 1.0, 1.0)
    assert nothing.ratio is not None
    assert (nothing.ratio.point, nothing.ratio.high, nothing.gain.low, nothing.gain.high) == (0.0, 0.0, 0.0, 0.0)


def test_prompts_are_paired() -> None:
    """The prompts differ much, the cells on each prompt by the same: resampling them leaves no doubt."""
    rows = [[20, 60, i, i // 2, 0] for i in range(20)]
    more, most = ([[20, 60, i + add, i // 2, 0] for i in range(20)] for add in (2, 4))
    c = two_by_two(more, rows, most)
    assert c.length.gain.low == pytest.approx(0.1, rel=1e-12)
    assert c.length.gain.high == pytest.approx(0.1, rel=1e-12)
    assert c.length.ratio is not None
    assert (c.length.ratio.low, c.length.ratio.high) == pytest.approx((0.5, 0.5), rel=1e-9)


def test_without_a_gap_there_is_no_ratio() -> None:
    same = simulated([0.45] * 3, 30, seed=7)
    for bb in (same, simulated([0.3] * 3, 30, seed=8)):  # no difference; the reference head likes low bit better
        c = two_by_two(QQ, BQ, bb)
        for recovery in (c.length, c.rate):
            assert recovery.gap is not None
            assert recovery.gap.low <= 0
            assert recovery.ratio is None
            assert recovery.gain.low > 0, "the gain is a fact all the same"


def two_kinds_of_prompts(more: int, less: int) -> Comparison:
    """Gains of 0.2 on every prompt; gaps of +0.3 on ``more`` of them and of -0.2 on ``less``."""
    prompts = more + less
    bb = [[10, 10, 8] for _ in range(more)] + [[10, 10, 3] for _ in range(less)]
    return two_by_two([[10, 10, 7]] * prompts, [[10, 10, 5]] * prompts, bb)


def test_a_gap_within_chance_is_no_gap() -> None:
    c = two_kinds_of_prompts(21, 19)
    assert c.length.gap is not None
    assert c.length.gap.low < 0 < c.length.gap.point
    assert c.length.ratio is None


def test_draws_without_a_gap_count_as_the_largest_ratios() -> None:
    """In about 1 % of the draws the gap turns around. Its ratio would be negative; it belongs to the other end."""
    c = two_kinds_of_prompts(23, 17)
    gap, ratio = c.length.gap, c.length.ratio
    assert gap is not None and ratio is not None
    assert (ratio.low, ratio.high) == pytest.approx((0.2 / gap.high, 0.2 / gap.low), rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 50))
def test_only_ratios_count(times: int) -> None:
    """Answers ``times`` as long with the same acceptance: the same recovery."""
    longer = ([[times * n for n in row] for row in rows] for rows in (QQ, BQ, BB))
    a, b = two_by_two(*longer).length.ratio, two_by_two(QQ, BQ, BB).length.ratio
    assert a is not None and b is not None
    assert (a.point, a.low, a.high) == pytest.approx((b.point, b.low, b.high), rel=1e-9)


def test_every_low_bit_cell_meets_its_reference() -> None:
    found = comparisons(measurements(realistic()))
    pairs = {(c.trained.cell["trained_on"], c.trained.result["set"], c.trained.result["draft_length"]) for c in found}
    sets = {("demo", 3), ("demo", 5), ("gsm8k", 3)}
    assert pairs == {(t, *s) for t in ("mxfp4", "none, text of mxfp4") for s in sets}
    assert len(found) == len(pairs)
    for c in found:
        assert c.reference.cell["trained_on"] == "none"
        assert c.trained.cell["kind"] == c.reference.cell["kind"] == "eagle3"
        assert c.trained.stop is None


@pytest.mark.parametrize("field, value", [("temperature", 1.0), ("rule", "sampling"), ("batch_size", 1), ("seed", 3)])
def test_other_settings_are_not_compared(field: str, value: Any) -> None:
    cells = [cell("mxfp4", "mxfp4", [result("demo", QQ)]), cell("none", "mxfp4", [result("demo", BQ)])]
    assert len(compared(*cells)) == 1
    cells[1][field] = value
    assert compared(*cells) == []


def test_without_the_reference_served_as_it_is_only_the_gain_is_known() -> None:
    (c,) = compared(cell("mxfp4", "mxfp4", [result("demo", QQ)]), cell("none", "mxfp4", [result("demo", BQ)]))
    assert c.length.gain.point == pytest.approx(length(QQ) - length(BQ))
    assert c.length.gap is None and c.length.ratio is None


def test_the_gap_is_that_of_the_same_head() -> None:
    """A second head trained on the reference brings a comparison of its own."""
    other = {"head": "runs/other/export"}
    found = compared(
        cell("mxfp4", "mxfp4", [result("demo", QQ)]),
        cell("none", "mxfp4", [result("demo", BQ)]),
        cell("none", "none", [result("demo", BB)]),
        cell("none", "mxfp4", [result("demo", BQ)], **other),
    )
    assert [c.length.gap is None for c in found] == [False, True]


def test_cells_with_other_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"per_prompt of set demo has \[30, 29, 30\] prompts"):
        two_by_two(QQ, BQ[:-1], BB)


def test_documents_that_cannot_be_read_are_refused() -> None:
    whole = matrix(cell("mxfp4", "mxfp4", [result("demo", QQ)]))
    with pytest.raises(ValueError, match="version 2; this program reads version 1"):
        measurements({**whole, "version": 2})
    with pytest.raises(ValueError, match="holds no result"):
        measurements(matrix(cell("mxfp4", "mxfp4", [])))
    twice = matrix(*whole["cells"], deepcopy(whole["cells"][0]))
    with pytest.raises(ValueError, match=r"runs/eagle3-mxfp4/export served on mxfp4 is measured twice on demo"):
        measurements(twice)
