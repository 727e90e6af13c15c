"""Weights for a pool's records such that the weighted pool looks like a sample of traffic.

The traffic is split by prompt into fit, tune and test. Fit gives the shares of clusters and the density ratio, tune
says how far the ratio is trusted, test measures what came out and is kept away from the pool: a pool record that holds
one of its prompts gets weight 0. The pool is read twice, in chunks (``pool.py``).
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from bitdraft.data.conversation import Conversation
from bitdraft.data.traffic import measures as by
from bitdraft.data.traffic.clusters import Clusters, cluster_count
from bitdraft.data.traffic.features import FeatureSpace, Rows
from bitdraft.data.traffic.groups import Group, describe_groups
from bitdraft.data.traffic.pool import PoolRows, Report, States, Survey, empty_answers, pool_rows, rows_of, survey
from bitdraft.data.traffic.split import Guard, Split, split_traffic
from bitdraft.data.traffic.texts import LANGUAGES, is_answered
from bitdraft.data.traffic.weighing import MatchSettings, fit_groups, weigh
from bitdraft.data.traffic.weights import Finished

# n record of the pool, K cluster.

FEWEST = 20
"""Records that pool and traffic need each: below that nothing can be said about shares."""
_TEXTS = 10_000  # of the pool, kept for features, names and prompts to show
_TEXTS_WITH_STATES = 2_000  # a target reads each of them once more
_MEASURED = 50_000  # records of the pool, about, by which distances are measured

Progress = Callable[[str, int | None], AbstractContextManager[Report]]
"""A bar for a label and a total, if that is known."""


@dataclass(frozen=True)
class Measure:
    """One distance to the traffic's test split. ``own``: that of its fit split, another sample of the same traffic."""

    before: float
    after: float
    own: float


@dataclass(frozen=True, eq=False)
class Matching:
    """Rows are the pool's records by content; those that were dropped have weight 0, the others mean 1."""

    keys: list[str]
    ids: list[str]
    places: list[str]
    numbers: np.ndarray  # [n] place in the order of reading
    weights: np.ndarray  # [n] float64
    clusters: np.ndarray  # [n] int32
    finished: Finished
    beta: float
    cluster_count: int
    measures: dict[str, Measure]
    """``auc``, ``kl``, ``tv`` (by cluster), ``ngram_kl``, ``ngram_tv``, ``mmd``, ``mmd_p``."""
    mmd_size: int
    languages: dict[str, tuple[float, float, float]]
    """Shares of the traffic, of the pool and of the weighted pool."""
    groups: tuple[Group, ...]
    unmatched: float
    """Share of the traffic that the weighted pool lacks, by cluster."""
    split: Split
    survey: Survey
    answers: bool
    """Whether answers were read."""
    traffic_unanswered: int
    traffic_empty_answers: int
    traffic_cut_answers: int
    by_tokens: bool
    """Whether weights count answer tokens instead of records."""


def match(
    read_pool: Callable[[], Iterable[Conversation]],
    traffic: Sequence[Conversation],
    settings: MatchSettings,
    *,
    progress: Progress,
    states: States | None = None,
) -> Matching:
    """``read_pool`` gives the same records each time. Raises ``ValueError`` for too few records on either side."""
    if len(traffic) < FEWEST:
        raise ValueError(f"the traffic has {len(traffic)} records: {FEWEST} are the least, some hundreds are good")
    split = split_traffic(traffic, settings.shares, settings.seed)
    texts = _TEXTS_WITH_STATES if states else _TEXTS
    with progress("read the pool", None) as report:
        guard = Guard(split.test, context=traffic)
        seen = survey(read_pool(), guard, sample=texts, seed=settings.seed, report=report)
    left = seen.records - len(seen.dropped)
    if left < FEWEST:
        raise ValueError(
            f"the pool has {left} records"
            f"{f' that are not nearly in the traffic (of {seen.records})' if seen.dropped else ''}: "
            f"{FEWEST} are the least, and weighting needs many more than the traffic has groups"
        )
    answers = _reads_answers(settings.read, seen, traffic)
    sample = [*seen.sample, *split.fit]
    space = FeatureSpace.fit(
        sample, answers=answers, states=states(sample, answers) if states else None, seed=settings.seed
    )
    with progress("features", seen.records) as report:
        rows = pool_rows(read_pool(), space, seen, states=states, measured=_MEASURED, seed=settings.seed, report=report)
    parts = [rows_of(space, part, states) for part in (split.fit, split.tune, split.test)]
    return _matched(rows, parts, split, seen, settings, traffic, answers)


def _reads_answers(read: str, seen: Survey, traffic: Sequence[Conversation]) -> bool:
    bare = seen.first_unanswered or next((c.source for c in traffic if not is_answered(c)), "")
    if read == "answers" and bare:
        raise ValueError(
            f"{bare}: the record has no answer, but --read answers compares answers: let the target write them "
            "(scripts/regenerate.py), or match prompts alone with --read prompts"
        )
    return read != "prompts" and not bare


