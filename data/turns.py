"""Where in a rendered conversation the assistant's last turn stands.

A turn is rendered twice: the history with the generation prompt, as a server sends it, and the same with the answer
behind it. Where the template marks what the assistant generates, the marks say where the answer lies; else it is what
stands behind the prompt, up to the token by which the target ends a turn. The trap: templates render the past
otherwise once it is past (thinking is dropped, a system text moves), so only one turn is ever looked for, the last.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from bitdraft.data.conversation import Message

_MARK = re.compile(r"\{%-?\+?\s*generation\s*[-+]?%\}")
_NO_END = "the chat template ends an assistant's turn by none of the tokens that end the target's answers"


@dataclass(frozen=True)
class Turn:
    """One assistant turn as text: what a server sends, and what the assistant writes behind it."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Rendering:
    """How a tokenizer's chat template is to be used; ``place`` names the record in messages."""

    tokenizer: Any
    place: str
    thinking: bool | None = None
    """Given to the template as ``enable_thinking``; None leaves its own default."""
    keep_thinking: bool = True
    """Whether the thinking that records hold is rendered where the template renders it, or dropped."""

    @property
    def template(self) -> str:
        """Raises ``ValueError`` if there is none."""
        if not self.tokenizer.chat_template:
            name = getattr(self.tokenizer, "name_or_path", "") or "the target"
            raise ValueError(
                f"the tokenizer of {name} has no chat template: put the template of its instruction-tuned sibling "
                "beside its files as chat_template.jinja"
            )
        return str(self.tokenizer.get_chat_template())

    def render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """The text of the messages. Raises ``ValueError`` for messages that the template does not take."""
        return self._render(messages, generation_prompt=generation_prompt)[0]

    def marked(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The text of the messages and the spans of it that the template marks as generated."""
        return self._render(messages, generation_prompt=False)

    @property
    def keeps(self) -> bool:
        """Whether thinking is rendered at all: none follows a prompt that says not to think."""
        return self.keep_thinking and self.thinking is not False

    @property
    def has_marks(self) -> bool:
        """Whether the template marks what the assistant generates."""
        return bool(_MARK.search(self.template))

    def _render(self, messages: Sequence[Message], *, generation_prompt: bool) -> tuple[str, list[tuple[int, int]]]:
        switches: Mapping[str, Any] = {} if self.thinking is None else {"enable_thinking": self.thinking}
        try:
            texts, spans = render_jinja_template(
                [[(m if self.keeps else replace(m, thinking="")).as_dict() for m in messages]],
                chat_template=self.template,
                add_generation_prompt=generation_prompt,
                return_assistant_tokens_mask=self.has_marks,
                **{**self.tokenizer.special_tokens_map, **switches},
            )
        except TemplateError as error:
            roles = ", ".join(m.role for m in messages)
            raise ValueError(f"{self.place}: the chat template refuses these messages ({roles}): {error}") from error
        return texts[0], [(int(start), int(end)) for start, end in spans[0]] if spans else []


def last_turn(rendering: Rendering, messages: Sequence[Message], ends: Sequence[str]) -> Turn:
    """The turn that the last of ``messages`` is, an assistant's. ``ends``: texts of the tokens that end an answer.

    Raises ``ValueError`` naming the record where it cannot be told what the assistant wrote.
    """
    asked = rendering.render(messages[:-1], generation_prompt=True)
    turn = _located(rendering, asked, messages, ends)
    thinking = messages[-1].thinking.strip()
    spoken = messages[-1].content.count(thinking)  # what was thought may be said once more
    if not thinking or not rendering.keeps or turn.answer.count(thinking) > spoken:
        return turn
    # The template knows no thinking: such models write it as the head of their answer.
    inline = Message("assistant", f"<think>\n{messages[-1].thinking}\n</think>\n\n{messages[-1].content}")
    turn = _located(rendering, asked, [*messages[:-1], inline], ends)
    if turn.answer.count(thinking) <= spoken:
        raise ValueError(
            f"{rendering.place}: the chat template does not render the answer's thinking: leave it out "
            "(keep_thinking=False)"
        )
    return turn


def _located(rendering: Rendering, asked: str, messages: Sequence[Message], ends: Sequence[str]) -> Turn:
    text, spans = rendering.marked(messages)
    if rendering.has_marks:
        return _by_marks(rendering, asked, text, spans, ends)
    begin = len(asked) if text.startswith(asked) else _begin_behind(rendering, asked, text, messages)
    return Turn(asked, _until_the_end(rendering, text[begin:], messages[-1].content, ends))


def _by_marks(
    rendering: Rendering, asked: str, text: str, spans: Sequence[tuple[int, int]], ends: Sequence[str]
) -> Turn:
    same = text.startswith(asked)
    behind = [(max(start, len(asked)), end) for start, end in spans if end > len(asked)] if same else spans[-1:]
    if not behind:
        raise ValueError(f"{rendering.place}: the chat template marks nothing of the last turn as generated")
    if any(text[end:start].strip() for (_, end), (start, _) in pairwise(behind)):
        raise ValueError(f"{rendering.place}: the chat template marks a turn as generated only in pieces")
    start, end = behind[0][0], behind[-1][1]
    closing = next((e for e in ends if text.startswith(e, end)), "")  # marks may leave out the token that ends a turn
    answer = text[start : end + len(closing)]
    last = max(answer.rfind(e) + len(e) if e in answer else -1 for e in ends) if ends else -1
    if last >= 0 and not answer[last:].strip():  # or hold the line break that follows it
        answer = answer[:last]
    return Turn(text[:start] if same else asked, answer)


def _begin_behind(rendering: Rendering, asked: str, text: str, messages: Sequence[Message]) -> int:
    """Where the answer begins in a text whose past is rendered otherwise than in ``asked``.

    The last message and the generation prompt must still stand in it as they were asked; what is sent is ``asked``.
    """
    question, content = messages[-2].content.strip() if len(messages) > 1 else "", messages[-1].content.strip()
    tail = asked[asked.rfind(question) :] if question and question in asked else ""
    found = text.rfind(tail, 0, text.rfind(content)) if tail and content in text else -1
    if found < 0:
        raise ValueError(
            f"{rendering.place}: the chat template rewrites the history once turn {len(messages)} is "
            "answered, so the assistant's tokens cannot be told apart"
        )
    return found + len(tail)


def _until_the_end(rendering: Rendering, answer: str, content: str, ends: Sequence[str]) -> str:
    """Without what a template prints behind the end of the turn: that was not written by the assistant."""
    last = max((answer.rfind(e) for e in ends), default=-1)
    if last < 0:
        raise ValueError(f"{rendering.place}: {_NO_END} ({', '.join(ends) or 'none'})")
    said = answer.rfind(content.strip(), 0, last)
    behind = max(said, 0) + len(content.strip()) if said >= 0 else last
    first, end = min((at, e) for e in ends if (at := answer.find(e, behind)) >= 0)
    return answer[: first + len(end)]
