"""Building a pass's draft tree level by level, the same way for every drafter that gives logits.

Chains, trees of a fixed shape, and EAGLE-2's dynamic trees (Li et al. 2024, arXiv:2406.16858): expand the most
probable paths, keep the best nodes. At temperature 0 tokens are the most probable ones; above it chains and fixed
shapes draw theirs, siblings without replacement, while a dynamic tree keeps its most probable ones: which nodes it
keeps depends on the tokens, and drawn tokens that are dropped for what they are would bend the output's distribution.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import softmax

from bitdraft.speculators.early_stop import ChainLengths, EarlyStop
from bitdraft.speculators.sampling import Sampling, draw, likeliest
from bitdraft.speculators.tree import DraftTree, chain_tree
from bitdraft.speculators.tree_shapes import TreeShape

# B sequence, N node, W node of one depth, D draft vocabulary, V target vocabulary, K depth.


@dataclass(frozen=True)
class DynamicShape:
    """EAGLE-2's tree: at each depth the ``width`` most probable nodes are expanded, of all the ``nodes`` best stay."""

    nodes: int
    width: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.width < 1:
            raise ValueError(f"a dynamic tree needs at least 1 node and width 1, got {self.nodes} and {self.width}")


@dataclass(frozen=True, kw_only=True)
class DraftPlan:
    """What to draft in every pass."""

    length: int
    """Deepest draft."""
    shape: TreeShape | DynamicShape | None = None
    """``None``: a chain."""
    sampling: Sampling = field(default_factory=Sampling)
    """How drafts are chosen; greedy drafts at any temperature of the target are lossless too."""
    stop: EarlyStop | None = None
    confidence: bool = False
    """Record the drafter's confidence along chains."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"draft length must be at least 1, got {self.length}")
        if isinstance(self.shape, TreeShape) and self.shape.depth != self.length:
            raise ValueError(f"a draft tree of depth {self.shape.depth} does not go with draft length {self.length}")
        if self.stop is not None and self.shape is not None:
            raise ValueError("only chains stop early: leave out the tree or the confidence threshold")
        if self.stop is not None:
            self.stop.check(self.length)
        if self.confidence and (self.shape is not None or self.stop is not None):
            raise ValueError("confidence is recorded along whole chains: leave out the tree and the early stop")

    @property
    def nodes(self) -> int:
        """Most drafted tokens per pass."""
        if isinstance(self.shape, DynamicShape):
            return min(self.shape.nodes, self.shape.width + (self.length - 1) * self.shape.width**2)
        return len(self.shape) if self.shape else self.length

    @property
    def slots(self) -> int:
        """Most nodes that a drafter has in memory while it drafts."""
        if isinstance(self.shape, DynamicShape):
            return self.shape.width * self.length
        return self.nodes

    @property
    def draws(self) -> int:
        """Random numbers per pass."""
        return 0 if self.sampling.is_greedy or isinstance(self.shape, DynamicShape) else self.nodes


class DraftsByLevel(Protocol):
    """A drafter that gives logits over its draft vocabulary, depth by depth (``DraftHead``)."""

    def first(self, context: Any, state: Any) -> Tensor: ...
    def following(self, state: Any, tokens: Tensor, parents: Tensor) -> Tensor: ...
    def to_target_ids(self, draft_ids: Tensor) -> Tensor: ...
    def over_target(self, probabilities: Tensor) -> Tensor: ...


def build_tree(drafter: DraftsByLevel, context: Any, state: Any, plan: DraftPlan, uniforms: Tensor) -> DraftTree:
    """The tree that ``plan`` asks for, behind ``context``'s newest token. ``uniforms``: ``[B, plan.draws]``."""
    if plan.shape is None:
        return _chain(drafter, context, state, plan, uniforms)
    if isinstance(plan.shape, TreeShape):
        return _fixed(drafter, context, state, plan.shape, plan.sampling, uniforms)
    return _dynamic(drafter, context, state, plan.length, plan.shape)


