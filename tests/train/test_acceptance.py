"""The measurement: which prompts are decoded, and what its table and its refusal say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bitdraft.data.chat import prompt_ids
from bitdraft.data.sources import Conversation, Message
from bitdraft.quant.target import LowBitTarget, load_tokenizer
from bitdraft.speculators.decode import Seconds
from bitdraft.speculators.lossless import Lossless
from bitdraft.speculators.metrics import Acceptance
from bitdraft.train.acceptance import Measured, PromptSet, document, prompt_set, require_lossless, set_name, table
from bitdraft.train.config import AcceptanceConfig


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(str(tiny_folder))


def conversation(name: str, *messages: Message) -> Conversation:
    return Conversation(name, "chat", messages, f"heldout.jsonl, line {name}")


SYSTEM, FIRST, SECOND = Message("system", "Be brief."), Message("user", "One?"), Message("user", "Two?")


def measured(*, failures: tuple[str, ...] = (), excused: int = 0) -> Measured:
    per_prompt = [Acceptance(2, 1, 4, (3, 1)), Acceptance(2, 1, 6, (3, 2))]
    return Measured(2, per_prompt, Seconds(draft=1.0, verify=2.0), Lossless(2, excused, failures))


def test_each_conversation_is_asked_up_to_its_first_question(target: LowBitTarget, tokenizer: Any) -> None:
    asked = [
        conversation("1", SYSTEM, FIRST, Message("assistant", "Yes"), SECOND),
        conversation("2", SECOND),
        conversation("3", FIRST),
    ]
    prompts = prompt_set(target, tokenizer, asked, "heldout", AcceptanceConfig(prompts=2, max_new_tokens=8))
    assert prompts.name == "heldout"
    assert prompts.ids == ("1", "2")
    assert prompts.prompts == tuple(tuple(prompt_ids(tokenizer, m)) for m in ([SYSTEM, FIRST], [SECOND]))


def test_a_prompt_that_leaves_no_room_names_its_record(target: LowBitTarget, tokenizer: Any) -> None:
    long = Message("user", "x" * 400)
    tokens = len(prompt_ids(tokenizer, [long]))
    room = AcceptanceConfig(draft_lengths=(1, 3), max_new_tokens=target.context_length - tokens - 4)
    asked = [conversation("1", FIRST), conversation("2", long)]
    assert len(prompt_set(target, tokenizer, asked, "h", room).ids) == 2
    with pytest.raises(ValueError, match=rf"heldout\.jsonl, line 2: the prompt has {tokens} tokens, .* context of 512"):
        prompt_set(target, tokenizer, asked, "h", replace(room, max_new_tokens=room.max_new_tokens + 1))


def test_a_rate_never_comes_without_its_length_and_its_counts(target: LowBitTarget) -> None:
    text = table([measured()])
    for shown in ("1.900", "45.0%", "0.60 0.30"):  # (10 + 9) / 10, 9 / 20, (6, 3) of 10 passes
        assert shown in text
    prompts = PromptSet("heldout", (), ())
    (result,) = document(target, "export", prompts, [measured()])["results"]
    expected = {"draft_length": 2, "prompts": 2, "passes": 10, "drafted": 20, "accepted": 9, "emitted": 19}
    assert {key: result[key] for key in expected} == expected
    assert result["acceptance_length"] == pytest.approx(1.9)
    assert result["acceptance_rate"] == pytest.approx(0.45)
    assert result["per_position"] == pytest.approx([0.6, 0.3])
    assert result["conditional"] == pytest.approx([0.6, 0.5])


def test_an_unexcused_difference_stops_everything() -> None:
    require_lossless([measured(), measured(excused=2)])
    with pytest.raises(RuntimeError, match="draft length 2 is not lossless: p7: token 3"):
        require_lossless([measured(), measured(failures=("p7: token 3 differs", "p8: token 1 differs"))])


def test_sets_are_named_after_their_files() -> None:
    assert set_name([Path("a/heldout.jsonl")]) == "heldout"
    assert set_name([Path("a.jsonl"), Path("b/c.jsonl")]) == "a+c"
