"""Exports that are damaged, foreign, for another target, or could not be written: each says so in a sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from published_heads import config_of
from safetensors.torch import load_file, save_file
from tiny import save_tiny_target
from torch import Tensor

from bitdraft.quant.presets import load_recipe
from bitdraft.quant.rotation import random_rotation, rotate_residual
from bitdraft.quant.target import LowBitTarget, load_target
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.export import export_head
from bitdraft.speculators.load import load_head

H, V = 64, 320
KINDS = ["eagle3", "eagle3 full", "eagle3 four layers", "medusa", "medusa own"]
every_kind = pytest.mark.parametrize("kind", KINDS)
Make = Callable[[str], DraftHead]


@pytest.mark.parametrize("change", [{"hidden_size": 96, "head_dim": 24}, {"vocab_size": 352}], ids=["hidden", "vocab"])
@pytest.mark.parametrize("kind", ["eagle3", "medusa", "medusa own"])
def test_a_target_of_another_shape_is_refused(
    exported: Callable[[str], Path], tmp_path: Path, kind: str, change: dict[str, int]
) -> None:
    folder = save_tiny_target(tmp_path / "other", num_hidden_layers=8, **change)
    other = load_target(str(folder), load_recipe("none"), dtype=torch.float32, compile_quantizer="off")
    wanted = f"{change.get('hidden_size', H)} and {change.get('vocab_size', V)}"
    with pytest.raises(ValueError, match=f"trained for a target with hidden size 64 and vocabulary 320, .*{wanted}"):
        load_head(exported(kind), other)


def test_a_target_with_fewer_layers_than_were_captured_is_refused(
    exported: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = save_tiny_target(tmp_path / "shallow", num_hidden_layers=5)
    shallow = load_target(str(folder), load_recipe("none"), dtype=torch.float32, compile_quantizer="off")
    with pytest.raises(ValueError, match=r"captured layers \[2, 4, 5\] must ascend within 0 … 4"):
        load_head(exported("eagle3"), shallow)


@every_kind
def test_a_flipped_byte_is_noticed(exported: Callable[[str], Path], rounded: LowBitTarget, kind: str) -> None:
    path = exported(kind)
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged: model\.safetensors has another sha256"):
        load_head(path, rounded)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_missing_file_is_named(exported: Callable[[str], Path], rounded: LowBitTarget, name: str) -> None:
    path = exported("eagle3")
    (path / name).unlink()
    with pytest.raises(ValueError, match=f"holds no exported head: {name} is missing"):
        load_head(path, rounded)


def test_a_folder_that_is_not_there_is_named(rounded: LowBitTarget, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere holds no exported head"):
        load_head(tmp_path / "nowhere", rounded)


Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def drop_map(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    del weights["d2t"]


def contradict_map(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    weights["t2d"] = ~weights["t2d"]


def disorder_map(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    weights["d2t"] = weights["d2t"].flip(0)


def drop_weight(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    del weights["norm.weight"]


def reshape_weight(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    weights["fc.weight"] = weights["fc.weight"][:, : 2 * H].contiguous()


def add_weight(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    weights["mystery"] = torch.zeros(1)


def norm_first(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    config["norm_before_fc"] = True


def deepen(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    config["transformer_layer_config"]["num_hidden_layers"] = 2


def drop_output(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    del weights["lm_head.weight"]


def shrink(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    config["draft_vocab_size"] = 95


def count_wrong(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    config["transformer_layer_config"]["num_aux_hidden_states"] = 4


def slide(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    config["transformer_layer_config"]["layer_types"] = ["sliding_attention"]


def bias_mlp(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    config["transformer_layer_config"]["mlp_bias"] = True


def rotate_half(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    config["transformer_layer_config"]["rope_parameters"]["partial_rotary_factor"] = 0.5


def odd_width(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    config["transformer_layer_config"]["num_attention_heads"] = 3


def other_layer(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    config["transformer_layer_config"]["model_type"] = "gemma3"


def other_activation(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    config["transformer_layer_config"]["hidden_act"] = "gelu"


def forget_layer(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    del config["transformer_layer_config"]


def forget_kind(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    config["transformer_layer_config"] = ["llama"]


def one_layer(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = 4


def other_format(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    config["speculators_model_type"] = "dflash"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_map, r"vocabulary is reduced \(96 of 320 tokens\) but the map d2t is missing"),
        (contradict_map, "d2t and t2d do not describe the same tokens"),
        (disorder_map, "must ascend"),
        (drop_weight, r"norm\.weight"),
        (reshape_weight, r"fc\.weight"),
        (add_weight, "mystery"),
        (norm_first, r"input_norm\.weight"),
        (deepen, "num_hidden_layers to 2: only drafts of one layer"),
        (drop_output, r"lm_head\.weight is missing"),
        (shrink, r"map d2t is torch\.int64 \[96\], but 95"),
        (count_wrong, "num_aux_hidden_states to 4 but names 3 layers"),
        (slide, "sliding_attention"),
        (bias_mlp, "mlp_bias to True"),
        (rotate_half, "partial_rotary_factor"),
        (odd_width, r"do not fit its config\.json: size mismatch for layers\.0\.self_attn\.\S+_proj"),
        (other_layer, "model_type to 'gemma3'"),
        (other_activation, "hidden_act"),
        (forget_kind, "field of another type"),
        (one_layer, "field of another type"),
        (forget_layer, "lacks the key 'transformer_layer_config'"),
        (other_format, "not of a known head format"),
    ],
)
def test_a_foreign_checkpoint_that_does_not_fit_says_why(
    exported: Callable[[str], Path], rounded: LowBitTarget, change: Change, message: str
) -> None:
    path = exported("eagle3")
    config, weights = config_of(path), load_file(path / "model.safetensors")
    change(config, weights)
    (path / "manifest.json").unlink()  # as if another program had written it
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, path / "model.safetensors")
    with pytest.raises(ValueError, match=message) as caught:
        load_head(path, rounded)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[]"),
        ("config.json", '{"speculators_model_type": "eagle3"'),
        ("config.json", ""),
        ("model.safetensors", ""),
        ("model.safetensors", "not tensors"),
        ("manifest.json", ""),
        ("manifest.json", "{}"),
        ("manifest.json", "[]"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_the_folder(
    exported: Callable[[str], Path], rounded: LowBitTarget, name: str, content: str
) -> None:
    path = exported("eagle3")
    if name != "manifest.json":
        (path / "manifest.json").unlink()
    (path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="head") as caught:
        load_head(path, rounded)
    assert str(path) in str(caught.value)


def test_a_head_that_is_not_finite_is_not_exported(make_head: Make, rounded: LowBitTarget, tmp_path: Path) -> None:
    head = make_head("eagle3")
    with torch.no_grad():
        next(iter(head.parameters()))[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"not exported: \S+ holds NaN or infinity"):
        export_head(head, rounded, tmp_path / "head", draft_length=2)
    assert list(tmp_path.iterdir()) == []


def test_a_second_export_replaces_the_first_as_a_whole(
    exported: Callable[[str], Path], make_head: Make, rounded: LowBitTarget, tmp_path: Path
) -> None:
    path = exported("eagle3")
    (path / "stray").write_text("left over", encoding="utf-8")
    export_head(make_head("medusa"), rounded, path, draft_length=2)
    assert load_head(path, rounded).kind == "medusa"
    assert not (path / "stray").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


def test_a_head_is_refused_in_another_basis(make_head: Make, tmp_path: Path) -> None:
    """A head trained on a plain target gets no rotated states, and the other way round."""
    folder = str(save_tiny_target(tmp_path / "target", num_hidden_layers=8))
    plain, rotated = (load_target(folder, load_recipe("none"), dtype=torch.float32) for _ in range(2))
    rotate_residual(rotated.model, random_rotation(rotated.hidden_size))
    for name, own, other in (("plain", plain, rotated), ("rotated", rotated, plain)):
        export_head(make_head("eagle3"), own, tmp_path / name, draft_length=2)
        load_head(tmp_path / name, own)
        with pytest.raises(ValueError, match=rf"{name}: the head reads hidden states in the basis .*unrotate"):
            load_head(tmp_path / name, other)
