"""Attention within documents on NVIDIA GPUs (``attention_parts.py`` says what is computed)."""

from itertools import accumulate

import torch
from torch import Tensor

from bitdraft.speculators.attention_parts import AttentionKernel, Forward, Gradients, PartKernel, by_parts
from bitdraft.speculators.documents import Documents

# N packed token, R drafting row, H query head, G key head, D head dimension; m rows and n keys of one part.

# CUDA, half precision: the flash kernel over all documents at once.


def _stretches(documents: Documents, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Bounds of the drafting rows and of the keys that ``_seen`` keeps, int32, and the longest stretch of each."""
    rows = [behind - first for _, _, first, behind in documents.spans if first < behind]
    keys = [behind - begin for begin, _, first, behind in documents.spans if first < behind]
    bounds = torch.tensor([[0, *accumulate(rows)], [0, *accumulate(keys)]], dtype=torch.int32, device=device)
    return bounds[0], bounds[1], max(rows), max(keys)


def _seen(x: Tensor, documents: Documents) -> Tensor:
    """The rows of ``x`` ``[N, …]`` that some drafting row sees, one behind the other."""
    kept = [slice(begin, behind) for begin, _, first, behind in documents.spans if first < behind]
    return x if sum(s.stop - s.start for s in kept) == len(x) else torch.cat([x[s] for s in kept])


def _all_rows(x: Tensor, documents: Documents) -> Tensor:
    """``_seen`` undone, with zeros for the rows that it left out."""
    if len(x) == documents.tokens:
        return x
    parts, row = [], 0
    for begin, end, first, behind in documents.spans:
        seen = behind - begin if first < behind else 0
        parts += [x[row : row + seen], x.new_zeros(end - begin - seen, *x.shape[1:])]
        row += seen
    return torch.cat(parts)


def _flash_forward(q: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Forward:
    if not len(q):
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    key, value = _seen(key, documents), _seen(value, documents)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, key, value, *_stretches(documents, q.device), 0.0, True, False
    )
    return out, lse.transpose(0, 1)  # [H, R] → [R, H]


def _flash_backward(
    grad: Tensor, q: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, documents: Documents
) -> Gradients:
    if not len(q):
        return torch.zeros_like(q), torch.zeros_like(key), torch.zeros_like(value)
    key, value = _seen(key, documents), _seen(value, documents)
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the random state of a dropout of 0
    parts = torch.ops.aten._flash_attention_backward(
        grad,
        q,
        key,
        value,
        out,
        lse.transpose(0, 1).contiguous(),
        *_stretches(documents, q.device),
        0.0,
        True,
        unused,
        unused,
    )
    return parts[0].to(torch.float32), _all_rows(parts[1], documents), _all_rows(parts[2], documents)


# CUDA, fp32. The kernel takes strided [1, rows, H, D], as many key heads as query heads, and log-sum-exps padded to
# whole blocks of 32 rows with infinities, which give those rows no weight.


def _efficient_forward(q: Tensor, key: Tensor, value: Tensor, causal: bool) -> Forward:
    groups = q.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    out, lse, *_ = torch.ops.aten._efficient_attention_forward(
        q[None], key[None], value[None], None, None, None, None, None, 0.0, int(causal), True
    )
    return out[0], lse[0, :, : len(q)].transpose(0, 1)


def _efficient_backward(
    grad: Tensor, q: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    heads, groups = key.shape[1], q.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    padded = lse.new_full((1, q.shape[1], -(-len(q) // 32) * 32), float("inf"))
    padded[0, :, : len(q)] = lse.transpose(0, 1)
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the random state of a dropout of 0
    parts = torch.ops.aten._efficient_attention_backward(
        grad[None],
        q[None],
        key[None],
        value[None],
        None,
        out[None],
        None,
        None,
        len(q),
        len(key),
        padded,
        0.0,
        unused,
        unused,
        int(causal),
        False,
    )
    of_key, of_value = (x[0].unflatten(1, (heads, groups)).sum(2) for x in parts[1:3])
    return parts[0][0], of_key, of_value


CUDA_FLASH = AttentionKernel(_flash_forward, _flash_backward)
CUDA_EFFICIENT = by_parts(PartKernel(_efficient_forward, _efficient_backward))
