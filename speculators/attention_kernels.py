"""Attention within documents by the kernel that the device has (``attention_parts.py`` says what is computed)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from bitdraft.speculators.attention_cuda import CUDA_EFFICIENT, CUDA_FLASH
from bitdraft.speculators.attention_parts import (
    AttentionKernel,
    Forward,
    Gradients,
    PartKernel,
    accumulation_dtype,
    by_parts,
)

# N packed token, R drafting row, H query head, G key head, D head dimension; m rows and n keys of one part.

_CHUNK = 128  # rows whose scores with all their keys the kernel written in PyTorch holds at a time


def kernel_for(q: Tensor) -> AttentionKernel:
    """The kernel for queries ``[R, H, D]`` on their device, in their dtype."""
    if q.device.type == "cpu":
        return CPU
    if q.device.type != "cuda" or torch.version.hip is not None:  # AMD's builds lay the log-sum-exps out otherwise
        return CHUNKED
    if _flash_takes(q):
        return CUDA_FLASH
    return CHUNKED if q.dtype == torch.float64 else CUDA_EFFICIENT


def _flash_takes(q: Tensor) -> bool:
    """Whether CUDA's flash kernel has this dtype, head dimension and device."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    return half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and torch.cuda.get_device_capability(q.device) >= (8, 0)


# CPU. The kernel takes strided [1, heads, rows, D], and fewer key heads than query heads.


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """``[m, H, …]`` → ``[1, H, m, …]``, views."""
    return [x.transpose(0, 1)[None] for x in tensors]


def _cpu_forward(q: Tensor, key: Tensor, value: Tensor, causal: bool) -> Forward:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(*_heads_first(q, key, value), 0.0, causal)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _cpu_backward(
    grad: Tensor, q: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    of_q, of_key, of_value = flash(*_heads_first(grad, q, key, value, out, lse), 0.0, causal)
    return of_q[0].transpose(0, 1), of_key[0].transpose(0, 1), of_value[0].transpose(0, 1)


# Any device: the same written in PyTorch, a chunk of rows at a time.


def _by_key_head(x: Tensor, heads: int) -> Tensor:
    """``[m, H, …]`` → ``[G, (H / G) · m, …]``: the rows of all query heads that share a key head."""
    return x.unflatten(1, (heads, -1)).transpose(0, 1).transpose(1, 2).flatten(1, 2)


def _by_row(x: Tensor, rows: int) -> Tensor:
    """``_by_key_head`` undone."""
    return x.unflatten(1, (-1, rows)).transpose(1, 2).transpose(0, 1).flatten(1, 2)


def _scores(q: Tensor, key: Tensor, rows: int, causal: bool) -> Tensor:
    """``[G, (H / G) · rows, n]`` of queries by key head and keys ``[n, G, D]``; causally, the last are the rows'."""
    scores = (q @ key.permute(1, 2, 0)).to(accumulation_dtype(q)).mul_(q.shape[-1] ** -0.5)
    if causal:
        later = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
        scores.unflatten(1, (-1, rows))[..., -rows:].masked_fill_(later, float("-inf"))
    return scores


def _chunks(rows: int, keys: int, causal: bool) -> Iterator[tuple[slice, int]]:
    """Rows, and how many of the keys they see."""
    for top in range(0, rows, _CHUNK):
        below = min(top + _CHUNK, rows)
        yield slice(top, below), below if causal else keys


def _chunked_forward(q: Tensor, key: Tensor, value: Tensor, causal: bool) -> Forward:
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=accumulation_dtype(q))
    for rows, seen in _chunks(len(q), len(key), causal):
        size = rows.stop - rows.start
        scores = _scores(_by_key_head(q[rows], key.shape[1]), key[:seen], size, causal)
        total = scores.logsumexp(-1)
        weights = scores.sub_(total[..., None]).exp_().to(q.dtype)
        out[rows] = _by_row(weights @ value[:seen].transpose(0, 1), size)
        lse[rows] = _by_row(total, size)
    return out, lse


def _chunked_backward(
    grad: Tensor, q: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    heads, wide = key.shape[1], accumulation_dtype(q)
    grad_q = torch.empty_like(q)
    grad_key, grad_value = (torch.zeros_like(x.transpose(0, 1), dtype=wide) for x in (key, value))  # [G, n, D]
    for rows, seen in _chunks(len(q), len(key), causal):
        size = rows.stop - rows.start
        g, its_q, its_lse = (_by_key_head(x[rows], heads) for x in (grad, q, lse))
        common = _by_key_head((grad[rows].to(wide) * out[rows]).sum(-1), heads)  # rowsum(dO ∘ O)
        weights = _scores(its_q, key[:seen], size, causal).sub_(its_lse[..., None]).exp_()
        grad_value[:, :seen] += weights.to(q.dtype).transpose(1, 2) @ g
        of_weights = (g @ value[:seen].permute(1, 2, 0)).to(wide)
        of_scores = of_weights.sub_(common[..., None]).mul_(weights).mul_(q.shape[-1] ** -0.5).to(q.dtype)
        grad_q[rows] = _by_row(of_scores @ key[:seen].transpose(0, 1), size)
        grad_key[:, :seen] += of_scores.transpose(1, 2) @ its_q
    return grad_q, grad_key.transpose(0, 1).to(key.dtype), grad_value.transpose(0, 1).to(value.dtype)


CPU = by_parts(PartKernel(_cpu_forward, _cpu_backward))
CHUNKED = by_parts(PartKernel(_chunked_forward, _chunked_backward))
