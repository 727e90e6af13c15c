"""Conversations from files, folders and the hub, one source or a mix of several.

A source is a path, a folder, a glob or a dataset on the hub (``org/name[:config[:split]]``), behind which ``@SHARE``
may stand. A path that exists is always meant as one. Records of every common shape become conversations
(``shapes.py``); our own is one a line, ``{"id": …, "category": …, "conversations": [{"role": …, "content": …}, …]}``,
where several user messages in a row are turns that the assistant answers one after the other.
"""

import hashlib
import heapq
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from bitdraft.data.conversation import Conversation
from bitdraft.data.records import SUFFIXES, Bad, HubError, Placed, hub_records, is_record_file, read_records, refuse
from bitdraft.data.shapes import conversation_of

_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]*))?(:(?P<split>[\w.-]+))?")


@dataclass(frozen=True)
class Source:
    """One source as it was given. ``share``: its part of the mix, None where no source has one."""

    place: str
    share: float | None


def demo_file(split: str) -> Path:
    """The shipped prompts: ``train``, ``traffic`` or ``heldout``."""
    return Path(str(resources.files("bitdraft.data").joinpath(f"demo/{split}.jsonl")))


def read_conversations(
    sources: Iterable[str | Path], *, skip_bad: bool = False, seed: int = 0, report: Callable[[str], None] = print
) -> list[Conversation]:
    """All of ``iter_conversations``. With ``skip_bad``, ``report`` is told how many records were left out."""
    skipped: list[ValueError] = []
    conversations = list(iter_conversations(sources, skip_bad=skip_bad, skipped=skipped.append, seed=seed))
    if skipped:
        report(f"{len(skipped)} bad records skipped, the first: {skipped[0]}")
    return conversations


def iter_conversations(
    sources: Iterable[str | Path],
    *,
    skip_bad: bool = False,
    skipped: Bad = lambda error: None,
    seed: int = 0,
) -> Iterator[Conversation]:
    """The records of all sources, one at a time.

    Without shares: all of them, one source after the other. With shares: of each source so many that the mix has the
    shares (they need not add up to 1) and is as large as it can be with every record at most once, spread evenly, so
    that a part from the start has the shares too. Which of a source's records stay is decided by ``seed`` and what they
    ask (``Conversation.key``), not by where they stand; every source is then read twice.

    Raises ``ValueError`` naming the file, and the line where there is one, for a source that is missing or holds no
    record, and for a line that is not JSON or a record of another shape. With ``skip_bad``, ``skipped`` is told about
    each of the latter, once, and reading goes on.
    """
    given = [_parsed(source) for source in sources]
    told = skipped if skip_bad else refuse
    if all(source.share is None for source in given):
        return (c for source in given for c in _conversations(source.place, told))
    if bare := [source.place for source in given if source.share is None]:
        raise ValueError(f"{bare[0]} has no share, but others have: give @SHARE behind every source, or behind none")
    return _mixed(given, told, skip_bad, seed)


def _mixed(sources: Sequence[Source], told: Bad, skip_bad: bool, seed: int) -> Iterator[Conversation]:
    ranks = [sorted(_rank(c, seed) for c in _conversations(source.place, told)) for source in sources]  # pass one
    counts = mix_counts([len(r) for r in ranks], [source.share or 0.0 for source in sources])
    again: Bad = (lambda error: None) if skip_bad else refuse  # told about in pass one
    parts = [
        _spread(_lowest(_conversations(s.place, again), r, count, seed), count, index)
        for index, (s, r, count) in enumerate(zip(sources, ranks, counts, strict=True))
    ]
    return (conversation for _, _, conversation in heapq.merge(*parts, key=lambda item: item[:2]))


def mix_counts(records: Sequence[int], shares: Sequence[float]) -> list[int]:
    """How many records of each source: in the proportions of ``shares``, as many as there are, at least one each."""
    most = min(n / share for n, share in zip(records, shares, strict=True))
    return [min(n, max(1, round(most * share))) for n, share in zip(records, shares, strict=True)]


def _spread(conversations: Iterator[Conversation], count: int, index: int) -> Iterator[tuple[float, int, Conversation]]:
    """At even distances over the mix, from 0 to 1."""
    return (((j + 0.5) / count, index, conversation) for j, conversation in enumerate(conversations))


def _lowest(
    conversations: Iterator[Conversation], ranks: Sequence[bytes], count: int, seed: int
) -> Iterator[Conversation]:
    """Those of the ``count`` lowest ranks, in their own order; of records that are the same, the first."""
    last = ranks[count - 1]
    ties = count - sum(rank < last for rank in ranks[:count])
    for conversation in conversations:
        rank = _rank(conversation, seed)
        ties -= rank == last
        if rank < last or (rank == last and ties >= 0):
            yield conversation


def _rank(conversation: Conversation, seed: int) -> bytes:
    """Of 16 bytes: by what is asked, then (two answers to one question) by all that the record says."""
    asked = hashlib.blake2b(f"{seed}/{conversation.key}".encode(), digest_size=10).digest()
    said = repr((conversation.messages, conversation.answers)).encode()
    return asked + hashlib.blake2b(said, digest_size=6).digest()


def _conversations(place: str, bad: Bad) -> Iterator[Conversation]:
    for name, records in _record_sources(place, bad):
        found = refused = 0
        for where, record in records:
            try:
                conversation = conversation_of(record, where)
            except ValueError as error:
                refused += 1
                bad(error)
                continue
            found += 1
            yield conversation
        if not found:
            why = f"none of its {refused} records can be used" if refused else "it holds no record"
            raise ValueError(f"data file {name} is empty: {why}")


def _record_sources(place: str, bad: Bad) -> Iterator[tuple[str, Iterator[Placed]]]:
    """Every file of a source, or its dataset, with its records."""
    path = Path(place)
    hub = None if path.exists() or place.endswith(SUFFIXES) else _HUB.fullmatch(place)
    if hub:
        yield place, _dataset(place, hub["name"], hub["config"] or None, hub["split"] or "train")
        return
    for file in _files(path):
        yield str(file), read_records(file, bad)


def _dataset(place: str, name: str, config: str | None, split: str) -> Iterator[Placed]:
    try:
        yield from hub_records(name, config, split, streaming=True)
    except HubError as error:
        raise ValueError(f"no file or folder {place} exists, and as a dataset {error}") from error


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = [p for p in sorted(path.rglob("*")) if is_record_file(p) and p.is_file()]
        if not found:
            raise ValueError(f"the folder {path} holds no {', '.join(SUFFIXES)} file")
        return found
    if path.is_file():
        if not is_record_file(path):
            raise ValueError(f"data file {path} is none of {', '.join(SUFFIXES)}: rename it by what it holds")
        return [path]
    if any(sign in str(path) for sign in "*?["):
        matched = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        files = [file for match in matched if match.is_dir() or is_record_file(match) for file in _files(match)]
        if files:
            return files
        raise ValueError(f"no data file is named like {path}")
    raise ValueError(f"data file {path} does not exist")


def _parsed(source: str | Path) -> Source:
    place = str(source)
    name, at, share = place.rpartition("@")
    if not at or Path(place).exists():
        return Source(place, None)
    try:
        value = float(share)
    except ValueError:
        if not Path(name).exists():
            return Source(place, None)
        raise ValueError(f"{place}: the share behind '@' must be a number, got {share!r}") from None
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{place}: the share behind '@' must be above 0 and finite, got {share}")
    return Source(name, value)
