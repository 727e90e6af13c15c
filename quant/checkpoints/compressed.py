"""Reading compressed-tensors checkpoints: FP8, packed FP4 and packed integers.

The configuration has groups: the layers they target, a format for weights and one for inputs. A target or an
ignored name is a class name (``Linear``), a layer's full name, or ``re:`` and a regular expression that matches from
the start. Facts as read in compressed-tensors 0.20's ``QuantizationConfig`` and vLLM 0.33.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitdraft.quant.checkpoints.stored import (
    Formats,
    StoredLayer,
    check_finite,
    check_shape,
    decoded,
    listed,
    need,
    one_number,
    scale_shapes,
    scheme_of,
)
from bitdraft.quant.codes import e8m0_scales
from bitdraft.quant.pack import from_compressed_tensors
from bitdraft.quant.schemes import Scheme
from bitdraft.quant.smallint import SmallInt


class CompressedTensors:
    """``quant_method: compressed-tensors``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise ValueError("the checkpoint's quantization_config has no config_groups")
        self._ignored = listed(config, "ignore")
        self._groups = [(listed(group, "targets"), _formats(name, group)) for name, group in groups.items()]

    def formats(self, layer: str) -> Formats | None:
        if any(_matches(layer, pattern) for pattern in self._ignored):
            return None
        for by_class in (False, True):  # a layer's own name is worth more than that of its class
            for targets, formats in self._groups:
                if any((t == "Linear") == by_class and (by_class or _matches(layer, t)) for t in targets):
                    return formats
        return None

    def read(self, layer: str, parts: Mapping[str, Tensor], formats: Formats, served: torch.dtype) -> StoredLayer:
        scheme = scheme_of(formats)
        integer = isinstance(scheme.element, SmallInt)
        packed = "weight" if scheme.element.bits == 8 and not integer else "weight_packed"
        need(layer, parts, packed, "weight_scale", *["weight_shape"] * integer)
        rows, columns = _size(layer, parts, packed, scheme)
        scale_name = f"{layer}.weight_scale"
        scale = parts["weight_scale"]
        check_shape(scale_name, scale, *scale_shapes(scheme, rows, columns))
        check_finite(scale_name, e8m0_scales(scale) if scale.dtype == torch.uint8 else scale.float())
        wanted = {packed: parts[packed], "weight_scale": scale}
        if scheme.block is None and scheme.rows is not None:
            wanted["weight_scale"] = scale.reshape(rows, 1)
        if scheme.has_global_scale:
            wanted["weight_global_scale"] = one_number(layer, parts, "weight_global_scale")
        if integer:
            _check_order(layer, parts, columns, scheme)
            wanted |= {name: parts[name] for name in ("weight_shape", "weight_zero_point") if name in parts}
        try:
            encoded = from_compressed_tensors(wanted, scheme)
        except ValueError as error:
            raise ValueError(f"layer {layer}: {error}") from error
        input_scale = None
        if formats.activations == "nvfp4-kernel":
            input_scale = one_number(layer, parts, "input_global_scale")
        elif formats.activations == "fp8-tensor-static":
            input_scale = one_number(layer, parts, "input_scale")
        return decoded(f"{layer}.{packed}", encoded, formats, served, input_scale)


def _size(layer: str, parts: Mapping[str, Tensor], packed: str, scheme: Scheme) -> tuple[int, int]:
    """Rows and columns of the weight; ``ValueError`` if its codes do not have the shape that they should."""
    codes, bits = parts[packed], scheme.element.bits
    if codes.ndim != 2:
        raise ValueError(f"tensor {layer}.{packed} has shape {list(codes.shape)}, where a matrix is needed")
    if isinstance(scheme.element, SmallInt):
        rows, columns = (int(n) for n in parts["weight_shape"].tolist())
        check_shape(f"{layer}.{packed}", codes, [rows, -(-columns * bits // 32)])
        return rows, columns
    wanted = torch.float8_e4m3fn if bits == 8 else torch.uint8
    if codes.dtype != wanted:
        raise ValueError(f"tensor {layer}.{packed} is {codes.dtype}, where {wanted} is needed")
    return codes.shape[0], codes.shape[1] * 8 // bits


def _check_order(layer: str, parts: Mapping[str, Tensor], columns: int, scheme: Scheme) -> None:
    group = scheme.block or columns
    order = parts.get("weight_g_idx")
    if order is not None and not torch.equal(order.long(), torch.arange(columns) // group):
        raise ValueError(f"tensor {layer}.weight_g_idx is not in order: activation order is not supported")


def _matches(layer: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), layer) is not None
    return layer == pattern


def _formats(name: str, group: Mapping[str, Any]) -> Formats:
    """The formats of a group; ``ValueError`` for what has no layout here."""
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not weights:
        raise ValueError(f"quantization_config, group {name}: inputs are quantized but not weights")
    if group.get("output_activations"):
        raise ValueError(f"quantization_config, group {name}: quantized outputs are not supported")
    scheme = _weights(weights)
    activations = _activations(inputs) if inputs else None
    if scheme is None or (inputs and activations is None):
        kind, args = ("weights", weights) if scheme is None else ("input_activations", inputs or {})
        told = ", ".join(f"{key} {args[key]}" for key in ("type", "num_bits", "strategy", "group_size") if key in args)
        raise ValueError(f"quantization_config, group {name}: {kind} of {told} are not supported")
    return Formats(scheme, activations)


def _weights(args: Mapping[str, Any]) -> str | None:
    kind, bits, strategy = args.get("type", "int"), args.get("num_bits"), args.get("strategy")
    group = args.get("group_size")
    if kind == "float" and bits == 8:
        if strategy == "block":
            return "fp8-block128" if _block(args) == [128, 128] else None
        if strategy == "group" and group == 32:
            return "mxfp8-even-ct"
        return {"tensor": "fp8-tensor", "channel": "fp8-channel"}.get(str(strategy))
    if kind == "float" and bits == 4:
        return {("tensor_group", 16): "nvfp4", ("group", 32): "mxfp4-even"}.get((str(strategy), group or 0))
    if kind == "int" and bits in (4, 8):
        asymmetric = "" if args.get("symmetric", True) else "-asym"
        if strategy == "group" and group:
            return f"int{bits}-g{group}{asymmetric}"
        return None if asymmetric or strategy != "channel" else f"int{bits}-channel"
    return None


def _activations(args: Mapping[str, Any]) -> str | None:
    kind, bits, strategy = args.get("type", "int"), args.get("num_bits"), str(args.get("strategy"))
    group, dynamic = args.get("group_size") or 0, args.get("dynamic", False)
    if kind == "float" and bits == 8:
        known = {
            ("token", 0): "fp8-token",
            ("tensor", 0): "fp8-tensor-dynamic" if dynamic else "fp8-tensor-static",
            ("group", 128): "fp8-group128",
            ("group", 32): "mxfp8-rceil",
        }
        return known.get((strategy, 0 if strategy in ("token", "tensor") else group))
    if kind == "float" and bits == 4:
        return {("tensor_group", 16): "nvfp4-kernel", ("group", 32): "mxfp4-rceil"}.get((strategy, group))
    return "int8-token" if (kind, bits, strategy) == ("int", 8, "token") else None


def _block(args: Mapping[str, Any]) -> list[int]:
    """``[128, 128]``, which old checkpoints spell ``"128x128"``."""
    block = args.get("block_structure") or []
    return [int(n) for n in (block.split("x") if isinstance(block, str) else block)]
