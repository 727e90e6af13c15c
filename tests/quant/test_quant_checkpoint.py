"""Quantized checkpoints taken as they are: stored codes are decoded exactly, and computed as the engine would."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_checkpoints import (
    FORMATS,
    FP8_ARGS,
    MX_ARGS,
    SIZES,
    TOKEN,
    UP,
    assert_refused,
    ct,
    edit_config,
    edit_weights,
    layer_of,
    load,
    store,
    wide,
)
from tiny import save_tiny_target
from transformers import LlamaForCausalLM

from bitdraft.quant.block import quantize
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recipe import AUTO
from bitdraft.quant.schemes import scheme_named
from bitdraft.quant.target import load_target


@pytest.fixture(scope="module")
def sixteen_bit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("sixteen") / "target", **SIZES)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_codes_are_decoded_exactly(sixteen_bit: Path, tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    folder, expected = store(sixteen_bit, tmp_path / "stored", kind)
    _, _, weights, activations = FORMATS[kind]
    target = load(folder, dtype)
    assert set(target.applied.quantized) == set(expected)
    for name, matrix in expected.items():
        layer = layer_of(target, name)
        assert torch.equal(layer.dequantized(), matrix), name
        assert layer.weights.name == weights
        assert (layer.activations.name if layer.activations else None) == activations
        rule = target.recipe.rule_for(name)
        assert rule == target.applied.quantized[name]
        assert (rule.weights, rule.activations) == (weights, activations)
    plain = load_file(sixteen_bit / "model.safetensors")
    assert torch.equal(target.embedding.weight, plain["model.embed_tokens.weight"].to(dtype))
    assert "lm_head" in target.applied.left_alone
    assert target.recipe.rule_for("lm_head").leaves_alone  # type: ignore[union-attr]
    assert not any(p.requires_grad for p in target.model.parameters())


@pytest.mark.parametrize("kind", FORMATS)
def test_a_stored_layer_computes_what_the_engine_would(sixteen_bit: Path, tmp_path: Path, kind: str) -> None:
    """Inputs rounded by the engine's kernel rule, times the decoded weight."""
    folder, expected = store(sixteen_bit, tmp_path / "stored", kind)
    layer = layer_of(load(folder), UP)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    rounded = x
    if layer.activations is not None:
        q = quantize(x, layer.activations, global_scale=layer.input_global_scale)
        outer = q.outer if q.outer is not None else torch.ones(())
        rounded = q.values * (wide(outer, *x.shape) if outer.ndim == 2 else outer)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), rounded @ expected[UP].T, rtol=2e-5, atol=2e-4)
    scales = {"nvfp4-kernel": {300.0, 256.0}, "fp8-tensor-static": {torch.tensor(0.01).item()}}
    if layer.activations is not None and layer.activations.name in scales:
        assert layer.input_global_scale is not None
        assert layer.input_global_scale.item() in scales[layer.activations.name]


@pytest.mark.parametrize("kind", ["ct-fp8-channel", "ct-fp8-block", "ct-nvfp4", "gptq"])
def test_a_gradient_passes_through_a_stored_layer(sixteen_bit: Path, tmp_path: Path, kind: str) -> None:
    folder, expected = store(sixteen_bit, tmp_path / "stored", kind)
    layer = layer_of(load(folder), UP)
    x = torch.full((3, 256), 0.01, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected[UP].sum(0).expand(3, -1), rtol=1e-4, atol=1e-4)


def test_the_target_is_an_ordinary_one(sixteen_bit: Path, tmp_path: Path) -> None:
    target = load(store(sixteen_bit, tmp_path / "stored", "ct-nvfp4")[0])
    ids = torch.arange(9)[None]
    states = target.states(ids, capture=(1,))
    assert states.captured.shape == (1, 9, 1, 256)
    assert target.logits(states.last_hidden).isfinite().all()
    assert target.recipe.name == "auto"
    assert target.applied.summary().splitlines() == [
        "14 linear layers: weights nvfp4, activations nvfp4-kernel",
        "left in high precision (so the checkpoint has it): lm_head",
    ]
    shared = {id(layer_of(target, f"model.layers.0.self_attn.{x}_proj").input_global_scale) for x in "qkv"}
    assert len(shared) == 1, "one object, so that the input is quantized once"
    assert target.model.generation_config.eos_token_id == 258  # type: ignore[union-attr]


def test_fingerprints_tell_checkpoints_and_formats_apart(sixteen_bit: Path, tmp_path: Path) -> None:
    kinds = {"a": "ct-fp8-channel", "b": "ct-fp8-channel", "c": "ct-nvfp4", "d": "ct-nvfp4a16"}
    targets = {k: load(store(sixteen_bit, tmp_path / k, kind)[0]) for k, kind in kinds.items()}
    assert targets["a"].fingerprint == targets["b"].fingerprint
    assert targets["a"].recipe.fingerprint == targets["b"].recipe.fingerprint
    assert len({t.recipe.fingerprint for t in targets.values()}) == 3
    edit_weights(tmp_path / "b", lambda w: w[f"{UP}.weight_scale"].mul_(1.01))
    assert load(tmp_path / "b").fingerprint != targets["a"].fingerprint, "outer scales count"
    edit_weights(tmp_path / "c", lambda w: [t.mul_(2) for n, t in w.items() if n.endswith("input_global_scale")])
    assert load(tmp_path / "c").fingerprint != targets["c"].fingerprint, "scales of inputs count"


