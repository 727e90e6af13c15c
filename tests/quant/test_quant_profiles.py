"""Profiles: the table is whole, recipes and checkpoints follow it, and the treatments at load are the engines'."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from stored_checkpoints import EXPERTS, SIZES, save_mixture, store
from tiny import save_tiny_target
from torch import Tensor, nn

from bitdraft.quant.at_load import check_at_load, loaded, marlin_factor
from bitdraft.quant.attention.rules import attention_rule
from bitdraft.quant.block import Quantized, dequantize, quantize
from bitdraft.quant.checkpoints.declare import check_has_layout
from bitdraft.quant.linear import ActivationQuantizer, LowBitLinear
from bitdraft.quant.presets import PRESETS, load_recipe
from bitdraft.quant.profiles import (
    FAMILIES,
    PLAIN,
    PROFILES,
    Computed,
    family_of,
    load_recipe_for,
    profile_named,
    resolve,
)
from bitdraft.quant.recipe import AUTO, Rule
from bitdraft.quant.schemes import (
    FP8_BLOCK,
    FP8_BLOCK_UE8M0,
    FP8_CHANNEL,
    FP8_TOKEN,
    MXFP4_EVEN,
    NVFP4,
    NVFP4_KERNEL,
    scheme_named,
)
from bitdraft.quant.smallfloat import E4M3
from bitdraft.quant.target import LowBitTarget, load_target

ENGINES = [name for name in PROFILES if name != "plain"]


@pytest.mark.parametrize("name", ENGINES)
def test_every_profile_answers_for_every_family_or_says_why_not(name: str) -> None:
    profile = profile_named(name)
    assert set(profile.rows) == set(FAMILIES)
    for family, row in profile.rows.items():
        if isinstance(row, str):
            with pytest.raises(ValueError, match=name) as error:
                profile.computed(family)
            assert "\n" not in str(error.value)
            continue
        of_weights = {"nvfp4": NVFP4, "nvfp4-a16": NVFP4, "fp8-block": FP8_BLOCK}.get(family, MXFP4_EVEN)
        check_at_load(row.at_load, of_weights)
        assert row.activations is None or scheme_named(row.activations).used_by
        assert not (family.endswith("-a16") and row.activations), "weight-only checkpoints stay weight-only"


EXPECTED = [
    # profile, weights, declared inputs, whether of experts, computed inputs, at load
    ("vllm-sm80", "nvfp4", "nvfp4-kernel", False, None, "marlin"),
    ("vllm-sm90", "nvfp4-modelopt", "nvfp4-kernel", False, None, "marlin"),
    ("vllm-sm90", "nvfp4", None, True, None, "marlin"),
    ("vllm-sm100", "nvfp4", "nvfp4-kernel", False, "nvfp4-kernel", "decode"),
    ("sglang-sm100", "nvfp4", "nvfp4-kernel", False, "nvfp4-kernel", "decode"),
    ("vllm-sm90", "mxfp4-even", "mxfp4-rceil", False, None, "decode"),
    ("vllm-sm90", "mxfp4-even", "fp8-token", False, None, "decode"),
    ("vllm-sm100", "mxfp4-even", "mxfp4-even", False, "mxfp4-rceil", "decode"),
    ("vllm-sm100", "mxfp4-even", "mxfp4-rceil", True, "mxfp4-even", "decode"),
    ("vllm-sm100", "mxfp8-even-ct", "mxfp8-rceil", False, "mxfp8-rceil", "decode"),
    ("vllm-sm80", "fp8-channel", "fp8-token", False, None, "decode"),
    ("vllm-sm90", "fp8-channel", "fp8-token", False, "fp8-token", "decode"),
    ("sglang-sm90", "fp8-channel", "fp8-token", False, "fp8-token-sglang", "decode"),
    ("vllm-sm90", "fp8-tensor", "fp8-tensor-static", False, "fp8-tensor-static", "decode"),
    ("vllm-sm80", "fp8-tensor", "fp8-tensor-static", False, None, "decode"),
    ("vllm-sm90", "fp8-block128", "fp8-group128", False, "fp8-group128", "decode"),
    ("sglang-sm90", "fp8-block128", "fp8-group128", False, "fp8-group128-sglang", "decode"),
    ("vllm-sm100", "fp8-block128", "fp8-group128", False, "fp8-group128-ue8m0", "requantize-ue8m0"),
    ("vllm-sm90", "int4-g128", None, False, None, "decode"),
    ("vllm-cpu", "fp8-channel", "fp8-token", False, "fp8-token-native", "decode"),
]


@pytest.mark.parametrize(("name", "weights", "inputs", "experts", "computed", "at_load"), EXPECTED)
def test_the_table_says_what_the_research_says(
    name: str, weights: str, inputs: str | None, experts: bool, computed: str | None, at_load: str
) -> None:
    assert profile_named(name).of(weights, inputs, experts=experts) == Computed(computed, at_load)  # type: ignore[arg-type]
    assert PLAIN.of(weights, inputs, experts=experts) == Computed(inputs)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_family(preset: str) -> None:
    for rule in PRESETS[preset].rules:
        if rule.weight_scheme is not None:
            assert family_of(rule.weight_scheme, rule.activation_scheme, experts=False) in FAMILIES


@pytest.mark.parametrize(
    ("weights", "inputs"),
    [("mxfp6-e2m3-even", None), ("fp8-e5m2-channel", None), ("nvfp4", "fp8-token"), ("int8-channel", "int8-token"),
     ("mxfp4-even", "fp8-group128"), ("fp8-channel", "mxfp8-rceil"), ("mxfp4-fp-quant", None)],
)  # fmt: skip
def test_formats_of_no_family_are_refused(weights: str, inputs: str | None) -> None:
    with pytest.raises(ValueError, match="belong to no family of formats") as error:
        profile_named("vllm-sm90").of(weights, inputs)
    assert "--target-profile plain" in str(error.value)


def rules_of(preset: str, profile: str) -> list[Rule]:
    return [rule for rule in load_recipe_for(preset, profile).rules if rule.weights]


def test_the_plain_profile_leaves_recipes_as_they_are() -> None:
    for preset in PRESETS:
        assert load_recipe_for(preset, "plain") == load_recipe(preset)
        assert load_recipe_for(preset, "plain").computed_by == "profile plain: every format by the rule of its name"


def test_a_resolved_recipe_says_whose_it_is_and_what_changed() -> None:
    recipe = load_recipe_for("nvfp4", "vllm-sm90")
    assert recipe.name == "nvfp4@vllm-sm90"
    assert recipe.computed_by == (
        "profile vllm-sm90: nvfp4: inputs in 16 bit instead of nvfp4-kernel, weights marlin at load"
    )
    (rule,) = rules_of("nvfp4", "vllm-sm90")
    assert rule == Rule("*.layers.*", "nvfp4", at_load="marlin")
    assert recipe.fingerprint != load_recipe("nvfp4a16").fingerprint, "Marlin's treatment is another target"
    assert load_recipe_for("mxfp4a4", "vllm-sm90").fingerprint == load_recipe("mxfp4a16").fingerprint
    assert load_recipe_for("fp8", "vllm-sm90").fingerprint == load_recipe("fp8").fingerprint, "the same computation"
    assert load_recipe_for("none", "vllm-sm90").name == "none"


def test_experts_of_mxfp4_have_a_rule_of_their_own_on_blackwell() -> None:
    experts, dense = rules_of("mxfp4a4", "vllm-sm100")
    assert (experts.within, experts.activations) == ("experts", "mxfp4-even")
    assert (dense.within, dense.activations) == ("all", "mxfp4-rceil")
    recipe = load_recipe_for("mxfp4a4", "vllm-sm100")
    assert recipe.rule_for("model.layers.0.mlp.experts", "model.layers.0.mlp.experts.down_proj.3") == experts
    assert recipe.rule_for("model.layers.0.mlp.shared_expert.down_proj") == dense
    assert recipe.rule_for("model.layers.0.mlp.down_proj") == dense


@pytest.mark.parametrize(
    ("preset", "profile", "complaint"),
    [
        ("mxfp4a4", "sglang-sm90", "serves such checkpoints of mixtures of experts only"),
        ("mxfp4a4-wush", "vllm-sm100", "has no wush transform of inputs"),
        ("fp8", "vllm-sm91", "unknown target profile 'vllm-sm91': did you mean 'vllm-sm90'?"),
        ("fp8", "vllm-sm90+exakt", "unknown target profile 'vllm-sm90+exakt'"),
        ("fp9", "vllm-sm90", "unknown quantization preset 'fp9'"),
    ],
)
def test_refusals_are_one_sentence(preset: str, profile: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        load_recipe_for(preset, profile)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("correction", ["head_scales", "temperature"])
def test_corrections_of_attention_are_refused_as_those_of_layers_are(correction: str) -> None:
    attention = attention_rule({"queries": "int8-token", correction: "fitted"})
    recipe = replace(load_recipe("fp8"), attention=attention)
    with pytest.raises(ValueError, match="profile vllm-sm90 has no fitted head scales or temperatures"):
        resolve(recipe, profile_named("vllm-sm90"))
    assert resolve(recipe, profile_named("plain+exact")).attention == attention


def test_rules_of_a_file_can_name_the_treatment_and_the_experts(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text('rules: [{modules: "*.layers.*", weights: nvfp4, at_load: marlin, within: experts}]')
    assert load_recipe(str(path)).rules == (Rule("*.layers.*", "nvfp4", within="experts", at_load="marlin"),)
    for entry, complaint in (("weights: mxfp4-even, at_load: marlin", "belongs to NVFP4 weights"),
                             ("weights: fp8-channel, at_load: requantize-ue8m0", "blocks of 128 x 128"),
                             ("weights: nvfp4, at_load: marlyn", "did you mean 'marlin'")):  # fmt: skip
        path.write_text(f'rules: [{{modules: "*", {entry}}}]')
        with pytest.raises(ValueError, match=complaint):
            load_recipe(str(path))


def test_what_engines_do_at_load_is_not_written_to_checkpoints() -> None:
    with pytest.raises(ValueError, match="marlin is what an engine does at load"):
        check_has_layout(load_recipe_for("nvfp4", "vllm-sm90"))


def marlin_scale(byte: int, factor: float) -> float:
    """vLLM's order: the scale times ``sf`` and 2^7 in half precision, what is below 2 becomes 0, and back."""
    half = E4M3.decode(torch.tensor([byte], dtype=torch.uint8)).half() * factor * 128
    kept = torch.where(half < 2, torch.zeros_like(half), half)
    return (kept.float() / 128 / factor).item()


