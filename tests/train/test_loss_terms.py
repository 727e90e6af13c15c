"""Weights and mixes of loss terms against slow transcriptions of their formulas."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdraft.train.draft_loss import Coefficients, Statistics
from bitdraft.train.loss_terms import (
    LossConfig,
    coefficients,
    lk_mix,
    sequence_cap,
    step_weights,
    survival_weights,
)

K = 3
# Two documents with 4 and 3 drafting rows; step k of row r predicts position r + k of its own document.
ROW_KN = torch.tensor([[0, 1, 2, 3, -1, 4, 5, 6], [-1, 0, 1, 2, 3, -1, 4, 5], [-1, -1, 0, 1, 2, -1, -1, 4]])
ROWS = 7
DIVISOR = 11.0
DOCUMENTS_N = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5])
BEFORE_K = torch.tensor([0.7, 0.5, 0.2])  # mean acceptance of the steps before


def statistics() -> Statistics:
    acceptance = torch.rand(ROW_KN.shape, generator=torch.Generator().manual_seed(4)) * (ROW_KN >= 0)
    return Statistics(torch.zeros(ROW_KN.shape), acceptance, torch.zeros(ROW_KN.shape, dtype=torch.bool))


def made(config: LossConfig) -> Coefficients:
    found = coefficients(config, ROW_KN, ROWS, DIVISOR, BEFORE_K, documents_N=DOCUMENTS_N)
    return found if isinstance(found, Coefficients) else found(statistics())


def survival_of(q: list[float], valid: list[bool], smoothing: float) -> list[float]:
    """``w_k = Σ_{m ≥ k} Π_{i ≤ m} ((1 − s) q_i + s)`` over the valid steps, term by term."""
    weights = [0.0] * len(q)
    for k in range(len(q)):
        for m in range(k, len(q)):
            if valid[k] and valid[m]:
                weights[k] += math.prod((1 - smoothing) * q[i] + smoothing for i in range(m + 1) if valid[i])
    return weights


@settings(max_examples=40, deadline=None)
@given(steps=st.integers(1, 9), decay=st.floats(0.1, 1.0))
def test_step_weights_decay_and_sum_to_one(steps: int, decay: float) -> None:
    weights = step_weights(steps, decay).tolist()
    total = sum(decay**i for i in range(steps))
    assert math.isclose(sum(weights), 1.0, rel_tol=1e-5)
    assert weights == pytest.approx([decay**k / total for k in range(steps)], rel=1e-5)


def test_the_cross_entropy_s_share_falls_with_acceptance() -> None:
    mean = torch.tensor([0.0, 0.25, 1.0], requires_grad=True)
    share = lk_mix(mean, 3.0)
    assert share.tolist() == pytest.approx([1.0, math.exp(-0.75), math.exp(-3.0)])
    assert not share.requires_grad


rows_of_steps = st.lists(
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=4, max_size=4), min_size=1, max_size=5
)


@settings(max_examples=60, deadline=None)
@given(table=rows_of_steps, smoothing=st.floats(0, 1))
def test_survival_weights_are_those_of_the_formula(table: list[list[tuple[float, bool]]], smoothing: float) -> None:
    q = torch.tensor([[entry[0] for entry in row] for row in table]).T
    valid = torch.tensor([[entry[1] for entry in row] for row in table]).T
    found = survival_weights(q, valid, smoothing).T
    for row, mine in zip(table, found.tolist(), strict=True):
        expected = survival_of([entry[0] for entry in row], [entry[1] for entry in row], smoothing)
        assert mine == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_survival_weights_are_the_slope_of_the_expected_length() -> None:
    q = torch.tensor([0.9, 0.3, 0.6, 0.8], dtype=torch.float64, requires_grad=True)
    valid = torch.ones(4, 1, dtype=torch.bool)
    length = q.cumprod(0).sum()
    (slope,) = torch.autograd.grad(length, q)
    torch.testing.assert_close(survival_weights(q[:, None], valid, 0.0).squeeze(1), (slope * q).detach())


def test_survival_weights_have_no_gradient_and_one_value_where_all_is_smoothed_away() -> None:
    q = torch.rand(4, 2, requires_grad=True)
    weights = survival_weights(q, torch.ones(4, 2, dtype=torch.bool), 1.0)
    assert not weights.requires_grad
    assert weights[:, 0].tolist() == weights[:, 1].tolist() == [4.0, 3.0, 2.0, 1.0]


@settings(max_examples=200, deadline=None)
@given(counts=st.lists(st.integers(0, 1000), min_size=1, max_size=12), cap=st.floats(0.02, 1.0))
def test_no_document_has_more_than_its_share(counts: list[int], cap: float) -> None:
    factors = sequence_cap(counts, cap).tolist()
    weights = [f * c for f, c in zip(factors, counts, strict=True)]
    there = [w for w, c in zip(weights, counts, strict=True) if c]
    assert all(0 < f <= 1 for f in factors)
    if not there:
        return
    if cap * len(there) <= 1:
        assert there == pytest.approx([min(c for c in counts if c)] * len(there), rel=1e-5)
        return
    assert max(there) <= cap * sum(there) * (1 + 1e-5)
    for factor, weight in zip(factors, weights, strict=True):
        assert factor == 1 or weight == pytest.approx(cap * sum(there), rel=1e-4), "cut, but below the cap"


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(1, 1000), min_size=2, max_size=8), cap=st.floats(0.1, 0.9))
def test_the_cap_s_level_is_that_of_a_search(counts: list[int], cap: float) -> None:
    """Cutting everybody to the level and asking again what the cap allows, until nothing changes."""
    if cap * len(counts) <= 1.05:
        return
    level = float(max(counts))
    for _ in range(3000):
        level = min(level, cap * sum(min(c, level) for c in counts))
    expected = [min(1.0, level / c) for c in counts]
    assert sequence_cap(counts, cap).tolist() == pytest.approx(expected, rel=1e-3)


def test_the_cap_by_hand() -> None:
    assert sequence_cap([60, 20, 20], 0.5).tolist() == pytest.approx([40 / 60, 1, 1])
    assert sequence_cap([100, 50, 10, 10], 0.3).tolist() == pytest.approx([0.15, 0.3, 1, 1])
    assert sequence_cap([100, 50, 10], 1.0).tolist() == [1, 1, 1]
    assert sequence_cap([100, 50, 10], 0.1).tolist() == pytest.approx([0.1, 0.2, 1])
    assert sequence_cap([70], 0.5).tolist() == [1]
    assert sequence_cap([70, 0], 0.5).tolist() == [1, 1]


@pytest.mark.parametrize("kind", ["kl", "lk-alpha"])
def test_plain_losses_know_their_coefficients_outright(kind: Any) -> None:
    found = made(LossConfig(kind=kind, step_decay=0.5))
    assert isinstance(found, Coefficients)
    only = found.cross_entropy if kind == "kl" else found.log_acceptance
    assert [found.cross_entropy, found.total_variation, found.log_acceptance].count(None) == 2
    assert only is not None
    for k, weight in enumerate([4 / 7, 2 / 7, 1 / 7]):
        for n in range(8):
            expected = weight * float(DOCUMENTS_N[n]) / DIVISOR if ROW_KN[k, n] >= 0 else 0.0
            assert float(only[k, n]) == pytest.approx(expected)


def test_the_mix_of_every_step_goes_by_its_own_mean_acceptance() -> None:
    found, plain = made(LossConfig(kind="lk", lk_eta=2.0)), made(LossConfig())
    assert found.cross_entropy is not None
    assert found.total_variation is not None
    assert plain.cross_entropy is not None
    for k, accepted in enumerate(BEFORE_K.tolist()):
        share = math.exp(-2.0 * accepted)
        torch.testing.assert_close(found.cross_entropy[k], share * plain.cross_entropy[k])
        torch.testing.assert_close(found.total_variation[k], (1 - share) * plain.cross_entropy[k])


def test_before_anything_is_accepted_the_mix_is_all_cross_entropy() -> None:
    found = coefficients(LossConfig(kind="lk"), ROW_KN, ROWS, DIVISOR, torch.zeros(K))
    assert isinstance(found, Coefficients)
    assert found.total_variation is not None
    assert not found.total_variation.any()


def survival_by_hand(smoothing: float) -> list[list[float]]:
    acceptance = statistics().acceptance
    assert acceptance is not None
    weights = [[0.0] * 8 for _ in range(K)]
    for row in range(ROWS):
        places = [[n for n in range(8) if ROW_KN[k, n] == row] for k in range(K)]
        q = [float(acceptance[k, at[0]]) if at else 0.0 for k, at in enumerate(places)]
        for k, w in enumerate(survival_of(q, [bool(at) for at in places], smoothing)):
            for n in places[k]:
                weights[k][n] = w
    return weights


@pytest.mark.parametrize("kind", ["kl", "lk", "lk-alpha"])
def test_survival_weights_stand_where_their_row_predicts_and_sum_to_about_one(kind: Any) -> None:
    found = made(LossConfig(kind=kind, survival=True, survival_smoothing=0.25))
    terms = [x for x in (found.cross_entropy, found.total_variation, found.log_acceptance) if x is not None]
    assert len(terms) == (2 if kind == "lk" else 1)
    total = torch.stack(terms).sum(0)
    by_hand = torch.tensor(survival_by_hand(0.25))
    usual = sum(survival_of(BEFORE_K.tolist(), [True] * K, 0.25))
    torch.testing.assert_close(total, by_hand / usual * DOCUMENTS_N / DIVISOR)


@pytest.mark.parametrize("kind", ["kl", "lk", "lk-alpha"])
@pytest.mark.parametrize("survival", [True, False])
def test_a_part_of_a_batch_has_its_part_of_the_coefficients(kind: Any, survival: bool) -> None:
    """Documents in packs or ranks of their own weigh what they weigh together."""
    config, stats = LossConfig(kind=kind, survival=survival), statistics()
    whole = made(config)
    for part in (slice(0, 5), slice(5, 8)):
        found = coefficients(config, ROW_KN[:, part], ROWS, DIVISOR, BEFORE_K, documents_N=DOCUMENTS_N[part])
        if not isinstance(found, Coefficients):
            assert stats.acceptance is not None
            found = found(Statistics(stats.cross_entropy[:, part], stats.acceptance[:, part], stats.agrees[:, part]))
        for name in ("cross_entropy", "total_variation", "log_acceptance"):
            expected, its = getattr(whole, name), getattr(found, name)
            assert (expected is None) == (its is None)
            if expected is not None:
                torch.testing.assert_close(its, expected[:, part])


def test_a_batch_without_rows_has_finite_coefficients() -> None:
    none = torch.full((K, 2), -1)
    of = coefficients(LossConfig(kind="lk", survival=True), none, 0, 1.0, BEFORE_K)
    assert not isinstance(of, Coefficients)
    found = of(Statistics(torch.zeros(K, 2), torch.zeros(K, 2), torch.zeros(K, 2, dtype=torch.bool)))
    assert found.cross_entropy is not None
    assert found.total_variation is not None
    assert not found.cross_entropy.any()
    assert not found.total_variation.any()


@pytest.mark.parametrize(
    "wrong",
    [
        {"lk_eta": -1.0},
        {"lk_eta": float("nan")},
        {"step_decay": 0.0},
        {"step_decay": 1.1},
        {"survival_smoothing": 1.5},
        {"sequence_cap": 0.0},
        {"sequence_cap": float("nan")},
    ],
)
def test_a_wrong_value_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"loss.{next(iter(wrong))} must"):
        LossConfig(**wrong)


def test_the_config_says_when_acceptance_is_needed() -> None:
    assert not LossConfig().needs_acceptance
    assert LossConfig(survival=True).needs_acceptance
    assert LossConfig(kind="lk").needs_acceptance
    assert LossConfig(kind="lk-alpha").needs_acceptance
