"""Greedy verification: the agreeing prefix, counted the slow way."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdraft.speculators.verify import accepted_lengths


@st.composite
def drafts_and_choices(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    batch, k = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    row = st.lists(st.integers(0, 2), min_size=k, max_size=k)  # few tokens, so that agreement is common
    rows = st.lists(row, min_size=batch, max_size=batch)
    return draw(rows), draw(rows)


def agreeing_prefix(draft: list[int], choices: list[int]) -> int:
    count = 0
    for mine, its in zip(draft, choices, strict=True):
        if mine != its:
            break
        count += 1
    return count


@settings(max_examples=200, deadline=None)
@given(drafts_and_choices())
def test_accepted_is_the_agreeing_prefix(pair: tuple[list[list[int]], list[list[int]]]) -> None:
    drafts, choices = pair
    expected = [agreeing_prefix(d, c) for d, c in zip(drafts, choices, strict=True)]
    assert accepted_lengths(torch.tensor(drafts), torch.tensor(choices)).tolist() == expected


def test_agreement_behind_a_mistake_does_not_count() -> None:
    assert accepted_lengths(torch.tensor([[5, 6, 7]]), torch.tensor([[5, 0, 7]])).tolist() == [1]


def test_without_drafts_nothing_is_accepted() -> None:
    nothing = torch.empty(3, 0, dtype=torch.int64)
    assert accepted_lengths(nothing, nothing).tolist() == [0, 0, 0]
