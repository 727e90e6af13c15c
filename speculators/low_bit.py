"""Draft heads in low bit: the layers of an EAGLE-3 head in the number formats of targets.

The head's attention and MLP become the ``LowBitLinear`` that targets are simulated with. Beside it are kept the very
tensors of the checkpoint, so that a head that was quantized here and one that was read from a file draft from the same
bits. What engines ask of such heads: ``speculators/low_bit_rules.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitdraft.quant.at_load import loaded
from bitdraft.quant.checkpoints.cache_scales import declares_fp8_cache
from bitdraft.quant.checkpoints.compressed import CompressedTensors
from bitdraft.quant.checkpoints.declare import quantization_config
from bitdraft.quant.checkpoints.read import method_of
from bitdraft.quant.checkpoints.stored import Formats, StoredLayer, check_shape
from bitdraft.quant.checkpoints.write import encoded
from bitdraft.quant.choose import fused_groups
from bitdraft.quant.linear import ActivationQuantizer, LowBitLinear
from bitdraft.quant.pack import to_compressed_tensors
from bitdraft.quant.profiles import PLAIN, Computed, Profile
from bitdraft.quant.recipe import Recipe, Rule
from bitdraft.quant.schemes import scheme_named
from bitdraft.quant.target import LowBitTarget
from bitdraft.quant.weights import scaled_weights
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.low_bit_choice import choose_for_head
from bitdraft.speculators.low_bit_rules import (
    check_can_be_declared,
    check_fused,
    check_kind,
    pattern,
)

# B sequence, T token, M output channel, K input channel.


class HeadLinear(LowBitLinear):
    """A low-bit layer that keeps what a checkpoint holds of it."""

    stored: dict[str, Tensor]
    """On the CPU, by the last part of the name: ``weight`` or ``weight_packed``, ``weight_scale``, global scales."""
    formats: Formats
    """What the checkpoint declares; an engine's profile may compute it otherwise."""


@torch.no_grad()
def quantize_head(
    head: DraftHead,
    recipe: Recipe,
    *,
    target: LowBitTarget | None = None,
    calibration: Sequence[Tensor] = (),
    input_scales: Mapping[str, Tensor] | None = None,
    profile: Profile = PLAIN,
) -> DraftHead:
    """Quantize the layers that ``recipe`` names, in place; presets name the decoder layer's attention and MLP.

    Patterns see names as engines give them: ``model.layers.0.mlp.down_proj``. ``calibration``: token ids ``[B, T]``
    each, without padding, which ``target`` and the head's training steps run over; only static input scales (NVFP4
    W4A4) need them, unless they are known: a head that was trained in low bit has those that it was trained with, and
    ``input_scales`` names others by the head's own names of layers. ``profile``: who computes. Raises ``ValueError``
    for heads and formats that no engine loads, naming those that work, for rules that engines' fused layers cannot
    follow, and where calibration is needed but missing.
    """
    layers: dict[str, StoredLayer] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    groups = choose_for_head(head, recipe, target=target, calibration=calibration, input_scales=input_scales)
    for group in groups:
        rule, scale = group.rule, group.input_scale
        assert rule.weights is not None
        scheme = scheme_named(rule.weights)
        weights = [head.get_parameter(f"{name}.weight").detach() for name in group.names]
        for name, q in zip(group.names, scaled_weights(weights, rule), strict=True):
            layers[name] = StoredLayer(Formats(rule.weights, rule.activations), q, scale)
            tensors[name] = {leaf: tensor.cpu() for leaf, tensor in to_compressed_tensors(encoded(q, scheme)).items()}
            if scale is not None:
                tensors[name]["input_global_scale"] = scale.cpu().reshape(1).clone()
    _place(head, layers, tensors, profile)
    return head


def low_bit_layers(head: DraftHead) -> dict[str, HeadLinear]:
    """The head's low-bit layers by name; empty for a head in high precision."""
    return {name: module for name, module in head.named_modules() if isinstance(module, HeadLinear)}


def low_bit_tensors(head: DraftHead) -> dict[str, Tensor]:
    """What a checkpoint holds in place of the weights of low-bit layers: codes and scales, on the CPU."""
    layers = low_bit_layers(head).items()
    return {f"{name}.{leaf}": tensor for name, layer in layers for leaf, tensor in layer.stored.items()}


def head_quantization_config(head: DraftHead, rename: Callable[[str], str]) -> dict[str, Any]:
    """``quantization_config`` for the top of config.json. ``rename``: from the head's names to the checkpoint's.

    Raises ``ValueError`` where compressed-tensors is not installed, and for formats that are read but not written.
    """
    quantized: dict[str, Rule] = {}
    for name, layer in low_bit_layers(head).items():
        check_can_be_declared(name, layer.formats)
        quantized[pattern(name)] = Rule("*", layer.formats.weights, layer.formats.activations)
    kept = [name for name, module in head.named_modules() if isinstance(module, nn.Linear)]
    return quantization_config(quantized, sorted({way for name in kept for way in (rename(name), pattern(name))}))


