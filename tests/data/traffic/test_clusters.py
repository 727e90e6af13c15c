"""Clusters: deterministic and independent of order."""

import numpy as np
import pytest

from bitdraft.data.traffic.clusters import cluster_count, fit_clusters

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


def test_nothing_to_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one record"):
        fit_clusters(VECTORS[:0], 4)
