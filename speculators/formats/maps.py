"""The draft vocabulary as checkpoints hold it: ``d2t``, offsets ``[D]``, and ``t2d``, a mask ``[V]``.

Engines check neither. With a map that is wrong or missing they load without a word and accept next to nothing.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from bitdraft.speculators.vocab import DraftVocab


def map_tensors(vocab: DraftVocab) -> dict[str, Tensor]:
    """``d2t`` int64 and ``t2d`` bool; nothing for a full vocabulary, where engines expect none."""
    return {} if vocab.is_full else {"d2t": vocab.d2t, "t2d": vocab.t2d}


def check_maps(weights: Mapping[str, Tensor], draft_size: int, target_size: int) -> None:
    """``ValueError`` unless the maps among ``weights`` are those of ``draft_size`` ascending tokens of ``target_size``.

    ``t2d`` may be missing, which no engine reads; ``d2t`` only where the vocabulary is full.
    """
    d2t, t2d = weights.get("d2t"), weights.get("t2d")
    if d2t is None:
        if draft_size != target_size:
            raise ValueError(
                f"the draft vocabulary is reduced ({draft_size} of {target_size} tokens) but the map d2t is missing"
            )
        ids = torch.arange(target_size)
    elif d2t.shape != (draft_size,) or d2t.dtype.is_floating_point:
        raise ValueError(f"the map d2t is {d2t.dtype} {list(d2t.shape)}, but {draft_size} integers are drafted tokens")
    else:
        ids = d2t.cpu() + torch.arange(draft_size)
    if draft_size < 1 or bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= target_size:
        raise ValueError(f"the map d2t is wrong: drafted tokens must ascend within 0 … {target_size - 1}")
    if t2d is None:
        return
    mask = torch.zeros(target_size, dtype=torch.bool)
    mask[ids] = True
    if t2d.shape != (target_size,) or not torch.equal(t2d.cpu().bool(), mask):
        raise ValueError("the maps d2t and t2d do not describe the same tokens")


def read_vocab(weights: dict[str, Tensor], draft_size: int, target_size: int) -> DraftVocab:
    """Take the maps out of ``weights``. Raises ``ValueError`` as ``check_maps`` does."""
    check_maps(weights, draft_size, target_size)
    weights.pop("t2d", None)
    d2t = weights.pop("d2t", None)
    return DraftVocab.full(target_size) if d2t is None else DraftVocab.from_d2t(d2t.to(torch.int64), target_size)
