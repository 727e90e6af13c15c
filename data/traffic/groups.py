"""Clusters as a person sees them: a name, shares before and after, and prompts to look at.

A group is called by the words that are most typical of its prompts and, where most of its records have one, by their
category.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from bitdraft.data.conversation import Conversation
from bitdraft.data.traffic.texts import DENSE, language_of

# n record of the pool, m of the traffic, K cluster.

_WORDS = re.compile(r"[^\W\d_]{3,}")
_DENSE = re.compile(f"[{DENSE}]")
_NAMED_BY = 3
_READ = 1000  # characters of a prompt
_MOST = 400  # records of a group that its name is made from
_SHOWN = 3


@dataclass(frozen=True)
class Group:
    """One cluster. Shares are of all records of their side, and of all weight for ``share_after``."""

    number: int
    kind: str
    """Category and language of most of its records; empty where they have none in common, or English alone."""
    words: tuple[str, ...]
    """The most typical ones of its prompts."""
    pool_records: int
    traffic_records: int
    traffic_share: float
    share_before: float
    share_after: float
    prompts: tuple[str, ...]
    """A few typical ones: of the pool where it has some, else of the traffic."""

    @property
    def name(self) -> str:
        typical = ", ".join(self.words)
        return f"{self.kind} ({typical})" if self.kind and typical else self.kind or typical or "–"

    @property
    def weight(self) -> float:
        """How many times as often its records are drawn, on average; 0 where the pool has none."""
        return self.share_after / self.share_before if self.share_before else 0.0


def prompt_of(conversation: Conversation) -> str:
    """What the user asks first."""
    return next(m.content for m in conversation.messages if m.role == "user")


def terms(text: str) -> set[str]:
    """What may name a group: words of three letters and more, pairs of characters where there are no spaces."""
    found = set()
    for word in _WORDS.findall(text[:_READ].lower()):
        if _DENSE.search(word):
            found |= {word[i : i + 2] for i in range(len(word) - 1)}
        else:
            found.add(word)
    return found


def names(records: Sequence[Conversation], clusters: np.ndarray, k: int) -> list[tuple[str, tuple[str, ...]]]:
    """``[K]`` kind and typical words, from ``records`` with their ``clusters [n]``."""
    documents: list[list[set[str]]] = [[] for _ in range(k)]
    categories: list[Counter[str]] = [Counter() for _ in range(k)]
    languages: list[Counter[str]] = [Counter() for _ in range(k)]
    for record, cluster in zip(records, clusters.tolist(), strict=True):
        categories[cluster][record.category] += 1
        if len(documents[cluster]) < _MOST:
            prompt = prompt_of(record)
            documents[cluster].append(terms(prompt))
            languages[cluster][language_of(prompt)] += 1
    counts = [Counter(term for document in group for term in document) for group in documents]
    held = Counter(term for group in counts for term in group.elements())
    read = sum(map(len, documents))
    result = []
    for group, count, category, language in zip(documents, counts, categories, languages, strict=True):
        scores = {t: n * log((n / len(group)) / (held[t] / read)) for t, n in count.items()}
        # Equal scores by the alphabet: a set has no order.
        best = sorted(scores, key=lambda t: (-scores[t], t))[:_NAMED_BY]
        kind = [name for name in (_majority(category), _majority(language)) if name not in ("", "en", "none")]
        result.append((", ".join(kind), tuple(best)))
    return result


def _majority(counts: Counter[str]) -> str:
    return next((name for name, n in counts.items() if 2 * n > counts.total()), "")


def describe_groups(
    pool: np.ndarray,
    weights: np.ndarray,
    traffic: np.ndarray,
    k: int,
    *,
    sample: Sequence[Conversation],
    sample_clusters: np.ndarray,
    sample_distances: np.ndarray,
    sample_is_pool: np.ndarray,
) -> tuple[Group, ...]:
    """Groups with pool or traffic, from clusters ``pool [n]`` with ``weights [n]`` and ``traffic [m]``.

    ``sample``: records of both sides whose texts are at hand, with cluster, distance to its centre, and side, each
    ``[sample]``.
    """
    pool_records, traffic_records = (np.bincount(c, minlength=k) for c in (pool, traffic))
    after = np.bincount(pool, weights, minlength=k) / weights.sum()
    named = names(sample, sample_clusters, k)
    result = []
    for number in np.flatnonzero(pool_records + traffic_records).tolist():
        here = np.flatnonzero((sample_clusters == number) & (sample_is_pool == bool(pool_records[number])))
        nearest = here[np.argsort(sample_distances[here], kind="stable")].tolist()
        prompts = tuple(dict.fromkeys(prompt_of(sample[i]) for i in nearest[: 5 * _SHOWN]))[:_SHOWN]
        result.append(
            Group(
                number,
                *named[number],
                int(pool_records[number]),
                int(traffic_records[number]),
                float(traffic_records[number] / len(traffic)),
                float(pool_records[number] / len(pool)),
                float(after[number]),
                prompts,
            )
        )
    return tuple(result)
