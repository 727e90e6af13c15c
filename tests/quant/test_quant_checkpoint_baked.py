"""Baked checkpoints: ordinary ones whose weights are the low-bit values, equal to the simulation without a recipe."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny_target, tiny_tokenizer
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from bitdraft.quant.checkpoints.write import Written, write_quantized
from bitdraft.quant.fingerprint import digest_of
from bitdraft.quant.linear import LowBitLinear
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recipe import Recipe, Rule
from bitdraft.quant.target import LowBitTarget, load_target

IDS = torch.randint(320, (2, 13), generator=torch.Generator().manual_seed(0))
LAYER = "model.layers.0.mlp.down_proj.weight"
INTEGERS = Recipe("w4a16-g32", (Rule("*.layers.*", "int4-g32"),))
SOME = Recipe("some", (Rule("*.mlp.*", "mxfp4-even"), Rule("*.o_proj", "mxfp8-rceil")))
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 target with a block of zeros and weights of very different sizes."""
    folder = save_tiny_target(tmp_path_factory.mktemp("source") / "fp32", num_hidden_layers=2)
    AutoModelForCausalLM.from_pretrained(folder, dtype=BF16).save_pretrained(folder.parent / "target")
    tiny_tokenizer().save_pretrained(folder.parent / "target")
    weights = load_file(folder.parent / "target" / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][5, :32] = 0
    weights["model.layers.1.mlp.down_proj.weight"] *= torch.logspace(-9, 3, 128).to(BF16)
    save_file(weights, folder.parent / "target" / "model.safetensors", metadata={"format": "pt"})
    return folder.parent / "target"


def bake(source: Path, out: Path, recipe: Recipe, **more: Any) -> Written:
    return write_quantized(str(source), recipe, out, baked=True, **more)


def load(folder: Path, recipe: Recipe, dtype: torch.dtype) -> LowBitTarget:
    return load_target(str(folder), recipe, dtype=dtype, compile_quantizer="off")


def outputs(target: LowBitTarget) -> list[torch.Tensor]:
    states = target.states(IDS, capture=(0, 1))
    return [states.captured, states.last_hidden, target.logits(states.last_hidden)]


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        *((recipe, dtype) for recipe in (load_recipe("mxfp4a16"), SOME) for dtype in (BF16, FP32)),
        (INTEGERS, BF16),  # rounded to the type that computes: those of a bf16 checkpoint are bf16's
    ],
    ids=lambda value: value.name if isinstance(value, Recipe) else str(value),
)
def test_what_is_baked_is_the_simulation(source: Path, tmp_path: Path, recipe: Recipe, dtype: torch.dtype) -> None:
    bake(source, tmp_path / "out", recipe)
    simulated, baked = load(source, recipe, dtype), load(tmp_path / "out", load_recipe("none"), dtype)
    for ours, theirs in zip(outputs(simulated), outputs(baked), strict=True):
        assert torch.equal(ours, theirs)
    plain = load(source, load_recipe("none"), dtype)
    assert not torch.equal(outputs(plain)[1], outputs(baked)[1]), "the recipe does something"


def test_integers_are_baked_in_the_type_that_is_asked_for(source: Path, tmp_path: Path) -> None:
    """Their scales and products are rounded to the type that computes, here as in kernels."""
    bake(source, tmp_path / "out", INTEGERS, dtype=FP32)
    simulated, baked = load(source, INTEGERS, FP32), load(tmp_path / "out", load_recipe("none"), FP32)
    assert all(torch.equal(a, b) for a, b in zip(outputs(simulated), outputs(baked), strict=True))


@pytest.mark.parametrize("name", ["nvfp4a16", "nvfp4a16-4over6"])
def test_an_fp32_scale_is_baked_into_fp32_alone(source: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"recipe '{name}': \d\d\.\d% of the baked weights would change .* bfloat16"):
        bake(source, tmp_path / "out", load_recipe(name))
    assert not (tmp_path / "out").exists()
    bake(source, tmp_path / "out", load_recipe(name), dtype=FP32)
    simulated, baked = load(source, load_recipe(name), FP32), load(tmp_path / "out", load_recipe("none"), FP32)
    for layer, module in simulated.model.named_modules():
        if isinstance(module, LowBitLinear):
            assert torch.equal(module.dequantized(), baked.model.get_parameter(f"{layer}.weight")), layer
    for ours, theirs in zip(outputs(simulated), outputs(baked), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(ours.abs().max()))


