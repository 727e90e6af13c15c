"""Which linear layers of a model a recipe picks, why the others stay, and which of them engines fuse."""

from collections import defaultdict

from torch import Tensor, nn

from bitdraft.quant.block import check_divides
from bitdraft.quant.experts import experts_around
from bitdraft.quant.recipe import Recipe, Rule

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def choose_layers(model: nn.Module, recipe: Recipe) -> tuple[dict[str, Rule], dict[str, str]]:
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
        if not rule.leaves_alone and rule.modules not in {r.modules for r in chosen.values()}:
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
