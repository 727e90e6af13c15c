"""Recurrent and convolution states of one layer, with a state of its own for every node of a tree.

This works for any layer that keeps its states in the way of transformers (``Cache.get_recurrent_state`` and its kin),
whatever it computes from them: a node's state starts as a copy of its parent's, the layer takes one step, and what
comes out is kept until ``commit``. The price is memory, ``nodes × state`` between the pass and its commit.

Layers change states in place (``causal_conv1d_update``, ``selective_state_update``), so what they are handed is always
a copy of their own: neither siblings nor the snapshot may see the change.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitdraft.quant.recurrent.state_store import Level, Nodes

# B sequence, N node, R node of one level, C channel, K convolution state (last positions).

Key = tuple[Literal["conv", "recurrent"], int]
"""Which of a layer's states: its sort, and its number where there are several of the sort."""


class NodeStates:
    """A ``StateStore`` for layers that take one step at a time."""

    def __init__(self) -> None:
        self.kept: dict[Key, Tensor] = {}  # [B, …] behind the tokens that each row keeps
        self.of_nodes: dict[Key, Tensor] = {}  # [B, N, …] behind each node of the open pass
        self.running: dict[Key, Tensor] = {}  # [R, …] of the level that is being computed
        self.nodes: Nodes | None = None  # of the open pass; None between passes, and while prompts are read
        self.level: Level | None = None

    def begin(self, nodes: Nodes) -> None:
        """Start a pass; the one before must be committed, or the states of its nodes would be lost."""
        assert self.nodes is None, "the pass before was not committed"
        assert not (nodes.stays and self.kept), "prompts go into an empty cache"
        self.nodes = None if nodes.stays else nodes

    def commit(self, path: Tensor, kept: Tensor) -> None:
        """Keep each row's state behind ``kept`` ``[B]`` nodes of ``path`` ``[B, L]``: before the pass for 0."""
        last = path.gather(1, (kept - 1).clamp(min=0)[:, None])[:, 0]  # [B]
        rows = torch.arange(len(path), device=path.device)
        for key, of_node in self.of_nodes.items():
            reached = of_node[rows, last]  # [B, …]
            before = self.kept.get(key)
            before = torch.zeros_like(reached) if before is None else before
            self.kept[key] = torch.where((kept > 0).view(-1, *[1] * (reached.dim() - 1)), reached, before)
        self.of_nodes = {}
        self.nodes = None

    def keep_rows(self, rows: Tensor) -> None:
        """Keep these rows ``[B']`` alone, in this order."""
        assert self.nodes is None, "the pass was not committed"
        self.kept = {key: state[rows] for key, state in self.kept.items()}

    def join(self, other: Self) -> None:
        """Append the rows of ``other``, which is used up."""
        assert self.nodes is None and other.nodes is None, "the pass was not committed"
        self.kept = {key: torch.cat([state, other.kept[key]]) for key, state in self.kept.items()}
        other.kept = {}

    @contextmanager
    def step(self, level: Level) -> Iterator[None]:
        """While this is open, the layer runs over the nodes of ``level``, one token each."""
        assert self.nodes is not None
        self.level, self.running = level, {}
        yield
        for key, state in self.running.items():
            if key not in self.of_nodes:
                self.of_nodes[key] = state.new_empty(*self.nodes.parents.shape, *state.shape[1:])
            self.of_nodes[key][level.rows, level.nodes] = state
        self.level, self.running = None, {}

    def read(self, key: Key) -> Tensor | None:
        """What the layer may read and change: ``[R, …]``, forked from each node's parent; ``None`` before any token."""
        if self.nodes is None:
            return self.kept.get(key)
        assert self.level is not None, "a module reads states without running level by level"
        if key not in self.running:
            level, past = self.level, self.kept.get(key)
            if level.parents is not None:
                self.running[key] = self.of_nodes[key][level.rows, level.parents]
            elif past is not None:
                self.running[key] = past[level.rows]
        return self.running.get(key)

    def extend_conv(self, new: Tensor, number: int, width: int | None) -> Tensor:
        """Append ``new`` ``[R, C, T]`` to a convolution's state and return both together, ``[R, C, K + T]``.

        The last ``width`` positions become the state, by default as many as ``new`` has when there is no state yet,
        which is padded with zeros on the left.
        """
        past = self.read(("conv", number))
        if past is None:
            width = new.shape[-1] if width is None else width
            both = pad(new, (max(width - new.shape[-1], 0), 0))
        else:
            width, both = past.shape[-1], torch.cat([past, new], dim=-1)
        self._write(("conv", number), both[..., -width:].clone())  # a view would keep all of ``both`` alive
        return both

    def replace_recurrent(self, new: Tensor, number: int) -> Tensor:
        """``new`` ``[R, …]`` becomes a recurrent state, in the dtype of the first."""
        past = self.read(("recurrent", number))
        new = new if past is None else new.to(past.dtype)
        self._write(("recurrent", number), new)
        return new

    def _write(self, key: Key, state: Tensor) -> None:
        if self.nodes is None:
            self.kept[key] = state
        else:
            self.running[key] = state
