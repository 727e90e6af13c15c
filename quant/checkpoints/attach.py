"""A model that transformers loaded from decoded values, made into the low-bit model that the checkpoint describes.

Engines keep one static input scale for layers that they fuse and for all experts of a layer: the widest of those
stored holds for all. One global weight scale is kept too, so that layers that would disagree about it are refused:
the engine would decode some of them wrongly.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from bitdraft.quant.apply import Applied
from bitdraft.quant.at_load import loaded
from bitdraft.quant.block import Quantized
from bitdraft.quant.checkpoints.read import StoredCheckpoint
from bitdraft.quant.checkpoints.stored import Formats, StoredLayer
from bitdraft.quant.choose import fused_groups
from bitdraft.quant.experts import expert_projections, experts_around, separate_experts, stored_expert
from bitdraft.quant.input_scales import any_expert
from bitdraft.quant.linear import ActivationQuantizer, LowBitLinear
from bitdraft.quant.profiles import PLAIN, Profile, difference
from bitdraft.quant.recipe import AUTO, Recipe, Rule


def attach(
    model: nn.Module, stored: StoredCheckpoint, *, compiled: bool, profile: Profile = PLAIN
) -> tuple[Applied, Recipe]:
    """Replace the layers of ``model`` whose values came from ``stored`` by ``LowBitLinear``, in place.

    ``profile`` says how the engine computes what the checkpoint declares.
    Returns what was done and the recipe that says so. Raises ``ValueError`` naming a layer that the model does not
    have, that the configuration declares but the checkpoint does not hold, or whose scales an engine could not keep.
    """
    layers = _by_module_name(model, stored)
    separate_experts(model, lambda experts, name: name in layers or experts in stored.experts)
    for name, experts in experts_around(model).items():
        if experts in stored.experts:
            layers[name] = StoredLayer(stored.experts[experts], Quantized(torch.empty(0), None, torch.empty(0)))
    declared, layers = layers, {n: _as_computed(n, layer, profile, stored) for n, layer in layers.items()}
    left_alone = _left_alone(model, layers, stored)
    changed = {n: difference(a.formats, layers[n].formats) for n, a in declared.items()}
    recipe = replace(
        _recipe(layers, left_alone),
        profile=profile.name,
        changed=tuple(sorted({c for c in changed.values() if c})),
        exact_product=profile.exact_product,
    )
    rules: dict[str, Rule] = {}
    for name in layers:
        rule = recipe.rule_for(name)
        assert rule is not None
        rules[name] = rule
    input_scales = _shared_input_scales(rules, layers)
    quantizer = ActivationQuantizer(compiled)
    for members in fused_groups(rules):
        at_load, weights = rules[members[0]].at_load, [_weight(model, name, layers[name]) for name in members]
        for name, weight in zip(members, loaded(weights, at_load, weights[0].values.dtype), strict=True):
            source, rule = model.get_submodule(name), rules[name]
            assert isinstance(source, nn.Linear) and rule.weight_scheme is not None
            scale = input_scales.get(name)
            low_bit = LowBitLinear(
                source,
                rule.weight_scheme,
                rule.activation_scheme,
                quantizer,
                input_global_scale=None if scale is None else scale.to(source.weight.device),
                quantized=weight,
            )
            model.set_submodule(name, low_bit)
    if stored.cache_tensors and not stored.has_fp8_cache:
        left_alone["key and value cache"] = "the checkpoint has scales for FP8 but does not ask for it: auto+kvfp8 does"
    return Applied(rules, left_alone, quantizer, computed_by=recipe.computed_by * (profile != PLAIN)), recipe


def _as_computed(name: str, layer: StoredLayer, profile: Profile, stored: StoredCheckpoint) -> StoredLayer:
    """The layer in the formats that the engine computes it in, without an input scale where inputs stay in 16 bit."""
    declared, experts = layer.formats, ".experts." in name
    try:
        if stored.experts and experts and not profile.is_plain:
            computed = profile.computed("gpt-oss")
        else:
            computed = profile.of(declared.weights, declared.activations, experts=experts)
    except ValueError as error:
        raise ValueError(f"layer {name}: {error}") from error
    formats = Formats(declared.weights, computed.activations, computed.at_load)
    return replace(layer, formats=formats, input_scale=layer.input_scale if computed.activations else None)


def _weight(model: nn.Module, name: str, layer: StoredLayer) -> Quantized:
    """The weight as it is stored: its values from the model, its scales from the checkpoint."""
    values, kept = model.get_parameter(f"{name}.weight").detach(), layer.weight
    outer = None if kept.outer is None else kept.outer.to(values.device)
    return Quantized(values, outer, kept.scale.to(values.device), kept.block)


def _by_module_name(model: nn.Module, stored: StoredCheckpoint) -> dict[str, StoredLayer]:
    """The stored layers under the names that the model's linear layers will have; experts' gate and up joined."""
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    found: dict[str, StoredLayer] = {}
    halves: dict[str, dict[bool, tuple[str, StoredLayer]]] = defaultdict(dict)
    for name, layer in stored.layers.items():
        expert = stored_expert(name)
        if name in linears:
            found[name] = layer
        elif expert is None:
            raise ValueError(f"the checkpoint quantizes {name}, which is no linear layer of {type(model).__name__}")
        else:
            if expert.part == "down":
                found[expert.layer] = layer
            else:
                halves[expert.layer][expert.part == "gate"] = (name, layer)
    for name, parts in halves.items():
        if len(parts) == 1:
            ((present, _),) = parts.values()
            raise ValueError(f"the checkpoint quantizes {present} but not the gate or up projection beside it")
        found[name] = _joined(parts[True], parts[False])
    head = next((n for n, m in model.named_modules() if m is model.get_output_embeddings()), None)  # type: ignore[operator]
    if head in found:
        raise ValueError(f"the checkpoint quantizes the output head ({head}), which is not supported")
    return found


def _joined(gate: tuple[str, StoredLayer], up: tuple[str, StoredLayer]) -> StoredLayer:
    """Two stored layers as one with the rows of both."""
    (gate_name, a), (up_name, b) = gate, up
    if a.formats != b.formats:
        raise ValueError(f"{gate_name} and {up_name} are in different formats, which engines cannot fuse")
    outer = a.weight.outer
    if outer is not None and b.weight.outer is not None:
        if outer.ndim == 0 and a.formats.weights.startswith("nvfp4"):
            _check_equal({gate_name: outer, up_name: b.weight.outer})
        else:
            outer = torch.cat([_per_row(a.weight), _per_row(b.weight)])
    both = [s for s in (a.input_scale, b.input_scale) if s is not None]
    scale = torch.cat([a.weight.scale, b.weight.scale]) if a.weight.scale.ndim else a.weight.scale
    return StoredLayer(a.formats, Quantized(a.weight.values, outer, scale, a.weight.block), _widest(a, both))


def _per_row(weight: Quantized) -> Tensor:
    """The outer scale with a row for every row of the weight, also where one number holds for all of them."""
    assert weight.outer is not None
    return weight.outer if weight.outer.ndim else weight.outer.expand(len(weight.values), 1)


def _widest(layer: StoredLayer, scales: Sequence[Tensor]) -> Tensor | None:
    """The input scale of the widest range: NVFP4's are encode scales, FP8's decode scales."""
    if not scales:
        return None
    stacked = torch.stack(list(scales))
    return stacked.amin() if layer.formats.activations == "nvfp4-kernel" else stacked.amax()


def _check_equal(outers: dict[str, Tensor]) -> None:
    (first, expected), *others = outers.items()
    for name, outer in others:
        if not torch.equal(outer, expected):
            raise ValueError(
                f"{first} and {name} have different global weight scales, but engines fuse them and keep one: "
                "quantize them with a shared scale"
            )


def _shared_input_scales(rules: dict[str, Rule], layers: dict[str, StoredLayer]) -> dict[str, Tensor]:
    pools: dict[tuple[str, Rule], list[str]] = defaultdict(list)
    for members in fused_groups(rules):
        outers = {n: o for n in members if (o := layers[n].weight.outer) is not None}
        if len(outers) > 1 and layers[members[0]].formats.weights.startswith("nvfp4"):
            _check_equal(outers)
        pools[any_expert(members[0]), rules[members[0]]] += members
    shared: dict[str, Tensor] = {}
    for members in pools.values():
        scales = [s for name in members if (s := layers[name].input_scale) is not None]
        if (scale := _widest(layers[members[0]], scales)) is not None:
            shared |= dict.fromkeys(members, scale)
    return shared


def _left_alone(model: nn.Module, layers: dict[str, StoredLayer], stored: StoredCheckpoint) -> dict[str, str]:
    """The linear layers in high precision; ``ValueError`` for one whose codes are missing."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    left_alone = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in layers:
            if module is not head and stored.formats(name) is not None:
                raise ValueError(f"the checkpoint declares {name} quantized, but holds no scales of it")
            left_alone[name] = "so the checkpoint has it"
        elif expert_projections(module) is not None:
            if stored.formats(f"{name}.0.down_proj") is not None:
                raise ValueError(f"the checkpoint declares the experts {name} quantized, but holds no scales of them")
            left_alone[name] = "so the checkpoint has it"
    return left_alone


