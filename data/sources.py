"""Conversations from JSON-lines files.

One record a line: ``{"id": …, "category": …, "conversations": [{"role": …, "content": …}, …]}``. Several user
messages in a row are turns that the assistant answers one after the other.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Message:
    role: str
    content: str

    def as_dict(self) -> dict[str, str]:
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True)
class Conversation:
    """One record. ``source`` names its file and line, for messages."""

    id: str
    category: str
    messages: tuple[Message, ...]
    source: str

    @property
    def opening(self) -> "Conversation":
        """Only what stands up to the first user message: a question not yet answered."""
        first = next(i for i, m in enumerate(self.messages) if m.role == "user")
        return replace(self, messages=self.messages[: first + 1])


def demo_file(split: str) -> Path:
    """The shipped prompts: ``train``, ``traffic`` or ``heldout``."""
    return Path(str(resources.files("bitdraft.data").joinpath(f"demo/{split}.jsonl")))


def read_conversations(paths: Iterable[Path]) -> list[Conversation]:
    """All records of the files, in order.

    Raises ``ValueError`` naming the file, and the line where there is one, for a file that is missing or
    holds no record, a line that is not JSON and a record of another shape.
    """
    conversations: list[Conversation] = []
    for path in paths:
        if not path.is_file():
            raise ValueError(f"data file {path} does not exist")
        before = len(conversations)
        with path.open(encoding="utf-8", errors="strict") as lines:
            try:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        conversations.append(_conversation(line, f"{path}, line {number}"))
            except UnicodeDecodeError as error:
                raise ValueError(f"data file {path} is not UTF-8 text: {error.reason}") from error
        if len(conversations) == before:
            raise ValueError(f"data file {path} is empty: it holds no record")
    return conversations


def _conversation(line: str, source: str) -> Conversation:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}: not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(record, dict) or "conversations" not in record:
        found = ", ".join(sorted(record)) if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"{source}: expected the key 'conversations', found {found}")
    turns = record["conversations"]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{source}: 'conversations' must be a list with at least one message")
    messages = tuple(_message(turn, source) for turn in turns)
    if not any(m.role == "user" for m in messages):
        raise ValueError(f"{source}: the conversation has no user message")
    return Conversation(str(record.get("id", source)), str(record.get("category", "")), messages, source)


def _message(turn: Any, source: str) -> Message:
    if not isinstance(turn, dict) or not isinstance(turn.get("content"), str) or turn.get("role") not in ROLES:
        raise ValueError(f"{source}: every message needs a 'role' ({', '.join(ROLES)}) and a text 'content'")
    return Message(turn["role"], turn["content"])
