"""Heads as others publish them: fields left out, other spellings, several files; and what is refused of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from published_heads import Change, layer_of, published, setter
from safetensors.torch import load_file, save_file
from torch import Tensor

from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.eagle3 import Eagle3Head
from bitdraft.speculators.load import load_head, recipe_of_head
from bitdraft.speculators.medusa import MedusaHead

Export = Callable[..., Path]
SPECULATORS, ORIGINAL = "eagle3-speculators", "eagle3-original"
both_layouts = pytest.mark.parametrize("layout", [SPECULATORS, ORIGINAL])


def as_it_is(_config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    pass


def assert_same_head(loaded: DraftHead, head: DraftHead) -> None:
    """Weights, maps, captured layers and shape; ``fc`` with its scales."""
    assert isinstance(loaded, Eagle3Head)
    assert isinstance(head, Eagle3Head)
    mine, its = dict(head.named_parameters()), dict(loaded.named_parameters())
    assert mine.keys() == its.keys()
    assert [n for n in mine if n != "fc.weight" and not torch.equal(mine[n], its[n])] == []
    assert torch.equal(head.folded_fc, loaded.folded_fc)
    assert torch.equal(head.embedding_weight, loaded.embedding_weight)
    assert loaded.capture_layers == head.capture_layers
    assert loaded.shape == head.shape
    assert torch.equal(loaded.vocab.target_ids, head.vocab.target_ids)


def in_fp32(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    config["torch_dtype"] = "float32"
    config.pop("dtype")
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            weights[name] = tensor.float()


def without_ids(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    config.pop("eagle_aux_hidden_state_layer_ids")
    config.pop("eagle_config", None)
    layer_of(config).pop("num_aux_hidden_states")


def without_mask(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    del weights["t2d"]


def narrow_map(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    weights["d2t"] = weights["d2t"].to(torch.int32)


def old_rotation(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    layer = layer_of(config)
    layer["rope_theta"], layer["rope_scaling"] = layer.pop("rope_parameters")["rope_theta"], None


def without_defaults(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    for name in ("head_dim", "hidden_act", "attention_bias", "mlp_bias", "num_hidden_layers", "layer_types"):
        layer_of(config).pop(name, None)
    config.pop("target_hidden_size")


def with_frequencies(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    weights["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)


def with_own_layer_names(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    for name in list(weights):
        weights[name.replace("midlayer.", "layers.0.")] = weights.pop(name)


def with_embedding(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Of the target, in another type."""
    del config
    if "embed_tokens.weight" in weights:
        weights["embed_tokens.weight"] = weights["embed_tokens.weight"].float()


@both_layouts
@pytest.mark.parametrize(
    "change",
    [
        as_it_is,
        in_fp32,
        without_ids,
        without_mask,
        narrow_map,
        old_rotation,
        without_defaults,
        with_frequencies,
        with_own_layer_names,
        with_embedding,
    ],
)
def test_a_published_head_is_the_head(
    exported: Export, make_head: Callable[[str], DraftHead], rounded: LowBitTarget, layout: str, change: Change
) -> None:
    folder = published(exported("eagle3", layout), change)
    loaded = load_head(folder, rounded)
    assert_same_head(loaded, make_head("eagle3"))
    assert isinstance(loaded, Eagle3Head)
    assert loaded.embed_tokens is None, "a copy of the target's embedding is not kept twice"
    assert recipe_of_head(folder) == {}


