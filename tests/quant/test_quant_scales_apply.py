"""Scale methods in a recipe: the layers get them, groups share them, the summary tells, and nonsense is refused."""

import pytest
import torch
from tiny import tiny_config
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from bitdraft.quant.apply import Applied, apply_recipe
from bitdraft.quant.linear import ActivationQuantizer, LowBitLinear
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recipe import Recipe, Rule
from bitdraft.quant.scales.methods import SCALE_METHODS, quantize_together, scale_method
from bitdraft.quant.scales.sweep import sweep
from bitdraft.quant.schemes import MXFP4_EVEN, NVFP4

FUSED = [
    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    ["mlp.gate_proj", "mlp.up_proj"],
    ["self_attn.o_proj"],
    ["mlp.down_proj"],
]


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(num_hidden_layers=1)).eval().requires_grad_(False)


def applied(rule: Rule) -> tuple[LlamaForCausalLM, Applied]:
    model = tiny_model()
    return model, apply_recipe(model, Recipe("r", (rule,)), compiled=False)


@pytest.mark.parametrize("name", list(SCALE_METHODS))
def test_every_layer_is_quantized_by_the_method_of_its_rule_and_groups_as_one(name: str) -> None:
    scheme = NVFP4 if SCALE_METHODS[name].fits(NVFP4) else MXFP4_EVEN
    model, _ = applied(Rule("*.layers.*", scheme.name, None, name))
    original = tiny_model()
    for group in FUSED:
        names = [f"model.layers.0.{leaf}" for leaf in group]
        weights: list[Tensor] = [original.get_parameter(f"{n}.weight") for n in names]
        expected = quantize_together(weights, scheme, scale_method(name, scheme))
        for module_name, q in zip(names, expected, strict=True):
            layer = model.get_submodule(module_name)
            assert isinstance(layer, LowBitLinear)
            assert torch.equal(layer.weight, q.values)
            assert (layer.weight_outer is None) == (q.outer is None)
            if layer.weight_outer is not None and q.outer is not None:
                assert torch.equal(layer.weight_outer, q.outer)


def test_a_layer_takes_over_a_weight_that_is_quantized_already() -> None:
    source = nn.Linear(32, 8)
    q = sweep(source.weight.detach(), NVFP4)
    layer = LowBitLinear(source, NVFP4, None, ActivationQuantizer(compiled=False), quantized=q)
    assert q.outer is not None and layer.weight_outer is not None
    assert torch.equal(layer.weight, q.values)
    assert torch.equal(layer.weight_outer, q.outer)
    plain = LowBitLinear(nn.Linear(32, 8), NVFP4, None, ActivationQuantizer(compiled=False))
    assert not torch.equal(layer.weight, plain.weight)


def test_the_summary_names_the_scales_and_the_share_of_fours_by_kind() -> None:
    model, done = applied(Rule("*.layers.*", "nvfp4", None, "four-over-six"))
    kinds = done.fours_by_kind()
    assert set(kinds) == {leaf.rpartition(".")[2] for group in FUSED for leaf in group}
    for kind, (four, blocks) in kinds.items():
        (layer,) = [m for n, m in model.named_modules() if n.endswith(kind) and isinstance(m, LowBitLinear)]
        assert blocks == layer.weight.numel() // 16
        assert 0.1 < four / blocks < 0.9
    text = done.summary().splitlines()
    assert text[0] == "7 linear layers: weights nvfp4 (four-over-six scales), activations in high precision"
    four, blocks = kinds["q_proj"]
    assert text[1].startswith("blocks scaled to 4 instead of 6: ")
    assert f"q_proj {four / blocks:.1%}" in text[1]


@pytest.mark.parametrize("name", ["amax", "sweep", "soar"])
def test_the_summary_is_silent_on_fours_where_no_one_chose(name: str) -> None:
    _, done = applied(Rule("*.layers.*", "nvfp4", None, name))
    assert done.fours == {}
    assert "instead of 6" not in done.summary()
    assert ("amax" in done.summary()) is False


def test_equal_kinds_of_several_layers_are_added_up() -> None:
    done = Applied({}, {}, ActivationQuantizer(compiled=False), {"a.0.q": (1, 4), "a.1.q": (2, 6), "a.0.k": (0, 3)})
    assert done.fours_by_kind() == {"q": (3, 10), "k": (0, 3)}
    assert "blocks scaled to 4 instead of 6: q 30.0%, k 0.0%" in done.summary()


@pytest.mark.parametrize("preset", ["nvfp4-4over6", "nvfp4-sweep", "nvfp4a16-4over6", "nvfp4a16-sweep"])
def test_the_presets_change_the_weights_and_nothing_else(preset: str) -> None:
    plain, better = tiny_model(), tiny_model()
    texts = [torch.arange(20)[None]]
    base = preset.partition("-")[0]
    apply_recipe(plain, load_recipe(base), compiled=False, calibration=texts)
    apply_recipe(better, load_recipe(preset), compiled=False, calibration=texts)
    for name, module in plain.named_modules():
        if isinstance(module, LowBitLinear):
            other = better.get_submodule(name)
            assert isinstance(other, LowBitLinear)
            assert not torch.equal(module.weight, other.weight)
            assert (module.activations, module.weights) == (other.activations, other.weights)
            if module.input_global_scale is not None and other.input_global_scale is not None:
                assert torch.equal(module.input_global_scale, other.input_global_scale)
            assert (module.input_global_scale is None) == (other.input_global_scale is None)


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        (
            Rule("*.mlp.*", "fp8-channel", None, "soar"),
            "scales 'soar' belong to NVFP4 weights .*, not to 'fp8-channel'",
        ),
        (Rule("*.mlp.*", "nvfp4", None, "sweeep"), "unknown scale method 'sweeep': did you mean 'sweep'"),
        (Rule("*.mlp.*", None, None, "sweep"), "scales 'sweep' need a format under 'weights'"),
    ],
)
def test_scales_that_make_no_sense_are_refused_by_rule(rule: Rule, complaint: str) -> None:
    with pytest.raises(ValueError, match=rf"recipe 'r', rule '\*\.mlp\.\*': {complaint}"):
        applied(rule)


@pytest.mark.parametrize("scales", ["four-over-six", "soar", "sweep"])
def test_a_weight_with_nan_is_refused_by_name(scales: str) -> None:
    model = tiny_model()
    model.get_parameter("model.layers.0.mlp.up_proj.weight")[3, 4] = torch.nan
    recipe = Recipe("r", (Rule("*.layers.*", "nvfp4", None, scales),))
    with pytest.raises(ValueError, match=r"module model\.layers\.0\.mlp\.up_proj: .*NaN or infinity"):
        apply_recipe(model, recipe, compiled=False)
