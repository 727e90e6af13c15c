"""Decoding with draft trees: the tokens of the target alone, in one pass per step, and counts of what was kept."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdraft.quant.target import LowBitTarget, TargetStates
from bitdraft.speculators.base import DraftHead, rows_at
from bitdraft.speculators.decode import Generation, Rule, generate
from bitdraft.speculators.drafting import DraftPlan, DynamicShape
from bitdraft.speculators.metrics import Acceptance
from bitdraft.speculators.sampling import Sampling
from bitdraft.speculators.tree import DraftTree, chain_tree
from bitdraft.speculators.tree_shapes import TreeShape, cartesian, sparse

NEW_TOKENS = 14
Prompts = list[list[int]]
QuickTarget = Callable[[torch.dtype], LowBitTarget]
QuickHead = Callable[[str, LowBitTarget], DraftHead]
Scripted = Callable[[LowBitTarget, Sequence[list[int]], Callable[[int], Sequence[int]]], Any]

SPARSE = sparse([[0.5, 0.3, 0.15], [0.4, 0.2], [0.3, 0.1]], 7)
SHAPES: dict[str, TreeShape | DynamicShape | None] = {
    "chain": None,
    "cartesian": cartesian([3, 2, 1]),
    "sparse": SPARSE,
    "dynamic": DynamicShape(9, 3),
}
KINDS = ["eagle3", "eagle3 reduced", "eagle3 low rank", "medusa", "medusa linked"]
each_shape = pytest.mark.parametrize("shape", SHAPES)
each_kind = pytest.mark.parametrize("kind", KINDS)


def decode(
    target: LowBitTarget,
    drafter: Any,
    prompts: Prompts,
    plan: DraftPlan | None,
    *,
    batch_size: int = 8,
    new_tokens: int = NEW_TOKENS,
    rule: Rule | None = None,
) -> list[Generation]:
    done, _ = generate(
        target,
        drafter,
        prompts,
        plan=plan,
        rule=rule,
        max_new_tokens=new_tokens,
        end_ids=set(),
        batch_size=batch_size,
    )
    return done


def answers(generations: Sequence[Generation]) -> Prompts:
    return [g.tokens for g in generations]


@pytest.fixture(scope="module")
def exact(quick_target: QuickTarget) -> LowBitTarget:
    return quick_target(torch.float64)


@pytest.fixture(scope="module")
def plain(exact: LowBitTarget, quick_prompts: Prompts) -> Prompts:
    """The target's own answers, longer than any test asks for."""
    return answers(decode(exact, None, quick_prompts, None, new_tokens=NEW_TOKENS + 12))


@pytest.fixture(scope="module")
def texts(quick_prompts: Prompts, plain: Prompts) -> Prompts:
    return [[*prompt, *answer] for prompt, answer in zip(quick_prompts, plain, strict=True)]


# --- the tree itself --------------------------------------------------------------------------------------------------


def test_a_chain_is_a_tree_in_which_every_node_follows_the_one_before() -> None:
    tree = chain_tree(torch.tensor([7, 8]), torch.tensor([[1, 2, 3], [4, 5, 6]]), lengths=torch.tensor([3, 1]))
    assert tree.tokens.tolist() == [[7, 1, 2, 3], [8, 4, 5, 6]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2]] * 2
    assert tree.depth.tolist() == [[0, 1, 2, 3]] * 2
    assert tree.real.tolist() == [[True] * 4, [True, True, False, False]]
    assert tree.drafted.tolist() == [3, 1]
    assert tree.is_chain
    assert chain_tree(torch.tensor([7, 8]), torch.empty(2, 0, dtype=torch.int64)).tokens.tolist() == [[7], [8]]


def random_parents(generator: torch.Generator, batch: int, nodes: int) -> Tensor:
    parents = [[-1, *(int(torch.randint(n, (), generator=generator)) for n in range(1, nodes))] for _ in range(batch)]
    return torch.tensor(parents)


