"""Choosing the head by what it accepts."""

import pytest

from bitdraft.train.selection import Choice, best_of, is_exhausted


def measured(*lengths: float) -> list[Choice]:
    return [Choice(10 * (i + 1), length) for i, length in enumerate(lengths)]


def test_the_best_is_the_longest_and_of_equals_the_latest() -> None:
    assert best_of([]) is None
    assert best_of(measured(1.5, 1.9, 1.7)) == Choice(20, 1.9)
    assert best_of(measured(1.0, 1.0, 1.0)) == Choice(30, 1.0)


@pytest.mark.parametrize(
    ("lengths", "patience", "ends"),
    [
        ((), 1, False),
        ((1.5,), 1, False),
        ((1.5, 1.4), 1, True),
        ((1.5, 1.4), 2, False),
        ((1.5, 1.5, 1.5), 2, True),  # as good is no better
        ((1.5, 1.4, 1.6), 2, False),
        ((1.5, 1.4, 1.3, 1.2), 0, False),  # never
    ],
)
def test_patience_counts_measurements_without_a_better_head(
    lengths: tuple[float, ...], patience: int, ends: bool
) -> None:
    assert is_exhausted(measured(*lengths), patience) is ends
