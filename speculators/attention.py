"""Attention of the training-time test over packed documents.

Li et al. 2025 (arXiv:2503.01840): step ``k`` at row ``t`` sees the step-0 keys of rows ``≤ t`` of its document and the
keys of steps ``1 … k`` at its own row only, exactly what drafting ``k`` tokens after row ``t`` sees.

The step-0 keys go through the fused kernel of the device, which also gives the log-sum-exp of their scores; the later
steps' keys, one per row and step, are merged into that softmax by hand. In the backward pass the kernel is given the
merged output and log-sum-exp and so yields the exact gradients of its share (``attention_parts.py`` says why).
Memory grows with ``R``, never with ``R · N``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitdraft.speculators.attention_kernels import kernel_for
from bitdraft.speculators.attention_parts import accumulation_dtype
from bitdraft.speculators.documents import Documents

# N packed token, R drafting row, H query head, G key head, D head dimension, k step.


def training_time_test_attention(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], documents: Documents
) -> Tensor:
    """Attention of step ``k = len(keys) - 1`` at the drafting rows, ``[R, H, D]``, scaled by ``D^-0.5``.

    ``q``: ``[R, H, D]``. ``keys[0]``, ``values[0]``: ``[N, G, D]`` of all rows, those of later steps ``[R, G, D]``. A
    row attends to step-0 keys of its own document up to itself and to its own keys of later steps, in one softmax.
    Keys and values are taken in ``q``'s dtype; under autocast everything is in autocast's, as in PyTorch's attention.
    """
    assert len(q) == documents.row_bounds[-1] and len(keys[0]) == len(values[0]) == documents.tokens
    assert all(len(x) == len(q) for x in (*keys[1:], *values[1:])) and len(keys) == len(values)
    dtype = _dtype(q)
    tensors = [_last_contiguous(x.to(dtype)) for x in (q, *keys, *values)]
    return _TrainingTimeTest.apply(documents, *tensors)


def _dtype(q: Tensor) -> torch.dtype:
    device = q.device.type
    if q.dtype == torch.float64 or not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return q.dtype
    return torch.get_autocast_dtype(device)


def _last_contiguous(x: Tensor) -> Tensor:
    """What the kernels ask of strides: that the numbers of one head lie next to each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _TrainingTimeTest(torch.autograd.Function):
    """``apply(documents, q, *keys, *values)``."""

    @staticmethod
    def forward(ctx: Any, documents: Documents, q: Tensor, *both: Tensor) -> Tensor:
        keys, values = both[: len(both) // 2], both[len(both) // 2 :]
        out, lse = kernel_for(q).forward(q, keys[0], values[0], documents)
        own = [_own_scores(q, key) for key in keys[1:]]
        if own:
            whole = torch.stack([lse, *own]).logsumexp(0)  # [R, H]
            merged = out * (lse - whole).exp()[..., None]
            for scores, value in zip(own, values[1:], strict=True):
                heads = _by_key_head(merged, value)  # a view
                heads.addcmul_(_by_key_head((scores - whole).exp()[..., None], value), value[:, :, None].to(heads))
            out, lse = merged.to(q.dtype), whole
        ctx.documents, ctx.steps = documents, len(keys)
        ctx.save_for_backward(q, *both, out, lse, *own)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        steps = ctx.steps
        q, *rest = ctx.saved_tensors
        keys, values, (out, lse, *own) = rest[:steps], rest[steps : 2 * steps], rest[2 * steps :]
        # Of the queries in the accumulation dtype, so that the steps' shares are rounded once.
        grad_q, *of_past = kernel_for(q).backward(grad, q, keys[0], values[0], out, lse, ctx.documents)
        grad_keys, grad_values = [of_past[0]], [of_past[1]]
        wide = grad.to(lse.dtype)
        common = (wide * out).sum(-1)  # [R, H]: Σ of the weights times their gradients, over all keys
        for key, value, scores in zip(keys[1:], values[1:], own, strict=True):
            weights = (scores - lse).exp()
            of_scores = weights * (_dots(wide, value) - common) * q.shape[-1] ** -0.5
            heads = _by_key_head(of_scores[..., None], key)
            _by_key_head(grad_q, key).addcmul_(heads, key[:, :, None].to(grad_q))
            grad_keys.append((heads * _by_key_head(q, key)).sum(2).to(key.dtype))
            grad_values.append((_by_key_head(weights[..., None] * wide, value)).sum(2).to(value.dtype))
        return None, grad_q.to(q.dtype), *grad_keys, *grad_values


def _by_key_head(x: Tensor, key: Tensor) -> Tensor:
    """``[R, H, …]`` → ``[R, G, H / G, …]``, a view, for keys ``[R, G, D]``."""
    return x.unflatten(1, (key.shape[1], -1))


def _dots(x: Tensor, key: Tensor) -> Tensor:
    """``[R, H]``: products of ``x`` ``[R, H, D]`` with each row's own key ``[R, G, D]``, in fp32 (fp64 for fp64)."""
    return (_by_key_head(x, key) * key[:, :, None].to(accumulation_dtype(key))).sum(-1).flatten(1)


def _own_scores(q: Tensor, key: Tensor) -> Tensor:
    return _dots(q, key) * q.shape[-1] ** -0.5
