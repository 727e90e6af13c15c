"""Packs: nothing is lost, nothing is padded, and little room is left."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from bitdraft.data.chat import Example
from bitdraft.data.packing import first_fit, make_pack


def example(prompt: int, answer: int, first: int = 1) -> Example:
    tokens = tuple(range(first, first + prompt + answer))
    return Example(f"{prompt}+{answer}", "", tokens[:prompt], tokens[prompt:])


def test_documents_stand_one_behind_the_other() -> None:
    pack = make_pack([example(2, 3, 10), example(1, 0, 20), example(3, 1, 30)])
    assert pack.tokens.tolist() == [10, 11, 12, 13, 14, 20, 30, 31, 32, 33]
    assert pack.bounds == (0, 5, 6, 10)
    assert pack.written().tolist() == [False, False, True, True, True, False, False, False, False, True]


def test_the_last_token_of_a_document_predicts_nothing_of_the_next() -> None:
    """The next document begins with a written token."""
    pack = make_pack([example(2, 2), Example("no prompt", "", (), (7, 8)), example(1, 1)])
    assert pack.predicts_written().tolist() == [False, True, True, False, True, False, True, False]


@given(lengths=st.lists(st.integers(1, 50), max_size=40), capacity=st.integers(1, 60))
def test_every_document_is_in_one_pack_that_has_room(lengths: list[int], capacity: int) -> None:
    packs = first_fit(lengths, capacity)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    for pack in packs:
        assert sum(lengths[i] for i in pack) <= capacity or len(pack) == 1
    full = [sum(lengths[i] for i in pack) for pack in packs]
    assert all(a + b > capacity for k, a in enumerate(full) for b in full[k + 1 :]), "two packs would fit into one"


def test_at_least_95_percent_of_what_fits_is_real() -> None:
    """Documents of the lengths of chats, in packs of 4096: all but the last are nearly full."""
    torch.manual_seed(0)
    lengths = torch.randn(2000).mul(0.7).add(5.3).exp().clamp(16, 2048).round().long().tolist()
    packs = first_fit(lengths, 4096)
    used = sum(lengths) / (4096 * len(packs))
    assert used > 0.95, f"{used:.1%}"
