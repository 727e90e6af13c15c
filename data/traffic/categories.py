"""What the pool says its records are: weights of its categories, corrected for what the estimate cannot tell apart.

A classifier's odds are drawn towards 1 wherever it is not sure, so that a category that the traffic holds twice as
often as the pool is raised to less than 2, and what resembles it is raised with it. Sets often name a category for
each record, though traffic names none. A second classifier, of the pool's categories, says of every record how likely
it is of each; how often it is wrong is known on the pool. So each category gets the factor with which the weighted
pool, read by this classifier, looks as the traffic does, read by the same (the method of moments for label shift,
Lipton et al. 2018, arXiv:1802.03916). Within a category weights stay in proportion.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold

# n record of the pool, m of the traffic, F feature, C category.

FEWEST, MOST = 20, 64
"""Records that make a category, and categories; the smaller ones are taken together."""
EXPECTED = 0.2
"""Standard deviation of the factors' logarithms before anything is seen: where little is read, factors are 1."""
_FITTED = 20_000
_FOLDS = 5
_SMOOTHING = 1e-3  # of the mean variance of a reading: for categories that are told without fail


def category_corrected(
    weights: np.ndarray,
    pool: np.ndarray,
    categories: Sequence[str],
    traffic: np.ndarray,
    fitted: np.ndarray,
    *,
    seed: int,
) -> np.ndarray:
    """``[n]`` float64, mean 1: ``weights [n]`` of ``pool [n, F]``, times a factor for each of the pool's ``categories``
    (``n`` of them, empty for none), for ``traffic [m, F]``.

    ``fitted``: indices of the records that may be learned from; they are read by models that have not seen them. With
    fewer than two categories nothing changes.
    """
    some = fitted[:: -(-len(fitted) // _FITTED)]
    known = _large(Counter(categories[i] for i in some))
    labels = np.array([name if name in known else "" for name in categories])
    names, label_of = np.unique(labels[some], return_inverse=True)
    if len(names) < 2:
        return weights / weights.mean()
    of_pool, of_traffic = _readings(pool[some], label_of, traffic, seed)
    logs = _factors(weights[some], label_of, of_pool, of_traffic)
    factor = dict(zip(names.tolist(), np.exp(logs).tolist(), strict=True))
    corrected = weights * np.array([factor.get(label, 1.0) for label in labels.tolist()])
    return np.asarray(corrected / corrected.mean())


def _large(counts: Counter[str]) -> set[str]:
    """Categories that stand alone. All others, and records without one, are one more; where these are few, the smallest
    of those joins them."""
    by_size = sorted((name for name in counts if name and counts[name] >= FEWEST), key=lambda n: (-counts[n], n))[:MOST]
    rest = counts.total() - sum(counts[name] for name in by_size)
    return set(by_size[:-1] if 0 < rest < FEWEST else by_size)


def _readings(pool: np.ndarray, label_of: np.ndarray, traffic: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of the categories: ``[n, C]`` of the pool, cross-fitted, and ``[m, C]`` of the traffic."""
    of_pool = np.empty((len(pool), label_of.max() + 1))
    for seen, held in StratifiedKFold(_FOLDS, shuffle=True, random_state=seed).split(pool, label_of):
        of_pool[held] = _model(pool[seen], label_of[seen]).predict_proba(pool[held])
    return of_pool, _model(pool, label_of).predict_proba(traffic)


def _model(vectors: np.ndarray, label_of: np.ndarray) -> LogisticRegression:
    return LogisticRegression(max_iter=300).fit(vectors, label_of)


def _factors(weights: np.ndarray, label_of: np.ndarray, of_pool: np.ndarray, of_traffic: np.ndarray) -> np.ndarray:
    """``[C]`` logarithms under which the readings' means agree as far as chance allows, and that are small."""
    weights = weights / weights.sum()
    shares = np.bincount(label_of, weights)  # [C]
    known = np.eye(len(shares))[label_of]
    read_as = (known * weights[:, None]).T @ of_pool / shares[:, None]  # [C, C] mean reading of each category
    wanted = of_traffic.mean(0)
    chance = np.cov(of_pool.T, aweights=weights) * (weights @ weights + 1 / len(of_traffic))
    least = _SMOOTHING * np.trace(chance) / len(chance)
    precision = np.linalg.inv(chance + least * np.eye(len(chance)))

    def unlikely(logs: np.ndarray) -> tuple[float, np.ndarray]:
        share = shares * np.exp(logs - logs.max())
        share /= share.sum()
        pull = precision @ (share @ read_as - wanted)
        value = (share @ read_as - wanted) @ pull / 2 + logs @ logs / EXPECTED**2 / 2
        slope = read_as @ pull
        return float(value), share * (slope - share @ slope) + logs / EXPECTED**2

    return np.asarray(minimize(unlikely, np.zeros(len(shares)), jac=True, method="L-BFGS-B").x)
