"""The density ratio of traffic to pool, estimated by a classifier.

A logistic regression with a ridge penalty tells traffic from pool; its odds are the ratio of densities (times the ratio
of sizes). It works on features of a Gaussian kernel (Nyström's method), because traffic is a set of kinds of records,
which no single plane cuts off. Each class weighs as much as the smaller has records. Each record is judged by a model
that has not seen it (cross-fitting), because a model that has seen few records of traffic knows them by heart; what the
scores are worth is then calibrated by isotonic regression on records not used in the fit. All is done for several ways
to cut the folds and averaged in the logarithm: less noise, so that more of it can be trusted.
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import expit, logit
from sklearn.isotonic import IsotonicRegression
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import Pipeline, make_pipeline

# n record of the pool, m of the traffic, F feature.

SMOOTHING = 20.0
"""Records that each level of the calibration is given, in the shares that the model itself says: levels of few records
are no surer than it is, and no ratio is 0 or infinite."""
KERNEL_FEATURES = 300
CHOICES = ((0.1, 0.1), (0.3, 0.3), (1.0, 1.0))
"""Widths of the kernel (gamma is this over the mean squared distance of two records) and ridges, smoothest first: the
first is nearly a plane and right for one shift, the last tells many kinds of records apart. Chosen by likelihood."""
_CHOSEN_ON = 10_000  # records of the pool
_AT_ONCE = 8192


@dataclass(frozen=True, eq=False)
class DensityRatio:
    """``pool [n]``: cross-fitted ratios of the pool records of the fit, with mean about 1; positive and finite."""

    pool: np.ndarray
    models: tuple[Pipeline, ...]
    calibrations: tuple["Calibration", ...]

    def predict(self, vectors: np.ndarray) -> np.ndarray:
        """``[n]`` float64: ratios of records not in the fit, ``vectors [n, F]``: the models' geometric mean."""
        if not self.models:
            return np.ones(len(vectors))
        logs = np.zeros(len(vectors))
        for begin in range(0, len(vectors), _AT_ONCE):
            part = slice(begin, begin + _AT_ONCE)
            exact = vectors[part].astype(np.float64)  # the kernel's features magnify rounding a thousandfold
            for model, calibration in zip(self.models, self.calibrations, strict=True):
                logs[part] += np.log(calibration(model.decision_function(exact)))
        return np.exp(logs / len(self.models))


@dataclass(frozen=True, eq=False)
class Calibration:
    """Ratios by score: increasing, linear between ``scores``, constant outside."""

    scores: np.ndarray
    log_ratios: np.ndarray

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        return np.exp(np.interp(scores, self.scores, self.log_ratios))


def density_ratio(
    pool: np.ndarray, traffic: np.ndarray, *, folds: int = 5, repeats: int = 3, seed: int = 0
) -> DensityRatio:
    """The ratio for ``pool [n, F]``, a sample of the pool, against ``traffic [m, F]``.

    Raises ``ValueError`` for an empty side or vectors that are not finite. With fewer than two records on a side or
    constant features there is nothing to learn and the ratio is 1 everywhere; fewer records than folds make fewer
    folds.
    """
    _check(pool, "the pool")
    _check(traffic, "the traffic")
    folds = min(folds, len(pool), len(traffic))
    both = np.concatenate([pool, traffic]).astype(np.float64)
    if folds < 2 or (both.max(0) == both.min(0)).all():
        return DensityRatio(np.ones(len(pool)), (), ())
    is_traffic = np.arange(len(both)) >= len(pool)
    order = in_canonical_order(both, is_traffic)
    both, is_traffic = both[order], is_traffic[order]
    choice = _best_choice(both, is_traffic, folds, seed)
    logs = np.zeros(len(both))
    models: list[Pipeline] = []
    calibrations: list[Calibration] = []
    for repeat in range(repeats):
        fitted, scores, fold_of = _cross_fitted(both, is_traffic, choice, folds, seed + repeat)
        for fold in range(folds):
            held = fold_of == fold
            calibrations.append(calibrated(scores[~held], is_traffic[~held]))
            logs[held] += np.log(calibrations[-1](scores[held])) / repeats
        models += fitted
    in_given_order = np.empty(len(both))
    in_given_order[order] = np.exp(logs)
    return DensityRatio(in_given_order[: len(pool)], tuple(models), tuple(calibrations))