def _matched(
    rows: PoolRows,
    parts: Sequence[Rows],
    split: Split,
    seen: Survey,
    settings: MatchSettings,
    traffic: Sequence[Conversation],
    answers: bool,
) -> Matching:
    clusters = fit_groups(rows, parts[0], settings.clusters or cluster_count(len(split.fit)), settings.seed)
    pool_clusters = clusters.assign(rows.vectors)
    fit_clusters, _, test_clusters = (clusters.assign(part.vectors) for part in parts)
    weighed = weigh(rows, parts[0], parts[1], clusters, answers=answers, settings=settings)
    kept, done = rows.kept, weighed.finished
    weights = np.zeros(len(rows.keys))
    weights[kept] = done.weights

    measured, mmd_size = _measures(
        rows, weights, parts, pool_clusters, (fit_clusters, test_clusters), clusters, settings
    )
    every = np.concatenate([part.vectors for part in parts])
    return Matching(
        keys=rows.keys,
        ids=rows.ids,
        places=rows.places,
        numbers=rows.numbers,
        weights=weights,
        clusters=pool_clusters,
        finished=done,
        beta=weighed.beta,
        cluster_count=clusters.count,
        measures=measured,
        mmd_size=mmd_size,
        languages=_languages(rows, weights, parts),
        groups=_groups(rows, weights, pool_clusters, clusters, every, split, seen),
        unmatched=by.total_variation(
            np.bincount(clusters.assign(every), minlength=clusters.count),
            np.bincount(pool_clusters, weights, clusters.count),
        ),
        split=split,
        survey=seen,
        answers=answers,
        traffic_unanswered=sum(not is_answered(c) for c in traffic),
        traffic_empty_answers=sum(map(empty_answers, traffic)),
        traffic_cut_answers=sum(c.finished.count(False) for c in traffic),
        by_tokens=weighed.by_tokens,
    )


def _measures(
    rows: PoolRows,
    weights: np.ndarray,
    parts: Sequence[Rows],
    pool_clusters: np.ndarray,
    traffic_clusters: tuple[np.ndarray, np.ndarray],
    clusters: Clusters,
    settings: MatchSettings,
) -> tuple[dict[str, Measure], int]:
    """Distances to the test split, which nothing was fitted to, and how many records a side the MMD compares."""
    fit, _, test = parts
    kept, seed = rows.kept, settings.seed
    sampled = rows.measured[kept[rows.measured]]  # of a large pool a part, by content
    vectors = rows.vectors[sampled]
    ones = kept.astype(float)
    in_fit, in_test = (np.bincount(c, minlength=clusters.count).astype(float) for c in traffic_clusters)
    pool = [np.bincount(pool_clusters, w, minlength=clusters.count) for w in (ones, weights)]
    of_test, of_fit = by.bucket_mass(test.counts), by.bucket_mass(fit.counts)
    grams = [by.bucket_mass(rows.counts, w[rows.measured]) for w in (ones, weights)]
    aucs = [by.two_sample_auc(vectors, w[sampled], test.vectors, seed=seed) for w in (ones, weights)]
    mmds = [by.mmd(vectors, w[sampled], test.vectors, seed=seed) for w in (ones, weights)]
    own = by.mmd(fit.vectors, None, test.vectors, seed=seed)
    found = {
        "auc": Measure(aucs[0], aucs[1], by.two_sample_auc(fit.vectors, None, test.vectors, seed=seed)),
        "kl": Measure(*(by.kl_divergence(in_test, mass) for mass in (pool[0], pool[1], in_fit))),
        "tv": Measure(*(by.total_variation(in_test, mass) for mass in (pool[0], pool[1], in_fit))),
        "ngram_kl": Measure(*(by.kl_divergence(of_test, mass) for mass in (grams[0], grams[1], of_fit))),
        "ngram_tv": Measure(*(by.total_variation(of_test, mass) for mass in (grams[0], grams[1], of_fit))),
        "mmd": Measure(mmds[0].value, mmds[1].value, own.value),
        "mmd_p": Measure(mmds[0].p, mmds[1].p, own.p),
    }
    return found, mmds[1].size


def _languages(rows: PoolRows, weights: np.ndarray, parts: Sequence[Rows]) -> dict[str, tuple[float, float, float]]:
    """Those of the traffic or of the pool, the commonest of the traffic first."""
    traffic = np.concatenate([part.facts.language for part in parts])
    columns = [
        np.bincount(traffic, minlength=len(LANGUAGES)) / len(traffic),
        *(np.bincount(rows.languages, w, len(LANGUAGES)) / w.sum() for w in (rows.kept.astype(float), weights)),
    ]
    table = np.stack(columns, axis=1)
    order = sorted(np.flatnonzero(table.sum(1)).tolist(), key=lambda i: tuple(-table[i]))
    return {LANGUAGES[i]: (float(table[i, 0]), float(table[i, 1]), float(table[i, 2])) for i in order}


def _groups(
    rows: PoolRows,
    weights: np.ndarray,
    pool_clusters: np.ndarray,
    clusters: Clusters,
    traffic_vectors: np.ndarray,
    split: Split,
    seen: Survey,
) -> tuple[Group, ...]:
    """Of the traffic as a whole. Samples of the pool are found among its rows by what they ask."""
    places = np.searchsorted(np.array(rows.keys), [c.key for c in seen.sample])
    vectors = np.concatenate([rows.vectors[places], traffic_vectors])
    near = clusters.assign(vectors)
    return describe_groups(
        pool_clusters[rows.kept],
        weights[rows.kept],
        near[len(places) :],
        clusters.count,
        sample=[*seen.sample, *split.fit, *split.tune, *split.test],
        sample_clusters=near,
        sample_distances=np.linalg.norm(vectors - clusters.centres[near], axis=1),
        sample_is_pool=np.arange(len(near)) < len(places),
    )
