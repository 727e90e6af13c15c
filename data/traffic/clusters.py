"""Groups of like records: k-means over the vectors of pool and traffic together.

The fit is the same for the same vectors in any order, and for the same seed. ``shares`` says how much of pool and
traffic each cluster holds, and which clusters of the traffic have no record in the pool: nothing can stand in for them.
"""

from dataclasses import dataclass

import numpy as np
from sklearn.cluster import KMeans, MiniBatchKMeans

# n record, F feature, K cluster.

FEWEST, MOST = 16, 256
_WHOLE = 20_000  # vectors up to which every step of k-means sees all


def cluster_count(traffic: int) -> int:
    """About the square root of the traffic's records, from 16 to 256: clusters of the traffic stay populated."""
    return int(np.clip(round(traffic**0.5), FEWEST, MOST))


@dataclass(frozen=True, eq=False)
class Clusters:
    """``centres``: ``[K, F]`` float32. K may be less than was asked for: equal records make one cluster."""

    centres: np.ndarray

    @property
    def count(self) -> int:
        return len(self.centres)

    def assign(self, vectors: np.ndarray) -> np.ndarray:
        """``[n]`` int32: the nearest centre of each vector ``[n, F]``, the first of equals."""
        squares = (self.centres.astype(np.float64) ** 2).sum(1)
        found = np.empty(len(vectors), np.int32)
        for i in range(0, len(vectors), 8192):
            found[i : i + 8192] = (squares - 2.0 * vectors[i : i + 8192].astype(np.float64) @ self.centres.T).argmin(1)
        return found


def fit_clusters(vectors: np.ndarray, k: int, seed: int = 0) -> Clusters:
    """``k`` clusters of ``vectors [n, F]``, a sample of the pool and the traffic together.

    Raises ``ValueError`` for no vectors or ``k`` below 1.
    """
    if k < 1 or not len(vectors):
        raise ValueError(f"clusters need at least one record and k of at least 1, got {len(vectors)} and {k}")
    vectors = vectors[np.lexsort(vectors.T[::-1])]
    k = min(k, len(np.unique(vectors, axis=0)))
    make = KMeans if len(vectors) <= _WHOLE else MiniBatchKMeans
    fitted = make(k, n_init=3, random_state=seed).fit(vectors)
    return Clusters(fitted.cluster_centers_.astype(np.float32))


@dataclass(frozen=True, eq=False)
class Shares:
    """How pool and traffic spread over K clusters."""

    pool: np.ndarray  # [K] share of the pool's weight, sums to 1
    traffic: np.ndarray  # [K] share of the traffic's records, sums to 1
    without_pool: np.ndarray  # clusters, ascending, that hold traffic but no record of the pool

    @property
    def unmatched(self) -> float:
        """The share of the traffic that the weighted pool lacks: 0 where all clusters match; total variation."""
        return float(np.maximum(self.traffic - self.pool, 0).sum())

    @property
    def traffic_without_pool(self) -> float:
        """The share of the traffic in clusters that hold no record of the pool, whatever the weights."""
        return float(self.traffic[self.without_pool].sum())


def shares(
    pool_clusters: np.ndarray, traffic_clusters: np.ndarray, k: int, weights: np.ndarray | None = None
) -> Shares:
    """``pool_clusters [n]`` with ``weights [n]`` (1 by default) beside ``traffic_clusters [m]``.

    Raises ``ValueError`` for an empty pool or traffic.
    """
    if not len(pool_clusters) or not len(traffic_clusters):
        raise ValueError(f"pool ({len(pool_clusters)} records) and traffic ({len(traffic_clusters)}) need records")
    pool = np.bincount(pool_clusters, weights, minlength=k).astype(float)
    traffic = np.bincount(traffic_clusters, minlength=k).astype(float)
    holds = np.bincount(pool_clusters, minlength=k) > 0
    return Shares(pool / pool.sum(), traffic / traffic.sum(), np.flatnonzero(~holds & (traffic > 0)))
