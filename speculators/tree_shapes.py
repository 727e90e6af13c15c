"""Shapes of draft trees that are fixed before decoding.

Cartesian product of every head's ``s`` most probable tokens, and the sparse tree of Medusa (Cai et al. 2024,
arXiv:2401.10774, §2.3.3): node by node, the one that is most often right according to measured accuracies.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod


@dataclass(frozen=True)
class TreeShape:
    """A node is the path of ranks that leads to it: ``(0, 2)`` is the third choice behind the first choice.

    Sorted by depth, then by path. Every node's parent and its better siblings are nodes too.
    """

    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        known = set(self.nodes)
        if not known or len(known) != len(self.nodes):
            raise ValueError("a draft tree needs at least one node, and none twice")
        for node in self.nodes:
            if not node or min(node) < 0:
                raise ValueError(f"draft tree: {list(node)} is not a path of ranks from 0 on")
            parent, better = node[:-1], (*node[:-1], node[-1] - 1)
            if (parent and parent not in known) or (node[-1] and better not in known):
                raise ValueError(f"draft tree: {list(node)} lacks its parent or a better sibling")
        object.__setattr__(self, "nodes", tuple(sorted(self.nodes, key=lambda node: (len(node), node))))

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def depth(self) -> int:
        return len(self.nodes[-1])

    def level(self, depth: int) -> list[tuple[int, ...]]:
        """The nodes at ``depth`` (1 is the first drafted token)."""
        return [node for node in self.nodes if len(node) == depth]


def cartesian(widths: Sequence[int]) -> TreeShape:
    """Every combination of the ``widths[d]`` best tokens at depth ``d + 1``."""
    if not widths or min(widths) < 1:
        raise ValueError(f"tree widths must be at least 1, got {list(widths)}")
    return TreeShape(
        tuple(node for depth in range(1, len(widths) + 1) for node in product(*map(range, widths[:depth])))
    )


def sparse(accuracies: Sequence[Sequence[float]], nodes: int, *, depth: int | None = None) -> TreeShape:
    """The ``nodes`` paths that are most often right.

    ``accuracies[d][r]``: how often the rank-``r`` token at depth ``d + 1`` is the target's, given that the path
    before it is right; a path is right with their product. A worse rank never comes before a better one. With
    ``depth``, the best path of that depth is in, and the others are chosen for the places left.
    """
    if not accuracies or not all(accuracies) or len(accuracies) < (depth or 0):
        raise ValueError(f"a draft tree of depth {depth or 1} needs the accuracy of some choice at each depth")
    spine = [(0,) * (d + 1) for d in range(depth or 0)]
    if nodes < max(1, len(spine)):
        raise ValueError(f"a draft tree of depth {len(spine)} needs at least {max(1, len(spine))} nodes, got {nodes}")
    ranked = [sorted(row, reverse=True) for row in accuracies]
    chosen: list[tuple[int, ...]] = []
    waiting: list[tuple[float, tuple[int, ...]]] = [(-ranked[0][0], (0,))]
    while waiting and len(chosen) < nodes:
        _, node = heapq.heappop(waiting)
        if node not in spine and len(chosen) >= nodes - len(set(spine) - set(chosen)):
            continue  # the places left are the spine's
        chosen.append(node)
        if node[-1] + 1 < len(ranked[len(node) - 1]):
            _push(waiting, ranked, (*node[:-1], node[-1] + 1))
        if len(node) < len(ranked):
            _push(waiting, ranked, (*node, 0))
    return TreeShape(tuple(chosen))


def _push(waiting: list[tuple[float, tuple[int, ...]]], ranked: list[list[float]], node: tuple[int, ...]) -> None:
    heapq.heappush(waiting, (-prod(ranked[depth][rank] for depth, rank in enumerate(node)), node))
