"""Records as they are published: every common shape becomes the same conversation, and what none is says its keys."""

import json
from typing import Any

import pytest

from bitdraft.data.conversation import Conversation, Message, split_thinking
from bitdraft.data.shapes import conversation_of

ASKED, ANSWERED = Message("user", "Hi"), Message("assistant", "Hello")
PLACE = "f.jsonl, line 3"


def messages(record: Any) -> list[Message]:
    return list(conversation_of(record, PLACE).messages)


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "prompt": "Hi"},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "assistant", "content": "Hello", "tool_calls": None, "reasoning_content": None},
            ],
            "conversations": None,
        },
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": "Hi", "response": "Hello", "text": "Hi Hello"},
        {"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Hello"}]},
        {"instruction": "Hi", "input": "", "output": "Hello", "text": "### Instruction: Hi"},
        {"instruction": "Hi", "context": "", "response": "Hello", "category": "qa"},
        {"question": "Hi", "answer": "Hello"},
        {"query": "Hi", "response": "Hello"},
        {"turns": [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": "Hello"}]},
    ],
)
def test_the_same_talk_in_every_shape(record: dict[str, Any]) -> None:
    assert messages(record) == [ASKED, ANSWERED]


@pytest.mark.parametrize(
    ("record", "asked"),
    [
        ({"prompt": "Hi"}, ["Hi"]),
        ({"prompt": "Hi", "completion": None}, ["Hi"]),
        ({"turns": ["Hi", "And then?"], "question_id": 81}, ["Hi", "And then?"]),
        ({"prompt": ["Hi", "And then?"]}, ["Hi", "And then?"]),
        ({"instruction": "Sort these.", "input": "3 1 2"}, ["Sort these.\n\n3 1 2"]),
        ({"text": "Once upon a time"}, ["Once upon a time"]),
        ({"text": "Once", "turns": 1}, ["Once"]),
    ],
)
def test_what_has_no_answer_is_asked(record: dict[str, Any], asked: list[str]) -> None:
    assert messages(record) == [Message("user", text) for text in asked]


def test_ids_and_categories_are_kept_and_places_stand_in() -> None:
    assert conversation_of({"question_id": 81, "category": "math", "turns": ["Hi"]}, PLACE).id == "81"
    record = conversation_of({"id": None, "category": None, "text": "Hi"}, PLACE)
    assert record == Conversation(PLACE, "", (ASKED,), PLACE)


def test_roles_of_other_names_are_known() -> None:
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "u"},
        {"from": "function_call", "value": '{"name": "f"}'},
        {"from": "observation", "value": "o"},
        {"role": "developer", "content": "d"},
        {"role": "ipython", "content": {"rain": True}},
        {"role": "model", "content": "m"},
    ]
    roles = [(m.role, m.content) for m in messages({"conversations": turns})]
    assert roles == [
        ("system", "s"),
        ("user", "u"),
        ("assistant", '{"name": "f"}'),
        ("tool", "o"),
        ("system", "d"),
        ("tool", '{"rain": true}'),
        ("assistant", "m"),
    ]


def test_records_that_begin_oddly_keep_their_order() -> None:
    odd = [
        {"role": "assistant", "content": "Hello"},
        {"role": "system", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "user", "content": "Hi"},
    ]
    assert [m.as_dict() for m in messages({"messages": odd})] == odd


# ---- thinking


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_thinking_that_stands_apart_stays_apart(key: str) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>x</think>Yo", key: "hm"}]
    assert messages({"messages": turns})[1] == Message("assistant", "<think>x</think>Yo", "hm")


@pytest.mark.parametrize(
    ("text", "thinking", "rest"),
    [
        ("<think>\nhm\n\nwell\n</think>\n\nYo", "hm\n\nwell", "Yo"),
        ("\n<think>hm</think>Yo", "hm", "Yo"),
        ("<think>\n\n</think>\n\nYo", "", "Yo"),
        ("Yo <think>hm</think>", "", "Yo <think>hm</think>"),
        ("<think>cut", "", "<think>cut"),
        ("<think>a</think> b </think> c", "a", " b </think> c"),
    ],
)
def test_thinking_at_the_head_of_an_answer_is_split_off(text: str, thinking: str, rest: str) -> None:
    assert split_thinking(text) == (thinking, rest)
    assert messages({"prompt": "Hi", "completion": text})[1] == Message("assistant", rest, thinking)
    assert messages({"prompt": text})[0].content == text, "a user's words are a user's words"


# ---- tools


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"where": "Köln"}'}}


def test_calls_of_tools_become_lines_of_the_answer() -> None:
    turns = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, {"function": {"name": "wait"}}]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Once more.", "function_call": {"name": "look", "arguments": "{wrong"}},
    ]
    _, calls, _, more = messages({"messages": turns})
    assert calls.content == '{"name": "look", "arguments": {"where": "Köln"}}\n{"name": "wait", "arguments": {}}'
    assert more.content == 'Once more.\n{"name": "look", "arguments": "{wrong"}'


