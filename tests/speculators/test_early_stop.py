"""Chains that end early: where confidence or cost says so, and without changing what the target writes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.target import LowBitTarget, TargetStates
from bitdraft.speculators.base import DraftContext, Drafter, DraftHead, DraftState
from bitdraft.speculators.confidence import Calibration, kept_lengths
from bitdraft.speculators.decode import Rule, generate
from bitdraft.speculators.draft_length import CostModel, fixed_best_length
from bitdraft.speculators.drafting import DraftPlan, build_tree
from bitdraft.speculators.early_stop import ChainLengths, EarlyStop
from bitdraft.speculators.sampling import Sampling
from bitdraft.speculators.tree import DraftTree

K, V = 4, 5
AS_THEY_ARE = Calibration((1.0,) * K, (0.0,) * K)
Prompts = list[list[int]]
QuickHead = Callable[[str, LowBitTarget], DraftHead]


@dataclass
class Context:
    newest_token: Tensor


@dataclass
class Sure:
    """A drafter of given confidences ``[B, K]``: its best token's probability at each depth, the others equal."""

    confidence: Tensor
    steps: int = field(default=0)

    def logits(self, depth: int) -> Tensor:
        best = self.confidence[:, depth, None]
        return torch.cat([best, ((1 - best) / (V - 1)).expand(-1, V - 1)], dim=1).log()

    def first(self, context: Any, state: Any) -> Tensor:
        self.steps = 1
        return self.logits(0)

    def following(self, state: Any, tokens: Tensor, parents: Tensor) -> Tensor:
        self.steps += 1
        return self.logits(self.steps - 1)[:, None]

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids

    def over_target(self, probabilities: Tensor) -> Tensor:
        return probabilities


def chain(drafter: Sure, stop: EarlyStop, sampling: Sampling | None = None) -> DraftTree:
    plan = DraftPlan(length=K, stop=stop, sampling=sampling or Sampling())
    batch = len(drafter.confidence)
    uniforms = torch.rand(batch, plan.draws, generator=torch.Generator().manual_seed(0))
    tree = build_tree(drafter, Context(torch.zeros(batch, dtype=torch.int64)), None, plan, uniforms)
    assert tree.is_chain
    assert tree.real.cumprod(1).bool().equal(tree.real), "what counts is a beginning of the chain"
    return tree


def some_confidences(seed: int, batch: int) -> Tensor:
    return 0.3 + 0.69 * torch.rand(batch, K, generator=torch.Generator().manual_seed(seed))


# --- the threshold ----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 4),
    threshold=st.floats(0, 1),
    shift=st.floats(-1, 1),
    drawn=st.booleans(),
)
def test_chains_end_before_the_first_draft_below_the_threshold(
    seed: int, batch: int, threshold: float, shift: float, drawn: bool
) -> None:
    drafter = Sure(some_confidences(seed, batch))
    calibration = Calibration((1.0, 1.5, 0.7, 2.0), (shift, 0.0, -shift, 0.3))
    tree = chain(
        drafter,
        EarlyStop(calibration=calibration, threshold=threshold),
        Sampling(temperature=1.0 if drawn else 0.0),
    )
    expected = kept_lengths(calibration.calibrated(drafter.confidence), threshold)
    assert tree.drafted.tolist() == expected.tolist()
    assert tree.tokens.shape[1] == int(expected.max()) + 1, "nothing is drafted that no sequence wants"
    assert drafter.steps <= min(int(expected.max()) + 1, K)
    if tree.proposals is not None:
        assert tree.proposals.shape[:2] == tree.tokens.shape


def test_a_threshold_of_zero_ends_nothing_and_one_of_one_ends_everything() -> None:
    drafter = Sure(some_confidences(0, 3))
    assert chain(drafter, EarlyStop(calibration=AS_THEY_ARE)).drafted.tolist() == [K] * 3
    nothing = chain(drafter, EarlyStop(calibration=AS_THEY_ARE, threshold=1.0), Sampling(temperature=1.0))
    assert nothing.tokens.tolist() == [[0]] * 3
    assert drafter.steps == 1


