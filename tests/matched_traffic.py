"""Made-up records of a few domains, small enough to match in a second."""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bitdraft.data.conversation import Conversation, Message
from bitdraft.data.traffic.outputs import record_line
from bitdraft.data.traffic.pool import Report

WORDS = {
    "cooking": "onion garlic simmer oven butter recipe flour whisk roast pepper the of and",
    "code": "function python return list loop integer compile array string class the of and",
    "travel": "flight hotel beach passport museum train ticket island luggage city the of and",
    "chinese": "天 气 怎 样 请 告 诉 我 今 明 去 哪 里 吃 饭 学 习 工 作 时 间",
}


def records(domain: str, count: int, *, seed: int = 0, answer: int = 0) -> list[Conversation]:
    """Prompts of 8 to 20 words; with ``answer``, an answer of so many words."""
    source = random.Random(f"{domain} {seed}")
    gap = "" if domain == "chinese" else " "
    made = []
    for number in range(count):
        words = source.choices(WORDS[domain].split(), k=source.randint(8, 20))
        turns = [Message("user", gap.join(words))]
        if answer:
            turns.append(Message("assistant", gap.join(source.choices(WORDS[domain].split(), k=answer))))
        name = f"{domain}-{seed}-{number}"
        made.append(Conversation(name, domain, tuple(turns), f"{domain}{seed}.jsonl, line {number + 1}"))
    return made


def pool(each: int = 60, *, answer: int = 0) -> list[Conversation]:
    return [r for domain in ("cooking", "code", "travel") for r in records(domain, each, answer=answer)]


def traffic(*, answer: int = 0, cooking: int = 56, code: int = 16, travel: int = 8) -> list[Conversation]:
    counts = {"cooking": cooking, "code": code, "travel": travel}
    return [r for domain, n in counts.items() for r in records(domain, n, seed=1, answer=answer)]


def write(path: Path, conversations: Sequence[Conversation]) -> Path:
    path.write_text("".join(f"{record_line(c)}\n" for c in conversations), encoding="utf-8")
    return path


def read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@contextmanager
def silent(label: str, total: int | None) -> Iterator[Report]:
    yield lambda count: None
