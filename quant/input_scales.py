"""Static scales of the inputs of layers, from the largest magnitudes that calibration text makes.

Layers that an engine fuses share one scale, and so does the same projection of all experts.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bitdraft.quant.block import nvfp4_global_scale
from bitdraft.quant.recipe import Rule
from bitdraft.quant.scale_rules import fp32_scale


def input_scales(
    model: nn.Module, chosen: Mapping[str, Rule], groups: Sequence[list[str]], calibration: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Static scales of the inputs of those layers in ``groups`` whose rule has them.

    ``2688 / amax`` over the calibration text for NVFP4 (an encode scale), ``amax / max`` for FP8 (a decode scale).

    ``calibration``: token ids ``[B, T]`` each. One tensor object per group, and one for the same projection of all
    experts. Raises ``ValueError`` without text, and naming a layer that the text does not reach or whose inputs are not
    finite.
    """
    groups = [members for members in groups if chosen[members[0]].has_static_inputs]
    if not groups:
        return {}
    if not calibration:
        raise ValueError("this recipe has static activation scales and needs calibration text")
    largest: dict[str, Tensor] = {}
    watched = {name for members in groups for name in members}
    decoder: nn.Module = model.get_decoder()  # type: ignore[operator]
    inside = {id(module) for module in decoder.modules()}
    run = decoder if all(id(model.get_submodule(name)) in inside for name in watched) else model  # spare the logits
    with watching_inputs(model, watched, largest), torch.no_grad():
        for ids in calibration:
            run(input_ids=ids, use_cache=False)
    pools: dict[tuple[str, Rule], list[str]] = defaultdict(list)
    for members in groups:
        pools[any_expert(members[0]), chosen[members[0]]] += members
    scales: dict[str, Tensor] = {}
    for (_, rule), members in pools.items():
        seen = [largest[name] for name in members if name in largest]  # the text may not reach every expert
        if not seen:
            raise ValueError(f"module {members[0]}: the calibration text does not reach it")
        shared = _static_scale(torch.stack(seen).amax(), rule)
        if not torch.isfinite(shared):
            raise ValueError(f"module {members[0]}: the calibration text makes inputs that are not finite")
        scales |= dict.fromkeys(members, shared)
    return scales


def _static_scale(amax: Tensor, rule: Rule) -> Tensor:
    scheme = rule.activation_scheme
    assert scheme is not None
    return nvfp4_global_scale(amax) if scheme.has_global_scale else fp32_scale(amax, scheme)


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
