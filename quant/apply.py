"""Apply a recipe to a transformers model, in place.

Layers that an engine fuses (q, k and v; gate and up) share one NVFP4 scale per tensor, for weights and for
inputs, because the engine keeps only one of them; scale methods see the weights of such layers as one matrix, and
they share one transform. Static input scales are measured on calibration text before anything is quantized. Recipes
that look at inputs are applied block by block, each block's inputs coming from the blocks already quantized.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from bitdraft.quant.at_load import loaded
from bitdraft.quant.attention.kv_rounding import KvRounding
from bitdraft.quant.attention.low_bit import LowBitAttention, describe
from bitdraft.quant.block import Quantized
from bitdraft.quant.calibrate import calibrate_layer_by_layer
from bitdraft.quant.choose import choose_layers, fused_groups
from bitdraft.quant.experts import kind_of, separate_experts
from bitdraft.quant.input_scales import input_scales
from bitdraft.quant.linear import ActivationQuantizer, LowBitLinear
from bitdraft.quant.recipe import Recipe, Rule
from bitdraft.quant.residual import Fitted, check_can_correct, describe_residuals, fit_residuals
from bitdraft.quant.scales.four_over_six import blocks_at_four
from bitdraft.quant.transforms import TransformedInput, TransformMemory
from bitdraft.quant.weights import block_transform_of, compensated_weights, scaled_weights


@dataclass(frozen=True)
class Applied:
    """What a recipe did to a model."""

    quantized: dict[str, Rule]
    left_alone: dict[str, str]
    """Linear layers that stay in high precision, with the reason."""
    quantizer: ActivationQuantizer
    fours: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Layers under FourOverSix: how many blocks were scaled to 4, of how many."""
    transforms: TransformMemory = field(default_factory=TransformMemory)
    residuals: dict[str, Fitted] = field(default_factory=dict)
    """What residual corrections added, by layer."""
    cache: KvRounding | None = None
    """What the KV cache makes of keys and values (``quant/attention/apply.py``, as what follows)."""
    attention: Mapping[str, LowBitAttention] | None = None
    """Low-bit attention by the name of the attention module."""
    computed_by: str = ""
    """Who computes, and what that changed (``Recipe.computed_by``); empty for the plain rules."""

    def summary(self) -> str:
        """A few lines for the log: which formats on how many layers, and what was left alone and why."""
        formats = Counter(replace(r, modules="") for r in self.quantized.values())
        of_experts = Counter(replace(r, modules="") for n, r in self.quantized.items() if ".experts." in n)
        lines = [self.computed_by] if self.computed_by else []
        lines += [
            f"{count} linear layers{f' ({inside} of experts)' if (inside := of_experts[rule]) else ''}: {rule.formats}"
            for rule, count in formats.items()
        ]
        if self.fours:
            shares = ", ".join(f"{kind} {four / blocks:.1%}" for kind, (four, blocks) in self.fours_by_kind().items())
            lines.append(f"blocks scaled to 4 instead of 6: {shares}")
        if self.residuals:
            lines.append(describe_residuals(list(self.residuals.values())))
        if self.cache is not None:
            lines.append(self.cache.describe())
        if self.attention is not None:
            lines.append(describe(list(self.attention.values())))
        reasons: dict[str, list[str]] = defaultdict(list)
        for name, reason in self.left_alone.items():
            reasons[reason].append(name)
        for reason, names in reasons.items():
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            lines.append(f"left in high precision ({reason}): {shown}")
        return "\n".join(lines)

    def fours_by_kind(self) -> dict[str, tuple[int, int]]:
        """``fours`` added up over layers of the same last name (``q_proj``)."""
        kinds: dict[str, tuple[int, int]] = {}
        for name, (four, blocks) in self.fours.items():
            kind = kind_of(name)
            before = kinds.get(kind, (0, 0))
            kinds[kind] = before[0] + four, before[1] + blocks
        return kinds

    def forget(self) -> None:
        """Drop the inputs that layers remember for each other, so that their memory can be freed."""
        self.quantizer.forget()
        self.transforms.forget()


