"""The tensors of a model folder, read by name, one at a time, whichever of its safetensors files holds them; and how
such a file is written."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FETCHED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.py"]  # what save_pretrained writes


def model_folder(target: str) -> Path:
    """The folder itself, or the snapshot of a hub id; ``ValueError`` if there is neither."""
    if Path(target).is_dir():
        return Path(target)
    try:
        return Path(snapshot_download(target, allow_patterns=_FETCHED))
    except (OSError, ValueError) as error:
        raise ValueError(f"target {target!r} could not be fetched: {str(error).strip().splitlines()[0]}") from error


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file. ``OSError`` where it cannot be written, as on a full disk."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:  # not an OSError, whatever the system said
        raise OSError(f"{path} could not be written: {error}") from error


class TensorFiles:
    """All tensors of a folder by name. Raises ``ValueError`` for missing or damaged files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}  # tensor name → the open file that holds it
        for path in self._paths():
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} cannot be read (damaged or missing?): {error}") from error
            self._files |= dict.fromkeys(file.keys(), file)

    def __iter__(self) -> Any:
        return iter(sorted(self._files))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def _paths(self) -> list[Path]:
        if (self.folder / _ONE_FILE).is_file():
            return [self.folder / _ONE_FILE]
        index = self.folder / _INDEX
        if not index.is_file():
            raise ValueError(f"{self.folder} has neither {_ONE_FILE} nor {_INDEX}: only safetensors are read")
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of safetensors files") from error
        return [self.folder / name for name in sorted(names)]
