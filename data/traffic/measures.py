"""How far a weighted pool is from the traffic: divergences of counts, a classifier's AUC, and mean discrepancy.

Every measure takes the pool's weights; ones show the pool as it is. All are seeded, and none depends on the order
of the records. Measure on traffic that the weights were not fitted to.
"""

from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.spatial.distance import pdist, squareform
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bitdraft.data.traffic.ratio import in_canonical_order

# n record of the pool, m of the traffic, F feature, B bucket or cluster.


def bucket_mass(counts: sparse.csr_matrix, weights: np.ndarray | None = None) -> np.ndarray:
    """``[B]`` float64: counts ``[n, B]`` summed over records with ``weights [n]``; masses of chunks add."""
    ones = np.ones(counts.shape[0]) if weights is None else weights
    return np.asarray(counts.T @ ones, float)


def kl_divergence(traffic_mass: np.ndarray, pool_mass: np.ndarray, *, smoothing: float = 0.5) -> float:
    """``KL(traffic ‖ pool)`` in nats of two masses ``[B]``, with ``smoothing`` added to each bucket.

    Two samples of one distribution are about ``B (1/N + 1/M) / 2`` apart, for N and M counts in well filled buckets:
    compare before with after, not with 0. Raises ``ValueError`` for a side without any mass.
    """
    p, q = (_shares(mass, smoothing) for mass in (traffic_mass, pool_mass))
    return float(p @ np.log(p / q))


def total_variation(traffic_mass: np.ndarray, pool_mass: np.ndarray) -> float:
    """Half the sum of differences of shares, between 0 and 1: what would have to move."""
    return float(np.abs(_shares(traffic_mass, 0.0) - _shares(pool_mass, 0.0)).sum() / 2)


def _shares(mass: np.ndarray, smoothing: float) -> np.ndarray:
    if not np.isfinite(mass).all() or mass.min() < 0 or mass.sum() <= 0:
        raise ValueError("a distribution needs counts that are finite, not negative and not all zero")
    return np.asarray((mass + smoothing) / (mass + smoothing).sum())


def two_sample_auc(
    pool: np.ndarray,
    weights: np.ndarray | None,
    traffic: np.ndarray,
    *,
    folds: int = 5,
    ridge: float = 1.0,
    limit: int = 20_000,
    seed: int = 0,
) -> float:
    """How well a classifier tells traffic ``[m, F]`` from the weighted pool ``[n, F]``: 0.5 is matched, 1 is apart.

    Mean over folds of the AUC on records held out; both sides weigh the same in the fit. More than ``limit`` records
    of a side are sampled. 0.5 where there is nothing to learn from: fewer than two records of a side, constant
    features.
    """
    pool, weights = _at_most(limit, pool, weights, seed)
    traffic, _ = _at_most(limit, traffic, None, seed)
    folds = min(folds, len(pool), len(traffic))
    both = np.concatenate([pool, traffic])
    if folds < 2 or (both.max(0) == both.min(0)).all():
        return 0.5
    is_traffic = np.arange(len(both)) >= len(pool)
    scale = len(traffic) / weights.sum()  # both sides weigh m
    each = np.concatenate([weights * min(scale, 1.0), np.full(len(traffic), min(1.0, 1 / scale))])
    areas = []
    for seen, held in StratifiedKFold(folds, shuffle=True, random_state=seed).split(both, is_traffic):
        model = make_pipeline(StandardScaler(), LogisticRegression(C=1.0 / ridge, max_iter=300))
        model.fit(both[seen], is_traffic[seen], logisticregression__sample_weight=each[seen])
        scores = model.decision_function(both[held])
        areas.append(roc_auc_score(is_traffic[held], scores, sample_weight=each[held]))
    return float(np.mean(areas))


def _at_most(limit: int, vectors: np.ndarray, weights: np.ndarray | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """At most ``limit`` of the records in canonical order, with their weights."""
    if not len(vectors):
        raise ValueError("a side without records cannot be compared")
    weights = np.ones(len(vectors)) if weights is None else weights
    if weights.shape != (len(vectors),) or not np.isfinite(weights).all() or weights.min() < 0 or not weights.any():
        raise ValueError("weights must be finite and not negative, one for each record of the pool, some above zero")
    order = in_canonical_order(vectors, weights)
    if len(order) > limit:
        order = order[np.sort(np.random.default_rng(seed).permutation(len(order))[:limit])]
    return vectors[order], weights[order]


@dataclass(frozen=True)
class Discrepancy:
    """Maximum mean discrepancy, squared, of ``size`` records a side; ``p``: the share of permutations not below."""

    value: float
    p: float
    size: int


def mmd(
    pool: np.ndarray,
    weights: np.ndarray | None,
    traffic: np.ndarray,
    *,
    size: int = 1000,
    permutations: int = 500,
    seed: int = 0,
) -> Discrepancy:
    """Between the weighted pool ``[n, F]`` and traffic ``[m, F]``: Gaussian kernel as wide as the median distance.

    As many records as the traffic has, at most ``size``, are drawn from the pool with chances as the weights
    (systematically, none twice), so that under a perfect match the two samples can be exchanged, which the permutations
    do. The largest weight bounds how many can be drawn so: ``n / max w``.
    """
    pool, weights = _at_most(len(pool), pool, weights, seed)
    traffic, _ = _at_most(size, traffic, None, seed)
    generator = np.random.default_rng(seed)
    chances = weights / weights.max()
    drawn = pool[_systematic(chances * min(1.0, len(traffic) / chances.sum()), generator)]
    traffic = traffic[generator.permutation(len(traffic))[: len(drawn)]]
    drawn = drawn[: len(traffic)]
    m = len(traffic)
    distances = squareform(pdist(np.concatenate([drawn, traffic]).astype(float), "sqeuclidean"))
    width = float(np.median(distances[np.triu_indices(2 * m, 1)]))
    if width <= 0:  # at least half of the pairs are equal
        width = float(distances.max()) or 1.0
    kernel = np.exp(-distances / width)
    signs = np.ones((permutations + 1, 2 * m))
    signs[:, m:] = -1
    signs[1:] = generator.permuted(signs[1:], axis=1)
    values = np.einsum("pi,pi->p", signs @ kernel, signs) / m**2
    # What a permutation gives up to rounding is as large.
    return Discrepancy(float(values[0]), float((values >= values[0] - 1e-12).mean()), m)


def _systematic(chances: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Indices drawn with ``chances [n]``, each at most 1, none twice: evenly spaced along the cumulated chances."""
    order = generator.permutation(len(chances))
    ends = generator.random() + np.cumsum(chances[order])
    return order[np.floor(ends) > np.floor(ends - chances[order])]
