"""Heads in low bit: what is written is what drafts, and what engines would compute otherwise is refused."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packs import outputs_at
from safetensors.torch import load_file, save_file
from tiny import save_tiny_target
from torch import Tensor, nn

from bitdraft.quant.block import dequantize, nvfp4_global_scale, quantize
from bitdraft.quant.checkpoints.stored import Formats
from bitdraft.quant.presets import PRESETS, load_recipe
from bitdraft.quant.profiles import profile_named
from bitdraft.quant.recipe import Recipe, Rule
from bitdraft.quant.schemes import scheme_named
from bitdraft.quant.target import LowBitTarget, load_target
from bitdraft.speculators.decode import generate
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.eagle3 import Eagle3Head
from bitdraft.speculators.export import export_head
from bitdraft.speculators.load import load_head
from bitdraft.speculators.low_bit import (
    head_quantization_config,
    low_bit_layers,
    low_bit_tensors,
    quantize_head,
    restore_low_bit,
)

LOADED = ["fp8", "nvfp4", "nvfp4a16", "mxfp4", "mxfp4a16", "mxfp4a4", "nvfp4-4over6"]
TEXT = [torch.arange(40)[None], torch.arange(60, 90)[None]]
LAYERS = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
MLP_ALONE = Recipe("mlp", (Rule("*.mlp.*", "mxfp4-even"),))
MIXED = Recipe("mixed", (Rule("*.mlp.*", "mxfp4-even"), Rule("*.self_attn.*", "fp8-channel", "fp8-token")))
Make = Callable[..., Eagle3Head]


@pytest.fixture
def head(make_eagle3: Make, rounded: LowBitTarget) -> Eagle3Head:
    """A head whose 16-bit weights are exact in bf16, so that an export loses nothing of them."""
    head = make_eagle3(rounded, size=96).placed(rounded.device, torch.bfloat16).placed(rounded.device, torch.float32)
    assert isinstance(head, Eagle3Head)
    return head


def low_bit(head: Eagle3Head, target: LowBitTarget, recipe: str | Recipe, **more: Any) -> Eagle3Head:
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    done = quantize_head(copy.deepcopy(head), recipe, target=target, calibration=TEXT, **more)
    assert isinstance(done, Eagle3Head)
    return done.eval().requires_grad_(False)


def outputs(head: Eagle3Head, target: LowBitTarget) -> Tensor:
    ids = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(3))
    rows = torch.arange(12).expand(2, -1)
    with torch.no_grad():
        vectors = outputs_at(head, target.states(ids, capture=head.capture_layers), ids, rows)
        return vectors @ head.output_weight.T


def fresh(make_eagle3: Make, target: LowBitTarget) -> Eagle3Head:
    return make_eagle3(target, size=96, seed=9)


def files(head: Eagle3Head) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and weights as a layout writes them."""
    names = {f"{name}.weight" for name in low_bit_layers(head)}
    weights = {n: w.clone() for n, w in head.state_dict().items() if n.rpartition(".")[0] not in low_bit_layers(head)}
    assert names.isdisjoint(weights)
    return {"quantization_config": head_quantization_config(head, str)}, {**weights, **low_bit_tensors(head)}


@pytest.mark.parametrize("name", LOADED)
def test_presets_name_the_decoder_layer_alone(head: Eagle3Head, rounded: LowBitTarget, name: str) -> None:
    done = low_bit(head, rounded, name)
    assert set(low_bit_layers(done)) == {f"layers.0.{layer}" for layer in LAYERS}
    assert isinstance(done.fc, nn.Linear) and isinstance(done.lm_head, nn.Linear)
    rule = PRESETS[name].rules[-1]
    assert rule.weights is not None
    formats = {layer.formats for layer in low_bit_layers(done).values()}
    assert formats == {Formats(rule.weights, rule.activations)}
    assert not torch.equal(outputs(done, rounded), outputs(head, rounded))


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4a16"])
def test_fused_layers_share_their_global_scales(head: Eagle3Head, rounded: LowBitTarget, name: str) -> None:
    """The weight of q, k and v is quantized as one matrix, written here the slow way."""
    done = low_bit(head, rounded, name)
    for leaves in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        weights = [head.layer.get_parameter(f"{leaf}.weight").detach() for leaf in leaves]
        shared = nvfp4_global_scale(torch.cat(weights).abs().amax())
        for leaf, weight in zip(leaves, weights, strict=True):
            layer = low_bit_layers(done)[f"layers.0.{leaf}"]
            expected = dequantize(quantize(weight, scheme_named("nvfp4"), global_scale=shared))
            assert torch.equal(layer.dequantized(), expected)
            assert 1.0 / layer.stored["weight_global_scale"] == 1.0 / shared


