"""Calibration on synthetic heads whose miscalibration is known, its measures against slow transcriptions."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdraft.speculators.confidence import (
    CERTAIN,
    FEWEST_TRIES,
    Calibration,
    area_under_curve,
    expected_calibration_error,
    fit,
    kept_lengths,
    outcomes,
    reliability,
    truncation_table,
)

TRUE = Calibration(temperature=(1.4, 2.5, 0.7), shift=(-0.8, 0.6, -0.3))
K = len(TRUE.temperature)

probabilities = st.floats(0.0, 1.0, width=32)
chains = st.lists(st.lists(probabilities, min_size=4, max_size=4), min_size=1, max_size=5).map(torch.tensor)  # [B, 4]
trials = st.lists(st.tuples(st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9]), st.booleans()), min_size=1, max_size=40)


def passes(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Recorded passes of a head that is miscalibrated exactly as ``TRUE`` says: confidences and drafts accepted."""
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.sigmoid(1.5 + 1.2 * torch.randn(count, K, generator=generator))
    drawn = torch.rand(count, K, generator=generator)
    return confidence, (drawn < TRUE.calibrated(confidence)).long().cumprod(1).sum(1)


def as_tensors(pairs: list[tuple[float, bool]]) -> tuple[Tensor, Tensor]:
    confidence, success = zip(*pairs, strict=True)
    return torch.tensor(confidence), torch.tensor(success)


def test_fitted_confidences_are_right_on_fresh_passes() -> None:
    calibration = fit(*passes(20_000))
    confidence, accepted = passes(20_000, seed=1)
    tried, succeeded = outcomes(accepted, K)
    calibrated = calibration.calibrated(confidence)
    assert expected_calibration_error(confidence[tried], succeeded[tried]) > 0.08
    for j in range(K):
        here = tried[:, j]
        assert expected_calibration_error(calibrated[here, j], succeeded[here, j]) < 0.02
        # What was tried is independent of what comes: the product is the probability of getting past j.
        assert expected_calibration_error(calibrated.cumprod(1)[:, j], succeeded[:, j]) < 0.02
    assert calibration.temperature == pytest.approx(TRUE.temperature, rel=0.15)
    assert calibration.shift == pytest.approx(TRUE.shift, abs=0.15)


def test_what_follows_a_rejection_does_not_count() -> None:
    confidence, accepted = passes(2000)
    tried, _ = outcomes(accepted, K)
    elsewhere = torch.where(tried, confidence, torch.rand(confidence.shape))
    assert not torch.equal(elsewhere, confidence)
    assert fit(elsewhere, accepted) == fit(confidence, accepted)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.01, 0.99), st.booleans()), min_size=FEWEST_TRIES, max_size=FEWEST_TRIES + 20),
    st.booleans(),
)
def test_no_neighbouring_calibration_explains_the_passes_better(pairs: list[tuple[float, bool]], shift: bool) -> None:
    def misfit(temperature: float, moved: float) -> float:
        total = (math.log(temperature) ** 2 + moved**2) / 2
        for confidence, accepted in pairs:
            probability = 1 / (1 + math.exp(-(math.log(confidence / (1 - confidence)) / temperature + moved)))
            total -= math.log(probability if accepted else 1 - probability)
        return total

    confidence = torch.tensor([[c] for c, _ in pairs], dtype=torch.float64)
    found = fit(confidence, torch.tensor([int(a) for _, a in pairs]), shift=shift)
    (temperature,), (moved,) = found.temperature, found.shift
    best = misfit(temperature, moved)
    for factor in (0.99, 1.01):
        assert misfit(temperature * factor, moved) > best - 1e-9
    if shift:
        for step in (-0.01, 0.01):
            assert misfit(temperature, moved + step) > best - 1e-9
    else:
        assert moved == 0


def softmax_head(missing: float) -> tuple[Tensor, Tensor]:
    """A head's top-1 probabilities over a vocabulary of which it lacks a share, and whether the target agrees."""
    generator = torch.Generator().manual_seed(0)
    certainty = 1.2 + 3.6 * torch.rand(16_000, 1, generator=generator)
    target = certainty * torch.randn(16_000, 200, generator=generator)
    draft = target + 0.6 * certainty * torch.randn(target.shape, generator=generator)
    draft[:, torch.rand(200, generator=generator) < missing] = -torch.inf
    confidence, guess = draft.softmax(-1).max(-1)
    return confidence[:, None], (guess == target.argmax(-1)).long()