def test_modelopts_own_file_is_read(sixteen_bit: Path, tmp_path: Path) -> None:
    folder, expected = store(sixteen_bit, tmp_path / "stored", "modelopt-nvfp4")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    told = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(told))
    assert torch.equal(layer_of(load(folder), UP).dequantized(), expected[UP])
    with pytest.raises(ValueError, match=r"already quantized \(modelopt\).*--target-quant auto"):
        load_target(str(folder), load_recipe("none"), compile_quantizer="off")


def test_layers_of_different_formats_keep_them(sixteen_bit: Path, tmp_path: Path) -> None:
    """FP8 attention beside MXFP4 and a layer in high precision, by name and by pattern."""
    folder, expected = store(sixteen_bit, tmp_path / "stored", "ct-mxfp4a16")
    weights = load_file(folder / "model.safetensors")
    plain = load_file(sixteen_bit / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name in [n for n in expected if "self_attn" in n]:
        rows, columns = expected[name].shape
        tensors, expected[name] = FORMATS["ct-fp8-channel"][1](rows, columns, generator)
        del weights[f"{name}.weight_packed"]
        weights |= {f"{name}.{leaf}": tensor for leaf, tensor in tensors.items()}
    for leaf in ("weight_packed", "weight_scale"):
        del weights[f"{UP}.{leaf}"]
    weights[f"{UP}.weight"] = plain[f"{UP}.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    groups = {
        "attention": {
            "targets": ["re:.*self_attn.*"],
            "weights": {**FP8_ARGS, "strategy": "channel"},
            "input_activations": TOKEN,
        },
        "rest": {"targets": ["Linear"], "weights": MX_ARGS},
    }
    edit_config(folder, quantization_config={**ct(MX_ARGS), "config_groups": groups, "ignore": ["lm_head", UP]})
    target = load(folder)
    for name, matrix in expected.items():
        if name != UP:
            assert torch.equal(layer_of(target, name).dequantized(), matrix)
            rule = target.recipe.rule_for(name)
            assert rule is not None
            assert rule.weights == ("fp8-channel" if "self_attn" in name else "mxfp4-even")
    assert torch.equal(target.model.get_submodule(UP).weight, plain[f"{UP}.weight"])  # type: ignore[arg-type]
    assert set(target.applied.left_alone) == {"lm_head", UP}


def test_scales_of_an_fp8_cache_are_mentioned(sixteen_bit: Path, tmp_path: Path) -> None:
    folder, _ = store(sixteen_bit, tmp_path / "stored", "modelopt-fp8")
    name = "model.layers.0.self_attn.k_proj.k_scale"
    edit_weights(folder, lambda w: w.update({name: torch.tensor(1.0)}))
    assert (
        "scales for FP8 but does not ask for it: auto+kvfp8 does): key and value cache"
        in load(folder).applied.summary()
    )


def test_several_files_are_read_by_their_index(sixteen_bit: Path, tmp_path: Path) -> None:
    folder, expected = store(sixteen_bit, tmp_path / "stored", "ct-mxfp4")
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    where: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({n: weights[n] for n in part}, folder / f"model-{number}.safetensors")
        where |= dict.fromkeys(part, f"model-{number}.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert torch.equal(layer_of(load(folder), UP).dequantized(), expected[UP])
    (folder / "model-1.safetensors").unlink()
    assert_refused(folder, "model-1.safetensors cannot be read")


def test_auto_is_a_recipe_that_the_command_line_knows() -> None:
    assert load_recipe("auto") is AUTO


def test_compressed_tensors_itself_decodes_the_same(sixteen_bit: Path, tmp_path: Path) -> None:
    """transformers and the package, beside the tables above: FP8 in fp32, to the last bit."""
    folder, _ = store(sixteen_bit, tmp_path / "stored", "ct-fp8-channel")
    edit_config(
        folder,
        quantization_config={
            **FORMATS["ct-fp8-channel"][0],
            "format": "float-quantized",
            "quantization_status": "compressed",
        },
    )
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs(input_ids=torch.arange(3)[None])  # the package decodes at the first call
    ours = layer_of(load(folder), UP).dequantized()
    assert torch.equal(theirs.get_submodule(UP).weight, ours)


def test_schemes_named_by_readers_exist() -> None:
    for _, _, weights, activations in FORMATS.values():
        assert scheme_named(weights)
        assert activations is None or scheme_named(activations)
