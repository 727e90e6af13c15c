"""Draft lengths against all possible ones, and the laws that a cost model implies."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdraft.speculators.draft_length import CostModel, fixed_best_length, next_step_pays

DEPTH = 3
conditionals = st.lists(
    st.lists(st.floats(0.05, 1.0), min_size=DEPTH, max_size=DEPTH), min_size=1, max_size=3
)  # [B, K]
survivals = conditionals.map(lambda rows: torch.tensor(rows, dtype=torch.float64).cumprod(1))
prices = st.floats(0.001, 0.5)


def linear(draft: float, per_token: float, most: int = 1000) -> CostModel:
    return CostModel(draft, ((1, 1 + per_token), (most, 1 + per_token * most)))


def bumpy(draft: float, costs: list[float]) -> CostModel:
    return CostModel(draft, tuple(enumerate(costs, start=1)))


linear_costs = st.builds(linear, st.floats(0.0, 0.4), prices)
any_costs = st.one_of(
    linear_costs,
    st.builds(
        bumpy, st.floats(0.0, 0.4), st.lists(st.floats(0.5, 3.0), min_size=12, max_size=12)
    ),  # 3 · (1 + 3) tokens
)


def knowing_everything(survival: Tensor, cost: CostModel) -> Tensor:
    """An oracle that looks ahead: the draft lengths ``[B]`` with the most expected tokens per cost of the pass.

    ``survival``: ``[B, K]``, not increasing along ``K``. For given draft steps and a given number of tokens, the most
    probable tokens of those depths are the best, and because survival falls they are prefixes: so one sort gives
    every candidate, and no shape of the verification cost spoils it.
    """
    batch, depth = survival.shape
    # Depth-major and stable: among equally probable tokens, none stands before its predecessor.
    probable = survival.double().T.reshape(-1).cpu().numpy()
    order = np.argsort(-probable, kind="stable")  # [n] of K·B
    steps = np.arange(depth + 1)[:, None]  # [1 + K, 1]
    allowed = order // batch < steps  # [1 + K, n]: the tokens that so many steps can draft
    tokens, emitted = batch + allowed.cumsum(1), batch + (allowed * probable[order]).cumsum(1)
    rates = emitted / cost.of_pass(steps, tokens)
    chosen_steps, last = np.unravel_index(np.argmax(rates), rates.shape)
    chosen = order[: last + 1][allowed[chosen_steps, : last + 1]] % batch
    return torch.from_numpy(np.bincount(chosen, minlength=batch)).to(survival.device)


def rate_of(lengths: list[int], survival: Tensor, cost: CostModel) -> float:
    """Expected tokens per cost of a pass with these draft lengths."""
    emitted = len(lengths) + sum(float(survival[b, :n].sum()) for b, n in enumerate(lengths))
    return emitted / float(cost.of_pass(max(lengths), len(lengths) + sum(lengths)))


def best_rate(survival: Tensor, cost: CostModel) -> float:
    batch, depth = survival.shape
    return max(rate_of(list(lengths), survival, cost) for lengths in product(range(depth + 1), repeat=batch))


@settings(max_examples=200, deadline=None)
@given(survivals, any_costs)
def test_no_lengths_emit_more_per_cost(survival: Tensor, cost: CostModel) -> None:
    lengths = knowing_everything(survival, cost)
    assert rate_of(lengths.tolist(), survival, cost) == pytest.approx(best_rate(survival, cost), rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=6), linear_costs, st.integers(1, 48))
def test_no_fixed_length_emits_more_per_cost(conditional: list[float], cost: CostModel, batch: int) -> None:
    survival = torch.tensor([conditional], dtype=torch.float64).cumprod(1).expand(batch, -1)
    rates = [rate_of([n] * batch, survival, cost) for n in range(len(conditional) + 1)]
    assert rates[fixed_best_length(survival[0].tolist(), cost, batch)[0]] == pytest.approx(max(rates), rel=1e-12)


def test_of_equal_lengths_the_shortest() -> None:
    free = CostModel(0.0, ((1, 1.0), (2, 2.0), (3, 3.0)))
    assert knowing_everything(torch.tensor([[1.0, 1.0]]), free).tolist() == [0]
    assert fixed_best_length([1.0, 1.0], free, 1)[0] == 0


def test_drafts_go_where_they_are_accepted() -> None:
    survival = torch.tensor([[0.9, 0.8, 0.7], [0.1, 0.05, 0.01]])
    assert knowing_everything(survival, linear(0.01, 0.1)).tolist() == [3, 0]
    assert knowing_everything(survival, linear(0.5, 0.9)).tolist() == [0, 0]
    assert knowing_everything(survival, linear(0.0, 1e-6)).tolist() == [3, 3]


@settings(max_examples=100, deadline=None)
@given(survivals, prices, st.floats(0.1, 0.9))
def test_cheaper_verification_drafts_no_less(survival: Tensor, per_token: float, factor: float) -> None:
    """With free draft steps: otherwise they become relatively dearer."""
    dear, cheap = (knowing_everything(survival, linear(0.0, p)) for p in (per_token, per_token * factor))
    assert cheap.sum() >= dear.sum()


@settings(max_examples=100, deadline=None)
@given(survivals, st.floats(0.01, 1.0), st.floats(0.1, 0.9))
def test_cheaper_steps_draft_no_less(survival: Tensor, draft: float, factor: float) -> None:
    """Where verification costs the same for any number of tokens, or it becomes relatively dearer."""
    dear, cheap = (knowing_everything(survival, linear(d, 0.0)) for d in (draft, draft * factor))
    assert cheap.max() >= dear.max()


@settings(max_examples=100, deadline=None)
@given(survivals, prices, st.integers(2, 5))
def test_a_larger_batch_drafts_no_more_per_sequence(survival: Tensor, per_token: float, copies: int) -> None:
    cost = linear(0.0, per_token)
    alone, crowded = knowing_everything(survival, cost), knowing_everything(survival.repeat(copies, 1), cost)
    assert crowded.sum() <= copies * alone.sum()


def test_batches_grow_from_long_drafts_to_none() -> None:
    """Once the target is bound by its arithmetic, a pass with drafts only costs more."""
    knee = CostModel(0.05, ((1, 1.0), (64, 1.1), (1024, 16.0)))
    lengths = [fixed_best_length([0.8, 0.6, 0.45, 0.3, 0.2], knee, batch)[0] for batch in (1, 16, 32, 64, 128)]
    assert lengths == sorted(lengths, reverse=True)
    assert (lengths[0], lengths[-1]) == (5, 0)


def test_lengths_of_a_whole_pass_depend_on_later_depths() -> None:
    """Why a drafter that samples must not use them: the second confidence depends on the first token drawn."""
    cost = CostModel(0.0, ((1, 1.0), (2, 1.6), (3, 1.7)))
    promising, hopeless = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.5, 0.1]])
    assert knowing_everything(promising, cost).tolist() == [2]
    assert knowing_everything(hopeless, cost).tolist() == [0]


def stepwise(survival: Tensor, cost: CostModel, rate: float) -> list[int]:
    """The drafting loop, for a drafter whose every estimate is right."""
    batch, depth = survival.shape
    going, lengths = torch.ones(batch), torch.zeros(batch, dtype=torch.long)
    for j in range(depth):
        for drafted in (False, True):
            going = going * next_step_pays(
                survival[:, j] * going, batch + int(lengths.sum()), cost, rate, drafted=drafted
            )
        lengths += going.long()
        if not going.any():
            break
    return lengths.tolist()


@settings(max_examples=200, deadline=None)
@given(survivals, linear_costs)
def test_step_by_step_at_the_best_rate_is_as_good_as_knowing_everything(survival: Tensor, cost: CostModel) -> None:
    best = best_rate(survival, cost)
    assert rate_of(stepwise(survival, cost, best), survival, cost) == pytest.approx(best, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(survivals, linear_costs)
def test_following_the_achieved_rate_leads_from_plain_decoding_to_the_best(survival: Tensor, cost: CostModel) -> None:
    batch = len(survival)
    rates = [batch / float(cost.of_pass(0, batch))]
    for _ in range(12):
        rates.append(rate_of(stepwise(survival, cost, rates[-1]), survival, cost))
    assert all(b >= a * (1 - 1e-12) for a, b in pairwise(rates))
    assert rates[-1] == pytest.approx(best_rate(survival, cost), rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(survivals, any_costs, st.floats(0.1, 3.0), st.booleans())
def test_the_sequences_that_go_on_are_the_best_choice_of_all(
    survival: Tensor, cost: CostModel, rate: float, drafted: bool
) -> None:
    batch = len(survival)
    pays = next_step_pays(survival[:, 0], batch, cost, rate, drafted=drafted)

    def earned(chosen: tuple[bool, ...]) -> float:
        spent = cost.verify(batch + sum(chosen)) - cost.verify(batch) + cost.draft * (any(chosen) and not drafted)
        return sum(float(s) for s, c in zip(survival[:, 0], chosen, strict=True) if c) - rate * float(spent)

    best = max(earned(chosen) for chosen in product((False, True), repeat=batch))
    assert earned(tuple(pays.tolist())) == pytest.approx(best, abs=1e-12)


def test_a_step_is_saved_that_one_sequence_alone_would_need() -> None:
    cost, half = linear(0.4, 0.01), torch.tensor([0.5, 0.0, 0.0])
    assert next_step_pays(torch.tensor([0.5, 0.6, 0.4]), 3, cost, rate=2.0).tolist() == [True, True, True]
    assert next_step_pays(half, 6, cost, rate=2.0).tolist() == [False, False, False]
    assert next_step_pays(half, 6, cost, rate=2.0, drafted=True).tolist() == [True, False, False]


def test_a_stopped_sequence_stays_so_even_where_more_tokens_cost_less() -> None:
    falling = bumpy(0.0, [3.0, 2.0, 1.0, 0.5])
    assert next_step_pays(torch.tensor([0.0, 0.5, 0.0]), 1, falling, rate=1.0).tolist() == [False, True, False]


def test_costs_between_measured_sizes_lie_on_a_line() -> None:
    cost = CostModel(0.1, ((1, 1.0), (5, 2.0), (7, 5.0)))
    assert [float(cost.verify(n)) for n in (1, 3, 5, 6, 7)] == [1.0, 1.5, 2.0, 3.5, 5.0]
    assert float(cost.of_pass(4, 3)) == pytest.approx(0.4 + 1.5)


def test_sizes_that_were_not_measured_are_refused() -> None:
    cost = CostModel(0.1, ((2, 1.0), (8, 2.0)))
    with pytest.raises(ValueError, match="covers passes of 2 to 8 tokens, but the batch needs 3 to 9: measure those"):
        knowing_everything(torch.full((3, 2), 0.5), cost)
    with pytest.raises(ValueError, match="needs 1 to 3"):
        fixed_best_length([0.5, 0.4], cost, 1)


@pytest.mark.parametrize(
    ("draft", "verified", "message"),
    [
        (-0.1, ((1, 1.0),), "cost.draft must not be negative, got -0.1"),
        (float("nan"), ((1, 1.0),), "cost.draft must not be negative, got nan"),
        (0.1, (), r"more and more tokens, got \[\]"),
        (0.1, ((2, 1.0), (2, 1.5)), r"more and more tokens, got \[2, 2\]"),
        (0.1, ((1, 1.0), (2, 0.0)), r"positive costs, got \[1.0, 0.0\]"),
    ],
)
def test_impossible_costs_are_refused(draft: float, verified: tuple[tuple[int, float], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostModel(draft, verified)
