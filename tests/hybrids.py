"""Tiny random targets that remember more than keys, or see less than all of them: saved as ordinary model folders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny import HIDDEN, VOCAB, tiny_config, tiny_tokenizer
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

WINDOW = 5
"""Positions that sliding attention sees: fewer than the tests' prompts have."""
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
    "initializer_range": 0.2,  # peaked distributions: greedy choices that rounding does not flip
    "tie_word_embeddings": False,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 258,
}
_ATTENTION: dict[str, Any] = {
    **_COMMON,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


def _qwen3_next() -> PreTrainedModel:
    """Gated delta rule and attention in turn."""
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **_ATTENTION,
            layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            linear_key_head_dim=16,
            linear_value_head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            mlp_only_layers=[0, 1, 2, 3],  # experts do not compute in fp64
        )
    )


def _mamba2() -> PreTrainedModel:
    """Recurrent layers alone."""
    return Mamba2ForCausalLM(Mamba2Config(**_COMMON, num_heads=8, head_dim=16, state_size=16, n_groups=2, chunk_size=8))


def _falcon_h1() -> PreTrainedModel:
    """Attention and Mamba-2 side by side in every layer, and multipliers that are not 1."""
    return FalconH1ForCausalLM(
        FalconH1Config(
            **_ATTENTION,
            mamba_d_ssm=128,
            mamba_n_heads=8,
            mamba_d_head=16,
            mamba_d_state=16,
            mamba_chunk_size=8,
            lm_head_multiplier=0.5,
            embedding_multiplier=2.0,
            ssm_out_multiplier=0.75,
        )
    )


def _lfm2() -> PreTrainedModel:
    """Short convolutions between attention layers."""
    sizes = {k: v for k, v in _ATTENTION.items() if k != "head_dim"}
    kinds = ["conv", "full_attention", "conv", "conv"]
    return Lfm2ForCausalLM(Lfm2Config(**sizes, layer_types=kinds, block_multiple_of=32))


def _mistral() -> PreTrainedModel:
    """A sliding window in every layer, which no ``layer_types`` tells."""
    return MistralForCausalLM(MistralConfig(**_ATTENTION, sliding_window=WINDOW))


def _gemma3() -> PreTrainedModel:
    """Sliding windows and full attention, each with rotations of its own."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**_ATTENTION, layer_types=kinds, sliding_window=WINDOW, query_pre_attn_scalar=16)
    )


def _llama() -> PreTrainedModel:
    """Full attention, for comparison."""
    return LlamaForCausalLM(tiny_config(num_hidden_layers=4))


HYBRIDS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "qwen3_next": _qwen3_next,
    "mamba2": _mamba2,
    "falcon_h1": _falcon_h1,
    "lfm2": _lfm2,
}
WITH_STATES = ("qwen3_next", "mamba2", "falcon_h1", "lfm2")
"""Those that hold recurrent or convolution states."""


def hybrid_model(name: str, seed: int = 0, scale: float = 1.0) -> PreTrainedModel:
    """The tiny model itself. ``scale``: of its matrices; 0.1 makes them as small as transformers does by default."""
    torch.manual_seed(seed)
    model = HYBRIDS[name]()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(scale)
    model.generation_config.eos_token_id = 258
    return model


def save_hybrid(name: str, folder: Path, seed: int = 0, scale: float = 1.0) -> Path:
    """Write the tiny target ``name`` and its tokenizer to ``folder``, which ``load_target`` reads, and return it."""
    hybrid_model(name, seed, scale).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
