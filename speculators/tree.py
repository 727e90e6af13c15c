"""A pass's drafts as a tree: what a drafter proposes and verification walks.

Node 0 is the root, the newest token, which is already part of the answer. Every other node is a drafted token that
follows its parent. A chain is the tree in which every node follows the one before it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# B sequence, N node, V vocabulary, K depth.


@dataclass(frozen=True)
class DraftTree:
    """One pass's drafts for every sequence of a batch. Parents stand before their children."""

    tokens: Tensor  # [B, N] int64 target ids; node 0 is the newest token
    parents: Tensor  # [B, N] int64, -1 at the root; siblings stand in the order in which verification tries them
    depth: Tensor  # [B, N] int64, 0 at the root
    real: Tensor  # [B, N] bool; False: filler of a sequence that drafted less, never accepted
    proposals: Tensor | None = None
    """``[B, N, V]`` fp32: the probabilities from which a node's children were drawn, one after the other without
    replacement. ``None``: drafts are greedy, each a point mass."""
    confidence: Tensor | None = None
    """``[B, K]`` fp32: the drafter's highest probability at each depth of a chain, where it has one."""
    is_chain: bool = False

    @property
    def drafted(self) -> Tensor:
        """Drafted tokens of each sequence, ``[B]``."""
        return self.real.sum(1) - 1


def chain_tree(
    newest: Tensor,
    drafts: Tensor,
    *,
    lengths: Tensor | None = None,
    proposals: Tensor | None = None,
    confidence: Tensor | None = None,
) -> DraftTree:
    """The chain ``newest`` ``[B]`` → ``drafts`` ``[B, K]``, of which only the first ``lengths`` ``[B]`` count."""
    batch, k = drafts.shape
    depth = torch.arange(k + 1, device=drafts.device).expand(batch, -1)  # [B, N]
    real = torch.ones_like(depth, dtype=torch.bool) if lengths is None else depth <= lengths[:, None]
    tokens = torch.cat([newest[:, None], drafts], dim=1)
    return DraftTree(tokens, depth - 1, depth, real, proposals, confidence, is_chain=True)
