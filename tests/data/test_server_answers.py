"""A real local server that misbehaves: full, broken, slow, gone, refusing."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from faulty_server import Faulty, Reply, completion, echo

from bitdraft.data.conversation import Conversation, Message
from bitdraft.data.server_answers import Asking, ServedDialog, Server, ServerConfig, _retry_after, serve_dialogs

ASKING = Asking(max_new_tokens=8, temperature=0.7, top_p=0.9, seed=3, thinking=None)


@pytest.fixture
def faulty() -> Iterator[Faulty]:
    faulty = Faulty()
    yield faulty
    faulty.server.shutdown()
    faulty.server.server_close()


def conversations(count: int, *more: str) -> list[Conversation]:
    return [
        Conversation(f"c{i}", "", tuple(Message("user", t) for t in (f"question {i}", *more)), f"f, line {i}")
        for i in range(count)
    ]


def served(
    faulty: Faulty, asked: list[Conversation], *, api_key: str = "", **config: Any
) -> tuple[dict[str, ServedDialog], list[str]]:
    """What came, and what failed; waits are a hundredth of what they are."""
    config = {"url": faulty.url, "model": "m", "concurrency": 3, "timeout": 5.0, "retries": 3, **config}
    server = Server(ServerConfig(**config), ASKING, api_key, first_wait=0.01)
    came: dict[str, ServedDialog] = {}
    failed = serve_dialogs(server, asked, label="test", finished=lambda d: came.update({d.dialog.conversation.id: d}))
    return came, failed


def test_every_turn_is_asked_with_the_history_before_it(faulty: Faulty) -> None:
    def unhurried(asked: dict[str, Any], before: int) -> Reply:
        time.sleep(0.05)
        return echo(asked)

    faulty.reply = unhurried
    came, failed = served(faulty, conversations(7, "and then?"), api_key="secret")
    assert not failed and len(came) == 7
    texts = [m.content for m in came["c4"].dialog.history]
    assert texts == ["question 4", "1:question 4", "and then?", "3:and then?"]
    assert [a.tokens for a in came["c4"].answers] == [(7, 8), (7, 8)]
    assert all(a.finished for a in came["c4"].answers)
    assert 1 < faulty.most_at_once <= 3
    first = faulty.requests[0]
    wanted = {"model": "m", "max_tokens": 8, "temperature": 0.7, "top_p": 0.9, "return_token_ids": True, "top_k": -1}
    assert {k: first[k] for k in wanted} == wanted
    assert len({r["seed"] for r in faulty.requests}) == 14, "every turn has a seed of its own"
    assert faulty.headers[0]["Authorization"] == "Bearer secret"
    assert faulty.headers[0]["path"] == "/v1/chat/completions"


def test_seeds_belong_to_the_record_and_not_to_its_place(faulty: Faulty) -> None:
    served(faulty, conversations(4))
    served(faulty, conversations(4)[::-1], url=faulty.url + "/v1/")
    seeds = {(r["messages"][0]["content"], r["seed"]) for r in faulty.requests}
    assert len(seeds) == 4


def test_a_plain_server_gets_plain_requests(faulty: Faulty) -> None:
    faulty.reply = lambda asked, before: (200, {}, completion("yes", token_ids=None, finish_reason="length"))
    came, _ = served(faulty, conversations(1), dialect="openai")
    assert set(faulty.requests[0]) == {"model", "messages", "max_tokens", "temperature", "top_p", "seed"}
    (answer,) = came["c0"].answers
    assert (answer.tokens, answer.finished, answer.count) == ((), False, 2)
    assert "Authorization" not in faulty.headers[0]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param((429, {}, b'{"error": {"message": "full"}}'), id="429"),
        pytest.param((500, {}, b"oops"), id="500"),
        pytest.param((200, {}, b'{"choices": [{"mess'), id="broken JSON"),
        pytest.param((200, {}, b'{"choices": []}'), id="no choice"),
        pytest.param((200, {}, completion("x", finish_reason="abort")), id="aborted"),
        pytest.param((200, {"Content-Length": "500"}, b'{"cho'), id="dropped within the answer"),
        pytest.param(None, id="dropped connection"),
    ],
)
def test_what_may_pass_is_tried_again(faulty: Faulty, fault: Reply | None) -> None:
    faulty.reply = lambda asked, before: fault if before < 2 else echo(asked)
    came, failed = served(faulty, conversations(4), timeout=1.0)
    assert not failed and len(came) == 4 and len(faulty.requests) == 12


def test_an_answer_that_takes_too_long_is_asked_again(faulty: Faulty) -> None:
    def slow_at_first(asked: dict[str, Any], before: int) -> Reply:
        time.sleep(0.0 if before else 1.0)
        return echo(asked)

    faulty.reply = slow_at_first
    came, failed = served(faulty, conversations(1), timeout=0.3)
    assert len(came) == 1 and not failed and len(faulty.requests) == 2


def test_tries_end_and_the_others_are_kept(faulty: Faulty) -> None:
    faulty.reply = lambda asked, before: (503, {}, b"") if "2" in asked["messages"][0]["content"] else echo(asked)
    came, failed = served(faulty, conversations(5))
    assert sorted(came) == ["c0", "c1", "c3", "c4"]
    assert failed == ["f, line 2: the server answers 503: no reason given, after 4 tries"]


def test_what_one_record_is_to_blame_for_costs_that_record_without_a_second_try(faulty: Faulty) -> None:
    said = b'{"error": {"message": "maximum context length is 512"}}'
    faulty.reply = lambda asked, before: (400, {}, said) if "2" in asked["messages"][0]["content"] else echo(asked)
    came, failed = served(faulty, conversations(5))
    assert failed == ["f, line 2: the server refuses it (400): maximum context length is 512"]
    assert len(faulty.requests) == 5 and len(came) == 4


@pytest.mark.parametrize("code", [401, 404])
def test_what_would_fail_for_every_record_ends_the_run(faulty: Faulty, code: int) -> None:
    faulty.reply = lambda asked, before: (code, {}, b'{"message": "The model `m` does not exist."}')
    with pytest.raises(ValueError, match=rf"refuses every request \({code}\): The model `m` does not exist"):
        served(faulty, conversations(50))
    assert len(faulty.requests) < 10


def test_a_server_that_is_gone_ends_the_run(faulty: Faulty) -> None:
    faulty.server.shutdown()
    faulty.server.server_close()
    with pytest.raises(ValueError, match=r"the last 6 conversations have no answer.*no answer from http"):
        served(faulty, conversations(200), retries=1)


def test_the_server_says_how_long_to_wait(faulty: Faulty) -> None:
    full: Reply = (429, {"Retry-After": "0.4"}, b"")
    faulty.reply = lambda asked, before: echo(asked) if before else full
    began = time.monotonic()
    came, _ = served(faulty, conversations(1))
    assert len(came) == 1 and time.monotonic() - began >= 0.4


def test_both_forms_of_retry_after_are_read() -> None:
    assert _retry_after("7") == 7 and _retry_after(None) is None and _retry_after("soon") is None
    later = _retry_after(format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True))
    assert later is not None and 28 <= later <= 30


def test_an_error_while_keeping_an_answer_ends_the_run_at_once(faulty: Faulty) -> None:
    def slow(asked: dict[str, Any], before: int) -> Reply:
        time.sleep(0.0 if "question 0" in asked["messages"][0]["content"] else 3.0)
        return echo(asked)

    def full(served: ServedDialog) -> None:
        raise OSError("no room")

    faulty.reply = slow
    server = Server(ServerConfig(url=faulty.url, model="m", concurrency=2, timeout=20), ASKING)
    began = time.monotonic()
    with pytest.raises(OSError, match="no room"):
        serve_dialogs(server, conversations(30), label="test", finished=full)
    assert len(faulty.requests) <= 3 and time.monotonic() - began < 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"url": "localhost:8000"}, "--server must begin with http"),
        ({"concurrency": 0}, "--concurrency must be at least 1"),
        ({"retries": -1}, "--retries must be at least 0"),
        ({"timeout": 0}, "--timeout must be above 0"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerConfig(**{"url": "http://x", "model": "m", **change})
