"""Recipes: which modules of a model are computed in which number format.

A recipe is an ordered list of rules; the first rule whose pattern matches a module's name decides. A rule
without formats leaves the module alone, which is how output heads, embeddings and routers stay in high
precision. Presets and recipe files: ``quant/presets.py``.
"""

import difflib
import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import get_args

from bitdraft.quant.at_load import AtLoad, check_at_load
from bitdraft.quant.attention.rules import AttentionRule, KvRule
from bitdraft.quant.scales.methods import ScaleMethod, scale_method
from bitdraft.quant.schemes import Scheme, scheme_named

_PLAIN = {"scales": "amax", "rounding": "nearest", "transform": "none", "within": "all", "at_load": "decode"}
"""What goes without saying."""
_CHOICES = {
    "rounding": ("nearest", "gptq", "gptq-act-order"),
    "transform": ("none", "hadamard", "wush"),
    "within": ("all", "experts"),
    "at_load": get_args(AtLoad),
}


@dataclass(frozen=True)
class Rule:
    """Modules whose dotted name matches ``modules`` get these formats; ``None`` is high precision.

    The pattern is a glob, or a regular expression behind ``re:`` that the name must begin with (as in the ignore lists
    of compressed-tensors).

    ``scales`` names the method that chooses the weight's block scales (``quant/scales/methods.py``); ``rounding`` how
    the weight is rounded under them (``gptq``, ``gptq-act-order``: ``quant/gptq.py``); ``transform`` what is done to
    the inputs and undone in the weight (``hadamard``: ``quant/transforms.py``, ``wush``: ``quant/wush.py``);
    ``residual`` how many parameters a correction in 16 bit adds, as a share of the layer's (``quant/residual.py``).
    ``within`` limits the rule to ``experts``; ``at_load`` is what the engine makes of the stored weight
    (``quant/at_load.py``), which a profile decides as a rule (``quant/profiles.py``).
    """

    modules: str
    weights: str | None = None
    activations: str | None = None
    scales: str = _PLAIN["scales"]
    rounding: str = _PLAIN["rounding"]
    transform: str = _PLAIN["transform"]
    residual: float = 0.0
    within: str = _PLAIN["within"]
    at_load: str = _PLAIN["at_load"]

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
    def looks_at_inputs(self) -> bool:
        """Whether the second moments of a layer's inputs decide on its weight."""
        return self.rounding != _PLAIN["rounding"] or self.transform == "wush"

    @property
    def has_static_inputs(self) -> bool:
        """Whether one scale for all inputs is measured beforehand."""
        scheme = self.activation_scheme
        return scheme is not None and (scheme.has_global_scale or scheme.scale == "static")

    @property
    def formats(self) -> str:
        """In words, for the log."""
        how = [f"{self.scales} scales"] if self.scales != _PLAIN["scales"] else []
        how += [self.rounding] if self.rounding != _PLAIN["rounding"] else []
        how += [f"{self.transform} transform"] if self.transform != _PLAIN["transform"] else []
        how += [f"{self.at_load} at load"] if self.at_load != _PLAIN["at_load"] else []
        how += [f"residual correction {self.residual:g}"] if self.residual else []
        weights = f"{self.weights} ({', '.join(how)})" if how else self.weights
        return f"weights {weights}, activations {self.activations or 'in high precision'}"

    @property
    def scale_method(self) -> ScaleMethod | None:
        """How the weight is scaled; ``ValueError`` for an unknown method or one that does not suit the format."""
        scheme = self.weight_scheme
        if scheme is None:
            if self.scales != _PLAIN["scales"]:
                raise ValueError(f"scales {self.scales!r} need a format under 'weights'")
            return None
        return scale_method(self.scales, scheme)

    def matches(self, name: str) -> bool:
        """Whether the pattern is one of the module called ``name``; limits to experts aside."""
        if self.modules.startswith("re:"):
            return re.match(self.modules.removeprefix("re:"), name) is not None
        return fnmatchcase(name, self.modules)

    def check(self) -> None:
        """``ValueError`` for an unknown format, method or choice, and for one that does not suit the format."""
        if self.modules.startswith("re:"):
            try:
                re.compile(self.modules.removeprefix("re:"))
            except re.error as error:
                raise ValueError(f"{self.modules!r} is no regular expression: {error}") from error
        _ = self.scale_method, self.activation_scheme
        if type(self.residual) not in (int, float) or not 0 <= self.residual < 1:
            raise ValueError(f"residual is a share of the layer's parameters, 0.001 for 0.1 %, not {self.residual!r}")
        if self.residual and self.weight_scheme is None:
            raise ValueError(f"residual {self.residual:g} needs a format under 'weights'")
        for key, known in _CHOICES.items():
            value = getattr(self, key)
            if value not in known:
                near = difflib.get_close_matches(value, known, n=1, cutoff=0.0)[0]
                raise ValueError(f"unknown {key} {value!r}: did you mean {near!r}? (known: {', '.join(known)})")
            if value != _PLAIN[key] and self.weight_scheme is None and key != "within":
                raise ValueError(f"{key} {value!r} needs a format under 'weights'")
        scheme = self.weight_scheme
        check_at_load(self.at_load, scheme)
        if self.transform == "none" or scheme is None:
            return
        if scheme.block is None or scheme.rows != 1 or scheme.block & (scheme.block - 1):
            raise ValueError(
                f"transform {self.transform!r} works in the blocks of the weight, a power of two of them in a row: "
                f"{scheme.name!r} has none such"
            )


