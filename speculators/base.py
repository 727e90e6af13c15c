"""What every drafter implements, and what every draft head does.

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

from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.target import LowBitTarget, TargetStates
from bitdraft.speculators.documents import Documents
from bitdraft.speculators.drafting import DraftPlan, build_tree
from bitdraft.speculators.tree import DraftTree
from bitdraft.speculators.vocab import DraftVocab


@dataclass(frozen=True)
class DraftContext:
    """What the newest target pass gives a drafter. Rows are the pass's tokens; ``T`` of them per sequence.

    A sequence that has ended may ride along for a while: it shows its newest token again at every pass, one position
    behind its end, and its drafts are not used.
    """

    captured: Tensor  # [B, T, A, H]
    last_hidden: Tensor  # [B, T, H] after the target's final norm
    next_tokens: Tensor  # [B, T] int64: the token that follows each row
    start: Tensor  # [B] position of the first row in its sequence
    newest: Tensor  # [B] index of the last row that was kept; rows behind it were rejected or are padding
    first_tokens: Tensor | None = None
    """``[B]`` int64: the prompts' first tokens, which are no row's next; only the prompts' own context has them."""

    @property
    def newest_token(self) -> Tensor:
        """``[B]``: the token that drafts follow."""
        return rows_at(self.next_tokens, self.newest)

    @property
    def lengths(self) -> Tensor:
        """``[B]``: tokens before it."""
        return self.start + self.newest + 1

    def rows(self, rows: Tensor) -> "DraftContext":
        """Only these sequences."""
        return DraftContext(
            self.captured[rows],
            self.last_hidden[rows],
            self.next_tokens[rows],
            self.start[rows],
            self.newest[rows],
            None if self.first_tokens is None else self.first_tokens[rows],
        )


StartBatches = Iterable[tuple[TargetStates, Tensor, Tensor]]
"""Packed target states, tokens ``[N]`` and the mask ``[N]`` of positions whose prediction is supervised; never of a
document's first token, which no row goes before."""


class DraftState(ABC):
    """What a drafter remembers between passes, if anything."""

    @abstractmethod
    def keep_rows(self, rows: Tensor) -> None:
        """Drop all sequences of the batch but these."""


class Drafter(ABC):
    """Whatever proposes tokens for the target to verify: a head, another model, a search in the text."""

    kind: ClassVar[str]
    capture_layers: tuple[int, ...] = ()
    """Target layers whose states the drafter reads."""
    drafts_trees: ClassVar[bool] = True
    has_confidence: ClassVar[bool] = True
    """Whether it knows how probable its drafts are."""

    @property
    def longest_draft(self) -> int | None:
        """How many tokens it can draft in a row; ``None`` for any number."""
        return None

    @abstractmethod
    def fits(self, target: LowBitTarget) -> None:
        """``ValueError`` if the drafter was made for another target."""

    @abstractmethod
    def new_state(self, slots: int, cache: SlotCache) -> DraftState:
        """An empty memory for sequences of up to ``slots`` tokens. ``cache``: the target's, which goes along."""

    @abstractmethod
    def propose(self, context: DraftContext, state: DraftState, plan: DraftPlan, uniforms: Tensor) -> DraftTree:
        """The pass's drafts behind ``context``'s newest token.

        ``uniforms``: ``[B, plan.draws]`` numbers in [0, 1), all the chance there is.
        """


class DraftHead(nn.Module, Drafter):
    """A trainable head. Weights borrowed from the target are passed in, never registered as parameters."""

    config: Any
    vocab: DraftVocab
    target_hidden_size: int
    recompute: bool = False
    """Whether training computes activations again in the backward pass instead of keeping them."""
    compiled: bool = False
    """Whether training compiles what it can; drafting never does."""

    @classmethod
    @abstractmethod
    def from_target(cls, config: Any, target: LowBitTarget, vocab: DraftVocab) -> "DraftHead":
        """A fresh head for ``target``; ``ValueError`` if ``config`` does not fit it."""

    def start_from(self, batches: StartBatches) -> None:
        """Set fresh weights from data before the first step, if the head has a way to."""

    @property
    @abstractmethod
    def draft_steps(self) -> int:
        """K: how many tokens ahead the head is trained to draft."""

    @abstractmethod
    def training_outputs(self, states: TargetStates, tokens: Tensor, documents: Documents) -> Tensor:
        """``[K, R, H]``: for every step and drafting row, the vector that ``output_weight`` turns into logits; ``H`` is
        whatever that takes.

        ``states`` and ``tokens`` are packed: ``[N, A, H]``, ``[N, H]`` and ``[N]``. Where a step's input would lie
        beyond its document the numbers have no meaning.
        """

    @property
    @abstractmethod
    def output_weight(self) -> Tensor:
        """``[D, H]``: the output head over the draft vocabulary, trained or borrowed."""

    @abstractmethod
    def first(self, context: DraftContext, state: DraftState) -> Tensor:
        """Logits ``[B, D]`` over the draft vocabulary of the token behind ``context``'s newest one."""

    @abstractmethod
    def following(self, state: DraftState, tokens: Tensor, parents: Tensor) -> Tensor:
        """Logits ``[B, W, D]`` of the tokens behind ``W`` drafted ones, all of one depth.

        ``tokens``: ``[B, W]`` target ids. ``parents``: ``[B, W]``, which node of the last call each one follows (0
        after ``first``).
        """

    @torch.no_grad()
    def propose(self, context: DraftContext, state: DraftState, plan: DraftPlan, uniforms: Tensor) -> DraftTree:
        return build_tree(self, context, state, plan, uniforms)

    def placed(self, device: torch.device, dtype: torch.dtype) -> "DraftHead":
        """Move to ``device`` and cast the parameters to ``dtype``; buffers (rotary frequencies) stay in fp32."""
        self.to(device)
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    def multiplied_out(self) -> "DraftHead":
        """As files hold it, in place: a weight that is trained in factors becomes their product."""
        return self

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        if self.vocab.is_full:
            return draft_ids
        return self.vocab.target_ids.to(draft_ids.device)[draft_ids]

    def over_target(self, probabilities: Tensor) -> Tensor:
        """``[..., D]`` over the draft vocabulary → ``[..., V]`` over the target's."""
        if self.vocab.is_full:
            return probabilities
        wide = probabilities.new_zeros(*probabilities.shape[:-1], self.vocab.target_size)
        wide[..., self.vocab.target_ids.to(wide.device)] = probabilities
        return wide

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
