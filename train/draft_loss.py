"""The loss of a draft head and its gradient, formed together while the logits exist.

Every supervised position has a teacher distribution over the draft vocabulary, and up to ``K`` draft steps that predict
it. A chunk of positions computes the teacher once, then one step's logits at a time, their statistics and their
gradient, and forgets them: the largest tensor is ``rows × D``, no ``[B, T, V]`` ever exists, and backward only scales
what is there. Three terms can be mixed, each with a coefficient per step and position:

    loss = Σ_kn  a_kn · CE_kn  +  b_kn · (1 − α_kn)  +  c_kn · (−log α_kn)

    CE = −Σ_v P(v) log q(v)      dCE/dlogit_v = q_v − P_v
    α  = Σ_v min(p(v), q(v))     dα/dlogit_v  = q_v (1[q_v < p_v] − Σ_u q_u 1[q_u < p_u])

``q`` is the head's softmax, ``P`` the teacher's over the draft vocabulary, ``p = exp(z − L)`` the teacher's probability
in the whole vocabulary (``L``: logsumexp over it). CE is soft cross-entropy (Hinton et al. 2015, arXiv:1503.02531;
EAGLE-3 uses it), 1 − α the total variation, α the chance that sampling accepts (Leviathan et al. 2023,
arXiv:2211.17192; Samarin et al., arXiv:2602.23881, train on it).

Coefficients given outright cost one pass; if they depend on the statistics, a first pass computes those only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitdraft.quant.first_choice import first_choice, log_normaliser
from bitdraft.quant.fp32_products import prefers_onednn, times
from bitdraft.speculators.products import add_product

# K draft step, N supervised position, n positions of a chunk, D draft vocabulary, V target vocabulary, H hidden.

LEAST_ACCEPTANCE = 1e-30  # −log α is that of this where α is less: 1 / α stays finite


@dataclass(frozen=True)
class Statistics:
    """What the head does at each step and position; detached, 0 where no row exists."""

    cross_entropy: Tensor  # [K, N] fp32
    acceptance: Tensor | None  # [K, N] fp32, in [0, 1]; None without log_normalisers
    agrees: Tensor  # [K, N] bool: the head's first choice is the teacher's


@dataclass(frozen=True)
class Coefficients:
    """Non-negative weight of each term, ``[K, N]``; None: the term is not there. Counted as 0 where no row exists."""

    cross_entropy: Tensor | None = None
    total_variation: Tensor | None = None  # of 1 − acceptance
    log_acceptance: Tensor | None = None  # of −log acceptance


class DraftLoss(NamedTuple):
    """Result of ``draft_loss``."""

    loss: Tensor  # [] differentiable, once
    statistics: Statistics


def draft_loss(
    student_KNH: Tensor,
    student_weight: Tensor,
    teacher_NH: Tensor,
    teacher_logits: Callable[[Tensor], Tensor],
    log_normalisers_N: Tensor | None,
    coefficients: Coefficients | Callable[[Statistics], Coefficients],
    *,
    exists_KN: Tensor | None = None,
    rows: int | None = None,
) -> DraftLoss:
    """``Σ_kn a·CE + b·(1 − α) + c·(−log α)`` as in the module's docstring, with gradients for ``student_KNH`` and
    ``student_weight``.

    ``student_weight``: ``[D, H]``, or ``[K, D, H]`` where steps have their own. ``teacher_logits`` maps ``[n, H]`` to
    ``[n, D]``; every position's first choice lies in the draft vocabulary. ``log_normalisers_N``: logsumexp of the
    teacher's logits over the target's whole vocabulary, needed by the two terms of α. ``exists_KN``: False where no
    drafting row predicts the position at that step (what stands in ``student_KNH`` there does not matter as long as it
    is finite). Products run in the dtype of ``teacher_NH``, everything else in fp32, whatever autocast says. ``rows``
    positions are in memory at a time (default: 256 to 512).

    The gradients are kept once: a second ``backward`` through the same loss is refused with ``RuntimeError``.
    ``ValueError`` if a term of α is asked for without ``log_normalisers_N``.
    """
    problem = _Problem(
        student_KNH.detach().to(teacher_NH.dtype),
        student_weight.detach().to(teacher_NH.dtype),
        teacher_NH.detach(),
        teacher_logits,
        log_normalisers_N,
        exists_KN,
        rows or min(512, max(256, 2**21 // student_weight.shape[-2])),
    )
    differentiable = torch.is_grad_enabled() and (student_KNH.requires_grad or student_weight.requires_grad)
    grads = _Gradients.zeros(student_KNH, student_weight) if differentiable else None
    with torch.no_grad(), torch.autocast(student_KNH.device.type, enabled=False):
        if isinstance(coefficients, Coefficients):
            known = _checked(coefficients, problem)
            statistics = _sweep(problem, None, known, grads)
        else:
            statistics = _sweep(problem, None, None, None)
            known = _checked(coefficients(statistics), problem)
            if grads is not None:
                _sweep(problem, statistics, known, grads)
        loss = _value(statistics, known)
    if grads is not None:
        loss = _WithGradients.apply(student_KNH, student_weight, loss, grads)
    return DraftLoss(loss, statistics)


class _WithGradients(torch.autograd.Function):
    """Attaches gradients that are there already to the value they belong to."""

    @staticmethod
    def forward(ctx: Any, student_KNH: Tensor, student_weight: Tensor, loss: Tensor, grads: "_Gradients") -> Tensor:
        ctx.grads = grads
        ctx.weight_dtype = student_weight.dtype
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("the gradients of a draft loss are kept once: compute the loss again")
        grads, ctx.grads = ctx.grads, None  # nobody else holds them: autograd can hand them on without a copy
        unscaled = factor.device.type == "cpu" and factor.item() == 1.0
        for grad in (grads.student, grads.weight):
            if grad is not None and not unscaled:
                grad.mul_(factor)
        weight = None if grads.weight is None else grads.weight.mT.to(ctx.weight_dtype).contiguous()
        return grads.student, weight, None, None


@dataclass(frozen=True)
class _Gradients:
    """What the sweeps add up; None where none is wanted."""

    student: Tensor | None  # [K, N, H]
    weight: Tensor | None  # [H, D] or [K, H, D] fp32

    @staticmethod
    def zeros(student_KNH: Tensor, student_weight: Tensor) -> "_Gradients":
        student = torch.zeros_like(student_KNH, requires_grad=False) if student_KNH.requires_grad else None
        if not student_weight.requires_grad:
            return _Gradients(student, None)
        # Stored so that each product's own layout is added to it.
        if prefers_onednn(student_weight):
            weight = torch.zeros_like(student_weight.mT, memory_format=torch.contiguous_format, requires_grad=False)
        else:
            weight = torch.zeros_like(student_weight, dtype=torch.float32, requires_grad=False).mT
        return _Gradients(student, weight)


@dataclass(frozen=True)
class _Problem:
    """What is known of a batch, in the dtype of the products."""

    student: Tensor  # [K, N, H]
    weight: Tensor  # [D, H] or [K, D, H]
    teacher: Tensor  # [N, H]
    teacher_logits: Callable[[Tensor], Tensor]
    log_normalisers: Tensor | None  # [N]
    exists: Tensor | None  # [K, N]
    rows: int

    @cached_property
    def transposed(self) -> Tensor:
        """``[H, D]`` or ``[K, H, D]``: for the students' gradients, in the layout that oneDNN multiplies fastest."""
        return self.weight.mT.contiguous() if prefers_onednn(self.weight) else self.weight.mT

    @cached_property
    def chunks(self) -> list[tuple[slice, list[slice | Tensor | None]]]:
        """Positions of every chunk and, within the chunk, those to compute at each step: all, some or none.

        A few that do not exist are computed with the rest (their coefficients are 0): picking rows copies the
        teacher's, and every number of rows is another shape for the matrix library.
        """
        steps, positions, _ = self.student.shape
        parts = [slice(start, min(start + self.rows, positions)) for start in range(0, positions, self.rows)]
        if self.exists is None or not parts:
            return [(part, [slice(None)] * steps) for part in parts]
        counts = torch.stack([self.exists[:, part].sum(1) for part in parts]).tolist()  # [chunks][K]
        return [
            (part, [self._picked(part, k, counts_K[k]) for k in range(steps)])
            for part, counts_K in zip(parts, counts, strict=True)
        ]

    def _picked(self, part: slice, k: int, count: int) -> slice | Tensor | None:
        if count == 0:
            return None
        if count > 0.8 * (part.stop - part.start) or self.exists is None:
            return slice(None)
        return self.exists[k, part].nonzero().squeeze(1)


