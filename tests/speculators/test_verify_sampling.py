"""Speculative sampling leaves the target's distribution: chi-square tests against exact enumeration.

The target is a table of conditional distributions over the first three tokens, the drafter another one. Every
sequence of a large batch drafts, is verified, and goes on with the target's own draws where fewer than three tokens
came out; the counts of all ``V³`` answers must be those of the target.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bitdraft.speculators import verify
from bitdraft.speculators.sampling import Sampling
from bitdraft.speculators.tree import DraftTree
from bitdraft.speculators.verify import Verdict, sampled

V, SEQUENCES = 4, 60_000

CHAIN = (-1, 0, 1)
PAIRS = (-1, 0, 0, 1, 1, 2, 2)  # two children per node, two levels
TRIPLES = (-1, 0, 0, 0, 1, 1, 1, 2, 2, 2)  # three, but the last of the first level has none
MIXED = (-1, 0, 1, 0, 1, 3, 0, 6)  # siblings that do not stand side by side


def as_given(probabilities: Tensor) -> Tensor:
    """Targets are given as probabilities."""
    return probabilities


@dataclass(frozen=True)
class Model:
    """What it says about a token after 0, 1 and 2 others: ``[V]``, ``[V, V]``, ``[V, V, V]``."""

    tables: tuple[Tensor, Tensor, Tensor]

    def after(self, prefix: list[Tensor]) -> Tensor:
        """``[S, V]`` for up to two tokens ``[S]`` each."""
        return self.tables[len(prefix)][tuple(prefix)].expand(SEQUENCES, V)

    @property
    def answers(self) -> Tensor:
        """The probability of every three tokens, ``[V³]``."""
        first, second, third = self.tables
        return (first[:, None, None] * second[..., None] * third).flatten()


def random_model(seed: int, sampling: Sampling | None = None, support: tuple[int, ...] = tuple(range(V))) -> Model:
    generator = torch.Generator().manual_seed(seed)
    outside = torch.tensor([token not in support for token in range(V)])
    sampling = sampling or Sampling(temperature=1.0)
    shapes = (V,), (V, V), (V, V, V)
    logits = [(1.5 * torch.randn(shape, generator=generator)).masked_fill(outside, -torch.inf) for shape in shapes]
    first, second, third = (sampling.probabilities(x) for x in logits)
    return Model((first, second, third))


@dataclass(frozen=True)
class World:
    target: Model
    drafter: Model
    parents: tuple[int, ...]
    drawn: bool = True
    """Siblings are drawn without replacement; else they are the drafter's likeliest tokens."""
    replacement: bool = False
    filler: float = 0.0
    """Share of nodes that were not drafted."""


def draft(world: World, generator: torch.Generator) -> tuple[DraftTree, Tensor]:
    """A tree for every sequence, and the target's probabilities ``[S, N, V]``."""
    nodes = len(world.parents)
    tokens = torch.zeros(SEQUENCES, nodes, dtype=torch.int64)
    real = torch.rand(SEQUENCES, nodes, generator=generator) >= world.filler
    real[:, 0] = True
    target, proposals = torch.zeros(SEQUENCES, nodes, V), torch.zeros(SEQUENCES, nodes, V)
    prefix: list[list[Tensor]] = [[]]
    for node in range(nodes):
        if node:
            prefix.append([*prefix[world.parents[node]], tokens[:, node]])
            real[:, node] &= real[:, world.parents[node]]
        target[:, node] = world.target.after(prefix[node])
        children = [n for n, parent in enumerate(world.parents) if parent == node]
        if not children:
            continue
        proposals[:, node] = q = world.drafter.after(prefix[node])
        if world.drawn:
            siblings = torch.multinomial(q, len(children), world.replacement, generator=generator)
        else:
            siblings = q.topk(len(children)).indices
        # Nodes that were not drafted took no draw; their tokens are those that the target would like best.
        order = (real[:, children].cumsum(1) - 1).clamp(min=0)
        best = target[:, node].argmax(-1, keepdim=True)
        tokens[:, children] = torch.where(real[:, children], siblings.gather(1, order), best)
    parents = torch.tensor(world.parents)
    depth = torch.tensor([len(p) for p in prefix])
    tree = DraftTree(
        tokens, parents.expand_as(tokens), depth.expand_as(tokens), real, proposals if world.drawn else None
    )
    return tree, target


