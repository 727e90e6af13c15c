"""Quantized checkpoints that are refused, in one sentence that names the tensor or the setting."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stored_checkpoints import (
    FORMATS,
    FP8_ARGS,
    MX_ARGS,
    SIZES,
    UP,
    VOCAB,
    assert_refused,
    ct,
    edit_config,
    edit_weights,
    modelopt,
    random_fp8,
    store,
)
from tiny import save_tiny_target

from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import load_target


@pytest.fixture(scope="module")
def sixteen_bit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("sixteen") / "target", **SIZES)


def scale_of(kind: str) -> str:
    """The scale that has one number per block, row or tensor."""
    return {"fp8-fine-grained": "weight_scale_inv", "gptq": "scales", "awq": "scales"}.get(kind, "weight_scale")


ONE_OF_EACH = ["ct-fp8-channel", "ct-fp8-block", "ct-nvfp4", "ct-mxfp4", "ct-int4", "fp8-fine-grained",
               "modelopt-nvfp4", "modelopt-fp8", "gptq", "awq"]  # fmt: skip


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_missing_scales_are_refused_by_name(sixteen_bit: Path, tmp_path: Path, kind: str) -> None:
    folder, _ = store(sixteen_bit, tmp_path / "stored", kind)
    edit_weights(folder, lambda w: w.pop(f"{UP}.{scale_of(kind)}"))
    assert_refused(folder, f"tensor {UP}.{scale_of(kind)} is missing")


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_scales_of_another_shape_are_refused_by_name(sixteen_bit: Path, tmp_path: Path, kind: str) -> None:
    folder, _ = store(sixteen_bit, tmp_path / "stored", kind)
    name = f"{UP}.{scale_of(kind)}"
    edit_weights(folder, lambda w: w.update({name: torch.cat([w[name].reshape(-1, 1).view(torch.uint8)] * 3)}))
    assert_refused(folder, f"tensor {name} has shape")


@pytest.mark.parametrize("kind", [k for k in ONE_OF_EACH if k not in ("ct-nvfp4", "ct-mxfp4", "modelopt-nvfp4")])
def test_scales_that_are_not_finite_are_refused_by_name(sixteen_bit: Path, tmp_path: Path, kind: str) -> None:
    folder, _ = store(sixteen_bit, tmp_path / "stored", kind)
    name = f"{UP}.{scale_of(kind)}"
    edit_weights(folder, lambda w: w[name].reshape(-1)[:1].fill_(torch.inf))
    assert_refused(folder, f"tensor {name} holds NaN or infinity")


@pytest.mark.parametrize(("kind", "nan"), [("ct-nvfp4", 127), ("ct-mxfp4", 255), ("modelopt-nvfp4", 127)])
def test_block_scales_that_are_not_numbers_are_refused_by_name(
    sixteen_bit: Path, tmp_path: Path, kind: str, nan: int
) -> None:
    folder, _ = store(sixteen_bit, tmp_path / "stored", kind)
    edit_weights(folder, lambda w: w[f"{UP}.weight_scale"].view(torch.uint8)[0, :1].fill_(nan))
    assert_refused(folder, f"tensor {UP}.weight_scale holds NaN or infinity")


@pytest.mark.parametrize("kind", ["ct-fp8-channel", "fp8-fine-grained", "modelopt-fp8"])
def test_codes_that_are_not_numbers_are_refused_by_name(sixteen_bit: Path, tmp_path: Path, kind: str) -> None:
    folder, _ = store(sixteen_bit, tmp_path / "stored", kind)
    edit_weights(folder, lambda w: w[f"{UP}.weight"].view(torch.uint8)[3, 4:5].fill_(255))
    assert_refused(folder, f"tensor {UP}.weight holds NaN or infinity")


@pytest.mark.parametrize(
    ("kind", "leaf"),
    [
        ("ct-nvfp4", "weight_global_scale"),
        ("ct-nvfp4", "input_global_scale"),
        ("ct-fp8-tensor-static", "input_scale"),
        ("modelopt-nvfp4", "weight_scale_2"),
        ("modelopt-nvfp4", "input_scale"),
        ("modelopt-fp8", "input_scale"),
    ],
)
@pytest.mark.parametrize("value", [None, 0.0, -1.0, torch.nan, torch.inf])
def test_scales_of_a_whole_tensor_must_be_one_positive_number(
    sixteen_bit: Path, tmp_path: Path, kind: str, leaf: str, value: float | None
) -> None:
    folder, _ = store(sixteen_bit, tmp_path / "stored", kind)
    name = f"{UP}.{leaf}"
    edit_weights(folder, lambda w: w.pop(name) if value is None else w[name].fill_(value))
    assert_refused(
        folder, f"tensor {name} is missing" if value is None else f"tensor {name} is not one positive number"
    )


def test_fused_layers_with_different_global_scales_are_refused(sixteen_bit: Path, tmp_path: Path) -> None:
    folder, _ = store(sixteen_bit, tmp_path / "stored", "ct-nvfp4a16")
    edit_weights(folder, lambda w: w[f"{UP}.weight_global_scale"].mul_(2))
    assert_refused(folder, "have different global weight scales, but engines fuse them")


def test_a_layer_that_the_configuration_leaves_alone_must_not_be_quantized(sixteen_bit: Path, tmp_path: Path) -> None:
    folder, _ = store(sixteen_bit, tmp_path / "stored", "ct-mxfp4")
    edit_config(folder, quantization_config={**FORMATS["ct-mxfp4"][0], "ignore": ["lm_head", UP]})
    assert_refused(folder, f"tensor {UP}.weight_packed is quantized, but the configuration leaves this layer alone")


def test_a_layer_that_the_configuration_quantizes_must_be(sixteen_bit: Path, tmp_path: Path) -> None:
    folder, _ = store(sixteen_bit, tmp_path / "stored", "ct-mxfp4")
    plain = load_file(sixteen_bit / "model.safetensors")[f"{UP}.weight"]
    edit_weights(
        folder, lambda w: [w.pop(f"{UP}.weight_packed"), w.pop(f"{UP}.weight_scale"), w.update({f"{UP}.weight": plain})]
    )
    assert_refused(folder, f"declares {UP} quantized, but holds no scales of it")


def test_activation_order_is_refused(sixteen_bit: Path, tmp_path: Path) -> None:
    folder, _ = store(sixteen_bit, tmp_path / "stored", "gptq")
    edit_weights(folder, lambda w: w[f"{UP}.g_idx"].copy_(w[f"{UP}.g_idx"].flip(0)))
    assert_refused(folder, f"layer {UP}: g_idx is not in order")


@pytest.mark.parametrize("method", ["bitsandbytes", "quark", "unheard_of"])
def test_an_unknown_method_is_refused(sixteen_bit: Path, tmp_path: Path, method: str) -> None:
    folder, _ = store(sixteen_bit, tmp_path / "stored", "ct-mxfp4")
    edit_config(folder, quantization_config={"quant_method": method})
    assert_refused(folder, f"is quantized by '{method}', which is not known here")


@pytest.mark.parametrize(
    ("declared", "complaint"),
    [
        ({"quant_method": "compressed-tensors"}, "has no config_groups"),
        (ct({"num_bits": 3, "type": "int", "strategy": "channel"}), "group group_0: weights of type int, num_bits 3"),
        (ct(MX_ARGS, {**FP8_ARGS, "strategy": "odd"}), "group group_0: input_activations of type float, num_bits 8"),
        (modelopt("W4A8_AWQ"), "quant_algo 'W4A8_AWQ' is not supported"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "GPTQ with 3 bits"),
        ({"quant_method": "gptq", "group_size": 128}, "has no bits"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version gemv"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "blocks of [64, 64]"),
    ],
)
def test_settings_without_a_layout_are_refused(
    sixteen_bit: Path, tmp_path: Path, declared: dict[str, Any], complaint: str
) -> None:
    folder, _ = store(sixteen_bit, tmp_path / "stored", "ct-mxfp4")
    edit_config(folder, quantization_config=declared)
    assert_refused(folder, complaint)


def test_a_16_bit_checkpoint_is_refused_under_auto(sixteen_bit: Path) -> None:
    assert_refused(sixteen_bit, "is not quantized: --target-quant auto needs a quantized checkpoint")


@pytest.mark.parametrize("preset", ["none", "fp8", "mxfp4"])
def test_another_recipe_is_refused_and_auto_named(sixteen_bit: Path, tmp_path: Path, preset: str) -> None:
    folder, _ = store(sixteen_bit, tmp_path / "stored", "ct-mxfp4")
    with pytest.raises(ValueError, match=r"already quantized \(compressed-tensors\).*--target-quant auto"):
        load_target(str(folder), load_recipe(preset), compile_quantizer="off")


def test_a_quantized_output_head_is_refused(sixteen_bit: Path, tmp_path: Path) -> None:
    folder, _ = store(sixteen_bit, tmp_path / "stored", "ct-fp8-channel")
    codes, scale = random_fp8(VOCAB, 256, generator=torch.Generator()), torch.rand(VOCAB, 1)
    edit_weights(folder, lambda w: w.update({"lm_head.weight": codes, "lm_head.weight_scale": scale}))
    edit_config(folder, quantization_config={**FORMATS["ct-fp8-channel"][0], "ignore": []})
    assert_refused(folder, "quantizes the output head (lm_head)")
