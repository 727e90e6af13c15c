"""From a head's outputs to its loss: which rows meet which teacher, and with what weight.

Loss terms are grouped by *target position* ``j`` (the position whose distribution is the teacher): step ``k``
of the head predicts it from row ``j − 1 − k``. A term counts if the token behind ``j`` was written by the
assistant, the row exists and the teacher's first choice lies in the draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bitdraft.speculators.base import DraftHead
from bitdraft.train.losses import soft_cross_entropy
from bitdraft.train.states import Supervision


@dataclass(frozen=True)
class Objective:
    """One batch's loss as sums; divide by the step's ``positions`` over all ranks."""

    loss: Tensor  # [] differentiable: step-weighted sum of cross-entropies
    accepted: Tensor  # [K] rows from which the drafts of steps 0 … k are all the target's choice
    possible: Tensor  # [K] rows from which steps 0 … k are all supervised


def teacher_rows(supervision: Supervision) -> tuple[Tensor, Tensor]:
    """Indices ``(b, j)``, each ``[N]``, of the supervised target positions; ``ValueError`` if there are none."""
    sequence, position = supervision.supervised.nonzero(as_tuple=True)
    if len(sequence) == 0:
        raise ValueError(f"no supervised token in the batch of {', '.join(supervision.batch.ids[:3])}")
    return sequence, position


def wanted_rows(supervision: Supervision, steps: int) -> Tensor:
    """``[B, R]`` rows from which some step predicts a supervised position: the answer's, and ``steps`` before it."""
    batch = supervision.batch
    first = (batch.prompt_lengths - 1 - steps).clamp(min=0)  # [B]
    rows = first[:, None] + torch.arange(int((batch.lengths - 2 - first).max().clamp(min=1)), device=first.device)
    return rows.clamp(max=batch.tokens.shape[1] - 1)


def objective(
    outputs: Tensor,
    rows: Tensor,
    head: DraftHead,
    teacher: Callable[[Tensor], Tensor],
    supervision: Supervision,
    weights_K: Tensor,
    divisor: float,
) -> Objective:
    """``outputs``: the head's ``[K, B, R, H]`` at ``rows``; ``teacher``: from the target's hidden states its logits of
    the draft vocabulary (``LowBitTarget.logits_of``); ``weights_K`` sums to one; ``divisor`` is the step's count of
    positions."""
    sequence, position = teacher_rows(supervision)
    steps = len(outputs)
    row_KN = position - 1 - torch.arange(steps, device=position.device)[:, None]
    at_KN = row_KN - rows[sequence, 0]
    exists_KN = (row_KN >= 0) & (at_KN >= 0)
    student_KNH = torch.stack([outputs[k][sequence, at_KN[k].clamp(min=0)] for k in range(steps)])
    in_vocab_N = head.vocab.t2d.to(position.device)[supervision.first_choices[sequence, position]]
    terms_KN = (exists_KN & in_vocab_N).float()
    losses = soft_cross_entropy(
        student_KNH,
        head.output_weight,
        supervision.states.last_hidden[sequence, position],
        teacher,
        terms_KN * weights_K.to(position.device)[:, None] / divisor,
    )
    accepted, possible = _prefixes(losses.agrees, exists_KN, sequence, at_KN, rows.shape)
    return Objective(losses.per_step.sum(), accepted, possible)


def _prefixes(
    agrees_KN: Tensor, exists_KN: Tensor, sequence: Tensor, at_KN: Tensor, shape: torch.Size
) -> tuple[Tensor, Tensor]:
    """Regroup agreement by the row where drafting began: how many rows got as far as each step, ``[K]`` twice.

    This is acceptance with every row as the start of a pass, on the text at hand.
    """
    steps = len(agrees_KN)
    agreed_KBR = torch.zeros(steps, *shape, dtype=torch.bool, device=agrees_KN.device)
    there_KBR = torch.zeros_like(agreed_KBR)
    for k in range(steps):
        known = exists_KN[k]
        agreed_KBR[k, sequence[known], at_KN[k, known]] = agrees_KN[k, known]
        there_KBR[k, sequence[known], at_KN[k, known]] = True
    return agreed_KBR.cumprod(dim=0).sum(dim=(1, 2)), there_KBR.cumprod(dim=0).sum(dim=(1, 2))
