"""The measurement: which prompts are decoded, what is counted, and what its table and its refusals say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bitdraft.data.chat import end_of_turn_ids, prompt_ids
from bitdraft.data.conversation import Conversation, Message
from bitdraft.quant.target import LowBitTarget, load_tokenizer
from bitdraft.speculators.decode import Rule, Seconds, generate
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.lossless import Lossless
from bitdraft.speculators.medusa import MedusaConfig, MedusaHead
from bitdraft.speculators.metrics import Acceptance
from bitdraft.speculators.sampling import Sampling
from bitdraft.speculators.vocab import DraftVocab
from bitdraft.train.measuring.acceptance import Decoded, Decoding, Measured, decode, measure, require_lossless
from bitdraft.train.measuring.document import document, result, table
from bitdraft.train.measuring.prompt_sets import PromptSet

SYSTEM, FIRST, SECOND = Message("system", "Be brief."), Message("user", "One?"), Message("user", "Two?")
HOW = Decoding(max_new_tokens=8, batch_size=4)


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(str(tiny_folder))


@pytest.fixture(scope="module")
def medusa(exact_target: LowBitTarget) -> MedusaHead:
    full = DraftVocab.full(exact_target.vocab_size)
    return MedusaHead.from_target(MedusaConfig(heads=3), exact_target, full).to(exact_target.dtype)


def conversation(name: str, *messages: Message, category: str = "chat") -> Conversation:
    return Conversation(name, category, messages, f"heldout.jsonl, line {name}")


def prompt_set(*conversations: Conversation) -> PromptSet:
    return PromptSet("heldout", conversations)


ASKED = prompt_set(
    conversation("1", SYSTEM, FIRST, Message("assistant", "Yes"), SECOND),
    conversation("2", SECOND, category="math"),
    conversation("3", FIRST),
)


def counts(passes: int, *accepted: int) -> Acceptance:
    tried = (passes, *accepted[:-1])
    return Acceptance(len(accepted), 1, passes, passes * len(accepted), accepted, tried)


def measured(*, failures: tuple[str, ...] = (), excused: int = 0) -> Measured:
    per_prompt = [counts(4, 3, 1), counts(6, 3, 2)]
    done = Decoded(per_prompt, [[], []], [[], []], Seconds(draft=1.0, verify=2.0))
    return Measured(DraftPlan(length=2), done, Lossless(2, excused, failures), [])


def test_every_turn_is_asked_with_the_answers_before_it(target: LowBitTarget, tokenizer: Any) -> None:
    done = decode(target, None, tokenizer, ASKED, None, HOW)
    assert [len(turns) for turns in done.answers] == [2, 1, 1]
    first, second = done.answers[0]
    assert first.prompt == tuple(prompt_ids(tokenizer, [SYSTEM, FIRST])), "the record's own answer is dropped"
    said = tokenizer.decode([t for t in first.answer if t not in end_of_turn_ids(target.model, tokenizer)])
    assert second.prompt == tuple(prompt_ids(tokenizer, [SYSTEM, FIRST, Message("assistant", said), SECOND]))
    assert [p.prompts for p in done.per_prompt] == [1, 1, 1]
    assert done.per_prompt[0].passes == sum(len(e.answer) - 1 for e in (first, second))
    assert done.tokens == sum(len(e.answer) for turns in done.answers for e in turns)


def test_measured_answers_are_those_of_plain_decoding(
    exact_target: LowBitTarget, tokenizer: Any, medusa: MedusaHead
) -> None:
    plans = [DraftPlan(length=k) for k in (1, 3)]
    results = measure(exact_target, medusa, tokenizer, ASKED, plans, HOW, check=2)
    plain = decode(exact_target, None, tokenizer, ASKED, None, HOW)
    for m, plan in zip(results, plans, strict=True):
        assert m.decoded.answers == plain.answers
        assert (m.lossless.checked, m.lossless.failed) == (3, 0), "two conversations have three turns"
        assert m.total.prompts == 3
        assert m.total.drafted == m.total.passes * plan.length
    require_lossless(results)


def test_above_temperature_zero_the_check_is_greedy(
    exact_target: LowBitTarget, tokenizer: Any, medusa: MedusaHead
) -> None:
    sampling = Sampling(temperature=1.0)
    how = replace(HOW, rule=Rule(sampling=sampling, seed=3))
    plan = DraftPlan(length=2, sampling=sampling)
    (one,) = measure(exact_target, medusa, tokenizer, ASKED, [plan], how, check=3)
    (two,) = measure(exact_target, medusa, tokenizer, ASKED, [plan], how, check=0)
    assert (one.lossless.checked, one.lossless.failed) == (4, 0)
    assert two.lossless.checked == 0
    assert one.decoded.answers == two.decoded.answers, "a seed gives the same answers"
    (other,) = measure(
        exact_target, medusa, tokenizer, ASKED, [plan], replace(HOW, rule=Rule(sampling=sampling)), check=0
    )
    assert other.decoded.answers != one.decoded.answers


def test_turns_have_random_numbers_of_their_own(target: LowBitTarget, tokenizer: Any) -> None:
    """The same question twice in a row must not be answered by the same draws."""
    asked = prompt_set(conversation("1", FIRST, FIRST))
    how = Decoding(max_new_tokens=12, batch_size=1, rule=Rule(sampling=Sampling(temperature=5.0)))
    first, second = decode(target, None, tokenizer, asked, None, how).answers[0]
    assert first.answer != second.answer


def test_a_drafter_that_differs_from_plain_decoding_is_caught(
    exact_target: LowBitTarget, tokenizer: Any, medusa: MedusaHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bitdraft.train.measuring.acceptance as module

    def wrong(target: LowBitTarget, drafter: Any, *args: Any, **options: Any) -> Any:
        done, seconds = generate(target, drafter, *args, **options)
        for generation in done:
            if drafter is not None:
                generation.tokens[3] = (generation.tokens[3] + 1) % 256
        return done, seconds

    monkeypatch.setattr(module, "generate", wrong)
    results = measure(exact_target, medusa, tokenizer, ASKED, [DraftPlan(length=1)], HOW, check=2)
    assert results[0].lossless.failed == 3
    with pytest.raises(RuntimeError, match="draft length 1 is not lossless"):
        require_lossless(results)


def test_a_prompt_that_leaves_no_room_names_its_record(target: LowBitTarget, tokenizer: Any) -> None:
    long = Message("user", "x" * 400)
    tokens = len(prompt_ids(tokenizer, [long]))
    asked = prompt_set(conversation("1", FIRST), conversation("2", long))
    room = replace(HOW, max_new_tokens=target.context_length - tokens - 1)
    assert len(decode(target, None, tokenizer, asked, None, replace(room, max_new_tokens=2)).answers) == 2
    with pytest.raises(ValueError, match=rf"heldout\.jsonl, line 2: the prompt has {tokens} tokens, .* context of 512"):
        decode(target, None, tokenizer, asked, None, replace(room, max_new_tokens=room.max_new_tokens + 1))


def test_a_rate_never_comes_without_its_length_and_its_counts(target: LowBitTarget) -> None:
    text = table([measured()])
    for shown in ("1.900", "45.0%", "0.60 0.30"):  # (10 + 9) / 10, 9 / 20, (6, 3) of 10 passes
        assert shown in text
    two = prompt_set(conversation("1", FIRST), conversation("2", FIRST, category=""))
    entry = result(two, measured())
    about = document(
        target, head="x", kind="medusa", trained_on=None, plan=DraftPlan(length=2), how=HOW, results=[entry]
    )
    expected = {"draft_length": 2, "prompts": 2, "passes": 10, "drafted": 20, "accepted": 9, "emitted": 19}
    assert {key: about["results"][0][key] for key in expected} == expected
    assert entry["acceptance_length"] == pytest.approx(1.9)
    assert entry["acceptance_rate"] == pytest.approx(0.45)
    assert entry["drafted_per_pass"] == 2
    assert entry["per_position"] == pytest.approx([0.6, 0.3])
    assert entry["conditional"] == pytest.approx([0.6, 0.5])
    assert entry["per_prompt"] == [[4, 8, 3, 1], [6, 12, 3, 2]]
    assert {name: c["passes"] for name, c in entry["by_category"].items()} == {"(none)": 6, "chat": 4}


def test_an_unexcused_difference_stops_everything() -> None:
    require_lossless([measured(), measured(excused=2)])
    with pytest.raises(RuntimeError, match="draft length 2 is not lossless: p7: token 3"):
        require_lossless([measured(), measured(failures=("p7: token 3 differs", "p8: token 1 differs"))])


def test_too_few_passes_and_too_short_answers_are_said(
    exact_target: LowBitTarget, tokenizer: Any, medusa: MedusaHead
) -> None:
    (short,) = measure(
        exact_target, medusa, tokenizer, ASKED, [DraftPlan(length=3)], replace(HOW, max_new_tokens=3), check=0
    )
    assert short.warnings == [
        "heldout: 3 prompts are too few for intervals",
        "heldout: no answer is longer than 3 tokens, of which 3 are drafted at once: "
        "acceptance from so few passes means little",
    ]
    (few,) = measure(exact_target, medusa, tokenizer, ASKED, [DraftPlan(length=3)], HOW, check=0)
    assert "passes means little: measure more prompts" in few.warnings[1]
    assert "warning: heldout" in table([few])


def test_an_empty_category_is_refused() -> None:
    assert ASKED.of_category(["math"]).ids == ["2"]
    with pytest.raises(ValueError, match="heldout has no prompt of category 'code': it has chat, math"):
        ASKED.of_category(["math", "code"])
