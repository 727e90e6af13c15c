"""Recipes that round by GPTQ or transform inputs: what lands in the model, in which order, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from bitdraft.quant.apply import apply_recipe
from bitdraft.quant.block import nvfp4_global_scale, quantize
from bitdraft.quant.calibrate import calibrate_layer_by_layer
from bitdraft.quant.experts import ExpertStack
from bitdraft.quant.gap import compare_weights
from bitdraft.quant.gptq import gptq_quantize, output_error
from bitdraft.quant.linear import LowBitLinear
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recipe import Recipe, Rule
from bitdraft.quant.scales.four_over_six import blocks_at_four, four_over_six
from bitdraft.quant.schemes import MXFP4_EVEN, MXFP4_RCEIL, NVFP4
from bitdraft.quant.transforms import TransformedInput, hadamard

CALIBRATION = [torch.randint(0, 320, (2, 48), generator=torch.Generator().manual_seed(i)) for i in range(6)]


def tiny_model(layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(num_hidden_layers=layers)).eval().requires_grad_(False)


def applied(rule: Rule, calibration: list[Tensor] = CALIBRATION, layers: int = 2) -> LlamaForCausalLM:
    model = tiny_model(layers)
    apply_recipe(model, Recipe("r", (rule,)), compiled=False, calibration=calibration)
    return model


def logits(model: nn.Module) -> Tensor:
    return model(input_ids=CALIBRATION[0]).logits


def low_bit(model: nn.Module, name: str) -> LowBitLinear:
    layer = model.get_submodule(name)
    assert isinstance(layer, LowBitLinear)
    return layer


def moments_of(layers: int) -> dict[str, Tensor]:
    """``E[x xᵀ]`` of every layer's inputs in the unquantized model."""
    found: dict[str, Tensor] = {}
    calibrate_layer_by_layer(tiny_model(layers), CALIBRATION, lambda name, _layer, h: found.update({name: h}))
    return found


@pytest.mark.parametrize(("weights", "scales"), [("nvfp4", "four-over-six"), ("nvfp4", "amax"), ("mxfp4-even", "amax")])
@pytest.mark.parametrize("rounding", ["gptq", "gptq-act-order"])
def test_gptq_rounds_each_weight_by_the_moments_of_its_inputs(weights: str, scales: str, rounding: str) -> None:
    """The first block transcribed: q, k and v under one global scale and one Hessian."""
    model, original, moments = applied(Rule("*.layers.*", weights, None, scales, rounding)), tiny_model(), moments_of(2)
    names = [f"model.layers.0.self_attn.{x}_proj" for x in "qkv"]
    together = [original.get_parameter(f"{n}.weight") for n in names]
    for name, weight in zip(names, together, strict=True):
        options: dict[str, Any] = {}
        if scales == "four-over-six":
            joint = four_over_six(torch.cat(together), NVFP4)
            assert joint.outer is not None
            rows = slice(sum(len(w) for w in together[: names.index(name)]), None)
            options = {"scales": joint.scale[rows][: len(weight)], "global_scale": 1 / joint.outer}
        elif weights == "nvfp4":
            options = {"global_scale": nvfp4_global_scale(torch.cat(together).abs().amax())}
        scheme = NVFP4 if weights == "nvfp4" else MXFP4_EVEN
        expected = gptq_quantize(weight, moments[name], scheme, act_order=rounding == "gptq-act-order", **options)
        ours = low_bit(model, name)
        assert torch.equal(ours.weight, expected.values)
        plain = quantize(weight, scheme, global_scale=options.get("global_scale"))
        assert not torch.equal(ours.weight, plain.values)


def test_gptq_loses_less_of_every_layer_s_output() -> None:
    nearest, compensated = (
        applied(Rule("*.layers.*", "mxfp4-even", rounding=r), layers=1) for r in ("nearest", "gptq")
    )
    original, moments = tiny_model(1), moments_of(1)
    for name, hessian in moments.items():
        weight = original.get_parameter(f"{name}.weight")
        plain, better = (
            output_error(weight, low_bit(model, name).dequantized(), hessian) for model in (nearest, compensated)
        )
        assert better < plain, name


def test_later_blocks_are_calibrated_on_what_the_earlier_ones_became() -> None:
    """The second block's weights change with the first block's format, though their own rule does not."""
    second = Rule("*.layers.1.*", "mxfp4-even", rounding="gptq")
    coarse, fine = tiny_model(), tiny_model()
    apply_recipe(
        coarse, Recipe("r", (Rule("*.layers.0.*", "mxfp4-even"), second)), compiled=False, calibration=CALIBRATION
    )
    apply_recipe(fine, Recipe("r", (Rule("*.layers.0.*"), second)), compiled=False, calibration=CALIBRATION)
    name = "model.layers.1.mlp.gate_proj.weight"
    assert not torch.equal(coarse.get_parameter(name), fine.get_parameter(name))


