"""Packing query heads that share a key changes nothing but the time."""

from collections.abc import Callable

import pytest
import torch
from tiny import VOCAB
from torch.nn.functional import scaled_dot_product_attention

from bitdraft.quant.attention.packed import PACKED_SDPA, grouped_attention
from bitdraft.quant.target import LowBitTarget


@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("rows", [1, 4])
def test_grouped_attention_is_sdpa_with_shared_keys(heads: int, rows: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(3, heads * 2, rows, 8)
    key, value = torch.randn(2, 3, heads, 11, 8)
    mask = torch.rand(3, 1, rows, 11) < 0.6
    mask[..., 0] = True
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True, scale=0.3)
    torch.testing.assert_close(grouped_attention(query, key, value, mask, 0.3), expected)


def test_verification_rows_equal_no_cache_at_all(tiny_target: Callable[[str], LowBitTarget]) -> None:
    """Several new tokens in one pass (packed), single ones, and the whole sequence in one."""
    target = tiny_target("none")
    assert target.config._attn_implementation == PACKED_SDPA
    ids = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    cache, lengths = target.new_cache(9), torch.zeros(2, dtype=torch.int64)
    parts = [
        target.states(ids[:, start:stop], cache=cache, lengths=lengths + start).last_hidden
        for start, stop in ((0, 3), (3, 7), (7, 8), (8, 9))
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), target.states(ids).last_hidden, rtol=1e-4, atol=1e-5)
