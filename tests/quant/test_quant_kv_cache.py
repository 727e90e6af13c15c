"""The slot cache: decoding in pieces, at different speeds per row, computes what one full pass computes."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import VOCAB
from torch import Tensor

from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.target import LowBitTarget


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def decode(
    target: LowBitTarget, ids: Tensor, prompts: list[int], accepted: list[list[int]], width: int, slots: int
) -> Tensor:
    """Last hidden states ``[B, T, H]`` collected pass by pass, NaN where nothing was computed.

    Each pass feeds ``width`` tokens of which row b's first ``accepted[pass][b]`` are right and the others
    are made up, as drafts that the target rejects; the next pass writes over them.
    """
    cache, lengths = target.new_cache(slots), torch.tensor(prompts)
    collected = torch.full((*ids.shape, target.hidden_size), torch.nan, dtype=target.dtype)
    longest = max(prompts)
    right = torch.arange(longest) < lengths[:, None]
    prompt = torch.where(right, ids[:, :longest], tokens(len(ids), longest, seed=9))
    states = target.states(prompt, cache=cache, lengths=torch.zeros_like(lengths), capture=(1,))
    assert states.captured.shape == (len(ids), longest, 1, target.hidden_size)
    collected[:, :longest][right] = states.last_hidden[right]
    for number, kept in enumerate(accepted):
        fed = tokens(len(ids), width, seed=100 + number)
        for row, (length, count) in enumerate(zip(lengths.tolist(), kept, strict=True)):
            fed[row, :count] = ids[row, length : length + count]
        last = target.states(fed, cache=cache, lengths=lengths).last_hidden
        for row, (length, count) in enumerate(zip(lengths.tolist(), kept, strict=True)):
            collected[row, length : length + count] = last[row, :count]
        lengths = lengths + torch.tensor(kept)
    return collected


def assert_equals_the_full_pass(collected: Tensor, target: LowBitTarget, ids: Tensor) -> None:
    full = target.states(ids).last_hidden
    computed = ~collected.isnan().any(-1)
    assert computed.any()
    torch.testing.assert_close(collected[computed], full[computed], rtol=0, atol=1e-5)


def test_ragged_decoding_with_rejected_drafts_equals_the_full_pass(exact_target: LowBitTarget) -> None:
    target, ids = exact_target, tokens(3, 24)
    accepted = [[4, 1, 2], [1, 1, 4], [3, 4, 1], [4, 2, 4], [1, 4, 3]]
    collected = decode(target, ids, prompts=[6, 2, 9], accepted=accepted, width=4, slots=28)
    lengths = [19, 14, 23]
    for row, length in enumerate(lengths):
        assert not collected[row, :length].isnan().any()
    assert_equals_the_full_pass(collected, target, ids)


def test_one_token_at_a_time_equals_the_full_pass(exact_target: LowBitTarget) -> None:
    target, ids = exact_target, tokens(2, 12)
    collected = decode(target, ids, prompts=[1, 1], accepted=[[1, 1]] * 11, width=1, slots=12)
    assert not collected.isnan().any()
    assert_equals_the_full_pass(collected, target, ids)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompts=st.lists(st.integers(1, 8), min_size=2, max_size=2),
    accepted=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=1, max_size=5),
)
def test_any_pattern_of_acceptance_equals_the_full_pass(
    exact_target: LowBitTarget, prompts: list[int], accepted: list[list[int]]
) -> None:
    target, ids = exact_target, tokens(2, 24)
    collected = decode(target, ids, prompts, accepted, width=3, slots=27)
    assert_equals_the_full_pass(collected, target, ids)


def test_rejected_tokens_would_be_seen_if_they_were_not_overwritten(exact_target: LowBitTarget) -> None:
    """The check above can fail: a row that keeps a made-up token differs by far more than its tolerance."""
    target, ids = exact_target, tokens(2, 12)
    wrong = ids.clone()
    wrong[:, 4] = (ids[:, 4] + 1) % VOCAB
    collected = decode(target, wrong, prompts=[3, 3], accepted=[[4, 4]], width=4, slots=12)
    full = target.states(ids).last_hidden
    assert (collected[:, 4:7] - full[:, 4:7]).abs().amax(-1).min() > 1e-3


def test_rows_that_are_kept_go_on_as_before(exact_target: LowBitTarget) -> None:
    target, ids = exact_target, tokens(3, 12)
    full = target.states(ids).last_hidden
    cache, lengths = target.new_cache(12), torch.tensor([5, 3, 4])
    target.states(ids[:, :5], cache=cache, lengths=torch.zeros(3, dtype=torch.long))
    for rows in (torch.tensor([2, 0]), torch.tensor([1])):
        cache.keep_rows(rows)
        ids, full, lengths = ids[rows], full[rows], lengths[rows]
        fed = torch.stack([row[n : n + 3] for row, n in zip(ids, lengths.tolist(), strict=True)])
        last = target.states(fed, cache=cache, lengths=lengths).last_hidden
        for row, n in enumerate(lengths.tolist()):
            torch.testing.assert_close(last[row], full[row, n : n + 3], rtol=0, atol=1e-5)
        lengths = lengths + 3


def test_keeping_rows_of_an_empty_cache_does_nothing(exact_target: LowBitTarget) -> None:
    target, ids = exact_target, tokens(2, 6)
    cache = target.new_cache(6)
    cache.keep_rows(torch.tensor([0, 1]))
    last = target.states(ids, cache=cache, lengths=torch.zeros(2, dtype=torch.long)).last_hidden
    torch.testing.assert_close(last, target.states(ids).last_hidden, rtol=0, atol=1e-5)


def test_too_few_slots_are_refused(exact_target: LowBitTarget) -> None:
    target, ids = exact_target, tokens(2, 6)
    cache = target.new_cache(7)
    target.states(ids, cache=cache, lengths=torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="the cache has 7 slots, the pass needs 8"):
        target.states(ids[:, :2], cache=cache, lengths=torch.tensor([1, 6]))
    with pytest.raises(ValueError, match="the cache has 5 slots, the pass needs 6"):
        target.states(ids, cache=target.new_cache(5), lengths=torch.tensor([0, 0]))


def test_a_query_sees_the_slots_up_to_its_own_and_no_others() -> None:
    positions, mask = SlotCache(layers=1, slots=8).begin(torch.tensor([3, 0]), tokens=2)
    assert positions.tolist() == [[3, 4], [0, 1]]
    assert mask[:, 0].int().tolist() == [
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]],
    ]


def test_rows_join_a_cache_of_another_size(exact_target: LowBitTarget) -> None:
    """Sequences that come later, with a cache of fewer or more slots, decode beside the others as if alone."""
    target, ids = exact_target, tokens(4, 12, seed=3)
    for first, later in ((20, 14), (14, 20)):
        cache, other = target.new_cache(first), target.new_cache(later)
        target.states(ids[:2, :8], cache=cache, lengths=torch.zeros(2, dtype=torch.int64))
        target.states(ids[2:, :3], cache=other, lengths=torch.zeros(2, dtype=torch.int64))
        cache.join(other)
        lengths, full = torch.tensor([8, 8, 3, 3]), target.states(ids).last_hidden
        fed = torch.stack([ids[i, n : n + 4] for i, n in enumerate(lengths.tolist())])
        got = target.states(fed, cache=cache, lengths=lengths).last_hidden
        expected = torch.stack([full[i, n : n + 4] for i, n in enumerate(lengths.tolist())])
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        assert cache.slots == 20
