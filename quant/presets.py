"""Recipes by name, and from YAML files.

A recipe file has a list of rules, each with the fields of ``Rule``, and optionally more::

    name: mlp-only
    ignore: [lm_head, "re:.*gate$"]          # stays as it is, whatever the rules say, as in engines' lists
    rules:
      - {modules: "*.mlp.*", weights: mxfp4-even, activations: fp8-token}
      - {modules: "*.self_attn.*", weights: nvfp4, scales: sweep, rounding: gptq}
    kv: {format: fp8-kv, scales: calibrated} # like attention: quant/attention/rules.py

Names are those of the model's modules: single experts are ``…experts.gate_up_proj.0``, not as checkpoints call them.
"""

import difflib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from bitdraft.quant.attention.rules import SUFFIXES, attention_rule, kv_rule, kv_rule_named
from bitdraft.quant.recipe import AUTO, Recipe, Rule
from bitdraft.quant.schemes import (
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_GROUP,
    FP8_TOKEN,
    INT4_GROUP,
    MXFP4_EVEN,
    MXFP4_RCEIL,
    MXFP8_RCEIL,
    NVFP4,
    NVFP4_KERNEL,
    Scheme,
)

# What every engine leaves in high precision inside the decoder blocks: the routers of mixtures of experts.
_ROUTERS = (Rule("*.gate"), Rule("*.router"), Rule("*.shared_expert_gate"))


def _decoder_linears(
    name: str,
    weights: Scheme | None,
    activations: Scheme | None,
    scales: str = "amax",
    rounding: str = "nearest",
    transform: str = "none",
) -> Recipe:
    weight_format, activation_format = (scheme.name if scheme else None for scheme in (weights, activations))
    rule = Rule("*.layers.*", weight_format, activation_format, scales, rounding, transform)
    return Recipe(name, (*_ROUTERS, rule) if weights else ())


PRESETS = {
    r.name: r
    for r in (
        _decoder_linears("none", None, None),
        _decoder_linears("fp8", FP8_CHANNEL, FP8_TOKEN),
        _decoder_linears("fp8-block", FP8_BLOCK, FP8_GROUP),
        _decoder_linears("mxfp4", MXFP4_EVEN, FP8_TOKEN),
        _decoder_linears("mxfp4a16", MXFP4_EVEN, None),
        _decoder_linears("mxfp4a4", MXFP4_EVEN, MXFP4_RCEIL),
        _decoder_linears("mxfp8", MXFP8_RCEIL, MXFP8_RCEIL),
        _decoder_linears("nvfp4", NVFP4, NVFP4_KERNEL),
        _decoder_linears("nvfp4a16", NVFP4, None),
        _decoder_linears("w4a16", INT4_GROUP, None),
        _decoder_linears("nvfp4-4over6", NVFP4, NVFP4_KERNEL, "four-over-six"),
        _decoder_linears("nvfp4-sweep", NVFP4, NVFP4_KERNEL, "sweep"),
        _decoder_linears("nvfp4a16-4over6", NVFP4, None, "four-over-six"),
        _decoder_linears("nvfp4a16-sweep", NVFP4, None, "sweep"),
        _decoder_linears("nvfp4a16-gptq", NVFP4, None, "four-over-six", rounding="gptq-act-order"),
        _decoder_linears("mxfp4a16-gptq", MXFP4_EVEN, None, rounding="gptq-act-order"),
        _decoder_linears("mxfp4a4-hadamard", MXFP4_EVEN, MXFP4_RCEIL, transform="hadamard"),
        _decoder_linears("mxfp4a4-wush", MXFP4_EVEN, MXFP4_RCEIL, transform="wush"),
    )
}


def load_recipe(name_or_file: str) -> Recipe:
    """The preset of that name, ``auto``, or the recipe in that YAML file; ``+kvfp8`` behind it caches in FP8.

    Raises ``ValueError`` for an unknown preset or suffix (naming the nearest), a missing or malformed file, an unknown
    key, an unknown format or scale method, or scales that do not suit the format.
    """
    before, plus, suffix = name_or_file.rpartition("+")
    if (plus and suffix in SUFFIXES) or before in (AUTO.name, *PRESETS):
        recipe = load_recipe(before)
        if recipe.kv is not None:
            raise ValueError(f"{name_or_file}: {before} says already how keys and values are cached")
        return replace(recipe, name=f"{recipe.name}+{suffix}", kv=kv_rule_named(suffix))
    if name_or_file == AUTO.name:
        return AUTO
    if name_or_file in PRESETS:
        return PRESETS[name_or_file]
    if name_or_file.endswith((".yaml", ".yml")):
        return _recipe_from_yaml(Path(name_or_file))
    near = max(PRESETS, key=lambda name: difflib.SequenceMatcher(None, name_or_file, name).ratio())  # first of equals
    raise ValueError(
        f"unknown quantization preset {name_or_file!r}: did you mean {near!r}? "
        f"(presets: {', '.join(PRESETS)}; auto; or a .yaml recipe file; +{' or +'.join(SUFFIXES)} behind any of them)"
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
    about_attention = {"kv": kv_rule, "attention": attention_rule}
    known = ("name", "ignore", "rules", *about_attention)
    if unknown := set(content) - set(known):
        raise ValueError(
            f"recipe file {path}: unknown key {sorted(map(str, unknown))[0]!r} (there are: {', '.join(known)})"
        )
    try:
        more: dict[str, Any] = {key: read(content[key]) for key, read in about_attention.items() if key in content}
    except ValueError as error:
        raise ValueError(f"recipe file {path}: {error}") from error
    ignored = content.get("ignore", [])
    if not isinstance(ignored, list) or not all(isinstance(pattern, str) for pattern in ignored):
        raise ValueError(f"recipe file {path}: 'ignore' is a list of patterns")
    rules = [Rule(pattern) for pattern in ignored]
    for number, entry in enumerate(content["rules"], start=1):
        keys = {f.name for f in fields(Rule)}
        if not isinstance(entry, dict) or "modules" not in entry or set(entry) - keys:
            raise ValueError(f"recipe file {path}, rule {number}: the keys are {', '.join(sorted(keys))}")
        texts = {key: value for key, value in entry.items() if key != "residual"}
        if not all(isinstance(v, str) or (v is None and k in ("weights", "activations")) for k, v in texts.items()):
            raise ValueError(f"recipe file {path}, rule {number}: patterns, formats and methods are text")
        rules.append(Rule(**entry))
    for number, rule in enumerate(rules, start=1 - len(ignored)):
        try:
            rule.check()
        except ValueError as error:
            where = f"rule {number}" if number > 0 else "'ignore'"
            raise ValueError(f"recipe file {path}, {where}: {error}") from error
    recipe = Recipe(str(content.get("name", path.stem)), tuple(rules), **more)
    if recipe.is_auto:
        raise ValueError(
            f"recipe file {path}: {recipe.name!r} is the name for checkpoints that are already quantized: "
            "call a recipe without rules something else"
        )
    return recipe
