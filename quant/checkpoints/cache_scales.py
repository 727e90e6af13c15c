"""What a quantized checkpoint says about its KV cache: whether it is FP8, and the scales.

compressed-tensors has ``kv_cache_scheme`` and, per layer, ``self_attn.k_scale`` and ``v_scale`` (one number, or one per
KV head for the strategy ``attn_head``); ModelOpt ``kv_cache_quant_algo`` or ``kv_cache_scheme``, and
``k_proj.k_scale``, ``v_proj.v_scale``. All are decode scales. Layers without a scale get 1, as in vLLM 0.33. Scales of
queries and probabilities belong to attention in FP8, which a checkpoint does not declare.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bitdraft.quant.attention.kv_rounding import KvRounding
from bitdraft.quant.attention.rules import KvRule

CACHE_TENSORS = {"k_scale", "v_scale", "q_scale", "prob_scale", "k_zero_point", "v_zero_point"}
"""The last parts of names of tensors that are about the cache."""
_SCALE = re.compile(r"(?:.*\.)?layers\.(\d+)\..*\.([kv])_scale")


def declares_fp8_cache(declared: Mapping[str, Any]) -> bool:
    """Whether the quantization's configuration asks for an FP8 cache with static scales.

    Raises ``ValueError`` for another low-bit cache, which would be something else than the 16 bit simulated without it.
    """
    config = declared.get("quantization", declared)
    algorithm, scheme = config.get("kv_cache_quant_algo"), config.get("kv_cache_scheme")
    if algorithm not in (None, "FP8"):
        raise ValueError(f"the checkpoint's kv_cache_quant_algo {algorithm!r} is not supported (there is: FP8)")
    if scheme:
        told = {key: scheme.get(key, usual) for key, usual in (("num_bits", 8), ("type", "float"), ("dynamic", False))}
        if told != {"num_bits": 8, "type": "float", "dynamic": False} or not scheme.get("symmetric", True):
            raise ValueError(
                f"the checkpoint's kv_cache_scheme of {told} is not supported (there is: static, symmetric FP8)"
            )
    return bool(algorithm or scheme)


def stored_rounding(model: nn.Module, tensors: Mapping[str, Tensor]) -> KvRounding:
    """The rounding of an FP8 cache with the scales in ``tensors`` (by name), on the model's device.

    Raises ``ValueError`` naming a tensor whose shape is not that of one scale or one per head, a layer with two of
    them, and for zero points.
    """
    if zero := next((name for name in tensors if name.endswith("_zero_point")), None):
        raise ValueError(f"tensor {zero}: a cache with zero points is not supported")
    config: Any = model.config
    layers, heads = int(config.num_hidden_layers), int(config.num_key_value_heads)
    found: dict[str, dict[int, Tensor]] = {"k": {}, "v": {}}
    for name, tensor in tensors.items():
        if match := _SCALE.fullmatch(name):
            number, kind = int(match[1]), match[2]
            if tensor.numel() not in (1, heads):
                raise ValueError(
                    f"tensor {name} has shape {list(tensor.shape)}: neither one scale nor {heads}, one per head"
                )
            if number in found[kind] or number >= layers:
                raise ValueError(
                    f"tensor {name}: layer {number} has another such scale, or is none of the model's {layers}"
                )
            found[kind][number] = tensor.float().reshape(-1)
    per_head = any(len(scale) > 1 for of_kind in found.values() for scale in of_kind.values())
    width = heads if per_head else 1
    keys, values = (
        torch.stack([of_kind.get(number, torch.ones(1)).expand(width) for number in range(layers)])
        for of_kind in found.values()
    )
    without = 2 * layers - sum(map(len, found.values()))
    rule = KvRule(scales="stored", per="head" if per_head else "tensor")
    return KvRounding(rule, keys, values, defaults=without).to(next(model.parameters()).device)
