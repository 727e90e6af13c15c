"""Answers written by the low-bit target itself, in batches with a cache.

On-policy text is most of what a draft head gains from knowing the served model, so the answers come from
the same simulated target that supplies states and logits. Answers are kept as token ids; only the history
of a further turn is rendered from text, as a server would.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from bitdraft.data.chat import Example, prompt_ids
from bitdraft.data.sources import Conversation, Message
from bitdraft.quant.attention.kv_cache import WORTH_DROPPING, SlotCache
from bitdraft.quant.files import write_text_atomically
from bitdraft.quant.target import LowBitTarget

Report = Callable[[int, int], None]
"""Called with (prompts finished, tokens written) since the last call."""
FollowUp = Callable[[int, list[int]], Sequence[int] | None]
"""Called with a prompt's index and its finished answer; returns a further prompt to answer, if there is one."""


def greedy_answers(
    target: LowBitTarget,
    prompts: Sequence[Sequence[int]],
    *,
    end_ids: set[int],
    max_new_tokens: int,
    batch_size: int,
    report: Report = lambda prompts, tokens: None,
    follow_up: FollowUp = lambda index, answer: None,
) -> list[list[int]]:
    """The target's greedy continuation of every prompt, the end-of-turn token included, in the given order.

    The batch stays full: rows whose answer ended leave together and waiting prompts take their place, longest
    first. ``follow_up`` is called with every finished answer; the prompt it returns is answered too, and its
    index is the next free one.
    """
    asked, answers = list(prompts), [list[int]() for _ in prompts]
    waiting = deque(sorted(range(len(asked)), key=lambda i: -len(asked[i])))
    ends = torch.tensor(sorted(end_ids), device=target.device)
    rows: _Rows | None = None
    while waiting or rows:
        if rows is None or (waiting and rows.count <= WORTH_DROPPING * batch_size):
            free = batch_size - (rows.count if rows else 0)
            chosen = [waiting.popleft() for _ in range(min(free, len(waiting)))]
            admitted = _prefilled(target, chosen, [asked[i] for i in chosen], max_new_tokens)
            rows = rows.joined(admitted) if rows else admitted
        tokens = target.logits(rows.last).max(-1).indices  # [B]
        going = rows.going & ~torch.isin(tokens, ends)
        new = tokens.tolist()
        for row in rows.going.nonzero().squeeze(1).tolist():
            answer = answers[rows.indices[row]]
            answer.append(new[row])
            going[row] &= len(answer) < max_new_tokens
        ended = (rows.going & ~going).nonzero().squeeze(1).tolist()
        report(len(ended), int(rows.going.sum()))
        for index in (rows.indices[row] for row in ended):
            further = follow_up(index, answers[index])
            if further is not None:
                waiting.append(len(asked))
                asked.append(further)
                answers.append([])
        rows.going = going
        if int(going.sum()) <= WORTH_DROPPING * rows.count:
            keep = going.nonzero().squeeze(1)
            rows, tokens = rows.kept(keep), tokens[keep]
        if rows is not None:
            rows.advance(target, tokens)
    return answers


@dataclass
class _Rows:
    """The sequences that are being answered."""

    indices: list[int]  # [B] which prompt each row answers
    lengths: Tensor  # [B] tokens in the cache
    last: Tensor  # [B, H] the target's hidden state at the newest token
    going: Tensor  # [B] bool: rows whose answer ended ride along where they are until enough have
    cache: SlotCache

    @property
    def count(self) -> int:
        return len(self.indices)

    def joined(self, other: "_Rows") -> "_Rows":
        self.cache.join(other.cache)
        return _Rows(
            self.indices + other.indices,
            torch.cat([self.lengths, other.lengths]),
            torch.cat([self.last, other.last]),
            torch.cat([self.going, other.going]),
            self.cache,
        )

    def kept(self, rows: Tensor) -> "_Rows | None":
        if len(rows) == 0:
            return None
        self.cache.keep_rows(rows)
        indices = [self.indices[i] for i in rows.tolist()]
        return _Rows(indices, self.lengths[rows], self.last[rows], self.going[rows], self.cache)

    def advance(self, target: LowBitTarget, tokens: Tensor) -> None:
        self.last = target.states(tokens[:, None], cache=self.cache, lengths=self.lengths).last_hidden[:, 0]
        kept = self.going.to(self.lengths.dtype)  # [B]
        self.cache.commit(torch.zeros_like(tokens)[:, None], kept)
        self.lengths = self.lengths + kept


def _prefilled(
    target: LowBitTarget, indices: list[int], prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> _Rows:
    device = target.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)  # [B]
    cache = target.new_cache(int(lengths.max()) + max_new_tokens)
    states = target.prefill(right_padded(prompts).to(device), lengths, cache=cache)
    last = states.last_hidden[torch.arange(len(indices), device=device), lengths - 1]  # [B, H]
    return _Rows(indices, lengths, last, torch.ones_like(lengths, dtype=torch.bool), cache)


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

    Assistant messages in the records are dropped. Examples come in the order of the conversations. Answers are kept
    under ``cache_dir`` by what determines them (target, recipe, prompts, settings), and read from there the next time.
    Raises ``ValueError`` for a prompt that leaves no room for its answer in the target's context.
    """
    key = _cache_key(target, tokenizer, conversations, settings, end_ids)
    path = cache_dir / "answers" / f"{key}.jsonl" if cache_dir else None
    if path and path.is_file():
        return [_example(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    dialogs = [Dialog(c) for c in conversations]
    speakers = [d for d in dialogs if d.advance()]  # speakers[i]: whose turn prompt i is

    def next_prompt(dialog: Dialog) -> list[int]:
        prompt = prompt_ids(tokenizer, dialog.history)
        _check_room(dialog.conversation, len(prompt), settings.max_new_tokens, target.context_length)
        dialog.prompt = prompt
        return prompt

    def follow_up(index: int, answer: list[int]) -> list[int] | None:
        dialog = speakers[index]
        dialog.answered(answer, tokenizer.decode([t for t in answer if t not in end_ids], skip_special_tokens=True))
        if not dialog.advance():
            return None
        speakers.append(dialog)
        return next_prompt(dialog)

    with tqdm(total=sum(d.turns for d in dialogs), unit="answer", desc=label) as bar:
        written = 0

        def report(finished: int, tokens: int) -> None:
            nonlocal written
            written += tokens
            bar.set_postfix_str(f"{written / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s", refresh=False)
            bar.update(finished)

        greedy_answers(
            target,
            [next_prompt(d) for d in speakers],
            end_ids=end_ids,
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size,
            report=report,
            follow_up=follow_up,
        )
    examples = [e for d in dialogs for e in d.examples]
    if path:
        _write_examples(path, examples)
    return examples


class Dialog:
    """A conversation that is being answered: its history so far and the user turns still to come."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.history: list[Message] = []
        self.prompt: list[int] = []  # the history as token ids
        self.examples: list[Example] = []
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

    def answered(self, answer: Sequence[int], text: str) -> None:
        """Take the answer to ``prompt``: as an example, and as ``text`` into the history."""
        name = f"{self.conversation.id}/{len(self.history)}"
        self.examples.append(Example(name, self.conversation.category, tuple(self.prompt), tuple(answer)))
        self.history.append(Message("assistant", text))


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
