"""Apply a recipe to a transformers model, in place.

Layers that an engine fuses (q, k and v; gate and up) share one NVFP4 scale per tensor, for weights and for
inputs, because the engine keeps only one of them; scale methods see the weights of such layers as one matrix.
Static input scales are measured on calibration text before anything is quantized.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bitdraft.quant.block import Quantized, check_divides, nvfp4_global_scale, quantize
from bitdraft.quant.experts import experts_around, kind_of, separate_experts
from bitdraft.quant.linear import ActivationQuantizer, LowBitLinear
from bitdraft.quant.recipe import Recipe, Rule
from bitdraft.quant.scales.four_over_six import blocks_at_four
from bitdraft.quant.scales.methods import quantize_together

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class Applied:
    """What a recipe did to a model."""

    quantized: dict[str, Rule]
    left_alone: dict[str, str]
    """Linear layers that stay in high precision, with the reason."""
    quantizer: ActivationQuantizer
    fours: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Layers under FourOverSix: how many blocks were scaled to 4, of how many."""

    def summary(self) -> str:
        """A few lines for the log: which formats on how many layers, and what was left alone and why."""
        formats = Counter((r.weights, r.scales, r.activations) for r in self.quantized.values())
        of_experts = Counter(
            (r.weights, r.scales, r.activations) for n, r in self.quantized.items() if ".experts." in n
        )
        lines = [
            f"{count} linear layers{f' ({inside} of experts)' if (inside := of_experts[key]) else ''}: weights "
            f"{key[0]}{'' if key[1] == 'amax' else f' ({key[1]} scales)'}, activations {key[2] or 'in high precision'}"
            for key, count in formats.items()
        ]
        if self.fours:
            shares = ", ".join(f"{kind} {four / blocks:.1%}" for kind, (four, blocks) in self.fours_by_kind().items())
            lines.append(f"blocks scaled to 4 instead of 6: {shares}")
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


def apply_recipe(
    model: nn.Module,
    recipe: Recipe,
    *,
    compiled: bool,
    calibration: Sequence[Tensor] = (),
    watch: Callable[[str, Quantized], None] | None = None,
) -> Applied:
    """Replace the linear layers that ``recipe`` names by ``LowBitLinear``, in place.

    ``calibration``: token ids ``[1, T]`` each, run through the unquantized model when the recipe has static
    activation scales. ``watch`` is called with every layer's name and its quantized weight, block scales included,
    which the layer itself does not keep. Raises ``ValueError`` naming the module or rule for a pattern that matches
    nothing, a width that does not divide into blocks, a weight that is not finite, experts of a kind that is not
    known, scales that do not suit their format, or missing calibration text.
    """
    _check_scales(recipe)
    separate_experts(model, lambda *names: (rule := recipe.rule_for(*names)) is not None and not rule.leaves_alone)
    chosen, left_alone = _choose(model, recipe)
    quantizer = ActivationQuantizer(compiled)
    groups = fused_groups(chosen)
    input_scales = _input_scales(model, chosen, groups, calibration)
    fours: dict[str, tuple[int, int]] = {}
    for members in groups:
        weight_scale = _shared_weight_scale(model, chosen, members)
        quantized = _quantized_by_method(model, chosen[members[0]], members)
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
                    quantized=quantized.get(name),
                )
            except ValueError as error:
                raise ValueError(f"module {name}: {error}") from error
            model.set_submodule(name, layer)
            if watch is not None:
                q = quantized.get(name)
                if q is None:
                    q = quantize(source.weight.detach(), rule.weight_scheme, global_scale=weight_scale)
                watch(name, q)
            if name in quantized and rule.scales.startswith("four-over-six"):
                four = blocks_at_four(quantized[name])
                fours[name] = int(four.sum()), four.numel()
    return Applied(chosen, left_alone, quantizer, fours)


def _check_scales(recipe: Recipe) -> None:
    for rule in recipe.rules:
        try:
            _ = rule.scale_method
        except ValueError as error:
            raise ValueError(f"recipe {recipe.name!r}, rule {rule.modules!r}: {error}") from error


