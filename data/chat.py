"""From conversations to token ids: what the model is asked, and what the assistant wrote.

One ``Example`` is one assistant turn: the prompt's ids as a server would send them (the rendered history
with the generation prompt) and the answer's ids. Keeping the two apart makes the loss mask exact by
construction: a token was written by the assistant if and only if it stands behind the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bitdraft.data.sources import Conversation, Message


@dataclass(frozen=True)
class Example:
    """One assistant turn. ``answer`` ends with the end-of-turn token unless it was cut by a length limit."""

    id: str
    category: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of the rendered history, ending where the assistant's answer begins."""
    return _tokenize(tokenizer, _render(tokenizer, messages, generation_prompt=True))


def conversation_ids(tokenizer: Any, conversation: Conversation) -> list[int]:
    """Token ids of a whole record; one that ends with a question ends where the answer begins."""
    messages = conversation.messages
    asks = messages[-1].role != "assistant"
    return _tokenize(tokenizer, _render(tokenizer, messages, generation_prompt=asks))


def written_examples(tokenizer: Any, conversation: Conversation, end_ids: set[int]) -> list[Example]:
    """The assistant turns that the record already holds, one example each.

    Raises ``ValueError`` naming the record if it has no assistant turn, or if the template renders the
    history differently once the answer is known (templates that drop earlier thinking do).
    """
    examples = []
    messages = conversation.messages
    for turn, message in enumerate(messages):
        if message.role != "assistant":
            continue
        asked = _render(tokenizer, messages[:turn], generation_prompt=True)
        answered = _render(tokenizer, messages[: turn + 1], generation_prompt=False)
        if not answered.startswith(asked):
            raise ValueError(
                f"{conversation.source}: the chat template rewrites the history once turn {turn + 1} is "
                "answered, so the assistant's tokens cannot be told apart"
            )
        answer = _tokenize(tokenizer, answered[len(asked) :])
        ends = [i for i, token in enumerate(answer) if token in end_ids]
        if ends:  # what a template prints behind the end-of-turn token was not written by the assistant
            answer = answer[: ends[-1] + 1]
        examples.append(
            Example(
                f"{conversation.id}/{turn}", conversation.category, tuple(_tokenize(tokenizer, asked)), tuple(answer)
            )
        )
    if not examples:
        raise ValueError(
            f"{conversation.source}: the conversation has no assistant turn; let the target write one "
            "(--answers.source target)"
        )
    return examples


def end_of_turn_ids(target_model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end an answer: the generation config's, else the tokenizer's."""
    ids = getattr(getattr(target_model, "generation_config", None), "eos_token_id", None)
    if ids is None:
        ids = tokenizer.eos_token_id
    return set(ids) if isinstance(ids, list) else {int(ids)}


def _render(tokenizer: Any, messages: Sequence[Message], *, generation_prompt: bool) -> str:
    return str(
        tokenizer.apply_chat_template(
            [m.as_dict() for m in messages], tokenize=False, add_generation_prompt=generation_prompt
        )
    )


def _tokenize(tokenizer: Any, text: str) -> list[int]:
    # The template has already written every special token.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
