"""Checkpoints of a run: whole or absent, checked when read, exact when resumed.

A checkpoint is a folder ``step-000050`` with ``head.safetensors`` and ``optimizer.safetensors`` (fp32 masters
and moments as they are), ``rng.safetensors`` and ``checkpoint.json`` (step, sha256 of the other files). It is
written under a temporary name and renamed. Resuming takes the newest one whose sums hold.
"""

import hashlib
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bitdraft.quant.files import folder_written_atomically, sha256_of

_TENSOR_FILES = ("head.safetensors", "optimizer.safetensors", "rng.safetensors")


@dataclass(frozen=True)
class Resumed:
    step: int
    path: Path


def save_checkpoint(folder: Path, step: int, head: nn.Module, optimizer: torch.optim.Optimizer, keep: int) -> Path:
    """Write ``folder/step-…`` and drop all but the newest ``keep``."""
    path = folder / f"step-{step:06d}"
    with folder_written_atomically(path) as fresh:
        save_file(_contiguous(head.state_dict()), fresh / "head.safetensors")
        save_file(_optimizer_tensors(head, optimizer), fresh / "optimizer.safetensors")
        save_file(_rng_tensors(), fresh / "rng.safetensors")
        sums = {name: sha256_of(fresh / name) for name in _TENSOR_FILES}
        content = _sealed({"version": 1, "step": step, "sha256": sums})
        (fresh / "checkpoint.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return path


def resume_newest(folder: Path, head: nn.Module, optimizer: torch.optim.Optimizer) -> Resumed | None:
    """Load the newest whole checkpoint into ``head``, ``optimizer`` and the random generators; ``None`` if
    there is none.

    A damaged one is skipped with a warning. Raises ``ValueError`` if a whole one does not fit the head.
    """
    for path in reversed(checkpoints(folder)):
        reason = _damage(path)
        if reason:
            print(f"warning: checkpoint {path} is damaged ({reason}); trying the one before", file=sys.stderr)
            continue
        try:
            head.load_state_dict(load_file(path / "head.safetensors"))
        except RuntimeError as error:
            raise ValueError(
                f"checkpoint {path} does not fit this head: {str(error).splitlines()[-1].strip()}"
            ) from error
        _restore_optimizer(path, head, optimizer)
        _restore_rng(load_file(path / "rng.safetensors"))
        step = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))["step"]
        return Resumed(step, path)
    return None


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


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _optimizer_tensors(head: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every state tensor of every parameter under ``parameter/state``."""
    names = {id(p): name for name, p in head.named_parameters()}
    return _contiguous(
        {
            f"{names[id(parameter)]}/{key}": torch.as_tensor(value)
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
        }
    )


def _restore_optimizer(path: Path, head: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameters = dict(head.named_parameters())
    for full, tensor in load_file(path / "optimizer.safetensors").items():
        name, key = full.rsplit("/", 1)
        if name not in parameters or (tensor.ndim and tensor.shape != parameters[name].shape):
            raise ValueError(f"checkpoint {path}: the optimizer state of {name} does not fit this head")
        parameter = parameters[name]
        # AdamW keeps its step count on the CPU.
        optimizer.state[parameter][key] = tensor if tensor.ndim == 0 else tensor.to(parameter.device)


def _rng_tensors() -> dict[str, Tensor]:
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors


def _restore_rng(tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