def _chain(drafter: DraftsByLevel, context: Any, state: Any, plan: DraftPlan, uniforms: Tensor) -> DraftTree:
    newest = context.newest_token
    logits = drafter.first(context, state)  # [B, D]
    parent = torch.zeros_like(newest)[:, None]
    drafts: list[Tensor] = []
    proposals: list[Tensor] = []
    confidences: list[Tensor] = []
    lengths = ChainLengths(plan.stop, len(newest), newest.device) if plan.stop else None
    for depth in range(plan.length):
        if plan.confidence or lengths:
            confidences.append(softmax(logits.float(), dim=-1).amax(-1))
        if lengths and not lengths.reach(depth, torch.stack(confidences, dim=1)):
            break
        if plan.sampling.is_greedy:
            chosen = likeliest(logits)
        else:
            probabilities = plan.sampling.probabilities(logits)
            proposals.append(drafter.over_target(probabilities))
            chosen = draw(probabilities, uniforms[:, depth])
        drafts.append(drafter.to_target_ids(chosen))
        if depth + 1 == plan.length or (lengths and not lengths.worth_another(depth + 1)):
            break
        logits = drafter.following(state, drafts[-1][:, None], parent)[:, 0]
    if proposals:
        proposals.append(torch.zeros_like(proposals[0]))  # nothing follows the last node
    return chain_tree(
        newest,
        torch.stack(drafts, dim=1) if drafts else newest.new_empty(len(newest), 0),
        lengths=lengths.drafted if lengths else None,
        proposals=torch.stack(proposals, dim=1) if proposals else None,
        confidence=torch.stack(confidences, dim=1) if plan.confidence else None,
    )


@dataclass(frozen=True)
class _Level:
    """One depth of a fixed shape, as indices."""

    parents: Tensor  # [W] which row of the last logits each node follows
    ranks: Tensor  # [W] its place among its siblings
    width: int  # most siblings
    own: Tensor  # [rows, width] which of the shape's nodes, from 0, each choice is; 0 for choices that it leaves out
    inner: Tensor  # [W'] the nodes that have children: the rows of the next logits
    places: Tensor  # [W'] the tree's nodes that those are, the root counted


@lru_cache(maxsize=8)
def _levels(shape: TreeShape, device: torch.device) -> tuple[list[_Level], Tensor, Tensor]:
    """The shape's depths, and of all nodes, root included, parents ``[N]`` and depths ``[N]``."""
    place = {node: i for i, node in enumerate([(), *shape.nodes])}
    expanded: list[tuple[int, ...]] = [()]
    levels = []
    for depth in range(1, shape.depth + 1):
        nodes = shape.level(depth)
        inner = [i for i, node in enumerate(nodes) if (*node, 0) in place]
        own = torch.zeros(len(expanded), max(node[-1] for node in nodes) + 1, dtype=torch.int64)
        for node in nodes:
            own[expanded.index(node[:-1]), node[-1]] = place[node] - 1
        levels.append(
            _Level(
                torch.tensor([expanded.index(node[:-1]) for node in nodes], device=device),
                torch.tensor([node[-1] for node in nodes], device=device),
                own.shape[1],
                own.to(device),
                torch.tensor(inner, dtype=torch.int64, device=device),
                torch.tensor([place[nodes[i]] for i in inner], dtype=torch.int64, device=device),
            )
        )
        expanded = [nodes[i] for i in inner]
    parents = torch.tensor([-1, *(place[node[:-1]] for node in shape.nodes)], device=device)
    return levels, parents, torch.tensor([0, *map(len, shape.nodes)], device=device)


