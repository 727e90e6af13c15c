"""Who computes: an engine on a chip computes one checkpoint in its own way.

A recipe or a checkpoint names the bytes. A profile names, for every family of formats, in which format the engine
quantizes the inputs (or that it leaves them in 16 bit) and what it does to the stored weights at load
(``quant/at_load.py``). The profile ``plain`` leaves every format as it is named. FP8 KV caches are one rule in all
engines (``quant/attention/kv_rounding.py``), and so is the order of a product: products of unscaled values are
accumulated in fp32, scaled, and rounded once. ``+exact`` behind a profile's name has that order in bf16 too, at a
price (``LowBitLinear.exact_product``).

Sources, by the marks in the table: S sources of vLLM 0.33, SGLang 0.5.23 and FlashInfer 0.7.4 as read; V their own
Python code run; R vLLM 0.32 on a CPU run (``scripts/bench/engine_agreement.py``); D vLLM's documentation; O the
checkpoint's own declaration, for which no kernel was read. What none of them tells is refused.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from bitdraft.quant.at_load import AtLoad
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recipe import Recipe, Rule
from bitdraft.quant.schemes import Scheme, scheme_named
from bitdraft.quant.smallfloat import E2M1, E4M3
from bitdraft.quant.smallint import SmallInt

FAMILIES = {
    "fp8-token": "FP8 weights, FP8 inputs per token",
    "fp8-tensor": "FP8 weights, FP8 inputs per tensor",
    "fp8-static": "FP8 weights, FP8 inputs under a static scale",
    "fp8-block": "FP8 weights in blocks of 128 x 128",
    "mxfp8": "MXFP8 weights and inputs",
    "fp8-a16": "FP8 or MXFP8 weights, 16-bit inputs",
    "mxfp4": "MXFP4 weights and inputs",
    "mxfp4-experts": "MXFP4 weights and inputs of experts",
    "mxfp4-a8": "MXFP4 weights, FP8 inputs per token",
    "mxfp4-a16": "MXFP4 weights, 16-bit inputs",
    "nvfp4": "NVFP4 weights and inputs",
    "nvfp4-a16": "NVFP4 weights, 16-bit inputs",
    "integers": "INT4 or INT8 weights, 16-bit inputs",
    "gpt-oss": "gpt-oss' MXFP4 experts",
}
"""Families of formats that engines compute alike, in words."""


@dataclass(frozen=True)
class Computed:
    """How an engine computes a family: the format of the inputs (``None``: 16 bit), and the weights at load."""

    activations: str | None
    at_load: AtLoad = "decode"


@dataclass(frozen=True)
class Profile:
    """An engine on a chip. ``rows``: for every family how it is computed, or why that cannot be said."""

    name: str
    engine: str
    chip: str
    rows: Mapping[str, Computed | str] = field(default_factory=dict)
    exact_product: bool = False

    @property
    def is_plain(self) -> bool:
        return not self.rows

    def computed(self, family: str) -> Computed:
        """How ``family`` is computed; ``ValueError`` saying why that is not known."""
        row = self.rows[family]
        if isinstance(row, str):
            raise ValueError(f"profile {self.name}, {FAMILIES[family]}: {row}")
        return row

    def of(self, weights: str, activations: str | None, *, experts: bool = False) -> Computed:
        """How a layer of these formats is computed; ``ValueError`` where no engine's rule for them is known."""
        if self.is_plain:
            return Computed(activations)
        inputs = scheme_named(activations) if activations else None
        family = family_of(scheme_named(weights), inputs, experts=experts)
        if family is None:
            raise ValueError(
                f"profile {self.name}: weights {weights} with activations {activations or 'in 16 bit'} belong to no "
                "family of formats whose computation is known: take --target-profile plain"
            )
        return self.computed(family)


def family_of(weights: Scheme, activations: Scheme | None, *, experts: bool) -> str | None:
    """The family of a layer's formats, ``None`` for formats that no engine serves."""
    inputs = activations
    if isinstance(weights.element, SmallInt):
        return "integers" if inputs is None else None
    if weights.element == E4M3 and (inputs is None or inputs.element == E4M3):
        if inputs is None:
            return "fp8-a16"
        if weights.scale_format == "e8m0":
            return "mxfp8" if inputs.scale_format == "e8m0" else None
        if inputs.scale_format == "e8m0":
            return None
        if weights.block is not None:
            return "fp8-block" if (weights.rows, inputs.block) == (128, 128) else None
        if inputs.rows is None:
            return "fp8-static" if inputs.scale == "static" else "fp8-tensor"
        return "fp8-token" if inputs.block is None else None
    if weights.element != E2M1 or weights.scale == "floor-stretched":
        return None
    kind = "nvfp4" if weights.has_global_scale else "mxfp4"
    if inputs is None:
        return f"{kind}-a16"
    if inputs.element == E2M1 and inputs.has_global_scale == weights.has_global_scale:
        return "mxfp4-experts" if experts and kind == "mxfp4" else kind
    per_token = inputs.element == E4M3 and inputs.rows == 1 and inputs.block is None
    return "mxfp4-a8" if per_token and kind == "mxfp4" else None