@pytest.mark.parametrize("largest", [0x7E, 0x78, 0x77, 0x40, 0x3F, 0x08, 0x01])
@pytest.mark.parametrize("served", [torch.bfloat16, torch.float16])
def test_marlin_zeroes_what_its_scales_cannot_hold(largest: int, served: torch.dtype) -> None:
    """Every E4M3 code up to the largest of the layer, subnormals included, as the scale of a block."""
    scale = E4M3.decode(torch.arange(largest + 1, dtype=torch.uint8))[None]
    values = torch.arange(1.0, 17.0).repeat(1, largest + 1) * scale.repeat_interleave(16, -1)
    (after,) = loaded([Quantized(values, torch.tensor(0.3), scale)], "marlin", served)
    factor = 2.0 ** math.floor(math.log2(448 / scale.max().item())) if served == torch.bfloat16 else 1.0
    wanted = torch.tensor([[marlin_scale(byte, factor) for byte in range(largest + 1)]])
    assert torch.equal(after.scale, wanted)
    assert torch.equal(after.values, torch.arange(1.0, 17.0).repeat(1, largest + 1) * wanted.repeat_interleave(16, -1))
    assert after.outer is not None and after.outer.item() == pytest.approx(0.3)
    if largest == 0x7E:
        assert int((after.scale == 0).sum()) == 8, "zero and all seven subnormal codes"