def test_static_input_scales_come_from_what_the_head_reads(head: Eagle3Head, rounded: LowBitTarget) -> None:
    seen: dict[str, Tensor] = {}
    handles = []
    for name in LAYERS:

        def note(_module: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
            seen[name] = torch.maximum(seen.get(name, torch.zeros(())), args[0].abs().amax())

        handles.append(head.layer.get_submodule(name).register_forward_pre_hook(note))
    with torch.no_grad():
        for ids in TEXT:
            rows = torch.arange(ids.shape[1] - head.config.steps)[None]
            outputs_at(head, rounded.states(ids, capture=head.capture_layers), ids, rows)
    for handle in handles:
        handle.remove()
    seen["self_attn.q_proj"] = torch.maximum(seen["self_attn.q_proj"], seen["self_attn.k_proj"])  # keys see every row
    seen["self_attn.k_proj"] = seen["self_attn.v_proj"] = seen["self_attn.q_proj"]
    layers = low_bit_layers(low_bit(head, rounded, "nvfp4"))
    for name in LAYERS:
        scale = layers[f"layers.0.{name}"].input_global_scale
        assert scale is not None
        assert torch.equal(scale, nvfp4_global_scale(seen[name])), name


@pytest.mark.parametrize("recipe", [*LOADED, MLP_ALONE, MIXED], ids=str)
def test_what_is_stored_drafts_the_same_bits(
    head: Eagle3Head, make_eagle3: Make, rounded: LowBitTarget, recipe: str | Recipe
) -> None:
    done = low_bit(head, rounded, recipe)
    config, weights = files(done)
    again = fresh(make_eagle3, rounded)
    restore_low_bit(again, config, weights)
    again.load_state_dict(weights)
    assert torch.equal(outputs(done, rounded), outputs(again, rounded))
    assert not torch.equal(outputs(done, rounded), outputs(head, rounded))
    second, third = low_bit_tensors(done), low_bit_tensors(again)
    assert second.keys() == third.keys()
    assert all(torch.equal(second[n].view(torch.uint8), third[n].view(torch.uint8)) for n in second)
    assert head_quantization_config(again, str) == config["quantization_config"]


def test_blocks_over_rows_stay_within_fused_layers(make_eagle3: Make, tmp_path: Path) -> None:
    def wide(heads: int) -> LowBitTarget:
        shape = {"hidden_size": 128, "head_dim": 32, "num_key_value_heads": heads}
        folder = save_tiny_target(tmp_path / str(heads), num_hidden_layers=3, **shape)
        return load_target(str(folder), load_recipe("none"), dtype=torch.float32, compile_quantizer="off")

    narrow = wide(2)
    with pytest.raises(ValueError, match=r"k_proj: 64 rows do not divide into blocks of 128 .* take fp8, with a scale"):
        low_bit(make_eagle3(narrow, size=96), narrow, "fp8-block")
    target = wide(4)
    done = low_bit(make_eagle3(target, size=96), target, "fp8-block")
    config, weights = files(done)
    assert list(weights["layers.0.self_attn.q_proj.weight_scale"].shape) == [1, 2]
    again = fresh(make_eagle3, target)
    restore_low_bit(again, config, weights)
    again.load_state_dict(weights)
    assert torch.equal(outputs(done, target), outputs(again, target))


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *(("eagle3-speculators", name) for name in ("fp8", "nvfp4", "mxfp4")),
        *(("eagle3-original", name) for name in ("fp8", "nvfp4")),
    ],
)
def test_exports_load_back_in_every_layout(
    head: Eagle3Head, rounded: LowBitTarget, tmp_path: Path, prompts: list[list[int]], name: str, layout: str
) -> None:
    done = low_bit(head, rounded, name)
    export_head(done, rounded, tmp_path / "out", draft_length=3, layout=layout)
    again = load_head(tmp_path / "out", rounded)
    assert isinstance(again, Eagle3Head)
    assert torch.equal(outputs(done, rounded), outputs(again, rounded))
    drafts = [
        generate(
            rounded, drafter, prompts[:3], plan=DraftPlan(length=3), max_new_tokens=6, end_ids=set(), batch_size=3
        )[0]
        for drafter in (done, again)
    ]
    assert [g.tokens for g in drafts[0]] == [g.tokens for g in drafts[1]]
    assert [g.counts for g in drafts[0]] == [g.counts for g in drafts[1]]
    declared = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert declared["quant_method"] == "compressed-tensors"


