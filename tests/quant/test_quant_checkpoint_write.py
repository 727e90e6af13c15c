"""Writing quantized checkpoints: read back they are the simulation, bit for bit, and other libraries read them too."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import full_after
from safetensors.torch import load_file, save_file
from tiny import save_tiny_target, tiny_tokenizer
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from bitdraft.quant.block import quantize
from bitdraft.quant.checkpoints import write as write_module
from bitdraft.quant.checkpoints.declare import INPUTS, WEIGHTS
from bitdraft.quant.checkpoints.write import Written, encoded, write_quantized
from bitdraft.quant.codes import decode, encode
from bitdraft.quant.experts import experts_around
from bitdraft.quant.linear import LowBitLinear
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recipe import AUTO, Recipe, Rule
from bitdraft.quant.schemes import scheme_named
from bitdraft.quant.target import LowBitTarget, load_target

VOCAB = 320
CALIBRATION = [torch.arange(40)[None], torch.arange(60, 90)[None]]
IDS = torch.randint(VOCAB, (2, 13), generator=torch.Generator().manual_seed(0))
PRESETS = ["fp8", "mxfp4", "mxfp4a16", "mxfp4a4", "nvfp4", "nvfp4a16", "nvfp4-4over6", "nvfp4a16-sweep"]
BLOCK = Recipe("block", (Rule("*.layers.*", "fp8-block128", "fp8-group128"),))
MIXED = Recipe(
    "mixed",
    (Rule("*.layers.0.*"), Rule("*.self_attn.*", "fp8-channel", "fp8-token"), Rule("*.layers.*", "mxfp4-even")),
)
MOE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "num_experts_per_tok": 2, "initializer_range": 0.2,
    "bos_token_id": 257, "eos_token_id": 258, "pad_token_id": 258,
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a row, a block and a whole weight of zeros, and weights of very different sizes."""
    folder = save_tiny_target(tmp_path_factory.mktemp("source") / "target", num_hidden_layers=2)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3] = 0
    weights["model.layers.0.mlp.up_proj.weight"][5, :32] = 0
    weights["model.layers.1.self_attn.o_proj.weight"].zero_()
    weights["model.layers.1.mlp.down_proj.weight"] *= torch.logspace(-9, 3, 128)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def recipe_of(name: str) -> Recipe:
    return {"block": BLOCK, "mixed": MIXED}.get(name) or load_recipe(name)


def write(source: Path, out: Path, recipe: Recipe, **more: Any) -> Written:
    return write_quantized(str(source), recipe, out, calibration=CALIBRATION, **more)


def simulate(source: Path, recipe: Recipe, dtype: torch.dtype = torch.float32) -> LowBitTarget:
    return load_target(str(source), recipe, dtype=dtype, compile_quantizer="off", calibration=CALIBRATION)


def assert_same(a: LowBitTarget, b: LowBitTarget) -> None:
    """Equal layers, scales and logits."""
    layers = [{n: m for n, m in t.model.named_modules() if isinstance(m, LowBitLinear)} for t in (a, b)]
    assert layers[0].keys() == layers[1].keys() != set()
    for name, ours in layers[0].items():
        theirs = layers[1][name]
        assert torch.equal(ours.weight, theirs.weight), name
        assert torch.equal(ours.dequantized(), theirs.dequantized()), name
        assert ours.activations == theirs.activations
        for scale, other in [
            (ours.weight_outer, theirs.weight_outer),
            (ours.input_global_scale, theirs.input_global_scale),
        ]:
            assert (scale is None) == (other is None)
            assert scale is None or other is None or torch.equal(scale, other), name
    one, other = (t.logits(t.states(IDS).last_hidden) for t in (a, b))
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", [*PRESETS, "block", "mixed"])
def test_what_is_written_reads_back_as_the_simulation(source: Path, tmp_path: Path, name: str) -> None:
    if name == "block":
        source = save_tiny_target(
            tmp_path / "wide", num_hidden_layers=1, hidden_size=256, intermediate_size=384, head_dim=64
        )
    recipe = recipe_of(name)
    written = write(source, tmp_path / "out", recipe)
    assert written.bytes_after < written.bytes_before
    auto = load_target(str(tmp_path / "out"), AUTO, dtype=torch.float32, compile_quantizer="off")
    simulated = simulate(source, recipe)
    assert_same(simulated, auto)
    formats = {n: (r.weights, r.activations) for n, r in simulated.applied.quantized.items()}
    assert {n: (r.weights, r.activations) for n, r in auto.applied.quantized.items()} == formats


