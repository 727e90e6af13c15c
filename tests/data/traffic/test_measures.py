"""Measures of match: formulas, both ends of their scales, and weights that repair a known difference."""

import numpy as np
import pytest
from scipy import sparse

from bitdraft.data.traffic.measures import (
    bucket_mass,
    kl_divergence,
    mmd,
    total_variation,
    two_sample_auc,
)


def halves(pool: int = 900, traffic: int = 500, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two spots, in shares of 80:20 in the pool and 40:60 in the traffic, and the pool's exact weights."""
    generator = np.random.default_rng(seed)
    in_pool, in_traffic = np.arange(pool) % 5 == 0, np.arange(traffic) % 5 > 1
    vectors = generator.normal(size=(pool + traffic, 4)).astype(np.float32)
    vectors[:, 0] += 3 * np.concatenate([in_pool, in_traffic])
    return vectors[:pool], vectors[pool:], np.where(in_pool, 3.0, 0.5)


def test_divergences_follow_their_formulas() -> None:
    traffic, pool = np.array([3.0, 0.0, 7.0]), np.array([1.0, 4.0, 5.0])
    p, q = (traffic + 0.5) / 11.5, (pool + 0.5) / 11.5
    assert kl_divergence(traffic, pool) == pytest.approx(sum(a * np.log(a / b) for a, b in zip(p, q, strict=True)))
    assert total_variation(traffic, pool) == pytest.approx((0.2 + 0.4 + 0.2) / 2)
    assert kl_divergence(pool, pool) == 0
    assert total_variation(np.array([1.0, 0]), np.array([0, 1.0])) == 1


def test_masses_are_weighted_sums_and_those_of_chunks_add() -> None:
    counts = sparse.csr_matrix(np.arange(12.0).reshape(4, 3))
    weights = np.array([1.0, 0.0, 2.0, 0.5])
    assert bucket_mass(counts, weights) == pytest.approx(weights @ counts.toarray())
    parts = bucket_mass(counts[:1]) + bucket_mass(counts[1:])
    assert parts == pytest.approx(bucket_mass(counts))


@pytest.mark.parametrize("bad", [[0.0, 0.0], [1.0, np.nan], [1.0, -1.0]])
def test_masses_that_are_no_distribution_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="counts that are finite, not negative and not all zero"):
        kl_divergence(np.array(bad), np.ones(2))


def test_the_auc_is_high_before_and_a_half_after_exact_weights() -> None:
    pool, traffic, weights = halves()
    assert two_sample_auc(pool, None, traffic) > 0.65
    assert two_sample_auc(pool, weights, traffic) == pytest.approx(0.5, abs=0.03)
    assert two_sample_auc(pool, None, traffic + 20) == pytest.approx(1)
    assert two_sample_auc(pool, 7 * weights, traffic) == pytest.approx(two_sample_auc(pool, weights, traffic), abs=1e-6)


def test_the_mmd_sees_a_difference_and_not_the_match() -> None:
    pool, traffic, weights = halves()
    before, after = mmd(pool, None, traffic), mmd(pool, weights, traffic)
    assert before.p < 0.01
    assert after.p > 0.05
    assert after.value < before.value / 5
    assert after.size == 300  # the pool's 900 records over the largest weight, 3 times the mean


def test_under_a_match_the_p_value_is_spread_evenly() -> None:
    found = []
    for seed in range(60):
        pool, traffic, weights = halves(300, 150, seed)
        found.append(mmd(pool, weights, traffic, permutations=99, seed=seed).p)
    # Strata in fixed shares vary less than free samples: p may lie higher, never lower.
    assert np.mean(np.array(found) <= 0.1) <= 0.2
    assert np.mean(found) > 0.4


def test_the_mmd_is_that_of_the_formula() -> None:
    generator = np.random.default_rng(1)
    pool, traffic = generator.normal(size=(2, 30, 3))
    both = np.concatenate([pool, traffic])
    distances = ((both[:, None] - both[None]) ** 2).sum(-1)
    kernel = np.exp(-distances / np.median([distances[i, j] for i in range(60) for j in range(i)]))
    expected = kernel[:30, :30].mean() + kernel[30:, 30:].mean() - 2 * kernel[:30, 30:].mean()
    assert mmd(pool, None, traffic, permutations=9).value == pytest.approx(expected)


def test_measures_are_seeded_and_do_not_depend_on_order() -> None:
    pool, traffic, weights = halves(300, 100)
    order = np.random.default_rng(5).permutation(300)
    for seed in (0, 1):
        assert two_sample_auc(pool, weights, traffic, seed=seed) == two_sample_auc(
            pool[order], weights[order], traffic[::-1], seed=seed
        )
        assert mmd(pool, weights, traffic, seed=seed) == mmd(pool[order], weights[order], traffic[::-1], seed=seed)
    assert two_sample_auc(pool, weights, traffic, limit=60, seed=0) != two_sample_auc(pool, weights, traffic, seed=0)


def test_equal_records_are_matched() -> None:
    same = np.ones((40, 3), np.float32)
    assert two_sample_auc(same, None, same[:9]) == 0.5
    found = mmd(same, None, same[:9])
    assert found.value == pytest.approx(0, abs=1e-12)
    assert (found.p, found.size) == (1.0, 9)
    assert two_sample_auc(same, None, np.zeros((1, 3), np.float32)) == 0.5


def test_bad_weights_and_empty_sides_are_refused() -> None:
    pool, traffic, weights = halves(30, 10)
    for measure in (two_sample_auc, mmd):
        for bad in (weights * np.nan, -weights, weights * 0, weights[1:]):
            with pytest.raises(ValueError, match="weights must be finite and not negative"):
                measure(pool, bad, traffic)
        with pytest.raises(ValueError, match="without records"):
            measure(pool, weights, traffic[:0])
