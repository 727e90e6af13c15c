"""What engines ask of a draft head in low bit: vLLM 0.32 as read and as run on a CPU, SGLang 0.5.23 as read.

* The ``quantization_config`` at the top of a draft's config.json is the draft's own, in vLLM also where the rest comes
  from ``transformer_layer_config``. A quantized target's is not used for the draft.
* Engines number the layers of a draft behind those of the target and fuse q, k, v and gate, up under other names
  (``model.layers.30.self_attn.qkv_proj``), and vLLM does not take those names apart for drafts. So a configuration
  names layers by their last part, fused and not, in regular expressions, or by the class ``Linear``.
* ``fc`` is a plain linear layer in SGLang, and the output head is one that vLLM may share with the target: both stay
  in 16 bit. Medusa's layers are plain in vLLM, which would read codes as if they were weights.
* SGLang has linear layers for FP8 (per tensor, channel or block) and NVFP4 with and without activations
  (``compressed_tensors.py``, ``_get_scheme_from_parts``), none for MXFP4.
* vLLM does not notice a scale that is missing, nor that fused layers have two of which it keeps one: both are refused.
"""

from collections.abc import Mapping

import torch

from bitdraft.quant.checkpoints.declare import INPUTS, WEIGHTS, check_has_layout
from bitdraft.quant.checkpoints.stored import Formats, StoredLayer
from bitdraft.quant.recipe import Recipe, Rule
from bitdraft.quant.schemes import Scheme

LOADABLE = "fp8, fp8-block, nvfp4, nvfp4a16, mxfp4, mxfp4a16, mxfp4a4"
"""Those whose formats engines load for heads."""

_IN_16_BIT = ("fc", "lm_head")
_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_FUSED = {
    **dict.fromkeys(_QKV, (*_QKV, "qkv_proj")),
    **dict.fromkeys(_GATE_UP, (*_GATE_UP, "gate_up_proj")),
}
"""By the last part of a layer's name: the layers that are fused with it, and what engines call them together."""


def pattern(name: str) -> str:
    """A layer by the last part of its name, also where an engine fused it, as a regular expression."""
    leaf = name.rpartition(".")[2]
    return rf"re:.*\.({'|'.join(_FUSED[leaf])})$" if leaf in _FUSED else f"re:.*{leaf}$"


def check_kind(kind: str) -> None:
    """``ValueError`` for heads that no engine loads in low bit."""
    if kind != "eagle3":
        raise ValueError(
            f"a low-bit {kind} head is loaded by no engine (vLLM's layers for it are plain linear ones): leave it in "
            "16 bit, or quantize an eagle3 head"
        )


def check_recipe(recipe: Recipe) -> None:
    """``ValueError`` for formats that have no place in a head's checkpoint, naming presets that have."""
    try:
        check_has_layout(recipe)
    except ValueError as error:
        raise ValueError(f"{error} (presets that engines load for heads: {LOADABLE})") from error
    for rule in recipe.rules:
        if rule.looks_at_inputs:
            raise ValueError(
                f"recipe {recipe.name!r}, rule {rule.modules!r}: heads are rounded to nearest, not by {rule.rounding} "
                f"(presets that engines load for heads: {LOADABLE})"
            )
        if rule.activations == "mxfp4-even":
            raise ValueError(
                f"recipe {recipe.name!r}, rule {rule.modules!r}: engines quantize to mxfp4-even the inputs of experts "
                "alone, which heads have not: take mxfp4-rceil"
            )


def check_chosen(recipe: Recipe, chosen: Mapping[str, Rule]) -> None:
    """``ValueError`` for layers that engines keep in 16 bit, and for fused ones that are not under one rule."""
    for name, rule in chosen.items():
        before, _, leaf = name.rpartition(".")
        which = f"recipe {recipe.name!r}, rule {rule.modules!r}"
        if leaf in _IN_16_BIT:
            raise ValueError(f"{which}: {leaf} of a head stays in 16 bit: put '*.{leaf}' on the recipe's ignore list")
        for other in _FUSED.get(leaf, (leaf,))[:-1]:
            if chosen.get(f"{before}.{other}") != rule:
                raise ValueError(f"{which}: engines fuse {name} and {before}.{other}, so one rule must cover both")


def check_rows(rows: Mapping[str, int], weights: Scheme) -> None:
    """``ValueError`` where blocks over rows would reach from one fused layer into the next.

    ``rows``: those of layers that are fused, in that order; the last one's may be anything.
    """
    for name, count in list(rows.items())[:-1]:
        if weights.rows is not None and count % weights.rows:
            raise ValueError(
                f"module {name}: {count} rows do not divide into blocks of {weights.rows} ({weights.name}), as engines "
                "ask of layers that they fuse: take fp8, with a scale per row"
            )


def check_fused(layers: Mapping[str, StoredLayer]) -> None:
    """``ValueError`` where layers that an engine fuses differ in their formats or in scales of which it keeps one."""
    for first, a in layers.items():
        before, _, leaf = first.rpartition(".")
        for other in _FUSED.get(leaf, (leaf,))[:-1]:
            name = f"{before}.{other}"
            b = layers.get(name)
            if b is None or a.formats != b.formats:
                raise ValueError(f"{first} and {name} are in different formats, which engines cannot fuse")
            kept = [(a.input_scale, b.input_scale)]
            kept += [(a.weight.outer, b.weight.outer)] * a.formats.weights.startswith("nvfp4")
            if any(x is not None and y is not None and not torch.equal(x, y) for x, y in kept):
                raise ValueError(
                    f"{first} and {name} have different global scales, but engines fuse them and keep one: quantize "
                    "them with a shared scale"
                )


def check_can_be_declared(name: str, formats: Formats) -> None:
    """``ValueError`` for formats that are read but not written."""
    for what, known in ((formats.weights, WEIGHTS), (formats.activations, INPUTS)):
        if what is not None and what not in known:
            raise ValueError(f"layer {name} is in {what}, which is not written here (there are: {', '.join(known)})")
