"""From a record as it is published to a ``Conversation``.

The shapes are told apart by their keys, in the order of ``_SHAPES``: lists of messages first, because such records
often carry a prompt or a text beside them. A key that holds null counts as absent: Parquet fills missing ones so.
What several templates would drop is written as text: tool schemas into the system message, calls of tools into the
assistant's (docs/data.md).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bitdraft.data.conversation import ROLES, Conversation, Message, split_thinking

Record = Mapping[str, Any]

_ROLES = {
    **{role: role for role in ROLES},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "developer": "system",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "ipython": "tool",
}
_LISTS = ("conversations", "messages", "conversation")
# What asks, what belongs below the question, what answers.
_PAIRS = (
    ("instruction", ("input", "context"), ("output", "response", "completion")),
    ("prompt", (), ("completion", "response")),
    ("question", (), ("answer", "response")),
    ("query", (), ("answer", "response")),
)
_KNOWN = "'messages', 'turns', 'prompt', 'instruction', 'question', 'query', 'text'"


def conversation_of(record: Any, place: str) -> Conversation:
    """The record in our form. Raises ``ValueError`` beginning with ``place`` for one of another shape."""
    if not isinstance(record, dict):
        raise ValueError(f"{place}: expected the key 'conversations', found {type(record).__name__}")
    given = {key: value for key, value in record.items() if value is not None}
    if isinstance(given.get("turns"), int):  # a count of turns, not the turns
        del given["turns"]
    shape = next((shape for keys, shape in _SHAPES if any(key in given for key in keys)), None)
    if shape is None:
        found = ", ".join(sorted(record)) or "no key"
        raise ValueError(f"{place}: expected the key 'conversations' (or {_KNOWN}), found {found}")
    messages = _with_system(given, shape(given, place), place)
    if not any(m.role == "user" for m in messages):
        raise ValueError(f"{place}: the conversation has no user message")
    answers, answered_by, finished = _recorded(given, messages, place) if "conversations" in given else ((), "", ())
    name = next((given[key] for key in ("id", "question_id", "task_id") if key in given), place)
    category = str(given.get("category", ""))
    return Conversation(str(name), category, tuple(messages), place, answers, answered_by, finished)


def _listed(record: Record, place: str) -> list[Message]:
    key = next(key for key in _LISTS if key in record)
    return _messages(record[key], key, place)


def _turns(record: Record, place: str) -> list[Message]:
    return _asked(record, "turns", place)


def _asked(record: Record, key: str, place: str) -> list[Message]:
    """The user's turns as texts, or messages."""
    turns = record[key]
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return [Message("user", turn) for turn in turns]
    return _messages(turns, key, place)


def _pair(record: Record, place: str) -> list[Message]:
    ask, below, answers = next(pair for pair in _PAIRS if pair[0] in record)
    answer = next((key for key in answers if key in record), None)
    if isinstance(record[ask], list):
        asked = _asked(record, ask, place)
    else:
        parts = [_field(record, key, place) for key in (ask, *below) if key in record]
        asked = [Message("user", "\n\n".join(part for part in parts if part))]
    if answer is None:
        return asked
    if isinstance(record[answer], list):
        return asked + _messages(record[answer], answer, place)
    return [*asked, _assistant(_field(record, answer, place))]


def _text(record: Record, place: str) -> list[Message]:
    return [Message("user", _field(record, "text", place))]


_SHAPES: tuple[tuple[tuple[str, ...], Callable[[Record, str], list[Message]]], ...] = (
    (_LISTS, _listed),
    (tuple(ask for ask, _, _ in _PAIRS), _pair),
    (("turns",), _turns),
    (("text",), _text),
)


def _field(record: Record, key: str, place: str) -> str:
    if not isinstance(record[key], str):
        raise ValueError(f"{place}: '{key}' must hold text, found {type(record[key]).__name__}")
    return str(record[key])


def _messages(turns: Any, key: str, place: str) -> list[Message]:
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{place}: '{key}' must be a list with at least one message")
    return [_message(turn, number, place) for number, turn in enumerate(turns, start=1)]


