"""Files of answered conversations, written record by record so that a killed run goes on where it was.

While answers come, whole lines are appended to ``FILE.partial``, whose first line holds the settings. At the end all
records go to ``FILE`` at once, in the order in which they were asked, beside ``FILE.about.json`` with the settings and
the counts. A record is found again by what it asks (``Conversation.key``): records that ask the same are answered once.
"""

import fcntl
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from bitdraft.data.conversation import Conversation, Message
from bitdraft.quant.files import write_text_atomically

_KIND = "bitdraft answers 1"


def answered_record(
    conversation: Conversation,
    messages: Iterable[Message],
    *,
    answered_by: str,
    finished: Sequence[bool],
    answers: Sequence[Sequence[int]] = (),
) -> dict[str, Any]:
    """A record as it stands in the file. ``answers``: the token ids of the assistant's turns, where they are known."""
    written = replace(
        conversation,
        messages=tuple(messages),
        answers=tuple(map(tuple, answers)),
        answered_by=answered_by,
        finished=tuple(finished),
    )
    return {**written.record, "finished": list(finished)}


@dataclass
class Counts:
    """What a file holds."""

    records: int = 0
    answers: int = 0
    tokens: int = 0
    """Of the answers whose token ids are known."""
    empty: int = 0
    """Answers without a word: the end came at once."""
    cut: int = 0
    """Answers that the limit ended."""
    unanswered: int = 0
    """User turns behind which there was no room."""

    def add(self, record: dict[str, Any]) -> None:
        written = [m["content"] for m in record["conversations"] if m["role"] == "assistant"]
        self.records += 1
        self.answers += len(written)
        self.tokens += sum(map(len, record.get("answers", ())))
        self.empty += sum(not text.strip() for text in written)
        self.cut += sum(not whole for whole in record["finished"])
        self.unanswered += sum(m["role"] == "user" for m in record["conversations"]) - len(written)


@dataclass
class AnswerFile:
    """``FILE`` while it is being written. ``settings``: what decides the answers; other ones are refused."""

    out: Path
    settings: dict[str, Any]
    places: dict[str, tuple[Path, int]] = field(default_factory=dict)
    """Where each finished record's line begins, by its key."""

    @property
    def partial(self) -> Path:
        return self.out.with_name(self.out.name + ".partial")

    @property
    def about(self) -> Path:
        return self.out.with_name(self.out.name + ".about.json")

    def __enter__(self) -> "AnswerFile":
        """Read what is there. ``ValueError`` where another run writes, or has written under other settings."""
        if self.out.exists():
            self._read_finished()
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = self.partial.open("a+b")
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ValueError(f"another run writes {self.partial}: wait for it or choose another --out") from error
            self._read_partial()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def _read_finished(self) -> None:
        if not self.about.is_file():
            raise ValueError(f"{self.out} exists and was not written by this script: choose another --out")
        self._check(json.loads(self.about.read_text(encoding="utf-8"))["settings"])
        with self.out.open("rb") as lines:
            self._index(self.out, lines, 0)

    def _read_partial(self) -> None:
        """Cut off what a killed run left of its last line, and find the records before it."""
        self._file.seek(0)
        head = self._file.readline()
        if not head.endswith(b"\n"):
            self._file.truncate(0)
            self._append({"kind": _KIND, "settings": self.settings})
            return
        try:
            described = json.loads(head)
            before = described["settings"] if described["kind"] == _KIND else None
        except (ValueError, KeyError, TypeError):
            before = None
        if before is None:
            raise ValueError(f"{self.partial} does not begin as an unfinished file of answers: move it away")
        self._check(before)
        self._file.truncate(self._index(self.partial, self._file, 1))

    def _index(self, path: Path, lines: BinaryIO, before: int) -> int:
        """Note every record's place from here on; returns where the last whole line ends."""
        end = lines.tell()
        for number, line in enumerate(lines, start=before + 1):
            if not line.endswith(b"\n"):
                break
            try:
                self.places[key_of(json.loads(line))] = (path, end)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: no answered record ({error}); delete the line to have it answered anew"
                ) from error
            end += len(line)
        return end

    def _check(self, before: dict[str, Any]) -> None:
        names = [n for n in {**before, **self.settings} if before.get(n) != self.settings.get(n)]
        if names:
            differing = ", ".join(f"{n} {before.get(n)!r}, now {self.settings.get(n)!r}" for n in names)
            raise ValueError(f"{self.out} was begun with other settings ({differing}): choose another --out")

    def append(self, record: dict[str, Any]) -> None:
        """Keep a finished record."""
        self.places[key_of(record)] = (self.partial, self._append(record))

    def _append(self, line: dict[str, Any]) -> int:
        try:
            place = self._file.seek(0, 2)
            self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise OSError(
                f"{self.partial}: {error.strerror}; {len(self.places)} finished records are kept: make room and run "
                "the same command again"
            ) from error
        return place

    def waiting(self, conversations: Sequence[Conversation]) -> list[Conversation]:
        """Those without an answer yet, one of every key; ``ValueError`` where the file holds others than are asked."""
        asked = {c.key: c for c in reversed(conversations)}
        if strange := self.places.keys() - asked.keys():
            raise ValueError(
                f"{self.out} holds {len(strange)} answered records that are not among the {len(asked)} asked for now: "
                "ask for these too, or choose another --out"
            )
        return [c for c in conversations if c.key not in self.places and asked[c.key] is c]

    def finish(self, conversations: Sequence[Conversation], facts: dict[str, Any]) -> Counts:
        """Write ``FILE`` in the order of ``conversations``, without those that were not answered."""
        counts = Counts()
        fresh = self.out.with_name(f".{self.out.name}.tmp")
        try:
            with fresh.open("wb") as file:
                for record in self.records(conversations):
                    counts.add(record)
                    file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                file.flush()
            about = {"settings": self.settings, **vars(counts), **facts}
            write_text_atomically(self.about, json.dumps(about, indent=2) + "\n")
            fresh.replace(self.out)
        except OSError as error:
            raise OSError(
                f"{self.out}: {error.strerror}; all answers are kept in {self.partial}: make room and run the same "
                "command again"
            ) from error
        finally:
            fresh.unlink(missing_ok=True)
        self.partial.unlink()
        return counts

    def records(self, conversations: Sequence[Conversation]) -> Iterator[dict[str, Any]]:
        """The answered record of every conversation that has one, under its own id and category."""
        opened = {path: path.open("rb") for path in {path for path, _ in self.places.values()}}
        try:
            for conversation in conversations:
                if conversation.key in self.places:
                    path, place = self.places[conversation.key]
                    opened[path].seek(place)
                    record = json.loads(opened[path].readline())
                    yield {**record, "id": conversation.id, "category": conversation.category}
        finally:
            for file in opened.values():
                file.close()


def key_of(record: dict[str, Any]) -> str:
    """``Conversation.key`` of a record in the file."""
    messages = tuple(Message(m["role"], m["content"]) for m in record["conversations"])
    return Conversation("", "", messages, "").key