@pytest.mark.parametrize("transform", ["hadamard", "wush"])
def test_a_transformed_model_is_the_same_model_up_to_its_rounding(transform: str) -> None:
    """In 8 bit it is as near as without a transform; a fold that did not fit would leave nothing alike."""
    expected = logits(tiny_model())
    plain, turned = (
        logits(applied(Rule("*.layers.*", "mxfp8-rceil", "mxfp8-rceil", transform=t))) - expected
        for t in ("none", transform)
    )
    assert not torch.equal(turned, plain)
    assert turned.norm() < 1.5 * plain.norm() < 0.4 * expected.norm()


def test_inputs_are_rounded_behind_the_transform_and_weights_behind_its_inverse() -> None:
    model, original = applied(Rule("*.layers.*", "mxfp4-even", "mxfp4-rceil", transform="hadamard")), tiny_model()
    name = "model.layers.0.mlp.down_proj"
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    t = hadamard(32).float()
    turned_x = (x.unflatten(-1, (-1, 32)) @ t.T).flatten(-2)
    turned_w = (original.get_parameter(f"{name}.weight").unflatten(-1, (-1, 32)) @ torch.linalg.inv(t)).flatten(-2)
    expected = quantize(turned_x, MXFP4_RCEIL).values @ quantize(turned_w, MXFP4_EVEN).values.T
    torch.testing.assert_close(model.get_submodule(name)(x), expected, rtol=1e-4, atol=1e-5)


def test_static_scales_of_transformed_inputs_are_those_behind_the_transform() -> None:
    model = applied(Rule("*.layers.*", "nvfp4", "nvfp4-kernel", transform="hadamard"))
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        outer = model.get_submodule(name)
        assert isinstance(outer, TransformedInput)
        inner = outer.layer
        assert isinstance(inner, LowBitLinear)
        assert inner.activations is not None
        assert inner.activations.name == "nvfp4-kernel"
        scale = inner.input_global_scale
        assert scale is not None
        q_and_k = model.get_submodule(name.replace("q_proj", "k_proj"))
        assert isinstance(q_and_k, TransformedInput)
        assert q_and_k.layer.input_global_scale is scale
        # Measured before inputs were quantized: by now others come in, but of the same size.
        seen: list[Tensor] = []
        handle = outer.register_forward_pre_hook(lambda _m, args, seen=seen: seen.append(args[0]))
        for ids in CALIBRATION:
            model(input_ids=ids)
        handle.remove()
        largest = max(outer.transform.apply(x).abs().max().item() for x in seen)
        assert 2688 / scale.item() == pytest.approx(largest, rel=0.15)


def test_static_fp8_inputs_get_the_scale_of_the_largest_that_the_text_makes() -> None:
    model, original = applied(Rule("*.layers.*", "fp8-channel", "fp8-tensor-static")), tiny_model()
    name, seen = "model.layers.1.mlp.down_proj", list[Tensor]()
    original.get_submodule(name).register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    for ids in CALIBRATION:
        original(input_ids=ids)
    scale = low_bit(model, name).input_global_scale
    assert scale is not None
    assert scale.item() == pytest.approx(max(x.abs().max().item() for x in seen) / 448, rel=1e-6)


def test_experts_that_no_token_reaches_are_rounded_plainly() -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=1,
    )
    model = Qwen3MoeForCausalLM(config).eval().requires_grad_(False)
    plain = Qwen3MoeForCausalLM(config).eval().requires_grad_(False)
    plain.load_state_dict(model.state_dict())
    few = [torch.arange(4)[None]]
    for each, rounding in ((model, "gptq"), (plain, "nearest")):
        rule = Rule("*.layers.*", "mxfp4-even", rounding=rounding)
        apply_recipe(each, Recipe("r", (Rule("*.gate"), rule)), compiled=False, calibration=few)
    stacks = [(m, plain.get_submodule(n)) for n, m in model.named_modules() if isinstance(m, ExpertStack)]
    assert stacks
    for ours, theirs in stacks:
        same = [torch.equal(a.weight, b.weight) for a, b in zip(ours, theirs, strict=True)]  # type: ignore[arg-type]
        assert 4 <= sum(same) < 8, "four tokens reach four experts at most, and those are compensated"


def test_the_share_of_blocks_at_four_is_that_of_the_chosen_scales() -> None:
    model = tiny_model(1)
    rule = Rule("*.layers.*", "nvfp4", None, "four-over-six", "gptq")
    fours = apply_recipe(model, Recipe("r", (rule,)), compiled=False, calibration=CALIBRATION).fours
    name = "model.layers.0.mlp.down_proj"
    at_four = blocks_at_four(four_over_six(tiny_model(1).get_parameter(f"{name}.weight"), NVFP4))
    assert fours[name] == (int(at_four.sum()), at_four.numel())


