"""EAGLE-3: one decoder layer over the target's fused hidden states and its own feedback.

Li et al. 2025 (arXiv:2503.01840). The states of three target layers are fused, ``g⁰ = W_fc [h_low; h_mid;
h_high]``. One step reads the embedding of the next token and the state, ``u = [RMS(e); RMS(g)]``, and gives ``r
= g + Attn(u)``, ``g' = r + MLP(RMS(r))`` and logits ``W_head RMS(g')``; ``g'`` (not normed) is the next step's
state.

Training-time test: step ``k`` at row ``t`` sees the step-0 keys of rows ``≤ t`` and the keys of steps ``1 … k``
at its own row only, at position ``t + k``: exactly what drafting ``k`` tokens after row ``t`` sees.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad, scaled_dot_product_attention, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from bitdraft.quant.kv_cache import SlotCache
from bitdraft.quant.target import LowBitTarget, TargetStates
from bitdraft.speculators.base import DraftContext, DraftHead, DraftState, check_layers, rows_at
from bitdraft.speculators.vocab import DraftVocab

# B sequence, T row (position), S key, N attention head, D head dimension, H hidden, K step.


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """The EAGLE-3 head."""

    steps: int = 5
    """Training-time-test steps: how many tokens ahead the head is trained to draft."""
    step_decay: float = 0.8
    """Weight of each step's loss relative to the step before (weights are normalised to sum to 1)."""
    draft_vocab_size: int | None = None
    """Tokens that the head can propose; by default a sixth of the target's vocabulary, at most 32,000."""
    capture_layers: tuple[int, ...] | None = None
    """Target layers whose inputs are fused (vLLM's ids); by default 2, the middle one and the third from the end."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"eagle3.steps must be at least 1, got {self.steps}")
        if not 0 < self.step_decay <= 1:
            raise ValueError(f"eagle3.step_decay must lie in (0, 1], got {self.step_decay}")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise ValueError(f"eagle3.draft_vocab_size must be at least 1, got {self.draft_vocab_size}")


@dataclass(frozen=True)
class LayerShape:
    """The decoder layer's shape, taken from the target; also what the export writes down."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]

    @classmethod
    def of_target(cls, config: Any) -> "LayerShape":
        heads = config.num_attention_heads
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
        )

    def llama_config(self) -> LlamaConfig:
        return LlamaConfig(**asdict(self), num_hidden_layers=1)


