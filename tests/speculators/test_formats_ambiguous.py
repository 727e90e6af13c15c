"""Published heads that engines read differently, or that say two things at once: refused, or read as engines do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from published_heads import Change, layer_of, published, setter
from torch import Tensor

from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.eagle3 import Eagle3Head
from bitdraft.speculators.export import export_head
from bitdraft.speculators.load import load_head
from bitdraft.speculators.low_bit import low_bit_layers, quantize_head
from bitdraft.speculators.medusa import MedusaHead

Export = Callable[..., Path]
Make = Callable[[str], DraftHead]
SPECULATORS, ORIGINAL = "eagle3-speculators", "eagle3-original"
both_layouts = pytest.mark.parametrize("layout", [SPECULATORS, ORIGINAL])


def of_layer(field: str, value: Any) -> Change:
    def change(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
        layer_of(config)[field] = value

    return change


@both_layouts
@pytest.mark.parametrize("field", ["partial_rotary_factor", "rotary_pct", "rotary_emb_fraction"])
def test_a_partial_rotation_beside_the_rotation_is_refused(
    exported: Export, rounded: LowBitTarget, layout: str, field: str
) -> None:
    with pytest.raises(ValueError, match=rf"config\.json sets {field} to 0\.5"):
        load_head(published(exported("eagle3", layout), of_layer(field, 0.5)), rounded)
    for whole in (None, 1.0):
        load_head(published(exported("eagle3", layout), of_layer(field, whole)), rounded)


@both_layouts
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_attention_heads", 0, "num_attention_heads to 0: it must be at least 1"),
        ("num_key_value_heads", 0, "num_key_value_heads to 0: it must be at least 1"),
        ("hidden_size", -64, "hidden_size to -64: it must be at least 1"),
        ("rope_parameters", {"rope_type": "zzz", "rope_theta": 10000.0}, "rope_type to 'zzz', which is not known"),
    ],
)
def test_a_value_that_makes_no_layer_is_named(
    exported: Export, rounded: LowBitTarget, layout: str, field: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=f"config.json sets {message}"):
        load_head(published(exported("eagle3", layout), of_layer(field, value)), rounded)


def second(name: str, copy_of: str) -> Change:
    def change(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        weights[name] = weights[copy_of] + 1

    return change


@pytest.mark.parametrize(
    ("kind", "layout", "name", "copy_of"),
    [
        ("eagle3", ORIGINAL, "layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight"),
        ("eagle3 fc_norm", ORIGINAL, "aux_norm_mid.weight", "fc_norm.1.weight"),
        ("medusa own", "medusa-original", "medusa_heads.0.0.linear.weight", "0.0.linear.weight"),
    ],
)
def test_two_spellings_of_one_tensor_are_refused(
    exported: Export, rounded: LowBitTarget, kind: str, layout: str, name: str, copy_of: str
) -> None:
    with pytest.raises(ValueError, match="are two spellings of one tensor") as caught:
        load_head(published(exported(kind, layout), second(name, copy_of)), rounded)
    assert name in str(caught.value)
    assert copy_of in str(caught.value)


def test_an_output_head_that_one_engine_ties_to_the_embedding_is_refused(
    exported: Export, rounded: LowBitTarget
) -> None:
    with pytest.raises(ValueError, match=r"tie_word_embeddings although lm_head\.weight is stored"):
        load_head(published(exported("eagle3 full", ORIGINAL), setter("tie_word_embeddings", True)), rounded)


@pytest.mark.parametrize("nested", [None, False])
def test_a_switch_that_eagle_config_turns_off_again_is_named(
    exported: Export, rounded: LowBitTarget, nested: bool | None
) -> None:
    folder = published(exported("eagle3 norm_before_fc", ORIGINAL), setter("norm_before_fc", nested, "eagle_config"))
    with pytest.raises(ValueError, match=rf"norm_before_fc to True but eagle_config\.norm_before_fc.* to {nested}"):
        load_head(folder, rounded)


def test_sglangs_older_names_of_the_norms_are_read(exported: Export, make_head: Make, rounded: LowBitTarget) -> None:
    def older(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        config["use_aux_norm"] = config.pop("fc_norm")
        for i, place in enumerate(("low", "mid", "high")):
            weights[f"aux_norm_{place}.weight"] = weights.pop(f"fc_norm.{i}.weight")

    loaded, head = (
        load_head(published(exported("eagle3 fc_norm", ORIGINAL), older), rounded),
        make_head("eagle3 fc_norm"),
    )
    assert isinstance(loaded, Eagle3Head) and isinstance(head, Eagle3Head)
    assert loaded.config.fc_norm and loaded.fc_norm is not None and head.fc_norm is not None
    mine, its = head.fc_norm.state_dict(), loaded.fc_norm.state_dict()
    assert mine.keys() == its.keys()
    assert all(torch.equal(mine[name], its[name]) for name in mine)


def as_original(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """A Qwen3 head in the authors' layout, as vLLM reads it."""
    layer = config.pop("transformer_layer_config")
    del config["speculators_model_type"], config["speculators_config"]
    config |= {**layer, "architectures": ["Qwen3ForCausalLM"]}
    for name in list(weights):
        weights[name.replace("layers.0.", "midlayer.")] = weights.pop(name)


