"""Conversations answered by a target, turn by turn: what is asked, what was answered, and what was cut.

Answers are kept as token ids; only the history of a further turn is rendered from text, as a server would.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from bitdraft.data.chat import Example, as_message, prompt_ids
from bitdraft.data.conversation import Conversation, Message
from bitdraft.data.generation import Choose, decoded_answers, likeliest
from bitdraft.quant.target import LowBitTarget


class Sampler(Protocol):
    """How tokens are chosen (``speculators.sampling.Sampling``)."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    def choose(self, logits: Tensor, uniforms: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class AnswerSettings:
    """What decides an answer besides the target."""

    max_new_tokens: int
    batch_size: int
    sampling: Sampler | None = None
    """``None``, or a temperature of 0, is greedy."""
    seed: int = 0
    """Of sampled answers."""
    thinking: bool | None = None
    """Switch of the template's thinking mode; ``None`` leaves the template's own default."""

    @property
    def is_greedy(self) -> bool:
        return self.sampling is None or self.sampling.temperature == 0

    @property
    def choose(self) -> Choose:
        return likeliest if self.sampling is None or self.is_greedy else self.sampling.choose


class Dialog:
    """A conversation that is being answered: its history so far and the user turns still to come."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.history: list[Message] = []
        self.prompt: list[int] = []  # the history as token ids
        self.examples: list[Example] = []
        self.ended_by_itself: list[bool] = []  # of each answer, where the one who answers says so
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

    def step_back(self) -> None:
        """Take back the turn that was moved last."""
        kept = max((i + 1 for i, m in enumerate(self.history) if m.role == "assistant"), default=0)
        self._coming[:0] = self.history[kept:]
        del self.history[kept:]

    def answered(self, answer: Sequence[int], said: Message) -> None:
        """Take the answer to ``prompt``: as an example, and as ``said`` into the history."""
        name = f"{self.conversation.id}/{len(self.history)}"
        self.examples.append(
            Example(name, self.conversation.category, tuple(self.prompt), tuple(answer), self.conversation.key)
        )
        self.history.append(said)

    def unasked(self) -> list[Message]:
        """What the conversation holds behind its last answered turn."""
        return list(self._coming)


def answer_dialogs(
    target: LowBitTarget,
    tokenizer: Any,
    conversations: Sequence[Conversation],
    settings: AnswerSettings,
    *,
    end_ids: set[int],
    label: str,
    finished: Callable[[Dialog], None] = lambda dialog: None,
    skip_long: bool = False,
) -> list[Dialog]:
    """Every user turn of every conversation, answered by the target; ``finished`` is called with each that is done.

    Assistant messages in the records are dropped. Raises ``ValueError`` for a prompt that leaves no room for its answer
    in the target's context; with ``skip_long`` that turn and what follows it stay unanswered.
    """
    dialogs = [Dialog(c) for c in conversations]
    speakers: list[Dialog] = []  # speakers[i]: whose turn prompt i is
    bar = AnswerBar(sum(d.turns for d in dialogs), label)

    def next_prompt(dialog: Dialog) -> list[int] | None:
        if dialog.advance():
            place = dialog.conversation.source
            prompt = prompt_ids(tokenizer, dialog.history, thinking=settings.thinking, place=place)
            if not skip_long:
                check_room(dialog.conversation, len(prompt), settings.max_new_tokens, target.context_length)
            if len(prompt) + settings.max_new_tokens <= target.context_length:
                dialog.prompt = prompt
                speakers.append(dialog)
                return prompt
            dialog.step_back()
        bar.skip(dialog.turns - len(dialog.examples))
        finished(dialog)
        return None

    def follow_up(index: int, answer: list[int]) -> list[int] | None:
        dialog = speakers[index]
        dialog.ended_by_itself.append(bool(answer) and answer[-1] in end_ids)
        dialog.answered(answer, as_message(tokenizer, answer, end_ids))
        return next_prompt(dialog)

    def uniforms(index: int) -> Tensor:
        dialog = speakers[index]
        return torch.from_numpy(
            uniform_stream(settings.seed, dialog.conversation.key, len(dialog.examples), settings.max_new_tokens)
        )

    with bar:
        prompts = [prompt for d in dialogs if (prompt := next_prompt(d)) is not None]
        decoded_answers(
            target,
            prompts,
            end_ids=end_ids,
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size,
            choose=settings.choose,
            uniforms=None if settings.is_greedy else uniforms,
            report=bar.report,
            follow_up=follow_up,
        )
    return dialogs


def check_room(conversation: Conversation, prompt: int, answer: int, context: int) -> None:
    """``ValueError`` if a prompt of so many tokens leaves no room for its answer."""
    if prompt + answer > context:
        raise ValueError(
            f"{conversation.source}: the prompt has {prompt} tokens, which with {answer} new ones exceeds the "
            f"target's context of {context}: shorten it, lower max_new_tokens or leave it out (--skip-long)"
        )


def uniform_stream(seed: int, key: str, turn: int, count: int) -> np.ndarray:
    """``[count]`` fp64 numbers in [0, 1): always the same for one turn of one conversation under one seed.

    Philox (Salmon et al., SC 2011) under a key of its own for every turn; numpy promises its raw stream to stay.
    """
    name = json.dumps([seed, key, turn]).encode()
    philox = np.random.Philox(key=int.from_bytes(blake2b(name, digest_size=16).digest(), "little"))
    return (philox.random_raw(count) >> np.uint64(11)) * 2.0**-53


def record_seed(seed: int, key: str, turn: int) -> int:
    """A seed of 31 bits for one turn, for a server that draws by itself."""
    return int(uniform_stream(seed, key, turn, 1)[0] * 2**31)


class AnswerBar:
    """Progress in answers, with tokens per second and the time left."""

    def __init__(self, answers: int, label: str) -> None:
        self.bar = tqdm(total=answers, unit="answer", desc=label)
        self.wanted, self.tokens = answers, 0

    def __enter__(self) -> "AnswerBar":
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def report(self, answers: int, tokens: int) -> None:
        """So many more have been finished and written."""
        self.tokens += tokens
        self.bar.set_postfix_str(f"{self.rate:.0f} tokens/s", refresh=False)
        self.bar.update(answers)

    @property
    def rate(self) -> float:
        return self.tokens / max(float(self.bar.format_dict["elapsed"]), 1e-9)

    def skip(self, answers: int) -> None:
        """So many will not be asked for."""
        if answers:
            self.wanted -= answers
            self.bar.total = self.wanted
            self.bar.refresh()