class _Teacher(NamedTuple):
    """A chunk's teacher."""

    probabilities: Tensor  # [n, D] of the whole vocabulary if its normalisers are known, else of the draft vocabulary
    mass: Tensor  # [n] their sum
    choice: Tensor  # [n] the first choice

    @staticmethod
    def at(problem: _Problem, part: slice, scratch: Tensor) -> "_Teacher":
        logits = problem.teacher_logits(problem.teacher[part]).float()  # [n, D]
        probabilities = torch.softmax(logits, -1, out=scratch[: len(logits)])
        top, choice = first_choice(logits)
        if problem.log_normalisers is None:
            return _Teacher(probabilities, torch.ones_like(top), choice)
        mass = (log_normaliser(top, choice, probabilities) - problem.log_normalisers[part]).exp()
        return _Teacher(probabilities.mul_(mass[:, None]), mass, choice)

    def picked(self, rows: slice | Tensor) -> "_Teacher":
        return self if isinstance(rows, slice) else _Teacher(*(x[rows] for x in self))


def _sweep(
    problem: _Problem, known: Statistics | None, coefficients: Coefficients | None, grads: _Gradients | None
) -> Statistics:
    """One pass over all chunks and steps: fills the statistics unless they are known, and the gradients if wanted."""
    shape, device = problem.student.shape[:2], problem.student.device
    statistics = known or Statistics(
        torch.zeros(shape, device=device),
        None if problem.log_normalisers is None else torch.zeros(shape, device=device),
        torch.zeros(shape, dtype=torch.bool, device=device),
    )
    # Two tables and the teacher's, over and over: fresh ones would be new pages and cold caches every time.
    size = (min(problem.rows, shape[1]), problem.weight.shape[-2])
    scratch = [torch.empty(size, device=device) for _ in range(3)]
    for part, picked_K in problem.chunks:
        teacher_of_all = _Teacher.at(problem, part, scratch[0])
        for k, picked in enumerate(picked_K):  # a step at a time: one step's logits are the largest tensor
            if picked is None:
                continue
            at = (k, part) if isinstance(picked, slice) else (k, picked + part.start)
            teacher = teacher_of_all.picked(picked)
            own = () if problem.weight.ndim == 2 else (k,)
            student = problem.student[at]  # [n, H]
            logits = times(student, problem.weight[own]).float()  # [n, D]
            q, spare = (table[: len(student)] for table in scratch[1:])
            torch.softmax(logits, -1, out=q)
            if known is None:
                _measure(statistics, at, logits, q, teacher, spare)
            del logits
            if grads is not None and coefficients is not None:
                share, residual = _residual(q, teacher, coefficients, statistics, at, spare)
                residual = residual.to(problem.student.dtype)
                if grads.student is not None:
                    grads.student[at] = (times(residual, problem.transposed[own]) * share[:, None]).to(
                        grads.student.dtype
                    )
                if grads.weight is not None:
                    add_product(grads.weight[own], (student * share[:, None]).to(student.dtype).T, residual)
    if known is None and problem.exists is not None:
        for table in (statistics.cross_entropy, statistics.acceptance, statistics.agrees):
            if table is not None:
                table.masked_fill_(~problem.exists, 0)
    return statistics