@pytest.mark.parametrize("kind", ["eagle3 qwen3", "eagle3 qwen3 biases"])
def test_a_qwen3_layer_in_the_original_layout_is_read(
    exported: Export, make_head: Make, rounded: LowBitTarget, kind: str
) -> None:
    loaded, head = load_head(published(exported(kind), as_original), rounded), make_head(kind)
    assert isinstance(loaded, Eagle3Head) and isinstance(head, Eagle3Head)
    assert loaded.shape == head.shape
    assert loaded.config.attention == "qwen3"
    mine, its = dict(head.named_parameters()), dict(loaded.named_parameters())
    assert mine.keys() == its.keys()
    assert [n for n in mine if n != "fc.weight" and not torch.equal(mine[n], its[n])] == []


def test_engines_go_by_the_architecture_and_transformers_by_the_model_type(
    exported: Export, make_head: Make, rounded: LowBitTarget
) -> None:
    """Named LlamaForCausalLMEagle3 it is Llama's layer, whatever model_type says; Qwen3's default head size is 128."""
    folder = published(exported("eagle3", ORIGINAL), setter("model_type", "qwen3"))
    loaded, head = load_head(folder, rounded), make_head("eagle3")
    assert isinstance(loaded, Eagle3Head) and isinstance(head, Eagle3Head)
    assert loaded.shape == head.shape

    def forget(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
        config["model_type"] = "qwen3"
        del config["head_dim"]

    with pytest.raises(ValueError, match=r"do not fit its config\.json: size mismatch .*\[64, 512\]"):
        load_head(published(exported("eagle3", ORIGINAL), forget), rounded)


@pytest.mark.parametrize("kind", ["eagle3", "eagle3 qwen3"])
def test_a_head_size_that_is_left_out_is_the_hidden_size_over_the_heads(
    exported: Export, make_head: Make, rounded: LowBitTarget, kind: str
) -> None:
    def forget(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
        del layer_of(config)["head_dim"]

    loaded, head = load_head(published(exported(kind), forget), rounded), make_head(kind)
    assert isinstance(loaded, Eagle3Head) and isinstance(head, Eagle3Head)
    assert loaded.shape == head.shape


def other_output(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    weights["1.2.weight"][0, 0] += 1


def own_outputs(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    other_output(config, weights)
    config["original_lm_head"] = False


def test_an_output_that_vllm_takes_from_the_first_head_is_the_same_in_all(
    exported: Export, rounded: LowBitTarget
) -> None:
    with pytest.raises(ValueError, match=r"share their output \(original_lm_head\), but their stored outputs differ"):
        load_head(published(exported("medusa", "medusa-original"), other_output), rounded)
    loaded = load_head(published(exported("medusa", "medusa-original"), own_outputs), rounded)
    assert isinstance(loaded, MedusaHead)
    assert loaded.config.own_output


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4a16"])
def test_fc_in_low_bit_is_read_and_written_where_vllm_alone_reads_it(
    make_head: Make, rounded: LowBitTarget, tmp_path: Path, recipe: str
) -> None:
    export_head(quantize_head(make_head("eagle3"), load_recipe(recipe)), rounded, tmp_path / "plain", draft_length=2)

    def quantize_fc(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """``fc`` [64, 192] with the codes and scales of three layers side by side, each [64, 64] or part of a wider."""
        for leaf in ("weight", "weight_packed", "weight_scale", "weight_global_scale"):
            name = f"layers.0.self_attn.o_proj.{leaf}"
            if name in weights:
                columns = 1 if leaf.endswith("global_scale") or (leaf, recipe) == ("weight_scale", "fp8") else 3
                part = weights[name].view(torch.uint8) if weights[name].itemsize == 1 else weights[name]
                weights[f"fc.{leaf}"] = torch.cat([part] * columns, -1).view(weights[name].dtype)
        if recipe != "fp8":
            del weights["fc.weight"]
        declared = config["quantization_config"]
        declared["ignore"] = [name for name in declared["ignore"] if "fc" not in name]
        (group,) = declared["config_groups"].values()
        group["targets"].append("re:.*fc$")

    head = load_head(published(tmp_path / "plain", quantize_fc), rounded)
    assert len(low_bit_layers(head)) == 8
    export_head(head, rounded, tmp_path / "again", draft_length=2)
    assert low_bit_layers(load_head(tmp_path / "again", rounded)).keys() == low_bit_layers(head).keys()
    with pytest.raises(ValueError, match="the head has fc in low bit, which SGLang reads as a plain layer: use the"):
        export_head(head, rounded, tmp_path / "original", draft_length=2, layout=ORIGINAL)