@pytest.mark.parametrize("missing", [0.0, 0.25])
def test_a_temperature_alone_does_not_calibrate_a_softmax(missing: float) -> None:
    """Why there is a shift; and the head was not calibrated to begin with."""
    confidence, accepted = softmax_head(missing)
    half, success = len(accepted) // 2, accepted[len(accepted) // 2 :].bool()
    errors = [
        expected_calibration_error(c.squeeze(1), success)
        for c in (
            confidence[half:],
            fit(confidence[:half], accepted[:half], shift=False).calibrated(confidence[half:]),
            fit(confidence[:half], accepted[:half]).calibrated(confidence[half:]),
        )
    ]
    assert min(errors[:2]) > 0.06
    assert errors[2] < 0.02


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("confidence", [0.8, 1.0])
def test_passes_of_one_kind_leave_the_calibration_finite(confidence: float, shift: bool) -> None:
    same = torch.full((500, 2), confidence)
    always, never = (fit(same, torch.full((500,), a), shift=shift).calibrated(same) for a in (2, 0))
    assert (always > 0.98).all()
    assert (never < (0.05 if shift else 0.6)).all(), "a temperature cannot go below ½"


def test_positions_that_few_passes_tried_take_over_the_one_before() -> None:
    confidence, _ = passes(300)
    accepted = torch.tensor([0] * 100 + [1] * 101 + [2] * 99)
    assert int(outcomes(accepted, K)[0][:, 2].sum()) == FEWEST_TRIES - 1
    found = fit(confidence, accepted)
    assert found.temperature[2] == found.temperature[1] != found.temperature[0]
    assert found.shift[2] == found.shift[1]
    with pytest.raises(ValueError, match="at least 100 passes, got 99: give more traffic prompts"):
        fit(confidence[:99], accepted[:99])


@settings(max_examples=50, deadline=None)
@given(chains)
def test_calibrating_keeps_the_order_and_stays_a_probability(confidence: Tensor) -> None:
    calibration = Calibration((2.0, 0.5, 1.0, 3.0), (0.5, -1.0, 0.0, 2.0))
    confidence = confidence.double()  # vector and scalar code of one function round differently
    calibrated = calibration.calibrated(confidence)
    assert ((calibrated >= 0) & (calibrated <= 1)).all()
    torch.testing.assert_close(calibration.calibrated(confidence[:, :2]), calibrated[:, :2], rtol=1e-13, atol=0)
    rises = confidence[:, None] <= confidence[None]  # [B, B, K]
    assert (calibrated[:, None] <= calibrated[None] + 1e-13)[rises].all()


def test_certain_confidences_and_the_formula() -> None:
    found = Calibration((2.0,), (0.5,)).calibrated(torch.tensor([[0.0], [0.3], [1.0]])).squeeze(1)
    odds = [math.log(p / (1 - p)) / 2 + 0.5 for p in (CERTAIN, 0.3, 1 - CERTAIN)]
    torch.testing.assert_close(found, torch.tensor([1 / (1 + math.exp(-o)) for o in odds]), rtol=1e-2, atol=1e-6)
    with pytest.raises(ValueError, match="covers 1 positions, not 2: record passes of draft length 2"):
        Calibration((2.0,), (0.5,)).calibrated(torch.tensor([0.5, 0.5]))


positive = st.floats(1e-3, 1e3)


@settings(max_examples=100, deadline=None)
@given(trials, st.integers(1, 12))
def test_bins_hold_all_trials_in_order_whatever_order_they_come_in(pairs: list[tuple[float, bool]], bins: int) -> None:
    confidence, success = as_tensors(pairs)
    found = reliability(confidence, success, bins)
    assert found == reliability(confidence.flip(0), success.flip(0), bins)
    assert sum(b.count for b in found) == len(pairs)
    assert [b.confidence for b in found] == sorted({b.confidence for b in found})
    assert sum(b.count * b.accepted for b in found) == pytest.approx(int(success.sum()))
    assert sum(b.count * b.confidence for b in found) == pytest.approx(float(confidence.double().sum()))


