"""Low-bit attention against a transcription by loops, against sdpa, and with a cache against without one."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import VOCAB, save_tiny_target, tiny_config
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM, LlamaForCausalLM

from bitdraft.quant.apply import apply_recipe
from bitdraft.quant.attention.apply import apply_to_attention
from bitdraft.quant.attention.low_bit import LowBitAttention, round_probabilities
from bitdraft.quant.attention.packed import LOW_BIT_ATTENTION
from bitdraft.quant.attention.rules import AttentionRule, KvRule
from bitdraft.quant.fake import fake
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recipe import Recipe
from bitdraft.quant.schemes import scheme_named
from bitdraft.quant.target import LowBitTarget, load_target

RULES = {
    "int8": AttentionRule(queries="int8-token", keys="int8-token"),
    "fp8": AttentionRule(queries="fp8-token", keys="fp8-token", probabilities="fp8-tensor-static", values="fp8-token"),
    "mx": AttentionRule(
        queries="mxfp8-rceil", keys="mxfp4-rceil", probabilities="mxfp4-rceil", values="mxfp6-e2m3-even"
    ),
    "int8 probabilities": AttentionRule(probabilities="int8-token"),
    "nvfp4 probabilities": AttentionRule(probabilities="nvfp4-kernel", values="int8-token"),
}


def tensors(batch: int = 2, heads: int = 4, shared: int = 2, queries: int = 5, keys: int = 9) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(batch, heads, queries, 32, generator=generator) * 2
    key, value = (torch.randn(batch, shared, keys, 32, generator=generator) for _ in range(2))
    mask = torch.rand(batch, 1, queries, keys, generator=generator) < 0.6
    mask[..., 0] = True
    return query, key, value, mask


def vector(x: Tensor, name: str | None, **scale: Any) -> list[float]:
    return (x if name is None else fake(x, scheme_named(name), **scale)).tolist()


def by_loops(
    rule: AttentionRule, low: LowBitAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor
) -> Tensor:
    """Head by head, query by query, key by key; ``[B, T, N, E]``."""
    batch, heads, queries, width = query.shape
    out = torch.zeros(batch, queries, heads, value.shape[-1])
    for b in range(batch):
        for n in range(heads):
            m = n * key.shape[1] // heads  # the key-value head of this query head
            keys = [vector(k, rule.keys) for k in key[b, m]]
            values = [vector(v, rule.values) for v in value[b, m]]
            for t in range(queries):
                q = vector(query[b, n, t], rule.queries)
                scores = []
                for s, k in enumerate(keys):
                    score = sum(x * y for x, y in zip(q, k, strict=True)) * width**-0.5
                    if low.head_scales is not None:
                        score *= float(low.head_scales[n])
                    if low.temperature is not None:
                        score /= float(low.temperature)
                    scores.append(score if mask[b, 0, t, s] else -math.inf)
                weights = [math.exp(score - max(scores)) for score in scores]
                total = sum(weights)
                row = torch.tensor(weights)
                if rule.probabilities == "fp8-tensor-static":
                    weights = ((row * 256).to(torch.float8_e4m3fn).float() / 256).tolist()
                elif rule.probabilities == "nvfp4-kernel":
                    padded = torch.cat([row, torch.zeros(-len(row) % 16)])
                    weights = vector(padded, rule.probabilities, global_scale=torch.tensor(2688.0))[: len(row)]
                elif rule.probabilities is not None:
                    block = scheme_named(rule.probabilities).block or 1
                    weights = vector(torch.cat([row, torch.zeros(-len(row) % block)]), rule.probabilities)[: len(row)]
                for e in range(value.shape[-1]):
                    out[b, t, n, e] = sum(w * v[e] for w, v in zip(weights, values, strict=True)) / total
    return out


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_low_bit_attention_is_its_transcription(name: str, corrected: bool) -> None:
    query, key, value, mask = tensors()
    low = LowBitAttention(RULES[name])
    if corrected:
        low.head_scales, low.temperature = torch.tensor([0.9, 1.0, 1.1, 0.7]), torch.tensor(1.2)
    expected = by_loops(RULES[name], low, query, key, value, mask)
    out = low(query, key, value, mask, 32**-0.5)
    # fp32 sums in another order move a probability across a rounding boundary now and then: one step of one of them.
    close = torch.isclose(out, expected, rtol=1e-4, atol=1e-5)
    assert close.float().mean() > 0.97
    torch.testing.assert_close(out, expected, rtol=0, atol=0.03)
    exact = LowBitAttention(None)(query, key, value, mask, 32**-0.5)
    assert not torch.isclose(out, exact, rtol=1e-4, atol=1e-5).float().mean() > 0.5, "the formats should show"


def test_without_formats_it_is_sdpa() -> None:
    query, key, value, mask = tensors()
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True, scale=0.2)
    exact = LowBitAttention(None)
    torch.testing.assert_close(exact(query, key, value, mask, 0.2).transpose(1, 2), expected)
    numbers = torch.zeros(mask.shape).masked_fill(~mask, -1e30)
    torch.testing.assert_close(exact(query, key, value, numbers, 0.2).transpose(1, 2), expected)
    query, key, value, _ = tensors(queries=7, keys=7)
    causal = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(exact(query, key, value, None, 32**-0.5).transpose(1, 2), causal)
    one = scaled_dot_product_attention(query[:, :, -1:], key, value, enable_gqa=True)
    torch.testing.assert_close(exact(query[:, :, -1:], key, value, None, 32**-0.5).transpose(1, 2), one)


@pytest.mark.parametrize("masked", [True, False])
def test_queries_in_chunks_make_no_difference(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, mask = tensors(queries=9, keys=9)
    low, given = LowBitAttention(RULES["fp8"]), mask if masked else None
    whole = low(query, key, value, given, 0.2)
    monkeypatch.setattr("bitdraft.quant.attention.low_bit._AT_ONCE", 2 * 4 * 9 * 2)  # two queries at a time
    seen: list[int] = []
    attend = LowBitAttention.attend

    def note(self: LowBitAttention, scores: Tensor, value: Tensor) -> Tensor:
        seen.append(scores.shape[2])
        return attend(self, scores, value)

    monkeypatch.setattr(LowBitAttention, "attend", note)
    torch.testing.assert_close(low(query, key, value, given, 0.2), whole, rtol=1e-5, atol=1e-6)
    assert seen == [2, 2, 2, 2, 1]


def test_static_probabilities_have_the_range_of_flash_attention_3() -> None:
    """256 steps of E4M3: 1 is far from saturating, and 2^-17 is the smallest that is not 0 (half of it ties to 0)."""
    weights = torch.tensor([1.0, 0.3, 2.0**-16, 2.0**-17, 2.0**-18, 0.0])
    read = round_probabilities(weights, scheme_named("fp8-tensor-static"))
    assert read.tolist() == [1.0, 0.3125, 2.0**-16, 2.0**-17, 0.0, 0.0]


def test_static_queries_have_the_scale_of_the_cached_keys() -> None:
    query, key, value, _ = tensors()
    rule = AttentionRule(queries="fp8-tensor-static")
    for scales, per_head in ((torch.tensor([0.5]), [0.5] * 4), (torch.tensor([0.5, 0.002]), [0.5, 0.5, 0.002, 0.002])):
        low = LowBitAttention(rule, scales)
        rounded, kept, _ = low.rounded(query, key, value)
        assert kept is key
        for head, scale in enumerate(per_head):
            codes = (query[:, head] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            torch.testing.assert_close(rounded[:, head], codes.float() * scale, rtol=1e-6, atol=0)
    assert LowBitAttention(rule).query_scale is not None


def test_autocast_changes_nothing() -> None:
    query, key, value, mask = tensors()
    low = LowBitAttention(RULES["fp8"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = low(query, key, value, mask, 0.2)
    assert torch.equal(out, low(query, key, value, mask, 0.2))


def test_a_row_that_sees_nothing_is_no_nan() -> None:
    query, key, value, mask = tensors()
    mask[0, 0, 2] = False
    assert torch.isfinite(LowBitAttention(RULES["fp8"])(query, key, value, mask, 0.2)).all()


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LowBitTarget]:
    folder = save_tiny_target(tmp_path_factory.mktemp("attention") / "target", num_hidden_layers=2, head_dim=32)

    def get(rule: AttentionRule | None, kv: KvRule | None = None, base: str = "none") -> LowBitTarget:
        recipe = Recipe("attention", load_recipe(base).rules, kv=kv, attention=rule)
        text = [torch.randint(VOCAB, (1, 24), generator=torch.Generator().manual_seed(7))]
        return load_target(str(folder), recipe, dtype=torch.float64, compile_quantizer="off", calibration=text)

    return get


ALL = {
    **{name: (rule, None) for name, rule in RULES.items()},
    "nvfp4": (AttentionRule(queries="nvfp4-kernel", keys="nvfp4-kernel", values="nvfp4-kernel"), None),
    "fp8 attention": (
        AttentionRule(queries="fp8-tensor-static", probabilities="fp8-tensor-static"),
        KvRule(scales="calibrated", per="head"),
    ),
    "fitted": (
        AttentionRule(queries="mxfp4-rceil", keys="mxfp4-rceil", head_scales="fitted", temperature="fitted"),
        KvRule(),
    ),
}


@pytest.mark.parametrize("name", ALL)
def test_decoding_equals_one_pass(name: str, load: Callable[..., LowBitTarget]) -> None:
    target = load(*ALL[name], "mxfp4")
    ids = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    full = target.states(ids).last_hidden
    cache = target.new_cache(12)
    parts = [
        target.states(ids[:, start:stop], cache=cache, lengths=torch.full((2,), start)).last_hidden
        for start, stop in ((0, 5), (5, 6), (6, 10), (10, 12))
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=0, atol=1e-9)
    assert (full - load(None, None, "mxfp4").states(ids).last_hidden).abs().amax() > 1e-3


def test_what_follows_changes_nothing(load: Callable[..., LowBitTarget]) -> None:
    """No scale is shared with a later token: causality holds to the last bit of a code."""
    target = load(RULES["mx"])
    ids = torch.randint(VOCAB, (1, 12), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[:, 7:] = 5
    first = [target.states(x).last_hidden[:, :7] for x in (ids, other)]
    torch.testing.assert_close(first[0], first[1], rtol=0, atol=1e-12)


def test_the_summary_says_what_was_done(load: Callable[..., LowBitTarget]) -> None:
    target = load(*ALL["fitted"])
    lines = target.applied.summary().splitlines()
    assert "keys and values cached in fp8-kv, scale 1" in lines
    (line,) = [line for line in lines if line.startswith("attention in 2 layers: ")]
    assert "queries mxfp4-rceil, keys mxfp4-rceil, head scales 0." in line
    assert "temperatures " in line
    assert target.config._attn_implementation == LOW_BIT_ATTENTION
    assert list(target.applied.attention or ()) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": 0,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


def attend(model: Any, rule: AttentionRule) -> None:
    recipe = Recipe("attention", (), attention=rule)
    apply_to_attention(model, recipe, apply_recipe(model, recipe, compiled=False))


def test_attention_that_has_more_to_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="GptOssForCausalLM has attention of its own kind"):
        attend(GptOssForCausalLM(GptOssConfig(**SMALL, num_local_experts=4)), RULES["int8"])
    gemma = Gemma2ForCausalLM(Gemma2Config(**SMALL)).eval()
    with pytest.raises(ValueError, match="Gemma2ForCausalLM has attention of its own kind"):
        attend(gemma, RULES["int8"])
    monkeypatch.setattr(Gemma2ForCausalLM, "_supports_sdpa", True)  # as other models with soft caps do
    with pytest.raises(ValueError, match="Gemma2Attention has softcap, which low-bit attention does not compute"):
        attend(gemma, RULES["int8"])


def test_layers_that_cannot_be_reached_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LlamaForCausalLM(tiny_config(num_hidden_layers=2))
    monkeypatch.setattr(model.model.layers[0].self_attn, "forward", lambda hidden_states, **_: (hidden_states, None))
    with pytest.raises(ValueError, match="1 of the 2 layers of LlamaForCausalLM ask for their attention"):
        attend(model, RULES["int8"])


def test_a_width_that_does_not_divide_into_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attention: 16 columns do not divide into blocks of 32 \(mxfp8-rceil\)"):
        attend(LlamaForCausalLM(tiny_config(num_hidden_layers=2)), RULES["mx"])
