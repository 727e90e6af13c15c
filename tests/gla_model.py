"""A reference language model with linear attention of constant decay, mixed with full attention as MiniCPM-SALA mixes.

Llama around it; a linear layer has norms on queries and keys, rotation by position, a norm and a sigmoid gate on its
output, and ALiBi's slopes as decay rates. Saved as an ordinary folder; importing this file registers it.
"""

from pathlib import Path
from typing import Any

import torch
from tiny import tiny_config, tiny_tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from bitdraft.quant.recurrent.constant_decay import ConstantDecayState, attend, empty_state

MIXERS = ("attention", "lightning", "lightning", "lightning")


class GlaConfig(LlamaConfig):
    """``mixer_types``: one of "attention", "lightning" and "stepwise" per layer."""

    model_type = "constant_decay_gla"

    mixer_types: list[str] | tuple[str, ...] = MIXERS


def slopes(heads: int) -> Tensor:
    """ALiBi's, ``[H]``, for a power of two of heads."""
    return torch.exp2(-8 * (torch.arange(heads) + 1.0) / heads)


class LinearAttention(nn.Module):
    """One linear layer's attention, but for its kernel."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.head_dim, self.heads = layer_idx, config.head_dim, config.num_attention_heads
        width = self.heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = LlamaRMSNorm(self.head_dim)
        self.k_norm = LlamaRMSNorm(self.head_dim)
        self.o_norm = LlamaRMSNorm(width)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Any | None = None,
        **options: object,
    ) -> tuple[Tensor, None]:
        q, k, v = (
            proj(hidden_states).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)  # [B, H, N, d]
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(self.q_norm(q), self.k_norm(k), *position_embeddings)
        read = self.read(q, k, v, cache).transpose(1, 2).flatten(2)  # [B, N, H · d]
        return self.o_proj(self.o_norm(read) * torch.sigmoid(self.gate_proj(hidden_states))), None

    def read(self, q: Tensor, k: Tensor, v: Tensor, cache: Any | None) -> Tensor:
        """``[B, H, N, d]`` for queries, keys and values of that shape."""
        raise NotImplementedError


class LightningAttention(LinearAttention):
    """Kept without a state per node."""

    state_store = ConstantDecayState

    def read(self, q: Tensor, k: Tensor, v: Tensor, cache: Any | None) -> Tensor:
        return attend(q, k, v, slopes(self.heads).to(q.device), cache, self.layer_idx)


class StepwiseAttention(LinearAttention):
    """The same by the recurrence, its state in the cache as transformers' recurrent layers keep theirs."""

    def read(self, q: Tensor, k: Tensor, v: Tensor, cache: Any | None) -> Tensor:
        decay = slopes(self.heads).to(q.device)
        state = None if cache is None else cache.get_recurrent_state(self.layer_idx)
        state = empty_state(k, v, decay) if state is None else state
        outputs = []
        for token in range(q.shape[2]):
            written = k[:, :, token, :, None] * v[:, :, token, None, :]
            state = torch.exp(-decay.to(state.dtype))[:, None, None] * state + written
            outputs.append(q[:, :, token, None] @ state / self.head_dim**0.5)
        if cache is not None:
            cache.update_recurrent_state(state, self.layer_idx)
        return torch.cat(outputs, dim=2)


LINEAR = {"lightning": LightningAttention, "stepwise": StepwiseAttention}


class GlaModel(LlamaModel):
    config_class = GlaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for number, kind in enumerate(config.mixer_types):
            if kind in LINEAR:
                self.layers[number].self_attn = LINEAR[kind](config, number)
        self.post_init()


class GlaForCausalLM(LlamaForCausalLM):
    config_class = GlaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = GlaModel(config)
        self.post_init()


AutoConfig.register(GlaConfig.model_type, GlaConfig)
AutoModelForCausalLM.register(GlaConfig, GlaForCausalLM)


def save_gla_target(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write model and tokenizer to ``folder`` and return it."""
    torch.manual_seed(seed)
    settings = {**tiny_config().to_dict(), "num_hidden_layers": len(MIXERS), **changes}
    if "stepwise" in (mixers := settings.get("mixer_types", MIXERS)):  # lets a cache know of their states
        settings["layer_types"] = ["full_attention" if m == "attention" else "linear_attention" for m in mixers]
    model = GlaForCausalLM(GlaConfig(**{k: v for k, v in settings.items() if k not in ("model_type", "architectures")}))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
