"""Recipes: which modules of a model are computed in which number format.

A recipe is an ordered list of rules; the first rule whose pattern matches a module's name decides. A rule
without formats leaves the module alone, which is how output heads, embeddings and routers stay in high
precision. Recipes come from a preset name or from a YAML file::

    name: mlp-only
    rules:
      - {modules: "*.mlp.*", weights: mxfp4-even, activations: fp8-token}
      - {modules: "*.self_attn.*", weights: nvfp4, scales: sweep}   # how the weight's block scales are chosen
      - {modules: "*"}                       # everything else stays as it is
"""

import difflib
import hashlib
import json
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import yaml

from bitdraft.quant.scales.methods import ScaleMethod, scale_method
from bitdraft.quant.schemes import (
    FP8_CHANNEL,
    FP8_TOKEN,
    MXFP4_EVEN,
    MXFP4_RCEIL,
    NVFP4,
    NVFP4_KERNEL,
    Scheme,
    scheme_named,
)

_PLAIN = "amax"


@dataclass(frozen=True)
class Rule:
    """Modules whose dotted name matches the glob ``modules`` get these formats; ``None`` is high precision.

    ``scales`` names the method that chooses the weight's block scales (``quant/scales/methods.py``).
    """

    modules: str
    weights: str | None = None
    activations: str | None = None
    scales: str = _PLAIN

    @property
    def leaves_alone(self) -> bool:
        return self.weights is None and self.activations is None

    @property
    def weight_scheme(self) -> Scheme | None:
        return scheme_named(self.weights) if self.weights else None

    @property
    def activation_scheme(self) -> Scheme | None:
        return scheme_named(self.activations) if self.activations else None

    @property
    def scale_method(self) -> ScaleMethod | None:
        """How the weight is scaled; ``ValueError`` for an unknown method or one that does not suit the format."""
        scheme = self.weight_scheme
        if scheme is None:
            if self.scales != _PLAIN:
                raise ValueError(f"scales {self.scales!r} need a format under 'weights'")
            return None
        return scale_method(self.scales, scheme)


@dataclass(frozen=True)
class Recipe:
    """Ordered rules under a name. Equal rules mean an equal target, and an equal ``fingerprint``."""

    name: str
    rules: tuple[Rule, ...]

    def rule_for(self, *names: str) -> Rule | None:
        """The first rule that matches a module by any of its dotted ``names``, or ``None``."""
        return next((r for r in self.rules if any(fnmatchcase(name, r.modules) for name in names)), None)

    @property
    def leaves_all_alone(self) -> bool:
        return all(r.leaves_alone for r in self.rules)

    @property
    def fingerprint(self) -> str:
        """16 hex digits over the rules (not the name)."""
        described = [asdict(r) for r in self.rules]
        for rule in described:  # plain scales go without saying: recipes from before there were others keep theirs
            if rule["scales"] == _PLAIN:
                del rule["scales"]
        text = json.dumps(described, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


# What every engine leaves in high precision inside the decoder blocks: the routers of mixtures of experts.
_ROUTERS = (Rule("*.gate"), Rule("*.router"), Rule("*.shared_expert_gate"))


def _decoder_linears(name: str, weights: Scheme | None, activations: Scheme | None, scales: str = _PLAIN) -> Recipe:
    rule = Rule("*.layers.*", weights.name if weights else None, activations.name if activations else None, scales)
    return Recipe(name, (*_ROUTERS, rule) if weights else ())


PRESETS = {
    r.name: r
    for r in (
        _decoder_linears("none", None, None),
        _decoder_linears("fp8", FP8_CHANNEL, FP8_TOKEN),
        _decoder_linears("mxfp4", MXFP4_EVEN, FP8_TOKEN),
        _decoder_linears("mxfp4a16", MXFP4_EVEN, None),
        _decoder_linears("mxfp4a4", MXFP4_EVEN, MXFP4_RCEIL),
        _decoder_linears("nvfp4", NVFP4, NVFP4_KERNEL),
        _decoder_linears("nvfp4a16", NVFP4, None),
        _decoder_linears("nvfp4-4over6", NVFP4, NVFP4_KERNEL, "four-over-six"),
        _decoder_linears("nvfp4-sweep", NVFP4, NVFP4_KERNEL, "sweep"),
        _decoder_linears("nvfp4a16-4over6", NVFP4, None, "four-over-six"),
        _decoder_linears("nvfp4a16-sweep", NVFP4, None, "sweep"),
    )
}


AUTO = Recipe("auto", ())
"""Stands for what a quantized checkpoint declares itself; ``load_target`` puts the recipe that says so in its place."""


def load_recipe(name_or_file: str) -> Recipe:
    """The preset of that name, ``auto``, or the recipe in that YAML file.

    Raises ``ValueError`` for an unknown preset (naming the nearest), a missing or malformed file, an unknown
    key, an unknown format or scale method, or scales that do not suit the format.
    """
    if name_or_file == AUTO.name:
        return AUTO
    if name_or_file in PRESETS:
        return PRESETS[name_or_file]
    if name_or_file.endswith((".yaml", ".yml")):
        return _recipe_from_yaml(Path(name_or_file))
    near = difflib.get_close_matches(name_or_file, PRESETS, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"unknown quantization preset {name_or_file!r}: did you mean {near!r}? "
        f"(presets: {', '.join(PRESETS)}; auto; or a .yaml recipe file)"
    )


def _recipe_from_yaml(path: Path) -> Recipe:
    if not path.is_file():
        raise ValueError(f"recipe file {path} does not exist")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe file {path} is not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict) or not isinstance(content.get("rules"), list):
        raise ValueError(f"recipe file {path} needs a list under 'rules'")
    if unknown := set(content) - {"name", "rules"}:
        raise ValueError(f"recipe file {path}: unknown key {sorted(map(str, unknown))[0]!r} (there are: name, rules)")
    rules = []
    for number, entry in enumerate(content["rules"], start=1):
        keys = {"modules", "weights", "activations", "scales"}
        if not isinstance(entry, dict) or "modules" not in entry or set(entry) - keys:
            raise ValueError(f"recipe file {path}, rule {number}: the keys are {', '.join(sorted(keys))}")
        if not all(isinstance(v, str) or (v is None and k in ("weights", "activations")) for k, v in entry.items()):
            raise ValueError(f"recipe file {path}, rule {number}: patterns, formats and scale methods are text")
        rule = Rule(**entry)
        try:
            _ = rule.scale_method, rule.activation_scheme
        except ValueError as error:
            raise ValueError(f"recipe file {path}, rule {number}: {error}") from error
        rules.append(rule)
    return Recipe(str(content.get("name", path.stem)), tuple(rules))
