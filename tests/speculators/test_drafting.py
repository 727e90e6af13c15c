"""Draft trees against slow transcriptions: which nodes, which tokens, which probabilities they were drawn from."""

import math
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdraft.speculators.confidence import Calibration
from bitdraft.speculators.drafting import DraftPlan, DynamicShape, build_tree
from bitdraft.speculators.early_stop import EarlyStop
from bitdraft.speculators.sampling import Sampling
from bitdraft.speculators.tree import DraftTree
from bitdraft.speculators.tree_shapes import TreeShape, cartesian, sparse

OFFSET, V = 3, 12  # draft token i is target token i + OFFSET
NEWEST = 1
SPARSE = sparse([[0.5, 0.3, 0.15], [0.4, 0.2], [0.3, 0.1]], 7)


@dataclass
class State:
    paths: list[list[tuple[int, ...]]]  # per sequence and node of the last call: the target tokens that lead there
    nodes: int = 0  # that ``following`` was called for


@dataclass
class Context:
    newest_token: Tensor


class Table:
    """A drafter whose logits are random, and the same whenever the same tokens lead to a node."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size, self.seed = size, seed

    def logits(self, path: tuple[int, ...]) -> Tensor:
        seed = self.seed + sum((token + 1) * 31**i for i, token in enumerate(path))
        return 2 * torch.randn(self.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def probabilities(self, path: tuple[int, ...], sampling: Sampling) -> list[float]:
        return sampling.probabilities(self.logits(path)).tolist()

    def first(self, context: Any, state: Any) -> Tensor:
        state.paths = [[(int(token),)] for token in context.newest_token]
        return torch.stack([self.logits(paths[0]) for paths in state.paths])

    def following(self, state: Any, tokens: Tensor, parents: Tensor) -> Tensor:
        state.paths = [
            [(*above[parent], token) for token, parent in zip(*row, strict=True)]
            for above, row in zip(state.paths, zip(tokens.tolist(), parents.tolist(), strict=True), strict=True)
        ]
        state.nodes += tokens.shape[1]
        return torch.stack([torch.stack([self.logits(path) for path in paths]) for paths in state.paths])

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + OFFSET

    def over_target(self, probabilities: Tensor) -> Tensor:
        return torch.nn.functional.pad(probabilities, (OFFSET, V - OFFSET - self.size))


def drafted(table: Table, plan: DraftPlan, *, batch: int = 2, seed: int = 0) -> DraftTree:
    """Trees behind newest tokens 1, 2, …, after which the drafter's memory was large enough."""
    state = State([])
    uniforms = torch.rand(batch, plan.draws, generator=torch.Generator().manual_seed(seed))
    tree = build_tree(table, Context(torch.arange(batch) % 3 + NEWEST), state, plan, uniforms)
    assert state.nodes <= plan.slots
    assert int(tree.drafted.max()) <= plan.nodes
    assert [t.dtype for t in (tree.tokens, tree.parents, tree.depth, tree.real)] == [torch.int64] * 3 + [torch.bool]
    return tree


def paths_of(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """The tokens that lead to every node; parents stand first and depths are the paths' lengths."""
    paths: list[tuple[int, ...]] = []
    for n, (token, parent) in enumerate(zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True)):
        assert parent < n and (parent == -1) == (n == 0)
        paths.append((*(paths[parent] if n else ()), token))
        assert int(tree.depth[row, n]) == len(paths[-1]) - 1
    return paths


# --- greedy drafts ----------------------------------------------------------------------------------------------------


def best(table: Table, path: tuple[int, ...], count: int) -> list[int]:
    return [i + OFFSET for i in table.logits(path).argsort(descending=True)[:count].tolist()]


@pytest.mark.parametrize("length", [1, 4])
def test_a_greedy_chain_takes_the_most_probable_token(length: int) -> None:
    table = Table(6)
    tree = drafted(table, DraftPlan(length=length, confidence=True))
    assert tree.is_chain and tree.proposals is None and tree.confidence is not None
    for row, newest in enumerate((1, 2)):
        path: tuple[int, ...] = (newest,)
        for depth in range(length):
            expected = float(table.logits(path).softmax(-1).max())
            assert float(tree.confidence[row, depth]) == pytest.approx(expected, rel=1e-5)
            path = (*path, *best(table, path, 1))
        assert paths_of(tree, row)[-1] == path


@pytest.mark.parametrize("shape", [cartesian([3, 2, 1]), cartesian([2]), SPARSE], ids=len)
def test_a_fixed_tree_holds_the_ranks_of_its_shape(shape: TreeShape) -> None:
    table = Table(6)
    tree = drafted(table, DraftPlan(length=shape.depth, shape=shape), batch=3)
    assert not tree.is_chain and tree.proposals is None and tree.confidence is None
    assert tree.real.all()
    for row, newest in enumerate((1, 2, 3)):
        expected: list[tuple[int, ...]] = [(newest,)]
        for node in shape.nodes:
            path: tuple[int, ...] = (newest,)
            for rank in node:
                path = (*path, best(table, path, rank + 1)[rank])
            expected.append(path)
        assert paths_of(tree, row) == expected