_INTS = Computed(None)  # S: Marlin multiplies bf16(code · scale)
_MXFP8 = Computed("mxfp8-rceil")  # V: vLLM's torch reference; S: SGLang
_MARLIN = Computed(None, "marlin")  # V for the scales, S for the kernel: W4A16 wherever there are no FP4 units
_IN_16_BIT = Computed(None)
_BACKEND = "its inputs depend on the MoE backend: name it, vllm-sm100-moe-bf16, -moe-mxfp8 or -moe-mxfp4"
_DENSE = "SGLang serves such checkpoints of mixtures of experts only: take an engine that serves dense ones, or plain"
_UNREAD = "no source was read that says how the inputs are quantized: take --target-profile plain"

_VLLM_SM80: dict[str, Computed | str] = {
    "fp8-token": _IN_16_BIT,  # D: no FP8 units, "weight-only W8A16, utilizing FP8 Marlin"
    "fp8-tensor": _IN_16_BIT,  # D
    "fp8-static": _IN_16_BIT,  # D
    "fp8-block": "what Marlin makes of the blocks' scales was not read: take --target-profile plain",
    "fp8-a16": _IN_16_BIT,
    "mxfp8": _MXFP8,
    "mxfp4": _IN_16_BIT,  # S: Marlin
    "mxfp4-experts": _IN_16_BIT,  # S: Marlin
    "mxfp4-a8": _IN_16_BIT,  # S: Marlin, as for every MXFP4 checkpoint on GPUs before Blackwell
    "mxfp4-a16": _IN_16_BIT,
    "nvfp4": _MARLIN,
    "nvfp4-a16": _MARLIN,
    "integers": _INTS,
    "gpt-oss": _IN_16_BIT,  # S: Marlin and Triton
}
_VLLM_SM90: dict[str, Computed | str] = {
    **_VLLM_SM80,
    "fp8-token": Computed("fp8-token"),  # S: csrc/quantization/w8a8/fp8, x / s, s at least 1 / (448 · 512)
    "fp8-tensor": Computed("fp8-tensor-dynamic"),  # S: the same file, x · (1 / s)
    "fp8-static": Computed("fp8-tensor-static"),  # S: the same file, x · (1 / s)
    "fp8-block": Computed("fp8-group128"),  # S: per_token_group_quant.cu, max(amax, 1e-10) / 448
}
_VLLM_SM100: dict[str, Computed | str] = {
    **_VLLM_SM90,
    "fp8-block": Computed("fp8-group128-ue8m0", "requantize-ue8m0"),  # S: DeepGEMM, VLLM_USE_DEEP_GEMM_E8M0
    "mxfp4": Computed("mxfp4-rceil"),  # S: FlashInfer, amax · fl(1/6)
    "mxfp4-experts": Computed("mxfp4-even"),  # S: CUTLASS MoE, cvt_warp_fp16_to_fp4 with UE8M0 scales
    "mxfp4-a8": Computed("fp8-token"),  # O: with vLLM's FP8 rule
    "nvfp4": Computed("nvfp4-kernel"),  # S: cvt_warp_fp16_to_fp4, its reciprocals exact here
    "gpt-oss": _BACKEND,
}
_SGLANG_SM90: dict[str, Computed | str] = {
    "fp8-token": Computed("fp8-token-sglang"),  # S: per_token_quant_fp8.cuh, x · (1 / s)
    "fp8-tensor": _UNREAD,
    "fp8-static": _UNREAD,
    "fp8-block": Computed("fp8-group128-sglang"),  # S: x · (448 / amax), stored scale amax · fl(1/448)
    "fp8-a16": _UNREAD,
    "mxfp8": _MXFP8,
    "mxfp4": _DENSE,  # S
    "mxfp4-experts": _UNREAD,
    "mxfp4-a8": _DENSE,  # S
    "mxfp4-a16": _DENSE,  # S
    "nvfp4": _UNREAD,
    "nvfp4-a16": _UNREAD,
    "integers": _INTS,
    "gpt-oss": _IN_16_BIT,  # S: Triton
}
_SGLANG_SM100: dict[str, Computed | str] = {
    **_SGLANG_SM90,
    "fp8-block": _UNREAD,
    "nvfp4": Computed("nvfp4-kernel"),  # S: FlashInfer's and TensorRT-LLM's kernels, as in vLLM
    "gpt-oss": _UNREAD,
}

_VLLM_CPU: dict[str, Computed | str] = {
    **dict.fromkeys(FAMILIES, _UNREAD),
    "fp8-token": Computed("fp8-token-native"),  # R: ChannelWiseTorchFP8ScaledMMLinearKernel, x · (1 / s)
    **dict.fromkeys((f for f in FAMILIES if "fp4" in f), "vLLM on CPU has no kernel for it"),  # R
}

PLAIN = Profile("plain", "none in particular", "any")
"""Every format by the rule of its own name."""