def answers(world: World, tree: DraftTree, verdict: Verdict, generator: torch.Generator) -> Tensor:
    """The first three tokens of every sequence, ``[S, 3]``."""
    drafted = tree.tokens.gather(1, verdict.path)[:, 1:]  # [S, depth]
    drafted = torch.cat([drafted, torch.zeros_like(drafted[:, :1])], dim=1)
    columns: list[Tensor] = []
    for position in range(3):
        own = torch.multinomial(world.target.after(columns), 1, generator=generator).squeeze(1)
        after_bonus = torch.where(verdict.accepted == position, verdict.bonus, own)
        kept = drafted[:, min(position, drafted.shape[1] - 1)]
        columns.append(torch.where(verdict.accepted > position, kept, after_bonus))
    return torch.stack(columns, dim=1)


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Pearson's chi-square test; 0 if something impossible was counted."""
    possible = probabilities > 0
    if counts[~possible].any():
        return 0.0
    expected = probabilities[possible].double() * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((int(possible.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def simulate(world: World, change: Callable[[DraftTree, Tensor], tuple[DraftTree, Tensor]] | None = None) -> float:
    """The p-value of "the answers are the target's", possibly after a ``change`` of the tree and the uniforms."""
    generator = torch.Generator().manual_seed(0)
    tree, target = draft(world, generator)
    uniforms = torch.rand(tree.tokens.shape, generator=generator)
    if change is not None:
        tree, uniforms = change(tree, uniforms)
    written = answers(world, tree, sampled(tree, target, uniforms, as_given), generator)
    index = (written * torch.tensor([V * V, V, 1])).sum(1)
    return p_value(torch.bincount(index, minlength=V**3), world.target.answers)


TARGET, DRAFTER = random_model(1), random_model(2)
CUT = random_model(1, Sampling(temperature=0.9, top_p=0.7))
WORLDS = {
    "chain": World(TARGET, DRAFTER, CHAIN),
    "chain of greedy drafts": World(TARGET, DRAFTER, CHAIN, drawn=False),
    "pairs": World(TARGET, DRAFTER, PAIRS),
    "triples": World(TARGET, DRAFTER, TRIPLES),
    "every token as a sibling": World(TARGET, DRAFTER, (-1, 0, 0, 0, 0, 2)),
    "scattered siblings": World(TARGET, DRAFTER, MIXED),
    "pairs of greedy drafts": World(TARGET, DRAFTER, PAIRS, drawn=False),
    "triples of greedy drafts": World(TARGET, DRAFTER, TRIPLES, drawn=False),
    "chain with filler": World(TARGET, DRAFTER, CHAIN, filler=0.3),
    "triples with filler": World(TARGET, DRAFTER, TRIPLES, filler=0.3),
    "greedy triples with filler": World(TARGET, DRAFTER, TRIPLES, drawn=False, filler=0.3),
    "siblings drawn with replacement": World(TARGET, DRAFTER, TRIPLES, replacement=True),
    "the target drafts": World(TARGET, TARGET, PAIRS),
    "nothing in common": World(random_model(1, support=(0, 2)), random_model(2, support=(1, 3)), PAIRS),
    "top-p of the target": World(CUT, DRAFTER, TRIPLES),
    "top-p of the target, greedy drafts": World(CUT, DRAFTER, TRIPLES, drawn=False),
    "top-k of the drafter": World(TARGET, random_model(2, Sampling(temperature=1.0, top_k=2)), PAIRS),
}


@pytest.mark.parametrize("name", WORLDS)
def test_answers_are_distributed_as_the_targets(name: str) -> None:
    assert simulate(WORLDS[name]) > 1e-3


def test_the_test_sees_a_target_that_is_a_little_different() -> None:
    """Half a percent of every distribution moved to the first token."""
    tables = [0.995 * t + 0.005 * torch.eye(V)[0] for t in TARGET.tables]
    off = World(Model((tables[0], tables[1], tables[2])), DRAFTER, PAIRS)
    generator = torch.Generator().manual_seed(0)
    tree, target = draft(off, generator)
    verdict = sampled(tree, target, torch.rand(tree.tokens.shape, generator=generator), as_given)
    index = (answers(off, tree, verdict, generator) * torch.tensor([V * V, V, 1])).sum(1)
    assert p_value(torch.bincount(index, minlength=V**3), TARGET.answers) < 1e-6


# --- what must break the distribution ---------------------------------------------------------------------------------


def only_zeroed(proposal: Tensor, token: Tensor) -> Tensor:
    return proposal.scatter(1, token[:, None], 0)


@pytest.mark.parametrize(
    ("part", "mutant", "name"),
    [
        ("_residual", lambda rest, proposal: rest, "chain"),
        ("_residual", lambda rest, proposal: rest, "chain of greedy drafts"),
        ("_residual", lambda rest, proposal: rest, "pairs of greedy drafts"),
        ("_residual", lambda rest, proposal: (rest - proposal).clamp(min=0), "pairs"),
        ("_without", lambda proposal, token: proposal, "pairs"),
        ("_without", only_zeroed, "pairs"),
        ("_without", only_zeroed, "triples"),
    ],
)
def test_mutants_of_the_rule_are_seen(
    monkeypatch: pytest.MonkeyPatch, part: str, mutant: Callable[[Tensor, Tensor], Tensor], name: str
) -> None:
    monkeypatch.setattr(verify, part, mutant)
    assert simulate(WORLDS[name]) < 1e-6


def drafts_dropped_for_their_token(tree: DraftTree, uniforms: Tensor) -> tuple[DraftTree, Tensor]:
    real = tree.real & ((tree.tokens != 1) | (tree.depth != 2))
    return DraftTree(tree.tokens, tree.parents, tree.depth, real, tree.proposals), uniforms


def other_proposals(tree: DraftTree, uniforms: Tensor) -> tuple[DraftTree, Tensor]:
    assert tree.proposals is not None
    flatter = (tree.proposals + 0.1) / (tree.proposals + 0.1).sum(-1, keepdim=True)
    return DraftTree(tree.tokens, tree.parents, tree.depth, tree.real, flatter), uniforms


def one_uniform_for_all(tree: DraftTree, uniforms: Tensor) -> tuple[DraftTree, Tensor]:
    return tree, uniforms[:, :1].expand_as(uniforms)


@pytest.mark.parametrize("change", [drafts_dropped_for_their_token, other_proposals, one_uniform_for_all])
def test_broken_promises_are_seen(change: Callable[[DraftTree, Tensor], tuple[DraftTree, Tensor]]) -> None:
    assert simulate(WORLDS["pairs"], change) < 1e-6


# --- how much is accepted ---------------------------------------------------------------------------------------------


def verdict_of(world: World) -> Verdict:
    generator = torch.Generator().manual_seed(0)
    tree, target = draft(world, generator)
    return sampled(tree, target, torch.rand(tree.tokens.shape, generator=generator), as_given)


def test_a_chain_accepts_what_the_distributions_share() -> None:
    """The first draft is kept with probability Σ min(p, q) (Leviathan et al. 2023, Theorem 3.5)."""
    share = float(torch.minimum(TARGET.tables[0], DRAFTER.tables[0]).sum())
    kept = (verdict_of(WORLDS["chain"]).accepted > 0).double().mean()
    assert float(kept) == pytest.approx(share, abs=4 * (share * (1 - share) / SEQUENCES) ** 0.5)


def test_greedy_siblings_are_accepted_by_the_mass_they_cover() -> None:
    covered = TARGET.tables[0][DRAFTER.tables[0].topk(3).indices].sum().item()
    kept = (verdict_of(WORLDS["triples of greedy drafts"]).accepted > 0).double().mean()
    assert float(kept) == pytest.approx(covered, abs=4 * (covered * (1 - covered) / SEQUENCES) ** 0.5)


def test_a_drafter_that_is_the_target_is_always_right() -> None:
    verdict = verdict_of(World(TARGET, TARGET, CHAIN))
    assert (verdict.accepted == 2).all()


def test_a_drafter_that_has_nothing_in_common_is_never_right() -> None:
    assert (verdict_of(WORLDS["nothing in common"]).accepted == 0).all()


# --- rounding ---------------------------------------------------------------------------------------------------------


def star(tokens: list[int], proposal: list[float] | None) -> DraftTree:
    """One sequence whose root has ``tokens`` as children."""
    n = len(tokens)
    parents, depth = torch.tensor([[-1, *[0] * n]]), torch.tensor([[0, *[1] * n]])
    rows = None if proposal is None else torch.tensor(proposal).expand(1, n + 1, -1)
    return DraftTree(torch.tensor([[0, *tokens]]), parents, depth, torch.ones(1, n + 1, dtype=torch.bool), rows)


def at_root(tree: DraftTree, target: list[float], uniforms: list[float]) -> tuple[int, int]:
    """Accepted node and bonus, where all nodes have the same distribution."""
    rows = torch.tensor(target).expand(1, tree.tokens.shape[1], -1)
    verdict = sampled(tree, rows, torch.tensor([uniforms]), as_given)
    return int(verdict.path[0, -1]), int(verdict.bonus)


NEARLY_1 = 1 - 2.0**-24


def test_a_residual_of_nothing_falls_back_to_the_target() -> None:
    """p below q by one unit in the last place at the draft, equal elsewhere: refused, with nothing left."""
    below = float(torch.nextafter(torch.tensor(0.75), torch.tensor(0.0)))
    assert at_root(star([0], [0.75, 0.25]), [below, 0.25], [0.9, NEARLY_1]) == (0, 1)
    assert at_root(star([0], [0.75, 0.25]), [below, 0.25], [0.1, NEARLY_1]) == (0, 0)
    assert at_root(star([0], None), [NEARLY_1, 0.0], [0.5, NEARLY_1]) == (0, 0)


def test_a_draft_that_neither_side_knows_is_not_accepted() -> None:
    assert at_root(star([2], [0.5, 0.5, 0.0]), [0.25, 0.75, 0.0], [0.5, 0.0]) == (0, 1)
    assert at_root(star([2], None), [0.25, 0.75, 0.0], [0.5, 0.0]) == (0, 1)


def test_a_draft_that_was_never_proposed_is_passed_over() -> None:
    """Token 2 could not be drawn; the target's distribution stays whole for the next sibling and the bonus."""
    assert at_root(star([2], [0.5, 0.5, 0.0]), [0.25, 0.25, 0.5], [0.6, 0.0]) == (0, 2)
    assert at_root(star([2, 0], [0.5, 0.5, 0.0]), [0.25, 0.25, 0.5], [0.6, 0.0, 0.4]) == (2, 2)


def test_siblings_beyond_what_the_proposal_holds_are_passed_over() -> None:
    """Two tokens, four siblings: after both are refused there is no proposal left to draw from."""
    accepted, bonus = at_root(star([0, 1, 0, 1], [0.5, 0.5, 0.0]), [0.0, 0.1, 0.9], [0.5, 0, 0.9, 0, 0])
    assert (accepted, bonus) == (0, 2)
    assert verify._without(torch.tensor([[0.0, 1.0]]), torch.tensor([1])).tolist() == [[0, 0]]


@pytest.mark.parametrize("uniform", [0.0, NEARLY_1])
def test_the_bonus_is_never_a_refused_or_impossible_token(uniform: float) -> None:
    """The first and the last token are greedy drafts that were refused, their neighbours have probability 0."""
    inner = torch.rand(1000, generator=torch.Generator().manual_seed(3))
    p = torch.cat([torch.tensor([0.3, 0.0]), 0.4 * inner / inner.sum(), torch.tensor([0.0, 0.3])])
    last = len(p) - 1
    accepted, bonus = at_root(star([0, last], None), p.tolist(), [uniform, 0.99, 0.99])
    assert accepted == 0
    assert bonus == (2 if uniform == 0 else last - 2)
