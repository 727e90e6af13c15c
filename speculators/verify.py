"""Accepting and rejecting drafted tokens: pure functions of tensors.

Every rule takes a ``DraftTree`` and the target's logits at each of its nodes, and returns a ``Verdict``. The target's
row at a node is about the token that *follows* it, so a node is judged by its parent's row. ``greedy`` and
``sampled`` leave the target's output as it would be without drafts; ``typical`` does not. All chance comes in as
``uniforms`` in [0, 1), so a sequence's verdict does not depend on the others in its batch. Logits become probabilities
only at the nodes that a verdict reaches: with a large vocabulary nothing else in it takes as long.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bitdraft.speculators.sampling import draw, likeliest
from bitdraft.speculators.tree import DraftTree

# B sequence, N node, V vocabulary, L longest path, R (sequence, node) that is looked at.

Distribution = Callable[[Tensor], Tensor]
"""From logits ``[R, V]`` to the probabilities that tokens are drawn from, ``[R, V]``; ``Sampling.probabilities``."""


@dataclass(frozen=True)
class Verdict:
    """What a pass adds to every sequence: the tokens of ``path`` behind the root, then ``bonus``."""

    path: Tensor  # [B, L] int64 nodes from the root on; behind the accepted ones the last accepted node repeats
    accepted: Tensor  # [B] int64: drafted tokens kept
    bonus: Tensor  # [B] int64: the token that the target adds


def uniforms_needed(nodes: int) -> int:
    """Uniforms per sequence that the verification of ``nodes`` nodes, root included, takes.

    Column 0 draws the bonus and column ``n`` decides on node ``n``; columns beyond are not looked at.
    """
    return nodes


def greedy(tree: DraftTree, logits: Tensor) -> Verdict:
    """Keep the drafts that the target would have written itself: its argmax, in the dtype of ``logits`` ``[B, N, V]``.

    The deepest such node counts, the first of equally deep ones.
    """
    choices = likeliest(logits)  # [B, N]
    agrees = tree.tokens == choices.gather(1, _parents(tree))
    last = _deepest(tree, torch.where(agrees, 0.0, -math.inf))
    return _verdict(tree, last, _at(choices, last))


def typical(
    tree: DraftTree,
    logits: Tensor,
    uniforms: Tensor,
    distribution: Distribution,
    *,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> Verdict:
    """Medusa's typical acceptance (Cai et al. 2024, §2.3.1). Lossy: the output is not distributed as the target's.

    A draft ``x`` is kept where ``p(x) > min(epsilon, delta · exp(-H(p)))``, with ``H`` the entropy in nats of the
    target's distribution ``p`` at its parent; of the kept paths the longest wins, of equally long ones the likeliest.
    ``p`` is the ``distribution`` of the ``logits`` ``[B, N, V]``. ``uniforms`` ``[B, M ≥ 1]``: column 0 draws the
    bonus, from ``p`` at the last kept node, so that without drafts this is plain sampling (Medusa takes the argmax).

    Raises ``ValueError`` if a threshold is out of range.
    """
    if not 0 <= epsilon <= 1:
        raise ValueError(f"epsilon of typical acceptance must be between 0 and 1, got {epsilon}")
    if not delta >= 0:
        raise ValueError(f"delta of typical acceptance must be at least 0, got {delta}")
    rows = torch.arange(len(tree.tokens), device=tree.tokens.device)
    row, node = rows, torch.zeros_like(rows)  # [R]: kept nodes of one depth
    score = torch.full(tree.tokens.shape, -math.inf, dtype=torch.float64, device=rows.device)  # log p of the kept nodes
    while len(row):
        is_child = tree.real[row] & (tree.parents[row] == node[:, None])  # [R, N]
        inner = is_child.any(1)
        row, node, is_child = row[inner], node[inner], is_child[inner]
        p = distribution(logits[row, node])  # [R, V]
        entropy = torch.special.entr(p).sum(-1, keepdim=True)
        threshold = (delta * torch.exp(-entropy)).clamp(max=epsilon)
        likelihood = p.gather(1, tree.tokens[row])  # [R, N]
        parent, node = (is_child & (likelihood > threshold)).nonzero(as_tuple=True)
        row = row[parent]
        score[row, node] = likelihood[parent, node].double().log()
    last = _deepest(tree, score)
    return _verdict(tree, last, draw(distribution(logits[rows, last]), uniforms[:, 0]))


def sampled(tree: DraftTree, logits: Tensor, uniforms: Tensor, distribution: Distribution) -> Verdict:
    """Speculative sampling: whatever was drafted, the output is distributed as the target's own would be.

    That is the ``distribution`` of the ``logits`` ``[B, N, V]``: temperature and cuts applied, computed in its dtype.
    ``uniforms``: ``[B, M]``, independent, ``M`` at least ``uniforms_needed(N)``.

    The children of a node are tried in order. With ``p`` the target's distribution there and ``q`` the proposal, a
    child ``x`` is kept with probability ``min(1, p(x) / q(x))``; else ``p`` becomes ``norm(max(p - q, 0))``, ``x`` is
    taken out of ``q``, and the next sibling is tried (Leviathan et al. 2023, Alg. 1, for one child; Jeon et al. 2024,
    recursive rejection sampling, for siblings drawn without replacement). A greedy draft is a ``q`` with all its mass
    on ``x``. Where no child is kept, the bonus is drawn from what ``p`` has become.

    Passed over, as if they were not there: filler, and children with ``q(x) = 0`` in what is left of the proposal (a
    repeated sibling, or one more than the proposal holds). The guarantee asks that no draw is dropped for its token,
    and that a dropped sibling takes those drawn after it along.
    """
    batch, nodes = tree.tokens.shape
    assert uniforms.shape[1] >= uniforms_needed(nodes), "one uniform per node"
    rows = torch.arange(batch, device=tree.tokens.device)
    order = _sibling_order(tree)
    node, tried = torch.zeros_like(rows), torch.zeros_like(rows)  # [B]: where the walk stands, its children tried
    rest = distribution(logits[rows, node])  # [B, V]: p, less what the refused children stood for
    left = None if tree.proposals is None else tree.proposals[:, 0].clone()  # [B, V]: q, less the refused children
    while True:
        is_next = tree.real & (tree.parents == node[:, None]) & (order == tried[:, None])  # [B, N], at most one a row
        exists, child = is_next.any(1), is_next.int().argmax(1)
        if not exists.any():
            return _verdict(tree, node, draw(rest, uniforms[:, 0]))
        token = _at(tree.tokens, child)
        offered = torch.ones_like(rest[:, 0]) if left is None else _at(left, token)
        drawn = exists & (offered > 0)
        keeps = drawn & (_at(uniforms, child) * offered < _at(rest, token))
        # Only the rows concerned are touched: [V] is long, and most rows keep their first child.
        kept, refused = keeps.nonzero().squeeze(1), (drawn & ~keeps).nonzero().squeeze(1)
        rest[kept] = distribution(logits[kept, child[kept]])
        if tree.proposals is None or left is None:  # greedy drafts
            rest[refused] = _residual(rest[refused], _point_mass(rest[refused], token[refused]))
        else:
            rest[refused] = _residual(rest[refused], left[refused])
            left[refused] = _without(left[refused], token[refused])
            left[kept] = tree.proposals[kept, child[kept]]
        node, tried = torch.where(keeps, child, node), torch.where(keeps, 0, tried + 1)


def _residual(rest: Tensor, proposal: Tensor) -> Tensor:
    """``norm(max(p - q, 0))``, ``[R, V]``; ``p`` itself where rounding leaves nothing (``p`` and ``q`` are equal)."""
    above = (rest - proposal).clamp_(min=0)
    total = above.sum(-1, keepdim=True)
    return torch.where(total > 0, above / total, rest)


def _without(proposal: Tensor, token: Tensor) -> Tensor:
    """``q`` ``[R, V]`` once ``token`` ``[R]`` was drawn: the others, to sum 1; all 0 where it was the last."""
    others = proposal.scatter(1, token[:, None], 0)
    return others / others.sum(-1, keepdim=True).clamp(min=torch.finfo(others.dtype).tiny)


def _point_mass(like: Tensor, token: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter_(1, token[:, None], 1)


def _sibling_order(tree: DraftTree) -> Tensor:
    """How many real siblings stand before each node, ``[B, N]``."""
    siblings = (tree.parents[:, :, None] == tree.parents[:, None, :]) & tree.real[:, None, :]  # [B, N, N]
    return siblings.tril(-1).sum(2)


def _deepest(tree: DraftTree, score: Tensor) -> Tensor:
    """The deepest node whose ancestors and itself were all kept, ``[B]``; the root if none was.

    ``score`` ``[B, N]``: ``-inf`` where a node was not kept; of equally deep ones the highest sum over the path wins,
    then the first.
    """
    score = score.masked_fill(~tree.real, -math.inf)
    score[:, 0] = 0
    for depth in range(1, int(tree.depth.max()) + 1):
        score = torch.where(tree.depth == depth, score + score.gather(1, _parents(tree)), score)
    depth_kept = tree.depth.masked_fill(score == -math.inf, 0)
    return score.masked_fill(depth_kept < depth_kept.amax(1, keepdim=True), -math.inf).argmax(1)


def _verdict(tree: DraftTree, last: Tensor, bonus: Tensor) -> Verdict:
    """The path from the root to ``last`` ``[B]``."""
    accepted = _at(tree.depth, last)
    path, node = [], last
    for depth in range(int(tree.depth.max()), -1, -1):
        path.append(node)
        node = torch.where(depth <= accepted, _at(_parents(tree), node), node)
    return Verdict(torch.stack(path[::-1], dim=1), accepted, bonus)


def _parents(tree: DraftTree) -> Tensor:
    """``[B, N]``, usable as indices: the root is its own parent."""
    return tree.parents.clamp(min=0)


def _at(x: Tensor, index: Tensor) -> Tensor:
    """``x[b, index[b]]``, ``[B]``."""
    return x.gather(1, index[:, None]).squeeze(1)
