"""The low-bit KV cache: what is written is what vLLM writes, and every pass reads it, with a cache or without one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny import VOCAB, save_tiny_target
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.attention.kv_rounding import KvRounding, LargestSeen, round_per_head
from bitdraft.quant.attention.rules import KvRule
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recipe import Recipe
from bitdraft.quant.schemes import FP8_KV, scheme_named
from bitdraft.quant.target import LowBitTarget, calibration_ids, load_target, load_tokenizer

E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
RULES = {
    "one": KvRule(),
    "calibrated": KvRule(scales="calibrated"),
    "per head": KvRule(scales="calibrated", per="head"),
    "e5m2": KvRule(format="fp8-e5m2-kv"),
    "int8": KvRule(format="int8-token"),
}


def cached(rule: KvRule, base: str = "none") -> Recipe:
    return Recipe("cached", load_recipe(base).rules, kv=rule)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LowBitTarget]:
    """Two layers, in fp64: where values are rounded, an fp32 sum in another order could fall on the other side."""
    folder = save_tiny_target(tmp_path_factory.mktemp("kv") / "target", num_hidden_layers=2)
    loaded: dict[tuple[Recipe, torch.dtype], LowBitTarget] = {}

    def get(recipe: Recipe, dtype: torch.dtype = torch.float64) -> LowBitTarget:
        if (recipe, dtype) not in loaded:
            loaded[recipe, dtype] = load_target(str(folder), recipe, dtype=dtype, compile_quantizer="off")
        return loaded[recipe, dtype]

    return get


def by_hand(x: Tensor, scale: float) -> Tensor:
    """Write and read a bf16 tensor, number by number: the nearest of E4M3's values, ties to the even code."""
    out = []
    for value in x.float().flatten().tolist():
        quotient = torch.tensor(value) / torch.tensor(scale)  # one fp32 division
        magnitude = min(abs(float(quotient)), 448.0)
        code = min(range(len(E4M3)), key=lambda c: (abs(E4M3[c] - magnitude), c % 2))
        read = torch.tensor(E4M3[code]) * torch.tensor(scale)
        out.append(float(read) if quotient >= 0 else -float(read))
    return torch.tensor(out).to(x.dtype).view_as(x)


@pytest.mark.parametrize("scale", [1.0, 0.0134, 0.5, 3.7])
def test_writing_and_reading_is_the_rule_applied_number_by_number(scale: float) -> None:
    torch.manual_seed(0)
    x = (torch.randn(1, 1, 40, 8) * 10 ** (torch.rand(40, 1) * 5 - 2)).bfloat16()
    assert torch.equal(round_per_head(x, FP8_KV, torch.tensor([scale])), by_hand(x, scale))


@pytest.mark.parametrize(("name", "scale"), [("1.000000", 1.0), ("0.013393", 6 / 448), ("0.023438", 10.5 / 448)])
def test_vectors_of_vllm(shared: Path, name: str, scale: float) -> None:
    golden = load_file(shared / "golden" / "fp8.safetensors")
    stored = f"kv_vllm_PORT/scale_{name}"
    read = round_per_head(golden["in/kv_bf16"][None, None], FP8_KV, torch.tensor([scale]))[0, 0]
    assert torch.equal(read, golden[f"{stored}/dq_bf16"])
    codes = golden[f"{stored}/data"].view(torch.float8_e4m3fn).float()
    assert torch.equal(read, (codes * torch.tensor(scale)).bfloat16())


def test_values_saturate_at_448_scales() -> None:
    x = torch.tensor([448.0, 449.0, 464.0, 465.0, 1e4, -1e9]).view(1, 1, 6, 1)
    for scale in (1.0, 0.25):
        read = round_per_head(x * scale, FP8_KV, torch.tensor([scale]))
        assert (read / scale).flatten().tolist() == [448.0] * 5 + [-448.0]