def _check_finite(model: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        if not torch.isfinite(model.get_parameter(f"{name}.weight")).all():
            raise ValueError(f"module {name}: the weight holds NaN or infinity")


def _quantized_by_method(model: nn.Module, rule: Rule, members: list[str]) -> dict[str, Quantized]:
    """The weights of a group as the rule's scale method leaves them; nothing where the scales are plain."""
    scheme, method = rule.weight_scheme, rule.scale_method
    if scheme is None or method is None or method.name == "amax":
        return {}
    weights = [model.get_parameter(f"{name}.weight").detach() for name in members]
    _check_finite(model, members)
    return dict(zip(members, quantize_together(weights, scheme, method), strict=True))


def _choose(model: nn.Module, recipe: Recipe) -> tuple[dict[str, Rule], dict[str, str]]:
    """Which linear layers the rules pick, and why the others stay; refuses what it would have to skip."""
    chosen: dict[str, Rule] = {}
    left_alone: dict[str, str] = {}
    around = experts_around(model)
    for name, module in model.named_modules():
        rule = recipe.rule_for(*((around[name], name) if name in around else (name,)))
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
        elif (kept := _own_matrices(module)) and rule is not None:
            if rule.leaves_alone:
                left_alone[name] = f"rule {rule.modules!r}"
            elif isinstance(module, nn.Conv1d) or all(tensor.ndim == 2 for tensor in kept.values()):
                left_alone[name] = f"{type(module).__name__} is not a linear layer"
            else:
                stacked = next(parameter for parameter, tensor in kept.items() if tensor.ndim > 2)
                raise ValueError(
                    f"module {name} keeps its experts in one tensor ({stacked}) in a way that is not known here: "
                    "leave it alone with a rule of its own, or use --target-quant none"
                )
    for rule in recipe.rules:
        if not rule.leaves_alone and rule not in chosen.values():
            raise ValueError(f"recipe {recipe.name!r}: no linear layer matches the pattern {rule.modules!r}")
    return chosen, left_alone


def _own_matrices(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in module.named_parameters(recurse=False) if tensor.ndim >= 2}


def fused_groups(chosen: dict[str, Rule]) -> list[list[str]]:
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
    """Static encode scales of inputs: ``2688 / amax`` over the calibration text.

    One tensor object per group, and one for the same projection of all experts.
    """
    static = {n for n, r in chosen.items() if r.activation_scheme and r.activation_scheme.has_global_scale}
    if not static:
        return {}
    if not calibration:
        raise ValueError("this recipe has static activation scales and needs calibration text")
    _check_finite(model, chosen)  # else a damaged weight would be blamed on the inputs it spoils
    largest: dict[str, Tensor] = {}
    with watching_inputs(model, static, largest), torch.no_grad():
        for ids in calibration:
            model(input_ids=ids)
    pools: dict[tuple[str, Rule], list[str]] = defaultdict(list)
    for members in groups:
        if members[0] in static:
            pools[any_expert(members[0]), chosen[members[0]]] += members
    scales: dict[str, Tensor] = {}
    for members in pools.values():
        seen = [largest[name] for name in members if name in largest]  # the text may not reach every expert
        if not seen:
            raise ValueError(f"module {members[0]}: the calibration text does not reach it")
        shared = nvfp4_global_scale(torch.stack(seen).amax())
        if not torch.isfinite(shared):
            raise ValueError(f"module {members[0]}: the calibration text makes inputs that are not finite")
        scales |= dict.fromkeys(members, shared)
    return scales


def any_expert(name: str) -> str:
    """``name`` without the number of its expert: engines quantize the inputs of all experts under one scale."""
    before, experts, after = name.partition(".experts.")
    return before + experts + ".".join(part for part in after.split(".") if not part.isdigit())


@contextmanager
def watching_inputs(model: nn.Module, names: set[str], largest: dict[str, Tensor]) -> Iterator[None]:
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
