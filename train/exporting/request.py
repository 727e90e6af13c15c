"""What an export is asked for, checked before any model is loaded."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitdraft.data.sources import demo_file, read_conversations
from bitdraft.quant.files import check_free
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.profiles import load_recipe_for
from bitdraft.speculators.export import LAYOUTS, MANIFEST, layout_of
from bitdraft.speculators.load import recipe_of_head
from bitdraft.train.exporting.adapter import refuse_adapter
from bitdraft.train.exporting.card import ROW_KEYS, Row
from bitdraft.train.exporting.config import ExportConfig
from bitdraft.train.measuring.prompt_sets import PromptSet


@dataclass(frozen=True)
class Request:
    """An export whose files and names were found to make sense."""

    config: ExportConfig
    trained: dict[str, Any]
    """The head's block ``bitdraft``: what it was trained on; empty for one that others have published."""
    quant: str
    """Preset or file of the recipe that the target is served with."""
    profile: str
    prompts: PromptSet
    measured_before: list[Row]

    @property
    def named(self) -> str:
        """How a person calls what is served."""
        if load_recipe(self.quant).leaves_all_alone:
            return "16 bit" if self.quant == "none" else "its own format"
        return f"{Path(self.quant).stem}, baked" if self.config.baked else Path(self.quant).stem


def checked_request(config: ExportConfig) -> Request:
    """Raises ``ValueError`` for folders that exist or would be lost, and for what is missing, unknown or undecided."""
    if not (config.head / "config.json").is_file():
        inner = next((config.head / name for name in ("export", "head") if (config.head / name).is_dir()), None)
        hint = f" (do you mean {inner}?)" if inner else ""
        raise ValueError(f"--head {config.head} holds no head: config.json is missing{hint}")
    refuse_adapter(config.head)
    _check_out(config)
    trained = recipe_of_head(config.head)
    kind = getattr(LAYOUTS.get(str(trained.get("format"))), "KIND", None)
    if kind:  # of a head that others have published it shows when it is loaded
        layout_of(kind, config.format)
    if config.head_quant:
        load_recipe(config.head_quant)
    quant, profile = _served(config, trained)
    if config.baked and load_recipe(quant).leaves_all_alone:
        raise ValueError(f"--baked needs a recipe with formats, and {quant} has none: leave it out")
    files = config.data or (demo_file("heldout"),)
    prompts = PromptSet("+".join(path.stem for path in files), tuple(read_conversations(files)[: config.prompts]))
    return Request(config, trained, quant, profile, prompts, _measured_before(config))


def _check_out(config: ExportConfig) -> None:
    out = config.out
    check_free(out, config.overwrite)
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise ValueError(f"{out} holds no export ({MANIFEST} is missing), so it is not replaced: choose another --out")
    read = {
        "--head": [config.head],
        "--target": [Path(config.target)],
        "--data": config.data,
        "--acceptance": [config.acceptance] if config.acceptance else [],
    }
    for option, paths in read.items():
        for path in paths:
            if path.exists() and out.resolve() in (path.resolve(), *path.resolve().parents):
                raise ValueError(f"--out {out} holds what {option} reads: choose another folder")


def _served(config: ExportConfig, trained: Mapping[str, Any]) -> tuple[str, str]:
    """Name or file of the recipe, and who computes; where nothing is said, as the head was trained."""
    name, _, profile = str(trained.get("recipe", "")).partition("@")
    if config.target_quant is not None:
        profile = config.target_profile or "plain"
        load_recipe_for(config.target_quant, profile)
        return config.target_quant, profile
    profile = config.target_profile or profile or "plain"
    say = "say with --target-quant what it is served on"
    if not name:
        raise ValueError(f"the head in {config.head} does not say what it was trained on: {say}")
    try:
        recipe = load_recipe_for(name, profile)
    except ValueError as error:
        raise ValueError(f"the head in {config.head} was trained on {name!r}: {say} ({error})") from error
    calibrated = recipe.looks_at_inputs or recipe.has_static_inputs  # on a text that is a part of the fingerprint
    if config.target_profile is None and not calibrated and recipe.fingerprint != trained.get("recipe_fingerprint"):
        raise ValueError(f"the head in {config.head} was trained on other rules than {name!r} has here: {say}")
    return name, profile


def _measured_before(config: ExportConfig) -> list[Row]:
    """Rows of the acceptance.json that is named, or of the run that the head lies in."""
    path = config.acceptance or config.head.parent / "acceptance.json"
    if not path.is_file():
        if config.acceptance:
            raise ValueError(f"--acceptance {path} does not exist")
        return []
    if not config.acceptance and not (config.head.parent / "run.yaml").is_file():
        return []  # of another export
    try:
        return rows_of(json.loads(path.read_text(encoding="utf-8")), path.name if config.acceptance else "training run")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not an acceptance.json of one head ({error!r})") from error


def rows_of(measured: Mapping[str, Any], by: str) -> list[Row]:
    """The results of an ``acceptance.json``, each with who measured it and how."""
    about = {"by": by, **{key: measured[key] for key in ("served_on", "dtype", "max_new_tokens", "temperature")}}
    return [about | {key: result[key] for key in ROW_KEYS} for result in measured["results"]]


def is_hub_id(name: str) -> bool:
    """Whether a target's name is one of a model hub, rather than a folder."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()
