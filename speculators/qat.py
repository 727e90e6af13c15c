"""Draft heads that are trained in low bit: quantization-aware training of an EAGLE-3 head.

A head that converged in 16 bit goes on with the layers that its recipe names computed as the engine will compute them
after ``quantize_head`` (``speculators/low_bit.py``): the same selection, the same scales and the same product, with
straight-through gradients for the masters (``speculators/trained_linear.py``). ``fc`` and the output head stay in
16 bit, as engines ask.

The order of things::

    train_in_low_bit(head, recipe, target=target, calibration=text)     # before DDP, FSDP2 and optimizers wrap it
    ...                                                                 # train, measure acceptance, train
    quantize_head(head, recipe)                                         # or masters(head) for the 16-bit head

State dicts are those of the 16-bit head, so the static scales of inputs (NVFP4 W4A4) are in none: who goes on from a
checkpoint, or quantizes a head read from one, hands over what ``static_input_scales`` gave.

Masters in fp32 are quantized as they are, also under autocast, and so does an export. FSDP2's ``param_dtype`` rounds
them first: take autocast, else trained and exported codes differ where that rounding crosses a midpoint.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from bitdraft.quant.checkpoints.stored import Formats
from bitdraft.quant.profiles import PLAIN, Profile
from bitdraft.quant.recipe import Recipe
from bitdraft.quant.schemes import scheme_named
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.low_bit import computed_by
from bitdraft.speculators.low_bit_choice import choose_for_head
from bitdraft.speculators.trained_linear import Computation, FusedLayers, TrainedLinear

# B sequence, T token.


@torch.no_grad()
def train_in_low_bit(
    head: DraftHead,
    recipe: Recipe,
    *,
    target: LowBitTarget | None = None,
    calibration: Sequence[Tensor] = (),
    input_scales: Mapping[str, Tensor] | None = None,
    profile: Profile = PLAIN,
) -> DraftHead:
    """Let the layers that ``recipe`` names compute in low bit from now on, in place; parameters stay what they are.

    Arguments as in ``quantize_head``. ``input_scales``: what ``static_input_scales`` gave of a head whose training goes
    on; otherwise ``calibration`` (token ids ``[B, T]`` each) through ``target`` measures them on the head as it is.
    Raises ``ValueError`` where ``quantize_head`` does, and for a head that is trained in low bit already.
    """
    if any(isinstance(module, TrainedLinear) for module in head.modules()):
        raise ValueError("the head is trained in low bit already: take masters(head) first for another recipe")
    groups = choose_for_head(head, recipe, target=target, calibration=calibration, input_scales=input_scales)
    for group in groups:
        computed = computed_by(profile, group.names[0], Formats(str(group.rule.weights), group.rule.activations))
        inputs = scheme_named(computed.activations) if computed.activations else None
        layers = []
        for name in group.names:
            source = head.get_submodule(name)
            assert isinstance(source, nn.Linear)
            scale = None if group.input_scale is None else group.input_scale.to(source.weight.device)
            layers.append(TrainedLinear(source, scale))
            head.set_submodule(name, layers[-1])
        FusedLayers(layers, group.names, Computation(group.rule, inputs, computed.at_load, profile.exact_product))
    return head


def static_input_scales(head: DraftHead) -> dict[str, Tensor]:
    """The static scales that inputs are trained with, ``[]`` fp32 on the CPU, by the names of layers; empty where there
    are none."""
    return {
        name: module.input_global_scale.cpu()
        for name, module in head.named_modules()
        if isinstance(module, TrainedLinear) and module.input_global_scale is not None
    }


def masters(head: DraftHead) -> DraftHead:
    """Undo ``train_in_low_bit``, in place: ordinary linear layers with the same parameters, as trained."""
    trained = [(name, module) for name, module in head.named_modules() if isinstance(module, TrainedLinear)]
    for name, module in trained:
        head.set_submodule(name, module.plain())
    return head
