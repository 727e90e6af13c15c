"""What one layer remembers of a batch's sequences: the interface between the layers and the whole model's cache.

The whole model's cache (``SlotCache``) opens a pass, tells every layer's store how the pass's tokens hang together,
runs the model and then says which tokens stay::

    store.begin(nodes)            # what the rows hold now is the snapshot
    …                             # the layer runs; the states of a node fork from those of its parent
    store.commit(path, kept)      # the states behind the accepted path; 0 kept tokens: the snapshot

A pass over prompts (``nodes.stays``) keeps all of its tokens, so no node needs a state of its own, and no commit
follows. Rows come and go between passes: ``keep_rows`` and ``join``.

A module that computes with a store of its own kind says so: its attribute ``state_store`` is called without arguments
for every new cache and returns the store, which the module finds again as ``cache.layers[layer_idx]`` when it runs
(``constant_decay.py``). Other layers get theirs by the kind that the model's configuration gives.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

import torch
from torch import Tensor

# B sequence (row of the batch), N node (new token of the pass), L step of a path.


@dataclass(frozen=True)
class Nodes:
    """How the new tokens of a pass hang together."""

    lengths: Tensor  # [B] int64: tokens that each row keeps from before
    parents: Tensor  # [B, N] int64: each token's parent among the new ones; -1: it follows the row's past
    is_chain: bool = False
    """Whether every token follows the one before."""
    stays: bool = False
    """Whether every token of the chain stays: prompts of one length, in an empty cache."""

    @classmethod
    def chain(cls, lengths: Tensor, tokens: int, *, stays: bool = False) -> "Nodes":
        """``tokens`` tokens, each after the one before."""
        steps = torch.arange(tokens, device=lengths.device)
        return cls(lengths, (steps - 1).expand(len(lengths), -1), is_chain=True, stays=stays)

    @cached_property
    def lineage(self) -> Tensor:
        """``[B, N, N]`` bool: whether node ``j`` is node ``i`` itself or one that it descends from."""
        if self.is_chain:
            nodes = self.parents.shape[1]
            return (
                torch.ones(nodes, nodes, dtype=torch.bool, device=self.parents.device)
                .tril()
                .expand(len(self.parents), -1, -1)
            )
        return ancestors(self.parents)

    @cached_property
    def depth(self) -> Tensor:
        """``[B, N]`` int64: 0 for nodes that follow the row's past."""
        return self.parents + 1 if self.is_chain else self.lineage.sum(-1) - 1

    @cached_property
    def positions(self) -> Tensor:
        """``[B, N]`` int64: each node's place in its sequence."""
        return self.lengths[:, None] + self.depth

    @cached_property
    def levels(self) -> list["Level"]:
        """The nodes of every depth, from 0 on."""
        found = []
        for depth in range(int(self.depth.max()) + 1):
            rows, nodes = (self.depth == depth).nonzero(as_tuple=True)
            found.append(Level(rows, nodes, None if depth == 0 else self.parents[rows, nodes]))
        return found


@dataclass(frozen=True)
class Level:
    """``R`` nodes of one depth, of all rows."""

    rows: Tensor  # [R]
    nodes: Tensor  # [R]
    parents: Tensor | None  # [R] nodes of the level before; None: these follow their rows' past


class StateStore(Protocol):
    """One layer's memory of all rows."""

    def begin(self, nodes: Nodes) -> None:
        """Start a pass: what is remembered now is what ``commit`` with no tokens kept goes back to."""

    def commit(self, path: Tensor, kept: Tensor) -> None:
        """Remember the first ``kept`` ``[B]`` nodes of each row's ``path`` ``[B, L]``, and no other of the pass.

        ``path`` holds node indices from the root on, each the parent of the next as far as they are kept.
        """

    def keep_rows(self, rows: Tensor) -> None:
        """Remember these rows ``[B']`` alone, in this order."""

    def join(self, other: Self) -> None:
        """Append the rows of ``other``, which is used up."""


def ancestors(parents: Tensor) -> Tensor:
    """``[B, N, N]`` bool: whether node ``j`` is node ``i`` itself or one that it descends from.

    ``parents``: ``[B, N]`` int64, -1 at roots; a parent stands before its children.
    """
    nodes = parents.shape[1]
    itself = torch.eye(nodes, dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
    index = parents.clamp(min=0)[..., None].expand_as(itself)
    has_parent = (parents >= 0)[..., None]
    lineage = itself
    while True:  # one generation more at a time
        further = itself | (lineage.gather(1, index) & has_parent)
        if torch.equal(further, lineage):
            return lineage
        lineage = further
