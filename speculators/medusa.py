"""Medusa heads: independent guesses at the tokens after the next, from the last hidden state.

Head ``k``: ``h ← h + SiLU(W h + b)`` per residual block, then an output projection. With the blocks' weights at
zero and the target's own output head, every head starts as the target's next-token distribution. Cai et al.
2024 (arXiv:2401.10774); blocks are separate modules (the original's ``[block] * n`` shares one).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.target import LowBitTarget, TargetStates
from bitdraft.speculators.base import DraftContext, DraftHead, DraftState, rows_at
from bitdraft.speculators.vocab import DraftVocab


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """The Medusa heads."""

    heads: int = 5
    """Tokens drafted per pass, one head each."""
    blocks: int = 1
    """Residual blocks per head."""
    own_output: bool = False
    """Give every head an output projection of its own (initialised from the target's) instead of sharing the
    target's frozen one."""
    bias: bool = False
    """Give every residual block a bias, as the heads of the original Medusa project have."""

    def __post_init__(self) -> None:
        for field in ("heads", "blocks"):
            if getattr(self, field) < 1:
                raise ValueError(f"medusa.{field} must be at least 1, got {getattr(self, field)}")


class MedusaHead(DraftHead):
    """``heads`` stacks of residual blocks over the full vocabulary (vLLM reads no other)."""

    kind: ClassVar[str] = "medusa"
    capture_layers: tuple[int, ...] = ()

    def __init__(
        self, config: MedusaConfig, hidden_size: int, vocab: DraftVocab, borrowed_output: Tensor | None
    ) -> None:
        """``borrowed_output``: the target's output weight ``[V, H]``, required unless ``config.own_output``."""
        super().__init__()
        if not vocab.is_full:
            raise ValueError("Medusa heads need the full vocabulary: engines load no reduced one")
        self.config, self.vocab, self.target_hidden_size = config, vocab, hidden_size
        self.blocks = nn.ModuleList(_Blocks(config.blocks, hidden_size, config.bias) for _ in range(config.heads))
        self._borrowed_output = borrowed_output
        self.lm_heads = nn.ModuleList(
            nn.Linear(hidden_size, len(vocab), bias=False) for _ in range(config.heads if config.own_output else 0)
        )

    @classmethod
    def from_target(cls, config: MedusaConfig, target: LowBitTarget, vocab: DraftVocab) -> "MedusaHead":
        head = cls(config, target.hidden_size, vocab, target.output_weight.detach())
        for own in head.lm_heads:
            assert isinstance(own, nn.Linear)
            own.weight.data.copy_(target.output_weight)
        return head

    def placed(self, device: torch.device, dtype: torch.dtype) -> "MedusaHead":
        super().placed(device, dtype)
        if self._borrowed_output is not None:  # files hold a copy of it in their own dtype
            self._borrowed_output = self._borrowed_output.to(device, dtype)
        return self

    @property
    def longest_draft(self) -> int:
        return self.config.heads

    @property
    def output_weight(self) -> Tensor:
        """The shared projection ``[V, H]``, or all heads' own ``[heads, V, H]``."""
        if self.config.own_output:
            return torch.stack([own.weight for own in self.lm_heads])  # type: ignore[misc]
        assert self._borrowed_output is not None
        return self._borrowed_output

    def training_outputs(self, states: TargetStates, tokens: Tensor, rows: Tensor) -> Tensor:
        del tokens
        hidden = rows_at(states.last_hidden, rows).float()
        return torch.stack([block(hidden) for block in self.blocks])

    def new_state(self, slots: int, cache: SlotCache) -> "MedusaState":
        del slots, cache
        return MedusaState()

    def first(self, context: DraftContext, state: DraftState) -> Tensor:
        assert isinstance(state, MedusaState)
        state.hidden, state.depth = rows_at(context.last_hidden, context.newest), 0
        return self._logits(state)

    def following(self, state: DraftState, tokens: Tensor, parents: Tensor) -> Tensor:
        assert isinstance(state, MedusaState)
        state.depth += 1
        return self._logits(state)[:, None].expand(-1, tokens.shape[1], -1)  # whatever the tokens are

    def _logits(self, state: "MedusaState") -> Tensor:
        weight = self.lm_heads[state.depth].weight if self.config.own_output else self._borrowed_output
        assert isinstance(weight, Tensor) and state.hidden is not None
        return linear(self.blocks[state.depth](state.hidden).to(weight.dtype), weight)


class MedusaState(DraftState):
    """Where one pass's drafting stands; nothing lasts longer."""

    def __init__(self) -> None:
        self.hidden: Tensor | None = None  # [B, H]
        self.depth = 0

    def keep_rows(self, rows: Tensor) -> None:
        del rows


class _Blocks(nn.Module):
    """The residual blocks of one head; zero weights make it the identity."""

    def __init__(self, blocks: int, hidden_size: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(blocks))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            hidden = hidden + silu(layer(hidden.to(layer.weight.dtype)))
        return hidden
