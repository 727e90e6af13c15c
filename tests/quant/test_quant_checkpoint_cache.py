"""The KV cache of a quantized checkpoint: its scales, its defaults, and what it may not ask for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_checkpoints import SIZES, edit_config, edit_weights, store
from tiny import save_tiny_target
from torch import Tensor

from bitdraft.quant.attention.rules import KvRule
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recipe import AUTO
from bitdraft.quant.target import LowBitTarget, load_target

SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
ATTENTION = "model.layers.{}.self_attn"


@pytest.fixture(scope="module")
def sixteen_bit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("sixteen") / "target", **SIZES)


def load(folder: Path, recipe: str = AUTO.name) -> LowBitTarget:
    return load_target(str(folder), load_recipe(recipe), dtype=torch.float32, compile_quantizer="off")


def checkpoint(source: Path, out: Path, kind: str, tensors: dict[str, Tensor], **declared: Any) -> Path:
    """A stored checkpoint with more tensors and with ``declared`` in its quantization_config."""
    folder, _ = store(source, out, kind)
    edit_weights(folder, lambda weights: weights.update(tensors))
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit_config(folder, quantization_config={**config, **declared})
    return folder


def scales(target: LowBitTarget) -> tuple[list[list[float]], list[list[float]]]:
    cache = target.applied.cache
    assert cache is not None
    return cache.key_scales.tolist(), cache.value_scales.tolist()


@pytest.mark.parametrize(
    ("kind", "declared", "names"),
    [
        ("ct-fp8-channel", {"kv_cache_scheme": SCHEME}, ("k_scale", "v_scale")),
        ("modelopt-fp8", {"kv_cache_quant_algo": "FP8"}, ("k_proj.k_scale", "v_proj.v_scale")),
        (
            "modelopt-nvfp4",
            {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
            ("k_scale", "v_scale"),
        ),
    ],
)
def test_stored_scales_become_the_cache(
    sixteen_bit: Path, tmp_path: Path, kind: str, declared: dict[str, Any], names: tuple[str, str]
) -> None:
    stored = {
        f"{ATTENTION.format(layer)}.{name}": torch.tensor([0.5 * (layer + 1) * (i + 1)])
        for layer in range(2)
        for i, name in enumerate(names)
    }
    target = load(checkpoint(sixteen_bit, tmp_path / "stored", kind, stored, **declared))
    assert scales(target) == ([[0.5], [1.0]], [[1.0], [2.0]])
    assert target.recipe.kv == KvRule(scales="stored")
    assert "keys and values cached in fp8-kv, scales stored per tensor: keys 0.5 … 1, values 1 … 2" in (
        target.applied.summary().splitlines()
    )
    rounded, ids = target.applied.cache, torch.arange(9)[None]
    assert target.new_cache(4).rounding is rounded
    assert rounded is not None
    before = target.states(ids).last_hidden
    rounded.key_scales.mul_(8)
    assert not torch.equal(target.states(ids).last_hidden, before), "the scales should be what rounds"


def test_scales_per_head(sixteen_bit: Path, tmp_path: Path) -> None:
    stored = {f"{ATTENTION.format(0)}.k_scale": torch.tensor([[[0.25]], [[4.0]]])}
    scheme = {**SCHEME, "strategy": "attn_head"}
    target = load(checkpoint(sixteen_bit, tmp_path / "stored", "ct-mxfp4", stored, kv_cache_scheme=scheme))
    assert scales(target) == ([[0.25, 4.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]])
    assert target.recipe.kv == KvRule(scales="stored", per="head")
    assert "keys 0.25 … 4, values 1 … 1 (1 where 3 are missing from the checkpoint)" in target.applied.summary()


def test_missing_scales_are_one_and_said_to_be(sixteen_bit: Path, tmp_path: Path) -> None:
    target = load(checkpoint(sixteen_bit, tmp_path / "stored", "ct-mxfp4", {}, kv_cache_scheme=SCHEME))
    assert scales(target) == ([[1.0], [1.0]], [[1.0], [1.0]])
    assert "keys and values cached in fp8-kv, scale 1: the checkpoint holds no scales" in target.applied.summary()


def test_scales_that_are_not_asked_for_wait_for_the_suffix(sixteen_bit: Path, tmp_path: Path) -> None:
    stored = {f"{ATTENTION.format(layer)}.{kind}_scale": torch.tensor(0.5) for layer in range(2) for kind in "kv"}
    folder = checkpoint(sixteen_bit, tmp_path / "stored", "ct-mxfp4", stored)
    plain, asked = load(folder), load(folder, "auto+kvfp8")
    assert plain.applied.cache is None
    assert plain.recipe.kv is None
    assert "does not ask for it: auto+kvfp8 does" in plain.applied.summary()
    assert scales(asked) == ([[0.5], [0.5]], [[0.5], [0.5]])
    assert asked.recipe.name == "auto+kvfp8"
    assert asked.recipe.fingerprint != plain.recipe.fingerprint
    edit_weights(folder, lambda weights: weights.update({f"{ATTENTION.format(1)}.v_scale": torch.tensor(0.25)}))
    assert load(folder, "auto+kvfp8").fingerprint != asked.fingerprint, "other scales make another target"


@pytest.mark.parametrize(
    ("kind", "tensors", "declared", "message"),
    [
        ("modelopt-fp8", {}, {"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo 'NVFP4' is not supported"),
        ("ct-mxfp4", {}, {"kv_cache_scheme": {**SCHEME, "num_bits": 4}}, "kv_cache_scheme of .*'num_bits': 4.* is not"),
        ("ct-mxfp4", {}, {"kv_cache_scheme": {**SCHEME, "dynamic": True}}, "kv_cache_scheme of .*'dynamic': True"),
        (
            "ct-mxfp4",
            {"k_scale": torch.ones(3)},
            {"kv_cache_scheme": SCHEME},
            r"k_scale has shape \[3\]: neither one scale",
        ),
        ("ct-mxfp4", {"k_scale": torch.zeros(1)}, {"kv_cache_scheme": SCHEME}, "key scales are not all positive"),
        (
            "ct-mxfp4",
            {"v_scale": torch.tensor(torch.nan)},
            {"kv_cache_scheme": SCHEME},
            "value scales are not all positive",
        ),
        (
            "ct-mxfp4",
            {"k_zero_point": torch.ones(1)},
            {"kv_cache_scheme": SCHEME},
            "cache with zero points is not supported",
        ),
        (
            "ct-mxfp4",
            {"k_scale": torch.ones(1), "k_proj.k_scale": torch.ones(1)},
            {"kv_cache_scheme": SCHEME},
            "layer 0 has another such scale",
        ),
    ],
)
def test_a_cache_that_is_not_simulated_is_refused(
    sixteen_bit: Path, tmp_path: Path, kind: str, tensors: dict[str, Tensor], declared: dict[str, Any], message: str
) -> None:
    named = {f"{ATTENTION.format(0)}.{name}": tensor for name, tensor in tensors.items()}
    folder = checkpoint(sixteen_bit, tmp_path / "stored", kind, named, **declared)
    with pytest.raises(ValueError, match=message):
        load(folder)