def test_fused_layers_share_marlins_factor_and_zeros_have_one() -> None:
    small, large = torch.tensor([[2.0**-7]]), torch.tensor([[448.0]])
    values = torch.ones(1, 16)
    alone, beside = (
        loaded([Quantized(values * s, None, s) for s in scales], "marlin", torch.bfloat16)[0]
        for scales in ([small], [small, large])
    )
    assert torch.equal(alone.scale, small)
    assert beside.scale.item() == 0 and not beside.values.any()
    assert marlin_factor([torch.zeros(2, 2)]) == 1


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**16))
def test_requantized_blocks_have_power_of_two_scales_and_lie_near(seed: int) -> None:
    w = torch.randn(130, 140, generator=torch.Generator().manual_seed(seed)) * 0.02
    q = quantize(w, FP8_BLOCK)
    (after,) = loaded([q], "requantize-ue8m0", torch.bfloat16)
    assert after.outer is not None
    assert torch.equal(torch.frexp(after.outer).mantissa, torch.full_like(after.outer, 0.5))
    assert torch.equal(dequantize(after), dequantize(quantize(dequantize(q), FP8_BLOCK_UE8M0)))
    step = after.outer.repeat_interleave(128, -1)[:, :140] * 16
    assert ((dequantize(after) - dequantize(q)).abs() <= step).all()


@pytest.mark.parametrize("data", ["w_f32", "w_bf16"])
def test_requantization_is_the_engines_block_cast(shared: Path, data: str) -> None:
    golden = load_file(shared / "golden" / "fp8.safetensors")
    w = golden[f"in/{data}"]
    decoded = Quantized(w, torch.ones(len(w), 2), torch.ones(1, 2), 128)
    (after,) = loaded([decoded], "requantize-ue8m0", torch.bfloat16)
    assert torch.equal(after.values, golden[f"vllm_per_block_cast_ue8m0/{data}/data"].view(torch.float8_e4m3fn).float())
    assert torch.equal(after.scale, golden[f"vllm_per_block_cast_ue8m0/{data}/scale"])


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("profiles") / "plain", **SIZES)


