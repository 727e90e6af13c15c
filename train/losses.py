"""Losses of draft heads.

All are sums over tokens; the caller divides by the tokens of the whole step, over every rank. Logits are
never kept: each chunk of positions computes its logits, its loss and its gradient, and forgets them, so the largest
tensor is ``rows × K × D`` and no ``[B, T, V]`` ever exists.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

# N supervised position, K draft step, D draft vocabulary, V target vocabulary, H hidden.


@dataclass(frozen=True)
class StepLosses:
    """Result of ``soft_cross_entropy``."""

    per_step: Tensor  # [K] weighted sums over positions, differentiable
    agrees: Tensor  # [K, N] bool: the head's first choice is the teacher's, where the weight is positive


def step_weights(steps: int, decay: float) -> Tensor:
    """``decay^k / Σ decay^i``: weights of the draft steps, ``[K]``, summing to one (heads.md §3, normalised form)."""
    weights = decay ** torch.arange(steps, dtype=torch.float32)
    return weights / weights.sum()


def soft_cross_entropy(
    student_KNH: Tensor,
    student_weight: Tensor,
    teacher_NH: Tensor,
    teacher_logits: Callable[[Tensor], Tensor],
    weights_KN: Tensor,
    *,
    rows: int | None = None,
) -> StepLosses:
    """``Σ_n w_kn · −Σ_v P_n(v) log softmax(W s_kn)(v)`` for every step ``k``, with ``P_n =
    softmax(teacher_logits(h_n))``.

    Equal to the KL divergence from the teacher up to the teacher's entropy (Hinton et al. 2015,
    arXiv:1503.02531; EAGLE-3 uses it on the draft vocabulary). ``student_weight``: ``[D, H]``, or ``[K, D, H]``
    where steps have their own. ``teacher_logits`` maps ``[n, H]`` to ``[n, D]``. ``weights_KN`` is 0 where a
    step is not supervised at a position. Each teacher row is computed once for all steps; ``rows`` positions
    are in memory at a time (default: about four million logits).
    """
    if rows is None:
        rows = min(512, max(64, 2**22 // student_weight.shape[-2]))
    losses, agrees = _ChunkedSoftCrossEntropy.apply(
        student_KNH, student_weight, teacher_NH, teacher_logits, weights_KN, rows
    )
    return StepLosses(losses, agrees)


class _ChunkedSoftCrossEntropy(torch.autograd.Function):
    """Gradients are formed in the forward pass, while the logits exist: ``dL/dlogits = w (softmax(logits) − P)``."""

    @staticmethod
    def forward(
        ctx: Any,
        student_KNH: Tensor,
        student_weight: Tensor,
        teacher_NH: Tensor,
        teacher_logits: Callable[[Tensor], Tensor],
        weights_KN: Tensor,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        steps, positions, _ = student_KNH.shape
        dtype = teacher_NH.dtype  # matrix products run in the target's dtype, softmax in fp32
        weight = student_weight.detach().to(dtype)
        student = student_KNH.detach().to(dtype)
        train_weight = ctx.needs_input_grad[1]
        grad_student = torch.empty_like(student_KNH)
        grad_weight = torch.zeros_like(student_weight, dtype=torch.float32) if train_weight else None
        losses = torch.zeros(steps, device=student.device)
        agrees = torch.zeros(steps, positions, dtype=torch.bool, device=student.device)
        for start in range(0, positions, rows):
            part = slice(start, start + rows)
            teacher = teacher_logits(teacher_NH[part]).float()  # [n, D]
            first_choice = teacher.argmax(-1)
            probabilities = teacher.softmax(-1)
            for k in range(steps):  # a step at a time: the logits of one step are the largest tensor
                w = weight if weight.ndim == 2 else weight[k]
                share = weights_KN[k, part]  # [n]
                logits = linear(student[k, part], w).float()  # [n, D]
                top, own_choice = logits.max(-1)
                expected = torch.linalg.vecdot(probabilities, logits)  # [n] Σ_v P(v) logit(v)
                q = logits.softmax(-1)
                # logsumexp from the largest entry: its probability is e^(top - logsumexp).
                normaliser = top - q.gather(1, own_choice[:, None]).squeeze(1).log()
                agrees[k, part] = (own_choice == first_choice) & (share > 0)
                losses[k] += ((normaliser - expected) * share).sum()
                residual = q.sub_(probabilities).to(dtype)  # dL/dlogits before the row's share
                grad_student[k, part] = (residual @ w) * share[:, None]
                if grad_weight is not None:
                    into = grad_weight if grad_weight.ndim == 2 else grad_weight[k]
                    into += residual.T @ (student[k, part] * share[:, None]).to(dtype)
        ctx.save_for_backward(grad_student, grad_weight)
        ctx.weight_dtype = student_weight.dtype
        ctx.mark_non_differentiable(agrees)
        return losses, agrees

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # grads[0]: [K]. Steps that share a weight share one gradient sum, so they must share one factor.
        grad_student, grad_weight = ctx.saved_tensors
        factor = grads[0]
        if grad_weight is not None:
            if grad_weight.ndim == 2:
                if not torch.equal(factor, factor[:1].expand_as(factor)):
                    raise ValueError("put step weights into weights_KN: a shared output weight needs one factor")
                grad_weight = grad_weight * factor[0]
            else:
                grad_weight = grad_weight * factor[:, None, None]
            grad_weight = grad_weight.to(ctx.weight_dtype)
        return grad_student * factor[:, None, None], grad_weight, None, None, None, None