def random_paths(generator: torch.Generator, parents: Tensor) -> tuple[Tensor, Tensor]:
    """Per row the path to some node, its last node repeated, and how many of its nodes are kept (some rows none)."""
    paths = []
    for row in parents.tolist():
        path = [int(torch.randint(len(row), (), generator=generator))]
        while path[0] > 0:
            path.insert(0, row[path[0]])
        paths.append(path)
    kept = torch.tensor([len(path) * int(torch.rand((), generator=generator) < 0.8) for path in paths])
    longest = max(map(len, paths))
    return torch.tensor([[*path, *path[-1:] * (longest - len(path))] for path in paths]), kept


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), batch=st.integers(1, 4))
def test_after_a_tree_s_pass_the_cache_is_that_of_the_path_alone(
    quick_target: QuickTarget, seed: int, batch: int
) -> None:
    """Two tree passes, each followed by a path that is kept; then a pass over the same tokens behind a fresh cache."""
    target, generator = quick_target(torch.float64), torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (batch,), generator=generator)
    sequences = [torch.randint(12, (int(n),), generator=generator).tolist() for n in lengths]
    cache = target.new_cache(64)
    target.prefill(padded(sequences), lengths, cache=cache)
    for nodes in (7, 5):
        parents = random_parents(generator, batch, nodes)
        tokens = torch.randint(12, (batch, nodes), generator=generator)
        in_tree = target.states(tokens, cache=cache, lengths=lengths, parents=parents, capture=(0, 1))
        path, kept = random_paths(generator, parents)
        alone = fresh_pass(target, sequences, tokens.gather(1, path))
        for b, count in enumerate(kept.tolist()):
            torch.testing.assert_close(
                in_tree.captured[b, path[b, :count]], alone.captured[b, :count], rtol=1e-12, atol=1e-12
            )
            sequences[b] += tokens[b, path[b, :count]].tolist()
        cache.commit(path, kept)
        lengths = lengths + kept
    coming = torch.randint(12, (batch, 3), generator=generator)
    after = target.states(coming, cache=cache, lengths=lengths)
    expected = fresh_pass(target, sequences, coming)
    torch.testing.assert_close(after.last_hidden, expected.last_hidden, rtol=1e-12, atol=1e-12)


def padded(sequences: Prompts) -> Tensor:
    longest = max(map(len, sequences))
    return torch.tensor([[*s, *[0] * (longest - len(s))] for s in sequences])


def fresh_pass(target: LowBitTarget, sequences: Prompts, coming: Tensor) -> TargetStates:
    """A pass over ``coming`` behind ``sequences`` that were just read."""
    cache, lengths = target.new_cache(64), torch.tensor([len(s) for s in sequences])
    target.prefill(padded(sequences), lengths, cache=cache)
    return target.states(coming, cache=cache, lengths=lengths, capture=(0, 1))


# --- decoding ---------------------------------------------------------------------------------------------------------


@each_shape
@each_kind
def test_drafts_change_no_token_and_batching_changes_no_count(
    quick_target: QuickTarget, quick_head: QuickHead, quick_prompts: Prompts, plain: Prompts, kind: str, shape: str
) -> None:
    """fp64 in batches of 1, 3 and 8; fp32 in one of 8."""
    plan = DraftPlan(length=3, shape=SHAPES[shape])
    expected = [answer[:8] for answer in plain]
    for dtype, sizes in ((torch.float64, (1, 3, 8)), (torch.float32, (8,))):
        target = quick_target(dtype)
        head = quick_head(kind, target)
        runs = [decode(target, head, quick_prompts, plan, batch_size=size, new_tokens=8) for size in sizes]
        assert [answers(run) for run in runs] == [expected] * len(sizes)
        assert all(run == runs[0] for run in runs)
        assert sum(g.counts.accepted for g in runs[0]) > 0, "no draft was accepted: nothing was compared"
        assert all(g.counts.drafted == g.counts.passes * plan.nodes for g in runs[0])


@each_shape
@each_kind
def test_sampled_answers_do_not_depend_on_the_batch(
    exact: LowBitTarget, quick_head: QuickHead, quick_prompts: Prompts, kind: str, shape: str
) -> None:
    sampling = Sampling(temperature=1.0)
    plan, head = DraftPlan(length=3, shape=SHAPES[shape], sampling=sampling), quick_head(kind, exact)
    one, all_at_once, other = (
        decode(exact, head, quick_prompts, plan, batch_size=size, new_tokens=8, rule=Rule(sampling=sampling, seed=seed))
        for size, seed in ((1, 3), (8, 3), (8, 4))
    )
    assert one == all_at_once
    assert answers(other) != answers(one), "another seed, other answers"


