"""Answers by the target itself: transformers' greedy search, in batches, kept by what decides them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_tokenizer

from bitdraft.data.chat import Example, prompt_ids
from bitdraft.data.conversation import Conversation, Message
from bitdraft.data.dialogs import AnswerSettings
from bitdraft.data.generation import greedy_answers
from bitdraft.data.regenerate import on_policy_examples
from bitdraft.quant.target import LowBitTarget

NEW_TOKENS = 14


def transformers_greedy(target: LowBitTarget, prompt: list[int], end_ids: set[int], new_tokens: int) -> list[int]:
    out = target.model.generate(  # type: ignore[operator]
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=new_tokens,
        eos_token_id=sorted(end_ids) or None,
        pad_token_id=0,
    )
    return [int(t) for t in out[0, len(prompt) :]]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (1, 9, 4, 17, 4, 30, 2)]


@pytest.fixture(scope="module")
def end_ids(target: LowBitTarget, prompts: list[list[int]]) -> set[int]:
    """Tokens that some answers reach early, some late and some never."""
    free = greedy_answers(target, prompts, end_ids=set(), max_new_tokens=NEW_TOKENS, batch_size=8)
    return {free[0][0], free[2][3], free[4][8]}


@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_answers_are_transformers_greedy_search(
    target: LowBitTarget, prompts: list[list[int]], end_ids: set[int], batch_size: int
) -> None:
    answers = greedy_answers(target, prompts, end_ids=end_ids, max_new_tokens=NEW_TOKENS, batch_size=batch_size)
    assert answers == [transformers_greedy(target, p, end_ids, NEW_TOKENS) for p in prompts]
    assert {len(a) for a in answers} >= {1, 4, NEW_TOKENS}, "answers should end at different times"


def test_rows_leave_the_batch_when_their_answer_ends(
    target: LowBitTarget, prompts: list[list[int]], end_ids: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rows = target.states, []

    def counting(input_ids: torch.Tensor, **options: Any) -> Any:
        rows.append(len(input_ids))
        return run(input_ids, **options)

    monkeypatch.setattr(target, "states", counting)
    answers = greedy_answers(target, prompts, end_ids=end_ids, max_new_tokens=NEW_TOKENS, batch_size=7)
    unfinished = [sum(len(a) > n for a in answers) for n in range(NEW_TOKENS)]
    passes = rows[-len(unfinished) + 1 :]  # the first tokens come from the passes over prompts
    assert sum(rows) - sum(passes) == len(prompts) == 7, "there is no pass behind the last token"
    assert passes == unfinished[1:]


def test_waiting_prompts_take_the_place_of_finished_ones(
    target: LowBitTarget, prompts: list[list[int]], end_ids: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of two runs at most one pass half empty while prompts wait, and every answer is still its own."""
    run, passes = target.states, ""

    def counting(input_ids: torch.Tensor, **options: Any) -> Any:
        nonlocal passes
        decoding = int(options["lengths"].max()) > 0
        passes += str(len(input_ids)) if decoding else "+"
        return run(input_ids, **options)

    expected = greedy_answers(target, prompts, end_ids=end_ids, max_new_tokens=NEW_TOKENS, batch_size=1)
    monkeypatch.setattr(target, "states", counting)
    answers = greedy_answers(target, prompts, end_ids=end_ids, max_new_tokens=NEW_TOKENS, batch_size=2)
    assert answers == expected
    while_waiting = passes[: passes.rindex("+")]
    assert while_waiting.count("+") > 2 and "11" not in while_waiting, passes


def test_a_follow_up_is_answered_too(target: LowBitTarget, prompts: list[list[int]]) -> None:
    asked: list[list[int]] = []

    def follow_up(index: int, answer: list[int]) -> list[int] | None:
        if index >= len(prompts):
            return None
        asked.append([*prompts[index], *answer, 7])
        return asked[-1]

    answers = greedy_answers(target, prompts, end_ids=set(), max_new_tokens=4, batch_size=3, follow_up=follow_up)
    assert len(answers) == 2 * len(prompts)
    for prompt, answer in zip(asked, answers[len(prompts) :], strict=True):
        assert answer == transformers_greedy(target, prompt, set(), 4)


def test_the_report_adds_up(target: LowBitTarget, prompts: list[list[int]], end_ids: set[int]) -> None:
    reports: list[tuple[int, int]] = []
    answers = greedy_answers(
        target,
        prompts,
        end_ids=end_ids,
        max_new_tokens=NEW_TOKENS,
        batch_size=3,
        report=lambda finished, tokens: reports.append((finished, tokens)),
    )
    assert sum(finished for finished, _ in reports) == len(prompts)
    assert sum(tokens for _, tokens in reports) == sum(map(len, answers))


def conversations(*texts: str) -> list[Conversation]:
    return [
        Conversation(f"c{i}", "chat", (Message("user", text),), f"file.jsonl, line {i + 1}")
        for i, text in enumerate(texts)
    ]


