"""The formula of the training-time test's attention over packed documents, row by row, and inputs for it."""

from collections.abc import Callable

import torch
from torch import Tensor

from bitdraft.speculators.attention import training_time_test_attention
from bitdraft.speculators.documents import Documents

# N packed token, R drafting row, H query head, G key head, D head dimension, k step.
H, G, D = 4, 2, 16

LAYOUTS = {
    "one": Documents.whole([7]),
    "whole": Documents.whole([5, 1, 9]),
    "prefixes": Documents((0, 6, 7, 20), ((2, 5), (6, 7), (19, 20))),
    "holes": Documents((0, 6, 9, 10, 21), ((6, 6), (7, 8), (9, 9), (12, 21))),
    # Beyond the sizes at which the kernels part rows and keys into blocks.
    "long": Documents((0, 210, 211, 780), ((10, 205), (210, 211), (740, 775))),
}

Inputs = tuple[Tensor, list[Tensor], list[Tensor]]
Attention = Callable[[Tensor, list[Tensor], list[Tensor], Documents], Tensor]


def inputs(
    documents: Documents,
    k: int,
    heads: tuple[int, int] = (H, G),
    dtype: torch.dtype = torch.float32,
    size: int = D,
) -> Inputs:
    generator = torch.Generator().manual_seed(k)
    rows = documents.row_bounds[-1]
    lengths = [documents.tokens] + [rows] * k

    def random(heads: int, length: int) -> Tensor:
        return torch.randn(length, heads, size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return random(heads[0], rows), [random(heads[1], n) for n in lengths], [random(heads[1], n) for n in lengths]


def row_by_row(q: Tensor, keys: list[Tensor], values: list[Tensor], documents: Documents) -> Tensor:
    """Each row's softmax over the step-0 keys of its document up to it and its own keys of every later step."""
    groups = q.shape[1] // keys[0].shape[1]
    rows: list[Tensor] = []
    for begin, _, first, behind in documents.spans:
        for t in range(first, behind):
            r = len(rows)
            key, value = (
                torch.cat([x[0][begin : t + 1], *(own[r : r + 1] for own in x[1:])]).repeat_interleave(groups, dim=1)
                for x in (keys, values)
            )
            shares = ((q[r] * key).sum(-1) / q.shape[-1] ** 0.5).softmax(0)  # [n, H]
            rows.append((shares[..., None] * value).sum(0))
    return torch.stack(rows) if rows else q[:0]


def with_gradients(attention: Attention, tensors: Inputs, documents: Documents) -> list[Tensor]:
    """The output and the gradients of all inputs, for random weights of the output's elements."""
    q, keys, values = tensors
    out = attention(q, keys, values, documents)
    weight = torch.randn(q.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), [q, *keys, *values], materialize_grads=True)]


def doubled(tensors: Inputs) -> Inputs:
    q, keys, values = tensors
    return q.double(), [key.double() for key in keys], [value.double() for value in values]


def assert_is_the_formula(tensors: Inputs, documents: Documents, tolerance: float) -> None:
    exact = with_gradients(
        lambda q, keys, values, _: row_by_row(*doubled((q, keys, values)), documents), tensors, documents
    )
    for mine, its in zip(with_gradients(training_time_test_attention, tensors, documents), exact, strict=True):
        torch.testing.assert_close(mine.double(), its.double(), rtol=tolerance, atol=tolerance)
