"""The whole estimate against known answers: synthetic densities, and public sets mixed in known shares."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from bench_scripts import bench_script

from bitdraft.data.conversation import Conversation
from bitdraft.data.sources import read_conversations
from bitdraft.data.traffic.clusters import cluster_count, fit_clusters
from bitdraft.data.traffic.features import FeatureSpace
from bitdraft.data.traffic.measures import total_variation, two_sample_auc
from bitdraft.data.traffic.weighing import estimate
from bitdraft.data.traffic.weights import Finished, effective_share, finished

PUBLIC = Path(__file__).parents[3] / "../shared/data/train"
MIX = bench_script("traffic_recovery").MIX  # percent of the pool and of the traffic


@dataclass(frozen=True)
class Matched:
    done: Finished
    unmatched: float


def matched(
    pool: np.ndarray, fit: np.ndarray, tune: np.ndarray, seed: int = 0, categories: Sequence[str] | None = None
) -> Matched:
    """Weights of ``pool [n, F]`` from two parts of the traffic."""
    clusters = fit_clusters(np.concatenate([pool, fit]), cluster_count(len(fit)), seed)
    found = estimate(pool, fit, tune, clusters, np.arange(len(pool)), seed, categories or [""] * len(pool))
    done = finished(found.weights)
    count = found.clusters.count
    of_fit, of_pool = np.bincount(found.of_fit, minlength=count), np.bincount(found.of_pool, done.weights, count)
    return Matched(done, total_variation(of_fit, of_pool))


def test_a_known_density_ratio_is_found_and_repairs_the_mean() -> None:
    """The pool is normal, the traffic normal elsewhere: the ratio is ``exp(μ·x − |μ|²/2)``."""
    shift = np.array([0.6, 0.5, 0, 0, 0, 0], np.float32)
    before, after = [], []
    for seed in range(3):
        generator = np.random.default_rng(seed)
        pool = generator.normal(size=(3000, 6)).astype(np.float32)
        fit, tune = ((generator.normal(size=(n, 6)) + shift).astype(np.float32) for n in (1500, 700))
        weights = matched(pool, fit, tune).done.weights
        true = np.exp(pool @ shift - shift @ shift / 2)
        assert np.corrcoef(weights, true)[0, 1] > 0.9
        value = pool[:, 0] + 0.5 * pool[:, 1] ** 2 + generator.normal(size=3000)
        expected = 0.6 + 0.5 * (1 + 0.5**2)
        before.append(value.mean() - expected)
        after.append(weights @ value / len(value) - expected)
    assert np.square(after).mean() < 0.2 * np.square(before).mean()


def drawn(sizes: tuple[int, int, int, int], seed: int) -> tuple[list[list[Conversation]], np.ndarray]:
    """Pool, and fit, tune and test of the traffic, and the pool's exact weights."""
    generator = np.random.default_rng(seed)
    parts: list[list[Conversation]] = [[], [], [], []]
    exact: list[float] = []
    for name, (of_pool, of_traffic) in MIX.items():
        records = read_conversations([PUBLIC / f"{name}.jsonl"])
        order, begin = generator.permutation(len(records)), 0
        for part, size, share in zip(parts, sizes, (of_pool, *[of_traffic] * 3), strict=True):
            end = begin + round(size * share / 100)
            assert end <= len(records)
            part += [records[i] for i in order[begin:end]]
            begin = end
        exact += [of_traffic / of_pool] * round(sizes[0] * of_pool / 100)
    return parts, np.array(exact)


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public sets are not here (../shared/data/train)")
def test_public_sets_in_known_shares_are_matched() -> None:
    (pool, fit, tune, test), exact = drawn((5000, 1500, 400, 500), seed=0)
    assert effective_share(exact) < 0.42
    space = FeatureSpace.fit([*pool, *fit], answers=False)
    vectors = [space.rows(part).vectors for part in (pool, fit, tune, test)]
    categories = np.array([r.category for r in pool])
    done = matched(vectors[0], vectors[1], vectors[2], categories=categories.tolist()).done
    wrong = {}
    for name in sorted(set(categories)):
        inside = categories == name
        if inside.sum() >= 100:
            wrong[name] = done.weights[inside].mean() / exact[inside].mean() - 1
    assert {name: round(float(w), 3) for name, w in wrong.items() if abs(w) > 0.2} == {}
    assert two_sample_auc(vectors[0], None, vectors[3]) > 0.65
    assert two_sample_auc(vectors[0], done.weights, vectors[3]) < 0.55
    assert done.ess_fraction >= 0.3
    assert done.temper == 1.0


def test_traffic_from_a_corner_of_the_pool_keeps_the_floor_and_says_what_it_costs() -> None:
    generator = np.random.default_rng(0)
    spots = generator.normal(size=(10, 5)) * 8
    pool = (spots[np.arange(2000) % 10] + generator.normal(size=(2000, 5))).astype(np.float32)
    fit, tune = ((spots[0] + generator.normal(size=(n, 5))).astype(np.float32) for n in (300, 100))
    found = matched(pool, fit, tune)
    assert found.done.ess_fraction == pytest.approx(0.3, abs=1e-6)
    assert found.done.ess_fraction_untempered < 0.2
    assert found.done.temper < 1
    # A tenth of the pool is like the traffic. With a share s of the weight on it and all else even, the effective share
    # is 1 / (s²/0.1 + (1 − s)²/0.9): a floor of 0.3 allows s = 0.558.
    assert found.unmatched == pytest.approx(1 - 0.558, abs=0.02)
