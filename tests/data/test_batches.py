"""Batches: every example once an epoch, in an order that comes back."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdraft.data.batches import epoch_batches, make_batch
from bitdraft.data.chat import Example

sizes = st.lists(st.integers(1, 50), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(lengths=sizes, batch_size=st.integers(1, 9), seed=st.integers(0, 5), epoch=st.integers(0, 5))
def test_an_epoch_holds_every_example_once(lengths: list[int], batch_size: int, seed: int, epoch: int) -> None:
    batches = epoch_batches(lengths, batch_size, seed=seed, epoch=epoch)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(0 < len(batch) <= batch_size for batch in batches)
    assert len(batches) <= -(-len(lengths) // batch_size) + len(lengths) // (8 * batch_size)
    assert batches == epoch_batches(lengths, batch_size, seed=seed, epoch=epoch)


def test_the_order_follows_seed_and_epoch_and_not_the_global_generator() -> None:
    lengths = list(range(40))
    orders: list[list[list[int]]] = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1)):
        torch.manual_seed(len(orders))
        before = torch.get_rng_state()
        orders.append(epoch_batches(lengths, 4, seed=seed, epoch=epoch))
        assert torch.equal(torch.get_rng_state(), before)
    assert len({str(order) for order in orders}) == 4


def test_similar_lengths_stand_together() -> None:
    lengths = torch.randint(1, 1000, (64,), generator=torch.Generator().manual_seed(0)).tolist()

    def padded(batches: list[list[int]]) -> int:
        return sum(max(lengths[i] for i in batch) * len(batch) for batch in batches)

    unsorted = [list(range(i, i + 4)) for i in range(0, 64, 4)]
    assert padded(epoch_batches(lengths, 4, seed=0, epoch=0)) < 0.75 * padded(unsorted)


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