def _recipe(layers: dict[str, StoredLayer], left_alone: dict[str, str]) -> Recipe:
    """Rules that say what each layer is in: the rarer formats by name, then the most frequent for all others."""
    if not layers:
        raise ValueError("the checkpoint declares a quantization but holds no quantized layer")
    frequent = Counter(layer.formats for layer in layers.values()).most_common(1)[0][0]
    rules = [Rule(name) for name in left_alone]
    for pattern, formats in _patterns(layers).items():
        if formats != frequent:
            rules.append(_rule(pattern, formats))
    return Recipe(AUTO.name, (*rules, _rule("*", frequent)))


def _rule(pattern: str, formats: Formats) -> Rule:
    return Rule(pattern, formats.weights, formats.activations, at_load=formats.at_load)


def _patterns(layers: dict[str, StoredLayer]) -> dict[str, Formats]:
    """One pattern per layer, or per projection of all experts where those agree."""
    formats: dict[str, set[Formats]] = defaultdict(set)
    for name, layer in layers.items():
        formats[_all_experts(name)].add(layer.formats)
    return {
        (_all_experts(name) if len(formats[_all_experts(name)]) == 1 else name): layer.formats
        for name, layer in layers.items()
    }


def _all_experts(name: str) -> str:
    path, _, number = name.rpartition(".")
    return f"{path}.*" if number.isdigit() and ".experts." in name else name
