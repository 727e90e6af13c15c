"""Which layers of a head a recipe puts in low bit, and the static scales of their inputs.

One choice for heads that are quantized (``speculators/low_bit.py``) and for those that are trained in low bit
(``speculators/qat.py``), so that what is trained is what is written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bitdraft.quant.choose import choose_layers, fused_groups
from bitdraft.quant.input_scales import input_scales as measured_scales
from bitdraft.quant.linear import LowBitLinear
from bitdraft.quant.loading import placed_text
from bitdraft.quant.profiles import PLAIN
from bitdraft.quant.recipe import Recipe, Rule
from bitdraft.quant.schemes import scheme_named
from bitdraft.quant.target import LowBitTarget, TargetStates
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.documents import Documents
from bitdraft.speculators.low_bit_rules import check_chosen, check_kind, check_recipe, check_rows
from bitdraft.speculators.trained_linear import TrainedLinear

# B sequence, T token, M output channel, K input channel.


@dataclass(frozen=True)
class ChosenGroup:
    """Layers of a head that a recipe names and engines fuse, or one alone."""

    names: list[str]
    """As in the head: ``layers.0.mlp.down_proj``."""
    rule: Rule
    input_scale: Tensor | None
    """``[]`` fp32, where the rule has static inputs."""


@torch.no_grad()
def choose_for_head(
    head: DraftHead,
    recipe: Recipe,
    *,
    target: LowBitTarget | None,
    calibration: Sequence[Tensor],
    input_scales: Mapping[str, Tensor] | None,
) -> list[ChosenGroup]:
    """The layers that ``recipe`` names, with the static scales of their inputs. Arguments and errors as in
    ``quantize_head``; nothing is changed."""
    assert recipe.profile == PLAIN.name, "what is declared is the recipe's, what is computed the profile's"
    check_kind(head.kind)
    check_recipe(recipe)
    if any(isinstance(module, LowBitLinear) for module in head.modules()):
        raise ValueError("the head is in low bit already: give the one in 16 bit")
    model = _BehindTarget(head, target)
    chosen, _ = choose_layers(model, recipe)
    check_chosen(recipe, chosen)
    groups = fused_groups(chosen)
    scales = _known_scales(head, chosen, input_scales or {})
    unknown = [
        members for members in groups if chosen[members[0]].has_static_inputs and not scales.keys() >= {*members}
    ]
    if unknown and not (target and calibration):
        raise ValueError(
            f"recipe {recipe.name!r} has static scales for the head's inputs, which need the target and calibration "
            "text: give both, or take a weight-only form (nvfp4a16)"
        )
    for members in groups:
        rows = {name: len(model.weight(name)) for name in members}
        check_rows(rows, scheme_named(str(chosen[members[0]].weights)))
    if unknown and target:
        scales |= measured_scales(model, chosen, unknown, placed_text(target.model, calibration))
    return [
        ChosenGroup([n.removeprefix("model.") for n in members], chosen[members[0]], scales.get(members[0]))
        for members in groups
    ]


def _known_scales(head: DraftHead, chosen: Mapping[str, Rule], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Static scales of inputs by names as in ``chosen``: those that layers are trained with, and before them those in
    ``given``, which has the head's own names. ``ValueError`` for what no layer can take."""
    known: dict[str, Tensor] = {}
    for name, rule in chosen.items():
        module = head.get_submodule(name.removeprefix("model."))
        if isinstance(module, TrainedLinear) and (scale := module.scale_for(rule)) is not None:
            known[name] = scale
    for own, scale in given.items():
        name = f"model.{own}"
        if name not in chosen or not chosen[name].has_static_inputs:
            raise ValueError(f"input_scales names {own}, whose inputs have no static scale under this recipe")
        if scale.numel() != 1 or not (torch.isfinite(scale).all() and (scale > 0).all()):
            raise ValueError(f"input_scales: that of {own} is not one positive number")
        known[name] = scale.float().reshape(()).to(head.get_parameter(f"{own}.weight").device)
    for members in fused_groups(dict(chosen)):
        scales = [known[name] for name in members if name in known]
        if any(not torch.equal(scale, scales[0]) for scale in scales):
            raise ValueError(f"input_scales of {' and '.join(members)} differ, but engines fuse them and keep one")
    return known


class _BehindTarget(nn.Module):
    """The head as a model of token ids, under the names that engines give its layers: what is run to calibrate it."""

    def __init__(self, head: DraftHead, target: LowBitTarget | None) -> None:
        super().__init__()
        self.model, self._target = head, target

    def get_decoder(self) -> nn.Module:
        return self

    def weight(self, name: str) -> Tensor:
        """The weight ``[M, K]`` of a layer; ``ValueError`` if it is not finite."""
        weight = self.get_parameter(f"{name}.weight").detach()
        if not torch.isfinite(weight).all():
            raise ValueError(f"module {name}: the weight holds NaN or infinity")
        return weight

    def forward(self, input_ids: Tensor, use_cache: bool) -> None:
        """Draft behind every token of ``[B, T]`` that has as many behind it as the head was trained to draft."""
        del use_cache
        assert self._target is not None
        states = self._target.states(input_ids, capture=self.model.capture_layers)
        batch, length = input_ids.shape
        starts = range(0, batch * length, length)
        behind = max(length - self.model.draft_steps, 1)
        documents = Documents((*starts, batch * length), tuple((s, s + behind) for s in starts), str(input_ids.device))
        packed = TargetStates(states.captured.flatten(0, 1), states.last_hidden.flatten(0, 1))
        self.model.training_outputs(packed, input_ids.flatten(), documents)
