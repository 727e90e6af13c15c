"""Causal attention within the documents of a packed row, part by part, with its log-sum-exp.

A kernel's ``forward`` gives ``O`` and ``L = ln Σ exp s`` of each row's scores ``s``. Its ``backward`` recomputes the
weights as ``P = exp(s - L)`` and takes ``dS = P ∘ (dO Vᵀ - rowsum(dO ∘ O))`` (FlashAttention-2, arXiv:2307.08691,
algorithm 2). Neither formula asks over which keys ``L`` and ``O`` were taken: given those of a softmax over more keys,
they yield the exact gradients for the keys that the kernel is shown. So one softmax can be computed in parts, whose
outputs are merged by their log-sum-exps, and no part ever holds the scores of all rows with all keys.

The drafting rows ``[first, behind)`` of a document that begins at ``begin`` see its rows ``[begin, first)``, all of
them, and ``[first, behind)`` causally: two parts for kernels whose causal mask begins in the top left corner. CUDA's
flash kernel aligns it at the bottom right, and takes all documents at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bitdraft.speculators.documents import Documents

# N packed token, R drafting row, H query head, G key head, D head dimension; m rows and n keys of one part.

Forward = tuple[Tensor, Tensor]  # output [R, H, D], log-sum-exp [R, H] in fp32 (fp64 for fp64)
Gradients = tuple[Tensor, Tensor, Tensor]  # of queries, keys and values


@dataclass(frozen=True)
class AttentionKernel:
    """Attention of drafting rows to the rows of their own document up to themselves.

    ``forward(q [R, H, D], key [N, G, D], value [N, G, D], documents)``;
    ``backward(grad, q, key, value, out, lse, documents)`` with the ``out`` and ``lse`` of the whole softmax.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Documents], Forward]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Documents], Gradients]


@dataclass(frozen=True)
class PartKernel:
    """Attention of rows ``[m, H, D]`` to keys ``[n, G, D]``: to all of them or, where ``m = n``, causally.

    ``forward(q, key, value, causal)``; ``backward(grad, q, key, value, out, lse, causal)``.
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool], Forward]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], Gradients]


def accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _parts(documents: Documents) -> Iterator[tuple[slice, slice, bool]]:
    """Drafting rows (of R), the keys (of N) they see, and whether causally; a document's causal part comes first."""
    for (begin, _, first, behind), row in zip(documents.spans, documents.row_bounds[:-1], strict=True):
        rows = slice(row, row + behind - first)
        if first < behind:
            yield rows, slice(first, behind), True
        if begin < first < behind:
            yield rows, slice(begin, first), False


def _forward_by_parts(part: PartKernel, q: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Forward:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(q.shape[:2], dtype=accumulation_dtype(q))
    for rows, seen, causal in _parts(documents):
        its_out, its_lse = part.forward(q[rows], key[seen], value[seen], causal)
        if causal:
            out[rows], lse[rows] = its_out, its_lse
        else:
            both = torch.logaddexp(lse[rows], its_lse)
            out[rows] = out[rows] * (lse[rows] - both).exp()[..., None] + its_out * (its_lse - both).exp()[..., None]
            lse[rows] = both
    return out, lse


def _backward_by_parts(
    part: PartKernel,
    grad: Tensor,
    q: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Documents,
) -> Gradients:
    grad_q = torch.zeros_like(q, dtype=accumulation_dtype(q))
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    for rows, seen, causal in _parts(documents):
        parts = part.backward(grad[rows], q[rows], key[seen], value[seen], out[rows], lse[rows], causal)
        grad_q[rows] += parts[0]
        grad_key[seen], grad_value[seen] = parts[1:]  # no key is in two parts
    return grad_q, grad_key, grad_value


def by_parts(part: PartKernel) -> AttentionKernel:
    return AttentionKernel(partial(_forward_by_parts, part), partial(_backward_by_parts, part))