def test_the_share_that_would_change_is_counted(source: Path, tmp_path: Path) -> None:
    simulated = load(source, load_recipe("nvfp4a16"), BF16)
    meant = torch.cat([m.dequantized().flatten() for m in simulated.model.modules() if isinstance(m, LowBitLinear)])
    share = float((meant.to(BF16).float() != meant).double().mean())
    with pytest.raises(ValueError, match=f" {share:.1%} of the baked weights would change"):
        bake(source, tmp_path / "out", load_recipe("nvfp4a16"))


def test_an_ordinary_checkpoint_is_written(source: Path, tmp_path: Path) -> None:
    recipe = load_recipe("mxfp4a16")
    bake(source, tmp_path / "out", recipe)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out"))
    assert after.pop("bitdraft") == {
        "baked": True,
        "recipe": "mxfp4a16",
        "recipe_fingerprint": recipe.fingerprint,
    }
    assert after == before, "no quantization_config, the same type"
    old, new = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert {n: (t.dtype, t.shape) for n, t in old.items()} == {n: (t.dtype, t.shape) for n, t in new.items()}
    changed = {name for name, tensor in old.items() if not torch.equal(tensor, new[name])}
    assert changed == {name for name in old if "_proj" in name}, "embeddings, norms and the output head stay"
    assert {p.name for p in source.iterdir()} == {p.name for p in (tmp_path / "out").iterdir()}


def test_fp32_is_declared_where_it_is_written(source: Path, tmp_path: Path) -> None:
    """Else an engine would load the baked weights in bf16 and round them after all."""
    bake(source, tmp_path / "out", load_recipe("nvfp4a16"), dtype=FP32)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    new = load_file(tmp_path / "out" / "model.safetensors")
    assert new[LAYER].dtype == FP32
    assert new["model.embed_tokens.weight"].dtype == BF16


def test_the_fingerprint_knows_the_calibration(source: Path, tmp_path: Path) -> None:
    recipe, text = load_recipe("mxfp4a16-gptq"), [torch.randint(0, 320, (2, 64))]
    bake(source, tmp_path / "out", recipe, calibration=text)
    simulated = load_target(str(source), recipe, dtype=BF16, compile_quantizer="off", calibration=text)
    said = json.loads((tmp_path / "out" / "config.json").read_text())["bitdraft"]["recipe_fingerprint"]
    assert said == simulated.recipe.fingerprint != recipe.fingerprint
    assert simulated.recipe.calibrated_on == digest_of(text)
    baked = load(tmp_path / "out", load_recipe("none"), BF16)
    assert torch.equal(outputs(simulated)[1], outputs(baked)[1])


def test_experts_are_baked(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        intermediate_size=64, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, initializer_range=0.2,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(BF16).save_pretrained(tmp_path / "source")
    tiny_tokenizer().save_pretrained(tmp_path / "source")
    recipe = load_recipe("mxfp4a16")
    bake(tmp_path / "source", tmp_path / "out", recipe)
    simulated, baked = load(tmp_path / "source", recipe, BF16), load(tmp_path / "out", load_recipe("none"), BF16)
    new = load_file(tmp_path / "out" / "model.safetensors")
    for number in range(4):
        joined = simulated.model.get_submodule(f"model.layers.1.mlp.experts.gate_up_proj.{number}")
        assert isinstance(joined, LowBitLinear)
        parts = [new[f"model.layers.1.mlp.experts.{number}.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(torch.cat(parts), joined.weight)
    torch.testing.assert_close(outputs(simulated)[1], outputs(baked)[1], rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("recipe", "complaint"),
    [
        (load_recipe("mxfp4"), r"recipe 'mxfp4', rule '\*\.layers\.\*': .* inputs in fp8-token: serve .*mxfp4a16"),
        (load_recipe("nvfp4"), "inputs in nvfp4-kernel"),
        (load_recipe("mxfp4a16+kvfp8"), r"say nothing of the KV cache .* --kv-cache-dtype fp8"),
        (load_recipe("none"), "recipe 'none' quantizes nothing: there is nothing to bake"),
        (Recipe("t", (Rule("*.layers.*", "mxfp4-even", transform="hadamard"),)), "a hadamard transform of inputs"),
        (Recipe("r", (Rule("*.layers.*", "mxfp4-even", residual=0.001),)), "a residual correction"),
        (Recipe("m", (Rule("*.layers.*", "nvfp4", at_load="marlin"),)), "weights marlin at load"),
        (Recipe("head", (Rule("*", "mxfp4-even"),)), "quantizes the output head"),
    ],
)
def test_what_weights_cannot_hold_is_refused(source: Path, tmp_path: Path, recipe: Recipe, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        bake(source, tmp_path / "out", recipe)
    assert not (tmp_path / "out").exists()
