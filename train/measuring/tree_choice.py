"""Choosing a sparse tree from how often a head's first, second, … choice is right at each depth."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from bitdraft.data.capture import capture_pack
from bitdraft.data.chat import Example
from bitdraft.data.packing import document_length, make_pack
from bitdraft.quant.target import LowBitTarget, TargetStates
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.documents import Documents

_ROWS = 8  # sequences per forward pass
_LOGITS = 2**24  # logits that exist at a time


@torch.no_grad()
def rank_accuracies(
    target: LowBitTarget, head: DraftHead, examples: Sequence[Example], *, depth: int, ranks: int
) -> list[list[float]]:
    """``[depth][ranks]``: how often the head's rank-``r`` token at depth ``d + 1`` is the one that the target wrote.

    Every position of the answers is the start of a draft that follows the written text, so that each depth counts
    given that the path before it is right. Raises ``ValueError`` if the head is not that deep, or no answer is.
    """
    hits, rows_seen = torch.zeros(depth, ranks, dtype=torch.int64), torch.zeros(depth, dtype=torch.int64)
    for start in range(0, len(examples), _ROWS):
        few = examples[start : start + _ROWS]
        found, pack = capture_pack(target, few, head.capture_layers), make_pack(few).to(target.device)
        documents = Documents.whole([document_length(e) for e in few], str(target.device))
        outputs = head.training_outputs(TargetStates(found.captured, found.last_hidden), pack.tokens, documents)
        if len(outputs) < depth:
            raise ValueError(f"a draft tree of depth {depth} is deeper than the {len(outputs)} tokens of the head")
        written = pack.written()
        for k in range(depth):
            ahead = documents.ahead(k + 2)  # [N] row t drafts token t + 2 + k, if its document has one
            wanted = written[ahead] & (ahead == documents.rows + k + 2)
            hits[k] += _rank_counts(head, outputs[k][wanted], pack.tokens[ahead[wanted]], k, ranks)
            rows_seen[k] += int(wanted.sum())
    if not rows_seen.all():
        raise ValueError(f"no answer is longer than {depth + 1} tokens: give longer prompts to choose the tree from")
    return (hits / rows_seen[:, None]).tolist()


def _rank_counts(head: DraftHead, hidden: Tensor, wanted: Tensor, step: int, ranks: int) -> Tensor:
    """``[ranks]``: how many of ``wanted`` ``[n]`` are the first, second, … choice."""
    weight = head.output_weight
    weight = weight[step] if weight.ndim == 3 else weight  # Medusa heads with projections of their own
    counts = torch.zeros(ranks, dtype=torch.int64)
    for part, tokens in zip(*(x.split(max(1, _LOGITS // len(weight))) for x in (hidden, wanted)), strict=True):
        best = linear(part.to(weight.dtype), weight).topk(ranks, dim=-1).indices
        counts += (head.to_target_ids(best) == tokens[:, None]).sum(0).cpu()
    return counts
