"""Checkpoints of a run: whole or absent, checked when read, exact when resumed.

A checkpoint is a folder ``step-000050`` with ``module.safetensors`` (fp32 masters as they are),
``optimizer.safetensors`` (moments, likewise), ``rng.safetensors`` and ``checkpoint.json`` (step, measurements so far,
sha256 of the other files). It is written under a temporary name and renamed. Resuming takes the newest one whose sums
hold.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bitdraft.quant.files import folder_written_atomically, sha256_of
from bitdraft.train.selection import Choice, best_of

_TENSOR_FILES = ("module.safetensors", "optimizer.safetensors", "rng.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    step: int
    path: Path
    history: list[Choice]
    weighting: dict[str, Any] = field(default_factory=dict)  # Weighting.state

    @property
    def module(self) -> dict[str, Tensor]:
        return load_file(self.path / "module.safetensors")

    @property
    def optimizer(self) -> dict[str, Tensor]:
        """Every state tensor of every parameter under ``parameter/state``."""
        return load_file(self.path / "optimizer.safetensors")

    def restore_rng(self) -> None:
        tensors = load_file(self.path / "rng.safetensors")
        torch.set_rng_state(tensors["cpu"])
        if "cuda" in tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["cuda"])


def save_checkpoint(
    folder: Path,
    step: int,
    module: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    history: Sequence[Choice],
    keep: int,
    weighting: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``folder/step-…`` and drop all but the newest ``keep`` and the one of the best measurement."""
    path = path_of(folder, step)
    for left in folder.glob(".step-*"):  # of a writer that was killed
        shutil.rmtree(left)
    with folder_written_atomically(path) as fresh:
        save_file(dict(module), fresh / "module.safetensors")
        save_file(dict(optimizer), fresh / "optimizer.safetensors")
        save_file(_rng_tensors(), fresh / "rng.safetensors")
        sums = {name: sha256_of(fresh / name) for name in _TENSOR_FILES}
        about = {"version": 3, "step": step, "history": [asdict(c) for c in history], "sha256": sums}
        content = _sealed(about | ({"weighting": dict(weighting)} if weighting else {}))
        (fresh / "checkpoint.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    best = best_of(history)
    for old in checkpoints(folder)[:-keep]:
        if best is None or old != path_of(folder, best.step):
            shutil.rmtree(old)
    return path


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint; a damaged one is passed over with a warning."""
    for path in reversed(checkpoints(folder)):
        if found := read_checkpoint(path, "trying the one before"):
            return found
    return None


def read_checkpoint(path: Path, instead: str) -> Checkpoint | None:
    """The checkpoint in ``path``; ``None`` with a warning, which says what happens ``instead``, if it is damaged."""
    reason = _damage(path)
    if reason:
        print(f"warning: checkpoint {path} is damaged ({reason}); {instead}", file=sys.stderr)
        return None
    content = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
    return Checkpoint(content["step"], path, [Choice(**c) for c in content["history"]], content.get("weighting", {}))


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoint folders, oldest first."""
    return sorted(folder.glob("step-[0-9]*")) if folder.is_dir() else []


def _damage(path: Path) -> str | None:
    """Why a checkpoint cannot be trusted, or ``None``."""
    try:
        content = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # missing, not JSON or not UTF-8
        return f"checkpoint.json: {type(error).__name__}"
    if not isinstance(content, dict) or content != _sealed({k: v for k, v in content.items() if k != "seal"}):
        return "checkpoint.json has another seal"
    if content.get("version") != 3:
        return f"it is of version {content.get('version')}, which this Bitdraft does not read"
    sums = content["sha256"]
    for name in _TENSOR_FILES:
        if not (path / name).is_file():
            return f"{name} is missing"
        if sha256_of(path / name) != sums.get(name):
            return f"{name} has another sha256"
    return None


def _sealed(content: dict[str, Any]) -> dict[str, Any]:
    """``content`` with the sha256 of itself: a description that was changed is noticed like any other file."""
    text = json.dumps(content, sort_keys=True)
    return {**content, "seal": hashlib.sha256(text.encode()).hexdigest()}


def _rng_tensors() -> dict[str, Tensor]:
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors
