"""What is asked and answered: messages and conversations, whichever file or shape they came from."""

import hashlib
import json
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Message:
    """``thinking``: what an assistant thought before its answer, where the record keeps it apart from ``content``."""

    role: str
    content: str
    thinking: str = ""

    def as_dict(self) -> dict[str, str]:
        """As chat templates take it."""
        thinking = {"reasoning_content": self.thinking} if self.thinking else {}
        return {"role": self.role, "content": self.content, **thinking}


@dataclass(frozen=True)
class Conversation:
    """One record. ``source`` names its file and line, for messages."""

    id: str
    category: str
    messages: tuple[Message, ...]
    source: str
    answers: tuple[tuple[int, ...], ...] = ()
    """Token ids of the assistant's turns, one by one, where the record holds them as a target wrote them."""
    answered_by: str = ""
    """Fingerprints of the target and the recipe that wrote the answers, ``target/recipe``, where the record says so."""
    finished: tuple[bool, ...] = ()
    """Of the assistant's turns, whether each ended by itself or was cut by a limit, where the record says so."""

    @cached_property
    def key(self) -> str:
        """Digest of what is asked, whoever answers: the same in every file, at every place, with any answers."""
        asked = [[m.role, m.content] for m in self.messages if m.role != "assistant"]
        return hashlib.blake2b(json.dumps(asked).encode(), digest_size=16).hexdigest()

    @property
    def opening(self) -> "Conversation":
        """Only what stands up to the first user message: a question not yet answered."""
        first = next(i for i, m in enumerate(self.messages) if m.role == "user")
        written = sum(m.role == "assistant" for m in self.messages[:first])
        messages, answers = self.messages[: first + 1], self.answers[:written]
        return replace(self, messages=messages, answers=answers, finished=self.finished[:written])

    @property
    def record(self) -> dict[str, Any]:
        """As it stands in a file of ours."""
        record: dict[str, Any] = {"id": self.id, "category": self.category}
        record["conversations"] = [
            {"role": m.role, "content": m.content, **({"thinking": m.thinking} if m.thinking else {})}
            for m in self.messages
        ]
        if self.answers:
            record["answers"] = [list(ids) for ids in self.answers]
        if self.answered_by:
            record["answered_by"] = self.answered_by
        if self.finished:
            record["finished"] = list(self.finished)
        return record


def split_thinking(text: str) -> tuple[str, str]:
    """What stands in ``<think>…</think>`` at the head of an answer, and what follows. Without a whole pair: nothing."""
    match = re.match(r"\s*<think>(.*?)</think>\n*", text, flags=re.DOTALL)
    return (match[1].strip("\n"), text[match.end() :]) if match else ("", text)