def test_weight_errors_of_transformed_layers_are_those_of_the_weights_they_stand_for() -> None:
    gaps = {
        t: compare_weights(tiny_model(), applied(Rule("*.layers.*", "mxfp8-rceil", transform=t)))
        for t in ("none", "hadamard", "wush")
    }
    for gap in gaps.values():
        assert set(gap.relative_error) == {f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")}
        assert all(0 < error < 0.1 for error in gap.relative_error.values())
    assert gaps["none"].bits_of_quantized_layers == gaps["hadamard"].bits_of_quantized_layers == 8.25
    # Per block of 32 channels and group of layers one 32 × 32 matrix of 16 bits, per layer of the decoder.
    matrices = 2 * (64 + 64 + 64 + 128) * 32 * 16
    weights = sum(p.numel() for n, p in tiny_model().named_parameters() if "proj" in n)
    assert gaps["wush"].bits_of_quantized_layers == pytest.approx(8.25 + matrices / weights)


def test_the_summary_names_rounding_and_transform() -> None:
    rule = Rule("*.layers.*", "mxfp4-even", "mxfp4-rceil", rounding="gptq", transform="wush")
    text = apply_recipe(tiny_model(1), Recipe("r", (rule,)), compiled=False, calibration=CALIBRATION).summary()
    assert "7 linear layers: weights mxfp4-even (gptq, wush transform), activations mxfp4-rceil" in text


@pytest.mark.parametrize("rule", [Rule("*", "mxfp4-even", rounding="gptq"), Rule("*", "mxfp4-even", transform="wush")])
def test_layers_outside_the_blocks_have_no_inputs_to_look_at(rule: Rule) -> None:
    with pytest.raises(ValueError, match=r"module lm_head lies outside the decoder's blocks"):
        applied(rule)


def test_the_output_head_may_have_a_rule_of_its_own() -> None:
    model = tiny_model()
    rules = (Rule("lm_head", "fp8-channel", "fp8-token"), Rule("*.layers.*", "mxfp4-even", rounding="gptq"))
    apply_recipe(model, Recipe("r", rules), compiled=False, calibration=CALIBRATION)
    assert isinstance(model.lm_head, LowBitLinear)
    assert torch.isfinite(logits(model)).all()


@pytest.mark.parametrize("preset", ["nvfp4a16-gptq", "mxfp4a16-gptq", "mxfp4a4-wush"])
def test_recipes_that_look_at_inputs_need_text(preset: str) -> None:
    with pytest.raises(ValueError, match=rf"recipe '{preset}' looks at the inputs of layers .* needs calibration text"):
        apply_recipe(tiny_model(), load_recipe(preset), compiled=False)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule("*", "nvfp4", rounding="gtpq"), "unknown rounding 'gtpq': did you mean 'gptq'"),
        (Rule("*", "nvfp4", transform="hadamar"), "unknown transform 'hadamar': did you mean 'hadamard'"),
        (Rule("*", "fp8-channel", transform="hadamard"), "'fp8-channel' has none such"),
        (Rule("*", "fp8-block128", transform="wush"), "'fp8-block128' has none such"),
        (Rule("*", "int4-g96", transform="hadamard"), "'int4-g96' has none such"),
        (Rule("*", transform="hadamard"), "transform 'hadamard' needs a format under 'weights'"),
        (Rule("*", rounding="gptq"), "rounding 'gptq' needs a format under 'weights'"),
    ],
)
def test_what_does_not_suit_the_format_is_refused(rule: Rule, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        apply_recipe(tiny_model(), Recipe("r", (rule,)), compiled=False, calibration=CALIBRATION)
    file = tmp_path / "r.yaml"
    entry = {"weights": rule.weights or "null", "rounding": rule.rounding, "transform": rule.transform}
    file.write_text("rules:\n  - {modules: '*', " + ", ".join(f"{k}: {v}" for k, v in entry.items()) + "}\n")
    with pytest.raises(ValueError, match=f"rule 1: .*{message}"):
        load_recipe(str(file))


def test_choices_change_the_fingerprint_and_plain_ones_do_not() -> None:
    plain = Recipe("r", (Rule("*", "nvfp4"),))
    spelled = Recipe("r", (Rule("*", "nvfp4", None, "amax", "nearest", "none"),))
    assert plain.fingerprint == spelled.fingerprint
    others = [Rule("*", "nvfp4", rounding="gptq"), Rule("*", "nvfp4", transform="wush")]
    calibrated = Recipe("r", (others[0],), calibrated_on="0123456789abcdef")
    prints = {r.fingerprint for r in (plain, calibrated, *(Recipe("r", (rule,)) for rule in others))}
    assert len(prints) == 4