def restore_low_bit(
    head: DraftHead, config: Mapping[str, Any], weights: dict[str, Tensor], *, profile: Profile = PLAIN
) -> None:
    """Put low-bit layers into a fresh ``head`` from the codes in ``weights``, which are under the head's own names.

    Takes the codes and scales out of ``weights`` and leaves what ``load_state_dict`` asks of the new layers. Without
    ``quantization_config`` in ``config`` and codes in ``weights`` nothing changes. Raises ``ValueError`` naming the
    tensor or field: scales that are missing, of another shape, not finite or different within layers that engines fuse,
    codes of layers that are not declared, and configurations that are not known.
    """
    declared = config.get("quantization_config")
    reader = None if declared is None else _reader(head, declared)
    layers: dict[str, StoredLayer] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, module in head.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        before = f"{name}."
        parts = {n.removeprefix(before): t for n, t in weights.items() if n.startswith(before) and n != f"{name}.bias"}
        formats = None if reader is None else reader.formats(name)
        if set(parts) <= {"weight"} and all(t.dtype.itemsize > 1 for t in parts.values()):
            if formats is not None and parts and name != "lm_head":  # to vLLM an output head is no ``Linear``
                raise ValueError(f"config.json declares {name} quantized, but there are no codes and scales of it")
            continue
        if reader is None or formats is None:
            where = "does not declare this layer quantized" if reader else "has no quantization_config"
            raise ValueError(f"tensor {name}.{min(parts)} belongs to a low-bit layer, but config.json {where}")
        if name == "lm_head":
            raise ValueError("the output head lm_head is quantized, which is not supported: leave it in 16 bit")
        layers[name] = reader.read(name, parts, formats, torch.bfloat16)
        check_shape(f"{name}.weight", layers[name].weight.values, module.weight.shape)
        tensors[name] = parts
    check_fused(layers)
    _place(head, layers, tensors, profile)
    for name, parts in tensors.items():
        for leaf in parts:
            del weights[f"{name}.{leaf}"]
        state = head.get_submodule(name).state_dict()
        weights |= {f"{name}.{key}": tensor for key, tensor in state.items() if key != "bias"}


def computed_by(profile: Profile, name: str, formats: Formats) -> Computed:
    """How ``profile`` computes the layer ``name``; ``ValueError`` where that is not known."""
    try:
        return profile.of(formats.weights, formats.activations)
    except ValueError as error:
        raise ValueError(f"layer {name}: {error}") from error


def _place(
    head: DraftHead, layers: Mapping[str, StoredLayer], tensors: Mapping[str, dict[str, Tensor]], profile: Profile
) -> None:
    """Replace linear layers of ``head`` by low-bit ones, as ``profile`` computes them."""
    quantizer = ActivationQuantizer(compiled=False)  # a pass of a head is small
    rules = {name: Rule("*", layer.formats.weights, layer.formats.activations) for name, layer in layers.items()}
    for members in fused_groups(rules):
        formats = layers[members[0]].formats
        computed = computed_by(profile, members[0], formats)
        inputs = scheme_named(computed.activations) if computed.activations else None
        served = head.get_parameter(f"{members[0]}.weight").dtype
        weights = loaded([layers[name].weight for name in members], computed.at_load, served)
        for name, weight in zip(members, weights, strict=True):
            source, scale = head.get_submodule(name), layers[name].input_scale if inputs else None
            assert isinstance(source, nn.Linear)
            layer = HeadLinear(
                source, scheme_named(formats.weights), inputs, quantizer, input_global_scale=scale, quantized=weight
            )
            layer.exact_product = profile.exact_product
            layer.stored, layer.formats = tensors[name], formats
            head.set_submodule(name, layer.to(source.weight.device))


def _reader(head: DraftHead, declared: Any) -> CompressedTensors:
    """The reader of a ``quantization_config``; ``ValueError`` for what is not known here."""
    method = method_of(declared) if isinstance(declared, Mapping) else type(declared).__name__
    if method != "compressed-tensors":
        raise ValueError(
            f"config.json: a quantization_config of {method!r} is not read for heads (there is: compressed-tensors)"
        )
    check_kind(head.kind)
    if declares_fp8_cache(declared):
        raise ValueError("config.json: quantization_config asks for an FP8 KV cache, which heads here do not have")
    return CompressedTensors(declared)
