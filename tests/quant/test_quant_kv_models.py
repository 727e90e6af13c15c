"""The low-bit KV cache in models of other families, and the models that it refuses by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import VOCAB, tiny_config
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from bitdraft.quant.apply import Applied, apply_recipe
from bitdraft.quant.attention.apply import apply_to_attention
from bitdraft.quant.attention.kv_cache import PassCache
from bitdraft.quant.attention.kv_rounding import LargestSeen
from bitdraft.quant.attention.rules import KvRule
from bitdraft.quant.recipe import Recipe

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(tiny_config(num_hidden_layers=2)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL)),
    "mistral, window": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=5)),
    "gemma2, window and soft cap": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, sliding_window=5)),
    "gpt-oss, window and sinks": lambda: GptOssForCausalLM(
        GptOssConfig(**SMALL, num_local_experts=4, sliding_window=5)
    ),
}


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_going_through_the_cache_changes_nothing_but_the_rounding(family: str) -> None:
    """A cache that keeps everything as it is: masks, windows and positions are those of a pass without one."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    ids, decoder = tokens(2, 9), model.get_decoder()
    with torch.no_grad():
        expected = decoder(input_ids=ids, use_cache=False).last_hidden_state
        cache = PassCache(2, LargestSeen(2))
        assert torch.equal(decoder(input_ids=ids, cache=cache, use_cache=True).last_hidden_state, expected)
    assert [layer.updates for layer in cache.passed] == [1, 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_attention_reads_what_is_rounded(family: str) -> None:
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    ids = tokens(2, 9)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        applied = low_bit(model, KvRule())
        after = model(input_ids=ids, use_cache=False).logits
    assert applied.cache is not None
    assert (after - before).abs().amax() > 1e-5


def low_bit(model: Any, rule: KvRule) -> Applied:
    recipe = Recipe("cached", (), kv=rule)
    return apply_to_attention(model, recipe, apply_recipe(model, recipe, compiled=False))


def test_models_that_cache_something_else_are_refused_by_name() -> None:
    torch.manual_seed(0)
    mla = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **{**SMALL, "num_key_value_heads": 4, "head_dim": 8}, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
            qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4, first_k_dense_replace=2, moe_intermediate_size=16,
            n_group=1, topk_group=1, num_experts_per_tok=2,
        )
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"DeepseekV3ForCausalLM caches compressed keys and values \(MLA\)"):
        low_bit(mla, KvRule())
    mixed = Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SMALL, layer_types=["linear_attention", "full_attention"], num_experts=2, mlp_only_layers=[0, 1]
        )
    )
    with pytest.raises(ValueError, match="Qwen3NextForCausalLM has layers of kind linear_attention"):
        low_bit(mixed, KvRule())


def test_a_layer_that_shares_the_keys_of_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["llama"]()
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    monkeypatch.setattr(attention, "forward", lambda *args, **options: forward(*args, **{**options, "cache": None}))
    with pytest.raises(ValueError, match="layer 1 of LlamaForCausalLM does not hand its keys and values to the cache"):
        low_bit(model, KvRule())


def test_a_model_that_takes_no_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["llama"]()
    monkeypatch.setattr(model.model, "forward", lambda input_ids, past_key_values=None, use_cache=None: None)
    with pytest.raises(ValueError, match="LlamaForCausalLM takes no cache in the way of transformers 5"):
        low_bit(model, KvRule())


def test_a_width_that_does_not_divide_into_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kv: 16 columns do not divide into blocks of 32 \(mxfp4-rceil\)"):
        low_bit(FAMILIES["llama"](), KvRule(format="mxfp4-rceil"))


def test_calibrated_scales_without_text_are_refused() -> None:
    with pytest.raises(ValueError, match="calibrated scales are measured on calibration text, and none was given"):
        low_bit(FAMILIES["llama"](), KvRule(scales="calibrated"))
