"""Answers written by the low-bit target itself, in batches with a KV cache.

On-policy text is most of what a draft head gains from knowing the served model, so the answers come from
the same simulated target that supplies states and logits. Answers are kept as token ids: no text is
tokenized again, so nothing drifts.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from bitdraft.data.chat import Example, prompt_ids
from bitdraft.data.sources import Conversation, Message
from bitdraft.quant.files import write_text_atomically
from bitdraft.quant.kv_cache import WORTH_DROPPING
from bitdraft.quant.target import LowBitTarget

Report = Callable[[int, int], None]
"""Called with (prompts finished, tokens written) since the last call."""


def greedy_answers(
    target: LowBitTarget,
    prompts: Sequence[Sequence[int]],
    *,
    end_ids: set[int],
    max_new_tokens: int,
    batch_size: int,
    report: Report = lambda prompts, tokens: None,
) -> list[list[int]]:
    """The target's greedy continuation of every prompt, the end-of-turn token included, in the given order.

    Longest prompts first, similar lengths together; rows whose answer ended leave the batch together.
    """
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    answers: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        _answer_batch(target, prompts, chosen, answers, end_ids, max_new_tokens, report)
    return answers


@torch.no_grad()
def _answer_batch(
    target: LowBitTarget,
    prompts: Sequence[Sequence[int]],
    chosen: list[int],
    answers: list[list[int]],
    end_ids: set[int],
    max_new_tokens: int,
    report: Report,
) -> None:
    device = target.device
    ends = torch.tensor(sorted(end_ids), device=device)
    rows = list(chosen)  # rows[b]: which prompt row b of the batch answers
    lengths = torch.tensor([len(prompts[i]) for i in rows], device=device)  # [B]
    cache = target.new_cache(int(lengths.max()) + max_new_tokens)
    states = target.states(
        right_padded([prompts[i] for i in rows]).to(device), cache=cache, lengths=torch.zeros_like(lengths)
    )
    last = states.last_hidden[torch.arange(len(rows), device=device), lengths - 1]  # [B, H]
    going = torch.ones_like(lengths, dtype=torch.bool)  # [B]
    for written in range(1, max_new_tokens + 1):
        tokens = target.logits(last).argmax(-1)  # [B]
        active = going.tolist()
        for row, token, still in zip(rows, tokens.tolist(), active, strict=True):
            if still:
                answers[row].append(token)
        going = going & ~torch.isin(tokens, ends)
        left = int(going.sum())
        report(sum(active) - left, sum(active))
        if left == 0 or written == max_new_tokens:
            break
        if left <= WORTH_DROPPING * len(rows):
            keep = going.nonzero().squeeze(1)
            rows = [rows[i] for i in keep.tolist()]
            tokens, lengths, going = tokens[keep], lengths[keep], going[keep]
            cache.keep_rows(keep)
        last = target.states(tokens[:, None], cache=cache, lengths=lengths).last_hidden[:, 0]
        lengths = lengths + 1
    report(int(going.sum()), 0)


def right_padded(sequences: Sequence[Sequence[int]]) -> Tensor:
    """``[B, T]`` token ids, zeros behind the end: a causal model's real tokens never see them."""
    longest = max(len(s) for s in sequences)
    return torch.tensor([[*s, *[0] * (longest - len(s))] for s in sequences])


@dataclass(frozen=True)
class AnswerSettings:
    """What decides an answer besides the target: part of the cache's key."""

    max_new_tokens: int
    batch_size: int


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

    Assistant messages in the records are dropped. Answers are kept under ``cache_dir`` by what determines
    them (target, recipe, prompts, settings), and read from there the next time. Raises ``ValueError`` for a
    prompt that leaves no room for its answer in the target's context.
    """
    key = _cache_key(target, tokenizer, conversations, settings, end_ids)
    path = cache_dir / "answers" / f"{key}.jsonl" if cache_dir else None
    if path and path.is_file():
        return [_example(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    dialogs = [_Dialog(c) for c in conversations]
    examples: list[Example] = []
    total = sum(d.turns for d in dialogs)
    with tqdm(total=total, unit="answer", desc=label) as bar:
        written = 0

        def report(finished: int, tokens: int) -> None:
            nonlocal written
            written += tokens
            bar.set_postfix_str(f"{written / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s", refresh=False)
            bar.update(finished)

        while waiting := [d for d in dialogs if d.advance()]:
            prompts = [prompt_ids(tokenizer, d.history) for d in waiting]
            for dialog, prompt in zip(waiting, prompts, strict=True):
                _check_room(dialog.conversation, len(prompt), settings.max_new_tokens, target.context_length)
            answers = greedy_answers(
                target,
                prompts,
                end_ids=end_ids,
                max_new_tokens=settings.max_new_tokens,
                batch_size=settings.batch_size,
                report=report,
            )
            for dialog, prompt, answer in zip(waiting, prompts, answers, strict=True):
                text = tokenizer.decode([t for t in answer if t not in end_ids], skip_special_tokens=True)
                examples.append(dialog.answered(prompt, answer, text))
    if path:
        _write_examples(path, examples)
    return examples


class _Dialog:
    """A conversation that is being answered: its history so far and the user turns still to come."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.history: list[Message] = []
        self._coming = [m for m in conversation.messages if m.role != "assistant"]
        self.turns = sum(m.role == "user" for m in self._coming)

    def advance(self) -> bool:
        """Move the next user turn (and what stands before it) into the history; False if there is none."""
        if not any(m.role == "user" for m in self._coming):
            return False
        while True:
            message = self._coming.pop(0)
            self.history.append(message)
            if message.role == "user":
                return True

    def answered(self, prompt: Sequence[int], answer: Sequence[int], text: str) -> Example:
        turn = len(self.history)
        self.history.append(Message("assistant", text))
        return Example(f"{self.conversation.id}/{turn}", self.conversation.category, tuple(prompt), tuple(answer))


def _check_room(conversation: Conversation, prompt: int, answer: int, context: int) -> None:
    if prompt + answer > context:
        raise ValueError(
            f"{conversation.source}: the prompt has {prompt} tokens, which with {answer} new ones exceeds the "
            f"target's context of {context}: shorten it or lower max_new_tokens"
        )


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
    asked = [settings.max_new_tokens, settings.batch_size, sorted(end_ids)]
    digest.update(json.dumps([model, asked, tokenizer.chat_template]).encode())
    for conversation in conversations:
        rendered = prompt_ids(tokenizer, conversation.messages)
        digest.update(json.dumps([conversation.id, conversation.category, rendered]).encode())
    return digest.hexdigest()[:32]


def _example(record: dict[str, Any]) -> Example:
    return Example(record["id"], record["category"], tuple(record["prompt"]), tuple(record["answer"]))


def _write_examples(path: Path, examples: Sequence[Example]) -> None:
    lines = (json.dumps({"id": e.id, "category": e.category, "prompt": e.prompt, "answer": e.answer}) for e in examples)
    write_text_atomically(path, "\n".join(lines) + "\n")
