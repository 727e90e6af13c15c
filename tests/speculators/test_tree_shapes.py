"""Shapes of draft trees: what they hold, that the sparse ones are the best, and what is refused."""

from collections.abc import Iterator
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdraft.speculators.tree_shapes import TreeShape, cartesian, sparse

Node = tuple[int, ...]
probabilities = st.floats(0.01, 1)
accuracies = st.lists(st.lists(probabilities, min_size=1, max_size=3), min_size=1, max_size=3)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_a_cartesian_tree_holds_every_combination(widths: list[int]) -> None:
    shape = cartesian(widths)
    assert len(shape) == sum(prod(widths[: d + 1]) for d in range(len(widths)))
    assert shape.depth == len(widths)
    for depth in range(1, len(widths) + 1):
        assert shape.level(depth) == list(product(*map(range, widths[:depth])))
    assert [node for d in range(1, shape.depth + 1) for node in shape.level(d)] == list(shape.nodes)


@given(st.permutations(cartesian([2, 1, 2]).nodes))
def test_nodes_are_sorted_whatever_their_order_was(nodes: list[Node]) -> None:
    assert TreeShape(tuple(nodes)) == cartesian([2, 1, 2])


def connected_trees(accuracy: list[list[float]], nodes: int) -> Iterator[frozenset[Node]]:
    """Every set of ``nodes`` paths that holds the parent of each; siblings may be left out."""
    universe = [
        node
        for depth in range(1, len(accuracy) + 1)
        for node in product(*(range(len(row)) for row in accuracy[:depth]))
    ]
    found: set[frozenset[Node]] = {frozenset()}
    for _ in range(nodes):
        found = {
            chosen | {node}
            for chosen in found
            for node in universe
            if node not in chosen and (len(node) == 1 or node[:-1] in chosen)
        }
    yield from found


def expected_length(nodes: Iterator[Node] | frozenset[Node], accuracy: list[list[float]]) -> float:
    """Accepted tokens per pass: one for every node whose path is right."""
    return sum(prod(accuracy[d][rank] for d, rank in enumerate(node)) for node in nodes)


@settings(max_examples=40, deadline=None)
@given(accuracies, st.integers(1, 4))
def test_no_tree_of_as_many_nodes_is_better_than_the_sparse_one(accuracy: list[list[float]], nodes: int) -> None:
    accuracy = [sorted(row, reverse=True) for row in accuracy]  # rank 0 is the best
    shape = sparse(accuracy, nodes)
    trees = list(connected_trees(accuracy, nodes))
    if not trees:  # fewer nodes than asked for exist: all of them
        assert len(shape) == sum(prod(len(row) for row in accuracy[: d + 1]) for d in range(len(accuracy)))
        return
    assert len(shape) == nodes
    best = max(expected_length(tree, accuracy) for tree in trees)
    assert expected_length(frozenset(shape.nodes), accuracy) == pytest.approx(best)


@settings(max_examples=40, deadline=None)
@given(accuracies, st.integers(0, 2), st.data())
def test_a_sparse_tree_of_a_given_depth_is_the_best_with_a_path_that_deep(
    accuracy: list[list[float]], more: int, data: st.DataObject
) -> None:
    accuracy = [sorted(row, reverse=True) for row in accuracy]
    depth = data.draw(st.integers(1, len(accuracy)))
    spine = {(0,) * d for d in range(1, depth + 1)}
    shape = sparse(accuracy, depth + more, depth=depth)
    trees = [tree for tree in connected_trees(accuracy, depth + more) if spine <= tree]
    assert spine <= set(shape.nodes)
    if trees:
        assert len(shape) == depth + more
        best = max(expected_length(tree, accuracy) for tree in trees)
        assert expected_length(frozenset(shape.nodes), accuracy) == pytest.approx(best)


@given(accuracies, st.integers(1, 12))
def test_a_sparse_tree_grows_node_by_node(accuracy: list[list[float]], nodes: int) -> None:
    smaller, larger = sparse(accuracy, nodes), sparse(accuracy, nodes + 1)
    assert set(smaller.nodes) <= set(larger.nodes)
    assert len(larger) <= len(smaller) + 1


def test_a_sparse_tree_never_takes_a_worse_rank_first() -> None:
    """Measured accuracies need not fall with the rank, the draft's order does."""
    assert sparse([[0.1, 0.6]], 1).nodes == ((0,),)
    assert sparse([[0.1, 0.6], [0.9]], 3).nodes == ((0,), (1,), (0, 0))


def test_a_sparse_tree_of_an_easy_text_is_a_chain() -> None:
    assert sparse([[0.9, 0.1]] * 4, 4) == cartesian([1, 1, 1, 1])
    assert sparse([[0.3, 0.29, 0.28, 0.27], [0.1]], 4) == cartesian([4])


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((), "a draft tree needs at least one node, and none twice"),
        (((0,), (0,)), "a draft tree needs at least one node, and none twice"),
        (((),), r"draft tree: \[\] is not a path of ranks from 0 on"),
        (((0,), (-1,)), r"draft tree: \[-1\] is not a path of ranks from 0 on"),
        (((0,), (1, 0)), r"draft tree: \[1, 0\] lacks its parent or a better sibling"),
        (((0,), (2,)), r"draft tree: \[2\] lacks its parent or a better sibling"),
        (((0,), (0, 1)), r"draft tree: \[0, 1\] lacks its parent or a better sibling"),
    ],
)
def test_what_is_no_tree_is_refused(nodes: tuple[Node, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeShape(nodes)


def test_sizes_out_of_range_are_refused() -> None:
    for widths in ([], [2, 0]):
        with pytest.raises(ValueError, match=r"tree widths must be at least 1, got \["):
            cartesian(widths)
    for nodes, depth, least in ((0, None, 1), (1, 2, 2)):
        with pytest.raises(ValueError, match=f"a draft tree of depth .* needs at least {least} nodes, got {nodes}"):
            sparse([[0.5], [0.5]], nodes, depth=depth)