@pytest.mark.parametrize("name", ["nvfp4a16-gptq", "mxfp4a16-gptq"])
def test_weights_rounded_by_gptq_read_back(source: Path, tmp_path: Path, name: str) -> None:
    recipe, text = load_recipe(name), [torch.randint(0, 320, (2, 64), generator=torch.Generator().manual_seed(0))]
    write_quantized(str(source), recipe, tmp_path / "out", calibration=text)
    auto = load_target(str(tmp_path / "out"), AUTO, dtype=torch.float32, compile_quantizer="off")
    simulated, plain = (
        load_target(str(source), r, dtype=torch.float32, compile_quantizer="off", calibration=text)
        for r in (recipe, load_recipe(name.removesuffix("-gptq")))
    )
    assert_same(simulated, auto)
    layer = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(auto.model.get_parameter(layer), plain.model.get_parameter(layer))


def test_a_low_bit_output_head_is_not_written(source: Path, tmp_path: Path) -> None:
    recipe = Recipe("head", (Rule("*", "fp8-channel", "fp8-token"),))
    with pytest.raises(ValueError, match="recipe 'head' quantizes the output head, which is not written here"):
        write(source, tmp_path / "out", recipe)
    assert not (tmp_path / "out").exists()


def test_transforms_of_inputs_have_no_place_in_a_checkpoint(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"recipe 'mxfp4a4-hadamard', rule .* no place here for the hadamard trans"):
        write(source, tmp_path / "out", load_recipe("mxfp4a4-hadamard"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "mxfp4"])
def test_a_bf16_source_reads_back_as_the_bf16_simulation(source: Path, tmp_path: Path, name: str) -> None:
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    tiny_tokenizer().save_pretrained(tmp_path / "half")
    write(tmp_path / "half", tmp_path / "out", recipe_of(name))
    auto = load_target(str(tmp_path / "out"), AUTO, compile_quantizer="off")
    assert_same(simulate(tmp_path / "half", recipe_of(name), torch.bfloat16), auto)


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
@pytest.mark.parametrize("name", ["fp8", "mxfp4", "nvfp4"])
def test_experts_read_back_as_the_simulation(tmp_path: Path, family: str, name: str) -> None:
    source = save_mixture(tmp_path / "source", family)
    recipe = recipe_of(name)
    write(source, tmp_path / "out", recipe)
    auto = load_target(str(tmp_path / "out"), AUTO, dtype=torch.float32, compile_quantizer="off")
    simulated = simulate(source, recipe)
    assert len(experts_around(auto.model)) == 2 * 2 * 4
    assert_same(simulated, auto)
    router = "model.layers.0.block_sparse_moe.gate" if family == "mixtral" else "model.layers.0.mlp.gate"
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", router} <= set(ignored), "engines take routers for linear layers"


