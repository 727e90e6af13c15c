"""EAGLE-3's original layout as each engine reads it, transcribed from their sources, and heads that one misreads.

vLLM 0.32 (``gpu_model_runner``, ``llama_eagle3``), SGLang 0.5.23 (``llama_eagle3``, ``set_eagle3_layers_to_capture``),
TensorRT-LLM (``modeling_speculative``).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from published_heads import config_of
from safetensors.torch import load_file
from transformers import AutoConfig

from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.eagle3 import Eagle3Head
from bitdraft.speculators.export import LAYOUTS, export_head
from bitdraft.speculators.low_bit import quantize_head

Export = Callable[..., Path]
Make = Callable[[str], DraftHead]
ORIGINAL = "eagle3-original"


def vllm_layers(config: dict[str, Any]) -> list[int]:
    """Inputs of these layers."""
    found = config.get("eagle_aux_hidden_state_layer_ids") or config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert isinstance(found, list)
    return found


def sglang_layers(config: dict[str, Any]) -> list[int]:
    """Inputs of these layers; with no list in ``eagle_config`` the default ones."""
    return [k + 1 for k in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]


@pytest.mark.parametrize("kind", ["eagle3", "eagle3 four layers"])
def test_engines_capture_the_layers_that_the_head_was_trained_on(exported: Export, make_head: Make, kind: str) -> None:
    config, layers = config_of(exported(kind, ORIGINAL)), list(make_head(kind).capture_layers)
    assert vllm_layers(config) == layers
    assert sglang_layers(config) == layers
    assert config["num_aux_hidden_states"] == len(layers)
    assert config["eagle_config"]["use_aux_hidden_state"] is True


@pytest.mark.parametrize("kind", ["eagle3", "eagle3 norm_before_fc", "eagle3 fc_norm", "eagle3 norm_output"])
def test_engines_find_the_switches_where_they_look(exported: Export, make_head: Make, kind: str) -> None:
    config, head = config_of(exported(kind, ORIGINAL)), make_head(kind)
    assert isinstance(head, Eagle3Head)
    nested = config["eagle_config"]
    assert config["norm_before_residual"] is False
    assert nested["norm_before_fc"] is config["norm_before_fc"] is head.config.norm_before_fc  # all look there first
    assert config["fc_norm"] is head.config.fc_norm
    assert config["norm_output"] is nested["return_hidden_post_norm"] is head.config.norm_output
    assert nested["eh_proj_before_attn"] is False


@pytest.mark.parametrize(
    "rotation",
    [
        {"rope_type": "default", "rope_theta": 250000.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ],
    ids=["default", "llama3"],
)
def test_both_spellings_of_the_rotation_say_the_same(
    make_head: Make, rounded: LowBitTarget, tmp_path: Path, rotation: dict[str, Any]
) -> None:
    head = make_head("eagle3")
    assert isinstance(head, Eagle3Head)
    object.__setattr__(head.shape, "rope_parameters", rotation)
    export_head(head, rounded, tmp_path / "head", draft_length=2, layout=ORIGINAL)
    config = config_of(tmp_path / "head")
    old = {name: config[name] for name in ("rope_theta", "rope_scaling", "max_position_embeddings")}
    assert "rope_theta" not in (old["rope_scaling"] or {}), "transformers 4 does not know it there"
    old_engine: Any = AutoConfig.for_model("llama", **old)  # transformers turns the old spelling into the new one
    assert dict(old_engine.rope_parameters) == config["rope_parameters"] == rotation


def test_the_original_config_leaves_nothing_to_a_default(exported: Export, rounded: LowBitTarget) -> None:
    config = config_of(exported("eagle3", ORIGINAL))
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": 320,
        "draft_vocab_size": 96,
        "hidden_size": 64,
        "target_hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": rounded.config.rms_norm_eps,
        "max_position_embeddings": 512,
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "rope_theta": 10000.0,
        "rope_scaling": None,
    }
    assert {key: config.get(key, "missing") for key in expected} == expected
    assert "speculators_config" not in config, "engines would take it for the other layout"


def test_the_original_layer_is_called_midlayer_and_the_embedding_stays_with_the_target(exported: Export) -> None:
    names = set(load_file(exported("eagle3", ORIGINAL) / "model.safetensors"))
    layer = {name for name in names if name.startswith("midlayer.")}
    assert len(layer) == 10
    assert names - layer == {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("eagle3 norm_before_residual", "norm_before_residual, which SGLang"),
        ("eagle3 qwen3", r"norms of queries and keys \(attention qwen3\), which SGLang and TensorRT-LLM do not read"),
        ("eagle3 biases", "attention biases, which SGLang leaves out"),
        ("eagle3 both norms", "norm_before_fc and fc_norm at once"),
        ("eagle3 own embedding", "an embedding of its own"),
        ("eagle3 narrow", "an embedding of its own"),
        ("eagle3 first layer", "the input of layer 0"),
        ("eagle3 one layer", "one captured layer, behind which SGLang and TensorRT-LLM skip fc"),
        ("eagle3 six heads", "a hidden size that is no multiple of its attention heads"),
    ],
)
def test_a_head_that_an_engine_would_misread_is_refused_with_the_way_out(
    make_head: Make, rounded: LowBitTarget, tmp_path: Path, kind: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"the head has {reason}.*: use the format eagle3-speculators"):
        export_head(make_head(kind), rounded, tmp_path / "head", draft_length=2, layout=ORIGINAL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "layout", "message"),
    [
        (
            "medusa",
            "eagle3-original",
            "is for another kind of head: medusa heads are written as medusa-vllm or medusa-o",
        ),
        (
            "eagle3",
            "medusa-vllm",
            "is for another kind of head: eagle3 heads are written as eagle3-speculators or eagle3",
        ),
        ("eagle3", "gguf", "is not known: eagle3 heads are written as"),
    ],
)
def test_a_layout_for_other_heads_is_refused_with_those_that_fit(
    make_head: Make, rounded: LowBitTarget, tmp_path: Path, kind: str, layout: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        export_head(make_head(kind), rounded, tmp_path / "head", draft_length=2, layout=layout)


def test_every_layout_says_who_reads_it() -> None:
    assert {name: layout.ENGINES for name, layout in LAYOUTS.items()} == {
        "eagle3-speculators": ("vLLM",),
        "eagle3-original": ("SGLang", "vLLM", "TensorRT-LLM"),
        "medusa-vllm": ("vLLM",),
        "medusa-original": ("vLLM", "text-generation-inference"),
    }


def test_a_head_is_for_the_engines_that_compute_it(make_head: Make, rounded: LowBitTarget) -> None:
    for kind in ("eagle3", "medusa"):
        for layout in LAYOUTS.values():
            if kind == layout.KIND:
                assert layout.engines(make_head(kind)) == layout.ENGINES
    low_bit = quantize_head(make_head("eagle3"), load_recipe("nvfp4a16"), target=rounded)
    assert LAYOUTS[ORIGINAL].engines(low_bit) == ("SGLang", "vLLM")
    assert LAYOUTS["eagle3-speculators"].engines(low_bit) == ("vLLM",)


def remapped(name: str) -> str:
    """What vLLM calls a tensor of the authors' layout (``models/medusa.py``)."""
    head, place, *rest = name.replace("medusa_heads.", "").split(".")
    if "linear" in rest:
        return f"blocks.{head}.layers.{place}.{'.'.join(rest[rest.index('linear') + 1 :])}"
    return f"lm_heads.{head}.{'.'.join(rest)}"