def _fixed(
    drafter: DraftsByLevel, context: Any, state: Any, shape: TreeShape, sampling: Sampling, uniforms: Tensor
) -> DraftTree:
    tokens = [context.newest_token[:, None]]  # per depth: [B, W]
    levels, parents, depths = _levels(shape, tokens[0].device)
    logits = drafter.first(context, state)[:, None]  # [B, rows, D]
    real = [torch.ones_like(tokens[0], dtype=torch.bool)]
    proposals: Tensor | None = None
    places = rows = torch.zeros_like(parents[:1])  # nodes that the logits follow: of the tree, and of the last depth
    for depth, level in enumerate(levels, start=1):
        if level.width > logits.shape[-1]:
            raise ValueError(
                f"a node of the draft tree has {level.width} choices, the draft vocabulary {logits.shape[-1]} tokens"
            )
        # Medusa expands one row to all nodes of a depth: what is said about it is computed once.
        distinct = logits[:, :1] if logits.stride(1) == 0 else logits
        if sampling.is_greedy:
            choices = distinct.topk(level.width, dim=-1).indices.expand(-1, len(rows), -1)  # [B, rows, width]
            possible = torch.ones_like(choices, dtype=torch.bool)
        else:
            probabilities = sampling.probabilities(distinct)
            wide = drafter.over_target(probabilities)
            if proposals is None:
                proposals = wide.new_zeros(len(wide), len(parents), wide.shape[-1])
            proposals[:, places] = wide
            # A uniform for every node; choices that the shape leaves out borrow one and are not used.
            choices, possible = _without_replacement(probabilities, uniforms[:, level.own])
        above = real[-1][:, rows]
        real.append(possible[:, level.parents, level.ranks] & above[:, level.parents])
        tokens.append(drafter.to_target_ids(choices[:, level.parents, level.ranks]))
        if depth < len(levels):
            inner = level.parents[level.inner].expand(len(choices), -1)
            logits = drafter.following(state, tokens[-1][:, level.inner], inner)
        places, rows = level.places, level.inner
    everything = torch.cat(tokens, dim=1)  # [B, N]
    return DraftTree(
        everything, parents.expand_as(everything), depths.expand_as(everything), torch.cat(real, dim=1), proposals
    )


def _without_replacement(probabilities: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """``[B, W, S]`` distinct tokens, drawn one after the other from ``[B, W, D]`` (or ``[B, 1, D]`` for all) with
    ``uniforms`` ``[B, W, S]``, and whether there was one left to draw."""
    left = probabilities.expand(-1, uniforms.shape[1], -1).clone(memory_format=torch.contiguous_format)
    chosen, possible = [], []
    for uniform in uniforms.unbind(-1):
        possible.append(left.amax(-1) > 0)
        chosen.append(draw(left, uniform))
        left.scatter_(-1, chosen[-1][..., None], 0.0)
    return torch.stack(chosen, dim=-1), torch.stack(possible, dim=-1)


def _dynamic(drafter: DraftsByLevel, context: Any, state: Any, length: int, shape: DynamicShape) -> DraftTree:
    newest = context.newest_token  # [B]
    logits = drafter.first(context, state)[:, None]  # [B, 1, D]
    frontier = newest.new_zeros(len(newest), 1)  # [B, W] tree index of the nodes that are expanded, 0 is the root
    score = torch.zeros_like(frontier, dtype=torch.float32)  # [B, W] log-probability of their paths
    tokens, parents, scores = [newest[:, None]], [frontier - 1], [score]
    for depth in range(1, length + 1):
        width = min(shape.width, logits.shape[-1])
        best, choice = logits.float().log_softmax(-1).topk(width, dim=-1)  # [B, W, S]
        offset = sum(t.shape[1] for t in tokens)
        scores.append((score[..., None] + best).flatten(1))  # [B, W·S]
        tokens.append(drafter.to_target_ids(choice).flatten(1))
        parents.append(frontier.repeat_interleave(width, dim=1))
        if depth < length:
            score, kept = scores[-1].topk(min(shape.width, scores[-1].shape[1]), dim=-1)  # [B, W']
            frontier = kept + offset
            logits = drafter.following(state, tokens[-1].gather(1, kept), kept // width)
    return _best(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1), shape.nodes)


def _best(tokens: Tensor, parents: Tensor, scores: Tensor, nodes: int) -> DraftTree:
    """The root and its ``nodes`` most probable descendants, renumbered in the order in which they stand."""
    # A path is never more probable than its beginning, and at equal scores the stable sort takes the one that
    # stands first: the parent. So whatever is kept hangs together.
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, : nodes + 1]
    kept = order.sort(dim=1).values  # [B, N]
    place = torch.zeros_like(tokens).scatter_(1, kept, torch.arange(kept.shape[1], device=kept.device).expand_as(kept))
    up = parents.gather(1, kept)  # [B, N]
    parent = torch.where(up < 0, -1, place.gather(1, up.clamp(min=0)))
    depth, at = torch.zeros_like(parent), parent
    while bool((at >= 0).any()):
        depth += at >= 0
        at = torch.where(at < 0, -1, parent.gather(1, at.clamp(min=0)))
    return DraftTree(tokens.gather(1, kept), parent, depth, torch.ones_like(kept, dtype=torch.bool))
