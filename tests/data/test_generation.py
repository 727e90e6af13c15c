"""Sampled answers: the distribution, the independence of batch and order, a slow transcription."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest

from bitdraft.data import generation
from bitdraft.data.chat import prompt_ids
from bitdraft.data.conversation import Conversation, Message
from bitdraft.data.dialogs import AnswerSettings, answer_dialogs, record_seed, uniform_stream
from bitdraft.data.generation import decoded_answers, greedy_answers
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.sampling import Sampling

NEW_TOKENS = 12
SAMPLING = Sampling(temperature=1.3, top_p=0.9)


def conversation(number: int, *texts: str) -> Conversation:
    return Conversation(f"c{number}", "chat", tuple(Message("user", t) for t in texts), f"f.jsonl, line {number}")


ASKED = [
    conversation(0, "Hello"),
    conversation(1, "A somewhat longer question", "and then?", "why"),
    conversation(2, "x" * 30),
    conversation(3, "b", "c"),
    conversation(4, "What is the time?"),
]


def answered(
    target: LowBitTarget, tokenizer: Any, asked: list[Conversation], batch_size: int, seed: int = 0, end: int = 258
) -> dict[str, list[tuple[int, ...]]]:
    settings = AnswerSettings(NEW_TOKENS, batch_size, SAMPLING, seed)
    dialogs = answer_dialogs(target, tokenizer, asked, settings, end_ids={end}, label="test")
    return {d.conversation.id: [e.answer for e in d.examples] for d in dialogs}


def test_sampled_answers_do_not_depend_on_the_batch_or_the_order(exact_target: LowBitTarget, tokenizer: Any) -> None:
    one = answered(exact_target, tokenizer, ASKED, 1)
    assert len({a for answers in one.values() for a in answers}) == 8, "the answers should differ from each other"
    assert answered(exact_target, tokenizer, ASKED, 2) == one
    assert answered(exact_target, tokenizer, ASKED[::-1], 5) == one
    assert answered(exact_target, tokenizer, ASKED[1:4], 2) == {k: one[k] for k in ("c1", "c2", "c3")}
    assert answered(exact_target, tokenizer, ASKED, 2, seed=1) != one


def test_rows_that_end_early_leave_the_draws_of_the_others_alone(exact_target: LowBitTarget, tokenizer: Any) -> None:
    free = answered(exact_target, tokenizer, ASKED, 1)
    end = free["c2"][0][2]
    ended = answered(exact_target, tokenizer, ASKED, 5, end=end)
    assert ended == answered(exact_target, tokenizer, ASKED, 1, end=end)
    assert len(ended["c2"][0]) <= 3


def test_a_sampled_answer_is_its_slow_transcription(exact_target: LowBitTarget, tokenizer: Any) -> None:
    """One row, no cache: softmax with temperature, the smallest set of likeliest tokens, inverse of the sums."""
    for asked in (ASKED[0], ASKED[2]):
        tokens, uniforms = prompt_ids(tokenizer, asked.messages), uniform_stream(0, asked.key, 0, NEW_TOKENS)
        expected: list[int] = []
        while len(expected) < NEW_TOKENS and 258 not in expected:
            states = exact_target.states(torch.tensor([tokens + expected])).last_hidden[0, -1]
            p = (exact_target.logits(states).double() / SAMPLING.temperature).softmax(-1).numpy()
            order = np.argsort(-p, kind="stable")
            kept = order[: int((np.cumsum(p[order]) - p[order] < SAMPLING.top_p).sum())]
            p = np.where(np.isin(np.arange(len(p)), kept), p, 0)
            expected.append(int(np.searchsorted(np.cumsum(p) / p.sum(), uniforms[len(expected)], side="right")))
        assert list(answered(exact_target, tokenizer, [asked], 1)[asked.id][0]) == expected


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.7)])
def test_first_tokens_are_drawn_from_the_softmax(exact_target: LowBitTarget, temperature: float, top_p: float) -> None:
    prompt, draws = [5, 6, 7], 3000
    sampling = Sampling(temperature=temperature, top_p=top_p)
    answers = decoded_answers(
        exact_target,
        [prompt] * draws,
        end_ids=set(),
        max_new_tokens=1,
        batch_size=1000,
        choose=sampling.choose,
        uniforms=lambda i: torch.from_numpy(uniform_stream(3, f"record {i}", 0, 1)),
    )
    logits = exact_target.logits(exact_target.states(torch.tensor([prompt])).last_hidden[0, -1])
    p = (logits / temperature).softmax(-1)
    ordered, ids = p.sort(descending=True)
    p[ids[ordered.cumsum(0) - ordered >= top_p]] = 0
    expected = (p / p.sum()).numpy() * draws
    counts = np.bincount([a[0] for a in answers], minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    often = expected >= 5
    found = np.array([*counts[often], counts[~often].sum()])
    wanted = np.array([*expected[often], expected[~often].sum()])
    assert chisquare(found[wanted > 0], wanted[wanted > 0]).pvalue > 1e-3
    assert often.sum() >= 4


def test_streams_are_uniform_and_apart() -> None:
    streams = [uniform_stream(s, k, t, 500) for s in (0, 1) for k in ("a", "b") for t in (0, 1)]
    assert kstest(np.concatenate(streams), "uniform").pvalue > 1e-3
    assert len(np.unique(np.concatenate(streams))) == 8 * 500
    assert np.array_equal(uniform_stream(0, "a", 0, 20), streams[0][:20]), "a longer limit draws the same"
    assert min(s.min() for s in streams) >= 0 and max(s.max() for s in streams) < 1


def test_streams_stay_what_they_are() -> None:
    """Files are resumed by another process, perhaps under another numpy."""
    assert uniform_stream(0, "a", 0, 3).tolist() == pytest.approx(STREAM, abs=0)
    assert record_seed(0, "a", 0) == int(STREAM[0] * 2**31)


STREAM = [0.5059970576715173, 0.2377772978350069, 0.2159001614299667]


def test_records_that_ask_the_same_are_answered_the_same(exact_target: LowBitTarget, tokenizer: Any) -> None:
    twins = [conversation(0, "Hello"), conversation(1, "again"), conversation(2, "Hello")]
    answers = answered(exact_target, tokenizer, twins, 2)
    assert answers["c0"] == answers["c2"] != answers["c1"]


def test_temperature_0_is_greedy(target: LowBitTarget) -> None:
    prompts = [[1, 2, 3], [4, 5], [6] * 9]
    options: dict[str, Any] = {"end_ids": {258}, "max_new_tokens": 6, "batch_size": 2}
    greedy = greedy_answers(target, prompts, **options)
    assert decoded_answers(target, prompts, choose=Sampling().choose, **options) == greedy


def test_prompts_of_a_batch_are_of_similar_length(target: LowBitTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortest first, follow-ups among those that wait."""
    run, admitted = target.prefill, list[list[int]]()

    def watched(input_ids: torch.Tensor, lengths: torch.Tensor, **options: Any) -> Any:
        admitted.append(lengths.tolist())
        return run(input_ids, lengths, **options)

    monkeypatch.setattr(target, "prefill", watched)
    prompts = [[1] * n for n in (3, 30, 9, 4, 21, 8)]
    greedy_answers(
        target,
        prompts,
        end_ids=set(),
        max_new_tokens=2,
        batch_size=2,
        follow_up=lambda index, answer: [2] * 15 if index == 0 else None,
    )
    assert admitted == [[3, 4], [8, 9], [15, 21], [30]]


