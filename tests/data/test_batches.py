"""Batches: every example once an epoch, in an order that comes back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdraft.data.batches import epoch_batches, make_batch
from bitdraft.data.chat import Example

sizes = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 50)), min_size=1, max_size=60)


def made(lengths: list[tuple[int, int]]) -> list[Example]:
    return [Example(str(i), "", (1,) * prompt, (2,) * answer) for i, (prompt, answer) in enumerate(lengths)]


@settings(max_examples=60, deadline=None)
@given(lengths=sizes, batch_tokens=st.integers(1, 200), seed=st.integers(0, 5), epoch=st.integers(0, 5))
def test_an_epoch_holds_every_example_once(
    lengths: list[tuple[int, int]], batch_tokens: int, seed: int, epoch: int
) -> None:
    batches = epoch_batches(made(lengths), batch_tokens, seed=seed, epoch=epoch)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    total, longest = sum(a for _, a in lengths), max(a for _, a in lengths)
    assert all(0 < sum(lengths[i][1] for i in batch) < batch_tokens + longest for batch in batches)
    assert len(batches) <= total / batch_tokens + 1
    assert batches == epoch_batches(made(lengths), batch_tokens, seed=seed, epoch=epoch)


def test_texts_of_other_lengths_give_as_many_answer_tokens_per_step() -> None:
    """What makes two training runs comparable: long answers do not mean more tokens per step."""
    for answer in (20, 45, 70):
        generator = torch.Generator().manual_seed(answer)
        lengths = torch.randint(1, 2 * answer, (400,), generator=generator).tolist()
        batches = epoch_batches(made([(9, n) for n in lengths]), 640, seed=0, epoch=0)
        tokens = torch.tensor([sum(lengths[i] for i in batch) for batch in batches]).float()
        assert tokens.sort().values[1:].mean() == pytest.approx(640, rel=0.02)  # one batch is the rest
        assert abs(len(batches) - sum(lengths) / 640) <= 1


def test_the_order_follows_seed_and_epoch_and_not_the_global_generator() -> None:
    examples = made([(n + 1, 5) for n in range(40)])
    orders: list[list[list[int]]] = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1)):
        torch.manual_seed(len(orders))
        before = torch.get_rng_state()
        orders.append(epoch_batches(examples, 20, seed=seed, epoch=epoch))
        assert torch.equal(torch.get_rng_state(), before)
    assert len({str(order) for order in orders}) == 4


def test_similar_lengths_stand_together() -> None:
    lengths = torch.randint(1, 1000, (64,), generator=torch.Generator().manual_seed(0)).tolist()

    def padded(batches: list[list[int]]) -> int:
        return sum(max(lengths[i] for i in batch) * len(batch) for batch in batches)

    unsorted = [list(range(i, i + 4)) for i in range(0, 64, 4)]
    batches = epoch_batches(made([(n, 5) for n in lengths]), 20, seed=0, epoch=0)
    assert len(batches) == 16 and padded(batches) < 0.75 * padded(unsorted)


examples = st.lists(
    st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.lists(st.integers(0, 9), min_size=1, max_size=6)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(examples)
def test_a_batch_marks_what_the_assistant_wrote(parts: list[tuple[list[int], list[int]]]) -> None:
    batch = make_batch([Example(str(i), "", tuple(p), tuple(a)) for i, (p, a) in enumerate(parts)])
    assert batch.ids == tuple(str(i) for i in range(len(parts)))
    assert batch.tokens.dtype == torch.int64
    for row, (prompt, answer) in enumerate(parts):
        padding = batch.tokens.shape[1] - len(prompt) - len(answer)
        assert batch.tokens[row].tolist() == [*prompt, *answer, *[0] * padding]
        assert batch.written()[row].tolist() == [False] * len(prompt) + [True] * len(answer) + [False] * padding
    assert batch.tokens.shape[1] == max(len(p) + len(a) for p, a in parts)
