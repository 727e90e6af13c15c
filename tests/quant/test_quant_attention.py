"""Packing query heads that share a key changes nothing but the time."""

from collections.abc import Callable

import pytest
import torch
from tiny import VOCAB
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bitdraft.quant.attention import packed
from bitdraft.quant.attention.packed import PACKED_SDPA, by_products, grouped_attention
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


@pytest.mark.parametrize("near", [1, 2**12, 2**21])
def test_two_products_are_about_as_exact_as_fused_attention(near: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, however many rows' keys are taken at a time; what stands in masked slots does not matter."""
    monkeypatch.setattr(packed, "_NEAR_BYTES", near)
    generator = torch.Generator().manual_seed(0)
    query, key = (8 * torch.randn(5, 2, n, 16, generator=generator).bfloat16() for n in (3, 40))
    value = torch.randn(5, 2, 40, 24, generator=generator).bfloat16()
    mask = (torch.arange(40) < torch.tensor([1, 7, 23, 39, 40])[:, None])[:, None, None]
    key[0, :, 1:], value[0, :, 1:] = 1e4, 1e4
    exact = scaled_dot_product_attention(query.double(), key.double(), value.double(), attn_mask=mask, scale=0.2)
    fused = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.2)
    products = by_products(query, key, value, mask, 0.2)
    assert products.dtype == torch.bfloat16 and products.shape == exact.shape
    error, of_fused = ((x.double() - exact).abs().mean() for x in (products, fused))
    assert error < 1.3 * of_fused
    default = by_products(query, key, value, mask)
    assert torch.equal(default, by_products(query, key, value, mask, 0.25))


@pytest.mark.parametrize(("groups", "rows"), [(1, 1), (3, 1), (3, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_taken_where_they_gain(
    groups: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counting(query: Tensor, *rest: Tensor, **options: float | None) -> Tensor:
        calls.append(query.shape)
        return by_products(query, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(packed, "by_products", counting)
    monkeypatch.setattr(packed, "_MANY_KEYS", 2 * 2 * 9 * 8)
    query, key, value = (torch.randn(2, 2 * n, t, 8, dtype=dtype) for n, t in ((groups, rows), (1, 9), (1, 9)))
    mask, module = torch.ones(2, 1, rows, 9, dtype=torch.bool), nn.Module()
    module.num_key_value_groups = groups  # type: ignore[assignment]
    with packed.quick_attention():
        out, _ = packed._packed_sdpa(module, query, key, value, mask)
        expected = scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(1, 2)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-2 if dtype == torch.bfloat16 else 1e-6)
        assert calls == ([(2, 2, groups * rows, 8)] if dtype == torch.bfloat16 else [])
        calls.clear()
        packed._packed_sdpa(module, query, key[:, :, :8], value[:, :, :8], mask[..., :8])
        assert calls == [], "few keys are faster fused"
        bias = torch.zeros(1, 2 * groups, rows, 9, dtype=dtype)
        packed._packed_sdpa(module, query, key, value, mask, position_bias=bias)
        assert calls == [], "nothing is left out of the scores"
    packed._packed_sdpa(module, query, key, value, mask)
    assert calls == [], "where decodings are compared, attention is torch's"


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
