"""Clusters: deterministic, independent of order, and honest about what the pool lacks."""

import numpy as np
import pytest

from bitdraft.data.traffic.clusters import cluster_count, fit_clusters, shares

GENERATOR = np.random.default_rng(3)
SPOTS = GENERATOR.normal(size=(5, 8)) * 10
VECTORS = (SPOTS[np.arange(400) % 5] + GENERATOR.normal(size=(400, 8))).astype(np.float32)


def test_far_spots_become_one_cluster_each() -> None:
    clusters = fit_clusters(VECTORS, 5)
    found = clusters.assign(VECTORS)
    assert len({(i % 5, c) for i, c in enumerate(found)}) == 5


def test_order_does_not_matter_and_the_seed_decides() -> None:
    order = GENERATOR.permutation(400)
    assert (fit_clusters(VECTORS[order], 30, 1).centres == fit_clusters(VECTORS, 30, 1).centres).all()
    assert not (fit_clusters(VECTORS, 30, 2).centres == fit_clusters(VECTORS, 30, 1).centres).all()


def test_each_record_goes_to_the_nearest_centre() -> None:
    clusters = fit_clusters(VECTORS, 12)
    slow = [int(np.argmin([np.linalg.norm(v - c) for c in clusters.centres])) for v in VECTORS]
    assert clusters.assign(VECTORS).tolist() == slow


def test_equal_records_make_one_cluster() -> None:
    clusters = fit_clusters(np.ones((50, 4), np.float32), 16)
    assert clusters.count == 1
    assert clusters.assign(np.zeros((3, 4), np.float32)).tolist() == [0, 0, 0]


def test_the_number_of_clusters_is_the_root_of_the_traffic_within_bounds() -> None:
    assert [cluster_count(n) for n in (1, 900, 10**6)] == [16, 30, 256]


def test_shares_name_the_clusters_that_the_pool_lacks() -> None:
    pool, traffic = np.array([0, 0, 1, 3]), np.array([0, 2, 2, 2, 4])
    found = shares(pool, traffic, 5)
    assert found.without_pool.tolist() == [2, 4]
    assert found.traffic_without_pool == pytest.approx(4 / 5)
    assert found.pool == pytest.approx([0.5, 0.25, 0, 0.25, 0])
    assert found.unmatched == pytest.approx(0.6 + 0.2)
    weighted = shares(pool, np.array([0, 1, 3]), 5, np.array([1.0, 1.0, 2.0, 2.0]))
    assert weighted.unmatched == pytest.approx(0)


def test_nothing_to_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one record"):
        fit_clusters(VECTORS[:0], 4)
    with pytest.raises(ValueError, match="need records"):
        shares(np.zeros(2, int), np.zeros(0, int), 2)
