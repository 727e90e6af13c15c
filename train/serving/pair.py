"""An export folder as what an engine serves: the head, the target, and how the simulation reads the target."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from bitdraft.data.demo_target import resolve_target
from bitdraft.quant.checkpoints.read import quantization_of
from bitdraft.quant.files import sha256_of
from bitdraft.quant.loading import read_config
from bitdraft.quant.target import LowBitTarget
from bitdraft.train.serving.nvfp4 import PROFILE as EMULATION

_ON_CPU = "vllm-cpu"


@dataclass(frozen=True)
class Pair:
    """``head``: folder. ``target``: the checkpoint that both sides read, a folder or a hub id."""

    head: Path
    target: str


def find_pair(export: Path, target: str | None, cache_dir: Path) -> Pair:
    """The head in ``export`` or ``export/head``, with ``target`` or the one in ``export/target``.

    Raises ``ValueError`` where there is no head, or no target was given and none lies there.
    """
    head = next((f for f in (export / "head", export) if (f / "config.json").is_file()), None)
    if head is None:
        raise ValueError(
            f"--export {export} holds no exported head: neither {export}/config.json nor {export}/head/config.json"
        )
    beside = export / "target"
    if target is None and not (beside / "config.json").is_file():
        raise ValueError(
            f"--export {export} holds a head without a target: say with --target which checkpoint the engine serves"
        )
    return Pair(head, str(beside) if target is None else resolve_target(target, cache_dir))


def reading(target: str, *, emulate_nvfp4: bool) -> tuple[str, str]:
    """Recipe and profile with which the simulation computes what vLLM on a CPU computes of ``target``."""
    quantized = quantization_of(read_config(target, False), target) is not None
    return "auto" if quantized else "none", EMULATION if emulate_nvfp4 else _ON_CPU


def label(path: str | Path) -> str:
    """A folder's last two names, for people: without the way to it, so others may have the same; a hub id as it is."""
    whole = Path(path)
    return "/".join(whole.resolve().parts[-2:]) if whole.exists() else str(path)


def fingerprint_of_head(folder: Path) -> str:
    """16 hex digits over the bytes that an engine reads: ``config.json`` and the weights."""
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    return hashlib.sha256("".join(f"{f.name} {sha256_of(f)}\n" for f in files).encode()).hexdigest()[:16]


def served_on(target: LowBitTarget) -> str:
    """The recipe whose values the engine computes with, also where they were baked into 16-bit weights."""
    baked = getattr(target.model.config, "bitdraft", None) or {}
    if target.recipe.leaves_all_alone and baked.get("baked"):
        return f"{baked['recipe']} (baked)"
    return target.recipe.name
