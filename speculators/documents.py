"""Packed rows: documents one behind the other, without padding between them.

Everything that works token by token sees one flat row of ``N`` tokens; only attention asks where documents end, and
never looks across.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Where the documents of a packed row lie, and at which of their rows drafting begins.

    ``bounds``: ``D + 1`` ascending row numbers from 0 to ``N``. ``drafts``: for each document the stretch ``(first,
    behind)`` of its rows at which drafting begins, as rows of the packed row; empty where ``first == behind``.
    """

    bounds: tuple[int, ...]
    drafts: tuple[tuple[int, int], ...]
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.bounds[0] != 0 or len(self.drafts) != len(self.bounds) - 1:
            raise ValueError(f"{len(self.drafts)} documents do not fit the bounds {self.bounds}")
        for begin, end, first, behind in self.spans:
            if not begin <= first <= behind <= end:
                raise ValueError(f"drafts of rows {first} … {behind} lie outside their document {begin} … {end}")

    @classmethod
    def whole(cls, lengths: Sequence[int], device: str = "cpu") -> "Documents":
        """Documents of these lengths, with drafting from every row."""
        bounds = (0, *accumulate(lengths))
        return cls(bounds, tuple(pairwise(bounds)), device)

    @property
    def spans(self) -> list[tuple[int, int, int, int]]:
        """``(begin, end, first, behind)`` of each document: its rows, and those at which drafting begins."""
        return [(*rows, *drafts) for rows, drafts in zip(pairwise(self.bounds), self.drafts, strict=True)]

    @property
    def tokens(self) -> int:
        return self.bounds[-1]

    @property
    def row_bounds(self) -> tuple[int, ...]:
        """``D + 1``: where each document's drafting rows begin and end among all ``R`` of them."""
        return (0, *accumulate(behind - first for first, behind in self.drafts))

    @cached_property
    def rows(self) -> Tensor:
        """``[R]`` int64: the rows at which drafting begins, document by document."""
        parts = [torch.arange(first, behind) for first, behind in self.drafts]
        return torch.cat(parts).to(self.device)

    @cached_property
    def positions(self) -> Tensor:
        """``[N]`` int64: each token's position in its own document."""
        parts = [torch.arange(end - begin) for begin, end in pairwise(self.bounds)]
        return torch.cat(parts).to(self.device)

    @cached_property
    def following(self) -> Tensor:
        """``[N]`` int64: the row behind each one; a document's last row stands for the one behind it too."""
        ends = torch.tensor(self.bounds[1:])
        lengths = ends - torch.tensor(self.bounds[:-1])
        return (torch.arange(1, self.tokens + 1)).clamp(max=(ends - 1).repeat_interleave(lengths)).to(self.device)

    def ahead(self, steps: int) -> Tensor:
        """``[R]`` int64: ``steps`` rows behind each drafting row, at most its document's last."""
        return (self.rows + steps).clamp(max=self._last_rows)

    @cached_property
    def _last_rows(self) -> Tensor:
        counts = torch.tensor([behind - first for first, behind in self.drafts])
        return (torch.tensor(self.bounds[1:]) - 1).repeat_interleave(counts).to(self.device)  # [R]