def slow_dynamic(table: Table, newest: int, length: int, shape: DynamicShape) -> list[tuple[int, ...]]:
    """EAGLE-2, one sequence at a time, over log-probabilities in fp64."""
    score: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(newest,): 0.0}
    for _ in range(length):
        children: dict[tuple[int, ...], float] = {}
        for path, above in frontier.items():
            log_probabilities = table.logits(path).log_softmax(-1).tolist()
            for token in best(table, path, shape.width):
                children[*path, token] = above + log_probabilities[token - OFFSET]
        score |= children
        frontier = dict(sorted(children.items(), key=lambda item: -item[1])[: shape.width])
    return sorted(score, key=lambda path: -score[path])[: shape.nodes]


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 4),
    nodes=st.integers(1, 14),
    width=st.integers(1, 4),
    size=st.integers(2, 6),
    seed=st.integers(0, 10**6),
)
def test_a_dynamic_tree_follows_the_transcription(length: int, nodes: int, width: int, size: int, seed: int) -> None:
    table, shape = Table(size, seed), DynamicShape(nodes, width)
    plan = DraftPlan(length=length, shape=shape, sampling=Sampling(temperature=1.0))  # which changes nothing
    tree = drafted(table, plan)
    assert plan.draws == 0 and tree.proposals is None
    if width <= size:
        assert tree.drafted.tolist() == [plan.nodes] * 2
    for row, newest in enumerate((1, 2)):
        mine = paths_of(tree, row)  # checks that they hang together
        assert mine[0] == (newest,)
        assert set(mine[1:]) == set(slow_dynamic(table, newest, length, shape))
        assert len(mine) == len(set(mine))
        for first, second in pairwise(mine):
            if first[:-1] == second[:-1]:  # siblings: the likelier one is tried first
                logits = table.logits(first[:-1])
                assert logits[first[-1] - OFFSET] > logits[second[-1] - OFFSET]


# --- drawn drafts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [None, cartesian([3, 2, 1]), SPARSE], ids=["chain", "cartesian", "sparse"])
@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0), Sampling(temperature=0.5, top_k=4)], ids=str)
def test_proposals_are_what_children_were_drawn_from(shape: TreeShape | None, sampling: Sampling) -> None:
    table = Table(6)
    tree = drafted(table, DraftPlan(length=3, shape=shape, sampling=sampling), batch=6)
    assert tree.proposals is not None and tree.proposals.dtype == torch.float32
    assert tree.proposals.shape == (*tree.tokens.shape, V)
    for row in range(6):
        paths, parents = paths_of(tree, row), tree.parents[row].tolist()
        for n, path in enumerate(paths):
            children = [m for m in range(len(paths)) if parents[m] == n]
            if children:
                expected = [*[0.0] * OFFSET, *table.probabilities(path, sampling), *[0.0] * (V - OFFSET - 6)]
                assert tree.proposals[row, n].tolist() == pytest.approx(expected, rel=1e-6)
                drawn = [paths[m][-1] for m in children]
                assert len(set(drawn)) == len(drawn), "siblings are distinct"
                assert all(expected[token] > 0 for token in drawn)


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Pearson's chi-square test."""
    expected = probabilities * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))


def test_siblings_are_drawn_one_after_the_other_without_replacement() -> None:
    """All ordered triples of four tokens, at both levels of a tree whose second level depends on the first."""
    table, sampling, batch = Table(4), Sampling(temperature=1.0), 3000
    plan = DraftPlan(length=2, shape=TreeShape((*cartesian([3]).nodes, (1, 0), (1, 1))), sampling=sampling)
    uniforms = torch.rand(batch, plan.draws, generator=torch.Generator().manual_seed(0))
    tree = build_tree(table, Context(torch.full((batch,), NEWEST)), State([]), plan, uniforms)
    q = table.probabilities((NEWEST,), sampling)
    drawn = [tuple(row) for row in (tree.tokens[:, 1:4] - OFFSET).tolist()]
    outcomes = list(permutations(range(4), 3))
    chance = [q[a] * q[b] / (1 - q[a]) * q[c] / (1 - q[a] - q[b]) for a, b, c in outcomes]
    assert math.isclose(sum(chance), 1, rel_tol=1e-6)
    counts = torch.tensor([drawn.count(outcome) for outcome in outcomes]).double()
    assert p_value(counts, torch.tensor(chance).double()) > 1e-4
    # Behind the second child, whichever token it is: pairs, independent of what its siblings are.
    parent = max(range(4), key=[second for _, second, _ in drawn].count)
    q = table.probabilities((NEWEST, parent + OFFSET), sampling)
    behind = [tuple(row) for row in (tree.tokens[tree.tokens[:, 2] == parent + OFFSET, 4:] - OFFSET).tolist()]
    pairs = list(permutations(range(4), 2))
    counts = torch.tensor([behind.count(pair) for pair in pairs]).double()
    assert p_value(counts, torch.tensor([q[a] * q[b] / (1 - q[a]) for a, b in pairs]).double()) > 1e-4


