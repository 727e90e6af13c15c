"""What every draft head implements.

The alignment, the same for every head: at position ``t`` the target's states describe tokens ``x_0 … x_t``
and its own logits predict ``x_{t+1}``. Step ``k`` (from 0) of a head at row ``t`` predicts ``x_{t+2+k}``; its
teacher is the target's distribution at position ``t+1+k``. When serving, ``x_{t+1}`` is the token that the last
target pass added for free, and the head's drafts follow it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bitdraft.quant.target import LowBitTarget, TargetStates
from bitdraft.speculators.vocab import DraftVocab


@dataclass(frozen=True)
class DraftContext:
    """What the newest target pass gives a head. Rows are the pass's tokens; ``T`` of them per sequence."""

    captured: Tensor  # [B, T, A, H]
    last_hidden: Tensor  # [B, T, H] after the target's final norm
    next_tokens: Tensor  # [B, T] int64: the token that follows each row
    start: Tensor  # [B] position of the first row in its sequence
    newest: Tensor  # [B] index of the last row that was kept; rows behind it were rejected or are padding


StartBatches = Iterable[tuple[TargetStates, Tensor, Tensor]]
"""Target states, tokens ``[B, T]`` and the mask ``[B, T]`` of positions whose prediction is supervised."""


class DraftState(ABC):
    """What a head remembers between passes, if anything."""

    @abstractmethod
    def keep_rows(self, rows: Tensor) -> None:
        """Drop all sequences of the batch but these."""


class Stateless(DraftState):
    """A head that remembers nothing."""

    def keep_rows(self, rows: Tensor) -> None:
        del rows


class DraftHead(nn.Module, ABC):
    """A trainable head. Weights borrowed from the target are passed in, never registered as parameters."""

    kind: ClassVar[str]
    config: Any
    vocab: DraftVocab
    capture_layers: tuple[int, ...]
    target_hidden_size: int

    @classmethod
    @abstractmethod
    def from_target(cls, config: Any, target: LowBitTarget, vocab: DraftVocab) -> "DraftHead":
        """A fresh head for ``target``; ``ValueError`` if ``config`` does not fit it."""

    def start_from(self, batches: StartBatches) -> None:
        """Set fresh weights from data before the first step, if the head has a way to."""

    @property
    @abstractmethod
    def longest_draft(self) -> int | None:
        """How many tokens the head can draft in a row; ``None`` for any number."""

    @abstractmethod
    def training_outputs(self, states: TargetStates, tokens: Tensor, rows: Tensor) -> Tensor:
        """``[K, B, R, H]``: for every step and wanted row, the vector that ``output_weight`` turns into logits.

        ``tokens``: ``[B, T]``. ``rows``: ``[B, R]`` positions at which drafting begins. Where a step's input would lie
        beyond the sequence the numbers have no meaning.
        """

    def forward(self, states: TargetStates, tokens: Tensor, rows: Tensor) -> Tensor:
        """``training_outputs``, under the name that DDP and FSDP wrap."""
        return self.training_outputs(states, tokens, rows)

    @property
    @abstractmethod
    def output_weight(self) -> Tensor:
        """``[D, H]``: the output head over the draft vocabulary, trained or borrowed."""

    @abstractmethod
    def new_state(self, slots: int) -> DraftState:
        """An empty memory for sequences of up to ``slots`` tokens."""

    @abstractmethod
    def draft(self, context: DraftContext, state: DraftState, k: int) -> Tensor:
        """``[B, k]`` target token ids that the head proposes after ``context``'s newest next token (greedy)."""

    def placed(self, device: torch.device, dtype: torch.dtype) -> "DraftHead":
        """Move to ``device`` and cast the parameters to ``dtype``; buffers (rotary frequencies) stay in fp32."""
        self.to(device)
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        if self.vocab.is_full:
            return draft_ids
        return self.vocab.target_ids.to(draft_ids.device)[draft_ids]

    def fits(self, target: LowBitTarget) -> None:
        """``ValueError`` if the head was made for a target of another shape."""
        for what, mine, its in (
            ("hidden size", self.target_hidden_size, target.hidden_size),
            ("vocabulary", self.vocab.target_size, target.vocab_size),
        ):
            if mine != its:
                raise ValueError(
                    f"the head was trained for a target with {what} {mine}, but {target.name} has {its}: "
                    "give the target that it was trained for"
                )
        check_layers(self.capture_layers, target)


def check_layers(layers: tuple[int, ...], target: LowBitTarget) -> None:
    """``ValueError`` unless the capture ids ascend within the target's layers."""
    if list(layers) != sorted(set(layers)) or any(not 0 <= k < target.layers for k in layers):
        raise ValueError(
            f"captured layers {list(layers)} must ascend within 0 … {target.layers - 1}, the layers of {target.name}"
        )


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """``x[b, index[b]]``: ``[B, T, …]`` at ``[B]`` → ``[B, …]``, or at ``[B, R]`` → ``[B, R, …]``."""
    sequence = torch.arange(len(index), device=index.device)
    return x[sequence.view(-1, *[1] * (index.ndim - 1)), index]
