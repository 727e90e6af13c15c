"""Applying a recipe: which layers change, what they share, and what is refused by name."""

from collections.abc import Callable

import pytest
import torch
from tiny import tiny_config
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from bitdraft.quant.apply import apply_recipe
from bitdraft.quant.block import quantize
from bitdraft.quant.linear import LowBitLinear
from bitdraft.quant.presets import PRESETS, load_recipe
from bitdraft.quant.recipe import Recipe, Rule
from bitdraft.quant.schemes import NVFP4

IN_GROUPS_OF_128 = ("fp8-block", "w4a16")
LOW_BIT = [name for name in PRESETS if name not in ("none", *IN_GROUPS_OF_128)]
CALIBRATION = [torch.arange(20)[None], torch.arange(40, 90)[None]]
PER_LAYER = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
]


def tiny_model(layers: int = 2, seed: int = 0, **changes: object) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_config(num_hidden_layers=layers, **changes))
    return model.eval().requires_grad_(False)


def tiny_mixture() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
        )
    ).requires_grad_(False)


def layer_of(model: nn.Module, name: str) -> LowBitLinear:
    layer = model.get_submodule(name)
    assert isinstance(layer, LowBitLinear)
    return layer


@pytest.mark.parametrize("preset", LOW_BIT)
def test_a_preset_quantizes_every_linear_layer_of_the_decoder_and_nothing_else(preset: str) -> None:
    model, untouched = tiny_model(), tiny_model()
    applied = apply_recipe(model, load_recipe(preset), compiled=False, calibration=CALIBRATION)
    expected = {f"model.layers.{i}.{name}" for i in range(2) for name in PER_LAYER}
    assert set(applied.quantized) == expected
    assert {n.removesuffix(".layer") for n, m in model.named_modules() if isinstance(m, LowBitLinear)} == expected
    assert set(applied.left_alone) == {"lm_head"}
    before = dict(untouched.named_parameters())
    for name, parameter in model.named_parameters():
        same = torch.equal(parameter, before[name.replace(".layer.weight", ".weight")])
        assert same != (name.removesuffix(".weight").removesuffix(".layer") in expected), name


@pytest.mark.parametrize("preset", IN_GROUPS_OF_128)
def test_presets_with_groups_of_128_need_widths_that_divide(preset: str) -> None:
    model = tiny_model(hidden_size=128, head_dim=32, intermediate_size=256)
    assert len(apply_recipe(model, load_recipe(preset), compiled=False).quantized) == 14
    assert torch.isfinite(model(input_ids=CALIBRATION[0]).logits).all()
    with pytest.raises(ValueError, match=r"q_proj: 64 columns do not divide into blocks of 128"):
        apply_recipe(tiny_model(), load_recipe(preset), compiled=False)


def test_the_preset_none_leaves_the_model_as_it_was() -> None:
    model, untouched = tiny_model(), tiny_model()
    applied = apply_recipe(model, load_recipe("none"), compiled=False)
    assert applied.quantized == {}
    assert len(applied.left_alone) == 2 * len(PER_LAYER) + 1
    for ours, original in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(ours, original)