def test_the_error_is_that_of_a_loop_over_equal_bins() -> None:
    confidence, success = torch.rand(103), torch.rand(103) < 0.6
    ranked = sorted(zip(confidence.tolist(), success.tolist(), strict=True))
    groups: list[list[tuple[float, bool]]] = [[] for _ in range(10)]
    for rank, trial in enumerate(ranked):
        groups[rank * 10 // 103].append(trial)
    assert {len(g) for g in groups} == {10, 11}
    error = sum(abs(sum(c for c, _ in g) - sum(s for _, s in g)) for g in groups) / 103
    assert expected_calibration_error(confidence, success) == pytest.approx(error)


def test_a_known_error() -> None:
    confidence = torch.tensor([0.2] * 10 + [0.9] * 10)
    success = torch.tensor([True] * 3 + [False] * 7 + [True] * 7 + [False] * 3)
    assert expected_calibration_error(confidence, success, bins=2) == pytest.approx((0.1 + 0.2) / 2)


@settings(max_examples=100, deadline=None)
@given(trials)
def test_the_area_under_the_curve_is_that_of_all_pairs(pairs: list[tuple[float, bool]]) -> None:
    accepted, rejected = [c for c, s in pairs if s], [c for c, s in pairs if not s]
    wins = [(a > r) + (a == r) / 2 for a in accepted for r in rejected]
    area = area_under_curve(*as_tensors(pairs))
    assert area == pytest.approx(sum(wins) / len(wins)) if wins else math.isnan(area)


@settings(max_examples=100, deadline=None)
@given(chains, probabilities)
def test_a_draft_stops_before_its_survival_falls_below_the_threshold(calibrated: Tensor, threshold: float) -> None:
    kept = kept_lengths(calibrated, threshold)
    for row, length in zip(calibrated, kept.tolist(), strict=True):
        survival, expected = torch.tensor(1.0), 0
        for c in row:
            survival = survival * c
            if survival < threshold:
                break
            expected += 1
        assert length == expected
    for depth in range(1, calibrated.shape[1] + 1):
        so_far = kept_lengths(calibrated[:, :depth], threshold)
        assert torch.equal(so_far, kept.clamp(max=depth)), "a position is judged without those behind it"
    assert (kept_lengths(calibrated, threshold / 2) >= kept).all()
    assert (kept_lengths(calibrated, 0.0) == calibrated.shape[1]).all()


def first_token(keeps: Callable[[int], bool], draft: Tensor, target: Tensor) -> Tensor:
    """The next token's distribution if what is drawn from ``draft`` ``[V]`` is verified where ``keeps`` says so."""
    residual = (target - draft).clamp(min=0) / (target - draft).clamp(min=0).sum()
    emitted = torch.zeros_like(target)
    for token, drawn in enumerate(draft.tolist()):
        if keeps(token):
            accepts = min(1.0, float(target[token] / draft[token]))
            emitted += drawn * (1 - accepts) * residual
            emitted[token] += drawn * accepts
        else:
            emitted += drawn * target
    return emitted


def test_the_stop_may_read_the_distribution_but_not_the_token() -> None:
    draft, target = torch.tensor([0.6, 0.3, 0.1]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    coming = torch.tensor([0.2, 0.9, 0.9])  # the confidence at the next depth, after each token

    def kept(token: int) -> bool:
        return bool(kept_lengths(torch.tensor([[0.6, float(coming[token])]]), 0.5)[0] > 0)

    torch.testing.assert_close(first_token(kept, draft, target), target)
    for forbidden in (lambda token: bool(draft[token] > 0.5), lambda token: bool(coming[token] > 0.5)):
        assert (first_token(forbidden, draft, target) - target).abs().max() > 0.05


def test_truncation_is_that_of_a_loop_over_passes() -> None:
    confidence, accepted = passes(400)
    thresholds = [0.0, 0.3, 0.5, 0.8, 0.99, 1.0]
    rows = truncation_table(confidence, accepted, TRUE, thresholds)
    for row, threshold in zip(rows, thresholds, strict=True):
        drafted, still = 0, 0
        for calibrated, length in zip(TRUE.calibrated(confidence), accepted.tolist(), strict=True):
            kept = int(kept_lengths(calibrated[None], threshold))
            drafted, still = drafted + kept, still + min(kept, length)
        assert row.threshold == threshold
        assert row.drafted == pytest.approx(drafted / 400)
        assert row.rate == pytest.approx(still / drafted if drafted else 0.0)
        assert row.length == pytest.approx(1 + still / 400)
        assert row.share == pytest.approx((400 + still) / (400 + int(accepted.sum())))
    assert (rows[0].drafted, rows[0].share) == (K, 1.0)
    assert (rows[-1].drafted, rows[-1].rate, rows[-1].length) == (0.0, 0.0, 1.0)
    assert [r.length for r in rows] == sorted((r.length for r in rows), reverse=True)
    assert rows[2].rate > rows[0].rate + 0.1, "what is dropped is what would have been rejected"
