"""Padded batches of examples, in a seeded order that a resumed run finds again."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitdraft.data.chat import Example
from bitdraft.data.regenerate import right_padded


@dataclass(frozen=True)
class Batch:
    """Several examples, padded on the right."""

    ids: tuple[str, ...]
    tokens: Tensor  # [B, T] int64
    lengths: Tensor  # [B] real tokens per row
    prompt_lengths: Tensor  # [B] tokens that the assistant did not write

    def written(self) -> Tensor:
        """``[B, T]`` bool: whether the token at this position was written by the assistant."""
        position = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (position >= self.prompt_lengths[:, None]) & (position < self.lengths[:, None])

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.ids, self.tokens.to(device), self.lengths.to(device), self.prompt_lengths.to(device))


def make_batch(examples: Sequence[Example]) -> Batch:
    return Batch(
        tuple(e.id for e in examples),
        right_padded([(*e.prompt, *e.answer) for e in examples]),
        torch.tensor([len(e.prompt) + len(e.answer) for e in examples]),
        torch.tensor([len(e.prompt) for e in examples]),
    )


def epoch_batches(lengths: Sequence[int], batch_size: int, *, seed: int, epoch: int) -> list[list[int]]:
    """Indices of one epoch's batches: shuffled, similar lengths together, every example once.

    The order depends on ``seed`` and ``epoch`` alone. The last batch may be smaller.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    pool = batch_size * 8  # sort within pools: little padding, and still another mix every epoch
    batches: list[list[int]] = []
    for start in range(0, len(order), pool):
        near = sorted(order[start : start + pool], key=lambda i: lengths[i])
        batches += [near[i : i + batch_size] for i in range(0, len(near), batch_size)]
    shuffled = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[i] for i in shuffled]