def test_whether_a_draft_is_kept_does_not_depend_on_which_token_was_drawn() -> None:
    """Otherwise speculative sampling would not leave the target's distribution."""
    drafter, stop = Sure(some_confidences(0, 1).expand(500, -1)), EarlyStop(calibration=AS_THEY_ARE, threshold=0.3)
    tree = chain(drafter, stop, Sampling(temperature=1.0))
    assert len(tree.drafted.unique()) == 1
    assert len(tree.tokens[:, 1].unique()) == V


# --- the cost ---------------------------------------------------------------------------------------------------------


PER_POSITION = (0.8, 0.6, 0.45, 0.3)


def by_cost(draft: float, per_token: float) -> EarlyStop:
    cost = CostModel(draft=draft, verified=((1, 1.0), (100, 1.0 + 99 * per_token)))
    return EarlyStop(calibration=AS_THEY_ARE, cost=cost, per_position=PER_POSITION)


@pytest.mark.parametrize(("draft", "per_token"), [(0.1, 0.01), (0.4, 0.05), (0.01, 0.3)])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_unit_of_cost_is_worth_what_the_best_fixed_length_earns(draft: float, per_token: float, batch: int) -> None:
    stop = by_cost(draft, per_token)
    assert stop.cost is not None
    best, rate = fixed_best_length(PER_POSITION, stop.cost, batch)
    emitted = batch * (1 + sum(PER_POSITION[:best]))
    spent = best * draft + 1 + (batch * (1 + best) - 1) * per_token
    assert rate == pytest.approx(emitted / spent)
    assert ChainLengths(stop, batch, torch.device("cpu")).rate == rate


def test_cheap_drafts_are_all_made_and_dear_ones_are_not() -> None:
    drafter = Sure(torch.full((2, K), 0.8))
    assert chain(drafter, by_cost(0.0, 0.0)).drafted.tolist() == [K] * 2
    assert drafter.steps == K
    lengths = [int(chain(drafter, by_cost(0.0, per_token)).drafted[0]) for per_token in (0.0, 0.3, 0.6, 2.0)]
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) > 2
    assert lengths[-1] == 0


def test_dear_draft_steps_are_not_taken() -> None:
    """The first step's logits are there in any case; another one must promise more than it costs."""
    drafter = Sure(torch.full((1, K), 0.99))
    tree = chain(drafter, by_cost(5.0, 0.0))
    assert drafter.steps == 1
    assert tree.drafted.tolist() == [1]


def test_unsure_sequences_end_before_sure_ones() -> None:
    drafter = Sure(torch.tensor([0.95, 0.35])[:, None].expand(-1, K))
    sure, unsure = chain(drafter, by_cost(0.05, 0.3)).drafted.tolist()
    assert sure > unsure


def test_settings_that_cannot_be_are_refused() -> None:
    for threshold in (-0.1, 1.5):
        with pytest.raises(ValueError, match=rf"the confidence threshold must lie in \[0, 1\], got {threshold}"):
            EarlyStop(calibration=AS_THEY_ARE, threshold=threshold)
    with pytest.raises(ValueError, match="by cost needs the acceptance at each position"):
        EarlyStop(calibration=AS_THEY_ARE, cost=CostModel(draft=1.0, verified=((1, 1.0),)))
    with pytest.raises(ValueError, match="the early stop was calibrated for drafts of 2 tokens, not 3"):
        DraftPlan(length=3, stop=EarlyStop(calibration=Calibration((1.0, 1.0), (0.0, 0.0))))
    short = EarlyStop(calibration=AS_THEY_ARE, cost=CostModel(draft=1.0, verified=((1, 1.0),)), per_position=(0.5,))
    with pytest.raises(ValueError, match="calibrated for drafts of 1 tokens, not 2"):
        DraftPlan(length=2, stop=short)


# --- in the decoding loop ---------------------------------------------------------------------------------------------


class Watched(Drafter):
    """A head, and how many tokens it has drafted for all sequences together in each pass."""

    kind = "watched"

    def __init__(self, head: DraftHead) -> None:
        self.head, self.capture_layers = head, head.capture_layers
        self.drafted: list[int] = []

    def fits(self, target: LowBitTarget) -> None:
        self.head.fits(target)

    def new_state(self, slots: int, cache: SlotCache) -> DraftState:
        return self.head.new_state(slots, cache)

    def propose(self, context: DraftContext, state: DraftState, plan: DraftPlan, uniforms: Tensor) -> DraftTree:
        tree = self.head.propose(context, state, plan, uniforms)
        self.drafted.append(int(tree.drafted.sum()))
        return tree


