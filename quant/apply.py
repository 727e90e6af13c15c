"""Apply a recipe to a transformers model, in place.

Layers that an engine fuses (q, k and v; gate and up) share one NVFP4 scale per tensor, for weights and for
inputs, because the engine keeps only one of them. Static input scales are measured on calibration text
before anything is quantized.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bitdraft.quant.block import check_divides, nvfp4_global_scale
from bitdraft.quant.linear import ActivationQuantizer, LowBitLinear
from bitdraft.quant.recipe import Recipe, Rule

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class Applied:
    """What a recipe did to a model."""

    quantized: dict[str, Rule]
    left_alone: dict[str, str]
    """Linear layers that stay in high precision, with the reason."""
    quantizer: ActivationQuantizer

    def summary(self) -> str:
        """A few lines for the log: which formats on how many layers, and what was left alone and why."""
        formats = Counter((r.weights, r.activations) for r in self.quantized.values())
        lines = [
            f"{count} linear layers: weights {weights}, activations {activations or 'in high precision'}"
            for (weights, activations), count in formats.items()
        ]
        reasons: dict[str, list[str]] = defaultdict(list)
        for name, reason in self.left_alone.items():
            reasons[reason].append(name)
        for reason, names in reasons.items():
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            lines.append(f"left in high precision ({reason}): {shown}")
        return "\n".join(lines)


def apply_recipe(model: nn.Module, recipe: Recipe, *, compiled: bool, calibration: Sequence[Tensor] = ()) -> Applied:
    """Replace the linear layers that ``recipe`` names by ``LowBitLinear``, in place.

    ``calibration``: token ids ``[1, T]`` each, run through the unquantized model when the recipe has static
    activation scales. Raises ``ValueError`` naming the module or rule for a pattern that matches nothing, a
    width that does not divide into blocks, a weight that is not finite, expert weights that are not linear
    layers, or missing calibration text.
    """
    chosen, left_alone = _choose(model, recipe)
    quantizer = ActivationQuantizer(compiled)
    groups = _groups(chosen)
    input_scales = _input_scales(model, chosen, groups, calibration)
    for members in groups:
        weight_scale = _shared_weight_scale(model, chosen, members)
        for name in members:
            rule = chosen[name]
            assert rule.weight_scheme is not None
            source = model.get_submodule(name)
            assert isinstance(source, nn.Linear)
            try:
                layer = LowBitLinear(
                    source,
                    rule.weight_scheme,
                    rule.activation_scheme,
                    quantizer,
                    weight_global_scale=weight_scale,
                    input_global_scale=input_scales.get(name),
                )
            except ValueError as error:
                raise ValueError(f"module {name}: {error}") from error
            model.set_submodule(name, layer)
    return Applied(chosen, left_alone, quantizer)


def _choose(model: nn.Module, recipe: Recipe) -> tuple[dict[str, Rule], dict[str, str]]:
    """Which linear layers the rules pick, and why the others stay; refuses what it would have to skip."""
    chosen: dict[str, Rule] = {}
    left_alone: dict[str, str] = {}
    for name, module in model.named_modules():
        rule = recipe.rule_for(name)
        wanted = rule is not None and not rule.leaves_alone
        if isinstance(module, nn.Linear):
            if wanted:
                assert rule is not None
                chosen[name] = rule
                for scheme in (rule.weight_scheme, rule.activation_scheme):
                    if scheme is not None:
                        try:
                            check_divides(module.in_features, scheme)
                        except ValueError as error:
                            raise ValueError(f"module {name}: {error}") from error
                if rule.weight_scheme is None:
                    raise ValueError(f"recipe {recipe.name!r}, rule {rule.modules!r}: activations without weights")
            else:
                left_alone[name] = f"rule {rule.modules!r}" if rule else "no rule matches"
        elif wanted:
            if any(tensor.ndim == 2 for tensor in module.parameters(recurse=False)):
                left_alone[name] = f"{type(module).__name__} is not a linear layer"
            stacked = [p for p, tensor in module.named_parameters(recurse=False) if tensor.ndim == 3]
            if stacked:
                raise ValueError(
                    f"module {name} keeps its experts in one tensor ({stacked[0]}), which cannot be quantized "
                    "yet: leave it alone with a rule of its own, or use --target-quant none"
                )
    for rule in recipe.rules:
        if not rule.leaves_alone and rule not in chosen.values():
            raise ValueError(f"recipe {recipe.name!r}: no linear layer matches the pattern {rule.modules!r}")
    return chosen, left_alone


def _groups(chosen: dict[str, Rule]) -> list[list[str]]:
    """The chosen layers, those that engines fuse together in one list (if one rule covers them all)."""
    groups: dict[tuple[str, object, Rule], list[str]] = defaultdict(list)
    for name, rule in chosen.items():
        parent, _, leaf = name.rpartition(".")
        fused = next((f for f in _FUSED if leaf in f), leaf)
        groups[parent, fused, rule].append(name)
    return list(groups.values())


def _shared_weight_scale(model: nn.Module, chosen: dict[str, Rule], members: list[str]) -> Tensor | None:
    scheme = chosen[members[0]].weight_scheme
    if scheme is None or not scheme.has_global_scale:
        return None
    weights: list[Tensor] = [model.get_submodule(name).weight for name in members]  # type: ignore[misc]
    return nvfp4_global_scale(torch.stack([w.abs().amax().float() for w in weights]).amax())


def _input_scales(
    model: nn.Module, chosen: dict[str, Rule], groups: list[list[str]], calibration: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Static encode scales of inputs: ``2688 / amax`` over the calibration text, one tensor object per group."""
    static = {n for n, r in chosen.items() if r.activation_scheme and r.activation_scheme.has_global_scale}
    if not static:
        return {}
    if not calibration:
        raise ValueError("this recipe has static activation scales and needs calibration text")
    for name in chosen:  # else a damaged weight would be blamed on the inputs it spoils
        if not torch.isfinite(model.get_parameter(f"{name}.weight")).all():
            raise ValueError(f"module {name}: the weight holds NaN or infinity")
    largest: dict[str, Tensor] = {}
    with _watching_inputs(model, static, largest), torch.no_grad():
        for ids in calibration:
            model(input_ids=ids)
    scales: dict[str, Tensor] = {}
    for members in groups:
        if members[0] in static:
            shared = nvfp4_global_scale(torch.stack([largest[name] for name in members]).amax())
            if not torch.isfinite(shared):
                raise ValueError(f"module {members[0]}: the calibration text makes inputs that are not finite")
            scales |= dict.fromkeys(members, shared)
    return scales


@contextmanager
def _watching_inputs(model: nn.Module, names: set[str], largest: dict[str, Tensor]) -> Iterator[None]:
    """Record the largest input magnitude (fp32 scalar) of each named module while the block runs."""

    def watch(name: str) -> object:
        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            amax = args[0].abs().amax().float()
            largest[name] = torch.maximum(largest[name], amax) if name in largest else amax

        return hook

    handles = [model.get_submodule(n).register_forward_pre_hook(watch(n)) for n in names]  # type: ignore[arg-type]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