def examples_of(
    target: LowBitTarget,
    tokenizer: Any,
    asked: list[Conversation],
    *,
    cache_dir: Path | None = None,
    new_tokens: int = 6,
    batch_size: int = 4,
    end_ids: set[int] | None = None,
) -> list[Example]:
    return on_policy_examples(
        target,
        tokenizer,
        asked,
        AnswerSettings(new_tokens, batch_size),
        end_ids=end_ids or {258},
        cache_dir=cache_dir,
    )


def test_examples_are_answers_to_rendered_prompts(target: LowBitTarget, tokenizer: Any) -> None:
    asked = conversations("Hello", "What is the time?")
    found = {e.id.split("/")[0]: e for e in examples_of(target, tokenizer, asked)}
    for record in asked:
        prompt = prompt_ids(tokenizer, record.messages)
        assert list(found[record.id].prompt) == prompt
        assert list(found[record.id].answer) == transformers_greedy(target, prompt, {258}, 6)
        assert found[record.id].category == "chat"


def test_a_dialog_is_answered_turn_by_turn(target: LowBitTarget, tokenizer: Any) -> None:
    """Each turn's history holds the target's own earlier answers; those of the record are dropped."""
    system, first, second = Message("system", "Be odd."), Message("user", "One?"), Message("user", "And two?")
    asked = [
        Conversation("d", "chat", (system, first, Message("assistant", "1, says the record"), second), "x, line 1"),
        *conversations("Alone"),
    ]
    found = {e.id: e for e in examples_of(target, tokenizer, asked)}
    assert len(found) == 3
    one, two = (e for e in found.values() if e.id.startswith("d/"))
    assert list(one.prompt) == prompt_ids(tokenizer, [system, first])
    assert list(one.answer) == transformers_greedy(target, list(one.prompt), {258}, 6)
    said = tokenizer.decode([t for t in one.answer if t != 258], skip_special_tokens=True)
    assert list(two.prompt) == prompt_ids(tokenizer, [system, first, Message("assistant", said), second])
    assert list(two.answer) == transformers_greedy(target, list(two.prompt), {258}, 6)
    assert "says the record" not in tokenizer.decode(two.prompt)


def test_batch_size_does_not_change_an_answer(target: LowBitTarget, tokenizer: Any) -> None:
    asked = conversations("a", "a longer question", "mid size", "why?", "x" * 40)
    one, four = (examples_of(target, tokenizer, asked, batch_size=n) for n in (1, 4))
    assert one == four


def test_a_second_run_reads_the_answers(
    target: LowBitTarget, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = conversations("Hello", "Grüße 🙂")
    first = examples_of(target, tokenizer, asked, cache_dir=tmp_path)
    (file,) = (tmp_path / "answers").iterdir()
    assert all(json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())

    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("the target was asked again")

    monkeypatch.setattr(target, "states", refuse)
    assert examples_of(target, tokenizer, asked, cache_dir=tmp_path) == first
    with pytest.raises(AssertionError, match="asked again"):
        examples_of(target, tokenizer, asked, cache_dir=None)


def test_whatever_decides_an_answer_makes_another_file(
    tiny_target: Callable[[str], LowBitTarget], tokenizer: Any, tmp_path: Path
) -> None:
    target, asked = tiny_target("none"), conversations("Hello")

    def files_after(*args: Any, **options: Any) -> int:
        examples_of(*args, cache_dir=tmp_path, **options)
        return len(list((tmp_path / "answers").iterdir()))

    assert files_after(target, tokenizer, asked) == 1
    assert files_after(target, tokenizer, asked) == 1
    assert files_after(tiny_target("mxfp4"), tokenizer, asked) == 2
    assert files_after(target, tokenizer, asked, new_tokens=5) == 3
    assert files_after(target, tokenizer, conversations("Hello!")) == 4
    assert files_after(target, tokenizer, [*asked, *conversations("Hello")]) == 5


def test_another_chat_template_asks_again(target: LowBitTarget, tokenizer: Any, tmp_path: Path) -> None:
    """The prompt's tokens decide the answer, and the template decides the prompt's tokens."""
    asked, other = conversations("Hello"), tiny_tokenizer()
    other.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<|im_end|>\n")
    examples_of(target, tokenizer, asked, cache_dir=tmp_path)
    (example,) = examples_of(target, other, asked, cache_dir=tmp_path)
    assert list(example.prompt) == prompt_ids(other, asked[0].messages)


def test_other_end_tokens_ask_again(target: LowBitTarget, tokenizer: Any, tmp_path: Path) -> None:
    asked = conversations("Hello")
    (long,) = examples_of(target, tokenizer, asked, cache_dir=tmp_path)
    (short,) = examples_of(target, tokenizer, asked, cache_dir=tmp_path, end_ids={long.answer[1]})
    assert short.answer == long.answer[:2]


def test_a_prompt_that_leaves_no_room_names_its_record(target: LowBitTarget, tokenizer: Any) -> None:
    frame = len(prompt_ids(tokenizer, [Message("user", "")]))
    fits = target.context_length - frame - 6
    examples_of(target, tokenizer, conversations("x" * fits))
    message = rf"file\.jsonl, line 2: the prompt has {frame + fits + 1} tokens, which with 6 new ones exceeds .* 512"
    with pytest.raises(ValueError, match=message):
        examples_of(target, tokenizer, conversations("short", "x" * (fits + 1)))