@pytest.mark.parametrize(("layout", "default"), [(SPECULATORS, True), (ORIGINAL, False)])
def test_switches_that_are_not_named_are_the_engines_defaults(
    exported: Export, rounded: LowBitTarget, layout: str, default: bool
) -> None:
    def forget(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
        for switch in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            del config[switch]

    loaded = load_head(published(exported("eagle3", layout), forget), rounded)
    assert isinstance(loaded, Eagle3Head)
    assert loaded.config.norm_before_residual is default
    assert (loaded.config.norm_before_fc, loaded.config.fc_norm, loaded.config.norm_output) == (False, False, False)


@pytest.mark.parametrize(
    ("kind", "switch", "inner"),
    [
        ("eagle3 norm_before_fc", "norm_before_fc", "norm_before_fc"),
        ("eagle3 norm_output", "norm_output", "return_hidden_post_norm"),
    ],
)
def test_a_switch_that_only_eagle_config_names_is_read(
    exported: Export, rounded: LowBitTarget, kind: str, switch: str, inner: str
) -> None:
    def move(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
        del config[switch]
        config["eagle_config"] = {inner: True}

    loaded = load_head(published(exported(kind, ORIGINAL), move), rounded)
    assert getattr(loaded.config, switch) is True


@pytest.mark.parametrize(
    ("top", "nested", "read"),
    [
        ([1, 3, 6], [0, 2, 5], (1, 3, 6)),
        (None, [0, 2, 5], (1, 3, 6)),
        ([1, 3, 6], None, (1, 3, 6)),
        ([1, 3, 6], [], (1, 3, 6)),
    ],
)
def test_captured_layers_are_read_in_the_words_of_who_wrote_them(
    exported: Export, rounded: LowBitTarget, top: list[int] | None, nested: list[int] | None, read: tuple[int, ...]
) -> None:
    """The list at the top names inputs (vLLM), the nested one outputs (SGLang and those who train for it)."""

    def rename(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
        config["eagle_aux_hidden_state_layer_ids"] = top
        config["eagle_config"] = None if nested is None else {"eagle_aux_hidden_state_layer_ids": nested}

    assert load_head(published(exported("eagle3", ORIGINAL), rename), rounded).capture_layers == read


@both_layouts
def test_a_stretched_rotation_is_read_in_both_spellings(exported: Export, rounded: LowBitTarget, layout: str) -> None:
    stretched = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }

    def old(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
        layer = layer_of(config)
        del layer["rope_parameters"]
        layer |= {"rope_theta": 500000.0, "rope_scaling": stretched}

    loaded = load_head(published(exported("eagle3", layout), old), rounded)
    assert isinstance(loaded, Eagle3Head)
    assert loaded.shape.rope_parameters == {**stretched, "rope_theta": 500000.0}


def test_an_embedding_that_differs_is_kept(exported: Export, rounded: LowBitTarget) -> None:
    def change(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        weights["embed_tokens.weight"][5, 7] += 1

    loaded = load_head(published(exported("eagle3"), change), rounded)
    assert isinstance(loaded, Eagle3Head)
    assert loaded.embed_tokens is not None
    assert int((loaded.embed_tokens.weight != rounded.embedding.weight).sum()) == 1
    assert not loaded.embed_tokens.weight.requires_grad


@both_layouts
def test_an_output_head_that_is_missing_is_the_targets(exported: Export, rounded: LowBitTarget, layout: str) -> None:
    def drop(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        del weights["lm_head.weight"]

    loaded = load_head(published(exported("eagle3 full", layout), drop), rounded)
    assert torch.equal(loaded.output_weight, rounded.output_weight)


def tie(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    config["tie_word_embeddings"] = True
    del weights["lm_head.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (setter("num_hidden_layers", 2), "num_hidden_layers to 2"),
        (setter("bias", True), "bias to True"),
        (setter("logit_scale", 0.5), r"logit_scale to 0\.5"),
        (setter("use_aux_hidden_state", False, "eagle_config"), r"eagle_config\.use_aux_hidden_state to False"),
        (setter("eh_proj_before_attn", True, "eagle_config"), r"eagle_config\.eh_proj_before_attn to True"),
        (setter("hidden_act", "gelu"), "hidden_act"),
        (tie, r"lm_head\.weight is missing"),
    ],
)
def test_a_published_head_that_cannot_be_computed_is_refused(
    exported: Export, rounded: LowBitTarget, change: Change, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_head(published(exported("eagle3 full", ORIGINAL), change), rounded)


def shard(folder: Path, parts: int) -> dict[str, str]:
    """Take the only file apart; returns the map from tensors to files."""
    file = next(folder.glob("*.safetensors"))
    weights = load_file(file)
    file.unlink()
    where = {n: f"model-{i % parts + 1:05d}-of-{parts:05d}.safetensors" for i, n in enumerate(sorted(weights))}
    for name in set(where.values()):
        save_file({n: weights[n] for n in where if where[n] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}), encoding="utf-8")
    return where


@both_layouts
def test_a_head_in_several_files_is_put_together(
    exported: Export, make_head: Callable[[str], DraftHead], rounded: LowBitTarget, layout: str
) -> None:
    folder = published(exported("eagle3", layout), as_it_is)
    shard(folder, 3)
    assert_same_head(load_head(folder, rounded), make_head("eagle3"))


def test_a_shard_that_is_missing_is_named(exported: Export, rounded: LowBitTarget) -> None:
    folder = published(exported("eagle3"), as_it_is)
    gone = next(iter(shard(folder, 2).values()))
    (folder / gone).unlink()
    with pytest.raises(ValueError, match=f"no whole head: {gone} is missing"):
        load_head(folder, rounded)


@pytest.mark.parametrize(
    "index", [{"weight_map": {"norm.weight": "../../secrets.safetensors"}}, {"weight_map": []}, {}]
)
def test_an_index_that_points_elsewhere_is_refused(
    exported: Export, rounded: LowBitTarget, index: dict[str, Any]
) -> None:
    folder = published(exported("eagle3"), as_it_is)
    shard(folder, 2)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ValueError, match=r"does not say which file holds what"):
        load_head(folder, rounded)


def test_files_that_nothing_tells_apart_are_refused(exported: Export, rounded: LowBitTarget) -> None:
    folder = published(exported("eagle3"), as_it_is)
    shard(folder, 2)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"2 safetensors files but no model\.safetensors\.index\.json"):
        load_head(folder, rounded)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt", "head.pth"])
def test_a_pickle_is_refused_with_the_way_out(exported: Export, rounded: LowBitTarget, name: str) -> None:
    folder = published(exported("eagle3"), as_it_is)
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(
        ValueError, match=rf"only as a pickle \({name}\), .*convert it .*weights_only=True.*safetensors"
    ):
        load_head(folder, rounded)


def with_prefix(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    for name in list(weights):
        weights[f"medusa_heads.{name}"] = weights.pop(name)


def bare(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    """As the authors' training writes it."""
    for name in set(config) - {"medusa_num_heads", "medusa_num_layers", "base_model_name_or_path"}:
        del config[name]


def claims_fewer(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    config["medusa_num_heads"] = 1


@pytest.mark.parametrize("change", [as_it_is, with_prefix, bare, claims_fewer])
def test_published_medusa_heads_are_the_heads(
    exported: Export, make_head: Callable[[str], DraftHead], rounded: LowBitTarget, change: Change
) -> None:
    """Whose blocks have biases, also where ours had none, and outputs of their own unless they are said to share."""
    loaded, head = load_head(published(exported("medusa", "medusa-original"), change), rounded), make_head("medusa")
    assert isinstance(loaded, MedusaHead)
    assert (loaded.config.heads, loaded.config.blocks, loaded.config.own_output, loaded.config.bias) == (
        3,
        2,
        change is bare,
        True,
    )
    its = dict(loaded.named_parameters())
    for name, weight in head.named_parameters():
        assert torch.equal(weight, its[name]), name
    assert all(bool((t == 0).all()) for name, t in its.items() if name.endswith(".bias"))
    outputs = loaded.output_weight if change is bare else [loaded.output_weight]
    assert all(torch.equal(output, rounded.output_weight) for output in outputs)


def test_medusa_heads_without_an_output_share_the_targets(exported: Export, rounded: LowBitTarget) -> None:
    def drop(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        for name in [n for n in weights if n.count(".") == 2]:
            del weights[name]

    loaded = load_head(published(exported("medusa", "medusa-original"), drop), rounded)
    assert isinstance(loaded, MedusaHead)
    assert not loaded.config.own_output
    assert torch.equal(loaded.output_weight, rounded.output_weight)


def add_stray(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    weights["mystery"] = torch.zeros(1)


def drop_block(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    del weights["1.0.linear.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (setter("medusa_num_heads", 4), "medusa_num_heads to 4 but 3 are stored"),
        (setter("truncated_vocab_size", 32), "truncated_vocab_size"),
        (setter("logit_scale", 2.0), r"logit_scale to 2\.0"),
        (setter("hidden_size", 32), "trained for a target with hidden size 32"),
        (add_stray, "tensor mystery is none of a Medusa head's"),
        (drop_block, r"blocks\.1\.layers\.0\.weight"),
        (setter("quantization_config", {"quant_method": "compressed-tensors"}), "medusa head is loaded by no engine"),
    ],
)
def test_medusa_heads_that_cannot_be_computed_are_refused(
    exported: Export, rounded: LowBitTarget, change: Change, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_head(published(exported("medusa", "medusa-original"), change), rounded)


def differ(weights: dict[str, Tensor]) -> None:
    weights["2.2.weight"][0, 0] += 1


def bend(weights: dict[str, Tensor]) -> None:
    weights["0.1.linear.bias"][3] = 1


@pytest.mark.parametrize(("change", "message"), [(differ, "their stored outputs differ"), (bend, "bias is not zero")])
def test_an_export_that_contradicts_itself_is_refused(
    exported: Export, rounded: LowBitTarget, change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    folder = exported("medusa", "medusa-original")
    (folder / "manifest.json").unlink()
    weights = load_file(folder / "medusa_lm_head.safetensors")
    change(weights)
    save_file(weights, folder / "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match=message):
        load_head(folder, rounded)
