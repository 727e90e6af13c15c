"""From a head's outputs to its loss: which drafting rows meet which teacher, and with what weight.

Loss terms are grouped by *target position* ``j`` (the position whose distribution is the teacher): step ``k``
of the head predicts it from row ``j − 1 − k``. A term counts if the token behind ``j`` was written by the
assistant, the row exists in the same document and the teacher's first choice lies in the draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bitdraft.quant.target import TargetStates
from bitdraft.speculators.base import DraftHead
from bitdraft.train.draft_loss import draft_loss
from bitdraft.train.loss_terms import LossConfig, coefficients
from bitdraft.train.states import Supervision

# K draft step, P supervised position with a first choice in the draft vocabulary, R drafting row, D document.


class Losses(NamedTuple):
    """One pack's loss and counts as sums; a named tuple, since FSDP looks for tensors in nothing else."""

    loss: Tensor  # [] differentiable
    accepted: Tensor  # [K] rows from which the drafts of steps 0 … k are all the target's choice
    possible: Tensor  # [K] rows from which steps 0 … k are all supervised
    acceptance: Tensor  # [K] sum of Σ min(p, q) over terms, where the loss needs it: how often sampling would accept
    terms: Tensor  # [K] how many terms that is
    group_accepted: Tensor  # [G] drafts that are the target's choice, all before them too, by group of documents
    group_possible: Tensor  # [G] drafts whose steps are all supervised, likewise


@dataclass(frozen=True)
class Terms:
    """Which loss terms there are."""

    position: Tensor  # [P] the teacher's position in the pack
    row: Tensor  # [K, P] the drafting row (among R) that predicts it; -1 where there is none
    document: Tensor  # [P]


def terms_of(supervision: Supervision, steps: int, in_draft_vocab: Tensor) -> Terms:
    """``in_draft_vocab``: ``[V]`` bool. Raises ``ValueError`` where the pack has no supervised position."""
    pack = supervision.pack
    if not supervision.supervised.any():
        raise ValueError(f"no supervised token in the batch of {', '.join(pack.ids[:3])}")
    counts = supervision.supervised & in_draft_vocab[supervision.first_choices]
    position = counts.nonzero()[:, 0]
    bounds = torch.tensor(pack.bounds[1:], device=position.device)
    return Terms(position, _drafting_rows(supervision, position, steps), torch.bucketize(position, bounds, right=True))


def _drafting_rows(supervision: Supervision, position: Tensor, steps: int) -> Tensor:
    """``[K, P]``: which drafting row's step ``k`` predicts the token behind ``position``; -1 for none."""
    documents, device = supervision.documents, position.device
    number = torch.full((documents.tokens,), -1, device=device)
    number[documents.rows] = torch.arange(len(documents.rows), device=device)
    back = torch.arange(1, steps + 1, device=device)[:, None]
    there = documents.positions[position] >= back  # else the row would be another document's
    return torch.where(there, number[(position - back).clamp(min=0)], -1)


def objective(
    head: DraftHead,
    teacher: Callable[[Tensor], Tensor],
    supervision: Supervision,
    config: LossConfig,
    acceptance_K: Tensor,
    divisor: float,
    inputs: TargetStates | None = None,
) -> Losses:
    """``teacher``: from the target's hidden states its logits of the draft vocabulary (``LowBitTarget.logits_of``);
    ``acceptance_K``: the mean acceptance of the steps before; ``divisor``: weight of the supervised positions of the
    whole step, over all packs and ranks; ``inputs``: what the head reads, if not the states that it is taught by."""
    steps, read = head.draft_steps, inputs or supervision.states
    outputs = head.training_outputs(read, supervision.pack.tokens, supervision.documents)  # [K, R, H]
    terms = terms_of(supervision, steps, head.vocab.t2d.to(outputs.device))
    exists = terms.row >= 0
    student = torch.stack([outputs[k][terms.row[k].clamp(min=0)] for k in range(steps)])  # [K, P, H]
    found = draft_loss(
        student,
        head.output_weight,
        supervision.states.last_hidden[terms.position],
        teacher,
        supervision.log_normalisers[terms.position] if config.needs_acceptance else None,
        coefficients(
            config,
            terms.row,
            len(supervision.documents.rows),
            divisor,
            acceptance_K,
            documents_N=supervision.weights[terms.document],
        ),
        exists_KN=exists,
    )
    agreed_KR, there_KR = _prefixes(found.statistics.agrees, terms, supervision, steps)
    acceptance = found.statistics.acceptance
    sums = outputs.new_zeros(steps, dtype=torch.float32) if acceptance is None else acceptance.sum(1)
    by_group = [_by_group(rows_KR, supervision) for rows_KR in (agreed_KR, there_KR)]
    return Losses(found.loss, agreed_KR.sum(1), there_KR.sum(1), sums, exists.sum(1), *by_group)


def _prefixes(agrees_KP: Tensor, terms: Terms, supervision: Supervision, steps: int) -> tuple[Tensor, Tensor]:
    """Regroup agreement by the row where drafting began: whether it got as far as each step, and could, ``[K, R]``.

    This is acceptance with every row as the start of a pass, on the text at hand. A first choice outside the draft
    vocabulary is a draft that fails.
    """
    rows = len(supervision.documents.rows)
    agreed_KR = torch.zeros(steps, rows, dtype=torch.bool, device=agrees_KP.device)
    there_KR = torch.zeros_like(agreed_KR)
    supervised = _drafting_rows(supervision, supervision.supervised.nonzero()[:, 0], steps)
    for k in range(steps):
        known = terms.row[k] >= 0
        agreed_KR[k, terms.row[k, known]] = agrees_KP[k, known]
        there_KR[k, supervised[k][supervised[k] >= 0]] = True
    return agreed_KR.cumprod(dim=0), there_KR.cumprod(dim=0)


def _by_group(rows_KR: Tensor, supervision: Supervision) -> Tensor:
    """``[G]`` sums over the rows of each group's documents."""
    documents = supervision.documents
    bounds = torch.tensor(documents.row_bounds[1:], device=rows_KR.device)
    document = torch.bucketize(torch.arange(rows_KR.shape[1], device=rows_KR.device), bounds, right=True)  # [R]
    sums = rows_KR.new_zeros(supervision.group_count)
    return sums.index_add_(0, supervision.groups[document], rows_KR.sum(0))
