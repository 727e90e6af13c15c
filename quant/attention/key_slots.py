"""One layer's keys and values in the slots of a cache, alone or beside recurrent states.

Where they lie and what a pass sees of them is the business of the whole model's cache (``kv_cache.py``).
"""

from typing import Protocol

import torch
from torch import Tensor

from bitdraft.quant.recurrent.node_states import NodeStates
from bitdraft.quant.recurrent.state_store import Nodes

# B sequence (row of the batch), T new token, L step of a path.


class ReadBack(Protocol):
    """What a cache makes of the keys and values that are written to it (``quant/attention/kv_rounding.py``)."""

    def read_back(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]: ...


class Owner(Protocol):
    """The whole model's cache, in which a layer's keys have their place."""

    slots: int  # positions per row
    rows: int  # sequences in use
    used: int  # slots that the running pass sees
    written: Tensor | None  # [B, T] slots that the running pass writes
    rounding: ReadBack | None


class KeySlots:
    """A ``StateStore`` of one attention layer's keys and values, ``[rows, heads, slots, head_dim]`` each.

    Rows come and go in place: memory is asked for once, for the most rows that there have been.
    """

    def __init__(self, owner: Owner, number: int) -> None:
        self.owner, self.number = owner, number
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.nodes: Nodes | None = None  # of the running pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new states to the slots of the running pass; return all slots in use."""
        batch = len(key_states)
        if self.keys is None or self.values is None:
            self.keys, self.values = (
                x.new_zeros(batch, x.shape[1], self.owner.slots, x.shape[-1]) for x in (key_states, value_states)
            )
        if self.owner.rounding is not None:
            key_states, value_states = self.owner.rounding.read_back(self.number, key_states, value_states)
        written_BT, used = self.owner.written, self.owner.used
        assert written_BT is not None
        rows = torch.arange(batch, device=written_BT.device)[:, None]
        # Advanced indices around a slice put [B, T] first: [B, T, heads, head_dim].
        self.keys[rows, :, written_BT] = key_states.transpose(1, 2)
        self.values[rows, :, written_BT] = value_states.transpose(1, 2)
        return self.keys[:batch, :, :used], self.values[:batch, :, :used]

    def begin(self, nodes: Nodes) -> None:
        """Start a pass. Slots behind a row's tokens are never seen and overwritten: there is nothing to save."""
        self.nodes = nodes

    def commit(self, path: Tensor, kept: Tensor) -> None:
        """Copy the path's keys to the slots of their positions. Those behind ``kept`` are never seen."""
        del kept
        assert self.nodes is not None
        if self.nodes.is_chain:  # they lie there
            return
        written = self.owner.written
        assert written is not None and self.keys is not None and self.values is not None
        rows = torch.arange(len(path), device=path.device)[:, None]
        source, target = written.gather(1, path), written[:, : path.shape[1]]  # [B, L]
        for states in (self.keys, self.values):
            states[rows, :, target] = states[rows, :, source]

    def keep_rows(self, rows: Tensor) -> None:
        """Rows that keep their place are not copied."""
        used = self.owner.used
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
        for states in (self.keys, self.values):
            if states is not None:
                states[moved, :, :used] = states[rows[moved], :, :used]

    def join(self, other: "KeySlots") -> None:
        """Write the rows of ``other`` behind those here."""
        first, rows, used = self.owner.rows, other.owner.rows, other.owner.used
        self.keys, self.values = (self._with_room_for(x, first + rows) for x in (self.keys, self.values))
        assert other.keys is not None and other.values is not None
        self.keys[first : first + rows, :, :used] = other.keys[:rows, :, :used]
        self.values[first : first + rows, :, :used] = other.values[:rows, :, :used]
        other.keys = other.values = other.keys.new_empty(0)

    def _with_room_for(self, x: Tensor | None, rows: int) -> Tensor:
        """``[B, heads, S, width]`` as it is, or what is in use of it in memory with room for ``rows`` rows."""
        assert x is not None
        if x.shape[0] >= rows and x.shape[2] >= self.owner.slots:
            return x
        here, used = self.owner.rows, self.owner.used
        larger = x.new_zeros(max(rows, x.shape[0]), x.shape[1], max(self.owner.slots, x.shape[2]), x.shape[3])
        larger[:here, :, :used] = x[:here, :, :used]
        return larger


class KeysAndStates(NodeStates):
    """The store of a layer in which attention and a recurrence stand side by side."""

    def __init__(self, keys: KeySlots) -> None:
        super().__init__()
        self.keys = keys

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self.keys.update(key_states, value_states)

    def begin(self, nodes: Nodes) -> None:
        super().begin(nodes)
        self.keys.begin(nodes)

    def commit(self, path: Tensor, kept: Tensor) -> None:
        super().commit(path, kept)
        self.keys.commit(path, kept)

    def keep_rows(self, rows: Tensor) -> None:
        super().keep_rows(rows)
        self.keys.keep_rows(rows)

    def join(self, other: "KeysAndStates") -> None:
        super().join(other)
        self.keys.join(other.keys)


class Nothing:
    """The store of a layer without memory: experts alone, or keys that are those of another layer."""

    def begin(self, nodes: Nodes) -> None: ...
    def commit(self, path: Tensor, kept: Tensor) -> None: ...
    def keep_rows(self, rows: Tensor) -> None: ...
    def join(self, other: "Nothing") -> None: ...
