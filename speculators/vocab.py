"""The draft vocabulary: the part of the target's vocabulary that a head can propose.

Kept ascending, so that the offset map ``d2t`` and the mask ``t2d`` that engines read describe the same
tokens. Special tokens (end of turn above all) are always in: a head that cannot propose the end of an
answer loses the last position of every one.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftVocab:
    """``target_ids`` ``[D]`` int64, ascending: draft token ``i`` is target token ``target_ids[i]``."""

    target_ids: Tensor
    target_size: int

    def __post_init__(self) -> None:
        ids = self.target_ids
        if len(ids) == 0 or bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= self.target_size:
            raise ValueError(f"a draft vocabulary must ascend within 0 … {self.target_size - 1}")

    def __len__(self) -> int:
        return len(self.target_ids)

    @property
    def is_full(self) -> bool:
        return len(self) == self.target_size

    @property
    def d2t(self) -> Tensor:
        """Offsets ``[D]`` int64: target token = draft token + ``d2t[draft token]``."""
        return self.target_ids - torch.arange(len(self), device=self.target_ids.device)

    @property
    def t2d(self) -> Tensor:
        """Mask ``[V]`` bool: whether a target token can be drafted."""
        mask = torch.zeros(self.target_size, dtype=torch.bool, device=self.target_ids.device)
        mask[self.target_ids] = True
        return mask

    @classmethod
    def from_d2t(cls, d2t: Tensor, target_size: int) -> "DraftVocab":
        return cls(d2t + torch.arange(len(d2t)), target_size)

    @classmethod
    def full(cls, target_size: int) -> "DraftVocab":
        return cls(torch.arange(target_size), target_size)

    @classmethod
    def most_frequent(
        cls, tokens: Iterable[Tensor], size: int, target_size: int, always: Iterable[int]
    ) -> "DraftVocab":
        """The ``size`` most frequent of ``tokens`` (1-D int64 each) with the ids in ``always``.

        Ties, and the places left when the text has fewer distinct tokens, go to the lower ids. Raises
        ``ValueError`` if ``size`` exceeds the target's vocabulary or cannot hold ``always``.
        """
        if size > target_size:
            raise ValueError(f"a draft vocabulary of {size} exceeds the target's vocabulary of {target_size}")
        counts = torch.zeros(target_size, dtype=torch.int64)
        for part in tokens:
            counts += torch.bincount(part, minlength=target_size)
        kept = sorted({i for i in always if 0 <= i < target_size})
        if len(kept) > size:
            raise ValueError(f"a draft vocabulary of {size} cannot hold the {len(kept)} special tokens")
        counts[torch.tensor(kept, dtype=torch.int64)] = torch.iinfo(torch.int64).max
        chosen = counts.sort(descending=True, stable=True).indices[:size]
        return cls(chosen.sort().values, target_size)

    def coverage(self, tokens: Iterable[Tensor]) -> float:
        """Share of ``tokens`` that can be drafted."""
        mask, inside, total = self.t2d, 0, 0
        for part in tokens:
            inside += int(mask[part].sum())
            total += len(part)
        return inside / max(total, 1)


def default_draft_size(target_size: int) -> int:
    """A sixth of the target's vocabulary, in steps of 256, at most the peers' 32,000.

    On a 135M target the full output head is a quarter of a target pass per drafted token; a sixth of it is
    a twentieth.
    """
    return min(target_size, 32_000, max(256, round(target_size / 6 / 256) * 256))
