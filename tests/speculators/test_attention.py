"""Training-time-test attention against the formula written out row by row."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bitdraft.speculators.attention import training_time_test_attention

# B sequence, N query head, G key head, T position, R wanted row, D head dimension.
B, N, G, T, D = 2, 4, 2, 6, 8


def inputs(rows: Tensor, k: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(k)

    def random(heads: int, length: int) -> Tensor:
        return torch.randn(B, heads, length, D, generator=generator).requires_grad_()

    wanted = rows.shape[1]
    lengths = [T] + [wanted] * k
    return random(N, wanted), [random(G, n) for n in lengths], [random(G, n) for n in lengths]


def row_by_row(q: Tensor, keys: list[Tensor], values: list[Tensor], rows: Tensor) -> Tensor:
    """Each row's softmax over the step-0 keys up to it and its own keys of every later step."""
    out = torch.empty(q.shape)
    for b in range(B):
        for n in range(N):
            g = n // (N // G)
            for r, t in enumerate(rows[b].tolist()):
                seen = [(keys[0][b, g, j], values[0][b, g, j]) for j in range(t + 1)]
                seen += [(key[b, g, r], value[b, g, r]) for key, value in zip(keys[1:], values[1:], strict=True)]
                scores = torch.stack([(q[b, n, r] * key).sum() / math.sqrt(D) for key, _ in seen])
                shares = scores.exp() / scores.exp().sum()
                out[b, n, r] = sum((p * value for p, (_, value) in zip(shares, seen, strict=True)), torch.zeros(D))
    return out


@pytest.mark.parametrize("k", [0, 1, 2, 4])
@pytest.mark.parametrize("rows", [[[0, 3, 5], [2, 3, 4]], [[0], [5]], [list(range(T))] * 2], ids=["some", "one", "all"])
def test_values_and_gradients_are_those_of_the_formula(k: int, rows: list[list[int]]) -> None:
    wanted = torch.tensor(rows)
    q, keys, values = inputs(wanted, k)
    weight = torch.randn(B, N, wanted.shape[1], D, generator=torch.Generator().manual_seed(9))
    results = []
    for attention in (training_time_test_attention, row_by_row):
        out = attention(q, keys, values, wanted)
        results.append([out, *torch.autograd.grad((out * weight).sum(), [q, *keys, *values])])
    for mine, its in zip(*results, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [1, 3])
def test_all_rows_at_once_equal_the_dense_mask(k: int) -> None:
    """The batched form: keys of all steps side by side, allowed where j ≤ t in the first and j = t in the others."""
    rows = torch.arange(T).expand(B, T)
    q, keys, values = inputs(rows, k)
    t, j = torch.arange(T)[:, None], torch.arange((k + 1) * T)
    mask = ((j < T) & (j <= t)) | ((j >= T) & ((j - t) % T == 0))
    dense = scaled_dot_product_attention(q, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(training_time_test_attention(q, keys, values, rows), dense, rtol=1e-5, atol=1e-5)


def test_later_positions_are_not_seen() -> None:
    rows = torch.tensor([[1, 4], [0, 2]])
    q, keys, values = inputs(rows, 2)
    before = training_time_test_attention(q, keys, values, rows)
    with torch.no_grad():
        for b, last in enumerate(rows.max(dim=1).values.tolist()):
            for tensors in (keys, values):
                tensors[0][b, :, last + 1 :] = 1e4
    assert torch.equal(training_time_test_attention(q, keys, values, rows), before)
