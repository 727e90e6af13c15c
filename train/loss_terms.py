"""What a draft head is trained on: the mix of terms and their weights, as pure functions.

``draft_loss`` sums ``a·CE + b·(1 − α) + c·(−log α)`` over steps and positions; here the coefficients are made. A term
of step ``k`` at position ``n`` weighs

    weight_kn = w_kn · document_n / divisor

with ``w`` the step's weight, or the survival weight of the row from which ``k`` predicts ``n``,

and the kind of loss shares it out: ``kl`` gives all to CE, ``lk`` gives ``λ_k`` to CE and ``1 − λ_k`` to the total
variation, ``lk-alpha`` gives all to ``−log α``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bitdraft.train.draft_loss import Coefficients, Statistics

# K draft step, N supervised position, R drafting row, D document.


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What the head learns from the target's distribution."""

    kind: Literal["kl", "lk", "lk-alpha"] = "kl"
    """`kl`: soft cross-entropy; `lk`: cross-entropy and total variation, the more of the latter the more is accepted;
    `lk-alpha`: minus the logarithm of the chance to be accepted."""
    lk_eta: float = 3.0
    """How fast `lk` turns to total variation: the cross-entropy's share is exp(-eta x mean acceptance)."""
    step_decay: float = 0.8
    """Weight of each draft step relative to the one before; the weights sum to one."""
    survival: bool = False
    """Weigh every step by the expected number of accepted tokens that hang on it, in place of `step_decay` (D-PACE)."""
    survival_smoothing: float = 0.5
    """How far `survival` draws acceptance towards one: 0 not at all, 1 all the way."""
    sequence_cap: float = 1.0
    """Largest share of a batch's weight that one conversation may have; 1: no limit."""

    def __post_init__(self) -> None:
        if not 0 <= self.lk_eta < float("inf"):
            raise ValueError(f"loss.lk_eta must be finite and at least 0, got {self.lk_eta}")
        if not 0 < self.step_decay <= 1:
            raise ValueError(f"loss.step_decay must lie in (0, 1], got {self.step_decay}")
        if not 0 <= self.survival_smoothing <= 1:
            raise ValueError(f"loss.survival_smoothing must lie in [0, 1], got {self.survival_smoothing}")
        if not 0 < self.sequence_cap <= 1:
            raise ValueError(f"loss.sequence_cap must lie in (0, 1], got {self.sequence_cap}")

    @property
    def needs_acceptance(self) -> bool:
        """Whether the loss needs the target's log-normalisers over its whole vocabulary."""
        return self.survival or self.kind != "kl"


def step_weights(steps: int, decay: float) -> Tensor:
    """``decay^k / Σ_i decay^i``: ``[K]``, summing to one (EAGLE-3 trainers use ``0.8^k`` unnormalised)."""
    weights = decay ** torch.arange(steps, dtype=torch.float32)
    return weights / weights.sum()


def lk_mix(mean_acceptance_K: Tensor, eta: float) -> Tensor:
    """``λ_k = exp(−η ᾱ_k)``, ``[K]``: the cross-entropy's share of the hybrid LK loss; total variation has ``1 − λ``.

    ``ᾱ``: mean acceptance of the step over supervised rows, detached (Samarin et al., LK losses, arXiv:2602.23881;
    ``η = 3`` there). Total variation alone has hardly a gradient where nothing is accepted yet.
    """
    return torch.exp(-eta * mean_acceptance_K.detach())


def survival_weights(q_KR: Tensor, valid_KR: Tensor, smoothing: float = 0.5) -> Tensor:
    """``w_kr = Σ_{m ≥ k} Π_{i ≤ m} q̃_ir`` with ``q̃ = (1 − s) q + s``, ``[K, R]``, detached (D-PACE, arXiv:2605.18810).

    The derivative of a row's expected accepted length by ``log q̃_k``. ``q_KR``: chance that the draft of step ``k``
    from row ``r`` is accepted; the paper, with hard labels, takes the label's probability, with a teacher's
    distribution it is the acceptance ``α``. Sums and products go over the row's valid steps only: a step that is not
    supervised neither adds to the length nor ends it, and has weight 0. Not normalised: between ``Σ_m s^m`` and ``K``
    at the first step; ``coefficients`` brings them back to the size of step weights.
    """
    q = torch.where(valid_KR, (1 - smoothing) * q_KR.detach() + smoothing, 1.0)
    reached = torch.where(valid_KR, q.cumprod(0), 0.0)  # [K, R] chance that steps 0 … m are all accepted
    return torch.where(valid_KR, reached.flip(0).cumsum(0).flip(0), 0.0)


