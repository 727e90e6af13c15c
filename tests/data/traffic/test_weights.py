"""Weights from estimates: every formula beside a slow transcription, and what bad input does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitdraft.data.traffic.weights import (
    choose_beta,
    effective_share,
    finished,
    post_stratified,
    refined,
    token_corrected,
)

POSITIVE = st.lists(st.floats(0.01, 100), min_size=2, max_size=60).map(np.array)
GENERATOR = np.random.default_rng(7)


def test_post_stratification_is_the_smoothed_share_of_the_traffic_over_that_of_the_pool() -> None:
    pool, traffic = np.array([0, 0, 0, 1, 2, 2]), np.array([1, 1, 0, 1])
    k, kappa = 4, 0.5
    expected = [
        ((list(traffic).count(c) + kappa) / (4 + kappa * k)) / ((list(pool).count(c) + kappa) / (6 + kappa * k))
        for c in range(k)
    ]
    assert post_stratified(pool, traffic, k, smoothing=kappa) == pytest.approx(expected)


def test_without_smoothing_post_stratified_weights_reproduce_the_traffics_shares_exactly() -> None:
    pool, traffic = GENERATOR.integers(0, 5, 1000), GENERATOR.integers(0, 3, 200)
    weights = post_stratified(pool, traffic, 5, smoothing=0.0)[pool]
    found = np.bincount(pool, weights, minlength=5) / weights.sum()
    assert found == pytest.approx(np.bincount(traffic, minlength=5) / 200)


def test_refining_moves_weight_inside_clusters_and_leaves_their_totals() -> None:
    clusters, ratio = GENERATOR.integers(0, 4, 300), GENERATOR.lognormal(size=300)
    by_cluster = np.array([0.5, 1.0, 2.0, 3.0])
    for beta in (0.0, 0.25, 1.0):
        weights = refined(by_cluster, clusters, ratio, beta).weights(clusters, ratio)
        assert weights.mean() == pytest.approx(1)
        for c in range(4):
            inside = clusters == c
            assert weights[inside].mean() / weights.mean() == pytest.approx(by_cluster[c] / by_cluster[clusters].mean())
            slow = ratio[inside] ** beta
            assert weights[inside] / weights[inside].mean() == pytest.approx(slow / slow.mean())


def test_trust_moves_the_totals_of_clusters_from_their_shares_to_the_ratio() -> None:
    clusters, ratio = GENERATOR.integers(0, 3, 300), GENERATOR.lognormal(size=300)
    by_cluster = np.array([0.2, 1.0, 4.0])
    means = np.array([ratio[clusters == c].mean() for c in range(3)])
    for trust, between in ((0.5, np.sqrt(by_cluster * means)), (1.0, means)):
        weights = refined(by_cluster, clusters, ratio, 0.5, trust).weights(clusters, ratio)
        found = np.array([weights[clusters == c].mean() for c in range(3)])
        assert found / found[0] == pytest.approx(between / between[0])


def test_a_cluster_that_the_pool_lacks_gives_its_traffic_finite_weights() -> None:
    clusters, ratio = np.zeros(10, int), np.full(10, 2.0)
    assert np.isfinite(refined(np.array([1.0, 4.0]), clusters, ratio, 1.0).by_cluster).all()


def test_beta_follows_the_tune_split() -> None:
    clusters = np.zeros(4000, int)
    ratio = np.exp(GENERATOR.normal(size=4000) - 0.5)
    told = GENERATOR.choice(ratio, 3000, p=ratio / ratio.sum())  # traffic that the ratio describes
    untold = GENERATOR.choice(ratio, 3000)  # traffic that is as the pool
    args = (np.ones(1), clusters, ratio, np.zeros(3000, int))
    right, likelihoods = choose_beta(*args, told)
    assert right.beta == 1.0
    assert likelihoods[right.beta, right.trust] == max(likelihoods.values())
    assert choose_beta(*args, untold)[0].beta == 0.0
    with pytest.raises(ValueError, match="tune split of the traffic is empty"):
        choose_beta(np.ones(1), clusters, ratio, np.zeros(0, int), np.zeros(0))


def test_after_the_correction_clusters_share_tokens_as_the_traffic_does() -> None:
    pool, traffic = GENERATOR.integers(0, 3, 900), GENERATOR.integers(0, 3, 300)
    pool_tokens, traffic_tokens = GENERATOR.integers(1, 90, 900) * (pool + 1), GENERATOR.integers(1, 90, 300)
    raw = GENERATOR.lognormal(size=900) * post_stratified(pool, traffic, 3, smoothing=0.0)[pool]
    raw *= (np.bincount(traffic) / 300 / (np.bincount(pool, raw) / raw.sum()))[pool]  # sequences match
    weights = token_corrected(raw, pool, pool_tokens, traffic, traffic_tokens, 3, smoothing=0.0)
    mass = np.bincount(pool, weights * pool_tokens)
    expected = np.bincount(traffic, traffic_tokens)
    assert mass / mass.sum() == pytest.approx(expected / expected.sum())


def test_without_answer_tokens_on_a_side_the_correction_changes_nothing() -> None:
    weights, clusters, none, some = np.array([1.0, 2.0]), np.array([0, 1]), np.zeros(2), np.array([3.0, 9.0])
    assert token_corrected(weights, clusters, none, clusters, some, 2).tolist() == [1.0, 2.0]
    assert token_corrected(weights, clusters, some, clusters, none, 2).tolist() == [1.0, 2.0]


@given(POSITIVE, st.floats(0, 1), st.floats(0, 0.5))
def test_finished_weights_keep_the_floor_and_temper_no_more_than_they_must(
    raw: np.ndarray, floor: float, uniform: float
) -> None:
    done = finished(raw, floor=floor, uniform=uniform)
    assert done.weights.mean() == pytest.approx(1)
    assert done.ess_fraction >= floor - 1e-9
    assert (done.weights >= uniform - 1e-9).all()
    assert done.temper == 1.0 or done.ess_fraction == pytest.approx(floor, abs=1e-6)
    assert (done.temper == 1.0) == (done.ess_fraction_untempered >= floor)
    order = np.argsort(raw, kind="stable")
    assert (np.diff(done.weights[order]) >= -1e-9).all()


@given(POSITIVE, st.floats(0, 1), st.floats(0, 1))
def test_the_effective_share_falls_as_the_temper_grows(raw: np.ndarray, one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert effective_share(raw**less) >= effective_share(raw**more) - 1e-9


def test_the_effective_share_is_that_of_the_formula() -> None:
    weights = np.array([1.0, 2.0, 5.0])
    assert effective_share(weights) == pytest.approx((1 + 2 + 5) ** 2 / (3 * (1 + 4 + 25)))
    assert effective_share(np.full(9, 0.3)) == pytest.approx(1)


def test_clipping_binds_the_largest_weights_alone() -> None:
    raw = np.concatenate([np.ones(900), np.full(95, 60.0), np.full(5, 1000.0)])
    done = finished(raw, clip=0.99, uniform=0.0, floor=0.0)
    assert done.clipped == 5
    assert done.weights[-1] == done.weights[900] == pytest.approx(60 * done.weights[0])
    assert finished(raw, clip=1.0, uniform=0.0, floor=0.0).clipped == 0


def test_a_small_group_that_is_wanted_keeps_its_weight() -> None:
    """Three records of a thousand lie beyond the quantile: their weight is bounded, but not by that of the others."""
    done = finished(np.concatenate([np.ones(997), np.full(3, 4.0)]), uniform=0.0, floor=0.0)
    assert done.clipped == 0 and done.weights[-1] == pytest.approx(4 * done.weights[0])
    done = finished(np.concatenate([np.ones(997), np.full(3, 40.0)]), uniform=0.0, floor=0.0)
    assert done.clipped == 3 and done.clip == 5.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, -1.0])
def test_weights_that_are_not_positive_and_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="positive and finite: 1 of 3"):
        finished(np.array([1.0, bad, 2.0]))
    with pytest.raises(ValueError, match="density ratio must be positive and finite"):
        refined(np.ones(1), np.zeros(2, int), np.array([1.0, bad]), 0.5)


def test_empty_sides_and_settings_out_of_range_are_refused() -> None:
    some, none = np.zeros(3, int), np.zeros(0, int)
    for sides in ((some, none), (none, some)):
        with pytest.raises(ValueError, match="need records"):
            post_stratified(*sides, 2)
    with pytest.raises(ValueError, match="empty"):
        finished(np.zeros(0))
    with pytest.raises(ValueError, match="are shares"):
        finished(np.ones(3), floor=1.5)


def test_one_record_and_equal_records_keep_weight_one() -> None:
    assert finished(np.array([3.0])).weights.tolist() == [1.0]
    assert finished(np.full(20, 7.0)).weights == pytest.approx(np.ones(20))
