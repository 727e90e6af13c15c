"""A KV cache in which every row of a batch has its own length.

Rows of a batch accept different numbers of drafted tokens, so their sequences grow apart. Here the slot of
a key is its position: row ``b`` with ``n`` tokens fills slots ``0 … n-1``, and a pass over ``T`` new tokens
writes slots ``n … n+T-1``. Tokens that are rejected afterwards need no removal: the next pass starts at the
row's new length and overwrites them, and the mask never lets a query see a slot beyond its own position.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

WORTH_DROPPING = 0.75
"""Share of rows still going at which finished ones are dropped: dropping copies the whole cache of those that stay."""


class _SlotLayer(CacheLayerMixin):
    """One attention layer's keys and values, ``[B, heads, slots, head_dim]`` each."""

    is_sliding = False

    def __init__(self, owner: "SlotCache") -> None:
        super().__init__()
        self.owner = owner

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
        positions_BT, used = self.owner.positions, self.owner.used
        assert positions_BT is not None and self.keys is not None and self.values is not None
        rows = torch.arange(len(positions_BT), device=positions_BT.device)[:, None]
        # Advanced indices around a slice put [B, T] first: [B, T, heads, head_dim].
        self.keys[rows, :, positions_BT] = key_states.transpose(1, 2)
        self.values[rows, :, positions_BT] = value_states.transpose(1, 2)
        return self.keys[:, :, :used], self.values[:, :, :used]

    def get_seq_length(self) -> int:
        return self.owner.used

    def get_max_length(self) -> int:
        return self.owner.slots

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        del query_length
        return self.owner.used, 0


class SlotCache(Cache):
    """Slot-per-position cache of a whole model. Open each pass with ``begin``; it returns the mask."""

    def __init__(self, layers: int, slots: int) -> None:
        """``layers`` attention layers, ``slots`` positions per row (prompt, answer and drafts together)."""
        self.slots = slots
        self.used = 0
        self.positions: Tensor | None = None  # [B, T] slots that the running pass writes
        super().__init__(layers=[_SlotLayer(self) for _ in range(layers)])

    def begin(self, lengths_B: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Start a pass of ``tokens`` new tokens behind the ``lengths_B`` tokens that each row keeps.

        Returns positions ``[B, T]`` and the mask ``[B, 1, T, S]`` (True: attend) over the ``S`` used slots.
        """
        steps = torch.arange(tokens, device=lengths_B.device)
        self.positions = lengths_B[:, None] + steps  # [B, T]
        self.used = int(self.positions.max()) + 1
        if self.used > self.slots:
            raise ValueError(f"the cache has {self.slots} slots, the pass needs {self.used}")
        slot = torch.arange(self.used, device=lengths_B.device)
        return self.positions, (slot <= self.positions[..., None])[:, None]

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all rows but these (indices ``[B']``): finished sequences leave the batch."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]

    def join(self, other: "SlotCache") -> None:
        """Append the rows of ``other``, which is used up; the larger number of slots holds for all."""
        self.slots = max(self.slots, other.slots)
        self.used = max(self.used, other.used)
        for layer, more in zip(self.layers, other.layers, strict=True):
            layer.keys = torch.cat([_with_slots(layer.keys, self.slots), _with_slots(more.keys, self.slots)])
            layer.values = torch.cat([_with_slots(layer.values, self.slots), _with_slots(more.values, self.slots)])
            more.keys = more.values = None


def _with_slots(x: Tensor | None, slots: int) -> Tensor:
    """``[B, heads, S, width]`` with empty slots behind the last one, up to ``slots``."""
    assert x is not None
    return torch.nn.functional.pad(x, (0, 0, 0, slots - x.shape[2]))
