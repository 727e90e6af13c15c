"""Held-out sets by name, from a local file or the hub.

A set is a row of ``HELD_OUT_SETS``: where it is published, how many of its prompts papers on speculative decoding
take, in which order and in which words they ask. The trap: acceptance lengths compare only where prompts, words and
answer lengths are the same, and they often differ under one name (docs/heldout-sets.md).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from bitdraft.data.conversation import Conversation, Message
from bitdraft.data.records import SUFFIXES, HubError, Placed, hub_configs, hub_records, read_records
from bitdraft.data.sources import demo_file, read_conversations

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Form:
    """How published records are laid out."""

    columns: tuple[str, ...]
    """What a record must have."""
    questions: Callable[[Record], list[str] | None]
    """The user's turns; None for a record that is no prompt and is left out."""
    holds: type = str
    """What the columns hold: text, or a list."""


@dataclass(frozen=True, kw_only=True)
class HeldOutSet:
    """One named set."""

    name: str
    hub: str | None
    """Dataset on the hub; None for a set that is not there."""
    config: str | None = None
    split: str = "test"
    data_file: str | None = None
    """The file of the dataset to take, where it has several."""
    every_config: bool = False
    """The dataset has one config a subject: all of them, one after the other."""
    form: Form
    prompts: int
    """How many prompts peers usually take."""
    turns: str = "1 turn"
    spread: bool = False
    """Fewer prompts than there are come evenly from the whole set, which is sorted by task, not from its start."""
    usage: str
    """Whose words and lengths we follow."""


def load_set(name: str, *, folder: Path | None = None, prompts: int | None = None) -> list[Conversation]:
    """At most ``prompts`` conversations of the set, by default as many as peers take.

    ``folder/NAME.jsonl``, ``.jsonl.gz``, ``.json`` or ``.parquet`` is read if it exists, otherwise the hub is asked.
    The file holds the set's published columns, the ``turns`` of FastChat's and EAGLE's question files or, as JSON
    lines, our own form. Questions are user messages in a row, which the assistant answers one after the other.

    Raises ``ValueError`` for an unknown set, a set that cannot be had, and a file or record that does not fit, naming
    its line.
    """
    row = _row(name)
    count = row.prompts if prompts is None else prompts
    if count < 1:
        raise ValueError(f"held-out set {name!r}: the number of prompts must be at least 1, got {count}")
    path = demo_file("heldout") if row.name == "demo" else _local_file(row, folder)
    conversations = _from_hub(row, folder) if path is None else _from_file(row, path)
    chosen = _spread(list(conversations), count) if row.spread else list(islice(conversations, count))
    if not chosen:
        raise ValueError(f"{path or row.hub} is empty: it holds no prompt of the held-out set {name!r}")
    return chosen


def describe(name: str) -> str:
    """What peers take from the set and whose form we follow, in one line. Raises ``ValueError`` if it is unknown."""
    row = _row(name)
    return f"{name}: {row.prompts} prompts × {row.turns}; {row.usage}"