@given(
    x=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=8),
    scale=st.floats(2.0**-10, 2.0**4, width=32),
    name=st.sampled_from(["fp8-kv", "fp8-e5m2-kv"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_what_was_read_is_written_again_as_the_same(
    x: list[float], scale: float, name: str, dtype: torch.dtype
) -> None:
    """Why values in the target's own dtype can stand for codes."""
    scales, scheme = torch.tensor([scale]), scheme_named(name)
    once = round_per_head(torch.tensor(x, dtype=dtype).view(1, 1, -1, 1), scheme, scales)
    assert torch.equal(round_per_head(once, scheme, scales), once)


def test_every_head_has_its_scale() -> None:
    torch.manual_seed(1)
    x, scales = torch.randn(2, 3, 5, 8), torch.tensor([0.01, 1.0, 0.3])
    read = round_per_head(x, FP8_KV, scales)
    for head in range(3):
        assert torch.equal(
            read[:, head : head + 1], round_per_head(x[:, head : head + 1], FP8_KV, scales[head : head + 1])
        )
    assert not torch.equal(read, round_per_head(x, FP8_KV, scales[:1]))


def test_layers_keys_and_values_have_their_own_scales() -> None:
    torch.manual_seed(2)
    x = torch.randn(1, 2, 3, 8)
    scales = torch.tensor([[0.01], [0.02]]), torch.tensor([[0.3], [0.4]])
    rounding = KvRounding(KvRule(scales="calibrated"), *scales)
    for layer in (0, 1):
        for read, of_kind in zip(rounding.read_back(layer, x, x), scales, strict=True):
            assert torch.equal(read, round_per_head(x, FP8_KV, of_kind[layer]))


def test_a_gradient_passes_straight_through_up_to_the_largest_value() -> None:
    x = torch.tensor([1.3, -440.0, 500.0]).view(1, 1, 3, 1).requires_grad_()
    round_per_head(x, FP8_KV, torch.ones(1)).sum().backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_pass_without_a_cache_is_attention_over_rounded_keys_and_values(
    rule: KvRule, load: Callable[..., LowBitTarget]
) -> None:
    """The other way round: rounded inside the attention function, which sees keys after rotary embedding."""
    low, plain = load(cached(rule)), load(load_recipe("none"))
    rounding = low.applied.cache
    assert rounding is not None

    def rounded(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *more: Any, **options: Any) -> Any:
        key, value = rounding.read_back(module.layer_idx, key, value)  # type: ignore[arg-type]
        return sdpa_attention_forward(module, query, key, value, *more, **options)

    AttentionInterface.register("rounded_here", rounded)
    AttentionMaskInterface.register("rounded_here", sdpa_mask)
    ids, before = tokens(2, 11), plain.config._attn_implementation
    exact = plain.states(ids).last_hidden
    plain.model.set_attn_implementation("rounded_here")  # type: ignore[operator]
    try:
        expected = plain.states(ids).last_hidden
    finally:
        plain.model.set_attn_implementation(before)  # type: ignore[operator]
    states = low.states(ids).last_hidden
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-9)
    assert (expected - exact).abs().amax() > 1e-3, "rounding should show"


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_decoding_with_rejected_drafts_equals_one_pass(rule: KvRule, load: Callable[..., LowBitTarget]) -> None:
    target, ids = load(cached(rule, "mxfp4")), tokens(2, 16)
    full = target.states(ids).last_hidden
    cache, lengths = target.new_cache(20), torch.tensor([5, 2])
    prompt = torch.where(torch.arange(5) < lengths[:, None], ids[:, :5], tokens(2, 5, seed=9))
    target.states(prompt, cache=cache, lengths=torch.zeros_like(lengths))
    for number, kept in enumerate([[3, 1], [1, 4], [2, 2], [4, 3]]):
        fed = tokens(2, 4, seed=100 + number)
        for row, (length, count) in enumerate(zip(lengths.tolist(), kept, strict=True)):
            fed[row, :count] = ids[row, length : length + count]
        last = target.states(fed, cache=cache, lengths=lengths).last_hidden
        for row, (length, count) in enumerate(zip(lengths.tolist(), kept, strict=True)):
            torch.testing.assert_close(last[row, :count], full[row, length : length + count], rtol=0, atol=1e-9)
        lengths = lengths + torch.tensor(kept)


def test_states_in_fp32_are_equal_up_to_rounding(load: Callable[..., LowBitTarget]) -> None:
    target, ids = load(cached(KvRule()), torch.float32), tokens(2, 8)
    cache, zero = target.new_cache(8), torch.zeros(2, dtype=torch.int64)
    parts = [
        target.states(ids[:, :5], cache=cache, lengths=zero),
        target.states(ids[:, 5:], cache=cache, lengths=zero + 5),
    ]
    decoded = torch.cat([p.last_hidden for p in parts], dim=1)
    torch.testing.assert_close(decoded, target.states(ids).last_hidden, rtol=1e-4, atol=1e-4)


def test_every_token_is_rounded_once(load: Callable[..., LowBitTarget], monkeypatch: pytest.MonkeyPatch) -> None:
    target, ids, seen = load(cached(KvRule())), tokens(2, 9), []
    read_back = KvRounding.read_back

    def count(self: KvRounding, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((layer, keys.shape[2]))
        return read_back(self, layer, keys, values)

    monkeypatch.setattr(KvRounding, "read_back", count)
    cache, zero = target.new_cache(9), torch.zeros(2, dtype=torch.int64)
    for start, stop in ((0, 6), (6, 7), (7, 9)):
        target.states(ids[:, start:stop], cache=cache, lengths=zero + start)
    assert seen == [(layer, count) for count in (6, 1, 2) for layer in (0, 1)]
    seen.clear()
    target.states(ids)
    assert seen == [(0, 9), (1, 9)]


@pytest.mark.parametrize("per", ["tensor", "head"])
def test_calibrated_scales_put_the_largest_magnitude_on_448(per: str, load: Callable[..., LowBitTarget]) -> None:
    """Against keys and values that transformers' own cache collects."""
    target, plain = load(cached(KvRule(scales="calibrated", per=per))), load(load_recipe("none"))
    rounding = target.applied.cache
    assert rounding is not None
    largest = torch.zeros(2, 2, 2)  # keys and values, layer, head
    for ids in calibration_ids(load_tokenizer(plain.name)):
        cache = DynamicCache(config=plain.config)
        plain.decoder(input_ids=ids, cache=cache, use_cache=True)
        for layer in range(2):
            for kind, x in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
                largest[kind, layer] = torch.maximum(largest[kind, layer], x[0].abs().amax(dim=(1, 2)).float())
    if per == "tensor":
        largest = largest.amax(dim=2, keepdim=True)
    expected = largest / 448
    torch.testing.assert_close(torch.stack([rounding.key_scales, rounding.value_scales]), expected, rtol=1e-6, atol=0)
    assert f"scales calibrated per {per}: keys " in target.applied.summary()


def test_scales_follow_the_given_calibration_text(load: Callable[..., LowBitTarget]) -> None:
    plain = load(load_recipe("none"))
    rule = KvRule(scales="calibrated")
    other = load_target(
        plain.name, cached(rule), dtype=torch.float64, calibration=[tokens(1, 4)], compile_quantizer="off"
    )
    usual = load(cached(rule))
    assert other.applied.cache is not None and usual.applied.cache is not None
    assert not torch.equal(other.applied.cache.key_scales, usual.applied.cache.key_scales)
    assert other.recipe.fingerprint != usual.recipe.fingerprint


def test_a_head_of_zeros_has_scale_one_and_damaged_ones_are_refused() -> None:
    seen = LargestSeen(1)
    zeros, some = torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 3, 4)
    seen.read_back(0, zeros, some)
    assert seen.rounding(KvRule(scales="calibrated", per="head")).key_scales.tolist() == [[1.0, 1.0]]
    seen.read_back(0, some / 0, some)
    with pytest.raises(ValueError, match="keys or values that are not finite"):
        seen.rounding(KvRule(scales="calibrated"))
    with pytest.raises(ValueError, match="the value scales are not all positive and finite"):
        KvRounding(KvRule(), torch.ones(1, 1), torch.zeros(1, 1))


def test_a_cache_that_would_not_round_is_refused(load: Callable[..., LowBitTarget]) -> None:
    target, ids = load(cached(KvRule())), tokens(1, 4)
    for foreign in (
        DynamicCache(config=target.config),
        SlotCache(2, 8),
        load(cached(RULES["calibrated"])).new_cache(8),
    ):
        with pytest.raises(ValueError, match=r"decode with the cache of LowBitTarget\.new_cache"):
            target.decoder(input_ids=ids, cache=foreign, use_cache=True)
    with pytest.raises(ValueError, match="cached in low bit, which a DynamicCache from elsewhere"):
        target.model.generate(input_ids=ids, max_new_tokens=2)  # type: ignore[operator]


def test_backward_through_a_target_reaches_its_input(load: Callable[..., LowBitTarget]) -> None:
    target = load(cached(KvRule()))
    embedded = target.embedding(tokens(1, 4)).requires_grad_()
    target.model(inputs_embeds=embedded, use_cache=False).logits.square().sum().backward()
    assert embedded.grad is not None
    assert torch.isfinite(embedded.grad).all()
    assert not target.states(tokens(1, 4)).last_hidden.requires_grad