def _measure(
    statistics: Statistics, at: tuple[int, Any], logits: Tensor, q: Tensor, teacher: _Teacher, spare: Tensor
) -> None:
    top, choice = first_choice(logits)
    expected = torch.mul(teacher.probabilities, logits, out=spare).sum(-1) / teacher.mass  # [n] Σ_v P(v) logit(v)
    statistics.cross_entropy[at] = log_normaliser(top, choice, q) - expected
    statistics.agrees[at] = choice == teacher.choice
    if statistics.acceptance is not None:
        statistics.acceptance[at] = torch.minimum(q, teacher.probabilities, out=spare).sum(-1).clamp_(max=1)


def _residual(
    q: Tensor,
    teacher: _Teacher,
    coefficients: Coefficients,
    statistics: Statistics,
    at: tuple[int, Any],
    spare: Tensor,
) -> tuple[Tensor, Tensor]:
    """``(share [n], residual [n, D])``: their product is dloss/dlogits. The residual lies in ``q``."""
    p, entropy = teacher.probabilities, coefficients.cross_entropy
    distance, log_acceptance = coefficients.total_variation, coefficients.log_acceptance
    if distance is None and log_acceptance is None:
        assert entropy is not None
        return entropy[at], q.addcmul_(p, -1 / teacher.mass[:, None])
    along = torch.zeros_like(teacher.mass)  # [n] weight of −dα
    if distance is not None:
        along = along + distance[at]
    if log_acceptance is not None:
        assert statistics.acceptance is not None
        along = along + log_acceptance[at] / statistics.acceptance[at].clamp(min=LEAST_ACCEPTANCE)
    share = along if entropy is None else along + entropy[at]
    # Of entries of about one whatever the shares; not 1 − the other, which would cancel.
    scale = 1 / torch.where(share > 0, share, 1)
    along, rest = along * scale, torch.zeros_like(share) if entropy is None else entropy[at] * scale
    own = torch.lt(q, p, out=spare).mul_(q)  # [n, D] q where it is less than p
    total = own.sum(-1)
    # along (q total − own) + rest (q − P)
    residual = q.mul_((along * total + rest)[:, None]).addcmul_(own, -along[:, None])
    if entropy is not None:
        residual.addcmul_(p, -(rest / teacher.mass)[:, None])
    return share, residual