def serve(folder: Path, profile: str, preset: str = "auto", dtype: torch.dtype = torch.float32) -> LowBitTarget:
    return load_target(str(folder), load_recipe_for(preset, profile), dtype=dtype, compile_quantizer="off")


def layers(target: LowBitTarget) -> dict[str, LowBitLinear]:
    return {name: m for name, m in target.model.named_modules() if isinstance(m, LowBitLinear)}


def test_a_stored_nvfp4_checkpoint_on_hopper_is_weight_only_and_flushed(plain_folder: Path, tmp_path: Path) -> None:
    folder, _ = store(plain_folder, tmp_path / "stored", "ct-nvfp4")
    plain, hopper = serve(folder, "plain"), serve(folder, "vllm-sm90")
    assert hopper.recipe.name == "auto@vllm-sm90"
    assert hopper.recipe.fingerprint != plain.recipe.fingerprint
    assert hopper.fingerprint == plain.fingerprint, "the stored bytes are the same"
    assert hopper.applied.summary().startswith(
        "profile vllm-sm90: nvfp4: inputs in 16 bit instead of nvfp4-kernel, weights marlin at load\n"
    )
    stored, flushed = load_file(folder / "model.safetensors"), 0
    for name, layer in layers(hopper).items():
        assert layer.activations is None and layer.input_global_scale is None
        before = layers(plain)[name]
        scale = stored[f"{name}.weight_scale"].float()  # random codes: E4M3's top binade is there, so sf = 1
        small = (scale < 2.0**-6).repeat_interleave(16, -1)
        assert torch.equal(layer.weight, before.weight.masked_fill(small, 0))
        flushed += int((small & (before.weight != 0)).sum())
    assert flushed > 100
    ids = torch.arange(9)[None]
    assert not torch.equal(hopper.states(ids).last_hidden, plain.states(ids).last_hidden)


def test_a_stored_block_fp8_checkpoint_on_blackwell_is_requantized(plain_folder: Path, tmp_path: Path) -> None:
    folder, expected = store(plain_folder, tmp_path / "stored", "fp8-fine-grained")
    target = serve(folder, "vllm-sm100")
    for name, layer in layers(target).items():
        assert layer.activations is not None and layer.activations.name == "fp8-group128-ue8m0"
        assert torch.equal(layer.dequantized(), dequantize(quantize(expected[name], FP8_BLOCK_UE8M0)))
    hopper = serve(folder, "vllm-sm90")
    assert all(torch.equal(layer.dequantized(), expected[name]) for name, layer in layers(hopper).items())


@pytest.mark.parametrize(
    ("kind", "profile", "inputs"),
    [
        ("ct-fp8-channel", "sglang-sm90", "fp8-token-sglang"),
        ("ct-fp8-tensor-static", "vllm-sm90", "fp8-tensor-static"),
        ("ct-fp8-tensor-static", "vllm-sm80", None),
        ("ct-mxfp4", "vllm-sm90", None),
        ("ct-int4", "vllm-sm90", None),
    ],
)
def test_stored_checkpoints_follow_the_table(
    plain_folder: Path, tmp_path: Path, kind: str, profile: str, inputs: str | None
) -> None:
    target = serve(store(plain_folder, tmp_path / "stored", kind)[0], profile)
    assert {None if m.activations is None else m.activations.name for m in layers(target).values()} == {inputs}
    assert target.states(torch.arange(9)[None]).last_hidden.isfinite().all()


def test_a_stored_checkpoint_that_the_engine_does_not_serve_is_refused(plain_folder: Path, tmp_path: Path) -> None:
    folder, _ = store(plain_folder, tmp_path / "stored", "ct-mxfp4")
    with pytest.raises(ValueError, match=r"layer model\.layers\.0\.\S+: profile sglang-sm90, .* experts only"):
        serve(folder, "sglang-sm90")


def test_stored_experts_are_flushed_with_the_scales_of_both_halves(tmp_path: Path) -> None:
    folder, expected = store(save_mixture(tmp_path / "plain", "qwen3-moe"), tmp_path / "stored", "ct-nvfp4")
    stored, target = load_file(folder / "model.safetensors"), serve(folder, "vllm-sm90")
    for number in range(4):
        halves = [f"{EXPERTS}.{number}.{part}_proj" for part in ("gate", "up")]
        small = torch.cat([stored[f"{h}.weight_scale"].float() for h in halves]) < 2.0**-6
        wanted = torch.cat([expected[h] for h in halves]).masked_fill(small.repeat_interleave(16, -1), 0)
        layer = layers(target)[f"{EXPERTS}.gate_up_proj.{number}"]
        assert torch.equal(layer.dequantized(), wanted)


