"""Acceptance counts: every derived number against a loop over passes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdraft.speculators.metrics import Acceptance, length_difference_interval, length_interval, total

K = 3
passes = st.lists(st.integers(0, K), max_size=12)  # accepted drafts of every pass
prompts = st.lists(passes, max_size=6)


def counted(accepted: list[int]) -> Acceptance:
    """One prompt's counts, from how many drafts each pass accepted."""
    return Acceptance(K, 1, len(accepted), tuple(sum(a > i for a in accepted) for i in range(K)))


@settings(max_examples=100, deadline=None)
@given(prompts)
def test_rates_are_those_of_a_loop_over_all_passes(accepted: list[list[int]]) -> None:
    merged = total([counted(p) for p in accepted], K)
    every = [a for p in accepted for a in p]
    assert merged.prompts == len(accepted)
    assert merged.passes == len(every)
    assert merged.drafted == K * len(every)
    assert merged.accepted == sum(every)
    assert merged.emitted == sum(a + 1 for a in every)
    if every:
        assert merged.rate == pytest.approx(sum(every) / (K * len(every)))
        assert merged.length == pytest.approx(sum(a + 1 for a in every) / len(every))
        assert merged.length == pytest.approx(1 + sum(merged.per_position))
    for i in range(K):
        reached = [a for a in every if a >= i]
        kept = [a for a in reached if a > i]
        assert merged.per_position[i] == pytest.approx(len(kept) / max(len(every), 1))
        assert merged.conditional[i] == pytest.approx(len(kept) / max(len(reached), 1))


@given(a=passes, b=passes, c=passes)
def test_counts_add_in_any_grouping(a: list[int], b: list[int], c: list[int]) -> None:
    x, y, z = counted(a), counted(b), counted(c)
    assert (x + y) + z == x + (y + z)
    assert x + y == y + x
    assert x + Acceptance.none(K) == Acceptance(K, 1, x.passes, x.accepted_at)
    joined, both = counted([*a, *b]), x + y
    assert (joined.passes, joined.accepted_at) == (both.passes, both.accepted_at)


def test_different_draft_lengths_do_not_add_up() -> None:
    with pytest.raises(ValueError, match="draft lengths 3 and 2 do not add up"):
        counted([1]) + Acceptance.none(2)


def test_plain_decoding_has_length_one() -> None:
    assert counted([0, 0, 0]).length == 1.0
    assert counted([0, 0, 0]).rate == 0.0


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, K), min_size=1, max_size=12), min_size=1, max_size=6))
def test_the_interval_holds_the_measured_length(accepted: list[list[int]]) -> None:
    """Not a law of every bootstrap, but of one over few prompts with 2000 draws."""
    parts = [counted(p) for p in accepted]
    low, high = length_interval(parts)
    assert low - 1e-9 <= total(parts, K).length <= high + 1e-9
    assert 1.0 <= low <= high <= K + 1
    assert (low, high) == length_interval(parts), "the same counts give the same interval"


def test_more_prompts_narrow_the_interval() -> None:
    few = [counted([a] * 5) for a in (0, 1, 2, 3)]
    wide, narrow = length_interval(few), length_interval(few * 25)
    assert narrow[1] - narrow[0] < (wide[1] - wide[0]) / 3


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, K - 1), min_size=1, max_size=8), min_size=1, max_size=6))
def test_a_paired_difference_has_the_sign_of_the_gain(accepted: list[list[int]]) -> None:
    worse = [counted(p) for p in accepted]
    better = [counted([a + 1 for a in p]) for p in accepted]
    # Pairing removes what the prompts have in common: the interval has no width.
    assert length_difference_interval(better, worse) == pytest.approx((1.0, 1.0, 1.0))
    assert length_difference_interval(worse, better)[0] == pytest.approx(-1.0)
    assert length_difference_interval(worse, worse) == (0.0, 0.0, 0.0)


def test_unpaired_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="paired comparison of 1 and 2 prompts"):
        length_difference_interval([counted([1])], [counted([1]), counted([2])])