def test_prompts_that_are_read_at_once_hold_little_padding(
    target: LowBitTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[7 + i] * n for i, n in enumerate((3, 4, 4, 9, 9, 9, 30))]
    options: dict[str, Any] = {"end_ids": set(), "max_new_tokens": 5, "batch_size": 7}
    expected = greedy_answers(target, prompts, **options)
    read, groups = target.prefill, list[list[int]]()

    def watched(input_ids: torch.Tensor, lengths: torch.Tensor, **told: Any) -> Any:
        groups.append(lengths.tolist())
        return read(input_ids, lengths, **told)

    monkeypatch.setattr(target, "prefill", watched)
    for allowed, wanted in (
        (0, [[3], [4, 4], [9, 9, 9], [30]]),
        (1, [[3, 4, 4], [9, 9, 9], [30]]),
        (16, [[3, 4, 4, 9, 9, 9], [30]]),
        (142, [[3, 4, 4, 9, 9, 9, 30]]),
    ):
        groups.clear()
        monkeypatch.setattr(generation, "WORTH_A_PASS", allowed)
        assert greedy_answers(target, prompts, **options) == expected
        assert groups == wanted


def test_memory_for_the_longest_prompt_is_asked_for_once(target: LowBitTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows grow longer from prompt to prompt; a cache that grew with them would be copied every time."""
    made, slots = target.new_cache, list[int]()

    def watched(number: int) -> Any:
        slots.append(number)
        return made(number)

    monkeypatch.setattr(target, "new_cache", watched)
    prompts = [[7] * n for n in (3, 4, 20, 30)]
    greedy_answers(target, prompts, end_ids=set(), max_new_tokens=5, batch_size=2)
    assert slots[0] == 35


def test_long_prompts_are_read_a_few_at_a_time(target: LowBitTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[7 + i] * n for i, n in enumerate((30, 3, 25, 12, 1, 28))]
    expected = greedy_answers(target, prompts, end_ids=set(), max_new_tokens=5, batch_size=6)
    read, sizes = target.prefill, []

    def counting(input_ids: torch.Tensor, *rest: Any, **options: Any) -> Any:
        sizes.append(input_ids.numel())
        return read(input_ids, *rest, **options)

    monkeypatch.setattr(target, "prefill", counting)
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 60)
    assert greedy_answers(target, prompts, end_ids=set(), max_new_tokens=5, batch_size=6) == expected
    assert max(sizes) <= 60 and len(sizes) < len(prompts)
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 1)  # less than any prompt: one by one
    assert greedy_answers(target, prompts, end_ids=set(), max_new_tokens=5, batch_size=6) == expected