def test_dense_layers_and_experts_of_one_model_part_on_blackwell(tmp_path: Path) -> None:
    plain = save_mixture(tmp_path / "plain", "qwen3-moe")
    for target in (
        serve(plain, "vllm-sm100", "mxfp4a4"),
        serve(store(plain, tmp_path / "stored", "ct-mxfp4")[0], "vllm-sm100"),
    ):
        names = {n: m.activations.name for n, m in layers(target).items() if m.activations is not None}
        assert {a for n, a in names.items() if ".experts." in n} == {"mxfp4-even"}
        assert {a for n, a in names.items() if ".experts." not in n} == {"mxfp4-rceil"}
        assert len(names) == 4 + 8


def test_weights_quantized_here_are_treated_like_stored_ones(plain_folder: Path) -> None:
    whole, hopper = serve(plain_folder, "plain", "nvfp4a16"), serve(plain_folder, "vllm-sm90", "nvfp4")
    assert all(m.activations is None for m in layers(hopper).values())
    assert "weights nvfp4 (marlin at load)" in hopper.applied.summary()
    blackwell = serve(plain_folder, "vllm-sm100", "fp8-block")
    for name, layer in layers(serve(plain_folder, "plain", "fp8-block")).items():
        after = layers(blackwell)[name]
        assert torch.equal(after.dequantized(), dequantize(quantize(layer.dequantized(), FP8_BLOCK_UE8M0)))
        assert torch.equal(layers(hopper)[name].weight, layers(whole)[name].weight), "Gaussian blocks have large scales"


def sample(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("weights", "inputs"), [(FP8_CHANNEL, FP8_TOKEN), (NVFP4, NVFP4_KERNEL), (NVFP4, None)])
def test_the_exact_product_is_rounded_once(weights: object, inputs: object) -> None:
    linear = nn.Linear(128, 96, bias=False, dtype=torch.bfloat16)
    linear.weight.data = sample(0, 96, 128).bfloat16()
    x = sample(1, 64, 128).bfloat16()
    scale = torch.tensor(500.0) if inputs == NVFP4_KERNEL else None
    layer = LowBitLinear(linear, weights, inputs, ActivationQuantizer(False), input_global_scale=scale)  # type: ignore[arg-type]
    fast = layer(x)
    layer.exact_product = True
    exact = layer(x)
    x_hat = x.double() if inputs is None else dequantize(quantize(x, inputs, global_scale=scale)).double()  # type: ignore[arg-type]
    oracle = x_hat @ layer.dequantized().double().T
    half_ulp = 2.0 ** (torch.frexp(oracle).exponent - 9)
    assert ((exact.double() - oracle).abs() <= half_ulp * (1 + 1e-3)).all(), "nearest, but for fp32's own rounding"
    assert exact.dtype == fast.dtype == torch.bfloat16
    assert 0.05 < (exact != fast).float().mean() < 0.6


def test_the_exact_order_is_a_suffix_and_part_of_the_fingerprint(plain_folder: Path) -> None:
    fast, exact = (serve(plain_folder, p, "fp8", torch.bfloat16) for p in ("plain", "plain+exact"))
    assert all(m.exact_product for m in layers(exact).values())
    assert not any(m.exact_product for m in layers(fast).values())
    assert exact.recipe.fingerprint != fast.recipe.fingerprint
    assert exact.recipe.name == "fp8@plain+exact"
    assert "products rounded once" in exact.recipe.computed_by
    ids = torch.arange(9)[None]
    assert not torch.equal(exact.states(ids).last_hidden, fast.states(ids).last_hidden)


def test_auto_remembers_the_profile_until_the_checkpoint_is_read() -> None:
    for name in ("auto", "auto+kvfp8"):
        recipe = load_recipe_for(name, "vllm-sm90")
        assert recipe.is_auto and recipe.profile == "vllm-sm90" and recipe.rules == AUTO.rules


def test_a_stored_checkpoint_says_that_its_products_are_exact(plain_folder: Path, tmp_path: Path) -> None:
    folder, _ = store(plain_folder, tmp_path / "stored", "ct-fp8-channel")
    assert serve(folder, "plain+exact").applied.summary().startswith("profile plain+exact: products rounded once\n")
    assert "profile" not in serve(folder, "plain").applied.summary()
