"""From conversations to token ids: exactly the assistant's words are marked as the assistant's."""

from types import SimpleNamespace
from typing import Any

import pytest
from tiny import tiny_tokenizer

from bitdraft.data.batches import make_batch
from bitdraft.data.chat import end_of_turn_ids, prompt_ids, written_examples
from bitdraft.data.conversation import Conversation, Message

END = 258


def conversation(*turns: tuple[str, str]) -> Conversation:
    return Conversation("c", "chat", tuple(Message(role, content) for role, content in turns), "file.jsonl, line 4")


DIALOG = conversation(
    ("system", "Be brief."),
    ("user", "What is 2 + 2?"),
    ("assistant", " It is four — 🙂\n"),
    ("user", "And 3 + 3?"),
    ("assistant", "Six."),
    ("user", "Thanks!"),
)


def test_a_prompt_ends_where_the_answer_begins(tokenizer: Any) -> None:
    ids = prompt_ids(tokenizer, DIALOG.messages[:2])
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 3, "special tokens are those of the template and no more"


def test_every_assistant_turn_is_an_example_of_exactly_its_words(tokenizer: Any) -> None:
    first, second = written_examples(tokenizer, DIALOG, {END})
    assert (first.id, second.id) == ("c/2", "c/4")
    assert tokenizer.decode(first.answer) == " It is four — 🙂\n<|im_end|>"
    assert tokenizer.decode(second.answer) == "Six.<|im_end|>"
    assert list(first.prompt) == prompt_ids(tokenizer, DIALOG.messages[:2])
    assert list(second.prompt) == prompt_ids(tokenizer, DIALOG.messages[:4])
    assert " It is four — 🙂\n<|im_end|>" in tokenizer.decode(second.prompt)


def test_the_mask_marks_the_assistant_s_tokens_and_no_other(tokenizer: Any) -> None:
    examples = written_examples(tokenizer, DIALOG, {END})
    batch = make_batch(examples)
    for row, said in enumerate([" It is four — 🙂\n", "Six."]):
        marked = batch.tokens[row][batch.written()[row]]
        assert tokenizer.decode(marked) == f"{said}<|im_end|>"
        rest = batch.tokens[row][: batch.lengths[row]][~batch.written()[row][: batch.lengths[row]]]
        assert tokenizer.decode(rest).endswith("<|im_start|>assistant\n")


def test_what_the_template_prints_behind_the_turn_is_nobody_s(tokenizer: Any) -> None:
    """The template ends every turn with a line break that no model writes."""
    (example,) = written_examples(tokenizer, conversation(("user", "Hi"), ("assistant", "Yo\n")), {END})
    assert tokenizer.decode(example.answer) == "Yo\n<|im_end|>"


def test_an_answer_that_is_empty_is_its_end(tokenizer: Any) -> None:
    (example,) = written_examples(tokenizer, conversation(("user", "Hi"), ("assistant", "")), {END})
    assert example.answer == (END,)


@pytest.mark.parametrize("turns", [[("user", "Hi")], [("system", "Be brief."), ("user", "Hi"), ("user", "So?")]])
def test_a_conversation_without_an_assistant_turn_names_its_line(tokenizer: Any, turns: list[tuple[str, str]]) -> None:
    with pytest.raises(ValueError, match="no assistant turn") as caught:
        written_examples(tokenizer, conversation(*turns), {END})
    assert str(caught.value).startswith("file.jsonl, line 4: ")


def test_a_template_that_rewrites_the_past_is_refused() -> None:
    """As templates do that drop earlier thinking: the tokens behind the prompt are then not what was written."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] if loop.last else '…' }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(ValueError, match=r"line 4: the chat template rewrites the history once turn 3 is answered"):
        written_examples(tokenizer, DIALOG, {END})


@pytest.mark.parametrize(("configured", "expected"), [(258, {258}), ([258, 256], {258, 256}), (None, {END})])
def test_the_end_of_a_turn_is_the_generation_config_s_else_the_tokenizer_s(
    tokenizer: Any, configured: object, expected: set[int]
) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=configured))
    assert end_of_turn_ids(model, tokenizer) == expected
    assert end_of_turn_ids(SimpleNamespace(), tokenizer) == {END}


def test_a_target_without_an_end_of_turn_is_refused() -> None:
    with pytest.raises(ValueError, match=r"neither the target's generation_config\.json nor its tokenizer names"):
        end_of_turn_ids(SimpleNamespace(), SimpleNamespace(eos_token_id=None))
