"""Reading GPTQ and AWQ checkpoints: 4-bit (GPTQ also 8-bit) integers in groups, inputs in 16 bit.

Facts as read in vLLM 0.33 and AutoAWQ; the layouts are in ``quant/pack.py``.
"""

from collections.abc import Callable, Mapping
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
    named_or_inside,
    need,
    scheme_of,
)
from bitdraft.quant.codes import Encoded
from bitdraft.quant.pack import from_awq, from_gptq, pack_words, unpack_words
from bitdraft.quant.schemes import Scheme


def _group_format(bits: int, group: int, symmetric: bool) -> Formats:
    if group == -1:
        if not symmetric:
            raise ValueError("integers with one scale per channel and zero points are not supported")
        return Formats(f"int{bits}-channel", None)
    return Formats(f"int{bits}-g{group}{'' if symmetric else '-asym'}", None)


def _setting(config: Mapping[str, Any], *keys: str) -> int:
    for key in keys:
        if isinstance(config.get(key), int):
            return int(config[key])
    raise ValueError(f"the checkpoint's quantization_config has no {keys[0]}")


class Gptq:
    """``quant_method: gptq``: ``qweight`` ``[K·b/32, N]``, ``qzeros``, ``scales`` ``[G, N]``, ``g_idx``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._bits = _setting(config, "bits")
        if self._bits not in (4, 8):
            raise ValueError(f"GPTQ with {self._bits} bits is not supported (there are: 4, 8)")
        if config.get("dynamic"):
            raise ValueError("GPTQ with other settings for some layers (dynamic) is not supported")
        self._formats = _group_format(self._bits, _setting(config, "group_size"), bool(config.get("sym", True)))
        self._second = config.get("checkpoint_format") == "gptq_v2"
        self._left_alone = listed(config, "modules_to_not_convert")

    def formats(self, layer: str) -> Formats | None:
        return None if named_or_inside(layer, self._left_alone) else self._formats

    def read(self, layer: str, parts: Mapping[str, Tensor], formats: Formats, served: torch.dtype) -> StoredLayer:
        need(layer, parts, "qweight", "qzeros", "scales")
        scheme, words = scheme_of(formats), 32 // self._bits
        columns, rows = parts["qweight"].shape[0] * words, parts["qweight"].shape[1]
        _check_groups(layer, parts, scheme, rows, columns, words)
        tensors = {name: parts[name] for name in ("qweight", "qzeros", "scales", "g_idx") if name in parts}
        if self._second:  # format 2 stores zero points as they are; format 1 stores them less one
            zeros = unpack_words(parts["qzeros"], self._bits, rows)
            tensors["qzeros"] = pack_words((zeros - 1) % 2**self._bits, self._bits)
        return _decoded(layer, tensors, from_gptq, formats, served)


class Awq:
    """``quant_method: awq``: ``qweight`` ``[K, N/8]``, ``qzeros`` ``[G, N/8]``, ``scales`` ``[G, N]``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        bits = _setting(config, "bits", "w_bit")
        version = str(config.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise ValueError(f"AWQ with {bits} bits, version {version}, is not supported (4 bits, gemm)")
        symmetric = not config.get("zero_point", True)
        self._formats = _group_format(4, _setting(config, "group_size", "q_group_size"), symmetric)
        self._left_alone = listed(config, "modules_to_not_convert")

    def formats(self, layer: str) -> Formats | None:
        return None if named_or_inside(layer, self._left_alone) else self._formats

    def read(self, layer: str, parts: Mapping[str, Tensor], formats: Formats, served: torch.dtype) -> StoredLayer:
        need(layer, parts, "qweight", "qzeros", "scales")
        columns, rows = parts["qweight"].shape[0], parts["qweight"].shape[1] * 8
        _check_groups(layer, parts, scheme_of(formats), rows, columns, 8)
        tensors = {name: parts[name] for name in ("qweight", "qzeros", "scales")}
        return _decoded(layer, tensors, from_awq, formats, served)


def _check_groups(layer: str, parts: Mapping[str, Tensor], scheme: Scheme, rows: int, columns: int, words: int) -> None:
    groups = columns // (scheme.block or columns)
    check_shape(f"{layer}.scales", parts["scales"], [groups, rows])
    check_shape(f"{layer}.qzeros", parts["qzeros"], [groups, rows // words])
    check_finite(f"{layer}.scales", parts["scales"])


def _decoded(
    layer: str,
    tensors: dict[str, Tensor],
    unpack: Callable[[dict[str, Tensor], Scheme], Encoded],
    formats: Formats,
    served: torch.dtype,
) -> StoredLayer:
    try:
        encoded = unpack(tensors, scheme_of(formats))
    except ValueError as error:
        raise ValueError(f"layer {layer}: {error}") from error
    return decoded(f"{layer}.qweight", encoded, formats, served)
