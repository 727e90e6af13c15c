"""Groups of like records: k-means over the vectors of pool and traffic together.

The fit is the same for the same vectors in any order, and for the same seed.
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