@each_shape
def test_every_step_is_one_pass_of_the_target(
    exact: LowBitTarget, quick_head: QuickHead, quick_prompts: Prompts, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    run = exact.states

    def states(input_ids: Tensor, **options: Any) -> TargetStates:
        passes.append(input_ids.shape[1])
        return run(input_ids, **options)

    monkeypatch.setattr(exact, "states", states)
    plan, head = DraftPlan(length=3, shape=SHAPES[shape]), quick_head("eagle3", exact)
    passes.clear()  # making the head took one
    done = decode(exact, head, quick_prompts, plan)
    assert passes[1:] == [1 + plan.nodes] * max(g.counts.passes for g in done), "and one for the prompts"


# --- counts -----------------------------------------------------------------------------------------------------------


def uneven(position: int) -> list[int]:
    """At which rank the right token stands at each depth; neighbouring sequences differ, some depths lack it."""
    return [(position * 5 + depth * 3) % 4 for depth in range(3)]


def walk(shape: TreeShape, ranks: Callable[[int], Sequence[int]], prompt: int, new_tokens: int) -> Acceptance:
    """What decoding counts, one pass after the other."""
    depth = shape.depth
    written, passes, accepted_at, tried_at = 1, 0, [0] * depth, [0] * depth
    while written < new_tokens:
        path: tuple[int, ...] = ()
        coming = list(ranks(prompt + written))
        while len(path) < len(coming) and (*path, coming[len(path)]) in shape.nodes:
            path = (*path, coming[len(path)])
        tried = len(path) + ((*path, 0) in shape.nodes)
        passes += 1
        accepted_at = [a + (i < len(path)) for i, a in enumerate(accepted_at)]
        tried_at = [t + (i < tried) for i, t in enumerate(tried_at)]
        written += len(path) + 1
    return Acceptance(depth, 1, passes, passes * len(shape), tuple(accepted_at), tuple(tried_at))


@pytest.mark.parametrize("shape", [cartesian([3, 2, 1]), cartesian([2, 2, 2]), SPARSE], ids=len)
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_counts_are_those_of_a_walk_over_each_answer(
    exact: LowBitTarget,
    scripted: Scripted,
    quick_prompts: Prompts,
    plain: Prompts,
    texts: Prompts,
    shape: TreeShape,
    batch_size: int,
) -> None:
    plan = DraftPlan(length=shape.depth, shape=shape)
    done = decode(exact, scripted(exact, texts, uneven), quick_prompts, plan, batch_size=batch_size)
    assert answers(done) == [answer[:NEW_TOKENS] for answer in plain]
    for prompt, generation in zip(quick_prompts, done, strict=True):
        assert generation.counts == walk(shape, uneven, len(prompt), NEW_TOKENS)
    accepted = {g.counts.accepted for g in done}
    assert len(accepted) > 1, "sequences should accept different numbers of drafts"


@pytest.mark.parametrize("ranks", [[0, 0, 0], [2, 1, 0], [1, 1], [2], [3, 0, 0], [0, 2, 0], []], ids=str)
def test_the_right_path_is_found_wherever_it_stands(
    exact: LowBitTarget,
    scripted: Scripted,
    quick_prompts: Prompts,
    plain: Prompts,
    texts: Prompts,
    ranks: list[int],
) -> None:
    """Wrong nodes have children with the right tokens, which must not count."""
    shape = cartesian([3, 2, 1])
    gained = next(
        (i for i, (rank, width) in enumerate(zip(ranks, (3, 2, 1), strict=False)) if rank >= width), len(ranks)
    )
    done = decode(exact, scripted(exact, texts, lambda _: ranks), quick_prompts, DraftPlan(length=3, shape=shape))
    assert answers(done) == [answer[:NEW_TOKENS] for answer in plain]
    for generation in done:
        passes = -(-(NEW_TOKENS - 1) // (gained + 1))
        assert generation.counts.passes == passes
        assert generation.counts.accepted_at == tuple(passes * (i < gained) for i in range(3))
        assert generation.counts.length == gained + 1


def test_an_answer_ends_at_its_end_token_in_the_middle_of_a_path(
    exact: LowBitTarget, scripted: Scripted, quick_prompts: Prompts, plain: Prompts, texts: Prompts
) -> None:
    ends = {plain[0][5], plain[3][2]}
    expected = []
    for answer in plain:
        stop = next((i for i, token in enumerate(answer[:NEW_TOKENS]) if token in ends), NEW_TOKENS - 1)
        expected.append(answer[: stop + 1])
    assert len({len(answer) for answer in expected}) > 2, "answers should end at different times"
    drafter = scripted(exact, texts, lambda _: [2, 1, 0])
    plan = DraftPlan(length=3, shape=cartesian([3, 2, 1]))
    done, _ = generate(exact, drafter, quick_prompts, plan=plan, max_new_tokens=NEW_TOKENS, end_ids=ends, batch_size=8)
    assert answers(done) == expected
    assert all(more >= fewer for more, fewer in pairwise(drafter.batches))
    assert drafter.batches[-1] < 8, "finished answers should leave the batch"


def test_a_finished_sequence_that_rides_along_never_outgrows_the_cache(
    exact: LowBitTarget, scripted: Scripted, quick_prompts: Prompts, plain: Prompts, texts: Prompts
) -> None:
    """The longest prompt accepts every draft and ends first, deep into its last pass; the others accept nothing."""
    fast = max(map(len, quick_prompts))
    drafter = scripted(exact, texts, lambda position: [2, 1, 0] if position >= fast else [])
    done = decode(exact, drafter, quick_prompts, DraftPlan(length=3, shape=cartesian([3, 2, 1])), new_tokens=8)
    assert answers(done) == [answer[:8] for answer in plain]


@each_kind
def test_answers_may_end_before_anything_is_drafted(
    exact: LowBitTarget, quick_head: QuickHead, quick_prompts: Prompts, plain: Prompts, kind: str
) -> None:
    """The token that the prompt gives ends three answers, which leave before the drafter has seen anything."""
    ends = {plain[0][0], plain[1][0]}
    expected = []
    for answer in plain:
        stop = next((i for i, token in enumerate(answer[:6]) if token in ends), 5)
        expected.append(answer[: stop + 1])
    assert sum(len(answer) == 1 for answer in expected) == 3
    plan = DraftPlan(length=3, shape=SPARSE)
    done, _ = generate(
        exact, quick_head(kind, exact), quick_prompts, plan=plan, max_new_tokens=6, end_ids=ends, batch_size=8
    )
    assert answers(done) == expected


def test_a_tree_deeper_than_the_head_is_refused(
    exact: LowBitTarget, quick_head: QuickHead, quick_prompts: Prompts
) -> None:
    deep = DraftPlan(length=5, shape=cartesian([1] * 5))
    with pytest.raises(ValueError, match=r"a draft tree of depth 5 is more than the medusa drafter has \(1 … 4\)"):
        decode(exact, quick_head("medusa", exact), quick_prompts, deep)


def test_a_tree_s_states_go_to_the_drafter_along_the_accepted_path(
    exact: LowBitTarget, scripted: Scripted, quick_prompts: Prompts, texts: Prompts
) -> None:
    """What the drafter is shown after a pass is what a pass over the text alone gives."""
    drafter = scripted(exact, texts, uneven)
    propose, compared = drafter.propose, []

    def checked(context: Any, state: Any, plan: DraftPlan, uniforms: Tensor) -> DraftTree:
        tree: DraftTree = propose(context, state, plan, uniforms)
        for row, known in enumerate(state.sequences):
            count, start = int(context.newest[row]) + 1, int(context.start[row])
            if known not in [text[: len(known)] for text in texts]:
                continue  # a finished one
            whole = exact.states(torch.tensor([known[:-1]]), capture=drafter.capture_layers)
            at = torch.arange(start, start + count)[None]
            assert start + count == len(known) - 1
            for shown, expected in ((context.captured, whole.captured), (context.last_hidden, whole.last_hidden)):
                torch.testing.assert_close(shown[row, :count], rows_at(expected, at)[0], rtol=1e-12, atol=1e-12)
            compared.append(count)
        return tree

    drafter.propose = checked
    decode(exact, drafter, quick_prompts, DraftPlan(length=3, shape=cartesian([3, 2, 1])))
    assert len(compared) > len(texts) and max(compared[len(texts) :]) > 1