class RoutedBlock(nn.Module):
    """The names under which mixtures of experts keep their routers and experts, as linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4)
        self.router = nn.Linear(32, 4)
        self.shared_expert_gate = nn.Linear(32, 1)
        self.experts = nn.ModuleList([nn.ModuleDict({"gate_proj": nn.Linear(32, 32)}) for _ in range(2)])


@pytest.mark.parametrize("preset", ["fp8", "mxfp4", "mxfp4a16", "mxfp4a4", "nvfp4a16"])
def test_routers_stay_and_experts_are_quantized(preset: str) -> None:
    decoder = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": RoutedBlock()})])})
    model = nn.ModuleDict({"model": decoder})
    applied = apply_recipe(model, load_recipe(preset), compiled=False)
    assert sorted(applied.quantized) == [f"model.layers.0.mlp.experts.{i}.gate_proj" for i in range(2)]
    routers = {f"model.layers.0.mlp.{name}" for name in ("gate", "router", "shared_expert_gate")}
    assert set(applied.left_alone) == routers


def test_the_summary_counts_layers_and_gives_reasons() -> None:
    applied = apply_recipe(tiny_model(), load_recipe("mxfp4"), compiled=False)
    assert applied.summary().splitlines() == [
        "14 linear layers: weights mxfp4-even, activations fp8-token",
        "left in high precision (no rule matches): lm_head",
    ]
    mixed = Recipe("mixed", (Rule("*.self_attn.*"), Rule("*.layers.*", "nvfp4")))
    text = apply_recipe(tiny_model(), mixed, compiled=False).summary()
    assert "6 linear layers: weights nvfp4, activations in high precision" in text
    assert "rule '*.self_attn.*'" in text
    assert "and 5 more" in text


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    recipe = Recipe("typo", (Rule("*.layers.*", "mxfp4-even"), Rule("*.mpl.*", "nvfp4")))
    with pytest.raises(ValueError, match=r"recipe 'typo': no linear layer matches the pattern '\*\.mpl\.\*'"):
        apply_recipe(tiny_model(), recipe, compiled=False)


def test_activations_without_weights_are_refused() -> None:
    recipe = Recipe("half", (Rule("*.mlp.*", None, "fp8-token"),))
    with pytest.raises(ValueError, match=r"recipe 'half', rule '\*\.mlp\.\*': activations without weights"):
        apply_recipe(tiny_model(), recipe, compiled=False)


@pytest.mark.parametrize("preset", ["mxfp4", "mxfp4a16", "mxfp4a4"])
def test_a_width_that_does_not_divide_is_refused_by_name(preset: str) -> None:
    model = tiny_model(hidden_size=48, num_attention_heads=3, num_key_value_heads=1)
    with pytest.raises(ValueError, match=r"module model\.layers\.0\.self_attn\.q_proj: 48 columns") as error:
        apply_recipe(model, load_recipe(preset), compiled=False)
    assert "blocks of 32" in str(error.value)


def test_the_width_is_checked_for_activations_too() -> None:
    model = tiny_model(hidden_size=48, num_attention_heads=3, num_key_value_heads=1)
    recipe = Recipe("mixed", (Rule("*.layers.*", "fp8-channel", "mxfp4-rceil"),))
    with pytest.raises(ValueError, match=r"q_proj: 48 columns do not divide .*mxfp4-rceil"):
        apply_recipe(model, recipe, compiled=False)


def test_a_width_of_48_fits_blocks_of_16() -> None:
    model = tiny_model(hidden_size=48, num_attention_heads=3, num_key_value_heads=1)
    assert len(apply_recipe(model, load_recipe("nvfp4a16"), compiled=False).quantized) == 14


def test_experts_in_one_tensor_may_be_left_alone_on_purpose() -> None:
    model = tiny_mixture()
    recipe = Recipe("attention", (Rule("*.experts"), *load_recipe("mxfp4").rules))
    applied = apply_recipe(model, recipe, compiled=False)
    assert sorted(applied.quantized) == [f"model.layers.0.self_attn.{x}_proj" for x in "koqv"]


@pytest.mark.parametrize("preset", ["fp8", "mxfp4", "nvfp4a16"])
def test_a_weight_with_nan_is_refused_by_name(preset: str) -> None:
    model = tiny_model()
    model.get_submodule("model.layers.1.mlp.up_proj").weight[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"module model\.layers\.1\.mlp\.up_proj: .*NaN or infinity"):
        apply_recipe(model, load_recipe(preset), compiled=False)


def test_static_scales_without_calibration_text_are_refused() -> None:
    with pytest.raises(ValueError, match="static activation scales and needs calibration text"):
        apply_recipe(tiny_model(), load_recipe("nvfp4"), compiled=False)


FUSED = [
    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    ["mlp.gate_proj", "mlp.up_proj"],
    ["self_attn.o_proj"],
    ["mlp.down_proj"],
]


def test_fused_layers_share_the_scale_of_their_largest_weight() -> None:
    model, original = tiny_model(), tiny_model()
    for number, (name, module) in enumerate(original.named_modules()):
        if isinstance(module, nn.Linear) and "layers" in name:
            for each in (original, model):
                each.get_submodule(name).weight.mul_(1 + number % 5)
    apply_recipe(model, load_recipe("nvfp4"), compiled=False, calibration=CALIBRATION)
    outers = set()
    for layer in ("model.layers.0.", "model.layers.1."):
        for group in FUSED:
            weights: list[Tensor] = [original.get_submodule(layer + n).weight for n in group]
            g = 2688 / torch.cat([w.flatten() for w in weights]).abs().amax()
            for name, weight in zip(group, weights, strict=True):
                ours, expected = layer_of(model, layer + name), quantize(weight, NVFP4, global_scale=g)
                assert ours.weight_outer is not None
                assert torch.equal(ours.weight_outer, 1 / g)
                assert torch.equal(ours.weight, expected.values)
            outers.add(g.item())
    assert len(outers) == 8, "groups differ from one another"


def test_fused_layers_share_one_measured_input_scale() -> None:
    """``2688 / amax`` over all the calibration text, seen by the unquantized model: measured here by hooks."""
    model, original = tiny_model(), tiny_model()
    largest: dict[str, float] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def hook(_module: nn.Module, args: tuple[Tensor]) -> None:
            largest[name] = max(largest.get(name, 0.0), args[0].abs().max().item())

        return hook

    for name, module in original.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(watch(name))
    for ids in CALIBRATION:
        original(input_ids=ids)
    apply_recipe(model, load_recipe("nvfp4"), compiled=False, calibration=CALIBRATION)
    for layer in ("model.layers.0.", "model.layers.1."):
        for group in FUSED:
            first, *others = [layer_of(model, layer + name).input_global_scale for name in group]
            assert first is not None
            assert all(scale is first for scale in others), "one object, so that the input is quantized once"
            assert first.item() == pytest.approx(2688 / largest[layer + group[0]], rel=1e-6)


@pytest.mark.parametrize("preset", LOW_BIT)
def test_no_parameter_of_the_low_bit_model_wants_a_gradient(preset: str) -> None:
    model = tiny_model()
    apply_recipe(model, load_recipe(preset), compiled=False, calibration=CALIBRATION)
    assert not any(p.requires_grad for p in model.parameters())
