"""Medusa heads: independent guesses at the tokens after the next, from the last hidden state.

Head ``k``: ``h ← h + SiLU(W h + b)`` per residual block, then an output projection. With the blocks' weights at
zero and the target's own output head, every head starts as the target's next-token distribution. Cai et al.
2024 (arXiv:2401.10774); blocks are separate modules (the original's ``[block] * n`` shares one).

With a link the guesses are no longer independent: head ``k`` also reads the tokens ``x_{t+1} … x_{t+1+k}`` before the
one that it predicts, as Hydra's heads do (Ankner et al. 2024, arXiv:2402.05109). Its first block becomes

    h ← h + SiLU(W h + L_k [e_0; …; e_k] + b)        e_j = E[x_{t+1+j}] / rms(E[x_{t+1+j}])

with ``E`` the target's embedding, borrowed, and ``L_k`` ``[H, (k+1)·H]`` zero at first: it starts as the head without
a link. (Hydra also projects the concatenation back to ``H`` for the residual path; here that is ``h`` alone.) Training
reads the text's own tokens, drafting the drafted ones, so in a tree every node has logits of its own.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu

from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.target import LowBitTarget, TargetStates
from bitdraft.speculators.base import DraftContext, DraftHead, DraftState, rows_at
from bitdraft.speculators.documents import Documents
from bitdraft.speculators.vocab import DraftVocab

# B sequence, W node of one depth, N packed token, R drafting row, K head, H hidden, V vocabulary.


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
    link: bool = False
    """Let every head also read the tokens drafted before its own (Hydra, whose paper finds more accepted). Every
    drafted token takes a pass of its head, and no engine computes such heads: they are exported for Bitdraft alone."""

    def __post_init__(self) -> None:
        for field in ("heads", "blocks"):
            if getattr(self, field) < 1:
                raise ValueError(f"medusa.{field} must be at least 1, got {getattr(self, field)}")


class MedusaHead(DraftHead):
    """``heads`` stacks of residual blocks over the full vocabulary (vLLM reads no other)."""

    kind: ClassVar[str] = "medusa"
    capture_layers: tuple[int, ...] = ()

    def __init__(
        self,
        config: MedusaConfig,
        hidden_size: int,
        vocab: DraftVocab,
        borrowed_output: Tensor | None,
        borrowed_embedding: Tensor | None = None,
    ) -> None:
        """``borrowed_output``: the target's output weight ``[V, H]``, required unless ``config.own_output``;
        ``borrowed_embedding``: its embedding ``[V, H]``, required if ``config.link``."""
        super().__init__()
        if not vocab.is_full:
            raise ValueError("Medusa heads need the full vocabulary: engines load no reduced one")
        self.config, self.vocab, self.target_hidden_size = config, vocab, hidden_size
        self.blocks = nn.ModuleList(Blocks(config.blocks, hidden_size, config.bias) for _ in range(config.heads))
        self.links = nn.ModuleList(
            _zeros(nn.Linear((k + 1) * hidden_size, hidden_size, bias=False))
            for k in range(config.heads if config.link else 0)
        )
        self._borrowed_output, self._borrowed_embedding = borrowed_output, borrowed_embedding
        self.lm_heads = nn.ModuleList(
            nn.Linear(hidden_size, len(vocab), bias=False) for _ in range(config.heads if config.own_output else 0)
        )

    @classmethod
    def from_target(cls, config: MedusaConfig, target: LowBitTarget, vocab: DraftVocab) -> "MedusaHead":
        borrowed = target.output_weight.detach(), target.embedding.weight.detach()
        head = cls(config, target.hidden_size, vocab, *borrowed)
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

    @property
    def draft_steps(self) -> int:
        return self.config.heads

    def training_outputs(self, states: TargetStates, tokens: Tensor, documents: Documents) -> Tensor:
        hidden = states.last_hidden[documents.rows].float()
        if not self.config.link:
            return torch.stack([block(hidden) for block in self.blocks])
        read = [self._embedded(tokens[documents.ahead(1 + k)]) for k in range(self.config.heads)]
        path = torch.cat(read, dim=-1)  # [R, K·H], of which head k reads the first k + 1 parts
        return torch.stack([self._ahead(k, hidden, path) for k in range(self.config.heads)])

    def _embedded(self, tokens: Tensor) -> Tensor:
        """``[…, H]`` of unit size, whatever size the target's embeddings have."""
        assert self._borrowed_embedding is not None
        e = embedding(tokens, self._borrowed_embedding).float()
        return rms_norm(e, e.shape[-1:]).to(next(self.links.parameters()).dtype)

    def _ahead(self, k: int, hidden: Tensor, path: Tensor) -> Tensor:
        """What head ``k`` makes of ``hidden`` ``[…, H]`` and ``path`` ``[…, ≥ (k+1)·H]``, the tokens before its own."""
        linked = self.links[k](path[..., : (k + 1) * hidden.shape[-1]])
        return self.blocks[k](hidden, linked)

    def new_state(self, slots: int, cache: SlotCache) -> "MedusaState":
        del slots, cache
        return MedusaState()

    def first(self, context: DraftContext, state: DraftState) -> Tensor:
        assert isinstance(state, MedusaState)
        state.hidden, state.depth = rows_at(context.last_hidden, context.newest)[:, None], 0
        if self.config.link:
            state.path = self._embedded(context.newest_token[:, None])
        return self._logits(state)[:, 0]

    def following(self, state: DraftState, tokens: Tensor, parents: Tensor) -> Tensor:
        assert isinstance(state, MedusaState)
        state.depth += 1
        if not self.config.link:
            return self._logits(state).expand(-1, tokens.shape[1], -1)  # whatever the tokens are
        assert state.path is not None
        state.path = torch.cat([rows_at(state.path, parents), self._embedded(tokens)], dim=-1)
        return self._logits(state)

    def _logits(self, state: "MedusaState") -> Tensor:
        """``[B, W, V]`` of the nodes drafted last; one for all of them without a link."""
        weight = self.lm_heads[state.depth].weight if self.config.own_output else self._borrowed_output
        assert isinstance(weight, Tensor) and state.hidden is not None
        if state.path is None:
            ahead = self.blocks[state.depth](state.hidden)
        else:
            ahead = self._ahead(state.depth, state.hidden, state.path)
        return linear(ahead.to(weight.dtype), weight)


class MedusaState(DraftState):
    """Where one pass's drafting stands; nothing lasts longer."""

    def __init__(self) -> None:
        self.hidden: Tensor | None = None  # [B, 1, H]
        self.path: Tensor | None = None  # [B, W, (depth + 1)·H] tokens that the nodes drafted last stand behind
        self.depth = 0

    def keep_rows(self, rows: Tensor) -> None:
        del rows


class Blocks(nn.Module):
    """The residual blocks of one head; zero weights make it the identity."""

    def __init__(self, blocks: int, hidden_size: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_zeros(nn.Linear(hidden_size, hidden_size, bias=bias)) for _ in range(blocks))

    def forward(self, hidden: Tensor, linked: Tensor | None = None) -> Tensor:
        """``linked``: ``[…, H]``, which the first block adds to what it makes of ``hidden``."""
        for i, layer in enumerate(self.layers):
            weight: Any = layer.weight  # of a linear layer, or of an adapter around one
            y = layer(hidden.to(weight.dtype))
            hidden = hidden + silu(y if linked is None or i > 0 else y + linked)
        return hidden


def _zeros(layer: nn.Linear) -> nn.Linear:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer
