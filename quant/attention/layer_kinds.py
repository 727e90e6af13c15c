"""What each layer of a transformers model remembers, and the masks that its attention takes."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

from bitdraft.quant.attention.kv_cache import LayerMemory, SlotCache

_MEMORIES: dict[str, LayerMemory] = {
    "full_attention": "keys",
    "sliding_attention": "keys",
    "linear_attention": "states",
    "conv": "states",
    "hybrid": "keys and states",
    "dummy": "nothing",
}


@dataclass(frozen=True)
class LayerKinds:
    """The kinds of a model's layers, in transformers' words."""

    memories: tuple[LayerMemory, ...]
    attention: frozenset[str]  # which of full_attention and sliding_attention there is
    others: frozenset[str]  # kinds of layers without keys
    window: int | None  # positions that sliding attention sees, the token itself included

    def masks(self, cache: SlotCache, seen: Tensor, additive: torch.dtype | None) -> Any:
        """What the decoder takes as ``attention_mask`` in the pass that ``cache`` has begun.

        ``seen``: ``[B, 1, T, S]`` bool, as ``begin`` returned it; one mask where there is one kind of attention, one
        per kind otherwise. ``additive``: the dtype for attention that adds its mask to the scores (``eager``).
        """
        of_kind = {"full_attention": seen}
        if self.window is not None:
            of_kind["sliding_attention"] = seen & cache.nearer_than(self.window)
        if additive is not None:
            lowest = torch.finfo(additive).min
            of_kind = {k: torch.zeros_like(m, dtype=additive).masked_fill(~m, lowest) for k, m in of_kind.items()}
        if len(self.attention) < 2:
            return next((of_kind[kind] for kind in self.attention), None)
        return of_kind | dict.fromkeys(self.others)


def layer_kinds(model: Any, name: str) -> LayerKinds:
    """How the layers of ``model`` remember; ``ValueError`` naming the kind of layer for which there is no store.

    A module with a ``state_store`` decides for its layer (``quant/recurrent/state_store.py``).
    """
    config, decoder = model.config, model.get_decoder()
    if "cache" not in inspect.signature(decoder.forward).parameters:
        raise ValueError(
            f"{name}: {type(decoder).__name__} takes no cache in the way of transformers 5: use another target"
        )
    kinds, settings = get_layer_types_and_kwargs(config)
    memories: list[LayerMemory | None] = [_MEMORIES.get(kind) for kind in kinds]
    for module in model.modules():
        if hasattr(module, "state_store"):
            memories[module.layer_idx] = module.state_store
    for kind, memory in zip(kinds, memories, strict=True):
        if memory is None:
            layer = (
                DYNAMIC_LAYER_TYPE_MAPPING[kind].__name__ if kind in DYNAMIC_LAYER_TYPE_MAPPING else "no known layer"
            )
            raise ValueError(
                f"{name} has layers of kind {kind} (in transformers' cache {layer}), for which decoding has no store: "
                "give their modules a state_store with the methods of StateStore (quant/recurrent/state_store.py), "
                "or use another target"
            )
    windows = {s["sliding_window"] for k, s in zip(kinds, settings, strict=True) if k == "sliding_attention"}
    if len(windows) > 1:
        raise ValueError(f"{name} has sliding windows of several widths, {sorted(windows)}, which decoding cannot mask")
    keyed = frozenset(kinds) & {"full_attention", "sliding_attention"}
    if "hybrid" in kinds:
        keyed |= {"full_attention"}
    return LayerKinds(
        tuple(m for m in memories if m is not None), keyed, frozenset(kinds) - keyed, next(iter(windows), None)
    )
