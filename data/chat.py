"""From conversations to token ids: what the model is asked, and what the assistant wrote.

One ``Example`` is one assistant turn: the prompt's ids as a server would send them (the rendered history
with the generation prompt) and the answer's ids. Keeping the two apart makes the loss mask exact by
construction: a token was written by the assistant if and only if it stands behind the prompt. Both are tokenized apart,
because a server's prompt ends there whatever follows (docs/data.md).
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, Literal

from bitdraft.data.conversation import Conversation, Message, split_thinking
from bitdraft.data.turns import Rendering, last_turn

_CHANNEL = re.compile(r"<\|channel\|>[^<]*<\|message\|>(.*?)(?=<\|end\|>|<\|start\|>|<\|channel\|>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Example:
    """One assistant turn. ``answer`` ends with the end-of-turn token unless it was cut by a length limit."""

    id: str
    category: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    asked: str = ""
    """``Conversation.key`` of the record that it is a turn of."""

    @cached_property
    def key(self) -> str:
        """Digest of its tokens: what decides its place in an epoch, whatever file it stands in."""
        return blake2b(json.dumps([self.prompt, self.answer]).encode(), digest_size=16).hexdigest()


def prompt_ids(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    thinking: bool | None = None,
    keep_thinking: bool = True,
    place: str = "a conversation",
) -> list[int]:
    """Token ids of the rendered history, ending where the assistant's answer begins.

    ``thinking`` is the template's ``enable_thinking``; None leaves its default. ``keep_thinking=False`` drops the
    thinking that the messages hold. Raises ``ValueError`` beginning with ``place`` for messages that the template does
    not take, and for a tokenizer without one.
    """
    rendering = Rendering(tokenizer, place, thinking, keep_thinking)
    return _tokenize(tokenizer, rendering.render(messages, generation_prompt=True))


def conversation_ids(
    tokenizer: Any, conversation: Conversation, *, thinking: bool | None = None, keep_thinking: bool = True
) -> list[int]:
    """Token ids of a whole record; one that ends with a question ends where the answer begins."""
    messages = conversation.messages
    rendering = Rendering(tokenizer, conversation.source, thinking, keep_thinking)
    return _tokenize(tokenizer, rendering.render(messages, generation_prompt=messages[-1].role != "assistant"))


def written_examples(
    tokenizer: Any,
    conversation: Conversation,
    end_ids: set[int],
    *,
    thinking: bool | None = None,
    keep_thinking: bool = True,
    vocab_size: int | None = None,
) -> list[Example]:
    """The assistant turns that the record already holds, one example each; prompts as ``prompt_ids`` has them.

    An answer is the ids that the record holds of it, else what the template renders. Without a question in the record,
    before its first user message, an assistant's message is history and no example. ``vocab_size``: the target's,
    which recorded ids must fit; by default the tokenizer's. ``thinking=False`` drops
    thinking from rendered answers too: none follows a prompt that says not to think.

    Raises ``ValueError`` naming the record if it has no assistant turn, or if it cannot be told which tokens of a turn
    are the assistant's.
    """
    messages = conversation.messages
    rendering = Rendering(tokenizer, conversation.source, thinking, keep_thinking)
    ends = [tokenizer.convert_ids_to_tokens(token) for token in sorted(end_ids)]
    first = next((i for i, m in enumerate(messages) if m.role == "user"), len(messages))
    examples = []
    written = [turn for turn, message in enumerate(messages) if message.role == "assistant"]
    for number, turn in enumerate(written):
        if turn < first:
            continue
        if conversation.answers:
            prompt = rendering.render(messages[:turn], generation_prompt=True)
            answer = list(_recorded(conversation, number, vocab_size or len(tokenizer)))
        else:
            located = last_turn(rendering, messages[: turn + 1], ends)
            prompt, answer = located.prompt, _tokenize(tokenizer, located.answer)
        if not answer:
            raise ValueError(f"{conversation.source}: message {turn + 1} renders no token that the assistant wrote")
        name, ids = f"{conversation.id}/{turn}", tuple(_tokenize(tokenizer, prompt))
        examples.append(Example(name, conversation.category, ids, tuple(answer), conversation.key))
    if not examples:
        raise ValueError(
            f"{conversation.source}: the conversation has no assistant turn that answers a user; let the target write "
            "one (--answers.source target)"
        )
    return examples


def as_message(tokenizer: Any, answer: Sequence[int], end_ids: set[int]) -> Message:
    """What a target wrote, as a message for the history of the next turn: without its end, its thinking apart.

    Thinking is what stands in ``<think>…</think>`` at the head, opened by the answer or by its prompt, or in harmony's
    channels other than the last.
    """
    written = [token for token in answer if token not in end_ids]
    parts = _CHANNEL.findall(tokenizer.decode(written, skip_special_tokens=False))
    if parts:
        return Message("assistant", parts[-1], "\n\n".join(parts[:-1]))
    text = str(tokenizer.decode(written, skip_special_tokens=True))
    opened = "" if "<think>" in text or "</think>" not in text else "<think>"
    thinking, content = split_thinking(opened + text)
    return Message("assistant", content, thinking)


def shown(tokenizer: Any, example: Example) -> str:
    """The text that the target sees, for people: what the assistant wrote stands between ⟦ and ⟧."""
    prompt, answer = (tokenizer.decode(ids, skip_special_tokens=False) for ids in (example.prompt, example.answer))
    return f"{prompt}⟦{answer}⟧"


def thinking_mode(choice: Literal["on", "off"] | None) -> bool | None:
    """What ``prompt_ids`` takes as ``thinking``, from a command line's words."""
    return None if choice is None else choice == "on"


def end_of_turn_ids(target_model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end an answer: the generation config's, else the tokenizer's. Raises ``ValueError`` without any."""
    ids = getattr(getattr(target_model, "generation_config", None), "eos_token_id", None)
    if ids is None:
        ids = tokenizer.eos_token_id
    if ids is None:
        raise ValueError("neither the target's generation_config.json nor its tokenizer names an eos_token: add one")
    return set(ids) if isinstance(ids, list) else {int(ids)}


def _recorded(conversation: Conversation, number: int, vocab_size: int) -> tuple[int, ...]:
    answer = conversation.answers[number]
    if max(answer) >= vocab_size:
        raise ValueError(
            f"{conversation.source}: answer {number + 1} has the token {max(answer)}, but the vocabulary has only "
            f"{vocab_size}: another target wrote it"
        )
    return answer


def _tokenize(tokenizer: Any, text: str) -> list[int]:
    # The template has already written every special token.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