@pytest.mark.parametrize("kind", ["medusa", "medusa own", "medusa bias"])
def test_vllm_finds_the_same_heads_in_both_medusa_layouts(
    make_head: Make, rounded: LowBitTarget, tmp_path: Path, kind: str
) -> None:
    for layout in ("medusa-vllm", "medusa-original"):
        export_head(make_head(kind), rounded, tmp_path / layout, draft_length=2, layout=layout)
    ours = load_file(tmp_path / "medusa-vllm" / "model.safetensors")
    theirs = load_file(tmp_path / "medusa-original" / "medusa_lm_head.safetensors")
    read_as = {remapped(name): tensor for name, tensor in theirs.items()}
    shared = ours.pop("lm_head.weight", None)
    if shared is not None:  # vLLM keeps the first of them
        outputs = [read_as.pop(f"lm_heads.{i}.weight") for i in range(len(theirs)) if f"lm_heads.{i}.weight" in read_as]
        assert len(outputs) == make_head(kind).longest_draft
        assert all(torch.equal(output, shared) for output in outputs)
    biases = {name: tensor for name, tensor in read_as.items() if name.endswith(".bias") and name not in ours}
    assert not any(bool(bias.any()) for bias in biases.values())
    assert read_as.keys() - biases.keys() == ours.keys()
    assert all(torch.equal(read_as[name], tensor) for name, tensor in ours.items())


@pytest.mark.parametrize("kind", ["medusa", "medusa own"])
def test_vllms_reader_of_medusa_settings_finds_how_many_heads_and_blocks_there_are(exported: Export, kind: str) -> None:
    """It renames every key with "num" and "heads" to num_heads, and likewise for layers."""
    config = config_of(exported(kind, "medusa-original"))
    heads = {k: v for k, v in config.items() if "num" in k and "heads" in k}
    blocks = {k: v for k, v in config.items() if "num" in k and "heads" not in k and "layers" in k}
    assert heads == {"medusa_num_heads": 3 if kind == "medusa" else 2}
    assert blocks == {"medusa_num_layers": 2 if kind == "medusa" else 1}
    assert config["medusa_fc_bias"] is True
    assert config["original_lm_head"] is (kind == "medusa")
    assert (config["model_type"], config["hidden_size"], config["vocab_size"]) == ("medusa", 64, 320)