@dataclass(frozen=True)
class Recipe:
    """Ordered rules under a name. Equal rules mean an equal target, and an equal ``fingerprint``."""

    name: str
    rules: tuple[Rule, ...]
    kv: KvRule | None = None
    """The format of the KV cache; ``None`` keeps keys and values as they come."""
    attention: AttentionRule | None = None
    """The formats of the inputs of attention; ``None`` is high precision."""
    calibrated_on: str | None = None
    """Digest of the text that a loaded target was calibrated on, where that was not the shipped page."""
    profile: str = "plain"
    """Whose rules these are (``quant/profiles.py``)."""
    changed: tuple[str, ...] = field(default=(), compare=False)
    """What the profile changed, in words: the rules are those after the change."""
    exact_product: bool = False
    """Whether products are rounded once, as engines do it, in 16 bit too."""

    def rule_for(self, *names: str) -> Rule | None:
        """The first rule that matches a module by any of its dotted ``names``, or ``None``."""
        in_experts = any(".experts." in f"{name}." for name in names)
        rules = [r for r in self.rules if in_experts or r.within != "experts"]
        return next((r for r in rules if any(r.matches(name) for name in names)), None)

    @property
    def leaves_all_alone(self) -> bool:
        return all(r.leaves_alone for r in self.rules)

    @property
    def looks_at_inputs(self) -> bool:
        """Whether the inputs of layers decide on weights or corrections."""
        return any(r.looks_at_inputs or r.residual for r in self.rules)

    @property
    def has_static_inputs(self) -> bool:
        """Whether scales (or attention's corrections) are measured on calibration text beforehand."""
        about_attention = [rule for rule in (self.kv, self.attention) if rule is not None]
        return any(r.has_static_inputs for r in self.rules) or any(r.needs_calibration for r in about_attention)

    @property
    def scales_whole_passes(self) -> str:
        """The activation format whose scale spans every token of a pass; empty if every token stands for itself."""
        schemes = (rule.activation_scheme for rule in self.rules)
        spanning = (s.name for s in schemes if s and s.rows is None and s.scale != "static" and not s.has_global_scale)
        return next(spanning, "")

    @property
    def rounds_on_the_way(self) -> bool:
        """Whether a pass rounds anything that it computes to a few bits: activations, keys and values, attention."""
        return any(rule.activations for rule in self.rules) or self.kv is not None or self.attention is not None

    @property
    def is_auto(self) -> bool:
        """Whether a quantized checkpoint is to be served as it is (``auto``, ``auto+kvfp8``)."""
        return not self.rules and re.split(r"[+@]", self.name)[0] == "auto"

    @property
    def computed_by(self) -> str:
        """The profile and what it changed, for the log."""
        changed = [*self.changed, *["products rounded once"] * self.exact_product]
        return f"profile {self.profile}: {'; '.join(changed) or 'every format by the rule of its name'}"

    @property
    def fingerprint(self) -> str:
        """16 hex digits over the rules and what they were calibrated on (not the name)."""
        described = [asdict(r) for r in self.rules]
        for rule in described:  # recipes from before there was a choice keep theirs
            for key, plain in _PLAIN.items():
                if rule[key] == plain:
                    del rule[key]
            if not rule["residual"]:
                del rule["residual"]
        text = json.dumps(described, sort_keys=True) + (self.calibrated_on or "")
        for key, rule_of in (("kv", self.kv), ("attention", self.attention)):
            if rule_of is not None:
                text += f"{key} {json.dumps(asdict(rule_of), sort_keys=True)}"
        text += "exact product" if self.exact_product else ""
        text += "auto" if self.is_auto else ""  # as empty as ``none``, which takes no quantized checkpoint
        return hashlib.sha256(text.encode()).hexdigest()[:16]


AUTO = Recipe("auto", ())
"""Stands for what a quantized checkpoint declares itself; ``load_target`` puts the recipe that says so in its place."""