STOPS = {
    "threshold": EarlyStop(calibration=AS_THEY_ARE, threshold=0.3),
    "cost": EarlyStop(
        calibration=AS_THEY_ARE,
        threshold=0.1,
        cost=CostModel(draft=0.05, verified=((1, 1.0), (100, 10.0))),
        per_position=PER_POSITION,
    ),
    "everything": EarlyStop(calibration=AS_THEY_ARE, threshold=1.0),
}


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("kind", ["eagle3", "eagle3 reduced", "medusa", "medusa linked"])
def test_stopped_chains_change_no_token_and_are_counted_as_drafted(
    quick_target: Callable[[torch.dtype], LowBitTarget],
    quick_head: QuickHead,
    quick_prompts: Prompts,
    kind: str,
    stop: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = quick_target(torch.float64)
    settings: dict[str, Any] = {"max_new_tokens": 12, "end_ids": set()}
    plain, _ = generate(target, None, quick_prompts, batch_size=8, **settings)
    widths: list[int] = []
    run = target.states

    def states(input_ids: Tensor, **options: Any) -> TargetStates:
        widths.append(input_ids.shape[1])
        return run(input_ids, **options)

    monkeypatch.setattr(target, "states", states)
    drafted = 0
    for prompt, expected in list(zip(quick_prompts, plain, strict=True))[:3]:  # alone: every pass drafts for someone
        drafter = Watched(quick_head(kind, target))
        plan = DraftPlan(length=K, stop=STOPS[stop])
        done, _ = generate(target, drafter, [prompt], plan=plan, batch_size=1, **settings)
        assert done[0].tokens == expected.tokens
        assert done[0].counts.drafted == sum(drafter.drafted)
        assert done[0].counts.passes == len(drafter.drafted)
        drafted += sum(drafter.drafted)
        passes = widths[-len(drafter.drafted) :]
        assert [width - 1 for width in passes] == drafter.drafted, "the target verifies what was drafted"
    together, _ = generate(target, quick_head(kind, target), quick_prompts, plan=plan, batch_size=3, **settings)
    assert [g.tokens for g in together] == [g.tokens for g in plain]
    most = K * sum(g.counts.passes for g in together)
    assert drafted == 0 if stop == "everything" else 0 < sum(g.counts.drafted for g in together) < most


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_where_a_chain_ends_does_not_depend_on_the_batch(
    quick_target: Callable[[torch.dtype], LowBitTarget], quick_head: QuickHead, quick_prompts: Prompts, kind: str
) -> None:
    """With a threshold alone; costs are shared by the batch."""
    target, sampling = quick_target(torch.float64), Sampling(temperature=1.0)
    plan = DraftPlan(length=K, stop=STOPS["threshold"], sampling=sampling)
    one, all_at_once = (
        generate(
            target,
            quick_head(kind, target),
            quick_prompts,
            plan=plan,
            rule=Rule(sampling=sampling),
            max_new_tokens=8,
            end_ids=set(),
            batch_size=size,
        )[0]
        for size in (1, 8)
    )
    assert [(g.tokens, g.counts) for g in one] == [(g.tokens, g.counts) for g in all_at_once]
    assert 0 < sum(g.counts.drafted for g in one) < K * sum(g.counts.passes for g in one)


def test_a_trace_has_the_confidences_that_were_asked_for(
    quick_target: Callable[[torch.dtype], LowBitTarget], quick_head: QuickHead, quick_prompts: Prompts
) -> None:
    target = quick_target(torch.float64)
    for wanted in (True, False):
        plan = DraftPlan(length=K, confidence=wanted)
        done, _ = generate(
            target,
            quick_head("eagle3", target),
            quick_prompts,
            plan=plan,
            max_new_tokens=12,
            end_ids=set(),
            batch_size=8,
        )
        for generation in done:
            assert len(generation.trace) == (generation.counts.passes if wanted else 0)
            assert all(len(confidences) == K for confidences, _ in generation.trace)
            assert all(0 < c <= 1 for confidences, _ in generation.trace for c in confidences)
            assert sum(accepted for _, accepted in generation.trace) == (generation.counts.accepted if wanted else 0)
