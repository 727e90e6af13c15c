"""A linear layer as a checkpoint holds it, and the checks that every layout needs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bitdraft.quant.block import Quantized, dequantize
from bitdraft.quant.codes import Encoded, to_quantized
from bitdraft.quant.schemes import Scheme, scheme_named
from bitdraft.quant.smallint import SmallInt

# N output channel, K input channel.


@dataclass(frozen=True)
class Formats:
    """The number formats of a layer, by the names of ``quant/schemes.py``; ``None`` is high precision."""

    weights: str
    activations: str | None
    at_load: str = "decode"
    """What the engine does to the stored weight (``quant/at_load.py``)."""


@dataclass(frozen=True)
class StoredLayer:
    """The stored codes decoded, never quantized anew."""

    formats: Formats
    weight: Quantized  # values [N, K]
    input_scale: Tensor | None = None  # fp32 []: NVFP4's encode scale, static FP8's decode scale


class Reader(Protocol):
    """What a quantization method's file knows: which layers it quantizes, and how to decode one."""

    def formats(self, layer: str) -> Formats | None:
        """The formats that the configuration declares for ``layer``; ``None`` where it leaves it alone."""
        ...

    def read(self, layer: str, parts: Mapping[str, Tensor], formats: Formats, served: torch.dtype) -> StoredLayer:
        """Decode ``parts``, the tensors of ``layer`` by the last part of their names.

        ``served``: the 16-bit type that the engine computes in. Raises ``ValueError`` naming a tensor that is
        missing, of the wrong shape or not finite.
        """
        ...


def need(layer: str, parts: Mapping[str, Tensor], *names: str) -> None:
    """``ValueError`` naming the first tensor that is not there."""
    if absent := [name for name in names if name not in parts]:
        raise ValueError(f"tensor {layer}.{absent[0]} is missing, which the layer's format needs")


def check_shape(name: str, tensor: Tensor, *allowed: Iterable[int]) -> None:
    """``ValueError`` unless the tensor has one of the ``allowed`` shapes."""
    shapes = [list(shape) for shape in allowed]
    if list(tensor.shape) not in shapes:
        wanted = " or ".join(map(str, shapes))
        raise ValueError(f"tensor {name} has shape {list(tensor.shape)}, where {wanted} is needed")


def check_finite(name: str, tensor: Tensor) -> None:
    """``ValueError`` for NaN and infinity."""
    if not torch.isfinite(tensor).all():
        raise ValueError(f"tensor {name} holds NaN or infinity")


def one_number(layer: str, parts: Mapping[str, Tensor], name: str) -> Tensor:
    """A scale of a whole tensor as fp32 ``[]``: one number, finite and positive; ``ValueError`` otherwise."""
    need(layer, parts, name)
    scale = parts[name].float()
    if scale.numel() != 1 or not (torch.isfinite(scale).all() and (scale > 0).all()):
        raise ValueError(f"tensor {layer}.{name} is not one positive number")
    return scale.reshape(())


def scale_shapes(scheme: Scheme, rows: int, columns: int) -> list[list[int]]:
    """The shapes that block scales of a weight ``[rows, columns]`` may have."""
    if scheme.rows is None:
        return [[], [1], [1, 1]]
    if scheme.block is None:
        return [[rows, 1], [rows]]
    return [[-(-rows // scheme.rows), -(-columns // scheme.block)]]


def decoded(
    name: str, encoded: Encoded, formats: Formats, served: torch.dtype, input_scale: Tensor | None = None
) -> StoredLayer:
    """The layer of checked codes and scales; ``ValueError`` naming ``name``, the codes, if they hold NaN.

    Integer groups are multiplied out as W4A16 kernels do, rounded to ``served`` (Marlin: ``bf16(code · scale)``).
    """
    q = to_quantized(encoded)
    check_finite(name, q.values)
    if isinstance(encoded.scheme.element, SmallInt) and q.block is not None:
        assert q.outer is not None, "groups have scales of their own"
        rounded = dequantize(Quantized(q.values, q.outer.to(served).float(), q.scale, q.block))
        q = Quantized(rounded.to(served).float(), None, q.scale)
    return StoredLayer(formats, q, input_scale)


def listed(config: Mapping[str, Any], *keys: str) -> list[str]:
    """The first of ``keys`` that the configuration has, as a list of names."""
    for key in keys:
        if config.get(key):
            return [str(name) for name in config[key]]
    return []


def named_or_inside(layer: str, modules: Iterable[str]) -> bool:
    """Whether ``layer`` is one of ``modules``, ends with one, or lies inside one."""
    return any(f".{module}." in f".{layer}." for module in modules)


def scheme_of(formats: Formats) -> Scheme:
    return scheme_named(formats.weights)