def _message(turn: Any, number: int, place: str) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(_malformed(place, number, f"is {type(turn).__name__}"))
    given = {key: value for key, value in turn.items() if value is not None}
    role = _ROLES.get(str(given.get("role", given.get("from"))))
    if role is None:
        raise ValueError(_malformed(place, number, f"has {', '.join(f'{k}={given[k]!r}'[:60] for k in sorted(given))}"))
    calls = _calls(given, f"{place}, message {number}") if role == "assistant" else []
    content = _content(given.get("content", given.get("value")), role, calls)
    if content is None:
        raise ValueError(_malformed(place, number, "has none"))
    if role != "assistant":
        return Message(role, content)
    thinking = next((given[key] for key in ("reasoning_content", "thinking", "reasoning") if given.get(key)), "")
    if not isinstance(thinking, str):
        raise ValueError(f"{place}: the thinking of message {number} must be text, found {type(thinking).__name__}")
    return _assistant("\n".join([*([content] if content else []), *calls]) if calls else content, thinking)


def _malformed(place: str, number: int, found: str) -> str:
    needed = f"every message needs a 'role' ({', '.join(ROLES)}) and a text 'content', or ShareGPT's 'from' and 'value'"
    return f"{place}: {needed}, but message {number} {found}"


def _content(content: Any, role: str, calls: Sequence[str]) -> str | None:
    """The text of a message; None where there is none."""
    if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        return "\n".join(part["text"] for part in content)
    if role == "tool" and isinstance(content, (dict, list)):
        return json.dumps(content, ensure_ascii=False)
    if content is None and calls:
        return ""
    return content if isinstance(content, str) else None


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _assistant(text: str, thinking: str = "") -> Message:
    if thinking:
        return Message("assistant", text, thinking)
    thinking, rest = split_thinking(text)
    return Message("assistant", rest, thinking)


def _calls(turn: Record, place: str) -> list[str]:
    """The calls of tools in an OpenAI message, one JSON object each."""
    calls = turn.get("tool_calls", [turn["function_call"]] if "function_call" in turn else [])
    if not isinstance(calls, list):
        raise ValueError(f"{place}: 'tool_calls' must be a list, found {type(calls).__name__}")
    return [_call(call, place) for call in calls]


def _call(call: Any, place: str) -> str:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{place}: every call of a tool needs the 'name' of its function")
    arguments = function.get("arguments")
    called = {"name": function["name"], "arguments": {} if arguments is None else _parsed(arguments)}
    return json.dumps(called, ensure_ascii=False)


def _parsed(arguments: Any) -> Any:
    """OpenAI writes arguments as JSON in a text. What a model wrote wrongly stays the text that it is."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError:
        return arguments


def _with_system(record: Record, messages: list[Message], place: str) -> list[Message]:
    """System text and tool schemas that stand beside the messages, in a system message at their head."""
    key = next((key for key in ("system", "system_prompt") if key in record), None)
    own = messages[0].content if messages[0].role == "system" else ""
    beside = _field(record, key, place) if key and not own else ""
    parts = [part for part in (own or beside, _tools(record, place)) if part]
    rest = messages[1:] if messages[0].role == "system" else messages
    return [Message("system", "\n\n".join(parts)), *rest] if parts else messages


def _tools(record: Record, place: str) -> str:
    key = next((key for key in ("tools", "functions") if key in record), None)
    tools = record[key] if key else []
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: '{key}' is text, but not JSON ({error.msg})") from error
    if not tools:
        return ""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{place}: '{key}' must be a list of schemas")
    schemas = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    how = 'Tools you may call, each by one line {"name": …, "arguments": {…}}:'
    return "\n".join([how, *schemas])


def _recorded(
    record: Record, messages: Sequence[Message], place: str
) -> tuple[tuple[tuple[int, ...], ...], str, tuple[bool, ...]]:
    """The token ids that a target wrote, who it was, and which answers ended by themselves."""
    by, answers, finished = record.get("answered_by", ""), record.get("answers", []), record.get("finished", [])
    if not isinstance(by, str):
        raise ValueError(f"{place}: 'answered_by' must be text, found {type(by).__name__}")
    if not isinstance(answers, list) or not all(isinstance(ids, list) and _are_ids(ids) for ids in answers):
        raise ValueError(f"{place}: 'answers' must be a list of lists of token ids, none of them empty")
    written = sum(m.role == "assistant" for m in messages)
    if answers and len(answers) != written:
        raise ValueError(f"{place}: {len(answers)} 'answers' for {written} assistant messages; each needs its own")
    if not isinstance(finished, list) or not all(isinstance(ended, bool) for ended in finished):
        raise ValueError(f"{place}: 'finished' must be a list of true and false")
    if finished and len(finished) != written:
        raise ValueError(f"{place}: {len(finished)} 'finished' for {written} assistant messages; each needs its own")
    return tuple(tuple(ids) for ids in answers), by, tuple(finished)


def _are_ids(ids: Sequence[Any]) -> bool:
    return len(ids) > 0 and all(type(token) is int and token >= 0 for token in ids)
