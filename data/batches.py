"""Padded batches of examples, in a seeded order that a resumed run finds again."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bitdraft.data.chat import Example
from bitdraft.data.generation import right_padded
from bitdraft.data.sampling import epoch_order


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


def epoch_batches(
    examples: Sequence[Example], batch_tokens: int, *, seed: int, epoch: int, weights: np.ndarray | None = None
) -> list[list[int]]:
    """Indices of one epoch's batches: shuffled, similar lengths together, as many draws as there are examples: every
    example once, or as often as its share of ``weights`` says (``sampling.epoch_order``).

    A batch holds about ``batch_tokens`` answer tokens, so that runs on texts of other lengths see as many per step:
    boundaries follow the running sum, none is off by more than half an answer, and errors do not add up. The last
    batch may be smaller. The order depends on ``seed``, ``epoch`` and the examples alone, not on where they stand.
    """
    drawn = np.ones(len(examples)) if weights is None else weights
    order = epoch_order([e.key for e in examples], drawn, seed=seed, epoch=epoch).tolist()
    # Sort within pools: little padding, and still another mix every epoch. Up and down by turns, so that a batch
    # across two pools has similar lengths too.
    length = [len(e.prompt) + len(e.answer) for e in examples]
    pool = _running(order, examples, 8 * batch_tokens)
    near = [i for _, i in sorted(zip(pool, order, strict=True), key=lambda p: (p[0], (-1) ** p[0] * length[p[1]]))]
    batches: dict[int, list[int]] = {}
    for number, i in zip(_running(near, examples, batch_tokens), near, strict=True):
        batches.setdefault(number, []).append(i)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    shuffled = torch.randperm(len(batches), generator=generator).tolist()
    listed = list(batches.values())
    return [listed[i] for i in shuffled]


def _running(order: Sequence[int], examples: Sequence[Example], tokens: int) -> list[int]:
    """For every example in ``order``, which stretch of ``tokens`` answer tokens its middle falls into."""
    written = torch.tensor([len(examples[i].answer) for i in order], dtype=torch.float64)
    return ((written.cumsum(0) - written / 2) / tokens).floor().long().tolist()
