"""Decoding with drafts writes what the target alone writes, and counts what happened."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget, load_target
from bitdraft.speculators.base import Drafter, DraftHead
from bitdraft.speculators.decode import Generation, Rule, generate
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.eagle3 import Eagle3Head
from bitdraft.speculators.medusa import MedusaHead
from bitdraft.speculators.metrics import Acceptance
from bitdraft.speculators.sampling import Sampling
from bitdraft.speculators.vocab import DraftVocab

NEW_TOKENS = 18
MakeEagle3 = Callable[..., Eagle3Head]
MakeMedusa = Callable[..., MedusaHead]
Scripted = Callable[[LowBitTarget, Sequence[list[int]], Callable[[int], Sequence[int]]], Any]
Prompts = list[list[int]]


def decode(
    target: LowBitTarget,
    drafter: Drafter | None,
    prompts: Prompts,
    k: int,
    *,
    batch_size: int = 8,
    new_tokens: int = NEW_TOKENS,
    end_ids: set[int] | None = None,
) -> list[Generation]:
    done, _ = generate(
        target,
        drafter,
        prompts,
        plan=DraftPlan(length=k) if k else None,
        max_new_tokens=new_tokens,
        end_ids=end_ids or set(),
        batch_size=batch_size,
    )
    return done


def answers(generations: Sequence[Generation]) -> list[list[int]]:
    return [g.tokens for g in generations]


@pytest.fixture(scope="module")
def plain(target: LowBitTarget, prompts: Prompts) -> Prompts:
    """The target's own answers, longer than any test asks for."""
    return answers(decode(target, None, prompts, 0, new_tokens=NEW_TOKENS + 12))


@pytest.fixture(scope="module")
def texts(prompts: Prompts, plain: Prompts) -> Prompts:
    return [[*prompt, *answer] for prompt, answer in zip(prompts, plain, strict=True)]


def cut(plain: Prompts, new_tokens: int = NEW_TOKENS) -> Prompts:
    return [answer[:new_tokens] for answer in plain]


def test_plain_decoding_is_transformers_greedy_search(target: LowBitTarget, prompts: Prompts, plain: Prompts) -> None:
    for prompt, answer in list(zip(prompts, plain, strict=True))[:4]:
        out = target.model.generate(  # type: ignore[operator]
            input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None
        )
        assert out[0, len(prompt) :].tolist() == answer[:NEW_TOKENS]


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize(
    "kind", ["eagle3", "eagle3 reduced", "eagle3 low rank", "medusa", "medusa fresh", "medusa linked"]
)
def test_random_heads_change_no_token(
    target: LowBitTarget,
    make_eagle3: MakeEagle3,
    make_medusa: MakeMedusa,
    prompts: Prompts,
    plain: Prompts,
    kind: str,
    k: int,
) -> None:
    head: DraftHead = {
        "eagle3": lambda: make_eagle3(target),
        "eagle3 reduced": lambda: make_eagle3(target, size=100),
        "eagle3 low rank": lambda: make_eagle3(target, size=100, output_rank=20),
        "medusa": lambda: make_medusa(target, heads=5),
        "medusa linked": lambda: make_medusa(target, heads=5, link=True),
        "medusa fresh": lambda: make_medusa(target, heads=5, scale=0),
    }[kind]()
    done = decode(target, head, prompts, k)
    assert answers(done) == cut(plain)
    assert all(g.counts.passes >= 1 for g in done)


@pytest.mark.parametrize("preset", ["mxfp4", "nvfp4", "none+kvfp8", "mxfp4+kvfp8"])
def test_random_heads_change_no_token_of_a_low_bit_target(
    tiny_folder: Path, make_eagle3: MakeEagle3, make_medusa: MakeMedusa, prompts: Prompts, preset: str
) -> None:
    """In fp64: where activations are rounded to eight bits, an fp32 sum in another order can fall on the other side."""
    target = load_target(str(tiny_folder), load_recipe(preset), dtype=torch.float64, compile_quantizer="off")
    alone = answers(decode(target, None, prompts, 0))
    for head in (make_eagle3(target), make_medusa(target, heads=3)):
        assert answers(decode(target, head, prompts, 3)) == alone


def counts_of(k: int, passes: int, accepted_at: list[int], tried_at: list[int]) -> Acceptance:
    return Acceptance(k, 1, passes, passes * k, tuple(accepted_at), tuple(tried_at))