def test_tensors_are_those_that_engines_ask_for(head: Eagle3Head, rounded: LowBitTarget) -> None:
    """Names, types and shapes as vLLM 0.32's schemes create them; 64 rows of 128 inputs."""
    layer = "layers.0.self_attn.q_proj"
    fp8, uint8, fp32 = torch.float8_e4m3fn, torch.uint8, torch.float32
    for name, expected in {
        "fp8": {"weight": (fp8, [64, 128]), "weight_scale": (fp32, [64, 1])},
        "mxfp4": {"weight_packed": (uint8, [64, 64]), "weight_scale": (uint8, [64, 4])},
        "nvfp4": {
            "weight_packed": (uint8, [64, 64]),
            "weight_scale": (fp8, [64, 8]),
            "weight_global_scale": (fp32, [1]),
            "input_global_scale": (fp32, [1]),
        },
    }.items():
        tensors = low_bit_tensors(low_bit(head, rounded, name))
        found = {n.removeprefix(f"{layer}."): (t.dtype, list(t.shape)) for n, t in tensors.items() if layer in n}
        assert found == expected


def matched(declared: dict[str, Any], layer: str, kind: str) -> dict[str, Any] | None:
    """The group that vLLM 0.32 takes for a draft's layer, whose fused names it does not take apart.

    Ignored names first; then targets by name; then targets that occur in the name of the class.
    """

    def named(pattern: str) -> bool:
        return bool(re.match(pattern[3:], layer)) if pattern.startswith("re:") else pattern == layer

    if any(named(pattern) for pattern in declared["ignore"]):
        return None
    groups = [(target, group) for group in declared["config_groups"].values() for target in group["targets"]]
    by_name = [group for target, group in groups if named(target)]
    by_class = [group for target, group in groups if target.lower() in kind.lower()]
    return next(iter(by_name + by_class), None)


@pytest.mark.parametrize("recipe", ["fp8", MLP_ALONE, MIXED], ids=str)
def test_engines_find_every_layer_under_their_own_names(
    head: Eagle3Head, rounded: LowBitTarget, recipe: str | Recipe
) -> None:
    done = low_bit(head, rounded, recipe)
    declared = head_quantization_config(done, lambda name: name.replace("layers.0", "midlayer"))
    attention, mlp = ("fp8-channel" if recipe != MLP_ALONE else None), ("mxfp4-even" if recipe != "fp8" else "fp8")
    vllm = {
        "model.layers.30.self_attn.qkv_proj": attention,
        "model.layers.30.qkv_proj": attention,  # Qwen3's draft
        "model.layers.30.self_attn.o_proj": attention,
        "model.layers.30.mlp.gate_up_proj": mlp,
        "model.layers.30.mlp.down_proj": mlp,
        "model.midlayers.0.gate_up_proj": mlp,  # SGLang
    }
    for layer, weights in vllm.items():
        group = matched(declared, layer, "QKVParallelLinear")
        assert (group is None) == (weights is None), layer
        bits = {"mxfp4-even": 4}.get(weights or "", 8)
        assert group is None or group["weights"]["num_bits"] == bits, layer
    assert matched(declared, "model.fc", "ReplicatedLinear") is None
    assert matched(declared, "lm_head", "ParallelLMHead") is None
    assert {"fc", "lm_head"} <= set(declared["ignore"])


def test_a_profile_decides_what_is_computed_and_not_what_is_declared(head: Eagle3Head, rounded: LowBitTarget) -> None:
    plain = low_bit(head, rounded, "nvfp4")
    hopper = low_bit(head, rounded, "nvfp4", profile=profile_named("vllm-sm90+exact"))
    layer = low_bit_layers(hopper)["layers.0.mlp.down_proj"]
    assert layer.activations is None and layer.input_global_scale is None and layer.exact_product
    assert layer.formats == Formats("nvfp4", "nvfp4-kernel")
    a, b = low_bit_tensors(plain), low_bit_tensors(hopper)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)
    with pytest.raises(ValueError, match=r"layer layers\.0\.\S+: profile vllm-cpu, .*vLLM on CPU has no kernel for it"):
        low_bit(head, rounded, "mxfp4a16", profile=profile_named("vllm-cpu"))


