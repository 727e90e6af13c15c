"""Which examples a step trains on: all once an epoch, whatever the packs, and the same from any step on."""

from collections import Counter
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from bitdraft.data.chat import Example
from bitdraft.data.packing import document_length
from bitdraft.train.config import OptimConfig
from bitdraft.train.schedule import learning_rate
from bitdraft.train.steps import StepPacks, step_packs

sizes = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=20)


def made(lengths: list[tuple[int, int]]) -> list[Example]:
    return [Example(str(i), "", (1,) * p, (2,) * a) for i, (p, a) in enumerate(lengths)]


def chosen(packs: StepPacks) -> list[list[int]]:
    return [sorted(i for pack in rank for i in pack) for rank in packs.of_rank]


@given(lengths=sizes, ranks=st.integers(1, 3), capacity=st.integers(5, 60), seed=st.integers(0, 3))
def test_packs_change_nothing_but_how_a_step_is_cut(
    lengths: list[tuple[int, int]], ranks: int, capacity: int, seed: int
) -> None:
    examples = made(lengths)
    cut, whole = (
        [p for _, p in step_packs(0, examples, OptimConfig(steps=6, batch_tokens=30, pack_tokens=size), seed, ranks)]
        for size in (capacity, 10_000)
    )
    assert [chosen(a) for a in cut] == [chosen(b) for b in whole]
    for packs in cut:
        assert len(packs.of_rank) == ranks
        assert packs.rounds == max(len(rank) for rank in packs.of_rank)
        documents = [i for rank in packs.of_rank for pack in rank for i in pack]
        assert packs.positions == sum(len(examples[i].answer) for i in documents)
        assert packs.tokens == sum(document_length(examples[i]) for i in documents)
        for rank in packs.of_rank:
            assert all(len(p) == 1 or sum(document_length(examples[i]) for i in p) <= capacity for p in rank)


@given(lengths=sizes, ranks=st.integers(1, 3), first=st.integers(0, 5))
def test_a_resumed_run_sees_the_steps_that_were_left(lengths: list[tuple[int, int]], ranks: int, first: int) -> None:
    examples, optim = made(lengths), OptimConfig(steps=6, batch_tokens=30)
    straight = list(step_packs(0, examples, optim, 0, ranks))
    assert list(step_packs(first, examples, optim, 0, ranks)) == straight[first:]
    assert [step for step, _ in straight] == list(range(6))


def test_an_epoch_has_every_example_once() -> None:
    examples = made([(3, 5)] * 20)
    steps = islice(step_packs(0, examples, OptimConfig(steps=100, batch_tokens=20), 0, 2), 10)
    seen = Counter(i for _, packs in steps for rank in chosen(packs) for i in rank)
    assert sum(seen.values()) == 80
    assert set(seen.values()) == {4}


def test_wsd_stays_at_the_peak_and_then_falls_straight() -> None:
    optim = OptimConfig(steps=100, lr=1.0, warmup=0.1, schedule="wsd", decay=0.2, final=0.0)
    rates = [learning_rate(optim, step) for step in range(100)]
    assert rates[:10] == [(i + 1) / 10 for i in range(10)]
    assert rates[10:81] == [1.0] * 71
    assert [round(r, 6) for r in rates[81:]] == [round(1 - i / 20, 6) for i in range(1, 20)]


def test_both_schedules_end_near_the_final_share() -> None:
    for schedule in ("cosine", "wsd"):
        optim = OptimConfig(steps=1000, lr=2.0, final=0.25, schedule=schedule)
        assert abs(learning_rate(optim, 999) - 0.5) < 0.02
        assert max(learning_rate(optim, step) for step in range(1000)) == 2.0
