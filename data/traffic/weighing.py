"""Weights of compact rows: clusters and their shares, the density ratio, token counts, and bounds, one after the other.

A cluster that the pool hardly holds cannot be raised to its share of the traffic: a few records would be drawn over and
over. It is joined with the nearest cluster that the pool does hold, so that what is most like it is raised instead. How
far that is from a match, the measures say.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from bitdraft.data.sampling import uniforms
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


def fit_groups(rows: PoolRows, fit: Rows, k: int, seed: int) -> Clusters:
    return fit_clusters(np.concatenate([rows.vectors[_fitted(rows, seed)], fit.vectors]), k, seed)


def _fitted(rows: PoolRows, seed: int) -> np.ndarray:
    """At most ``_FITTED`` of the rows that are kept, ascending."""
    kept = np.flatnonzero(rows.kept)
    ranks = uniforms([rows.keys[i] for i in kept], "fitted", seed)
    return np.sort(kept[np.argsort(ranks, kind="stable")[:_FITTED]])


def weigh(
    rows: PoolRows,
    fit: Rows,
    tune: Rows,
    clusters: Clusters,
    pool_clusters: np.ndarray,
    *,
    answers: bool,
    settings: MatchSettings,
) -> Weighed:
    """``pool_clusters``: ``[n]``, of all rows. ``answers``: whether they were read."""
    kept = np.flatnonzero(rows.kept)
    counts = [np.bincount(c, minlength=clusters.count) for c in (pool_clusters[kept], clusters.assign(fit.vectors))]
    held = (counts[0] > 0) & (counts[0] / len(kept) >= _THIN * counts[1] / len(fit.vectors))
    nearest = Clusters(clusters.centres[held])
    pool, of_fit, of_tune = (nearest.assign(v) for v in (rows.vectors[kept], fit.vectors, tune.vectors))

    fitted = _fitted(rows, settings.seed)
    estimate = density_ratio(rows.vectors[fitted], fit.vectors, seed=settings.seed)
    ratio = np.empty(len(rows.keys))
    ratio[fitted] = estimate.pool
    rest = np.setdiff1d(kept, fitted)
    if len(rest):
        ratio[rest] = estimate.predict(rows.vectors[rest])

    shares = post_stratified(pool, of_fit, nearest.count)
    refinement, _ = choose_beta(shares, pool, ratio[kept], of_tune, estimate.predict(tune.vectors))
    raw = refinement.weights(pool, ratio[kept])
    # Token ids and estimates from characters are not compared with each other.
    counted = np.concatenate([rows.counted[kept], fit.facts.counted])
    by_tokens = answers and bool(counted.all() or not counted.any())
    if by_tokens:
        raw = token_corrected(raw, pool, rows.answer_tokens[kept], of_fit, fit.answer_tokens, nearest.count)
    return Weighed(finished(raw, uniform=settings.uniform, floor=settings.floor), refinement.beta, by_tokens)
