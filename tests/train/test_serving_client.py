"""The client beside a server that answers as the engine does, over real sockets."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from bitdraft.train.serving.client import complete, complete_all, draft_metrics, is_healthy

Respond = Callable[[dict[str, Any]], tuple[int, Any]]


class Service(ThreadingHTTPServer):
    """Answers ``/v1/completions`` by ``respond`` and ``/metrics`` by the next of ``metrics``."""

    respond: Respond
    metrics: list[str]
    asked: list[dict[str, Any]]
    now = most = 0
    lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_GET(self) -> None:
        texts = self.server.metrics
        self._answer(200, texts.pop(0) if len(texts) > 1 else texts[0])

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
            self.server.asked.append(asked)
        status, answer = self.server.respond(asked)
        with self.server.lock:
            self.server.now -= 1
        self._answer(status, answer if isinstance(answer, str) else json.dumps(answer))

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests' output stays clean."""


def echo(asked: dict[str, Any]) -> tuple[int, Any]:
    """The prompt, one higher each: tells whose answer is whose."""
    return 200, {"choices": [{"prompt_token_ids": asked["prompt"], "token_ids": [t + 1 for t in asked["prompt"]]}]}


@pytest.fixture
def service() -> Iterator[Service]:
    server = Service(("127.0.0.1", 0), Handler)
    server.respond, server.metrics, server.asked = echo, [""], []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def url(service: Service) -> str:
    return f"http://127.0.0.1:{service.server_port}"


def test_a_request_says_all_that_the_engine_would_take_from_elsewhere(service: Service) -> None:
    assert complete(url(service), [5, 6], max_new_tokens=9, end_ids={4, 2}) == [6, 7]
    (asked,) = service.asked
    assert asked["prompt"] == [5, 6]
    assert (asked["temperature"], asked["max_tokens"]) == (0.0, 9)
    assert (asked["ignore_eos"], asked["stop_token_ids"]) == (True, [2, 4])
    assert asked["return_token_ids"] is True
    # Fields that a model's generation_config.json may set, where the request leaves them out.
    assert asked.keys() >= {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}


def test_answers_come_back_in_order_and_no_more_than_allowed_are_under_way(service: Service) -> None:
    def late_first(asked: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.2 if asked["prompt"] == [0] else 0.02)
        return echo(asked)

    service.respond = late_first
    finished: list[int] = []
    answers = complete_all(
        url(service), [[i] for i in range(12)], max_new_tokens=1, end_ids=set(), at_once=3, report=finished.append
    )
    assert answers == [[i + 1] for i in range(12)]
    assert sum(finished) == 12
    assert 1 < service.most <= 3


@pytest.mark.parametrize(
    ("status", "answer", "complaint"),
    [
        (400, {"error": {"message": "the prompt is too long"}}, "refused a request (400): the prompt is too long"),
        (500, "Internal Server Error\nmore", "refused a request (500): Internal Server Error"),
        (200, "<html>", "is no engine: its answer is not JSON"),
        (200, {"choices": []}, "return_token_ids"),
        (200, {"choices": [{"text": "a"}]}, "return_token_ids"),
        (
            200,
            {"choices": [{"prompt_token_ids": [1, 5, 6], "token_ids": [3]}]},
            "read 3 tokens where 2 others were sent",
        ),
        (200, {"choices": [{"prompt_token_ids": [5, 6], "token_ids": None}]}, "holds no token ids"),
    ],
)
def test_what_is_no_answer_becomes_a_sentence(service: Service, status: int, answer: Any, complaint: str) -> None:
    service.respond = lambda asked: (status, answer)
    with pytest.raises(ValueError) as error:
        complete(url(service), [5, 6], max_new_tokens=1, end_ids=set())
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_one_failed_request_ends_the_others(service: Service) -> None:
    def refuse_the_first(asked: dict[str, Any]) -> tuple[int, Any]:
        if asked["prompt"] == [0]:
            return 400, "no"
        time.sleep(0.05)
        return echo(asked)

    service.respond = refuse_the_first
    with pytest.raises(ValueError, match=r"refused a request \(400\): no"):
        complete_all(
            url(service), [[i] for i in range(200)], max_new_tokens=1, end_ids=set(), at_once=2, report=lambda n: None
        )
    assert len(service.asked) < 20


def test_nobody_at_the_port_becomes_a_sentence(service: Service) -> None:
    service.shutdown()
    service.server_close()
    assert not is_healthy(url(service))
    with pytest.raises(ConnectionError, match=r"no engine answers at http://127\.0\.0\.1"):
        complete(url(service), [1], max_new_tokens=1, end_ids=set())


def test_metrics_are_read_until_they_rest(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitdraft.train.serving.client._SETTLE_SECONDS", 0.01)
    line = "vllm:spec_decode_num_drafts_total {}.0"
    service.metrics = [f"# HELP x\nvllm:other 1.0\n{line.format(n)}\n" for n in (1, 2, 3, 3, 3)]
    assert is_healthy(url(service))  # takes the first
    assert draft_metrics(url(service)) == line.format(3)


def test_metrics_without_drafts_end_the_wait(service: Service) -> None:
    service.metrics = ["vllm:other 1.0\n"]
    assert draft_metrics(url(service)) == ""
