"""Training text written by the low-bit target itself, kept by what decides it.

On-policy text is most of what a draft head gains from knowing the served model, so the answers come from
the same simulated target that supplies states and logits.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bitdraft.data.chat import Example, prompt_ids
from bitdraft.data.conversation import Conversation
from bitdraft.data.dialogs import AnswerSettings, Dialog, answer_dialogs
from bitdraft.quant.files import write_text_atomically
from bitdraft.quant.target import LowBitTarget


def on_policy_examples(
    target: LowBitTarget,
    tokenizer: Any,
    conversations: Sequence[Conversation],
    settings: AnswerSettings,
    *,
    end_ids: set[int],
    cache_dir: Path | None,
    label: str = "answers",
) -> list[Example]:
    """Every user turn of every conversation, answered by the target, turn by turn.

    Assistant messages in the records are dropped. Examples come in the order of the conversations. Answers are kept
    under ``cache_dir`` by what determines them (target, recipe, prompts, settings), and read from there the next time.
    Raises ``ValueError`` for a prompt that leaves no room for its answer in the target's context.
    """
    key = _cache_key(target, tokenizer, conversations, settings, end_ids)
    path = cache_dir / "answers" / f"{key}.jsonl" if cache_dir else None
    if path and path.is_file():
        return _read_examples(path, conversations)
    dialogs = answer_dialogs(target, tokenizer, conversations, settings, end_ids=end_ids, label=label)
    examples = [e for d in dialogs for e in d.examples]
    if path:
        _write_examples(path, examples)
    return examples


def _cache_key(
    target: LowBitTarget,
    tokenizer: Any,
    conversations: Iterable[Conversation],
    settings: AnswerSettings,
    end_ids: set[int],
) -> str:
    """Everything that decides the answers, the rendered prompts included."""
    digest = hashlib.sha256()
    model = [target.fingerprint, target.recipe.fingerprint, str(target.dtype)]
    asked: list[Any] = [settings.max_new_tokens, settings.batch_size, sorted(end_ids)]
    if settings.sampling is not None and not settings.is_greedy:  # greedy answers keep the key they always had
        drawn = settings.sampling
        asked.append([drawn.temperature, drawn.top_k, drawn.top_p, settings.seed])
    if settings.thinking is not None:
        asked.append({"thinking": settings.thinking})
    digest.update(json.dumps([model, asked, tokenizer.chat_template]).encode())
    for conversation in conversations:
        asked = [prompt_ids(tokenizer, conversation.opening.messages, thinking=settings.thinking)]
        asked += [m.as_dict() for m in conversation.messages if m.role != "assistant"]
        digest.update(json.dumps([conversation.id, conversation.category, asked]).encode())
    return digest.hexdigest()[:32]


def _read_examples(path: Path, conversations: Sequence[Conversation]) -> list[Example]:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    asked = [c.key for c in conversations for _ in range(Dialog(c).turns)]
    return [
        Example(r["id"], r["category"], tuple(r["prompt"]), tuple(r["answer"]), key)
        for r, key in zip(records, asked, strict=True)
    ]


def _write_examples(path: Path, examples: Sequence[Example]) -> None:
    lines = (json.dumps({"id": e.id, "category": e.category, "prompt": e.prompt, "answer": e.answer}) for e in examples)
    write_text_atomically(path, "\n".join(lines) + "\n")


def foreign_answers(conversations: Sequence[Conversation], target: LowBitTarget) -> str | None:
    """A sentence if answers that come with the data were written by another than ``target``, or do not say by whom."""
    own = f"{target.fingerprint}/{target.recipe.fingerprint}"
    others = Counter(c.answered_by for c in conversations if c.answered_by != own)
    silent = others.pop("", 0)
    parts = [f"{silent} do not say who answered"] if silent else []
    if others:
        parts.append(f"{others.total()} were answered by {', '.join(name for name, _ in others.most_common(3))}")
    if not parts:
        return None
    return (
        f"of {len(conversations)} conversations, {' and '.join(parts)}, not by this run's target and recipe ({own}): a "
        "head learns most from the answers of the target that it will serve (scripts/regenerate.py)"
    )
