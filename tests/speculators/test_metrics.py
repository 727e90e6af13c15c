"""Acceptance counts: every derived number against a loop over passes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdraft.speculators.metrics import (
    Acceptance,
    length_interval,
    rate_interval,
    ratio_interval,
    total,
)

K = 3
Passes = list[tuple[int, int]]  # drafted and accepted tokens of every pass
chains = st.integers(0, K).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))
passes = st.lists(chains, max_size=12)
prompts = st.lists(passes, max_size=6)


def counted(of_prompt: Passes) -> Acceptance:
    """One prompt's counts."""
    return sum(
        (Acceptance.of_pass(K, drafted=d, accepted=a, refused=a < d) for d, a in of_prompt),
        Acceptance.none(K, prompts=1),
    )


def full(accepted: list[int]) -> Passes:
    """Passes that draft as much as they can."""
    return [(K, a) for a in accepted]


@settings(max_examples=50, deadline=None)
@given(prompts)
def test_rates_are_those_of_a_loop_over_all_passes(of_prompts: list[Passes]) -> None:
    merged = total([counted(p) for p in of_prompts], K)
    every = [chain for p in of_prompts for chain in p]
    drafted, accepted = sum(d for d, _ in every), sum(a for _, a in every)
    assert merged.prompts == len(of_prompts)
    assert (merged.passes, merged.drafted, merged.accepted) == (len(every), drafted, accepted)
    assert merged.emitted == sum(a + 1 for _, a in every)
    if every:
        assert merged.rate == pytest.approx(accepted / max(drafted, 1))
        assert merged.drafted_per_pass == pytest.approx(drafted / len(every))
        assert merged.length == pytest.approx(sum(a + 1 for _, a in every) / len(every))
        assert merged.length == pytest.approx(1 + sum(merged.per_position))
    for i in range(K):
        tried = [a for d, a in every if a >= i and d > i]
        kept = [a for a in tried if a > i]
        assert merged.per_position[i] == pytest.approx(len(kept) / max(len(every), 1))
        assert merged.conditional[i] == pytest.approx(len(kept) / max(len(tried), 1))
    assert merged.row == [len(every), drafted, *(sum(a > i for _, a in every) for i in range(K))]


@settings(max_examples=50, deadline=None)
@given(a=passes, b=passes, c=passes)
def test_counts_add_in_any_grouping(a: Passes, b: Passes, c: Passes) -> None:
    x, y, z = counted(a), counted(b), counted(c)
    assert (x + y) + z == x + (y + z)
    assert x + y == y + x
    assert x + Acceptance.none(K) == x
    joined, both = counted([*a, *b]), x + y
    assert both.prompts == joined.prompts + 1
    assert (both.row, both.tried_at) == (joined.row, joined.tried_at)


def test_a_tree_s_pass_tries_where_a_node_was_refused() -> None:
    """A tree of 9 nodes and depth 3: the first level was passed, and there was nothing behind the accepted node."""
    ended = Acceptance.of_pass(3, drafted=9, accepted=1, refused=False)
    refused = Acceptance.of_pass(3, drafted=9, accepted=1, refused=True)
    assert (ended.accepted_at, ended.tried_at) == ((1, 0, 0), (1, 0, 0))
    assert (refused.accepted_at, refused.tried_at) == ((1, 0, 0), (1, 1, 0))
    assert (ended + refused).conditional == [1.0, 0.0, 0.0]


def test_different_draft_lengths_do_not_add_up() -> None:
    with pytest.raises(ValueError, match="draft lengths 3 and 2 do not add up"):
        counted(full([1])) + Acceptance.none(2)


def test_plain_decoding_has_length_one() -> None:
    for drafted in (0, K):
        counts = counted([(drafted, 0)] * 3)
        assert (counts.length, counts.rate, counts.drafted) == (1.0, 0.0, 3 * drafted)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.lists(chains, min_size=1, max_size=12), min_size=1, max_size=6))
def test_the_intervals_hold_what_was_measured(of_prompts: list[Passes]) -> None:
    """Not a law of every bootstrap, but of one over few prompts with 2000 draws."""
    parts = [counted(p) for p in of_prompts]
    low, high = length_interval(parts)
    assert low - 1e-9 <= total(parts, K).length <= high + 1e-9
    assert 1.0 <= low <= high <= K + 1
    assert (low, high) == length_interval(parts), "the same counts give the same interval"
    low, high = rate_interval(parts)
    assert 0.0 <= low <= high <= 1.0
    if all(p.drafted for p in parts):
        assert low - 1e-9 <= total(parts, K).rate <= high + 1e-9


def test_an_interval_is_of_the_ratio_of_sums_over_drawn_prompts() -> None:
    """Two prompts, 1/1 and 0/9: draws have 0, 1 or 2 of the first with probability 1/4, 1/2 and 1/4."""
    assert ratio_interval([1, 0], [1, 9]) == (0.0, 1.0)
    rare = ratio_interval([1] + [0] * 99, [1] + [9] * 99)  # drawn at most 3 times, in 98 % of the cases
    assert rare == pytest.approx((0.0, 3 / (3 + 97 * 9)))


def test_more_prompts_narrow_the_interval() -> None:
    few = [counted(full([a] * 5)) for a in (0, 1, 2, 3)]
    wide, narrow = length_interval(few), length_interval(few * 25)
    assert narrow[1] - narrow[0] < (wide[1] - wide[0]) / 3