def sequence_cap(counts_D: Sequence[int] | Tensor, cap: float) -> Tensor:
    """Factor per document, ``[D]``, with which none has more than the share ``cap`` of the batch's total weight.

    ``f_d = min(1, t / counts_d)`` with the level ``t = cap Σ_d min(counts_d, t)``: documents below it keep 1, those
    above are cut to it (water-filling; exact). Where ``cap`` is less than one over the number of documents that have
    any count, they get equal shares: the smallest count each.
    """
    counts = torch.as_tensor(counts_D, dtype=torch.float64)
    ascending = counts[counts > 0].sort().values
    documents = len(ascending)
    if documents == 0 or cap >= 1:
        return torch.ones(len(counts))
    level = float(ascending[0])
    if cap * documents > 1:
        for cut in range(documents):
            # The level at which the largest `cut` documents are cut and the rest are not: right if the rest lie below.
            level = cap * float(ascending[: documents - cut].sum()) / (1 - cut * cap)
            if float(ascending[documents - cut - 1]) <= level:
                break
    return (level / counts.clamp(min=level)).float()


def coefficients(
    config: LossConfig,
    row_KN: Tensor,
    rows: int,
    divisor: float,
    acceptance_K: Tensor,
    *,
    documents_N: Tensor | None = None,
) -> Coefficients | Callable[[Statistics], Coefficients]:
    """What ``draft_loss`` takes as its coefficients: outright where they do not depend on what the head does here.

    ``row_KN``: index, below ``rows``, of the drafting row from which step ``k`` predicts position ``n``, −1 where there
    is none. ``divisor``: weight of the supervised positions of the whole optimizer step, over all packs and ranks.
    ``acceptance_K``: mean acceptance of the optimizer steps before, with which LK losses mix and survival weights are
    scaled. A mean over the batch at hand would make the gradient depend on how a step is cut into packs and ranks.
    ``documents_N``: the factor of each position's document (``sequence_cap``).

    Survival weights are divided by their sum over the steps of a row that accepts as ``acceptance_K`` says: as the step
    weights they sum to about one, however much is accepted.
    """
    exists = row_KN >= 0
    position = torch.full((row_KN.shape[1],), 1 / divisor, device=row_KN.device)
    if documents_N is not None:
        position = position * documents_N

    def shared(weights_KN: Tensor) -> Coefficients:
        weights = weights_KN * position
        if config.kind == "kl":
            return Coefficients(cross_entropy=weights)
        if config.kind == "lk-alpha":
            return Coefficients(log_acceptance=weights)
        share = lk_mix(acceptance_K, config.lk_eta)[:, None]
        return Coefficients(cross_entropy=weights * share, total_variation=weights * (1 - share))

    if not config.survival:
        steps = step_weights(len(row_KN), config.step_decay).to(row_KN.device)
        return shared(torch.where(exists, steps[:, None], 0.0))

    smoothing = config.survival_smoothing
    usual = survival_weights(acceptance_K[:, None], torch.ones_like(acceptance_K[:, None], dtype=torch.bool), smoothing)

    def of(statistics: Statistics) -> Coefficients:
        assert statistics.acceptance is not None, "needs_acceptance says so"
        return shared(_survival_by_position(statistics.acceptance, row_KN, rows, smoothing) / usual.sum())

    return of


def _survival_by_position(acceptance_KN: Tensor, row_KN: Tensor, rows: int, smoothing: float) -> Tensor:
    """Survival weights ``[K, N]`` of the terms; 0 where no row exists."""
    step, position = (row_KN >= 0).nonzero(as_tuple=True)
    row = row_KN[step, position]
    q_KR = acceptance_KN.new_zeros(len(row_KN), rows)
    valid_KR = torch.zeros_like(q_KR, dtype=torch.bool)
    q_KR[step, row] = acceptance_KN[step, position]
    valid_KR[step, row] = True
    weights_KN = torch.zeros_like(acceptance_KN)
    weights_KN[step, position] = survival_weights(q_KR, valid_KR, smoothing)[step, row]
    return weights_KN
