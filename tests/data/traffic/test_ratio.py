"""The density ratio: held-out judgement, calibration, and what there is to learn from little."""

import numpy as np
import pytest

from bitdraft.data.traffic.ratio import calibrated, density_ratio


def sides(pool: int = 1500, traffic: int = 400, shift: float = 0.8, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    vectors = generator.normal(size=(pool + traffic, 6)).astype(np.float32)
    vectors[pool:, 0] += shift
    return vectors[:pool], vectors[pool:]


def test_the_ratio_of_two_known_densities_is_found_and_has_mean_one() -> None:
    pool, traffic = sides()
    true = np.exp(0.8 * pool[:, 0] - 0.32)
    found = density_ratio(pool, traffic)
    assert np.corrcoef(found.pool, true)[0, 1] > 0.9
    assert found.pool.mean() == pytest.approx(1, abs=0.1)
    fresh, _ = sides(seed=1)
    predicted = found.predict(fresh)
    assert np.corrcoef(predicted, np.exp(0.8 * fresh[:, 0] - 0.32))[0, 1] > 0.9
    assert predicted.mean() == pytest.approx(1, abs=0.1)


def test_few_records_of_traffic_count_as_much_as_many_of_the_pool() -> None:
    pool, traffic = sides(pool=4000, traffic=80)
    assert density_ratio(pool, traffic).pool.mean() == pytest.approx(1, abs=0.2)


def test_traffic_like_the_pool_gets_ratios_near_one() -> None:
    """A model that judged what it has seen would tell noise apart."""
    pool, traffic = sides(pool=600, traffic=200, shift=0.0)
    ratio = density_ratio(pool, traffic).pool
    assert np.abs(np.log(ratio)).mean() < 0.2
    assert ratio.std() < 0.35


def test_order_does_not_matter_and_chunks_do_not() -> None:
    pool, traffic = sides(300, 100)
    order = np.random.default_rng(0).permutation(300)
    found, other = density_ratio(pool, traffic), density_ratio(pool[order], traffic[::-1])
    assert (other.pool == found.pool[order]).all()
    parts = [found.predict(pool[i : i + 50]) for i in range(0, 300, 50)]
    np.testing.assert_allclose(np.concatenate(parts), found.predict(pool), rtol=1e-4)


def test_calibration_gives_each_level_its_smoothed_share_and_never_falls() -> None:
    scores = np.array([0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    is_traffic = np.array([0, 0, 0, 1, 0, 1, 1, 1], bool)
    levels = calibrated(scores, is_traffic)
    # To four records a level come 20 as the model says: expit(0) and expit(1), half of all being traffic.
    high = 20 / (1 + np.exp(-1))
    expected = [(1 + 10) / (3 + 10), (3 + high) / (1 + 20 - high)]
    assert levels(np.array([0.0, 1.0])) == pytest.approx(expected)
    assert levels(np.array([-9.0, 9.0])) == pytest.approx(expected)
    generator = np.random.default_rng(0)
    noise = calibrated(generator.normal(size=500), generator.random(500) < 0.2)
    assert (np.diff(noise(np.linspace(-3, 3, 100))) >= 0).all()


@pytest.mark.parametrize("traffic_is_far", [False, True])
def test_ratios_are_positive_and_finite_however_far_apart_the_sides_are(traffic_is_far: bool) -> None:
    pool, traffic = sides(200, 60, shift=50.0 if traffic_is_far else 0.0)
    found = density_ratio(pool, traffic)
    for ratio in (found.pool, found.predict(traffic)):
        assert np.isfinite(ratio).all()
        assert (ratio > 0).all()


def test_where_there_is_nothing_to_learn_the_ratio_is_one() -> None:
    same = np.ones((20, 3), np.float32)
    for pool, traffic in ((same, same[:5]), (same, np.zeros((1, 3), np.float32)), (same[:1], same)):
        found = density_ratio(pool, traffic)
        assert found.pool.tolist() == [1.0] * len(pool)
        assert found.predict(same).tolist() == [1.0] * 20


def test_traffic_smaller_than_the_folds_and_constant_features_are_borne() -> None:
    pool, traffic = sides(100, 3)
    pool[:, 3:], traffic[:, 3:] = 2.0, 2.0
    assert np.isfinite(density_ratio(pool, traffic, folds=5).pool).all()


def test_empty_sides_and_vectors_that_are_not_finite_are_refused() -> None:
    pool, traffic = sides(50, 20)
    with pytest.raises(ValueError, match="the traffic holds no record"):
        density_ratio(pool, traffic[:0])
    with pytest.raises(ValueError, match="the pool holds no record"):
        density_ratio(pool[:0], traffic)
    traffic[3, 2] = np.inf
    with pytest.raises(ValueError, match="vectors of the traffic hold NaN or infinity"):
        density_ratio(pool, traffic)