def calibrated(scores: np.ndarray, is_traffic: np.ndarray) -> Calibration:
    """What held-out ``scores [n + m]``, log ratios as a model sees them, are worth: isotonic levels, smoothed."""
    offset = float(np.log(is_traffic.sum() / (~is_traffic).sum()))
    level = IsotonicRegression(out_of_bounds="clip").fit(scores, is_traffic.astype(float)).predict(scores)
    _, place, size = np.unique(level, return_inverse=True, return_counts=True)
    said = np.bincount(place, expit(np.clip(scores, -10, 10) + offset)) / size
    shares = (np.bincount(place, is_traffic) + SMOOTHING * said) / (size + SMOOTHING)
    shares = IsotonicRegression().fit_transform(np.arange(len(size)), shares, sample_weight=size)  # it may fall now
    return Calibration(np.bincount(place, scores) / size, logit(shares) - offset)


def in_canonical_order(vectors: np.ndarray, *tied: np.ndarray) -> np.ndarray:
    """Indices ``[n]`` that sort ``vectors [n, F]`` by value, then ``tied``: folds do not depend on record order."""
    return np.lexsort((*tied, *vectors.T[::-1]))


def _best_choice(both: np.ndarray, is_traffic: np.ndarray, folds: int, seed: int) -> tuple[float, float]:
    """The one of ``CHOICES`` under which records held out are likeliest; both classes weigh the same."""
    few = np.random.default_rng(seed).permutation(np.flatnonzero(~is_traffic))[:_CHOSEN_ON]
    some = np.sort(np.concatenate([few, np.flatnonzero(is_traffic)]))
    both, is_traffic = both[some], is_traffic[some]

    def surprise(choice: tuple[float, float]) -> float:
        scores = _cross_fitted(both, is_traffic, choice, folds, seed)[1]
        return float(np.logaddexp(0, -scores[is_traffic]).mean() + np.logaddexp(0, scores[~is_traffic]).mean())

    return min(CHOICES, key=surprise)


def _cross_fitted(
    both: np.ndarray, is_traffic: np.ndarray, choice: tuple[float, float], folds: int, seed: int
) -> tuple[list[Pipeline], np.ndarray, np.ndarray]:
    """A model for each fold, every record's score ``[n + m]`` by the model that has not seen it, and its fold."""
    models, scores, fold_of = [], np.empty(len(both)), np.empty(len(both), int)
    split = StratifiedKFold(folds, shuffle=True, random_state=seed).split(both, is_traffic)
    for fold, (seen, held) in enumerate(split):
        models.append(_fitted(both[seen], is_traffic[seen], choice, seed))
        scores[held], fold_of[held] = models[-1].decision_function(both[held]), fold
    return models, scores, fold_of


def _fitted(vectors: np.ndarray, is_traffic: np.ndarray, choice: tuple[float, float], seed: int) -> Pipeline:
    width, ridge = choice
    variance = max(float(vectors.var(axis=0).sum()), 1e-12)
    kernel = Nystroem(gamma=width / (2 * variance), n_components=min(KERNEL_FEATURES, len(vectors)), random_state=seed)
    fewer = min(int(is_traffic.sum()), int((~is_traffic).sum()))
    each = np.where(is_traffic, fewer / is_traffic.sum(), fewer / (~is_traffic).sum())
    model = make_pipeline(kernel, LogisticRegression(C=1.0 / ridge, max_iter=300))
    return model.fit(vectors, is_traffic, logisticregression__sample_weight=each)


def _check(vectors: np.ndarray, whose: str) -> None:
    if not len(vectors):
        raise ValueError(f"{whose} holds no record: there is nothing to compare")
    if not np.isfinite(vectors).all():
        raise ValueError(f"vectors of {whose} hold NaN or infinity")
