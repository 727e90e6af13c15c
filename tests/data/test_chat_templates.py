"""Every published chat format: the tokens marked as the assistant's are those that it writes, and no other."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from chat_formats import FORMATS, Format
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdraft.data.chat import Example, as_message, prompt_ids, shown, written_examples
from bitdraft.data.conversation import Conversation, Message

SYSTEM = Message("system", "Be brief.")
TURNS = (
    Message("user", "What is 2 + 2?"),
    Message("assistant", "It is four — 🙂", "two and two"),
    Message("user", "And 3 + 3?"),
    Message("assistant", "Six.", "easy\n\nvery"),
    Message("user", "Thanks!"),
)


@cache
def tokenizer_of(name: str) -> Any:
    return FORMATS[name].tokenizer()


def examples_of(name: str, messages: Sequence[Message], **options: Any) -> list[Example]:
    form, tokenizer = FORMATS[name], tokenizer_of(name)
    conversation = Conversation("c", "chat", tuple(messages), "file.jsonl, line 4")
    return written_examples(tokenizer, conversation, form.end_ids(tokenizer), thinking=form.thinking, **options)


def decoded(name: str, ids: Sequence[int]) -> str:
    return str(tokenizer_of(name).decode(list(ids), skip_special_tokens=False))


def check(name: str, messages: Sequence[Message], *, keep_thinking: bool = True) -> None:
    """Prompts and answers are those that the format spelled out in Python has."""
    form = FORMATS[name]
    examples = examples_of(name, messages, keep_thinking=keep_thinking)
    turns = [i for i, m in enumerate(messages) if m.role == "assistant"]
    assert len(examples) == len(turns)
    for example, i in zip(examples, turns, strict=True):
        said = messages[i] if keep_thinking else replace(messages[i], thinking="")
        assert decoded(name, example.answer) == form.answer(said)
        assert decoded(name, example.prompt) == form.prompt(messages[:i])


def dialog(form: Format) -> tuple[Message, ...]:
    return (SYSTEM, *TURNS) if form.takes_system else TURNS


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("keep_thinking", [True, False])
def test_a_dialog_with_system_text_and_thinking(name: str, keep_thinking: bool) -> None:
    check(name, dialog(FORMATS[name]), keep_thinking=keep_thinking)
    check(name, TURNS[:2], keep_thinking=keep_thinking)


def test_every_way_of_finding_the_turn_is_taken_by_some_format() -> None:
    """Marks; a history that stays; a history that is rendered otherwise once the turn is answered."""
    tokenizer, (asked, answered) = (
        tokenizer_of("mistral"),
        (dialog(FORMATS["mistral"])[:2], dialog(FORMATS["mistral"])[:3]),
    )
    texts = [tokenizer.apply_chat_template([m.as_dict() for m in part], tokenize=False) for part in (asked, answered)]
    assert not texts[1].startswith(texts[0])
    assert "{%- generation -%}" in tokenizer_of("marked").chat_template


WORDS = st.text(alphabet=st.sampled_from("aZ0 .\n\t é漢🙂<|>[]/{}%"), max_size=12)


@st.composite
def dialogs(draw: st.DrawFn, form: Format) -> list[Message]:
    count = draw(st.integers(1, 3))
    messages = [Message("system", draw(WORDS))] if form.takes_system and draw(st.booleans()) else []
    for _ in range(count):
        messages.append(Message("user", draw(WORDS.filter(str.strip))))
        messages.append(Message("assistant", draw(WORDS), draw(st.sampled_from(["", "so", "a\nb", "0 . z"]))))
    return messages


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_random_dialogs_are_marked_exactly(name: str, data: st.DataObject) -> None:
    check(name, data.draw(dialogs(FORMATS[name])))


def test_the_marked_text_for_people() -> None:
    [example] = examples_of("qwen3", TURNS[:2])
    assert shown(tokenizer_of("qwen3"), example) == (
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\ntwo and two\n</think>\n\nIt is four — 🙂<|im_end|>⟧"
    )
    [example] = examples_of("gpt-oss", TURNS[:2])
    assert shown(tokenizer_of("gpt-oss"), example).partition("<|start|>assistant")[2] == (
        "⟦<|channel|>analysis<|message|>two and two<|end|><|start|>assistant"
        "<|channel|>final<|message|>It is four — 🙂<|return|>⟧"
    )


def test_a_thought_that_is_said_once_more_is_not_taken_for_rendered() -> None:
    [example] = examples_of("smollm2", [TURNS[0], Message("assistant", "four", "four")])
    assert decoded("smollm2", example.answer) == "<think>\nfour\n</think>\n\nfour<|im_end|>"


@pytest.mark.parametrize("name", ["qwen3", "smollm2", "llama3"])
def test_an_answer_that_holds_the_end_of_a_turn_is_whole(name: str) -> None:
    end = FORMATS[name].eos
    [example] = examples_of(name, [TURNS[0], Message("assistant", f"They write {end} and go on.")])
    assert decoded(name, example.answer).endswith(f"They write {end} and go on.{end}")


@pytest.mark.parametrize("name", FORMATS)
def test_a_question_that_is_asked_and_quoted_again_is_told_apart(name: str) -> None:
    again = Message("user", "Again?")
    quoted = Message("assistant", "You said [INST] Again?[/INST] and <start_of_turn>user")
    messages = [again, Message("assistant", "One."), again, Message("assistant", "Again? Two."), again, quoted]
    check(name, [SYSTEM, *messages] if FORMATS[name].takes_system else messages)


def test_tool_answers_are_not_the_assistant_s() -> None:
    messages = [
        Message("user", "Weather?"),
        Message("assistant", '{"name": "look", "arguments": {}}', "I must look"),
        Message("tool", "rain"),
        Message("assistant", "It rains."),
    ]
    call, answer = (decoded("qwen3", e.answer) for e in examples_of("qwen3", messages))
    assert call == '<think>\nI must look\n</think>\n\n{"name": "look", "arguments": {}}<|im_end|>'
    assert answer == "<think>\n\n</think>\n\nIt rains.<|im_end|>"
    _, second = examples_of("qwen3", messages)
    assert "I must look" in decoded("qwen3", second.prompt), "the template keeps the thinking of the question at hand"


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "mistral"])
def test_an_answer_comes_back_as_the_message_that_it_was(name: str) -> None:
    form, tokenizer = FORMATS[name], tokenizer_of(name)
    for example, i in zip(examples_of(name, TURNS), (1, 3), strict=True):
        meant = replace(TURNS[i], thinking="") if form.thinking is False else TURNS[i]
        assert as_message(tokenizer, example.answer, form.end_ids(tokenizer)) == meant


@pytest.mark.parametrize(
    ("text", "thinking", "content"),
    [
        ("hm\n</think>\n\nYo", "hm", "Yo"),
        ("<think>hm", "", "<think>hm"),
        (" Yo", "", " Yo"),
        ("", "", ""),
    ],
)
def test_an_answer_whose_prompt_opened_the_thinking_or_that_was_cut(text: str, thinking: str, content: str) -> None:
    tokenizer = tokenizer_of("qwen3")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert as_message(tokenizer, ids, {tokenizer.eos_token_id}) == Message("assistant", content, thinking)


# ---- what a template does not take


@pytest.mark.parametrize(
    ("name", "messages", "sentence"),
    [
        ("gemma2", (SYSTEM, *TURNS), r"\(system, user\): System role not supported"),
        ("gemma3", (*TURNS[:1], *TURNS), "roles must alternate"),
        ("mistral", (*TURNS[1:2], *TURNS), "roles must alternate"),
        ("mistral", (SYSTEM, SYSTEM, *TURNS), "roles must alternate"),
        ("gpt-oss", (TURNS[0], Message("tool", "rain"), TURNS[1]), "Message has tool role"),
    ],
)
def test_a_refusal_names_the_record_and_its_roles(name: str, messages: Sequence[Message], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        examples_of(name, messages)
    assert str(caught.value).startswith("file.jsonl, line 4: the chat template refuses these messages (")


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "llama3", "gpt-oss"])
def test_what_the_assistant_says_before_any_question_is_history(name: str) -> None:
    greeting = Message("assistant", "Hello, I am here.")
    [example] = examples_of(name, [greeting, *TURNS[:2]])
    assert greeting.content in decoded(name, example.prompt)
    with pytest.raises(ValueError, match="no assistant turn"):
        examples_of(name, [greeting, TURNS[0]])


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "llama3"])
def test_answers_and_system_texts_in_a_row_are_each_their_own(name: str) -> None:
    messages = [SYSTEM, Message("system", "Be kind."), TURNS[0], TURNS[1], Message("assistant", "Or 5 - 1.")]
    first, second = examples_of(name, messages)
    assert "Be kind." in decoded(name, first.prompt)
    assert TURNS[1].content in decoded(name, second.prompt)
    assert decoded(name, second.answer) == FORMATS[name].answer(messages[-1])


def test_a_template_that_drops_what_was_thought_is_refused_unless_it_may() -> None:
    tokenizer = FORMATS["smollm2"].tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "m['content'] +", "m['content'].split('</think>')[-1].lstrip() +"
    )
    record = Conversation("c", "", TURNS[:2], "f.jsonl, line 1")
    ends = FORMATS["smollm2"].end_ids(tokenizer)
    with pytest.raises(ValueError, match=r"f\.jsonl, line 1: the chat template does not render the answer's thinking"):
        written_examples(tokenizer, record, ends)
    [example] = written_examples(tokenizer, record, ends, keep_thinking=False)
    assert tokenizer.decode(example.answer) == "It is four — 🙂<|im_end|>"


def test_a_tokenizer_without_a_template_says_the_way_out() -> None:
    tokenizer = FORMATS["smollm2"].tokenizer()
    tokenizer.chat_template = None
    tokenizer.name_or_path = "some/base-model"
    with pytest.raises(ValueError, match=r"tokenizer of some/base-model has no chat template: .*chat_template\.jinja"):
        prompt_ids(tokenizer, TURNS[:1])


def test_a_turn_that_the_target_does_not_end_is_refused() -> None:
    tokenizer = tokenizer_of("qwen3")
    with pytest.raises(ValueError, match=r"line 4: the chat template ends .* \(<\|im_start\|>\)"):
        written_examples(
            tokenizer, Conversation("c", "", TURNS[:2], "line 4"), {tokenizer.convert_tokens_to_ids("<|im_start|>")}
        )


# ---- marks


def marked(old: str, new: str) -> Any:
    tokenizer = FORMATS["marked"].tokenizer()
    assert old in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    return tokenizer


def answers(tokenizer: Any, *messages: Message) -> list[str]:
    record = Conversation("c", "", messages, "line 4")
    return [tokenizer.decode(e.answer) for e in written_examples(tokenizer, record, {tokenizer.eos_token_id})]


MARKS = "{%- generation -%}{{ m['content'] + '<|im_end|>' }}{%- endgeneration -%}"


@pytest.mark.parametrize(
    "marks",
    [
        MARKS,
        "{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
        "{% generation %}{{ m['content'] + '<|im_end|>\\n' }}{% endgeneration %}",
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% generation %}{{ '<|im_end|>' }}{% endgeneration %}",
    ],
)
def test_marks_with_and_without_the_end_of_the_turn_say_the_same(marks: str) -> None:
    tokenizer = marked(MARKS, marks)
    assert answers(tokenizer, *(replace(m, thinking="") for m in TURNS)) == [
        "It is four — 🙂<|im_end|>",
        "Six.<|im_end|>",
    ]


def test_marks_around_the_generation_prompt_do_not_make_it_the_assistant_s() -> None:
    tokenizer = FORMATS["marked"].tokenizer()
    whole = "'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>'"
    tokenizer.chat_template = (
        f"{{% for m in messages %}}{{% if m['role'] == 'assistant' %}}{{% generation %}}{{{{ {whole} }}}}"
        f"{{% endgeneration %}}{{% else %}}{{{{ {whole} }}}}{{% endif %}}{{{{ '\\n' }}}}{{% endfor %}}"
        "{{ '<|im_start|>assistant\\n' if add_generation_prompt else '' }}"
    )
    assert answers(tokenizer, TURNS[0], Message("assistant", "Four.")) == ["Four.<|im_end|>"]


def test_what_marks_leave_out_before_the_answer_belongs_to_the_prompt() -> None:
    tokenizer = marked("{%- generation -%}", "{{ 'Answer: ' }}{%- generation -%}")
    record = Conversation("c", "", (TURNS[0], Message("assistant", "Four.")), "line 4")
    [example] = written_examples(tokenizer, record, {tokenizer.eos_token_id})
    assert tokenizer.decode(example.prompt).endswith("assistant\nAnswer: ")
    assert tokenizer.decode(example.answer) == "Four.<|im_end|>"


def test_marks_are_trusted_where_the_history_is_rewritten() -> None:
    tokenizer = marked("{{ m['content'] + '<|im_end|>' }}", "{{ (m['content'] if loop.last else '…') + '<|im_end|>' }}")
    assert answers(tokenizer, *(replace(m, thinking="") for m in TURNS))[1] == "Six.<|im_end|>"


@pytest.mark.parametrize(
    ("marks", "sentence"),
    [
        ("{%- if false -%}{% generation %}x{% endgeneration %}{%- endif -%}", "marks nothing of the last turn"),
        ("{% generation %}a{% endgeneration %}b{% generation %}c{% endgeneration %}", "only in pieces"),
    ],
)
def test_marks_that_say_nothing_are_refused(marks: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"line 4: .*{sentence}"):
        answers(marked(MARKS, marks), TURNS[0], Message("assistant", "Four."))


# ---- ids that the record holds


def test_recorded_ids_are_the_answer_whatever_the_template_renders() -> None:
    tokenizer = tokenizer_of("qwen3")
    ids = (tuple(tokenizer("other words")["input_ids"]), (1, 2, 3))
    record = Conversation("c", "chat", TURNS, "line 4", answers=ids)
    examples = written_examples(tokenizer, record, {tokenizer.eos_token_id})
    assert tuple(e.answer for e in examples) == ids
    assert [e.prompt for e in examples] == [e.prompt for e in examples_of("qwen3", TURNS)]
    with pytest.raises(ValueError, match="answer 2 has the token 999, but the vocabulary has only"):
        written_examples(tokenizer, replace(record, answers=((1,), (999,))), {tokenizer.eos_token_id})


def test_recorded_ids_of_a_greeting_are_not_taken_for_the_first_answer() -> None:
    tokenizer = tokenizer_of("qwen3")
    record = Conversation("c", "", (Message("assistant", "Hi"), *TURNS[:2]), "", answers=((1,), (2,)))
    [example] = written_examples(tokenizer, record, {tokenizer.eos_token_id})
    assert example.answer == (2,)


# ---- the real thing


@pytest.mark.real_model
def test_smollm2_s_own_template_and_tokenizer(smollm2: Any) -> None:
    from bitdraft.quant.target import load_tokenizer

    tokenizer, form = load_tokenizer(str(smollm2)), FORMATS["smollm2"]
    messages = [SYSTEM, *(replace(m, thinking="") for m in TURNS)]
    record = Conversation("c", "", tuple(messages), "")
    for part in (messages, messages[1:]):
        record = replace(record, messages=tuple(part))
        examples = written_examples(tokenizer, record, {tokenizer.eos_token_id})
        turns = [i for i, m in enumerate(part) if m.role == "assistant"]
        for example, i in zip(examples, turns, strict=True):
            assert tokenizer.decode(example.prompt) == form.prompt(part[:i])
            assert tokenizer.decode(example.answer) == form.answer(part[i])