class OneRow(Table):
    """Like Medusa: the same logits for all nodes of a depth, as one row that is ``expanded`` to them or as copies."""

    def __init__(self, size: int, *, expanded: bool) -> None:
        super().__init__(size)
        self.expanded = expanded

    def following(self, state: Any, tokens: Tensor, parents: Tensor) -> Tensor:
        logits = super().following(state, tokens, parents)[:, :1].expand(-1, tokens.shape[1], -1)
        return logits if self.expanded else logits.contiguous()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.8)], ids=["greedy", "drawn"])
def test_a_row_that_holds_for_all_nodes_of_a_depth_is_looked_at_once(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = DraftPlan(length=3, shape=cartesian([3, 2, 2]), sampling=sampling)
    copies = drafted(OneRow(6, expanded=False), plan, batch=4)
    shapes: list[tuple[int, ...]] = []
    compute = Sampling.probabilities

    def watched(self: Sampling, logits: Tensor) -> Tensor:
        shapes.append(tuple(logits.shape))
        return compute(self, logits)

    monkeypatch.setattr(Sampling, "probabilities", watched)
    tree = drafted(OneRow(6, expanded=True), plan, batch=4)
    assert shapes == ([] if sampling.is_greedy else [(4, 1, 6)] * 3)
    assert torch.equal(tree.tokens, copies.tokens) and torch.equal(tree.real, copies.real)
    if not sampling.is_greedy:
        assert tree.proposals is not None and copies.proposals is not None
        assert torch.equal(tree.proposals, copies.proposals)


def test_where_no_token_is_left_a_node_is_filler_and_so_is_what_follows_it() -> None:
    table = Table(6)
    plan = DraftPlan(length=2, shape=cartesian([3, 2]), sampling=Sampling(temperature=1.0, top_k=2))
    tree = drafted(table, plan, batch=4)
    assert tree.real.tolist() == [[True] * 3 + [False] + [True] * 4 + [False] * 2] * 4
    assert tree.drafted.tolist() == [6] * 4


@pytest.mark.parametrize("shape", [None, cartesian([3, 2, 1])], ids=["chain", "cartesian"])
def test_a_sequence_s_drafts_depend_on_its_own_numbers_alone(shape: TreeShape | None) -> None:
    table, plan = Table(6), DraftPlan(length=3, shape=shape, sampling=Sampling(temperature=1.0))
    uniforms = torch.rand(5, plan.draws, generator=torch.Generator().manual_seed(0))
    newest = torch.tensor([1, 2, 3, 1, 2])
    together = build_tree(table, Context(newest), State([]), plan, uniforms)
    for row in range(5):
        alone = build_tree(table, Context(newest[row : row + 1]), State([]), plan, uniforms[row : row + 1])
        assert alone.tokens[0].tolist() == together.tokens[row].tolist()


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "nodes", "slots", "draws"),
    [
        (None, 3, 3, 3),
        (cartesian([3, 2, 1]), 15, 15, 15),
        (SPARSE, 7, 7, 7),
        (DynamicShape(60, 3), 21, 9, 0),
        (DynamicShape(8, 3), 8, 9, 0),
    ],
)
def test_a_plan_knows_its_sizes(shape: TreeShape | DynamicShape | None, nodes: int, slots: int, draws: int) -> None:
    drawn = DraftPlan(length=3, shape=shape, sampling=Sampling(temperature=1.0))
    assert (drawn.nodes, drawn.slots, drawn.draws) == (nodes, slots, draws)
    assert DraftPlan(length=3, shape=shape).draws == 0
    assert drafted(Table(6), drawn).drafted.tolist() == [nodes] * 2


def test_plans_that_cannot_be_are_refused() -> None:
    stop = EarlyStop(calibration=Calibration((1.0,) * 3, (0.0,) * 3))
    with pytest.raises(ValueError, match="draft length must be at least 1, got 0"):
        DraftPlan(length=0)
    with pytest.raises(ValueError, match="a draft tree of depth 2 does not go with draft length 3"):
        DraftPlan(length=3, shape=cartesian([2, 2]))
    for shape in (cartesian([2, 2, 2]), DynamicShape(4, 2)):
        with pytest.raises(ValueError, match="only chains stop early"):
            DraftPlan(length=3, shape=shape, stop=stop)
    for nodes, width in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match=f"at least 1 node and width 1, got {nodes} and {width}"):
            DynamicShape(nodes, width)