def test_bf16_heads_draft_from_the_same_codes(head: Eagle3Head, rounded: LowBitTarget) -> None:
    done = low_bit(head, rounded, "fp8")
    before = {name: layer.dequantized() for name, layer in low_bit_layers(done).items()}
    done.placed(torch.device("cpu"), torch.bfloat16)
    assert all(torch.equal(layer.dequantized(), before[name]) for name, layer in low_bit_layers(done).items())


def damage(config: dict[str, Any], weights: dict[str, Tensor], how: str) -> None:
    layer, declared = "layers.0.mlp.down_proj", config["quantization_config"]
    if how.startswith("without "):
        del weights[f"{layer}.{how.removeprefix('without ')}"]
    elif how.startswith("cut "):
        name = f"{layer}.{how.removeprefix('cut ')}"
        weights[name] = weights[name][:-1].clone()
    elif how == "only a 16-bit weight":
        for name in [n for n in weights if n.startswith(f"{layer}.")]:
            del weights[name]
        weights[f"{layer}.weight"] = torch.zeros(64, 128, dtype=torch.bfloat16)
    elif how == "nothing declared":
        del config["quantization_config"]
    elif how == "another method":
        declared["quant_method"] = "gptq"
    elif how == "a list":
        config["quantization_config"] = ["fp8"]
    elif how == "no groups":
        declared["config_groups"] = {}
    elif how == "layer ignored":
        declared["ignore"].append("re:.*down_proj$")
    elif how == "fused unlike":
        weights["layers.0.self_attn.k_proj.weight_global_scale"] *= 2
    elif how == "inputs unlike":
        weights["layers.0.mlp.up_proj.input_global_scale"] *= 2
    elif how == "not finite":
        weights[f"{layer}.weight_global_scale"] *= torch.nan
    elif how == "fp8 cache":
        declared["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True}
    elif how == "low-bit output head":
        declared["ignore"] = ["re:.*fc$"]
        weights["lm_head.weight_scale"] = torch.ones(96, 4)
    else:
        raise AssertionError(how)


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ("without weight_scale", r"tensor layers\.0\.mlp\.down_proj\.weight_scale is missing"),
        ("without weight_packed", r"tensor layers\.0\.mlp\.down_proj\.weight_packed is missing"),
        ("without weight_global_scale", r"down_proj\.weight_global_scale is missing"),
        ("without input_global_scale", r"down_proj\.input_global_scale is missing"),
        ("cut weight_scale", r"down_proj\.weight_scale has shape \[63, 8\], where \[64, 8\] is needed"),
        ("cut weight_packed", r"down_proj\.weight\S* has shape \[6\d, \d+\], where"),
        ("only a 16-bit weight", r"declares layers\.0\.mlp\.down_proj quantized, but there are no codes and scales"),
        ("nothing declared", r"tensor layers\.0\.\S+ belongs to a low-bit layer, but config\.json has no quantization"),
        ("another method", "a quantization_config of 'gptq' is not read for heads"),
        ("a list", "a quantization_config of 'list' is not read for heads"),
        ("no groups", "has no config_groups"),
        ("layer ignored", r"down_proj\.\S+ belongs to a low-bit layer, but config\.json does not declare this layer"),
        ("fused unlike", r"q_proj and \S+k_proj have different global scales, but engines fuse them"),
        ("inputs unlike", r"gate_proj and \S+up_proj have different global scales"),
        ("not finite", r"down_proj\.weight_global_scale is not one positive number"),
        ("fp8 cache", "asks for an FP8 KV cache"),
        ("low-bit output head", "output head lm_head is quantized"),
    ],
)
def test_damaged_files_are_refused(
    head: Eagle3Head, make_eagle3: Make, rounded: LowBitTarget, how: str, complaint: str
) -> None:
    config, weights = files(low_bit(head, rounded, "nvfp4"))
    damage(config, weights, how)
    with pytest.raises(ValueError, match=complaint):
        restore_low_bit(fresh(make_eagle3, rounded), config, weights)


