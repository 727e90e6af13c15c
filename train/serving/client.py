"""Asking an engine over its OpenAI-compatible API, with token ids on both ways, and reading its metrics.

Both sides get the same ids and stop at the same ids: whatever a tokenizer or a generation config of the engine's would
add is said explicitly in the request.
"""

import http.client
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

_NO_PROXY = build_opener(ProxyHandler({}))  # the engine is on this very machine
_ANSWER_SECONDS = 1800.0
_SETTLE_SECONDS = 0.5


def is_healthy(url: str) -> bool:
    """Whether the engine takes requests yet."""
    try:
        with _NO_PROXY.open(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def complete(url: str, prompt: Sequence[int], *, max_new_tokens: int, end_ids: set[int]) -> list[int]:
    """The greedy continuation's token ids, the end-of-turn token included.

    Raises ``ValueError`` if the engine refuses, read other tokens than it was sent, or returns no ids, and ``OSError``
    if it does not answer.
    """
    asked = {
        "model": "target",
        "prompt": list(prompt),
        "max_tokens": max_new_tokens,
        "temperature": 0.0,
        # Said, because the engine takes what is not said from the target's generation_config.json.
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "ignore_eos": True,
        "stop_token_ids": sorted(end_ids),
        "skip_special_tokens": False,
        "return_token_ids": True,
    }
    answer = _posted(f"{url}/v1/completions", asked)
    try:
        choice = answer["choices"][0]
        read, written = choice["prompt_token_ids"], choice["token_ids"]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"the engine's answer holds no {error}: an engine is needed that knows return_token_ids, as vLLM 0.32 does"
        ) from error
    if read != list(prompt):
        raise ValueError(f"the engine read {len(read or [])} tokens where {len(prompt)} others were sent")
    if not written:
        raise ValueError("the engine's answer holds no token ids")
    return [int(token) for token in written]


def complete_all(
    url: str,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    end_ids: set[int],
    at_once: int,
    report: Callable[[int], object],
) -> list[list[int]]:
    """``complete`` for every prompt, ``at_once`` of them at a time; ``report`` is called with the number finished."""
    answers: list[list[int]] = [[] for _ in prompts]
    pool = ThreadPoolExecutor(at_once)
    try:
        asked = {
            pool.submit(complete, url, prompt, max_new_tokens=max_new_tokens, end_ids=end_ids): i
            for i, prompt in enumerate(prompts)
        }
        for done in as_completed(asked):
            answers[asked[done]] = done.result()
            report(1)
    finally:
        # Requests under way end when the engine is stopped; none is waited for here.
        pool.shutdown(wait=False, cancel_futures=True)
    return answers


def draft_metrics(url: str) -> str:
    """The lines of ``/metrics`` on drafts, once they rest: the last pass is counted a moment after its answer."""
    before, now = "", _draft_metrics(url)
    while now != before:
        time.sleep(_SETTLE_SECONDS)
        before, now = now, _draft_metrics(url)
    return now


def _draft_metrics(url: str) -> str:
    with _NO_PROXY.open(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode("utf-8").splitlines()
    return "\n".join(line for line in lines if line.startswith("vllm:spec_decode"))


def _posted(url: str, content: dict[str, Any]) -> Any:
    request = Request(url, json.dumps(content).encode("utf-8"), {"Content-Type": "application/json"})
    try:
        with _NO_PROXY.open(request, timeout=_ANSWER_SECONDS) as answer:
            return json.loads(answer.read())
    except HTTPError as error:
        said = error.read().decode("utf-8", errors="replace").strip()
        raise ValueError(f"the engine refused a request ({error.code}): {_message(said)}") from error
    except URLError as error:
        raise ConnectionError(f"no engine answers at {url}: {error.reason}") from error
    except http.client.HTTPException as error:
        raise ConnectionError(f"the engine at {url} broke off its answer: {error!r}") from error
    except ValueError as error:
        raise ValueError(f"what answers at {url} is no engine: its answer is not JSON ({error})") from error


def _message(said: str) -> str:
    """The sentence in an OpenAI-style error body, else its first line."""
    try:
        return str(json.loads(said)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return (said.splitlines() or ["no reason given"])[0][:300]
