"""The draft vocabulary: which tokens a head can propose, and the maps that engines read."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdraft.speculators.vocab import DraftVocab, default_draft_size

TARGET = 12
texts = st.lists(st.integers(0, TARGET - 1), max_size=40)
specials = st.sets(st.integers(0, TARGET - 1), max_size=4)


def most_frequent(text: list[int], size: int, always: set[int]) -> DraftVocab:
    parts = [torch.tensor(text[i::2], dtype=torch.int64) for i in range(2)]
    return DraftVocab.most_frequent(parts, size, TARGET, always)


@settings(max_examples=60, deadline=None)
@given(text=texts, always=specials, size=st.integers(4, TARGET))
def test_the_chosen_are_the_most_frequent_with_ties_to_lower_ids(text: list[int], always: set[int], size: int) -> None:
    ranked = sorted(range(TARGET), key=lambda i: (i not in always, -text.count(i), i))
    vocab = most_frequent(text, size, always)
    assert vocab.target_ids.tolist() == sorted(ranked[:size])
    assert always <= set(vocab.target_ids.tolist())


@settings(max_examples=60, deadline=None)
@given(ids=st.sets(st.integers(0, TARGET - 1), min_size=1))
def test_offsets_and_mask_describe_the_same_tokens(ids: set[int]) -> None:
    vocab = DraftVocab(torch.tensor(sorted(ids)), TARGET)
    assert vocab.d2t.dtype == torch.int64
    assert vocab.t2d.dtype == torch.bool
    assert [i + offset for i, offset in enumerate(vocab.d2t.tolist())] == sorted(ids)
    assert {i for i, inside in enumerate(vocab.t2d.tolist()) if inside} == ids
    assert len(vocab) == len(ids) == int(vocab.t2d.sum())
    assert vocab.is_full == (len(ids) == TARGET)
    assert torch.equal(DraftVocab.from_d2t(vocab.d2t, TARGET).target_ids, vocab.target_ids)


def test_the_full_vocabulary_maps_every_token_to_itself() -> None:
    full = DraftVocab.full(TARGET)
    assert full.is_full
    assert full.target_ids.tolist() == list(range(TARGET))
    assert not full.d2t.any()
    assert full.t2d.all()


@settings(max_examples=40, deadline=None)
@given(text=texts, ids=st.sets(st.integers(0, TARGET - 1), min_size=1))
def test_coverage_is_the_share_of_tokens_inside(text: list[int], ids: set[int]) -> None:
    vocab = DraftVocab(torch.tensor(sorted(ids)), TARGET)
    expected = sum(t in ids for t in text) / len(text) if text else 0.0
    parts = [torch.tensor(text[:3], dtype=torch.int64), torch.tensor(text[3:], dtype=torch.int64)]
    assert vocab.coverage(parts) == pytest.approx(expected)


@pytest.mark.parametrize("ids", [[], [3, 2], [2, 2], [-1, 2], [0, TARGET]])
def test_ids_must_ascend_within_the_target_s_vocabulary(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="must ascend within 0 … 11"):
        DraftVocab(torch.tensor(ids, dtype=torch.int64), TARGET)


def test_a_draft_vocabulary_larger_than_the_target_s_is_refused() -> None:
    with pytest.raises(ValueError, match="13 exceeds the target's vocabulary of 12"):
        most_frequent([], TARGET + 1, set())


def test_a_draft_vocabulary_too_small_for_the_special_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold the 3 special tokens"):
        most_frequent([0, 0, 1], 2, {5, 6, 7})


@pytest.mark.parametrize("target_size", [1, 255, 256, 320, 4_096, 49_152, 128_256, 262_144])
def test_the_default_size_fits_every_target(target_size: int) -> None:
    size = default_draft_size(target_size)
    assert 1 <= size <= min(target_size, 32_000)
    assert size == target_size or size % 256 == 0 or size == 32_000
