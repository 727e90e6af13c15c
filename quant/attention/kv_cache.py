"""A KV cache in which every row of a batch has its own length.

Rows of a batch accept different numbers of drafted tokens, so their sequences grow apart. Here the slot of
a key is its position: row ``b`` with ``n`` tokens fills slots ``0 … n-1``, and a pass over ``T`` new tokens
writes slots ``n … n+T-1``. Tokens that are rejected afterwards need no removal: the next pass starts at the
row's new length and overwrites them, and the mask never lets a query see a slot beyond its own position.

A low-bit cache rounds keys and values when they are written. Attention reads them back in every pass, also the one that
brings them: a pass without a cache goes through a ``PassCache``, which keeps nothing and rounds alike.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

WORTH_DROPPING = 0.75
"""Share of rows still going at which finished ones are dropped: dropping copies the whole cache of those that stay."""


class ReadBack(Protocol):
    """What a cache makes of the keys and values that are written to it (``quant/attention/kv_rounding.py``)."""

    def read_back(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]: ...


class _SlotLayer(CacheLayerMixin):
    """One attention layer's keys and values, ``[rows, heads, slots, head_dim]`` each.

    Rows come and go in place: memory is asked for once, for the most rows that there have been.
    """

    is_sliding = False

    def __init__(self, owner: "SlotCache", number: int) -> None:
        super().__init__()
        self.owner, self.number = owner, number

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _, width = key_states.shape
        self.keys = key_states.new_zeros(batch, heads, self.owner.slots, width)
        self.values = value_states.new_zeros(batch, heads, self.owner.slots, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new states to the slots of the running pass; return all slots in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.owner.rounding is not None:
            key_states, value_states = self.owner.rounding.read_back(self.number, key_states, value_states)
        positions_BT, used = self.owner.positions, self.owner.used
        assert positions_BT is not None and self.keys is not None and self.values is not None
        batch = len(positions_BT)
        rows = torch.arange(batch, device=positions_BT.device)[:, None]
        # Advanced indices around a slice put [B, T] first: [B, T, heads, head_dim].
        self.keys[rows, :, positions_BT] = key_states.transpose(1, 2)
        self.values[rows, :, positions_BT] = value_states.transpose(1, 2)
        return self.keys[:batch, :, :used], self.values[:batch, :, :used]

    def keep_rows(self, rows: Tensor, used: int) -> None:
        for kept in (self.keys, self.values):
            assert kept is not None
            kept[: len(rows), :, :used] = kept[rows, :, :used]

    def join(self, first: int, other: "_SlotLayer", rows: int, used: int) -> None:
        """Write the ``rows`` rows of ``other`` behind the ``first`` rows here, ``used`` slots of each."""
        self.keys = _room_for(self.keys, first + rows, self.owner.slots)
        self.values = _room_for(self.values, first + rows, self.owner.slots)
        assert other.keys is not None and other.values is not None
        self.keys[first : first + rows, :, :used] = other.keys[:rows, :, :used]
        self.values[first : first + rows, :, :used] = other.values[:rows, :, :used]
        other.keys = other.values = other.keys.new_empty(0)

    def get_seq_length(self) -> int:
        return self.owner.used

    def get_max_length(self) -> int:
        return self.owner.slots

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        del query_length
        return self.owner.used, 0


class SlotCache(Cache):
    """Slot-per-position cache of a whole model. Open each pass with ``begin``; it returns the mask."""

    def __init__(self, layers: int, slots: int, rounding: ReadBack | None = None) -> None:
        """``layers`` attention layers, ``slots`` positions per row (prompt, answer and drafts together).

        ``rounding``: what keys and values become when they are written; ``None`` keeps them as they are.
        """
        self.slots, self.rounding = slots, rounding
        self.rows = 0  # sequences in use; layers may hold room for more
        self.used = 0
        self.positions: Tensor | None = None  # [B, T] slots that the running pass writes
        super().__init__(layers=[_SlotLayer(self, number) for number in range(layers)])

    def begin(self, lengths_B: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Start a pass of ``tokens`` new tokens behind the ``lengths_B`` tokens that each row keeps.

        Returns positions ``[B, T]`` and the mask ``[B, 1, T, S]`` (True: attend) over the ``S`` used slots.
        """
        steps = torch.arange(tokens, device=lengths_B.device)
        self.positions = lengths_B[:, None] + steps  # [B, T]
        self.rows, self.used = len(lengths_B), int(self.positions.max()) + 1
        if self.used > self.slots:
            raise ValueError(f"the cache has {self.slots} slots, the pass needs {self.used}")
        slot = torch.arange(self.used, device=lengths_B.device)
        return self.positions, (slot <= self.positions[..., None])[:, None]

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all rows but these (ascending indices ``[B']``): finished sequences leave the batch."""
        self.rows = len(rows)
        for layer in self.layers:
            if layer.is_initialized:
                layer.keep_rows(rows, self.used)

    def join(self, other: "SlotCache") -> None:
        """Append the rows of ``other``, which is used up; the larger number of slots holds for all."""
        self.slots = max(self.slots, other.slots)
        for layer, more in zip(self.layers, other.layers, strict=True):
            layer.join(self.rows, more, other.rows, other.used)
        self.rows += other.rows
        self.used = max(self.used, other.used)


class _PassLayer(CacheLayerMixin):
    """Hands on what a cache would give back, and keeps nothing."""

    is_sliding = False  # windows are the mask's business, over the tokens of one pass

    def __init__(self, rounding: ReadBack, number: int) -> None:
        super().__init__()
        self.rounding, self.number = rounding, number
        self.updates = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to make room for."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """The new states as attention reads them back."""
        self.updates += 1
        return self.rounding.read_back(self.number, key_states, value_states)

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1  # transformers' word for no limit

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class PassCache(Cache):
    """For one pass without earlier tokens: attention reads keys and values as a cache would give them back."""

    def __init__(self, layers: int, rounding: ReadBack) -> None:
        self.passed = [_PassLayer(rounding, number) for number in range(layers)]
        super().__init__(layers=self.passed)


class ThroughTheCache:
    """A forward pre-hook of a decoder: no pass gets around the rounding of keys and values."""

    def __init__(self, layers: int, rounding: ReadBack) -> None:
        self.layers, self.rounding = layers, rounding

    def __call__(self, module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Give a pass without a cache a ``PassCache``; ``ValueError`` for a cache that would not round."""
        cache = options.get("cache")
        if cache is None:
            cache = options.get("past_key_values")  # its name until transformers 5.40
        if cache is None:
            return args, {**options, "cache": PassCache(self.layers, self.rounding)}
        if not isinstance(cache, SlotCache) or cache.rounding is not self.rounding:
            raise ValueError(
                f"this target's keys and values are cached in low bit, which a {type(cache).__name__} from elsewhere "
                "would not do: decode with the cache of LowBitTarget.new_cache"
            )
        return args, options


def _room_for(x: Tensor | None, rows: int, slots: int) -> Tensor:
    """``[B, heads, S, width]`` as it is, or copied into memory with at least ``rows`` rows and ``slots`` slots."""
    assert x is not None
    if x.shape[0] >= rows and x.shape[2] >= slots:
        return x
    larger = x.new_zeros(max(rows, x.shape[0]), x.shape[1], max(slots, x.shape[2]), x.shape[3])
    larger[: x.shape[0], :, : x.shape[2]] = x
    return larger
