"""Traffic in three parts that share no prompt, and the guard that keeps held-out prompts out of training.

*fit* is what weights are fitted to, *tune* chooses how far they go, *test* is what a head is measured on. All
near-duplicates of a prompt fall into the same part, by a seeded hash of their group: neither the order of the records
nor other prompts decide, so that a prompt stays in *test* when more traffic is added.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from bitdraft.data.conversation import Conversation
from bitdraft.data.traffic.duplicates import digest, near_duplicates, prints, templates

_OFTEN = 200
"""A part that so many different training prompts share with a held-out one is a template of the training set."""


@dataclass(frozen=True)
class Split:
    """The three parts, each ordered by content."""

    fit: tuple[Conversation, ...]
    tune: tuple[Conversation, ...]
    test: tuple[Conversation, ...]
    groups: int
    """How many groups of near-duplicates there are."""
    largest_group: int
    """Records in the largest of them."""


def split_traffic(records: Sequence[Conversation], shares: tuple[float, float, float], seed: int) -> Split:
    """``shares``: of fit, tune and test; they hold on average, because whole groups are moved.

    Raises ``ValueError`` if a part stays empty.
    """
    group = near_duplicates(records)
    digests = [digest(record) for record in records]
    name: dict[int, str] = {}
    for number, text in zip(group.tolist(), digests, strict=True):
        name[number] = min(text, name.get(number, text))
    ends = np.cumsum(shares) / sum(shares)
    parts: tuple[list[Conversation], ...] = ([], [], [])
    for index in sorted(range(len(records)), key=lambda i: (digests[i], content_key(records[i]))):
        place = _uniform(f"{seed}/{name[int(group[index])]}")
        parts[min(int(np.searchsorted(ends, place, side="right")), 2)].append(records[index])
    for part, records_there in zip(("fit", "tune", "test"), parts, strict=True):
        if not records_there:
            raise ValueError(
                f"the traffic's {len(records)} records are {len(name)} groups of near-duplicates, and none of them "
                f"fell into the part {part!r}: give more traffic, other --shares or another --seed"
            )
    fit, tune, test = map(tuple, parts)
    return Split(fit, tune, test, len(name), int(np.bincount(group).max()))


def content_key(conversation: Conversation) -> tuple[str, str, str]:
    """An order of records that no file's order changes: by what is asked, what is answered, and the name."""
    answers = repr([(m.content, m.thinking) for m in conversation.messages if m.role == "assistant"])
    said = blake2b((answers + repr(conversation.answers)).encode(), digest_size=16).hexdigest()
    return conversation.key, said, conversation.id


def _uniform(text: str) -> float:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") / 2.0**64


class Guard:
    """Finds held-out prompts in a stream of training records; memory of the held-out side only.

    Parts that are templates of the held-out records, or of ``context`` (the traffic that they come from), do not
    count, nor those that very many different training prompts share.
    """

    def __init__(self, heldout: Sequence[Conversation], context: Sequence[Conversation] = ()) -> None:
        self.heldout = heldout
        common = set(templates([*heldout, *context]).tolist())
        self._wholes: dict[int, int] = {}
        self._parts: dict[int, int] = {}
        for index, conversation in enumerate(heldout):
            seen = prints(conversation)
            self._wholes.setdefault(seen.whole, index)
            for code in seen.parts.tolist():
                if code not in common:
                    self._parts.setdefault(code, index)
        self._sharers: dict[int, set[int]] = {}
        self._candidates: list[tuple[int, int, list[int]]] = []  # record, whole match or -1, codes of shared parts

    def look(self, number: int, conversation: Conversation) -> bool:
        """The next training record, under any number: whether it may hold a held-out prompt (``found`` knows)."""
        seen = prints(conversation)
        whole = self._wholes.get(seen.whole, -1)
        codes = []
        for code in self._parts.keys() & seen.parts.tolist():
            sharers = self._sharers.setdefault(code, set())
            if len(sharers) <= _OFTEN:
                sharers.add(seen.whole)
                codes.append(code)
        suspect = whole >= 0 or bool(codes)
        if suspect:
            self._candidates.append((number, whole, codes))
        return suspect

    def found(self) -> dict[int, Conversation]:
        """The numbers of the training records that hold a held-out prompt, and that prompt."""
        result = {}
        for number, whole, codes in self._candidates:
            shared = [self._parts[code] for code in codes if len(self._sharers[code]) <= _OFTEN]
            if whole >= 0 or shared:
                result[number] = self.heldout[whole if whole >= 0 else min(shared)]
        return result


def contaminated(training: Iterable[Conversation], heldout: Sequence[Conversation]) -> list[tuple[str, str]]:
    """Places (file and line) of the training records that hold a held-out prompt, with that prompt's place."""
    guard, places = Guard(heldout), []
    for number, conversation in enumerate(training):
        places.append(conversation.source)
        guard.look(number, conversation)
    return [(places[number], prompt.source) for number, prompt in guard.found().items()]