def test_layers_that_engines_fuse_are_low_bit_together(
    head: Eagle3Head, make_eagle3: Make, rounded: LowBitTarget
) -> None:
    config, weights = files(low_bit(head, rounded, "fp8"))
    config["quantization_config"]["ignore"].append(r"re:.*\.up_proj$")
    del weights["layers.0.mlp.up_proj.weight_scale"]
    weights["layers.0.mlp.up_proj.weight"] = weights["layers.0.mlp.up_proj.weight"].float()
    with pytest.raises(ValueError, match=r"gate_proj and \S+up_proj are in different formats, which engines cannot"):
        restore_low_bit(fresh(make_eagle3, rounded), config, weights)


def test_a_missing_scale_is_refused_from_a_folder(head: Eagle3Head, rounded: LowBitTarget, tmp_path: Path) -> None:
    export_head(low_bit(head, rounded, "fp8"), rounded, tmp_path / "out", draft_length=3)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    del weights["layers.0.mlp.up_proj.weight_scale"]
    save_file(weights, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"out: tensor layers\.0\.mlp\.up_proj\.weight_scale is missing"):
        load_head(tmp_path / "out", rounded)


def test_a_head_in_16_bit_is_left_as_it_is(head: Eagle3Head, make_eagle3: Make, rounded: LowBitTarget) -> None:
    weights = dict(head.state_dict())
    before = dict(weights)
    again = fresh(make_eagle3, rounded)
    restore_low_bit(again, {}, weights)
    assert weights == before
    assert low_bit_layers(again) == {}
    assert low_bit_tensors(again) == {}


@pytest.mark.parametrize(
    ("recipe", "complaint"),
    [
        (
            "w4a16",
            r"int4-g128 has no compressed-tensors layout .*\(presets that engines load for heads: fp8, .*mxfp4a4",
        ),
        ("mxfp8", "mxfp8-rceil has no compressed-tensors layout"),
        ("none", "quantizes nothing"),
        ("fp8+kvfp8", "without the formats of the KV cache"),
        ("mxfp4a4-hadamard", "no place here for the hadamard transform"),
        ("nvfp4a16-gptq", r"heads are rounded to nearest, not by gptq-act-order \(presets"),
        (
            Recipe("x", (Rule("*", "fp8-channel", "fp8-token"),)),
            r"fc of a head stays in 16 bit: put '\*\.fc' on",
        ),
        (Recipe("x", (Rule("*.lm_head", "fp8-channel", "fp8-token"),)), "lm_head of a head stays in 16 bit"),
        (Recipe("x", (Rule("*.q_proj", "mxfp4-even"),)), r"engines fuse model\.\S+q_proj and \S+k_proj, so one rule"),
        (Recipe("x", (Rule("*.mlp.*", "mxfp4-even", "mxfp4-even"),)), "take mxfp4-rceil"),
        (Recipe("x", (Rule("*.attention.*", "mxfp4-even"),)), "no linear layer matches the pattern"),
    ],
)
def test_recipes_that_no_engine_loads_are_refused(
    head: Eagle3Head, rounded: LowBitTarget, recipe: str | Recipe, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        low_bit(head, rounded, recipe)


def test_medusa_heads_stay_in_16_bit(make_medusa: Callable[..., Any], rounded: LowBitTarget) -> None:
    medusa = make_medusa(rounded, heads=2)
    with pytest.raises(ValueError, match=r"a low-bit medusa head is loaded by no engine .* an eagle3 head"):
        quantize_head(medusa, load_recipe("fp8"))
    with pytest.raises(ValueError, match="a low-bit medusa head is loaded by no engine"):
        restore_low_bit(medusa, {"quantization_config": {"quant_method": "compressed-tensors"}}, {})


def test_calibration_twice_and_weights_that_are_not_finite(head: Eagle3Head, rounded: LowBitTarget) -> None:
    with pytest.raises(ValueError, match=r"recipe 'nvfp4' has static scales .* weight-only form \(nvfp4a16\)"):
        quantize_head(head, load_recipe("nvfp4"))
    assert low_bit_layers(head) == {}, "nothing is changed by halves"
    quantize_head(head, load_recipe("fp8"))
    with pytest.raises(ValueError, match="the head is in low bit already"):
        quantize_head(head, load_recipe("mxfp4a16"))


def test_weights_that_are_not_finite_are_named(head: Eagle3Head) -> None:
    head.layer.mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"module model\.layers\.0\.mlp\.up_proj: the weight holds NaN"):
        quantize_head(head, load_recipe("fp8"))
