"""Stores of recurrent and convolution states against a layer that is computed node by node."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.recurrent.node_states import NodeStates
from bitdraft.quant.recurrent.state_store import Nodes, ancestors

WIDTH, KERNEL = 3, 3


def forests(rows: int) -> st.SearchStrategy[list[list[int]]]:
    """Parents of up to 7 nodes for each row, every node behind any earlier one or the past."""
    return st.integers(1, 7).flatmap(
        lambda n: st.lists(
            st.tuples(*(st.integers(-1, i - 1) for i in range(n))).map(list), min_size=rows, max_size=rows
        )
    )


def step(store: NodeStates, x: Tensor) -> Tensor:
    """One token ``[R, C]`` of a layer with both sorts of states, changed in place as transformers' layers do."""
    conv, hidden = store.read(("conv", 0)), store.read(("recurrent", 0))
    if conv is None:
        conv = store.extend_conv(x[..., None], 0, KERNEL)
    else:
        conv.copy_(torch.cat([conv, x[..., None]], dim=-1)[..., -KERNEL:])
    mixed = conv.sum(-1)
    if hidden is None:
        hidden = store.replace_recurrent(mixed, 0)
    else:
        hidden.mul_(0.5).add_(mixed)
    return hidden.clone()


def run(store: NodeStates, nodes: Nodes, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for level in nodes.levels:
        with store.step(level):
            out[level.rows, level.nodes] = step(store, x[level.rows, level.nodes])
    return out


def by_hand(inputs: list[Tensor]) -> Tensor:
    """The layer's output at the end of one sequence."""
    hidden = torch.zeros(WIDTH, dtype=torch.float64)
    for t in range(len(inputs)):
        hidden = 0.5 * hidden + sum(inputs[max(t - KERNEL + 1, 0) : t + 1])
    return hidden


def path_to(parents: list[int], node: int) -> list[int]:
    return [*(path_to(parents, parents[node]) if parents[node] >= 0 else []), node]


@settings(max_examples=60, deadline=None)
@given(first=forests(2), second=forests(2), data=st.data())
def test_any_trees_and_any_paths_equal_the_layer_by_hand(
    first: list[list[int]], second: list[list[int]], data: st.DataObject
) -> None:
    store = NodeStates()
    past: list[list[Tensor]] = [[], []]
    generator = torch.Generator().manual_seed(0)
    for trees in (first, second):
        x = torch.randn(2, len(trees[0]), WIDTH, generator=generator, dtype=torch.float64)
        nodes = Nodes(torch.tensor([len(p) for p in past]), torch.tensor(trees))
        store.begin(nodes)
        out = run(store, nodes, x)
        for row, parents in enumerate(trees):
            for node in range(len(parents)):
                wanted = by_hand([*past[row], *x[row, path_to(parents, node)]])
                torch.testing.assert_close(out[row, node], wanted, rtol=0, atol=1e-12)
        paths = [path_to(parents, data.draw(st.integers(0, len(parents) - 1))) for parents in trees]
        kept = [data.draw(st.integers(0, len(path))) for path in paths]
        longest = max(map(len, paths))
        store.commit(torch.tensor([p + [p[-1]] * (longest - len(p)) for p in paths]), torch.tensor(kept))
        for row, path in enumerate(paths):
            past[row] += x[row, path[: kept[row]]]


@given(forests(2))
def test_levels_hold_every_node_once_behind_its_parent(trees: list[list[int]]) -> None:
    nodes, seen = Nodes(torch.zeros(2, dtype=torch.int64), torch.tensor(trees)), set[tuple[int, int]]()
    for level in nodes.levels:
        found = list(zip(level.rows.tolist(), level.nodes.tolist(), strict=True))
        for row, node in found:
            assert trees[row][node] == -1 or (row, trees[row][node]) in seen
        if level.parents is not None:
            assert level.parents.tolist() == [trees[row][node] for row, node in found]
        assert not seen & set(found)
        seen |= set(found)
    assert len(seen) == 2 * len(trees[0])


@given(forests(2))
def test_ancestors_are_the_nodes_of_the_path(trees: list[list[int]]) -> None:
    for row, parents in zip(ancestors(torch.tensor(trees)), trees, strict=True):
        for node in range(len(parents)):
            assert row[node].nonzero()[:, 0].tolist() == path_to(parents, node)


def test_a_chain_is_the_tree_without_branches() -> None:
    lengths = torch.tensor([4, 0])
    chain, tree = Nodes.chain(lengths, 5), Nodes(lengths, (torch.arange(5) - 1).expand(2, -1))
    assert torch.equal(chain.parents, tree.parents)
    assert torch.equal(chain.lineage, tree.lineage)
    assert torch.equal(chain.depth, tree.depth)
    assert chain.positions.tolist() == [[4, 5, 6, 7, 8], [0, 1, 2, 3, 4]]


def test_what_a_layer_reads_is_its_own_copy() -> None:
    """Neither the snapshot nor a parent or sibling sees what a layer does to the state it was handed."""
    store = NodeStates()
    store.kept = {("recurrent", 0): torch.ones(1, WIDTH)}
    nodes = Nodes(torch.tensor([1]), torch.tensor([[-1, 0, 0]]))
    store.begin(nodes)
    for level in nodes.levels:
        with store.step(level):
            state = store.read(("recurrent", 0))
            assert state is not None
            state += level.nodes[:, None] + 1
    assert store.kept["recurrent", 0].tolist() == [[1.0] * WIDTH]
    assert store.of_nodes["recurrent", 0][0, :, 0].tolist() == [2, 4, 5]


def test_states_of_two_modules_of_one_layer_do_not_mix() -> None:
    """Each module runs all levels by itself, one behind the other."""
    store, nodes = NodeStates(), Nodes(torch.tensor([0]), torch.tensor([[-1, 0]]))
    store.begin(nodes)
    for number, value in ((0, 1.0), (1, 10.0)):
        for level in nodes.levels:
            with store.step(level):
                before = store.read(("recurrent", number))
                store.replace_recurrent(torch.full((1, 1), value) + (0 if before is None else before), number)
    store.commit(torch.tensor([[0, 1]]), torch.tensor([2]))
    assert {key: float(state) for key, state in store.kept.items()} == {("recurrent", 0): 2.0, ("recurrent", 1): 20.0}


def test_a_recurrent_state_keeps_its_first_dtype() -> None:
    store = NodeStates()
    store.replace_recurrent(torch.zeros(1, 2, dtype=torch.float32), 0)
    assert store.replace_recurrent(torch.ones(1, 2, dtype=torch.bfloat16), 0).dtype == torch.float32


def test_commit_lets_go_of_the_nodes_states() -> None:
    store, nodes = NodeStates(), Nodes(torch.tensor([0]), torch.tensor([[-1, 0]]))
    store.begin(nodes)
    run(store, nodes, torch.ones(1, 2, WIDTH, dtype=torch.float64))
    held = [weakref.ref(state) for state in store.of_nodes.values()]
    store.commit(torch.tensor([[0]]), torch.tensor([1]))
    gc.collect()
    assert held and all(ref() is None for ref in held)


def test_prompts_leave_no_more_than_the_state() -> None:
    """The state is no view of the whole prompt's convolution inputs."""
    store = NodeStates()
    store.begin(Nodes.chain(torch.tensor([0]), 50, stays=True))
    both = store.extend_conv(torch.randn(1, 2, 50), 0, KERNEL)
    assert both.shape == (1, 2, 50)
    assert store.kept["conv", 0].untyped_storage().nbytes() == 2 * KERNEL * 4
    with pytest.raises(AssertionError, match="empty cache"):
        store.begin(Nodes.chain(torch.tensor([50]), 2, stays=True))


def test_a_module_that_runs_outside_of_a_level_is_noticed() -> None:
    store = NodeStates()
    store.begin(Nodes.chain(torch.tensor([0]), 2))
    with pytest.raises(AssertionError, match="level by level"):
        store.read(("conv", 0))


def test_a_store_of_a_module_s_own_kind_is_told_everything() -> None:
    class Noting(NodeStates):
        def __init__(self) -> None:
            super().__init__()
            self.told: list[str] = []

        def begin(self, nodes: Nodes) -> None:
            self.told.append(f"begin {nodes.parents.tolist()}")

        def commit(self, path: Tensor, kept: Tensor) -> None:
            self.told.append(f"commit {path.tolist()} {kept.tolist()}")

    cache = SlotCache([Noting, "nothing"], slots=8)
    cache.begin(torch.tensor([0]), 2)
    cache.commit(torch.tensor([[0, 1]]), torch.tensor([2]))
    cache.begin(torch.tensor([2]), 2, torch.tensor([[-1, 0]]))
    assert cache.layers[0].told == ["begin [[-1, 0]]", "commit [[0, 1]] [2]", "begin [[-1, 0]]"]