SCHEMA = {"name": "look", "parameters": {"type": "object"}}
TOOLS = 'Tools you may call, each by one line {"name": …, "arguments": {…}}:\n' + json.dumps(SCHEMA)


@pytest.mark.parametrize("tools", [[SCHEMA], [{"type": "function", "function": SCHEMA}], json.dumps([SCHEMA])])
def test_schemas_of_tools_stand_in_the_system_text(tools: Any) -> None:
    turns = [{"role": "user", "content": "Hi"}]
    assert messages({"messages": turns, "tools": tools}) == [Message("system", TOOLS), ASKED]
    assert messages({"messages": turns, "functions": tools}) == [Message("system", TOOLS), ASKED]
    told = [{"role": "system", "content": "Be brief."}, *turns]
    assert messages({"messages": told, "tools": tools}) == [Message("system", f"Be brief.\n\n{TOOLS}"), ASKED]
    assert messages({"prompt": "Hi", "system": "Be brief.", "tools": tools})[0].content == f"Be brief.\n\n{TOOLS}"


@pytest.mark.parametrize("none", [[], None, "", "[]"])
def test_no_tools_are_no_system_text(none: Any) -> None:
    assert messages({"prompt": "Hi", "tools": none}) == [ASKED]


def test_a_system_text_beside_the_messages_is_used_unless_they_have_one() -> None:
    assert messages({"question": "Hi", "system_prompt": "s"}) == [Message("system", "s"), ASKED]
    assert messages({"question": "Hi", "system_prompt": ""}) == [ASKED]
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "Hi"}]
    assert messages({"messages": own, "system": "s"}) == [Message("system", "own"), ASKED]


# ---- answers as token ids


TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]


def test_token_ids_of_answers_are_read_back() -> None:
    record = {"conversations": TALK, "answers": [[5, 2]], "answered_by": "t/r", "finished": [True]}
    read = conversation_of(record, PLACE)
    assert (read.answers, read.answered_by) == (((5, 2),), "t/r")
    assert (conversation_of({"conversations": TALK}, PLACE).answers, read.opening.answers) == ((), ())
    assert conversation_of({"question": "Hi", "answers": {"text": ["x"]}}, PLACE).answers == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"answers": [[1], [2]]}, "2 'answers' for 1 assistant messages"),
        ({"answers": [[]]}, "none of them empty"),
        ({"answers": [1, 2]}, "list of lists of token ids"),
        ({"answers": "1 2"}, "list of lists of token ids"),
        ({"answers": [[1.0]]}, "list of lists of token ids"),
        ({"answers": [[True]]}, "list of lists of token ids"),
        ({"answers": [[-1]]}, "list of lists of token ids"),
        ({"answers": [[1]], "answered_by": 3}, "'answered_by' must be text"),
    ],
)
def test_token_ids_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        conversation_of({"conversations": TALK, **fields}, PLACE)
    assert str(caught.value).startswith(f"{PLACE}: ")


# ---- what is no record


USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"tokens": [1], "label": 0}, r"expected the key 'conversations' \(or 'messages', .*\), found label, tokens"),
        ({"prompt": 3}, "'prompt' must hold text, found int"),
        ({"question": "Which?", "answer": 2}, "'answer' must hold text, found int"),
        ({"text": ["a"]}, "'text' must hold text, found list"),
        ({"turns": []}, "'turns' must be a list with at least one message"),
        ({"turns": ["a", 1]}, "message 1 is str"),
        ({"messages": [USER, {"role": "poet", "content": "x"}]}, "but message 2 has content='x', role='poet'"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "but message 2 has none"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "message 1 has none"),
        ({"messages": [USER, {"role": "assistant", "content": "x", "thinking": [1]}]}, "thinking of message 2"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": {}}]}, "message 2: 'tool_calls' must be a list"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "needs the 'name' of its function"),
        ({"prompt": "Hi", "tools": "look()"}, "'tools' is text, but not JSON"),
        ({"prompt": "Hi", "tools": [1]}, "'tools' must be a list of schemas"),
        ({"completion": "Hello"}, "found completion"),
        ({"messages": [{"role": "system", "content": "x"}]}, "the conversation has no user message"),
    ],
)
def test_a_record_of_another_shape_says_what_was_found(record: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        conversation_of(record, PLACE)
    assert str(caught.value).startswith(PLACE)


def test_the_key_is_of_what_is_asked() -> None:
    ask, other = {"prompt": "Hi", "completion": "a"}, {"messages": [USER, {"role": "assistant", "content": "b"}]}
    assert conversation_of(ask, "x").key == conversation_of(other, "y").key
    assert conversation_of(ask, "x").key != conversation_of({"prompt": "Hi", "system": "s"}, "x").key
