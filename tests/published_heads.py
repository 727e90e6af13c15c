"""Exports changed into what somebody else's program would have written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def config_of(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def rewrite(folder: Path, change: Change) -> None:
    """Write the files of a head anew, with ``change`` in them."""
    file = next(folder.glob("*.safetensors"))
    config, weights = config_of(folder), load_file(file)
    change(config, weights)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file, metadata={"format": "pt"})


def published(folder: Path, change: Change) -> Path:
    """The export in ``folder`` as somebody else's program would have written it."""

    def without_ours(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        for ours in ("bitdraft", "bitdraft_head"):
            config.pop(ours, None)
        change(config, weights)

    (folder / "manifest.json").unlink()
    rewrite(folder, without_ours)
    return folder


def layer_of(config: dict[str, Any]) -> dict[str, Any]:
    layer = config.get("transformer_layer_config", config)
    assert isinstance(layer, dict)
    return layer


def setter(field: str, value: Any, *inside: str) -> Change:
    def change(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
        for name in inside:
            config = config[name]
        config[field] = value

    return change