PROFILES = {
    p.name: p
    for p in (
        PLAIN,
        Profile("vllm-sm80", "vLLM", "Ampere", _VLLM_SM80),
        Profile("vllm-sm90", "vLLM", "Hopper", _VLLM_SM90),
        Profile("vllm-sm100", "vLLM", "Blackwell", _VLLM_SM100),
        Profile("vllm-sm100-moe-bf16", "vLLM", "Blackwell", {**_VLLM_SM100, "gpt-oss": _IN_16_BIT}),
        Profile("vllm-sm100-moe-mxfp8", "vLLM", "Blackwell", {**_VLLM_SM100, "gpt-oss": _MXFP8}),
        Profile("vllm-sm100-moe-mxfp4", "vLLM", "Blackwell", {**_VLLM_SM100, "gpt-oss": Computed("mxfp4-even")}),
        Profile("vllm-cpu", "vLLM", "CPU", _VLLM_CPU),
        Profile("sglang-sm90", "SGLang", "Hopper", _SGLANG_SM90),
        Profile("sglang-sm100", "SGLang", "Blackwell", _SGLANG_SM100),
    )
}

_EXACT = "+exact"


def profile_named(name: str) -> Profile:
    """The profile called ``name``, with ``+exact`` behind it where products are to be in the engines' exact order.

    ``ValueError`` names the nearest one otherwise.
    """
    base = name.removesuffix(_EXACT)
    if base not in PROFILES:
        near = difflib.get_close_matches(base, PROFILES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"unknown target profile {name!r}: did you mean {near!r}? "
            f"(profiles: {', '.join(PROFILES)}; {_EXACT} behind any of them)"
        )
    return PROFILES[base] if base == name else replace(PROFILES[base], name=name, exact_product=True)


def load_recipe_for(name_or_file: str, profile: str) -> Recipe:
    """The recipe of that name or file as the profile of that name computes it; errors as both have them."""
    return resolve(load_recipe(name_or_file), profile_named(profile))


def resolve(recipe: Recipe, profile: Profile) -> Recipe:
    """``recipe`` as the engine computes it: formats of inputs and treatment of weights are the profile's.

    What a quantized checkpoint declares is not known yet: ``auto`` only notes the profile, for
    ``quant/checkpoints/attach.py``. Raises ``ValueError`` naming the rule that the profile has no answer for, and for
    corrections of attention.
    """
    rules: list[Rule] = []
    changed: list[str] = []
    attention = recipe.attention
    if attention is not None and not profile.is_plain and "fitted" in (attention.head_scales, attention.temperature):
        raise ValueError(
            f"recipe {recipe.name!r}, attention: profile {profile.name} has no fitted head scales or temperatures, "
            "which stock engines do not compute: take --target-profile plain"
        )
    for rule in recipe.rules:
        if rule.weights is None or profile.is_plain:
            rules.append(rule)
            continue
        if rule.transform != "none" or rule.residual:
            what = f"{rule.transform} transform of inputs" if rule.transform != "none" else "residual correction"
            raise ValueError(
                f"recipe {recipe.name!r}, rule {rule.modules!r}: profile {profile.name} has no {what}, which stock "
                "engines do not compute: take --target-profile plain"
            )
        try:
            dense, experts = (_computed(rule, profile, experts=e) for e in (False, True))
        except ValueError as error:
            raise ValueError(f"recipe {recipe.name!r}, rule {rule.modules!r}: {error}") from error
        if rule.within == "experts":
            both = [experts]
        else:
            both = [dense] if dense == experts else [replace(experts, within="experts"), dense]
        rules += both
        changed += [f"{what}{' (experts)' * (r.within == 'experts')}" for r in both if (what := difference(rule, r))]
    untouched = profile == PLAIN or (recipe.leaves_all_alone and not recipe.is_auto)
    return replace(
        recipe,
        name=recipe.name if untouched else f"{recipe.name}@{profile.name}",
        rules=tuple(rules),
        profile=profile.name,
        changed=tuple(dict.fromkeys(changed)),
        exact_product=profile.exact_product,
    )


class Formats(Protocol):
    """What a rule of a recipe and a layer of a checkpoint have in common."""

    @property
    def weights(self) -> str | None: ...
    @property
    def activations(self) -> str | None: ...
    @property
    def at_load(self) -> str: ...


def difference(named: Formats, computed: Formats) -> str:
    """In words, what an engine does otherwise than the formats' names say; empty if nothing."""
    changes = []
    if named.activations != computed.activations:
        changes.append(f"inputs {computed.activations or 'in 16 bit'} instead of {named.activations}")
    if named.at_load != computed.at_load:
        changes.append(f"weights {computed.at_load} at load")
    return f"{named.weights}: {', '.join(changes)}" if changes else ""


def _computed(rule: Rule, profile: Profile, *, experts: bool) -> Rule:
    assert rule.weights is not None
    computed = profile.of(rule.weights, rule.activations, experts=experts)
    return replace(rule, activations=computed.activations, at_load=computed.at_load)
