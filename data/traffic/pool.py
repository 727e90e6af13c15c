"""The pool as compact rows: read twice, one chunk at a time, without keeping its texts.

The first reading counts, finds what is nearly in the traffic's test split, and keeps a bounded sample of texts, from
which features are made and groups get their names; the second makes the rows. Samples go by a hash of what is asked,
and rows are sorted by content: neither the order of files nor how records are spread over them changes anything.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from scipy import sparse

from bitdraft.data.conversation import Conversation
from bitdraft.data.sampling import uniforms
from bitdraft.data.traffic.features import FeatureSpace, Rows
from bitdraft.data.traffic.split import Guard, content_key
from bitdraft.data.traffic.texts import is_answered

# n record of the pool, F feature, B bucket, q record whose n-grams are kept.

States = Callable[[Sequence[Conversation], bool], np.ndarray]
"""A target's hidden states ``[n, H]`` of records, with or without their answers."""
Report = Callable[[int], object]
"""Told how many records more have been read."""
_CHUNK = 1024


@dataclass(frozen=True)
class Survey:
    """What the first reading found. Numbers count the pool's records from 0, in the order of reading."""

    records: int
    dropped: dict[int, tuple[Conversation, Conversation]]
    """Number of a record, the record, and the prompt of the test split that it holds."""
    sample: tuple[Conversation, ...]
    """Of the records that are kept, by content."""
    unanswered: int
    first_unanswered: str
    """Its place; empty if there is none."""
    empty_answers: int
    """Assistant's messages without a word."""
    cut_answers: int
    """Those that their record says were cut by a limit."""


def survey(pool: Iterable[Conversation], guard: Guard, *, sample: int, seed: int, report: Report) -> Survey:
    """``sample``: how many texts are kept at most."""
    records, unanswered, empty, cut, first_unanswered = 0, 0, 0, 0, ""
    chosen: list[tuple[float, tuple[str, str, str], int, Conversation]] = []
    highest = 1.0
    suspects: dict[int, Conversation] = {}
    for chunk in chunks(pool):
        for conversation, rank in zip(chunk, uniforms([c.key for c in chunk], "sample", seed), strict=True):
            if guard.look(records, conversation):
                suspects[records] = conversation
            if not is_answered(conversation):
                unanswered += 1
                first_unanswered = first_unanswered or conversation.source
            empty += empty_answers(conversation)
            cut += conversation.finished.count(False)
            if rank <= highest:
                chosen.append((float(rank), content_key(conversation), records, conversation))
            records += 1
        if len(chosen) > sample:
            chosen = sorted(chosen)[:sample]
            highest = chosen[-1][0]
        report(len(chunk))
    dropped = {number: (suspects[number], prompt) for number, prompt in guard.found().items()}
    kept = tuple(c for *_, number, c in sorted(chosen) if number not in dropped)
    return Survey(records, dropped, kept, unanswered, first_unanswered, empty, cut)


def empty_answers(conversation: Conversation) -> int:
    return sum(
        m.role == "assistant" and not m.content.strip() and not m.thinking.strip() for m in conversation.messages
    )


@dataclass(frozen=True, eq=False)
class PoolRows:
    """What stays of the pool, by content. ``kept``: what the traffic's test split does not hold."""

    numbers: np.ndarray  # [n] int64, in the order of reading
    keys: list[str]
    ids: list[str]
    places: list[str]
    categories: list[str]
    vectors: np.ndarray  # [n, F] float32
    languages: np.ndarray  # [n] int8
    answer_tokens: np.ndarray  # [n] float32
    counted: np.ndarray  # [n] bool
    kept: np.ndarray  # [n] bool
    measured: np.ndarray  # [q] rows whose n-grams are in counts
    counts: sparse.csr_matrix  # [q, B]


def pool_rows(
    pool: Iterable[Conversation],
    space: FeatureSpace,
    seen: Survey,
    *,
    states: States | None,
    measured: int,
    seed: int,
    report: Report,
) -> PoolRows:
    """``measured``: of about how many records the n-grams are kept. Raises ``ValueError`` if the pool has changed."""
    share = measured / seen.records
    order: list[tuple[str, str, str, int]] = []
    places: list[str] = []
    categories: list[str] = []
    parts: list[Rows] = []
    counts, drawn = [], []
    for chunk in chunks(pool):
        rows = rows_of(space, chunk, states)
        take = uniforms([c.key for c in chunk], "measured", seed) < share
        counts.append(rows.counts[take])
        drawn.append(take)
        parts.append(Rows(rows.vectors, rows.counts[:0], rows.facts))
        order += [(*content_key(c), len(order) + i) for i, c in enumerate(chunk)]
        places += [c.source for c in chunk]
        categories += [sys.intern(c.category) for c in chunk]
        report(len(chunk))
    if len(order) != seen.records:
        raise ValueError(
            f"the pool had {seen.records} records when it was read first and {len(order)} the second time: "
            "match files that nobody writes to"
        )
    order.sort()
    numbers = np.array([number for *_, number in order], np.int64)
    is_measured = np.concatenate(drawn)
    row_of_count = np.full(len(numbers), -1)
    row_of_count[is_measured] = np.arange(is_measured.sum())
    found = np.flatnonzero(is_measured[numbers])

    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(part.facts, name) for part in parts])[numbers]

    return PoolRows(
        numbers,
        [key for key, *_ in order],
        [name for _, _, name, _ in order],
        [places[number] for number in numbers],
        [categories[number] for number in numbers],
        np.concatenate([part.vectors for part in parts])[numbers],
        column("language"),
        column("answer_tokens"),
        column("counted"),
        np.array([number not in seen.dropped for number in numbers.tolist()]),
        found,
        sparse.vstack(counts, format="csr")[row_of_count[numbers[found]]],
    )


def rows_of(space: FeatureSpace, records: Sequence[Conversation], states: States | None) -> Rows:
    return space.rows(records, states(records, space.answers) if states else None)


def chunks(records: Iterable[Conversation]) -> Iterator[list[Conversation]]:
    stream = iter(records)
    while chunk := list(islice(stream, _CHUNK)):
        yield chunk