def default_capture_layers(layers: int) -> tuple[int, ...]:
    """EAGLE-3's choice ``2, L // 2, L - 3``; for targets of under seven layers three that are distinct."""
    chosen = {2, layers // 2, layers - 3}
    return tuple(sorted(chosen)) if len(chosen) == 3 and layers >= 7 else tuple(sorted({0, layers // 2, layers - 1}))


class Eagle3Head(DraftHead):
    """State-dict keys are those of vLLM's speculators format: ``fc``, ``layers.0.*``, ``norm``, ``lm_head``."""

    kind: ClassVar[str] = "eagle3"

    def __init__(
        self,
        config: Eagle3Config,
        shape: LayerShape,
        capture_layers: Sequence[int],
        vocab: DraftVocab,
        borrowed_embedding: Tensor,
    ) -> None:
        """``borrowed_embedding``: the target's input embedding ``[V, H]``, read and never trained."""
        super().__init__()
        self.config, self.shape, self.vocab = config, shape, vocab
        self.capture_layers = tuple(capture_layers)
        self.target_hidden_size = shape.hidden_size
        self._borrowed_embedding = borrowed_embedding
        self.fc = nn.Linear(len(self.capture_layers) * shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([_DecoderLayer(shape)])
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, len(vocab), bias=False)

    @classmethod
    def from_target(cls, config: Eagle3Config, target: LowBitTarget, vocab: DraftVocab) -> "Eagle3Head":
        """Fresh layer; the output head starts as the target's rows of the draft vocabulary, the norm as its
        final norm."""
        layers = config.capture_layers or default_capture_layers(target.layers)
        check_layers(tuple(layers), target)
        shape = LayerShape.of_target(target.config)
        head = cls(config, shape, layers, vocab, target.embedding.weight.detach())
        for name, weight in head.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=getattr(target.config, "initializer_range", 0.02))
            assert weight.requires_grad, name
        with torch.no_grad():
            head.lm_head.weight.copy_(target.output_head.weight[vocab.target_ids.to(target.device)])
            head.norm.weight.copy_(target.final_norm.weight)  # type: ignore[arg-type]
        return head

    @property
    def layer(self) -> "_DecoderLayer":
        layer = self.layers[0]
        assert isinstance(layer, _DecoderLayer)
        return layer

    @property
    def longest_draft(self) -> None:
        return None

    @property
    def output_weight(self) -> Tensor:
        return self.lm_head.weight

    @property
    def embedding_weight(self) -> Tensor:
        return self._borrowed_embedding

    def training_outputs(self, states: TargetStates, tokens: Tensor, rows: Tensor) -> Tensor:
        # Only keys and values are needed at every row; queries and the rest of the layer where drafts begin.
        length = tokens.shape[1]
        fused = self.fuse(states.captured)  # [B, T, H]
        following = embedding(pad(tokens[:, 1:], (0, 1)), self._borrowed_embedding)  # row t reads x_{t+1}
        u = self.layer.inputs(following, fused)  # [B, T, 2H]
        key, value = self.layer.keys_values(u, torch.arange(length, device=tokens.device).expand_as(tokens))
        keys, values = [key], [value]
        g, u = rows_at(fused, rows), rows_at(u, rows)  # [B, R, …]
        outputs = []
        for k in range(self.config.steps):
            if k > 0:
                ahead = rows_at(tokens, (rows + 1 + k).clamp(max=length - 1))  # x_{t+1+k}
                u = self.layer.inputs(embedding(ahead, self._borrowed_embedding), g)
                key, value = self.layer.keys_values(u, rows + k)
                keys.append(key)
                values.append(value)
            q = self.layer.queries(u, rows + k)
            g = self.layer.finish(g, training_time_test_attention(q, keys, values, rows))
            outputs.append(self.norm(g))
        return torch.stack(outputs)

    def fuse(self, captured: Tensor) -> Tensor:
        """``[B, T, A, H]`` → ``[B, T, H]``, the first step's state."""
        return self.fc(captured.flatten(-2).to(self.fc.weight.dtype))

    def new_state(self, slots: int) -> "Eagle3State":
        return Eagle3State(SlotCache(1, slots))

    @torch.no_grad()
    def draft(self, context: DraftContext, state: DraftState, k: int) -> Tensor:
        assert isinstance(state, Eagle3State)
        g = self.fuse(context.captured)
        g = rows_at(self._step(state, context.next_tokens, g, context.start), context.newest)[:, None]  # [B, 1, H]
        position = context.start + context.newest
        drafts = [self._propose(g)]
        for ahead in range(1, k):
            g = self._step(state, drafts[-1], g, position + ahead)
            drafts.append(self._propose(g))
        return torch.cat(drafts, dim=1)

    def _step(self, state: "Eagle3State", tokens: Tensor, g: Tensor, start: Tensor) -> Tensor:
        """Run the layer over ``T`` rows that begin at ``start`` ``[B]``, behind the keys already kept."""
        positions, mask = state.cache.begin(start, tokens.shape[1])
        u = self.layer.inputs(embedding(tokens, self._borrowed_embedding), g)
        keys, values = state.cache.layers[0].update(*self.layer.keys_values(u, positions))
        q = self.layer.queries(u, positions)
        attended = scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        return self.layer.finish(g, attended)

    def _propose(self, g: Tensor) -> Tensor:
        return self.to_target_ids(self.lm_head(self.norm(g)).argmax(-1))  # [B, 1]


class Eagle3State(DraftState):
    """Keys and values of the draft layer."""

    def __init__(self, cache: SlotCache) -> None:
        self.cache = cache

    def keep_rows(self, rows: Tensor) -> None:
        self.cache.keep_rows(rows)


class _Attention(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        width, queries = 2 * shape.hidden_size, shape.num_attention_heads * shape.head_dim
        shared = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(width, queries, bias=False)
        self.k_proj = nn.Linear(width, shared, bias=False)
        self.v_proj = nn.Linear(width, shared, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)


class _Mlp(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class _DecoderLayer(nn.Module):
    """A Llama layer whose attention reads ``[embedding; state]``. Split in two halves around the attention itself."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)  # of the embedding half
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)  # of the state half
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = _Mlp(shape)
        self.rotary = LlamaRotaryEmbedding(shape.llama_config())

    def inputs(self, embedded: Tensor, g: Tensor) -> Tensor:
        """``[B, T, 2H]``: normed embedding and normed state, what attention reads."""
        dtype = self.self_attn.q_proj.weight.dtype
        return torch.cat([self.input_layernorm(embedded.to(dtype)), self.hidden_norm(g.to(dtype))], dim=-1)

    def queries(self, u: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries ``[B, N, T, D]`` of rows at ``positions`` ``[B, T]``."""
        return self._rotated(self._heads(self.self_attn.q_proj(u)), positions)

    def keys_values(self, u: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values ``[B, N_kv, T, D]`` of rows at ``positions`` ``[B, T]``."""
        return self._rotated(self._heads(self.self_attn.k_proj(u)), positions), self._heads(self.self_attn.v_proj(u))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.rotary(x, positions)
        return apply_rotary_pos_emb(x, x, cos, sin)[0]

    def finish(self, g: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer after attention ``[B, N, T, D]``: the un-normed state ``[B, T, H]``."""
        r = g + self.self_attn.o_proj(attended.transpose(1, 2).flatten(-2))
        return r + self.mlp(self.post_attention_layernorm(r))


def training_time_test_attention(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Attention of step ``k = len(keys) - 1`` at the wanted rows, ``[B, N, R, D]``.

    ``q``: ``[B, N, R, D]``, of positions ``rows`` ``[B, R]``. ``keys[0]``, ``values[0]``: ``[B, N_kv, T, D]``
    of all rows; those of later steps ``[B, N_kv, R, D]``. A row at ``t`` attends to step-0 keys of rows ``≤ t``
    and to its own keys of later steps, in one softmax.
    """
    length = keys[0].shape[2]
    seen = torch.arange(length, device=q.device) <= rows[..., None]  # [B, R, T]
    if len(keys) == 1:
        return scaled_dot_product_attention(q, keys[0], values[0], attn_mask=seen[:, None], enable_gqa=True)
    groups = q.shape[1] // keys[0].shape[1]
    q = q.unflatten(1, (-1, groups)) * q.shape[-1] ** -0.5  # [B, N_kv, G, R, D]
    past = q @ keys[0][:, :, None].transpose(-1, -2)  # [B, N_kv, G, R, T]
    past = past.masked_fill(~seen[:, None, None], float("-inf"))
    own = torch.stack([(q * key[:, :, None]).sum(-1) for key in keys[1:]], dim=-1)  # [B, N_kv, G, R, k]
    weights = torch.cat([past, own], dim=-1).float().softmax(-1).to(q.dtype)
    out = weights[..., :length] @ values[0][:, :, None]
    for i, value in enumerate(values[1:]):
        out = out + weights[..., length + i, None] * value[:, :, None]
    return out.flatten(1, 2)
