"""From estimates to weights: post-stratified by cluster, refined by the density ratio, counted in tokens, and bounded.

Two estimates of the density ratio of traffic to pool are combined. Shares of clusters (Dirichlet-smoothed) are unbiased
and explain themselves, but each rests on few records of traffic; a classifier's ratio ``r`` is smoother and sees what
differs inside a cluster, but shrinks. ``trust`` says how far the ratio decides between clusters, ``beta`` how far
inside them; both are chosen by the likelihood of traffic that neither estimate has seen. Then::

    w_c = (share of traffic / share of pool)^(1 − trust) · mean_c(r)^trust
    w = w_c · r^β / mean_c(r^β)                              refined
    w = w · E_traffic[tokens | c] / E_w[tokens | c]          token_corrected
    w = (1 − ε) · min(w, max(q99.5, 5))^τ / mean + ε         finished

τ is the largest of [0, 1] that leaves the effective share ``(Σw)² / (n Σw²)`` at its floor. It falls as τ grows: its
logarithm is ``2 K(τ) − K(2τ)`` with K convex, the cumulants of log w. Mixing and tempering pull every weight
towards 1, so they cost match: where the traffic is far from the pool, τ stays small and ``Matching.unmatched``
says how much of the traffic the weighted pool still lacks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# n record of the pool, m of the traffic, K cluster.

BETAS = (0.0, 0.25, 0.5, 0.75, 1.0)
TRUSTS = (0.0, 0.5, 1.0)
CLIP = 0.995
"""Quantile of the weights beyond which all count as much."""
CLIP_LEAST = 5.0
"""No weight up to this is clipped: a wanted group of less than the quantile's rest would lose its weight as a whole."""
UNIFORM = 0.01
"""Share of the draws that ignore the weights. A weight w rises by ``ε (1/w − 1)`` of itself: 3 % at w = 1/4 with 0.01,
30 % with 0.1, which would be the largest error of a category's share."""
FLOOR = 0.3


def post_stratified(
    pool_clusters: np.ndarray, traffic_clusters: np.ndarray, k: int, *, smoothing: float = 0.5
) -> np.ndarray:
    """``[K]`` float64: ``(v_c + κ) / (m + κK)`` over ``(d_c + κ) / (n + κK)``, of counts by cluster.

    ``smoothing`` (κ): records that each cluster is given on both sides. Raises ``ValueError`` for an empty pool or
    traffic.
    """
    if not len(pool_clusters) or not len(traffic_clusters):
        raise ValueError(f"pool ({len(pool_clusters)} records) and traffic ({len(traffic_clusters)}) need records")
    pool, traffic = (np.bincount(c, minlength=k) + smoothing for c in (pool_clusters, traffic_clusters))
    return np.asarray((traffic / traffic.sum()) / (pool / pool.sum()))


@dataclass(frozen=True, eq=False)
class Refinement:
    """Weights of any record, by its cluster and its ratio; over the pool of the fit they have mean 1."""

    by_cluster: np.ndarray  # [K], w_c / mean_c(r^β) / mean over the pool
    beta: float
    trust: float

    def weights(self, clusters: np.ndarray, ratio: np.ndarray) -> np.ndarray:
        """``[n]`` float64 for records in ``clusters [n]`` with ``ratio [n]``, also those of traffic."""
        return np.asarray(self.by_cluster[clusters] * ratio**self.beta)


def refined(
    cluster_weights: np.ndarray, clusters: np.ndarray, ratio: np.ndarray, beta: float, trust: float = 0.0
) -> Refinement:
    """From ``cluster_weights [K]`` (``post_stratified``) and the pool's ``clusters [n]`` and ``ratio [n]``."""
    _check_weights(cluster_weights, "the weights of clusters")
    _check_weights(ratio, "the density ratio")
    k = len(cluster_weights)
    sizes = np.bincount(clusters, minlength=k)

    def mean_by_cluster(values: np.ndarray) -> np.ndarray:
        sums = np.bincount(clusters, values, minlength=k)
        return np.where(sizes > 0, sums / np.maximum(sizes, 1), values.mean())

    between = cluster_weights ** (1 - trust) * mean_by_cluster(ratio) ** trust
    mean = float(between @ sizes) / len(clusters)
    return Refinement(between / mean / mean_by_cluster(ratio**beta), beta, trust)