def _checked(coefficients: Coefficients, problem: _Problem) -> Coefficients:
    """``ValueError`` for terms that cannot be computed; 0 where no row exists."""
    terms = (coefficients.cross_entropy, coefficients.total_variation, coefficients.log_acceptance)
    if all(term is None for term in terms):
        raise ValueError("a draft loss needs the coefficients of at least one term")
    if problem.log_normalisers is None and not (terms[1] is None and terms[2] is None):
        raise ValueError("total_variation and log_acceptance need log_normalisers_N")
    exists = problem.exists
    if exists is None:
        return coefficients
    return Coefficients(*(None if term is None else term.masked_fill(~exists, 0) for term in terms))


def _value(statistics: Statistics, coefficients: Coefficients) -> Tensor:
    loss = torch.zeros((), device=statistics.cross_entropy.device)
    if coefficients.cross_entropy is not None:
        loss = loss + (coefficients.cross_entropy * statistics.cross_entropy).sum()
    if statistics.acceptance is not None and coefficients.total_variation is not None:
        loss = loss + (coefficients.total_variation * (1 - statistics.acceptance)).sum()
    if statistics.acceptance is not None and coefficients.log_acceptance is not None:
        loss = loss - (coefficients.log_acceptance * statistics.acceptance.clamp(min=LEAST_ACCEPTANCE).log()).sum()
    return loss
