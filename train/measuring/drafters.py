"""Drafters by what a user calls them: an export folder, or one of the baselines."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bitdraft.quant.files import sha256_of
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import Drafter
from bitdraft.speculators.load import load_head, recipe_of_head
from bitdraft.speculators.model_drafter import ModelDrafter
from bitdraft.speculators.ngram import NgramDrafter
from bitdraft.speculators.self_drafter import SelfDrafter
from bitdraft.train.exporting.adapter import refuse_adapter

LoadTarget = Callable[[str, str], LowBitTarget]
"""``(model folder or id, recipe)`` → the target, under the options that the measurement runs with."""
_LONGEST_NGRAM = 3


@dataclass(frozen=True)
class DrafterSpec:
    """What drafts. ``head`` is the word or path that the user gave."""

    head: str

    def __post_init__(self) -> None:
        word, _, rest = self.head.partition("=")
        if word in ("self", "model") and not rest:
            example = "self=mxfp4a4" if word == "self" else "model=FOLDER"
            raise ValueError(f"--heads {self.head}: say which, as in {example}")

    @property
    def is_export(self) -> bool:
        return self.head not in ("none", "ngram") and not self.head.startswith(("self=", "model="))

    @property
    def trained_on(self) -> str | None:
        """The recipe that the export names; ``None`` for a baseline, which nobody trained."""
        return str(recipe_of_head(Path(self.head)).get("recipe", "unknown")) if self.is_export else None

    @property
    def identity(self) -> list[str]:
        """What tells this drafter from others of the same name: an export's sum, a model's files, a recipe's rules."""
        word, _, rest = self.head.partition("=")
        if self.is_export:
            return _contents(Path(self.head))
        if word == "self":
            return [load_recipe(rest).fingerprint]
        model, _, recipe = rest.partition(":")
        return [*_contents(Path(model)), load_recipe(recipe or "none").fingerprint] if word == "model" else []

    def load(self, target: LowBitTarget, load_target: LoadTarget) -> Drafter | None:
        """The drafter for ``target``; ``None`` for plain decoding. ``ValueError`` if it does not fit."""
        if self.head == "none":
            return None
        if self.head == "ngram":
            return NgramDrafter(_LONGEST_NGRAM)
        word, _, rest = self.head.partition("=")
        if word == "self" and not self.is_export:
            return SelfDrafter(load_target(target.name, rest))
        if word == "model" and not self.is_export:
            model, _, recipe = rest.partition(":")
            return ModelDrafter(load_target(model, recipe or "none"))
        refuse_adapter(Path(self.head))
        return load_head(Path(self.head), target)


def _contents(folder: Path) -> list[str]:
    """Names, sizes and times of a folder's files, and the sum of an export's manifest."""
    if not folder.is_dir():
        return []  # a hub id
    manifest = folder / "manifest.json"
    if manifest.is_file():
        return [sha256_of(manifest)]
    about = ((p.name, p.stat()) for p in sorted(folder.iterdir()) if p.is_file())
    return [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in about]
