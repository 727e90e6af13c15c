"""What the target makes of a record: the mean of its hidden states in the middle of its layers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bitdraft.data.capture import groups_for
from bitdraft.data.chat import conversation_ids
from bitdraft.data.conversation import Conversation
from bitdraft.quant.target import LowBitTarget

# B sequence in the batch, T position, H hidden.

TOKENS_AT_ONCE = 8192


@torch.no_grad()
def target_vectors(
    target: LowBitTarget,
    tokenizer: Any,
    records: Sequence[Conversation],
    *,
    answers: bool,
    tokens: int = 512,
    tokens_at_once: int = TOKENS_AT_ONCE,
) -> np.ndarray:
    """``[n, H]`` float32: mean over the first ``tokens`` of each rendered record of the input of the middle layer.

    ``answers``: whether the whole record is rendered; else what stands up to the first question, which every template
    takes. Records of like length
    run together, ``tokens_at_once`` with padding, unless a single one is longer; the padding is not in the mean.
    """
    rows = [conversation_ids(tokenizer, r if answers else r.opening)[:tokens] for r in records]
    if any(not row for row in rows):
        bare = next(r for r, row in zip(records, rows, strict=True) if not row)
        raise ValueError(f"{bare.source}: record {bare.id!r} renders to no token: leave it out")
    middle = max(target.layers // 2, 1)
    found = np.empty((len(rows), target.hidden_size), np.float32)
    for group in groups_for(target, [len(row) for row in rows], tokens_at_once):
        batch = torch.zeros(len(group), max(len(rows[i]) for i in group), dtype=torch.int64)
        for place, i in enumerate(group):
            batch[place, : len(rows[i])] = torch.tensor(rows[i])
        states = target.states(batch.to(target.device), capture=[middle]).captured[:, :, 0]  # [B, T, H]
        for place, i in enumerate(group):
            # The first token's state is large, and the same for all records: it would only tell how long they are.
            own = states[place, min(1, len(rows[i]) - 1) : len(rows[i])]
            found[i] = own.float().mean(0).cpu().numpy()
    return found
