"""Held-out prompts as they are decoded: dialogs, of which the drafted run itself writes the assistant's part."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bitdraft.data.chat import Example, as_message, prompt_ids
from bitdraft.data.conversation import Conversation
from bitdraft.data.dialogs import Dialog


@dataclass(frozen=True)
class PromptSet:
    """Named conversations; the user's messages are asked one after the other, what assistants said is dropped."""

    name: str
    conversations: tuple[Conversation, ...]

    @property
    def ids(self) -> list[str]:
        return [c.id for c in self.conversations]

    def of_category(self, names: Sequence[str]) -> "PromptSet":
        """Only these categories; ``ValueError`` for one without prompts."""
        for name in names:
            if all(c.category != name for c in self.conversations):
                known = ", ".join(sorted({c.category for c in self.conversations if c.category})) or "none"
                raise ValueError(f"{self.name} has no prompt of category {name!r}: it has {known}")
        return PromptSet(self.name, tuple(c for c in self.conversations if c.category in names))

    def first(self, count: int) -> "PromptSet":
        return PromptSet(self.name, self.conversations[:count])


@dataclass(frozen=True)
class Turn:
    """One round of questions: which dialogs ask, and what is sent."""

    rows: list[int]
    """Indices into the set's conversations."""
    prompts: list[list[int]]


class Dialogs:
    """All conversations of a set, while they are answered round by round."""

    def __init__(
        self,
        prompts: PromptSet,
        tokenizer: Any,
        context_length: int,
        new_tokens: int,
        thinking: bool | None = None,
    ) -> None:
        """``new_tokens``: room that every answer needs in the context, drafts included; ``thinking``: the template's
        mode, None for its own default."""
        self.thinking = thinking
        self.tokenizer, self.context_length, self.new_tokens = tokenizer, context_length, new_tokens
        self._dialogs = [Dialog(c) for c in prompts.conversations]

    def next_turn(self) -> Turn | None:
        """The next question of every dialog that has one; ``ValueError`` for one that leaves no room for its answer."""
        rows = [i for i, dialog in enumerate(self._dialogs) if dialog.advance()]
        if not rows:
            return None
        prompts = []
        for dialog in (self._dialogs[i] for i in rows):
            place = dialog.conversation.source
            tokens = prompt_ids(self.tokenizer, dialog.history, thinking=self.thinking, place=place)
            if len(tokens) + self.new_tokens > self.context_length:
                raise ValueError(
                    f"{dialog.conversation.source}: the prompt has {len(tokens)} tokens, which with "
                    f"{self.new_tokens} new ones exceeds the target's context of {self.context_length}: "
                    "shorten it or lower --max-new-tokens"
                )
            dialog.prompt = tokens
            prompts.append(tokens)
        return Turn(rows, prompts)

    def answered(self, turn: Turn, answers: Sequence[Sequence[int]], end_ids: set[int]) -> None:
        """Take the answers of a turn into the histories."""
        for row, answer in zip(turn.rows, answers, strict=True):
            self._dialogs[row].answered(answer, as_message(self.tokenizer, answer, end_ids))

    def examples(self) -> list[list[Example]]:
        """Every conversation's answered turns."""
        return [dialog.examples for dialog in self._dialogs]
