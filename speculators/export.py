"""Writing a trained head for an engine, and reading one back.

An export is a folder with ``model.safetensors``, ``config.json`` in the engine's own words and
``manifest.json`` with the sha256 of both and what the head was trained against.
"""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bitdraft.quant.files import folder_written_atomically, sha256_of
from bitdraft.quant.rotation import ORIGINAL, basis_name, check_basis
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.formats import eagle3_vllm, medusa_vllm

FORMATS: dict[str, ModuleType] = {"eagle3": eagle3_vllm, "medusa": medusa_vllm}
"""The engine format of each kind of head."""


def export_head(head: DraftHead, target: LowBitTarget, path: Path, *, draft_length: int) -> None:
    """Write ``path`` (replaced as a whole if it exists). ``draft_length``: what the engine drafts by default."""
    layout = FORMATS[head.kind]
    weights = {name: tensor.cpu().contiguous() for name, tensor in layout.tensors(head).items()}
    bad = [name for name, tensor in weights.items() if tensor.is_floating_point() and not torch.isfinite(tensor).all()]
    if bad:
        raise ValueError(f"not exported: {bad[0]} holds NaN or infinity")
    described: dict[str, Any] = layout.config(head, target, draft_length)
    described["bitdraft"] = {
        "recipe": target.recipe.name,
        "recipe_fingerprint": target.recipe.fingerprint,
        "target_fingerprint": target.fingerprint,
        "residual_basis": basis_name(target.model),
    }
    with folder_written_atomically(path) as fresh:
        save_file(weights, fresh / "model.safetensors", metadata={"format": "pt"})
        (fresh / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        sums = {name: sha256_of(fresh / name) for name in ("model.safetensors", "config.json")}
        (fresh / "manifest.json").write_text(json.dumps({"sha256": sums}, indent=2) + "\n", encoding="utf-8")


def load_head(path: Path, target: LowBitTarget) -> DraftHead:
    """Read an exported head for ``target``, in the target's dtype and on its device, ready to draft.

    Raises ``ValueError`` naming the folder and what is wrong: missing or damaged files, an unknown format, weights that
    do not fit, or a target of another shape.
    """
    config_path, weights_path = path / "config.json", path / "model.safetensors"
    for file in (config_path, weights_path):
        if not file.is_file():
            raise ValueError(f"{path} holds no exported head: {file.name} is missing")
    _check_manifest(path)
    described = _json_object(config_path)
    try:
        weights = load_file(weights_path)
    except SafetensorError as error:
        raise ValueError(f"the head in {path} is damaged: {error}") from error
    layout = next((f for f in FORMATS.values() if f.is_this_format(described)), None)
    if layout is None:
        raise ValueError(f"{config_path} is not of a known head format ({', '.join(FORMATS)})")
    try:
        head: DraftHead = layout.load(described, weights, target)
    except KeyError as error:
        raise ValueError(f"{config_path} lacks the key {error}") from error
    except RuntimeError as error:
        raise ValueError(
            f"{weights_path} does not fit its config.json: {str(error).splitlines()[-1].strip()}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    head.fits(target)
    try:
        check_basis(recipe_of_head(path).get("residual_basis", ORIGINAL), target.model)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return head.placed(target.device, target.dtype).eval().requires_grad_(False)


def recipe_of_head(path: Path) -> dict[str, Any]:
    """What the export says it was trained against (``recipe``, ``recipe_fingerprint``, ``target_fingerprint``,
    ``residual_basis``)."""
    return dict(_json_object(path / "config.json").get("bitdraft", {}))


def _check_manifest(path: Path) -> None:
    manifest = path / "manifest.json"
    if not manifest.is_file():
        return  # a head that was not exported here
    sums = _json_object(manifest).get("sha256")
    if not isinstance(sums, dict) or set(sums) != {"model.safetensors", "config.json"}:
        raise ValueError(f"the head in {path} is damaged: manifest.json does not hold both sums")
    for name, expected in sums.items():
        if sha256_of(path / name) != expected:
            raise ValueError(f"the head in {path} is damaged: {name} has another sha256 than manifest.json says")


def _json_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"the head in {file.parent} is damaged: {file.name} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"the head in {file.parent} is damaged: {file.name} holds no JSON object")
    return content
