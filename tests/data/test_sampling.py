"""Draws follow the weights, and nothing but seed and content decides them."""

from collections import Counter
from itertools import chain, islice

import numpy as np
import pytest
from accelerate import skip_first_batches
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader

from bitdraft.data.sampling import WeightedSampler, epoch_order, gumbel_top_k, uniforms

weights_lists = st.lists(st.floats(0, 50), min_size=1, max_size=40).filter(lambda w: sum(w) > 1e-3)


def keys_for(count: int) -> list[str]:
    return [f"record-{i}" for i in range(count)]


@settings(max_examples=100, deadline=None)
@given(weights=weights_lists, seed=st.integers(0, 9), epoch=st.integers(0, 9))
def test_an_epoch_draws_every_record_as_often_as_its_weight_says(weights: list[float], seed: int, epoch: int) -> None:
    order = epoch_order(keys_for(len(weights)), np.array(weights), seed=seed, epoch=epoch)
    drawn, expected = Counter(order.tolist()), np.array(weights) * len(weights) / sum(weights)
    assert len(order) == len(weights)
    for i, mean in enumerate(expected):
        assert np.floor(mean - 1e-6) <= drawn[i] <= np.ceil(mean + 1e-6)


def test_over_epochs_the_mean_of_the_draws_is_the_weight() -> None:
    weights = np.array([0.1, 0.25, 0.5, 0.9, 1.3, 2.95])
    total: Counter[int] = Counter()
    for epoch in range(3000):
        total.update(epoch_order(keys_for(6), weights, seed=0, epoch=epoch).tolist())
    assert np.array([total[i] / 3000 for i in range(6)]) == pytest.approx(weights, abs=0.03)


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 300), weight=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_equal_weights_draw_everything_once(count: int, weight: float, seed: int) -> None:
    order = epoch_order(keys_for(count), np.full(count, weight), seed=seed, epoch=0)
    assert sorted(order.tolist()) == list(range(count))


@settings(max_examples=50, deadline=None)
@given(weights=weights_lists, seed=st.integers(0, 9), shuffled=st.randoms(use_true_random=False))
def test_where_records_stand_changes_no_draw(weights: list[float], seed: int, shuffled: object) -> None:
    places = list(range(len(weights)))
    shuffled.shuffle(places)  # type: ignore[attr-defined]
    keys, values = keys_for(len(weights)), np.array(weights)
    moved_keys, moved = [keys[i] for i in places], values[places]
    straight = [keys[i] for i in epoch_order(keys, values, seed=seed, epoch=1)]
    assert [moved_keys[i] for i in epoch_order(moved_keys, moved, seed=seed, epoch=1)] == straight
    chosen = {keys[i] for i in gumbel_top_k(keys, values, 5, seed)}
    assert {moved_keys[i] for i in gumbel_top_k(moved_keys, moved, 5, seed)} == chosen


def test_other_seeds_and_epochs_draw_otherwise() -> None:
    weights = np.linspace(0.2, 1.8, 50)
    orders = {tuple(epoch_order(keys_for(50), weights, seed=s, epoch=e).tolist()) for s in range(3) for e in range(3)}
    assert len(orders) == 9
    subsets = {tuple(gumbel_top_k(keys_for(50), weights, 10, seed).tolist()) for seed in range(5)}
    assert len(subsets) == 5


def test_copies_of_one_record_do_not_stand_together() -> None:
    order = epoch_order(keys_for(100), np.array([50.0] + [50 / 99] * 99), seed=0, epoch=0)
    at = np.flatnonzero(order == 0)
    assert len(at) == 50 and np.ptp(at) > 80 and (np.diff(at) == 1).sum() < 40


def test_a_subset_is_drawn_without_replacement_by_weight() -> None:
    """Against the definition: one after the other, each with its share of what is left."""
    weights, k = np.array([1.0, 2.0, 3.0, 6.0]), 2
    first = weights / weights.sum()
    expected = np.zeros(4)
    for a in range(4):
        for b in range(4):
            if a != b:
                chance = first[a] * weights[b] / (weights.sum() - weights[a])
                expected[[a, b]] += chance
    drawn = np.zeros(4)
    for seed in range(6000):
        drawn[gumbel_top_k(keys_for(4), weights, k, seed)] += 1
    assert drawn / 6000 == pytest.approx(expected, abs=0.025)


def test_records_without_weight_are_never_chosen() -> None:
    weights = np.array([0.0, 1.0, 0.0, 2.0])
    assert gumbel_top_k(keys_for(4), weights, 3, 0).tolist() == [1, 3]
    assert set(epoch_order(keys_for(4), weights, seed=0, epoch=0).tolist()) <= {1, 3}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -0.5])
def test_impossible_weights_are_refused(bad: float) -> None:
    weights = np.array([1.0, bad])
    for draw in (
        lambda: epoch_order(keys_for(2), weights, seed=0, epoch=0),
        lambda: gumbel_top_k(keys_for(2), weights, 1, 0),
        lambda: WeightedSampler(keys_for(2), weights, seed=0),
    ):
        with pytest.raises(ValueError, match=r"finite and not negative: number 2 is"):
            draw()
    with pytest.raises(ValueError, match="all weights are zero"):
        epoch_order(keys_for(2), np.zeros(2), seed=0, epoch=0)
    with pytest.raises(ValueError, match="2 records need as many weights"):
        epoch_order(keys_for(2), np.ones(3), seed=0, epoch=0)


def test_uniforms_are_uniform_and_independent_between_salts() -> None:
    keys = keys_for(20_000)
    one, other = uniforms(keys, "a", 0), uniforms(keys, "a", 1)
    assert one.min() > 0 and one.max() < 1
    assert np.histogram(one, 20, (0, 1))[0] == pytest.approx(1000, abs=150)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.03


def sampler_for(count: int = 23) -> WeightedSampler:
    return WeightedSampler(keys_for(count), np.linspace(0.1, 3, count), seed=4)


def test_processes_share_an_epoch_s_draws() -> None:
    """Accelerate deals the batches out; together the processes see what one process sees."""
    alone = list(BatchSampler(sampler_for(), 3, drop_last=True))
    shares = [
        list(BatchSamplerShard(BatchSampler(sampler_for(), 3, drop_last=True), num_processes=2, process_index=rank))
        for rank in range(2)
    ]
    dealt = [batch for pair in zip(*shares, strict=True) for batch in pair]
    assert dealt == alone[: len(dealt)] and len(dealt) >= len(alone) - 1


def test_a_run_that_stopped_within_an_epoch_goes_on() -> None:
    data = list(range(23))
    whole = [b.tolist() for b in DataLoader(data, batch_size=4, sampler=sampler_for())]  # type: ignore[arg-type]
    rest = skip_first_batches(DataLoader(data, batch_size=4, sampler=sampler_for()), 2)  # type: ignore[arg-type]
    assert [b.tolist() for b in rest] == whole[2:]

    stopped, resumed = sampler_for(), sampler_for()
    list(islice(stopped, 8))
    resumed.load_state_dict(stopped.state_dict())
    assert len(resumed) == 15
    assert list(resumed) == list(chain(*whole[2:]))
    assert resumed.state_dict() == {"epoch": 1, "taken": 0}
    resumed.set_epoch(0)
    assert list(resumed) == list(chain(*whole))