def apply_recipe(
    model: nn.Module,
    recipe: Recipe,
    *,
    compiled: bool,
    calibration: Sequence[Tensor] = (),
    watch: Callable[[str, Quantized], None] | None = None,
) -> Applied:
    """Replace the linear layers that ``recipe`` names by ``LowBitLinear``, in place.

    ``calibration``: token ids ``[B, T]`` each, without padding, for recipes with static activation scales and for
    those that look at inputs (GPTQ, WUSH, residuals). ``watch`` is called with every layer's name and its quantized
    weight, block scales included, which the layer itself does not keep. Raises ``ValueError`` naming the module or rule
    for a pattern that matches nothing, a width that does not divide into blocks, a weight that is not finite, experts
    of a kind that is not known or that are to be corrected, scales, a rounding or a transform that do not suit their
    format, or missing calibration text.
    """
    _check_rules(recipe)
    separate_experts(model, lambda *names: (rule := recipe.rule_for(*names)) is not None and not rule.leaves_alone)
    chosen, left_alone = choose_layers(model, recipe)
    _check_finite(model, chosen)
    corrected = {name: rule.residual for name, rule in chosen.items() if rule.residual}
    check_can_correct(model, corrected, calibration)
    originals = {name: model.get_parameter(f"{name}.weight").detach() for name in corrected}
    applied = Applied(
        chosen, left_alone, ActivationQuantizer(compiled), computed_by=recipe.computed_by * (recipe.profile != "plain")
    )
    groups = fused_groups(chosen)
    before = [members for members in groups if chosen[members[0]].transform == "none"]
    scales = input_scales(model, chosen, before, calibration)
    waiting = {name: members for members in groups for name in members}

    def place(members: list[str], hessian: Tensor | None) -> None:
        _quantize_group(model, members, chosen[members[0]], hessian, scales, applied, watch)
        for name in members:
            del waiting[name]

    def visit(name: str, _linear: nn.Linear, hessian: Tensor) -> None:
        if name in waiting:  # else it was placed along with the first of its group
            place(waiting[name], hessian)

    if recipe.looks_at_inputs:
        _check_calibration(recipe, calibration)
    if any(rule.looks_at_inputs for rule in chosen.values()):
        calibrate_layer_by_layer(model, calibration, visit, wanted=waiting.__contains__)
    for members in groups:
        if members[0] in waiting:
            if chosen[members[0]].looks_at_inputs:
                raise ValueError(
                    f"module {members[0]} lies outside the decoder's blocks, where calibration sees no inputs: "
                    "give it a rule of its own, without gptq and wush"
                )
            place(members, None)
    _quantize_transformed_inputs(model, chosen, groups, calibration)
    if corrected:
        applied.residuals.update(fit_residuals(model, originals, corrected, calibration))
        applied.forget()
    return applied


def _check_rules(recipe: Recipe) -> None:
    for rule in recipe.rules:
        try:
            rule.check()
        except ValueError as error:
            raise ValueError(f"recipe {recipe.name!r}, rule {rule.modules!r}: {error}") from error


def _check_calibration(recipe: Recipe, calibration: Sequence[Tensor]) -> None:
    if not calibration:
        raise ValueError(
            f"recipe {recipe.name!r} looks at the inputs of layers (gptq, wush, residual): it needs calibration text"
        )


def _check_finite(model: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        if not torch.isfinite(model.get_parameter(f"{name}.weight")).all():
            raise ValueError(f"module {name}: the weight holds NaN or infinity")


def _quantize_group(
    model: nn.Module,
    members: list[str],
    rule: Rule,
    hessian: Tensor | None,
    input_scales: Mapping[str, Tensor],
    applied: Applied,
    watch: Callable[[str, Quantized], None] | None,
) -> None:
    """Put the low-bit form of layers that read the same input in their places."""
    scheme = rule.weight_scheme
    assert scheme is not None
    linears = [model.get_submodule(name) for name in members]
    weights = [model.get_parameter(f"{name}.weight").detach() for name in members]
    try:
        transform = block_transform_of(rule, weights, hessian)
        if transform is not None:
            weights = [transform.fold(w.float()) for w in weights]
            hessian = None if hessian is None else transform.moments(hessian)
        scaled = scaled_weights(weights, rule)
        quantized = scaled if rule.rounding == "nearest" else compensated_weights(weights, rule, scaled, hessian)
    except ValueError as error:
        raise ValueError(f"module {members[0]}: {error}") from error
    quantized = loaded(quantized, rule.at_load, model.get_parameter(f"{members[0]}.weight").dtype)
    for name, source, before, q in zip(members, linears, scaled, quantized, strict=True):
        assert isinstance(source, nn.Linear)
        scale = input_scales.get(name)
        # Static scales of transformed inputs are not known yet.
        activations = rule.activation_scheme if transform is None or not rule.has_static_inputs else None
        layer: nn.Module = LowBitLinear(
            source, scheme, activations, applied.quantizer, input_global_scale=scale, quantized=q
        )
        if transform is not None:
            layer = TransformedInput(layer, transform, applied.transforms)
        model.set_submodule(name, layer)
        if watch is not None:
            watch(name, q)
        if rule.scales.startswith("four-over-six"):
            four = blocks_at_four(before)
            applied.fours[name] = int(four.sum()), four.numel()


@torch.no_grad()
def _quantize_transformed_inputs(
    model: nn.Module, chosen: Mapping[str, Rule], groups: Sequence[list[str]], calibration: Sequence[Tensor]
) -> None:
    """Static input scales of transformed layers: measured behind the transform, in the model as it is by now."""
    inner = {name: f"{name}.layer" for name, rule in chosen.items() if rule.transform != "none"}
    behind = [[inner[name] for name in members] for members in groups if members[0] in inner]
    scales = input_scales(model, {inner[name]: chosen[name] for name in inner}, behind, calibration)
    for name, rule in chosen.items():
        if (scale := scales.get(inner.get(name, ""))) is not None:
            layer = model.get_submodule(inner[name])
            assert isinstance(layer, LowBitLinear)
            layer.input_global_scale, layer.activations = scale, rule.activation_scheme