def _row(name: str) -> HeldOutSet:
    if name in HELD_OUT_SETS:
        return HELD_OUT_SETS[name]
    nearest = get_close_matches(name.lower(), HELD_OUT_SETS, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    raise ValueError(f"unknown held-out set {name!r}{hint}: the sets are {', '.join(HELD_OUT_SETS)}")


def _local_file(row: HeldOutSet, folder: Path | None) -> Path | None:
    if folder is None:
        return None
    if not folder.is_dir():
        raise ValueError(f"the folder of held-out sets {folder} does not exist")
    found = [path for suffix in SUFFIXES if (path := folder / f"{row.name}{suffix}").is_file()]
    if len(found) > 1:
        raise ValueError(f"{folder} holds {' and '.join(p.name for p in found)}; keep the one to measure")
    return found[0] if found else None


def _from_file(row: HeldOutSet, path: Path) -> Iterable[Conversation]:
    if ".jsonl" in path.suffixes and _is_own_form(next((record for _, record in read_records(path)), None)):
        return read_conversations([path])
    return _conversations(row, read_records(path))


def _is_own_form(record: Any) -> bool:
    """ShareGPT's conversations have the same key, but messages ``from`` and ``value``."""
    turns = record.get("conversations") if isinstance(record, dict) else None
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and "role" in turns[0]


def _from_hub(row: HeldOutSet, folder: Path | None) -> Iterator[Conversation]:
    place = f"{folder}/{row.name}.jsonl" if folder else f"{row.name}.jsonl in a folder named by --set-dir"
    if row.hub is None:
        raise ValueError(f"held-out set {row.name!r} is not on the hub: write it to {place} (docs/heldout-sets.md)")
    try:
        yield from _conversations(row, _hub_rows(row, row.hub))
    except HubError as error:
        raise ValueError(
            f"held-out set {row.name!r} cannot be had from the hub as {row.hub} ({error}); "
            f"without network, write it to {place} (docs/heldout-sets.md)"
        ) from error


def _hub_rows(row: HeldOutSet, hub: str) -> Iterator[Placed]:
    for config in hub_configs(hub) if row.every_config else [row.config]:
        for source, record in hub_records(hub, config, row.split, data_file=row.data_file):
            yield source, {"category": config, **record} if row.every_config else record


def _conversations(row: HeldOutSet, records: Iterable[Placed]) -> Iterator[Conversation]:
    for index, (source, record) in enumerate(records):
        questions = _questions(row, record, source)
        if questions is not None:
            key = record.get("question_id", record.get("task_id", f"{row.name}-{index}"))
            messages = tuple(Message("user", question) for question in questions)
            yield Conversation(str(key), str(record.get("category", row.name)), messages, source)


def _questions(row: HeldOutSet, record: Any, source: str) -> list[str] | None:
    if not isinstance(record, dict):
        raise ValueError(f"{source}: expected a record, found {type(record).__name__}")
    form = next((f for f in (row.form, TURNS) if set(f.columns) <= set(record)), None)
    if form is None:
        raise ValueError(
            f"{source}: a record of {row.name} needs {_quoted(row.form.columns)} or our own JSON lines, "
            f"but here are {_quoted(sorted(record))}"
        )
    fits = all(isinstance(record[column], form.holds) for column in form.columns)
    questions = form.questions(record) if fits else []
    if questions is not None and not (questions and all(isinstance(q, str) and q.strip() for q in questions)):
        raise ValueError(f"{source}: the record has no question: {_quoted(form.columns)} must hold text")
    return questions


def _quoted(columns: Iterable[str]) -> str:
    return ", ".join(map(repr, columns))


def _spread(conversations: list[Conversation], count: int) -> list[Conversation]:
    total = len(conversations)
    count = min(count, total)
    return [conversations[i * total // count] for i in range(count)]


def _opening(record: Record) -> list[str] | None:
    """The first message. ShareGPT's files also hold later pieces of long conversations, which an answer opens."""
    messages = record["conversations"]
    if not all(isinstance(m, dict) and isinstance(m.get("value"), str) and "from" in m for m in messages):
        return []
    if len(messages) < 2 or messages[0]["from"] not in ("human", "user") or not messages[0]["value"].strip():
        return None
    return [messages[0]["value"]]


def _multiple_choice(record: Record) -> list[str]:
    if not record["question"].strip():
        return []
    options = "".join(f"{letter}. {record[letter]}\n" for letter in "ABCD")
    return [f"以下是单项选择题，请选出其中的正确答案。\n\n{record['question']}\n{options}答案："]


def _instruction(record: Record) -> list[str]:
    return [f"{record['instruction']}\n\n{record['input']}".strip()]


TURNS = Form(("turns",), lambda record: record["turns"], holds=list)
SHAREGPT = Form(("conversations",), _opening, holds=list)

HELD_OUT_SETS: Mapping[str, HeldOutSet] = {
    row.name: row
    for row in (
        HeldOutSet(
            name="demo",
            hub=None,
            form=TURNS,
            prompts=80,
            usage="shipped with Bitdraft, comparable only with itself",
        ),
        HeldOutSet(
            name="mt-bench",
            hub="philschmid/mt-bench",
            split="train",
            form=TURNS,
            prompts=80,
            turns="2 turns",
            usage="both turns as published and up to 1024 new tokens a turn, like EAGLE, Medusa and Spec-Bench",
        ),
        HeldOutSet(
            name="gsm8k",
            hub="openai/gsm8k",
            config="main",
            form=Form(("question",), lambda record: [record["question"]]),
            prompts=80,
            usage="the bare question and up to 1024 new tokens, like EAGLE (whose 80 are others)",
        ),
        HeldOutSet(
            name="humaneval",
            hub="openai/openai_humaneval",
            form=Form(("prompt",), lambda record: [record["prompt"]]),
            prompts=80,
            usage="the bare function head and up to 1024 new tokens, like SpecForge",
        ),
        HeldOutSet(
            name="spec-bench",
            hub=None,
            form=TURNS,
            prompts=480,
            turns="1 or 2 turns",
            spread=True,
            usage="6 tasks × 80 and up to 1024 new tokens a turn, like Spec-Bench",
        ),
        HeldOutSet(
            name="alpaca",
            hub="tatsu-lab/alpaca",
            split="train",
            form=Form(("instruction", "input"), _instruction),
            prompts=80,
            usage="the instruction with its input below it, up to 1024 new tokens; EAGLE's 80 can be given as a file",
        ),
        HeldOutSet(
            name="sharegpt",
            hub="Aeala/ShareGPT_Vicuna_unfiltered",
            split="train",
            data_file="ShareGPT_V4.3_unfiltered_cleaned_split.json",
            form=SHAREGPT,
            prompts=80,
            usage="the opening message of each conversation, like vLLM's benchmark; EAGLE and Medusa train on these",
        ),
        HeldOutSet(
            name="ceval",
            hub="ceval/ceval-exam",
            split="val",
            every_config=True,
            form=Form(("question", "A", "B", "C", "D"), _multiple_choice),
            prompts=80,
            spread=True,
            usage="zero-shot and answer-only, like C-Eval's paper; answers are a few tokens, too short for acceptance",
        ),
    )
}
