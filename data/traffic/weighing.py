"""Weights of compact rows: shares of clusters, the density ratio, categories, token counts, and bounds, one by one.

A cluster that the pool hardly holds cannot be raised to its share of the traffic: a few records would be drawn over and
over. It is joined with the nearest cluster that the pool does hold, so that what is most like it is raised instead. How
far that is from a match, the measures say.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bitdraft.data.sampling import uniforms
from bitdraft.data.traffic.categories import category_corrected
from bitdraft.data.traffic.clusters import Clusters, fit_clusters
from bitdraft.data.traffic.features import Rows
from bitdraft.data.traffic.pool import PoolRows
from bitdraft.data.traffic.ratio import density_ratio
from bitdraft.data.traffic.weights import (
    FLOOR,
    UNIFORM,
    Finished,
    choose_beta,
    finished,
    post_stratified,
    token_corrected,
)

# n record of the pool, k record that is kept, K cluster.

_FITTED = 50_000  # records of the pool that clusters and the density ratio are fitted to
_THIN = 0.02  # of its share of the traffic: a cluster that the pool holds less of is joined with another


@dataclass(frozen=True, kw_only=True)
class MatchSettings:
    """How weights are made."""

    clusters: int | None = None
    """Groups; None for the square root of the traffic's records, from 16 to 256."""
    floor: float = FLOOR
    """Least effective share of the pool."""
    uniform: float = UNIFORM
    """Share of the draws that ignore the weights."""
    shares: tuple[float, float, float] = (0.5, 0.2, 0.3)
    """Of the traffic's parts fit, tune and test."""
    read: Literal["auto", "prompts", "answers"] = "auto"
    """Whether answers count; auto: where every record of pool and traffic has one."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.clusters is not None and self.clusters < 2:
            raise ValueError(f"the number of clusters must be at least 2, got {self.clusters}")
        for name, value in (("floor", self.floor), ("uniform", self.uniform)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is a share from 0 to 1, got {value}")
        if len(self.shares) != 3 or not all(0 < share < 1 for share in self.shares):
            raise ValueError(f"shares of fit, tune and test must be three numbers between 0 and 1, got {self.shares}")


@dataclass(frozen=True, eq=False)
class Weighed:
    """``finished.weights``: ``[k]``, of the records that are kept."""

    finished: Finished
    beta: float
    by_tokens: bool
    """Whether weights count answer tokens instead of records."""


@dataclass(frozen=True, eq=False)
class Estimate:
    """Weights before they are bounded, and what they were made by."""

    weights: np.ndarray  # [k] density ratios
    beta: float
    clusters: Clusters
    of_pool: np.ndarray  # [k] cluster of each record
    of_fit: np.ndarray  # likewise, of the traffic's fit split


def estimate(
    pool: np.ndarray,
    fit: np.ndarray,
    tune: np.ndarray,
    clusters: Clusters,
    fitted: np.ndarray,
    seed: int,
    categories: Sequence[str],
) -> Estimate:
    """For vectors ``pool [k, F]``, ``fit`` and ``tune`` of the traffic. ``fitted``: indices of the pool's records that
    models are fitted to, ascending. ``categories``: what the pool's records say that they are, ``k`` of them."""
    held = _held(clusters.assign(pool), clusters.assign(fit), clusters.count)
    nearest = Clusters(clusters.centres[held])
    of_pool, of_fit, of_tune = (nearest.assign(v) for v in (pool, fit, tune))
    found = density_ratio(pool[fitted], fit, seed=seed)
    ratio = np.empty(len(pool))
    ratio[fitted] = found.pool
    rest = np.setdiff1d(np.arange(len(pool)), fitted)
    if len(rest):
        ratio[rest] = found.predict(pool[rest])
    shares = post_stratified(of_pool, of_fit, nearest.count)
    refinement, _ = choose_beta(shares, of_pool, ratio, of_tune, found.predict(tune))
    weights = refinement.weights(of_pool, ratio)
    # Nothing is chosen after this, so what choices were made on counts too.
    weights = category_corrected(weights, pool, categories, np.concatenate([fit, tune]), fitted, seed=seed)
    return Estimate(weights, refinement.beta, nearest, of_pool, of_fit)


def fit_groups(rows: PoolRows, fit: Rows, k: int, seed: int) -> Clusters:
    kept = np.flatnonzero(rows.kept)
    return fit_clusters(np.concatenate([rows.vectors[kept[_fitted(rows, kept, seed)]], fit.vectors]), k, seed)


def weigh(
    rows: PoolRows, fit: Rows, tune: Rows, clusters: Clusters, *, answers: bool, settings: MatchSettings
) -> Weighed:
    """``clusters``: of ``fit_groups``. ``answers``: whether they were read."""
    kept = np.flatnonzero(rows.kept)
    fitted = _fitted(rows, kept, settings.seed)
    categories = [rows.categories[i] for i in kept]
    found = estimate(rows.vectors[kept], fit.vectors, tune.vectors, clusters, fitted, settings.seed, categories)
    raw = found.weights
    # Token ids and estimates from characters are not compared with each other.
    counted = np.concatenate([rows.counted[kept], fit.facts.counted])
    by_tokens = answers and bool(counted.all() or not counted.any())
    if by_tokens:
        tokens = rows.answer_tokens[kept]
        raw = token_corrected(raw, found.of_pool, tokens, found.of_fit, fit.answer_tokens, found.clusters.count)
    return Weighed(finished(raw, uniform=settings.uniform, floor=settings.floor), found.beta, by_tokens)


def _fitted(rows: PoolRows, kept: np.ndarray, seed: int) -> np.ndarray:
    """At most ``_FITTED`` indices into ``kept``, ascending, by content."""
    ranks = uniforms([rows.keys[i] for i in kept], "fitted", seed)
    return np.sort(np.argsort(ranks, kind="stable")[:_FITTED])


def _held(of_pool: np.ndarray, of_fit: np.ndarray, k: int) -> np.ndarray:
    """``[K]`` bool: clusters of which the pool holds enough."""
    pool, traffic = (np.bincount(c, minlength=k) for c in (of_pool, of_fit))
    return np.asarray((pool > 0) & (pool / len(of_pool) >= _THIN * traffic / len(of_fit)))
