"""Answers by an OpenAI-compatible server, such as vLLM or SGLang serving the quantized checkpoint.

Each conversation is a task of its own, its turns one after the other, a bounded number of conversations at a time. What
may pass (a full server, a dropped connection, half an answer) is tried again after a while; what one conversation is
to blame for costs that conversation; what would fail for every one ends the run.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import Any, Literal

import httpx2

from bitdraft.data.conversation import Conversation, Message
from bitdraft.data.dialogs import AnswerBar, Dialog, record_seed

_PASSES = {408, 409, 425, 429}  # and 5xx: may be otherwise in a moment
_FOR_ALL = {401, 403, 404, 405}
_FIRST_WAIT, _LONGEST_WAIT, _LONGEST_ASKED_FOR = 1.0, 60.0, 600.0
# vLLM and SGLang take what is not said from the model's generation_config.json.
_ENGINE_FIELDS = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True}


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How a server is asked."""

    url: str
    """Where it answers, with or without `/v1`."""
    model: str
    """The name under which it serves the model."""
    dialect: Literal["engine", "openai"] = "engine"
    """`engine`: what vLLM and SGLang understand, token ids included; `openai`: nothing beyond OpenAI's own fields."""
    concurrency: int = 16
    """Conversations asked at a time."""
    retries: int = 6
    """How often a request is tried again, each time after twice the wait."""
    timeout: float = 600.0
    """Seconds that an answer may take."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"--server must begin with http:// or https://, got {self.url!r}")
        for name, least in (("concurrency", 1), ("retries", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} must be at least {least}, got {getattr(self, name)}")
        if self.timeout <= 0:
            raise ValueError(f"--timeout must be above 0, got {self.timeout:g}")

    @property
    def endpoint(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What decides an answer besides the server."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    thinking: bool | None


@dataclass(frozen=True)
class ServedAnswer:
    message: Message
    tokens: tuple[int, ...]
    """Empty where the server does not tell token ids."""
    finished: bool
    count: int
    """Tokens, as the server counts them."""


class RecordFailed(Exception):
    """One conversation has no answer; the others go on."""


class _TryAgain(Exception):
    """With the number of seconds that the server asks to wait, if it does."""

    def __init__(self, why: str, after: float | None = None) -> None:
        super().__init__(why)
        self.after = after


@dataclass
class Server:
    """Asks one server. Used by several threads at once."""

    config: ServerConfig
    asking: Asking
    api_key: str = field(default="", repr=False)
    first_wait: float = _FIRST_WAIT

    def __post_init__(self) -> None:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limits = httpx2.Limits(max_connections=self.config.concurrency)
        self._client = httpx2.Client(headers=headers, timeout=self.config.timeout, limits=limits)
        self._ended = threading.Event()

    def close(self) -> None:
        """Let go of connections; whoever waits to try again gives up."""
        self._ended.set()
        self._client.close()

    def answer(self, history: Sequence[Message], seed: int) -> ServedAnswer:
        """The next assistant message.

        Raises ``RecordFailed`` where the server refuses this history or has failed too often, and ``ValueError`` where
        it would refuse any.
        """
        asked = self._request(history, seed)
        for attempt in range(self.config.retries + 1):
            try:
                return self._asked(asked)
            except _TryAgain as error:
                if attempt == self.config.retries or self._ended.is_set():
                    raise RecordFailed(f"{error}, after {attempt + 1} tries") from error
                # Jitter, or all that failed together would come back together.
                longest = min(_LONGEST_WAIT, self.first_wait * 2**attempt)
                pause = random.uniform(longest / 2, longest)
                if error.after is not None:
                    pause = max(pause, min(error.after, _LONGEST_ASKED_FOR))
                self._ended.wait(pause)
        raise AssertionError("unreachable")

    def _request(self, history: Sequence[Message], seed: int) -> dict[str, Any]:
        asking = self.asking
        asked: dict[str, Any] = {
            "model": self.config.model,
            "messages": [m.as_dict() for m in history],
            "max_tokens": asking.max_new_tokens,
            "temperature": asking.temperature,
            "top_p": asking.top_p,
            "seed": seed,
        }
        if self.config.dialect == "engine":
            asked |= _ENGINE_FIELDS
            if asking.thinking is not None:
                asked["chat_template_kwargs"] = {"enable_thinking": asking.thinking}
        return asked

    def _asked(self, asked: dict[str, Any]) -> ServedAnswer:
        try:
            response = self._client.post(self.config.endpoint, json=asked)
        except httpx2.TransportError as error:
            raise _TryAgain(f"no answer from {self.config.endpoint}: {error or type(error).__name__}") from error
        code = response.status_code
        if code in _PASSES or code >= 500:
            raise _TryAgain(
                f"the server answers {code}: {_sentence(response)}", _retry_after(response.headers.get("Retry-After"))
            )
        if code in _FOR_ALL:
            raise ValueError(f"{self.config.endpoint} refuses every request ({code}): {_sentence(response)}")
        if code != 200:
            raise RecordFailed(f"the server refuses it ({code}): {_sentence(response)}")
        try:
            return _parsed(response.json())
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise _TryAgain(f"the server's answer is not a chat completion ({error!r})") from error


def _parsed(answer: Any) -> ServedAnswer:
    choice = answer["choices"][0]
    said = choice["message"]
    tokens = tuple(int(t) for t in choice.get("token_ids") or ())
    thought = said.get("reasoning_content") or said.get("reasoning") or ""
    message = Message("assistant", str(said["content"] or ""), str(thought))
    reason = choice["finish_reason"]
    if reason not in ("stop", "length"):
        raise ValueError(f"finish_reason {reason!r}")
    count = len(tokens) or int((answer.get("usage") or {}).get("completion_tokens", 0))
    return ServedAnswer(message, tokens, reason == "stop", count)


def _sentence(response: httpx2.Response) -> str:
    """What an OpenAI-style error body says, else its first line."""
    try:
        said = response.json()
        return str(said["error"]["message"] if "error" in said else said["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return (response.text.strip().splitlines() or ["no reason given"])[0][:300]


def _retry_after(value: str | None) -> float | None:
    """Seconds from now: the header holds a number of them, or a date."""
    if value is None:
        return None
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError, TypeError):
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    return None  # neither: as if it were not there


@dataclass
class ServedDialog:
    """A conversation as a server has answered it."""

    dialog: Dialog
    answers: list[ServedAnswer]


def serve_dialogs(
    server: Server,
    conversations: Sequence[Conversation],
    *,
    label: str,
    finished: Callable[[ServedDialog], None],
) -> list[str]:
    """Every user turn of every conversation, answered by the server; ``finished`` is called, in this thread, with each
    that is done. Returns a sentence on each that has no answer.

    Raises ``ValueError`` where the server refuses every request, or has failed so many conversations in a row that it
    must be down.
    """
    failed: list[str] = []
    in_a_row, too_many = 0, 2 * server.config.concurrency
    with ThreadPoolExecutor(server.config.concurrency) as pool, AnswerBar(_turns(conversations), label) as bar:
        try:
            for conversation, answered in _as_they_come(pool, server, conversations, bar):
                try:
                    finished(answered.result())
                    in_a_row = 0
                except RecordFailed as error:
                    failed.append(f"{conversation.source}: {error}")
                    in_a_row += 1
                    if in_a_row >= too_many:
                        raise ValueError(
                            f"the last {in_a_row} conversations have no answer, {failed[-1]}: see to the server and "
                            "run the same command again"
                        ) from error
        finally:
            server.close()
            pool.shutdown(wait=False, cancel_futures=True)
    return failed


def _turns(conversations: Sequence[Conversation]) -> int:
    return sum(Dialog(c).turns for c in conversations)


def _as_they_come(
    pool: ThreadPoolExecutor, server: Server, conversations: Sequence[Conversation], bar: AnswerBar
) -> "Iterator[tuple[Conversation, Future[ServedDialog]]]":
    """Conversations whose turns are over, no more of them under way than may be asked at a time."""
    coming, under_way = iter(conversations), dict[Future[ServedDialog], Conversation]()
    lock = threading.Lock()
    while True:
        for conversation in islice(coming, server.config.concurrency - len(under_way)):
            under_way[pool.submit(_answered, server, conversation, bar, lock)] = conversation
        if not under_way:
            return
        for done in wait(under_way, return_when=FIRST_COMPLETED).done:
            yield under_way.pop(done), done


def _answered(server: Server, conversation: Conversation, bar: AnswerBar, lock: threading.Lock) -> ServedDialog:
    dialog, answers = Dialog(conversation), list[ServedAnswer]()
    while dialog.advance():
        served = server.answer(dialog.history, record_seed(server.asking.seed, conversation.key, len(answers)))
        answers.append(served)
        dialog.history.append(served.message)
        with lock:
            bar.report(1, served.count)
    return ServedDialog(dialog, answers)
