"""EAGLE-3's decoder layer: a Llama layer whose attention reads ``[embedding; state]``.

Or a Qwen3 layer, which differs in its attention alone: queries and keys are normed head by head, and where there are
biases the output projection has none (as vLLM 0.32 computes both: ``llama_eagle3.py``, ``qwen3_eagle3.py``).
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from bitdraft.speculators.products import Linear

# B sequence, T row (position), N attention head, D head dimension, H hidden.


_NORM_EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")  # LFM2, Mamba-2
_POSITIONS = 32_768  # what an export says of a target that counts no positions


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
    attention_bias: bool = False
    qk_norm: bool = False  # Qwen3's attention
    hidden_act: str = "silu"
    target_hidden_size: int = 0  # that of the captured states; 0 stands for the layer's own

    def __post_init__(self) -> None:
        if self.hidden_act != "silu":
            raise ValueError(
                f"the draft layer's hidden_act is {self.hidden_act!r}, but vLLM and SGLang run draft layers with silu "
                "alone: use a head with silu"
            )
        object.__setattr__(self, "target_hidden_size", self.target_hidden_size or self.hidden_size)

    @classmethod
    def of_target(cls, config: Any, *, qk_norm: bool = False) -> "LayerShape":
        """The target's own shape, with what a Llama layer needs and the target lacks filled in.

        A target without attention (Mamba-2) gets heads of 64, three times the hidden size in the MLP and Llama's
        rotation. The rotation covers the whole head also where the target's covers a part, and is that of its full
        attention where kinds of layers differ.
        """
        heads, width = getattr(config, "num_attention_heads", None), getattr(config, "head_dim", None)
        if heads is None:  # a ``head_dim`` would be that of its states
            heads, width = max(config.hidden_size // 64, 1), 64
        rotation = getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10_000.0}
        rotation = rotation.get("full_attention", rotation)
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=getattr(config, "intermediate_size", None) or 3 * config.hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=width or config.hidden_size // heads,
            rms_norm_eps=next(getattr(config, name) for name in _NORM_EPSILONS if hasattr(config, name)),
            max_position_embeddings=getattr(config, "max_position_embeddings", None) or _POSITIONS,
            rope_parameters={k: v for k, v in rotation.items() if k != "partial_rotary_factor"},
            qk_norm=qk_norm,
        )

    def llama_config(self) -> LlamaConfig:
        """What the rotation reads of a configuration, which is the head size: transformers refuses a hidden size that
        is no multiple of the heads, as some targets have it, so it is told one that is."""
        own = {name: value for name, value in asdict(self).items() if name not in ("qk_norm", "target_hidden_size")}
        return LlamaConfig(**{**own, "hidden_size": self.head_dim * self.num_attention_heads}, num_hidden_layers=1)


def unbatched(heads: Tensor) -> Tensor:
    """``[1, N, T, D]`` → ``[T, N, D]``, a view: the packed form of queries, keys and values."""
    return heads[0].transpose(0, 1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


class Norm(nn.RMSNorm):
    """RMSNorm in the weight's dtype: fp32 masters keep it in fp32 under autocast, on the fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class Attention(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        width, queries = 2 * shape.hidden_size, shape.num_attention_heads * shape.head_dim
        shared, bias = shape.num_key_value_heads * shape.head_dim, shape.attention_bias
        self.q_proj = Linear(width, queries, bias=bias)
        self.k_proj = Linear(width, shared, bias=bias)
        self.v_proj = Linear(width, shared, bias=bias)
        self.o_proj = Linear(queries, shape.hidden_size, bias=bias and not shape.qk_norm)
        eps = shape.rms_norm_eps
        self.q_norm: nn.Module = Norm(shape.head_dim, eps=eps) if shape.qk_norm else nn.Identity()
        self.k_norm: nn.Module = Norm(shape.head_dim, eps=eps) if shape.qk_norm else nn.Identity()


class Mlp(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A Llama layer whose attention reads ``[embedding; state]``. Split in two halves around the attention itself."""

    def __init__(self, shape: LayerShape, *, norm_before_residual: bool = False) -> None:
        super().__init__()
        self.head_dim, self.width, self.norm_before_residual = shape.head_dim, shape.hidden_size, norm_before_residual
        self.input_layernorm = Norm(shape.hidden_size, eps=shape.rms_norm_eps)  # of the embedding half
        self.hidden_norm = Norm(shape.hidden_size, eps=shape.rms_norm_eps)  # of the state half
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = Mlp(shape)
        self.rotary = LlamaRotaryEmbedding(shape.llama_config())

    def inputs(self, embedded: Tensor, g: Tensor) -> Tensor:
        """``u`` ``[B, T, 2H]``: normed embedding and normed state, what attention reads."""
        dtype = self.hidden_norm.weight.dtype
        return torch.cat([self.input_layernorm(embedded.to(dtype)), self.hidden_norm(g.to(dtype))], dim=-1)

    def queries(self, u: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries ``[B, N, T, D]`` of rows at ``positions`` ``[B, T]``."""
        return self._rotated(self._heads(self.self_attn.q_proj(u)), self.self_attn.q_norm, positions)

    def keys_values(self, u: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values ``[B, N_kv, T, D]`` of rows at ``positions`` ``[B, T]``."""
        keys = self._rotated(self._heads(self.self_attn.k_proj(u)), self.self_attn.k_norm, positions)
        return keys, self._heads(self.self_attn.v_proj(u))

    def rotated_heads(self, qk: Tensor, positions: Tensor, queries: int) -> tuple[Tensor, Tensor]:
        """Products ``[T, Q + S]``, the first ``queries`` of which belong to queries, of rows at ``positions`` ``[T]``
        → rotated queries ``[T, N, D]`` and keys ``[T, N_kv, D]``."""
        heads, split = self.by_head(qk), queries // self.head_dim  # [T, N + N_kv, D]
        if not isinstance(self.self_attn.q_norm, nn.Identity):
            heads = torch.cat([self.self_attn.q_norm(heads[:, :split]), self.self_attn.k_norm(heads[:, split:])], 1)
        cos, sin = self.rotary(qk, positions[None])
        heads = _rotated(heads, cos[0, :, None], sin[0, :, None])
        return heads[:, :split], heads[:, split:]

    def by_head(self, x: Tensor) -> Tensor:
        """``[…, N·D]`` → ``[…, N, D]``, a view."""
        return x.unflatten(-1, (-1, self.head_dim))

    def _heads(self, x: Tensor) -> Tensor:
        return self.by_head(x).transpose(1, 2)

    def _rotated(self, x: Tensor, norm: nn.Module, positions: Tensor) -> Tensor:
        x = norm(x).to(x.dtype)  # fp32 norms give fp32, also where attention runs in bf16
        cos, sin = self.rotary(x, positions)
        return _rotated(x, cos[:, None], sin[:, None])

    def residual(self, g: Tensor, u: Tensor) -> Tensor:
        """What the layer adds to, ``[B, T, H]``: the state, or its normed half of ``u`` if the switch is set."""
        return u[..., self.width :] if self.norm_before_residual else g

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer after attention ``[…, N·D]``: the un-normed state ``[…, H]``."""
        r = residual + self.self_attn.o_proj(attended)
        return r + self.mlp(self.post_attention_layernorm(r))
