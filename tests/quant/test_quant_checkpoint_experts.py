"""Quantized mixtures of experts: per-expert checkpoints of every layout, and gpt-oss's own."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_checkpoints import (
    EXPERTS,
    MOE,
    assert_refused,
    edit_config,
    edit_weights,
    layer_of,
    load,
    save_mixture,
    store,
)
from tiny import tiny_tokenizer
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from bitdraft.quant.experts import RoutedExperts
from bitdraft.quant.profiles import load_recipe_for
from bitdraft.quant.target import load_target


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
@pytest.mark.parametrize(
    "kind",
    ["ct-fp8-channel", "ct-fp8-tensor-static", "ct-nvfp4", "ct-mxfp4", "fp8-fine-grained", "modelopt-nvfp4", "gptq"],
)
def test_experts_are_decoded_exactly(tmp_path: Path, family: str, kind: str) -> None:
    plain = save_mixture(tmp_path / "plain", family)
    folder, expected = store(plain, tmp_path / "stored", kind)
    target = load(folder)
    names = ("gate_proj", "up_proj", "down_proj") if family == "qwen3-moe" else ("w1", "w3", "w2")
    inside = "mlp" if family == "qwen3-moe" else "block_sparse_moe"
    experts = target.model.get_submodule(EXPERTS)
    assert isinstance(experts, RoutedExperts)
    for e in range(4):
        gate, up, down = (expected[f"model.layers.0.{inside}.experts.{e}.{n}"] for n in names)
        assert torch.equal(layer_of(target, f"{EXPERTS}.gate_up_proj.{e}").dequantized(), torch.cat([gate, up]))
        assert torch.equal(layer_of(target, f"{EXPERTS}.down_proj.{e}").dequantized(), down)
    assert len(target.applied.quantized) == 4 + 2 * 4
    assert "(8 of experts)" in target.applied.summary()
    assert target.states(torch.arange(9)[None]).last_hidden.isfinite().all()


def test_all_experts_share_the_widest_input_scale(tmp_path: Path) -> None:
    folder, _ = store(save_mixture(tmp_path / "plain", "qwen3-moe"), tmp_path / "stored", "ct-nvfp4")
    edit_weights(folder, lambda w: w[f"{EXPERTS}.2.up_proj.input_global_scale"].fill_(200.0))
    target = load(folder)
    scales = [layer_of(target, f"{EXPERTS}.gate_up_proj.{e}").input_global_scale for e in range(4)]
    assert all(s is scales[0] for s in scales)
    assert scales[0] is not None
    assert scales[0].item() == 200.0, "an encode scale: the smaller one covers more"


def test_gate_and_up_with_different_global_scales_are_refused(tmp_path: Path) -> None:
    folder, _ = store(save_mixture(tmp_path / "plain", "qwen3-moe"), tmp_path / "stored", "ct-nvfp4")
    edit_weights(folder, lambda w: w[f"{EXPERTS}.2.up_proj.weight_global_scale"].mul_(2))
    assert_refused(folder, f"{EXPERTS}.2.gate_proj and {EXPERTS}.2.up_proj have different global weight scales")


def test_a_missing_expert_is_refused(tmp_path: Path) -> None:
    folder, _ = store(save_mixture(tmp_path / "plain", "qwen3-moe"), tmp_path / "stored", "ct-mxfp4")
    edit_weights(folder, lambda w: [w.pop(f"{EXPERTS}.2.up_proj.{leaf}") for leaf in ("weight_packed", "weight_scale")])
    with pytest.raises(ValueError, match="target"):
        load(folder)


@pytest.fixture
def gpt_oss(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """Random blocks and scales in gpt-oss's own layout, and what transformers decodes them to, ``[E, K, N]``."""
    torch.manual_seed(0)
    folder = tmp_path / "gpt-oss"
    GptOssForCausalLM(GptOssConfig(**MOE, intermediate_size=64, num_local_experts=4)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    weights, expected = load_file(folder / "model.safetensors"), {}
    for name in [n for n in weights if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = weights.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16)).to(torch.uint8)
        scales = torch.randint(118, 124, (experts, rows, columns // 32)).to(torch.uint8)
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return folder, expected


def test_gpt_oss_is_decoded_exactly(gpt_oss: tuple[Path, dict[str, Tensor]]) -> None:
    folder, expected = gpt_oss
    target = load(folder)
    assert len(expected) == 2
    for name, matrices in expected.items():
        for e, matrix in enumerate(matrices):
            assert torch.equal(layer_of(target, f"{name}.{e}").dequantized(), matrix.T)
    assert set(target.applied.quantized) == {f"{name}.{e}" for name in expected for e in range(4)}
    assert target.applied.summary().startswith(
        "8 linear layers (8 of experts): weights mxfp4-even, activations in high"
    )
    assert "model.layers.0.self_attn.q_proj" in target.applied.left_alone


@pytest.mark.parametrize(
    ("profile", "inputs"), [("vllm-sm90", None), ("vllm-sm100-moe-mxfp8", "mxfp8-rceil"), ("sglang-sm90", None)]
)
def test_gpt_oss_has_the_inputs_of_the_profiles_backend(
    gpt_oss: tuple[Path, dict[str, Tensor]], profile: str, inputs: str | None
) -> None:
    recipe = load_recipe_for("auto", profile)
    target = load_target(str(gpt_oss[0]), recipe, dtype=torch.float32, compile_quantizer="off")
    assert {rule.activations for rule in target.applied.quantized.values()} == {inputs}
    assert target.states(torch.arange(9)[None]).last_hidden.isfinite().all()


def test_gpt_oss_on_blackwell_needs_its_backend_named(gpt_oss: tuple[Path, dict[str, Tensor]]) -> None:
    with pytest.raises(ValueError, match="depend on the MoE backend: name it, vllm-sm100-moe-bf16"):
        load_target(str(gpt_oss[0]), load_recipe_for("auto", "vllm-sm100"), dtype=torch.float32)


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda w: w.pop(f"{EXPERTS}.down_proj_scales"), f"tensor {EXPERTS}.down_proj_scales is missing"),
        (lambda w: w.pop(f"{EXPERTS}.down_proj_blocks"), f"tensor {EXPERTS}.down_proj_blocks is missing"),
        (lambda w: w[f"{EXPERTS}.down_proj_scales"].fill_(255), f"tensor {EXPERTS}.down_proj_scales holds NaN"),
        (
            lambda w: w.update({f"{EXPERTS}.down_proj_scales": w[f"{EXPERTS}.down_proj_scales"][:, :-1].clone()}),
            f"tensor {EXPERTS}.down_proj_scales has shape",
        ),
    ],
)
def test_a_damaged_gpt_oss_is_refused(
    gpt_oss: tuple[Path, dict[str, Tensor]], edit: Callable[[dict[str, Tensor]], object], complaint: str
) -> None:
    edit_weights(gpt_oss[0], edit)
    assert_refused(gpt_oss[0], complaint)
