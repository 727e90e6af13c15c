"""Drafters by what a user calls them: an export folder, or one of the baselines."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bitdraft.quant.files import sha256_of
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import Drafter
from bitdraft.speculators.export import load_head, recipe_of_head
from bitdraft.speculators.model_drafter import ModelDrafter
from bitdraft.speculators.ngram import NgramDrafter
from bitdraft.speculators.self_drafter import SelfDrafter

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
    def identity(self) -> str:
        """What tells this drafter from others of the same name: an export's sum."""
        manifest = Path(self.head) / "manifest.json"
        return sha256_of(manifest) if self.is_export and manifest.is_file() else self.head

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
        return load_head(Path(self.head), target)