@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_drafter_that_is_always_right_gains_k_tokens_per_pass(
    target: LowBitTarget, scripted: Scripted, prompts: Prompts, plain: Prompts, texts: Prompts, k: int
) -> None:
    done = decode(target, scripted(target, texts, lambda _: [0] * k), prompts, k)
    assert answers(done) == cut(plain)
    for generation in done:
        passes = -(-(NEW_TOKENS - 1) // (k + 1))  # the first token comes from the prefill; the last pass counts whole
        assert generation.counts == counts_of(k, passes, [passes] * k, [passes] * k)
        assert generation.counts.length == k + 1
        assert generation.counts.rate == 1.0


def test_a_drafter_that_is_always_wrong_gains_nothing(
    target: LowBitTarget, scripted: Scripted, prompts: Prompts, plain: Prompts, texts: Prompts
) -> None:
    done = decode(target, scripted(target, texts, lambda _: []), prompts, 3)
    assert answers(done) == cut(plain)
    for generation in done:
        assert generation.counts == counts_of(3, NEW_TOKENS - 1, [0, 0, 0], [NEW_TOKENS - 1, 0, 0])
        assert generation.counts.length == 1.0


def uneven(position: int, k: int = 4) -> list[int]:
    """Neighbouring sequences accept different numbers of drafts in the same pass."""
    return [0] * ((position * 7 + 3) % (k + 1))


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_counts_are_those_of_a_walk_over_each_answer(
    target: LowBitTarget, scripted: Scripted, prompts: Prompts, plain: Prompts, texts: Prompts, batch_size: int
) -> None:
    k = 4
    done = decode(target, scripted(target, texts, uneven), prompts, k, batch_size=batch_size)
    assert answers(done) == cut(plain)
    for prompt, generation in zip(prompts, done, strict=True):
        written, passes, accepted_at, tried_at = 1, 0, [0] * k, [0] * k
        while written < NEW_TOKENS:
            right = len(uneven(len(prompt) + written))
            passes += 1
            accepted_at = [a + (i < right) for i, a in enumerate(accepted_at)]
            tried_at = [t + (i <= right) for i, t in enumerate(tried_at)]
            written += right + 1
        assert generation.counts == counts_of(k, passes, accepted_at, tried_at)
        assert generation.counts.emitted >= len(generation.tokens) - 1


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "medusa linked"])
def test_batching_changes_neither_tokens_nor_counts(
    quick_target: Callable[[torch.dtype], LowBitTarget],
    quick_head: Callable[[str, LowBitTarget], DraftHead],
    quick_prompts: Prompts,
    kind: str,
) -> None:
    target = quick_target(torch.float32)
    head = quick_head(kind, target)
    one, all_at_once = (decode(target, head, quick_prompts[:5], 3, batch_size=n, new_tokens=40) for n in (1, 5))
    assert one == all_at_once
    assert sum(g.counts.accepted for g in one) > 0, "no draft was accepted: nothing was compared"


@pytest.mark.parametrize("k", [0, 1, 4])
def test_an_answer_stops_behind_its_end_token(
    target: LowBitTarget, scripted: Scripted, prompts: Prompts, plain: Prompts, texts: Prompts, k: int
) -> None:
    ends = {plain[0][5], plain[3][2], plain[6][9]}
    expected = []
    for answer in cut(plain):
        stop = next((i for i, token in enumerate(answer) if token in ends), NEW_TOKENS - 1)
        expected.append(answer[: stop + 1])
    assert len({len(e) for e in expected}) > 2, "answers should end at different times"
    drafter = scripted(target, texts, uneven) if k else None
    done = decode(target, drafter, prompts, k, end_ids=ends)
    assert answers(done) == expected
    if drafter:
        assert drafter.batches[0] > drafter.batches[-1], "finished answers should leave the batch"
        assert drafter.batches == sorted(drafter.batches, reverse=True)


@pytest.mark.parametrize("new_tokens", [1, 2, 5])
def test_no_answer_is_longer_than_asked(
    target: LowBitTarget, scripted: Scripted, prompts: Prompts, plain: Prompts, texts: Prompts, new_tokens: int
) -> None:
    done = decode(target, scripted(target, texts, lambda _: [0] * 5), prompts, 5, new_tokens=new_tokens)
    assert answers(done) == cut(plain, new_tokens)
    if new_tokens == 1:
        assert [g.counts.passes for g in done] == [0] * len(prompts)


def test_every_prompt_is_reported_once(target: LowBitTarget, prompts: Prompts) -> None:
    reported: list[int] = []
    _, seconds = generate(
        target,
        None,
        prompts,
        max_new_tokens=4,
        end_ids=set(),
        batch_size=3,
        report=reported.append,
    )
    assert sum(reported) == len(prompts)
    assert seconds.verify > 0
    assert seconds.draft == 0


def test_a_draft_length_that_the_head_does_not_have_is_refused(
    target: LowBitTarget, make_medusa: MakeMedusa, prompts: Prompts
) -> None:
    head = make_medusa(target, heads=2)
    with pytest.raises(ValueError, match=r"draft length 3 is more than the medusa drafter has \(1 … 2\)"):
        decode(target, head, prompts, 3)
    for drafter, k in ((None, 2), (head, 0)):
        with pytest.raises(ValueError, match="drafts need both a drafter and a plan"):
            decode(target, drafter, prompts, k)


def test_typical_acceptance_without_a_temperature_is_refused() -> None:
    with pytest.raises(ValueError, match="typical acceptance needs a temperature above 0"):
        Rule(typical=True)
    assert Rule(sampling=Sampling(temperature=1.0)).is_lossless
    assert not Rule(sampling=Sampling(temperature=1.0), typical=True).is_lossless


@pytest.mark.parametrize(
    ("what", "changes"), [("hidden size", {"hidden_size": 32}), ("vocabulary", {"vocab_size": 300})]
)
def test_a_head_of_another_target_is_refused(
    target: LowBitTarget, make_eagle3: MakeEagle3, prompts: Prompts, what: str, changes: dict[str, int]
) -> None:
    head = make_eagle3(target)
    if "hidden_size" in changes:
        head.target_hidden_size = changes["hidden_size"]
    else:
        head.vocab = DraftVocab.full(changes["vocab_size"])
    with pytest.raises(ValueError, match=f"trained for a target with {what}"):
        decode(target, head, prompts, 1)


def test_a_finished_sequence_that_rides_along_never_outgrows_the_cache(
    target: LowBitTarget, scripted: Scripted, prompts: Prompts, plain: Prompts, texts: Prompts
) -> None:
    """The longest prompt accepts every draft and ends first, deep into its last pass; the others accept nothing."""
    fast = max(map(len, prompts))
    drafter = scripted(target, texts, lambda position: [0] * 5 if position >= fast else [])
    done = decode(target, drafter, prompts, 5, new_tokens=8)
    assert answers(done) == cut(plain, 8)
