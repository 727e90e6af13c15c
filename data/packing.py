"""Packs: documents one behind the other in one flat row, as draft heads are trained on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from bitdraft.data.chat import Example


@dataclass(frozen=True)
class Pack:
    """Several examples without padding."""

    ids: tuple[str, ...]
    tokens: Tensor  # [N] int64
    bounds: tuple[int, ...]  # D + 1: where documents begin and end
    prompt_lengths: tuple[int, ...]  # D: tokens that the assistant did not write

    def written(self) -> Tensor:
        """``[N]`` bool: whether the token at this position was written by the assistant."""
        mask = torch.zeros(self.bounds[-1], dtype=torch.bool)
        for begin, end, prompt in zip(self.bounds[:-1], self.bounds[1:], self.prompt_lengths, strict=True):
            mask[begin + prompt : end] = True
        return mask.to(self.tokens.device)

    def predicts_written(self) -> Tensor:
        """``[N]`` bool: whether the token behind this one, in the same document, was written by the assistant."""
        mask = self.written().roll(-1)
        mask[torch.tensor(self.bounds[1:]) - 1] = False  # a document's last token predicts nothing that is known
        return mask

    def to(self, device: torch.device) -> "Pack":
        return Pack(self.ids, self.tokens.to(device), self.bounds, self.prompt_lengths)


def make_pack(examples: Sequence[Example]) -> Pack:
    return Pack(
        tuple(e.id for e in examples),
        torch.tensor([token for e in examples for token in (*e.prompt, *e.answer)], dtype=torch.int64),
        (0, *accumulate(map(document_length, examples))),
        tuple(len(e.prompt) for e in examples),
    )


def document_length(example: Example) -> int:
    return len(example.prompt) + len(example.answer)


def by_length(lengths: Sequence[int]) -> list[int]:
    """Indices, longest first; equal lengths in their order."""
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of documents in packs of at most ``capacity`` tokens: the longest first, each into the first pack that
    has room for it. A document that is longer than that gets a pack of its own.

    First-fit decreasing needs at most 11/9 of the fewest packs possible, and one (Johnson 1973).
    """
    packs: list[list[int]] = []
    room: list[int] = []
    for i in by_length(lengths):
        place = next((p for p, left in enumerate(room) if left >= lengths[i]), None)
        if place is None:
            packs.append([])
            room.append(capacity)
            place = len(packs) - 1
        packs[place].append(i)
        room[place] -= lengths[i]
    return packs
