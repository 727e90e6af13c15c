"""Decoding with drafts writes what the target alone writes, and counts what happened."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget, TargetStates, load_target
from bitdraft.speculators.base import DraftContext, DraftHead, DraftState
from bitdraft.speculators.decode import Generation, generate
from bitdraft.speculators.eagle3 import Eagle3Head
from bitdraft.speculators.medusa import MedusaHead
from bitdraft.speculators.vocab import DraftVocab

NEW_TOKENS = 18
MakeEagle3 = Callable[..., Eagle3Head]
MakeMedusa = Callable[..., MedusaHead]
Prompts = list[list[int]]


class _Known(DraftState):
    """The tokens of every sequence so far, as the decoding loop has told them."""

    def __init__(self) -> None:
        self.sequences: list[list[int]] = []

    def keep_rows(self, rows: Tensor) -> None:
        self.sequences = [self.sequences[i] for i in rows.tolist()]


class Scripted(DraftHead):
    """Drafts from a list of answers: ``right(position, k)`` tokens as they stand there, wrong ones behind.

    It finds its place by the tokens that the loop hands over, so a context that lies leads it astray.
    """

    kind = "scripted"
    capture_layers = (1, 4)

    def __init__(self, target: LowBitTarget, texts: Sequence[list[int]], right: Callable[[int, int], int]) -> None:
        super().__init__()
        self.vocab, self.target_hidden_size = DraftVocab.full(target.vocab_size), target.hidden_size
        self.texts, self.right = texts, right
        self.batches: list[int] = []

    @classmethod
    def from_target(cls, config: Any, target: LowBitTarget, vocab: DraftVocab) -> "Scripted":
        raise NotImplementedError

    @property
    def longest_draft(self) -> int | None:
        return None

    def training_outputs(self, states: TargetStates, tokens: Tensor, rows: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def output_weight(self) -> Tensor:
        raise NotImplementedError

    def new_state(self, slots: int) -> _Known:
        assert slots > 0
        return _Known()

    def draft(self, context: DraftContext, state: DraftState, k: int) -> Tensor:
        assert isinstance(state, _Known)
        batch, rows = context.next_tokens.shape
        assert context.captured.shape[:3] == (batch, rows, len(self.capture_layers))
        assert context.last_hidden.shape == (batch, rows, self.target_hidden_size)
        self.batches.append(batch)
        if not state.sequences:
            state.sequences = [[257] for _ in range(batch)]  # every prompt begins so
        drafts = []
        for row, known in enumerate(state.sequences):
            seen = int(context.start[row]) + 1
            assert len(known) >= seen, "no token is skipped"
            del known[seen:]  # a finished sequence that rides along does not advance
            known += context.next_tokens[row, : int(context.newest[row]) + 1].tolist()
            text = next(t for t in self.texts if t[: len(known)] == known)
            coming = text[len(known) :][:k]
            assert len(coming) == k, "the script ends too early"
            right = self.right(len(known), k)
            drafts.append([t if i < right else (t + 1) % self.vocab.target_size for i, t in enumerate(coming)])
        return torch.tensor(drafts)


def decode(
    target: LowBitTarget,
    head: DraftHead | None,
    prompts: Prompts,
    k: int,
    *,
    batch_size: int = 8,
    new_tokens: int = NEW_TOKENS,
    end_ids: set[int] | None = None,
) -> list[Generation]:
    done, _ = generate(
        target,
        head,
        prompts,
        draft_length=k,
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
@pytest.mark.parametrize("kind", ["eagle3", "eagle3 reduced", "medusa", "medusa fresh"])
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
        "medusa": lambda: make_medusa(target, heads=5),
        "medusa fresh": lambda: make_medusa(target, heads=5, scale=0),
    }[kind]()
    done = decode(target, head, prompts, k)
    assert answers(done) == cut(plain)
    assert all(g.passes >= 1 for g in done)


@pytest.mark.parametrize("preset", ["mxfp4", "nvfp4", "none+kvfp8", "mxfp4+kvfp8"])
def test_random_heads_change_no_token_of_a_low_bit_target(
    tiny_folder: Path, make_eagle3: MakeEagle3, make_medusa: MakeMedusa, prompts: Prompts, preset: str
) -> None:
    """In fp64: where activations are rounded to eight bits, an fp32 sum in another order can fall on the other side."""
    target = load_target(str(tiny_folder), load_recipe(preset), dtype=torch.float64, compile_quantizer="off")
    alone = answers(decode(target, None, prompts, 0))
    for head in (make_eagle3(target), make_medusa(target, heads=3)):
        assert answers(decode(target, head, prompts, 3)) == alone


@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_head_that_is_always_right_gains_k_tokens_per_pass(
    target: LowBitTarget, prompts: Prompts, plain: Prompts, texts: Prompts, k: int
) -> None:
    done = decode(target, Scripted(target, texts, lambda _position, k: k), prompts, k)
    assert answers(done) == cut(plain)
    for generation in done:
        passes = -(-(NEW_TOKENS - 1) // (k + 1))  # the first token comes from the prefill; the last pass counts whole
        assert (generation.passes, generation.accepted_at) == (passes, [passes] * k)
        assert generation.acceptance().length == k + 1
        assert generation.acceptance().rate == 1.0


def test_a_head_that_is_always_wrong_gains_nothing(
    target: LowBitTarget, prompts: Prompts, plain: Prompts, texts: Prompts
) -> None:
    done = decode(target, Scripted(target, texts, lambda _position, _k: 0), prompts, 3)
    assert answers(done) == cut(plain)
    for generation in done:
        assert (generation.passes, generation.accepted_at) == (NEW_TOKENS - 1, [0, 0, 0])
        assert generation.acceptance().length == 1.0


def uneven(position: int, k: int) -> int:
    """Neighbouring sequences accept different numbers of drafts in the same pass."""
    return (position * 7 + 3) % (k + 1)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_counts_are_those_of_a_walk_over_each_answer(
    target: LowBitTarget, prompts: Prompts, plain: Prompts, texts: Prompts, batch_size: int
) -> None:
    k = 4
    done = decode(target, Scripted(target, texts, uneven), prompts, k, batch_size=batch_size)
    assert answers(done) == cut(plain)
    for prompt, generation in zip(prompts, done, strict=True):
        written, passes, accepted_at = 1, 0, [0] * k
        while written < NEW_TOKENS:
            right = uneven(len(prompt) + written, k)
            passes += 1
            accepted_at = [a + (i < right) for i, a in enumerate(accepted_at)]
            written += right + 1
        assert (generation.passes, generation.accepted_at) == (passes, accepted_at)
        counts = generation.acceptance()
        assert counts.emitted == counts.passes + counts.accepted
        assert counts.emitted >= len(generation.tokens) - 1


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_batching_changes_neither_tokens_nor_counts(
    target: LowBitTarget,
    make_eagle3: MakeEagle3,
    make_medusa: MakeMedusa,
    prompts: Prompts,
    plain: Prompts,
    kind: str,
) -> None:
    if kind == "eagle3":  # few tokens to choose from, so that a random head is sometimes right
        written = [torch.tensor(answer) for answer in plain]
        head: DraftHead = make_eagle3(target, vocab=DraftVocab.most_frequent(written, 8, target.vocab_size, ()))
    else:
        head = make_medusa(target, heads=3, scale=0.02)
    one, all_at_once = (decode(target, head, prompts[:5], 3, batch_size=n, new_tokens=40) for n in (1, 5))
    assert [(g.tokens, g.passes, g.accepted_at) for g in one] == [
        (g.tokens, g.passes, g.accepted_at) for g in all_at_once
    ]
    assert sum(sum(g.accepted_at) for g in one) > 0, "no draft was accepted: nothing was compared"


@pytest.mark.parametrize("k", [0, 1, 4])
def test_an_answer_stops_behind_its_end_token(
    target: LowBitTarget, prompts: Prompts, plain: Prompts, texts: Prompts, k: int
) -> None:
    ends = {plain[0][5], plain[3][2], plain[6][9]}
    expected = []
    for answer in cut(plain):
        stop = next((i for i, token in enumerate(answer) if token in ends), NEW_TOKENS - 1)
        expected.append(answer[: stop + 1])
    assert len({len(e) for e in expected}) > 2, "answers should end at different times"
    head = Scripted(target, texts, uneven) if k else None
    done = decode(target, head, prompts, k, end_ids=ends)
    assert answers(done) == expected
    if head:
        assert head.batches[0] > head.batches[-1], "finished answers should leave the batch"
        assert head.batches == sorted(head.batches, reverse=True)


@pytest.mark.parametrize("new_tokens", [1, 2, 5])
def test_no_answer_is_longer_than_asked(
    target: LowBitTarget, prompts: Prompts, plain: Prompts, texts: Prompts, new_tokens: int
) -> None:
    done = decode(target, Scripted(target, texts, lambda _position, k: k), prompts, 5, new_tokens=new_tokens)
    assert answers(done) == cut(plain, new_tokens)
    if new_tokens == 1:
        assert [g.passes for g in done] == [0] * len(prompts)


def test_every_prompt_is_reported_once(target: LowBitTarget, prompts: Prompts) -> None:
    reported: list[int] = []
    _, seconds = generate(
        target,
        None,
        prompts,
        draft_length=0,
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
    for k in (0, 3):
        with pytest.raises(ValueError, match=rf"draft length {k} is not one the head can draft \(1 … 2\)"):
            decode(target, head, prompts, k)
    with pytest.raises(ValueError, match="drafts need a head"):
        decode(target, None, prompts, 2)


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
    target: LowBitTarget, prompts: Prompts, plain: Prompts, texts: Prompts
) -> None:
    """The longest prompt accepts every draft and ends first, deep into its last pass; the others accept nothing."""
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    fast = len(prompts[longest])

    def right(position: int, k: int) -> int:
        return k if position >= fast else 0

    done = decode(target, Scripted(target, texts, right), prompts, 5, new_tokens=8)
    assert answers(done) == cut(plain, 8)