def choose_beta(
    cluster_weights: np.ndarray,
    pool_clusters: np.ndarray,
    pool_ratio: np.ndarray,
    tune_clusters: np.ndarray,
    tune_ratio: np.ndarray,
    betas: Sequence[float] = BETAS,
    trusts: Sequence[float] = TRUSTS,
) -> tuple[Refinement, dict[tuple[float, float], float]]:
    """The refinement under which traffic of the tune split is likeliest, and the mean log likelihood ratio by beta and
    trust.

    A weight at a record of traffic is the ratio of the weighted pool's density to the pool's, so its mean logarithm
    over the tune split is that split's log likelihood, up to a constant. ``tune_ratio``: ``DensityRatio.predict``. Of
    equals the smallest wins. Raises ``ValueError`` for an empty tune split.
    """
    if not len(tune_clusters):
        raise ValueError("the tune split of the traffic is empty: beta cannot be chosen")
    found = {
        (beta, trust): refined(cluster_weights, pool_clusters, pool_ratio, beta, trust)
        for beta in sorted(betas)
        for trust in sorted(trusts)
    }
    likelihood = {b: float(np.log(r.weights(tune_clusters, tune_ratio)).mean()) for b, r in found.items()}
    best = max(found, key=lambda choice: likelihood[choice])
    return found[best], likelihood


def token_corrected(
    weights: np.ndarray,
    pool_clusters: np.ndarray,
    pool_tokens: np.ndarray,
    traffic_clusters: np.ndarray,
    traffic_tokens: np.ndarray,
    k: int,
    *,
    smoothing: float = 5.0,
) -> np.ndarray:
    """``[n]``: weights after which a cluster has the traffic's share of answer tokens, not only of sequences.

    Acceptance is an average over tokens. A cluster is multiplied by the mean answer of its traffic over the weighted
    mean answer of its pool, each with ``smoothing`` records of the mean over all clusters added; without any answer
    tokens on one side nothing changes.
    """
    pool_mean = _mean_tokens(pool_clusters, pool_tokens, weights / weights.mean(), k, smoothing)
    traffic_mean = _mean_tokens(traffic_clusters, traffic_tokens, np.ones(len(traffic_clusters)), k, smoothing)
    if pool_mean is None or traffic_mean is None:
        return weights
    return np.asarray(weights * (traffic_mean / pool_mean)[pool_clusters])


def _mean_tokens(
    clusters: np.ndarray, tokens: np.ndarray, weights: np.ndarray, k: int, smoothing: float
) -> np.ndarray | None:
    """``[K]`` weighted mean by cluster, shrunk towards that of all; ``None`` where nothing has tokens."""
    total = float(weights @ tokens)
    if total <= 0:
        return None
    overall = total / float(weights.sum())
    mass = np.bincount(clusters, weights, minlength=k)
    means = (np.bincount(clusters, weights * tokens, minlength=k) + smoothing * overall) / (mass + smoothing)
    return np.asarray(means)


@dataclass(frozen=True, eq=False)
class Finished:
    """``weights [n]`` float64, positive, mean 1, and what was done to them."""

    weights: np.ndarray
    temper: float
    """Exponent τ; 1 where the floor needed none."""
    uniform: float
    clip: float
    """The largest weight before tempering, of weights with mean 1."""
    clipped: int
    ess_fraction: float
    ess_fraction_untempered: float
    """What would be left of the pool with τ = 1."""


def finished(weights: np.ndarray, *, clip: float = CLIP, uniform: float = UNIFORM, floor: float = FLOOR) -> Finished:
    """Clip ``weights [n]`` at their quantile ``clip`` (not below ``CLIP_LEAST``), temper as little as ``floor`` allows,
    mix with a uniform share.

    Raises ``ValueError`` for no weights, weights that are not finite and positive, and settings out of range.
    """
    if not 0 < clip <= 1 or not 0 <= uniform <= 1 or not 0 <= floor <= 1:
        raise ValueError(f"clip, uniform and floor are shares: got {clip}, {uniform} and {floor}")
    _check_weights(weights, "the weights")
    weights = weights / weights.mean()
    bound = max(float(np.quantile(weights, clip, method="higher")), CLIP_LEAST)
    logs = np.log(np.minimum(weights, bound))

    def mixed(temper: float) -> np.ndarray:
        powers = np.exp(temper * (logs - logs.max()))
        return np.asarray((1 - uniform) * powers / powers.mean() + uniform)

    untempered = effective_share(mixed(1.0))
    low, high = (1.0, 1.0) if untempered >= floor else (0.0, 1.0)
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if effective_share(mixed(middle)) >= floor else (low, middle)
    result = mixed(low)
    result /= result.mean()
    assert np.isfinite(result).all()
    return Finished(result, low, uniform, bound, int((weights > bound).sum()), effective_share(result), untempered)


def effective_share(weights: np.ndarray) -> float:
    """``(Σw)² / (n Σw²)``: of how many equal weights the weighted mean has the variance, as a share of ``n``."""
    return float(weights.sum() ** 2 / (len(weights) * (weights @ weights)))


def _check_weights(weights: np.ndarray, what: str) -> None:
    if not len(weights):
        raise ValueError(f"there are no records: {what} are empty")
    bad = ~(np.isfinite(weights) & (weights > 0))
    if bad.any():
        raise ValueError(f"{what} must be positive and finite: {int(bad.sum())} of {len(weights)} are not")
