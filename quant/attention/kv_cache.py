"""A KV cache in which every row of a batch has its own length, and what else a model's layers remember.

Rows of a batch accept different numbers of drafted tokens, so their sequences grow apart. Here the slot of
a key is its position: row ``b`` with ``n`` tokens fills slots ``0 … n-1``, and a pass over ``T`` new tokens
writes slots ``n … n+T-1``. Tokens that are rejected afterwards need no removal: the next pass starts at the
row's new length and overwrites them, and the mask never lets a query see a slot beyond its own position.

The new tokens of a pass may be the nodes of a tree. Node ``i`` then fills slot ``n + i`` while its position is ``n +
depth``, and sees the past, its ancestors and itself. ``commit`` moves the accepted path's keys to the slots of their
positions.

Layers with a recurrent or convolution state have a store of another kind beside the keys or in their place; all stores
follow one interface (``quant/recurrent/state_store.py``).

A low-bit cache rounds keys and values when they are written. Attention reads them back in every pass, also the one that
brings them: a pass without a cache goes through a ``PassCache``, which keeps nothing and rounds alike.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from bitdraft.quant.attention.key_slots import KeysAndStates, KeySlots, Nothing, ReadBack
from bitdraft.quant.recurrent.node_states import NodeStates
from bitdraft.quant.recurrent.state_store import Nodes, StateStore

WORTH_DROPPING = 0.75
"""Share of rows still going at which finished ones are dropped: dropping copies the whole cache of those that stay."""

LayerMemory = Literal["keys", "states", "keys and states", "nothing"] | Callable[[], StateStore]
"""What one layer of a model remembers: keys and values, recurrent states, both, nothing, or a store of its own kind."""
WITH_STATES: tuple[LayerMemory, ...] = ("states", "keys and states")


class SlotCache(Cache):
    """Everything that a model remembers between passes, one ``StateStore`` per layer.

    Open each pass with ``begin``; it returns the mask. Where a layer has more than keys, ``commit`` must follow.
    """

    def __init__(self, layers: int | Sequence[LayerMemory], slots: int, rounding: ReadBack | None = None) -> None:
        """``slots`` positions per row: prompt, answer and drafts together.

        ``layers``: what each layer remembers; a number stands for so many attention layers. ``rounding``: what keys and
        values become when they are written; ``None`` keeps them as they are.
        """
        self.slots, self.rounding = slots, rounding
        self.rows = 0  # sequences in use; layers may hold room for more
        self.used = 0
        self.written: Tensor | None = None  # [B, T] slots that the running pass writes
        self.nodes: Nodes | None = None  # of the running pass
        self.lengths: Tensor | None = None  # [B] tokens that each row keeps, where states must know
        memories: Sequence[LayerMemory] = ["keys"] * layers if isinstance(layers, int) else layers
        self.has_states = any(m not in ("keys", "nothing") for m in memories)
        super().__init__(layers=[self._store(memory, number) for number, memory in enumerate(memories)])

    def _store(self, memory: LayerMemory, number: int) -> Any:
        match memory:
            case "keys":
                return KeySlots(self, number)
            case "states":
                return NodeStates()
            case "keys and states":
                return KeysAndStates(KeySlots(self, number))
            case "nothing":
                return Nothing()
            case _:
                return memory()

    def begin(
        self, lengths_B: Tensor, tokens: int, parents_BT: Tensor | None = None, *, stays: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Start a pass of ``tokens`` new tokens behind the ``lengths_B`` tokens that each row keeps.

        ``parents_BT``: each token's parent in a tree, -1 at its root; by default every token follows the one before.
        ``stays``: the tokens are prompts, all of which are kept; no ``commit`` follows.
        Returns positions ``[B, T]`` and the mask ``[B, 1, T, S]`` (True: attend) over the ``S`` used slots.
        """
        nodes = Nodes.chain(lengths_B, tokens, stays=stays) if parents_BT is None else Nodes(lengths_B, parents_BT)
        if self.has_states:
            in_order = self.lengths is None or torch.equal(self.lengths, lengths_B)
            assert in_order, "recurrent states stand behind other tokens than the pass: was the last one committed?"
        if nodes.is_chain:
            self._open(lengths_B, tokens)
            slot = torch.arange(self.used, device=lengths_B.device)
            mask = (slot <= nodes.positions[..., None])[:, None]
        else:
            mask = self.begin_level(lengths_B, nodes.lineage)
        for layer in self.layers:
            layer.begin(nodes)
        self.nodes = nodes
        if self.has_states:
            self.lengths = lengths_B + tokens if stays else lengths_B
        return nodes.positions, mask

    def begin_level(self, lengths_B: Tensor, lineage_BTM: Tensor) -> Tensor:
        """Start a pass of ``T`` more nodes of a tree whose first ``M - T`` nodes earlier passes have brought.

        ``lineage_BTM``: bool, which of the tree's ``M`` nodes each new one sees, itself included; all of them see the
        ``lengths_B`` tokens before the tree. Returns the mask ``[B, 1, T, S]``. For layers with keys alone.
        """
        tokens, nodes = lineage_BTM.shape[1:]
        self._open(lengths_B + (nodes - tokens), tokens)
        slot = torch.arange(self.used, device=lengths_B.device)
        mask = (slot < lengths_B[:, None])[:, None].repeat(1, tokens, 1)  # [B, T, S]
        of_node = lengths_B[:, None] + torch.arange(nodes, device=lengths_B.device)  # [B, M]
        return mask.scatter_(2, of_node[:, None].expand_as(lineage_BTM), lineage_BTM)[:, None]

    def nearer_than(self, window: int) -> Tensor:
        """``[B, 1, T, S]``: slots fewer than ``window`` positions before each token of the pass that was begun."""
        assert self.nodes is not None and self.written is not None
        positions = self.nodes.positions  # [B, T]
        of_slot = torch.arange(self.used, device=positions.device).repeat(len(positions), 1)  # [B, S]
        of_slot.scatter_(1, self.written, positions)
        return (positions[:, :, None] - of_slot[:, None] < window)[:, None]

    def _open(self, first_B: Tensor, tokens: int) -> None:
        """The running pass writes ``tokens`` slots of each row from ``first_B`` on."""
        self.written = first_B[:, None] + torch.arange(tokens, device=first_B.device)  # [B, T]
        self.rows, self.used = len(first_B), int(self.written.max()) + 1
        if self.used > self.slots:
            raise ValueError(f"the cache has {self.slots} slots, the pass needs {self.used}")

    def commit(self, path_BL: Tensor, kept_B: Tensor) -> None:
        """Keep the first ``kept_B`` nodes of each row's ``path_BL`` and forget the rest of the pass's tokens.

        ``path_BL``: node indices from the root on, int64; what stands behind the kept ones is any node.
        """
        assert self.nodes is not None, "there is no open pass"
        if self.has_states:
            self.lengths = self.nodes.lengths + kept_B
        for layer in self.layers:
            layer.commit(path_BL, kept_B)

    def keep_rows(self, rows: Tensor) -> None:
        """Keep these rows (indices ``[B']``) alone, in this order: finished sequences leave the batch."""
        self.rows = len(rows)
        if self.lengths is not None:
            self.lengths = self.lengths[rows]
        for layer in self.layers:
            layer.keep_rows(rows)

    def join(self, other: "SlotCache") -> None:
        """Append the rows of ``other``, which is used up; the larger number of slots holds for all."""
        self.slots = max(self.slots, other.slots)
        for layer, more in zip(self.layers, other.layers, strict=True):
            layer.join(more)
        if self.lengths is not None and other.lengths is not None:
            self.lengths = torch.cat([self.lengths, other.lengths])
        self.rows += other.rows
        self.used = max(self.used, other.used)

    # How transformers' layers reach their states.

    def states_of(self, layer: int) -> NodeStates:
        store = self.layers[layer]
        assert isinstance(store, NodeStates), f"layer {layer} has states, which its kind does not say"
        return store

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states_of(layer_idx).read(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states_of(layer_idx).read(("recurrent", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        return self.states_of(layer_idx).extend_conv(conv_states, state_idx, conv_kernel_size)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.states_of(layer_idx).replace_recurrent(recurrent_states, state_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        del layer_idx
        return self.used

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        del query_length, layer_idx
        return self.used, 0


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
