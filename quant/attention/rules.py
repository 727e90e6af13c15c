"""What a recipe says about attention: the format of the KV cache, and of the inputs of its two products.

    kv: {format: fp8-kv, scales: calibrated, per: head}
    attention: {queries: int8-token, keys: int8-token, probabilities: fp8-tensor-static, values: fp8-token,
                head_scales: fitted, temperature: fitted}

Everything is optional and off by default. ``+kvfp8`` behind a preset's name stands for ``kv: {format: fp8-kv}``.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from bitdraft.quant.schemes import FP8_KV, Scheme, scheme_named

SUFFIXES = {"kvfp8": FP8_KV.name}
"""What may stand behind a preset's name and a plus sign, and the cache's format that it means."""


@dataclass(frozen=True, kw_only=True)
class KvRule:
    """The format in which keys (after rotary embedding and QK-norm) and values are cached."""

    format: str = FP8_KV.name
    """A format with a static scale (``fp8-kv``, ``fp8-e5m2-kv``), or one that scales every token and head by itself
    (``fp8-token``, ``int8-token``, ``mxfp4-rceil``, …)."""
    scales: str = "one"
    """Static scales: ``one`` (vLLM's default), ``calibrated`` to the largest magnitude on calibration text, or
    ``stored`` in the checkpoint."""
    per: str = "tensor"
    """Whether a layer's keys (and its values) have one static scale, or one for every KV ``head``."""

    def __post_init__(self) -> None:
        for key, known in (("scales", ("one", "calibrated", "stored")), ("per", ("tensor", "head"))):
            _check_choice("kv", key, getattr(self, key), known)
        scheme = self.scheme
        if scheme.scale == "static":
            if self.per == "head" and self.scales == "one":
                raise ValueError(
                    "kv: scales of one are the same for every head: take 'scales: calibrated', or no 'per'"
                )
        elif (self.scales, self.per) != ("one", "tensor"):
            raise ValueError(f"kv: {self.format} scales every token and head by itself: leave out 'scales' and 'per'")
        else:
            _check_per_token("kv: format", scheme)
            if scheme.has_global_scale:
                raise ValueError(
                    f"kv: {self.format} has a scale above its block scales, for which caches have no place"
                )

    @property
    def scheme(self) -> Scheme:
        return scheme_named(self.format)

    @property
    def needs_calibration(self) -> bool:
        return self.scales == "calibrated"


@dataclass(frozen=True, kw_only=True)
class AttentionRule:
    """The formats of what attention multiplies; ``None`` is high precision.

    Queries, keys and values are rounded per token and head, along the head's width; probabilities per query and head,
    along the keys.
    """

    queries: str | None = None
    """Or a static FP8 format, whose scale is that of the cached keys, as engines have it."""
    keys: str | None = None
    probabilities: str | None = None
    """Also static FP8, in which ``exp(s - max)`` has the scale of FlashAttention-3."""
    values: str | None = None
    head_scales: str = "none"
    """``fitted``: a factor per head on the low-bit logits, from calibration text."""
    temperature: str = "none"
    """``fitted``: a temperature per layer, from calibration text."""

    def __post_init__(self) -> None:
        for key in ("head_scales", "temperature"):
            _check_choice("attention", key, getattr(self, key), ("none", "fitted"))
        formats = {key: getattr(self, key) for key in ("queries", "keys", "probabilities", "values")}
        if not any(formats.values()):
            raise ValueError("attention: name a format for one of queries, keys, probabilities or values")
        for key, name in formats.items():
            if name is None:
                continue
            scheme = scheme_named(name)
            if scheme.scale != "static":
                _check_per_token(f"attention: {key}", scheme)
            elif key in ("keys", "values"):
                raise ValueError(
                    f"attention: {key} in {name}: a static format of {key} is that of the cache, under 'kv'"
                )
        if self.head_scales == "fitted" and not (self.queries or self.keys):
            raise ValueError(
                "attention: head_scales correct the product of low-bit queries and keys: name their formats"
            )

    @property
    def needs_calibration(self) -> bool:
        """Whether something is measured on calibration text: a correction, or NVFP4's scale above the block scales."""
        two_level = any(name and scheme_named(name).has_global_scale for name in (self.queries, self.keys, self.values))
        return two_level or "fitted" in (self.head_scales, self.temperature)


def kv_rule(entry: object) -> KvRule:
    """What stands under ``kv`` in a recipe file; ``ValueError`` for anything else than text under known keys."""
    rule = KvRule(**_texts("kv", entry, KvRule))
    if rule.scales == "stored":
        raise ValueError("kv: stored scales come with a quantized checkpoint, under --target-quant auto")
    return rule


def attention_rule(entry: object) -> AttentionRule:
    """What stands under ``attention`` in a recipe file; ``ValueError`` as for ``kv_rule``."""
    return AttentionRule(**_texts("attention", entry, AttentionRule))


def kv_rule_named(suffix: str) -> KvRule:
    """The rule that ``+suffix`` stands for; ``ValueError`` naming the nearest for an unknown one."""
    if suffix not in SUFFIXES:
        near = difflib.get_close_matches(suffix, SUFFIXES, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown suffix '+{suffix}': did you mean '+{near}'?")
    return KvRule(format=SUFFIXES[suffix])


def _texts(where: str, entry: object, rule: type) -> Mapping[str, Any]:
    keys = [field.name for field in fields(rule)]
    if not isinstance(entry, dict) or set(entry) - set(keys) or not all(isinstance(v, str) for v in entry.values()):
        raise ValueError(f"{where}: text is needed under some of the keys {', '.join(keys)}")
    return entry


def _check_choice(where: str, key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1, cutoff=0.0)[0]
        raise ValueError(f"{where}: unknown {key} {value!r}: did you mean {near!r}? (there are: {', '.join(known)})")


def _check_per_token(where: str, scheme: Scheme) -> None:
    """Scales that several tokens share would let a later token change what earlier ones computed."""
    if scheme.rows != 1:
        raise ValueError(
            f"{where}: {scheme.name} has scales that several tokens share: take one that scales every token by itself, "
            "such as fp8-token, int8-token or mxfp8-rceil"
        )
