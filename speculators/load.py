"""Reading a head back: every layout that is written here, and heads that others have published in them."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bitdraft.quant.files import sha256_of
from bitdraft.quant.rotation import ORIGINAL, check_basis
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.export import LAYOUTS, MANIFEST
from bitdraft.speculators.formats.facts import tokenizer_of

_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_NOT_WEIGHTS = "rotary_emb.inv_freq"  # which old checkpoints store


def load_head(path: Path, target: LowBitTarget) -> DraftHead:
    """Read a head for ``target``, in the target's dtype and on its device, ready to draft.

    ``path``: a folder with config.json and safetensors, one file or several with an index. Raises ``ValueError`` naming
    the folder and what is wrong: missing or damaged files, pickles, an unknown format, weights that do not fit, or a
    target of another shape, residual basis or tokenizer.
    """
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} holds no exported head: config.json is missing")
    files = _weight_files(path)
    _check_manifest(path, files)
    described = _json_object(path / "config.json")
    weights = _tensors(path, files)
    layout = next((f for f in LAYOUTS.values() if f.is_this_format(described, set(weights))), None)
    if layout is None:
        raise ValueError(f"{path / 'config.json'} is not of a known head format ({', '.join(LAYOUTS)})")
    try:
        head: DraftHead = layout.load(described, weights, target)
        _check_target(described.get("bitdraft") or {}, target)
        head.fits(target)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{path / 'config.json'} has a field of another type than engines read: {error}") from error
    except KeyError as error:
        raise ValueError(f"{path / 'config.json'} lacks the key {error}") from error
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise ValueError(f"the weights in {path} do not fit its config.json: {reason}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return head.placed(target.device, target.dtype).eval().requires_grad_(False)


def recipe_of_head(path: Path) -> dict[str, Any]:
    """What the export says it was trained against (``recipe``, ``recipe_fingerprint``, ``target_fingerprint``,
    ``residual_basis``, ``tokenizer``); empty for a head that others have published."""
    return dict(_json_object(path / "config.json").get("bitdraft") or {})


def _check_target(recorded: dict[str, Any], target: LowBitTarget) -> None:
    check_basis(recorded.get("residual_basis", ORIGINAL), target.model)
    tokenizer = recorded.get("tokenizer")
    found = None if tokenizer is None else tokenizer_of(target)
    if found is not None and found != tokenizer:
        raise ValueError(
            f"the head drafts tokens of another tokenizer ({tokenizer}) than {target.name} has ({found}): give the "
            "target that it was trained for"
        )


def _weight_files(path: Path) -> list[Path]:
    """The head's safetensors files. ``ValueError`` where there are none or it cannot be told which."""
    if (path / _ONE_FILE).is_file():
        return [path / _ONE_FILE]
    if (path / _INDEX).is_file():
        return _indexed(path)
    found = sorted(path.glob("*.safetensors"))
    if len(found) > 1:
        raise ValueError(f"{path} holds {len(found)} safetensors files but no {_INDEX} that says what each is for")
    if found:
        return found
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLES)
    if pickles:
        raise ValueError(
            f"{path} holds its weights only as a pickle ({pickles[0]}), which can run code when it is read: convert it "
            "where that does no harm (read it with torch and weights_only=True, write the tensors with safetensors' "
            f"save_file to {path / _ONE_FILE})"
        )
    raise ValueError(f"{path} holds no exported head: {_ONE_FILE} is missing")


def _indexed(path: Path) -> list[Path]:
    index = _json_object(path / _INDEX).get("weight_map")
    if not isinstance(index, dict) or not index or any(Path(str(name)).name != name for name in index.values()):
        raise ValueError(f"the head in {path} is damaged: {_INDEX} does not say which file holds what")
    files = [path / name for name in sorted(set(index.values()))]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{path} holds no whole head: {file.name} is missing")
    return files


def _tensors(path: Path, files: list[Path]) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights |= load_file(file)
        except SafetensorError as error:
            raise ValueError(f"the head in {path} is damaged: {file.name}: {error}") from error
    return {name: tensor for name, tensor in weights.items() if not name.endswith(_NOT_WEIGHTS)}


def _check_manifest(path: Path, files: list[Path]) -> None:
    """The manifest may hold sums of other files too, as of a model card, which a reader of the head has no need of."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        return  # a head that was not exported here
    sums = _json_object(manifest).get("sha256")
    names = [file.name for file in (*files, path / "config.json")]
    if not isinstance(sums, dict) or not set(names) <= set(sums):
        raise ValueError(f"the head in {path} is damaged: {MANIFEST} does not hold the sums of {' and '.join(names)}")
    for name in names:
        if sha256_of(path / name) != sums[name]:
            raise ValueError(f"the head in {path} is damaged: {name} has another sha256 than {MANIFEST} says")


def _json_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"the head in {file.parent} is damaged: {file.name} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"the head in {file.parent} is damaged: {file.name} holds no JSON object")
    return content