def save_mixture(folder: Path, family: str) -> Path:
    torch.manual_seed(0)
    if family == "qwen3-moe":
        config = Qwen3MoeConfig(**MOE, intermediate_size=64, moe_intermediate_size=32, num_experts=4)
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
    elif family == "mixtral":
        MixtralForCausalLM(MixtralConfig(**MOE, intermediate_size=32, num_local_experts=4)).save_pretrained(folder)
    else:
        GptOssForCausalLM(GptOssConfig(**MOE, intermediate_size=32, num_local_experts=4)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", PRESETS)
def test_transformers_loads_it(source: Path, tmp_path: Path, name: str) -> None:
    """compressed-tensors decodes FP8 in fp32 here, FP4 in bf16: MXFP4 exactly, NVFP4 with its own rounding."""
    write(source, tmp_path / "out", recipe_of(name))
    dtype = torch.float32 if name == "fp8" else torch.bfloat16
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    with torch.no_grad():
        assert theirs(input_ids=IDS).logits.isfinite().all()
    simulated = simulate(source, recipe_of(name))
    for layer, module in simulated.model.named_modules():
        if isinstance(module, LowBitLinear):
            weight, ours = theirs.get_submodule(layer).weight.float(), module.dequantized()
            if name.startswith("nvfp4"):
                torch.testing.assert_close(weight, ours, rtol=2**-7, atol=1e-9)
            else:
                assert torch.equal(weight, ours), layer


def test_the_configuration_is_the_packages_own(source: Path, tmp_path: Path) -> None:
    write(source, tmp_path / "out", load_recipe("nvfp4"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    declared = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    assert declared["quant_method"] == "compressed-tensors"
    assert declared["format"] == "nvfp4-pack-quantized"
    assert declared["quantization_status"] == "compressed"
    assert declared["ignore"] == ["lm_head"]
    (group,) = declared["config_groups"].values()
    assert group["targets"] == ["Linear"]
    assert group["input_activations"]["dynamic"] == "local"
    stored = load_file(tmp_path / "out" / "model.safetensors")
    layer = "model.layers.0.self_attn.q_proj"
    shapes = {n.removeprefix(f"{layer}."): (t.dtype, list(t.shape)) for n, t in stored.items() if n.startswith(layer)}
    assert shapes == {
        "weight_packed": (torch.uint8, [64, 32]),
        "weight_scale": (torch.float8_e4m3fn, [64, 4]),
        "weight_global_scale": (torch.float32, [1]),
        "input_global_scale": (torch.float32, [1]),
    }


def test_everything_else_is_copied(source: Path, tmp_path: Path) -> None:
    (source / "NOTICE.txt").write_text("kept")
    write(source, tmp_path / "out", load_recipe("mxfp4a16"))
    for path in source.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in source.iterdir()}
    before, after = (load_file(f / "model.safetensors") for f in (source, tmp_path / "out"))
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(before[name], after[name])


def test_large_checkpoints_are_cut_into_files(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tmp_path / "whole"
    write(source, whole, load_recipe("mxfp4a16"))
    monkeypatch.setattr(write_module, "_LARGEST_FILE", 100_000)
    write(source, tmp_path / "cut", load_recipe("mxfp4a16"))
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    parts = sorted(set(index["weight_map"].values()))
    assert len(parts) > 1
    assert sorted(p.name for p in (tmp_path / "cut").glob("*.safetensors")) == parts
    expected = load_file(whole / "model.safetensors")
    found = {name: tensor for part in parts for name, tensor in load_file(tmp_path / "cut" / part).items()}
    assert found.keys() == expected.keys() == index["weight_map"].keys()
    assert all(torch.equal(found[n].view(torch.uint8), t.view(torch.uint8)) for n, t in expected.items())
    assert load_target(str(tmp_path / "cut"), AUTO, dtype=torch.float32, compile_quantizer="off").layers == 2


def test_a_folder_is_not_overwritten_unless_asked(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(source, out, load_recipe("fp8"))
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"out exists: choose another --out, or add --overwrite"):
        write(source, out, load_recipe("mxfp4a16"))
    assert (out / "model.safetensors").read_bytes() == before
    write(source, out, load_recipe("mxfp4a16"), overwrite=True)
    assert (out / "model.safetensors").read_bytes() != before
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file exists: choose another --out$"):
        write(source, tmp_path / "file", load_recipe("fp8"), overwrite=True)
    with pytest.raises(ValueError, match="the target's own folder"):
        write(source, source, load_recipe("fp8"), overwrite=True)


def test_nothing_is_left_behind_when_writing_fails(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_more: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(write_module, "save_tensors", fail)
    with pytest.raises(OSError, match="disk full"):
        write(source, tmp_path / "out", load_recipe("fp8"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("baked", [False, True])
def test_a_full_disk_is_an_os_error_that_names_the_file(source: Path, tmp_path: Path, baked: bool) -> None:
    with full_after(10_000), pytest.raises(OSError, match=r"part-0 could not be written: .*large"):
        write(source, tmp_path / "out", load_recipe("mxfp4a16"), baked=baked)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("recipe", "complaint"),
    [
        (load_recipe("none"), "recipe 'none' quantizes nothing"),
        (AUTO, "recipe 'auto' quantizes nothing"),
        (Recipe("r", (Rule("*", "nvfp4-torchao"),)), "rule '*': nvfp4-torchao has no compressed-tensors layout"),
        (Recipe("r", (Rule("*", "mxfp4-even", "fp8-token-sglang"),)), "fp8-token-sglang has no compressed-tensors"),
    ],
)
def test_formats_without_a_layout_are_refused(source: Path, tmp_path: Path, recipe: Recipe, complaint: str) -> None:
    with pytest.raises(ValueError, match=r"recipe") as error:
        write(source, tmp_path / "out", recipe)
    assert complaint in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_quantized_target_is_refused(source: Path, tmp_path: Path) -> None:
    write(source, tmp_path / "out", load_recipe("fp8"))
    with pytest.raises(ValueError, match=r"already quantized \(compressed-tensors\): give its 16-bit checkpoint"):
        write(tmp_path / "out", tmp_path / "twice", load_recipe("fp8"))


def test_experts_that_the_source_keeps_in_one_tensor_are_refused(tmp_path: Path) -> None:
    source = save_mixture(tmp_path / "source", "gpt-oss")
    with pytest.raises(ValueError, match=r"keeps the experts model\.layers\.0\.mlp\.experts in one tensor"):
        write(source, tmp_path / "out", load_recipe("mxfp4a16"))


@pytest.mark.parametrize("name", [n for n in WEIGHTS if not n.endswith("-ct")])
def test_codes_recovered_from_a_quantized_weight_are_the_stored_ones(name: str) -> None:
    scheme = scheme_named(name)
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 4, 256)
    weight[3], weight[5, :32] = 0, 0
    ours, stored = encoded(quantize(weight, scheme), scheme), encode(weight, scheme)
    assert torch.equal(ours.codes, stored.codes)
    assert torch.equal(ours.scale, stored.scale)
    assert torch.equal(decode(ours), decode(stored))


def test_a_reciprocal_survives_being_stored_as_its_inverse() -> None:
    """NVFP4's outer scale is ``1 / g``; what is stored is ``1 / (1 / g)``, and ``g`` again only sometimes."""
    encode_scale = torch.logspace(-6, 9, 100_001)
    decode_scale = 1 / encode_scale
    assert torch.equal(1 / (1 / decode_scale), decode_scale)
    assert not torch.equal(1 / decode_scale, encode_scale)


def test_soars_global_scale_is_stored_to_the_last_place(source: Path, tmp_path: Path) -> None:
    """Its decode scale may have no fp32 reciprocal: one unit in the last place may be lost."""
    recipe = Recipe("soar", (Rule("*.layers.*", "nvfp4", None, "soar"),))
    write(source, tmp_path / "out", recipe)
    auto = load_target(str(tmp_path / "out"), AUTO, dtype=torch.float32, compile_quantizer="off")
    for name, module in simulate(source, recipe).model.named_modules():
        if isinstance(module, LowBitLinear):
            other = auto.model.get_submodule(name)
            assert isinstance(other, LowBitLinear)
            assert torch.equal(module.weight, other.weight)
            torch.testing.assert_close(other.dequantized(), module.dequantized(), rtol=2**-22, atol=0)


def test_every_layout_names_formats_that_exist() -> None:
    assert all(scheme_named(name) for name in (*WEIGHTS, *INPUTS))
