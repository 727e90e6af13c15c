"""Factors for the pool's categories, from traffic that names none."""

from collections.abc import Sequence

import numpy as np
import pytest

from bitdraft.data.traffic.categories import FEWEST, MOST, category_corrected

NAMES = np.array(["chat", "code", "math"])


def records(shares: Sequence[float] | np.ndarray, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Categories and vectors ``[n, 8]``: clouds that overlap, so that some records are taken for others."""
    chance = np.random.default_rng(seed)
    kind = chance.choice(3, size=n, p=shares)
    return NAMES[kind], np.eye(8)[kind] * 2.2 + chance.standard_normal((n, 8))


def corrected(weights: np.ndarray, pool: np.ndarray, names: Sequence[str], traffic: np.ndarray) -> np.ndarray:
    return category_corrected(weights, pool, names, traffic, np.arange(len(pool)), seed=0)


def shares(weights: np.ndarray, names: np.ndarray) -> np.ndarray:
    return np.array([weights[names == name].sum() for name in NAMES]) / weights.sum()


def test_an_unsure_estimate_is_corrected_although_single_records_are_mistaken() -> None:
    of_pool, of_traffic = np.array([0.2, 0.3, 0.5]), np.array([0.5, 0.3, 0.2])
    names, pool = records(of_pool, 6000, 1)
    _, traffic = records(of_traffic, 3000, 2)
    kind = np.searchsorted(NAMES, names)
    unsure = (of_traffic / of_pool)[kind] ** 0.6 * np.random.default_rng(3).uniform(0.5, 1.5, 6000)
    weights = corrected(unsure, pool, names.tolist(), traffic)
    assert np.abs(shares(unsure, names) / of_traffic - 1).max() > 0.2
    assert np.abs(shares(weights, names) / of_traffic - 1).max() < 0.08
    assert weights.mean() == pytest.approx(1)
    for name in NAMES:
        within = weights[names == name] / unsure[names == name]
        assert within == pytest.approx(np.full(len(within), within[0])), "within a category nothing moves"


def test_what_is_right_stays_nearly_as_it_is() -> None:
    names, pool = records([0.2, 0.3, 0.5], 6000, 4)
    _, traffic = records([0.2, 0.3, 0.5], 3000, 5)
    weights = corrected(np.ones(6000), pool, names.tolist(), traffic)
    assert np.abs(weights - 1).max() < 0.12


def test_little_traffic_settles_little() -> None:
    """Of three records two are chat by chance: that is no reason to double chat."""
    names, pool = records([1 / 3, 1 / 3, 1 / 3], 3000, 6)
    traffic = np.eye(8)[[0, 0, 1]] * 2.2
    weights = corrected(np.ones(3000), pool, names.tolist(), traffic)
    assert weights.max() < 1.15 and weights.min() > 0.85


def test_records_beyond_the_sample_get_their_categorys_factor() -> None:
    names, pool = records([0.2, 0.3, 0.5], 2000, 7)
    _, traffic = records([0.5, 0.3, 0.2], 2000, 8)
    weights = category_corrected(np.ones(2000), pool, names.tolist(), traffic, np.arange(0, 2000, 2), seed=0)
    assert all(len(set(weights[names == name].round(9))) == 1 for name in NAMES)
    assert weights[names == "chat"][0] > 1.2 > 0.9 > weights[names == "math"][0]


@pytest.mark.parametrize(
    ("names", "apart"),
    [
        (["one"] * 100, 1),
        ([""] * 100, 1),
        (["one"] * 60 + ["two"] * 40, 2),
        (["one"] * 60 + ["two"] * (40 - FEWEST) + [f"rare {i}" for i in range(FEWEST)], 3),
        (["one"] * 60 + ["two"] * 35 + ["rare"] * 5, 2),
        (["one"] * 95 + ["rare"] * 5, 1),
        ([str(i) for i in range(100)], 1),
        (["one"] * 60 + [""] * 40, 2),
    ],
)
def test_small_categories_are_taken_together(names: list[str], apart: int) -> None:
    chance = np.random.default_rng(9)
    vectors = chance.standard_normal((100, 4))
    vectors[:60] += 2
    vectors[80:] -= 2
    weights = corrected(np.ones(100), vectors, names, chance.standard_normal((500, 4)) + 1)
    assert len(set(weights.round(9))) == apart


def test_of_very_many_categories_the_largest_count() -> None:
    names = [f"kind {i % (MOST + 40)}" for i in range((MOST + 40) * FEWEST)]
    chance = np.random.default_rng(10)
    pool = chance.standard_normal((len(names), 3))
    weights = corrected(np.ones(len(names)), pool, names, chance.standard_normal((200, 3)) + 0.3)
    assert 2 <= len(set(weights.round(9))) <= MOST + 1
