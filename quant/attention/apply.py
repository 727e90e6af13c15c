"""Put a recipe's KV cache and attention formats into a model, and refuse models where they would not be what runs."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bitdraft.quant.apply import Applied
from bitdraft.quant.attention.corrections import calibrate_attention
from bitdraft.quant.attention.kv_cache import PassCache, ThroughTheCache
from bitdraft.quant.attention.kv_rounding import KvRounding, LargestSeen
from bitdraft.quant.attention.low_bit import LowBitAttention
from bitdraft.quant.attention.packed import attention_calls, place_low_bit, use_low_bit
from bitdraft.quant.attention.rules import AttentionRule, KvRule
from bitdraft.quant.recipe import Recipe

_WITH_KEYS = {"full_attention", "sliding_attention", "chunked_attention"}
_PROBE = 8  # tokens


@torch.no_grad()
def apply_to_attention(
    model: nn.Module,
    recipe: Recipe,
    applied: Applied,
    calibration: Sequence[Tensor] = (),
    stored: KvRounding | None = None,
) -> Applied:
    """Let ``model``, whose linear layers are done, cache keys and values and compute attention as ``recipe`` says.

    ``stored``: the cache's scales where a checkpoint brings them. Returns ``applied`` with what was done. Raises
    ``ValueError`` naming the model, or a layer of it, whose attention cannot be reached, for missing calibration text,
    and for formats that do not fit the heads' width.
    """
    cache = attention = None
    if recipe.kv is not None:
        cache = stored or _rounding(model, recipe.kv, calibration)
        _check_widths(model, cache)
        decoder: Any = model.get_decoder()  # type: ignore[operator]
        decoder.add_module("low_bit_cache", cache)
        decoder.register_forward_pre_hook(ThroughTheCache(_layers(model), cache), with_kwargs=True)
    if recipe.attention is not None:
        attention = _low_bit_attention(model, recipe.attention, cache, calibration)
    return replace(applied, cache=cache, attention=attention)


def _layers(model: Any) -> int:
    return int(model.config.num_hidden_layers)


def _rounding(model: nn.Module, rule: KvRule, calibration: Sequence[Tensor]) -> KvRounding:
    """The cache's rounding with the scales that the rule asks for, on the model's device."""
    layers = _layers(model)
    seen = LargestSeen(layers)
    _probe(model, PassCache(layers, seen))
    if not rule.needs_calibration:
        return KvRounding.with_scales_of_one(rule, layers).to(next(model.parameters()).device)
    if not calibration:
        raise ValueError("kv: calibrated scales are measured on calibration text, and none was given")
    seen = LargestSeen(layers)
    for ids in calibration:
        model.get_decoder()(input_ids=ids, cache=PassCache(layers, seen), use_cache=True)  # type: ignore[operator]
    return seen.rounding(rule)


def _check_widths(model: nn.Module, cache: KvRounding) -> None:
    try:
        _probe(model, PassCache(_layers(model), cache))
    except ValueError as error:
        raise ValueError(f"kv: {error}") from error


def _probe(model: Any, cache: PassCache) -> None:
    """Run a few tokens; ``ValueError`` unless every layer hands its keys and values to the cache once."""
    name, config = type(model).__name__, model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds - _WITH_KEYS:
        raise ValueError(f"kv: {name} has layers of kind {', '.join(sorted(kinds - _WITH_KEYS))}, which cache no keys")
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(f"kv: {name} caches compressed keys and values (MLA), whose low-bit form is not simulated")
    if "cache" not in inspect.signature(model.get_decoder().forward).parameters:
        raise ValueError(f"kv: {name} takes no cache in the way of transformers 5: use a model of transformers' own")
    model.get_decoder()(input_ids=_ids(model), cache=cache, use_cache=True)
    for number, layer in enumerate(cache.passed):
        if layer.updates != 1:
            raise ValueError(f"kv: layer {number} of {name} does not hand its keys and values to the cache")


def _ids(model: Any) -> Tensor:
    device = next(model.parameters()).device
    return torch.arange(_PROBE, device=device)[None] % int(model.config.vocab_size)


def _low_bit_attention(
    model: Any, rule: AttentionRule, cache: KvRounding | None, calibration: Sequence[Tensor]
) -> Mapping[str, LowBitAttention]:
    modules = _attention_modules(model)
    device = next(model.parameters()).device
    layers: dict[str, tuple[nn.Module, LowBitAttention]] = {}
    for number, (name, module) in enumerate(modules.items()):
        low = LowBitAttention(rule, None if cache is None else cache.key_scales[number]).to(device)
        place_low_bit(module, low)
        layers[name] = module, low
    use_low_bit(model)
    try:
        model.get_decoder()(input_ids=_ids(model), use_cache=False)
    except ValueError as error:
        raise ValueError(f"attention: {error}") from error
    calibrate_attention(model, layers, rule, calibration)
    return {name: low for name, (_, low) in layers.items()}


def _attention_modules(model: Any) -> dict[str, nn.Module]:
    """One attention module per decoder layer, in order, by name; ``ValueError`` for a model that has it otherwise."""
    kind = type(model).__name__
    if not getattr(model, "_supports_sdpa", True):
        raise ValueError(f"attention: {kind} has attention of its own kind (sinks, say), which is not known here")
    with attention_calls(model) as called:
        try:
            model.get_decoder()(input_ids=_ids(model), use_cache=False)
        except ValueError as error:
            raise ValueError(f"attention: {error}") from error
    names = {id(module): name for name, module in model.named_modules()}
    if len(called) != _layers(model) or len({id(module) for module in called}) != len(called):
        raise ValueError(
            f"attention: {len(called)} of the {_layers(model)} layers of {kind} ask for their attention where it can "
            "be replaced: leave 'attention' out of the recipe"
        )
    return {names[id(module)]: module for module in called}
