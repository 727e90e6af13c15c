"""Verification against slow transcriptions that walk one sequence's tree in plain Python."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdraft.speculators.sampling import draw
from bitdraft.speculators.tree import DraftTree, chain_tree
from bitdraft.speculators.verify import Verdict, greedy, sampled, typical, uniforms_needed

V = 4


@dataclass(frozen=True)
class Case:
    """A random batch: trees with filler and repeated siblings, distributions with zeros, and uniforms."""

    tree: DraftTree
    target: Tensor  # [B, N, V] fp64
    uniforms: Tensor  # [B, N] fp64


def as_given(probabilities: Tensor) -> Tensor:
    """For targets that are given as probabilities."""
    return probabilities


def random_distributions(generator: torch.Generator, *shape: int) -> Tensor:
    """fp64 rows that sum to 1; a third of the entries are 0."""
    p = torch.rand(*shape, V, generator=generator, dtype=torch.float64)
    p = p.masked_fill(torch.rand(p.shape, generator=generator) < 1 / 3, 0)
    p[..., 0] += 0.01  # something is left
    return p / p.sum(-1, keepdim=True)


@st.composite
def cases(draw_: st.DrawFn, *, proposals: bool | None = None) -> Case:
    batch, nodes = draw_(st.integers(1, 4)), draw_(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw_(st.integers(0, 2**32)))
    parents, depth = torch.full((batch, nodes), -1), torch.zeros(batch, nodes, dtype=torch.int64)
    real = torch.rand(batch, nodes, generator=generator) < 0.8
    real[:, 0] = True
    bushy = draw_(st.booleans())
    for b in range(batch):
        for n in range(1, nodes):
            low = 0 if bushy else max(0, n - 2)
            parents[b, n] = torch.randint(low, n, (), generator=generator)
            depth[b, n] = depth[b, parents[b, n]] + 1
            real[b, n] &= real[b, parents[b, n]]
    tree = DraftTree(torch.randint(V, (batch, nodes), generator=generator), parents, depth, real)
    if draw_(st.booleans()) if proposals is None else proposals:
        tree = replace(tree, proposals=random_distributions(generator, batch, nodes))
    uniforms = torch.rand(batch, nodes, generator=generator, dtype=torch.float64)
    return Case(tree, random_distributions(generator, batch, nodes), uniforms)


def rows_of(case: Case, rows: list[int]) -> Case:
    tree = case.tree
    proposals = None if tree.proposals is None else tree.proposals[rows]
    kept = DraftTree(tree.tokens[rows], tree.parents[rows], tree.depth[rows], tree.real[rows], proposals)
    return Case(kept, case.target[rows], case.uniforms[rows])


Rule = Callable[[Case], Verdict]
RULES: list[Rule] = [
    lambda case: greedy(case.tree, case.target),
    lambda case: sampled(case.tree, case.target, case.uniforms, as_given),
    lambda case: typical(case.tree, case.target, case.uniforms, as_given, epsilon=0.2, delta=0.5),
]


def told(verdict: Verdict) -> list[tuple[list[int], int]]:
    """Per sequence: the nodes of the path and the bonus."""
    rows = zip(verdict.path.tolist(), verdict.accepted.tolist(), verdict.bonus.tolist(), strict=True)
    return [(path[: accepted + 1], bonus) for path, accepted, bonus in rows]


# --- one sequence at a time -------------------------------------------------------------------------------------------


def paths_of(parents: list[int], real: list[bool]) -> list[list[int]]:
    """The path from the root to every real node."""
    paths: list[list[int]] = []
    for n, parent in enumerate(parents):
        paths.append([*paths[parent], n] if n else [0])
    return [path for path in paths if real[path[-1]]]


def slow_greedy(tokens: list[int], parents: list[int], real: list[bool], logits: list[list[float]]) -> list[int]:
    """Of all paths on which the target agrees, the longest."""
    best = [0]
    for path in paths_of(parents, real):
        agrees = all(
            tokens[n] == max(range(V), key=lambda x, row=logits[parents[n]]: row[x])  # type: ignore[misc]
            for n in path[1:]
        )
        if agrees and len(path) > len(best):
            best = path
    return best


def slow_typical(
    tokens: list[int], parents: list[int], real: list[bool], p: list[list[float]], epsilon: float, delta: float
) -> list[int]:
    """Medusa's rule over all paths: the longest kept one, then the likeliest."""

    def kept(n: int) -> bool:
        row = p[parents[n]]
        entropy = -sum(x * math.log(x) for x in row if x > 0)
        return row[tokens[n]] > min(epsilon, delta * math.exp(-entropy))

    candidates = [path for path in paths_of(parents, real) if all(kept(n) for n in path[1:])]
    return max(candidates, key=lambda path: (len(path), math.prod(p[parents[n]][tokens[n]] for n in path[1:])))


def slow_draw(p: list[float], uniform: float) -> int:
    wanted, mass = uniform * sum(p), 0.0
    for token, x in enumerate(p):
        mass += x
        if x > 0 and mass > wanted:
            return token
    raise AssertionError("nothing to draw")


def normalised(p: list[float]) -> list[float]:
    return [x / sum(p) for x in p]


def slow_sampled(
    tokens: list[int],
    parents: list[int],
    real: list[bool],
    target: list[list[float]],
    proposals: list[list[float]] | None,
    uniforms: list[float],
) -> tuple[list[int], int]:
    path, p = [0], target[0]
    moved = True
    while moved:
        moved, q = False, proposals[path[-1]] if proposals else None
        for n in range(1, len(tokens)):
            if parents[n] != path[-1] or not real[n]:
                continue
            x = tokens[n]
            offered = q[x] if q else 1.0
            if offered == 0:
                continue
            if uniforms[n] * offered < p[x]:
                path.append(n)
                p, moved = target[n], True
                break
            if q:
                left = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
                others = [0 if i == x else b for i, b in enumerate(q)]
                q = normalised(others) if sum(others) else others
            else:
                left = [0 if i == x else a for i, a in enumerate(p)]
            p = normalised(left) if sum(left) else p
    return path, slow_draw(p, uniforms[0])


# --- the transcriptions agree -----------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(cases())
def test_greedy_follows_the_transcription(case: Case) -> None:
    tree, logits = case.tree, (case.target * 8).round()  # few values: ties in the logits too
    # Let the target agree often: most tokens are its own choices.
    choices = logits.argmax(-1).gather(1, tree.parents.clamp(min=0))
    tree = replace(tree, tokens=torch.where(case.uniforms < 0.8, choices, tree.tokens))
    expected = []
    for b in range(len(tree.tokens)):
        path = slow_greedy(tree.tokens[b].tolist(), tree.parents[b].tolist(), tree.real[b].tolist(), logits[b].tolist())
        expected.append((path, int(logits[b, path[-1]].argmax())))
    assert told(greedy(tree, logits)) == expected


@settings(max_examples=300, deadline=None)
@given(cases())
def test_sampled_follows_the_transcription(case: Case) -> None:
    tree = case.tree
    expected = [
        slow_sampled(
            tree.tokens[b].tolist(),
            tree.parents[b].tolist(),
            tree.real[b].tolist(),
            case.target[b].tolist(),
            None if tree.proposals is None else tree.proposals[b].tolist(),
            case.uniforms[b].tolist(),
        )
        for b in range(len(tree.tokens))
    ]
    assert told(sampled(tree, case.target, case.uniforms, as_given)) == expected


@settings(max_examples=200, deadline=None)
@given(cases(), st.floats(0, 0.5), st.floats(0, 1))
def test_typical_follows_the_transcription(case: Case, epsilon: float, delta: float) -> None:
    tree = case.tree
    expected = []
    for b in range(len(tree.tokens)):
        rows = tree.tokens[b].tolist(), tree.parents[b].tolist(), tree.real[b].tolist(), case.target[b].tolist()
        path = slow_typical(*rows, epsilon, delta)
        expected.append((path, slow_draw(rows[3][path[-1]], float(case.uniforms[b, 0]))))
    assert told(typical(tree, case.target, case.uniforms, as_given, epsilon=epsilon, delta=delta)) == expected


# --- laws that every rule obeys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=["greedy", "sampled", "typical"])
@settings(max_examples=60, deadline=None)
@given(case=cases(), data=st.data())
def test_a_verdict_does_not_depend_on_the_rest_of_the_batch(rule: Rule, case: Case, data: st.DataObject) -> None:
    together = told(rule(case))
    rows = data.draw(st.permutations(range(len(together))))
    assert told(rule(rows_of(case, list(rows)))) == [together[b] for b in rows]
    assert [told(rule(rows_of(case, [b])))[0] for b in range(len(together))] == together


@pytest.mark.parametrize("rule", RULES, ids=["greedy", "sampled", "typical"])
@settings(max_examples=60, deadline=None)
@given(case=cases(), extra=st.integers(1, 3))
def test_filler_changes_nothing(rule: Rule, case: Case, extra: int) -> None:
    """A batch is as wide as its widest tree; the others' columns are filled with whatever."""
    tree = case.tree
    batch, nodes = tree.tokens.shape
    filler = torch.zeros(batch, extra, dtype=torch.int64)
    likely = case.target[:, 0].argmax(-1, keepdim=True).expand(-1, extra)
    sharp = torch.full((batch, extra, V), 1 / V, dtype=torch.float64)
    wide = DraftTree(
        torch.cat([tree.tokens, likely], dim=1),
        torch.cat([tree.parents, filler], dim=1),
        torch.cat([tree.depth, filler + nodes], dim=1),
        torch.cat([tree.real, filler.bool()], dim=1),
        None if tree.proposals is None else torch.cat([tree.proposals, sharp], dim=1),
    )
    uniforms = torch.cat([case.uniforms, filler.double()], dim=1)
    assert told(rule(Case(wide, torch.cat([case.target, sharp], dim=1), uniforms))) == told(rule(case))


@pytest.mark.parametrize("rule", RULES, ids=["greedy", "sampled", "typical"])
@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_a_path_descends_and_then_repeats_its_end(rule: Rule, case: Case) -> None:
    verdict, tree = rule(case), case.tree
    assert verdict.path.dtype == verdict.accepted.dtype == verdict.bonus.dtype == torch.int64
    assert verdict.path.shape[1] == int(tree.depth.max()) + 1
    for b, (path, accepted) in enumerate(zip(verdict.path.tolist(), verdict.accepted.tolist(), strict=True)):
        assert path[0] == 0
        assert [int(tree.parents[b, n]) for n in path[1 : accepted + 1]] == path[:accepted]
        assert path[accepted:] == [path[accepted]] * (len(path) - accepted)
        assert tree.real[b, path].all()


def without_repeats(tree: DraftTree) -> DraftTree:
    """The tree less siblings that repeat an earlier one's token, and what hangs below them."""
    real = tree.real.clone()
    for b in range(len(real)):
        seen: set[tuple[int, int]] = set()
        for n in range(1, real.shape[1]):
            place = int(tree.parents[b, n]), int(tree.tokens[b, n])
            real[b, n] &= real[b, place[0]] & (place not in seen)
            if real[b, n]:
                seen.add(place)
    return replace(tree, real=real)


@settings(max_examples=100, deadline=None)
@given(cases(proposals=False))
def test_a_target_without_doubt_is_decoded_greedily(case: Case) -> None:
    """With all mass on one token, all three rules are one."""
    sure = torch.zeros_like(case.target).scatter_(-1, case.target.argmax(-1, keepdim=True), 1.0)
    tree = without_repeats(case.tree)
    expected = told(greedy(tree, sure))
    assert told(sampled(tree, sure, case.uniforms, as_given)) == expected
    assert told(typical(tree, sure, case.uniforms, as_given)) == expected


@settings(max_examples=100, deadline=None)
@given(cases())
def test_logits_become_probabilities_only_where_a_verdict_needs_them(case: Case) -> None:
    """``sampled``: once at every node of the path. ``typical``: at kept nodes that have children, and at the last."""
    tree, (batch, nodes) = case.tree, case.tree.tokens.shape
    numbers = torch.arange(batch * nodes).reshape(batch, nodes, 1).expand(-1, -1, V)  # "logits" that say whose they are
    asked: list[tuple[int, int]] = []

    def distribution(logits: Tensor) -> Tensor:
        asked.extend(divmod(number, nodes) for number in logits[:, 0].tolist())
        return case.target.flatten(0, 1)[logits[:, 0]]

    verdict = sampled(tree, numbers, case.uniforms, distribution)
    assert told(verdict) == told(RULES[1](case))
    assert sorted(asked) == sorted((b, n) for b, path in enumerate(verdict.path.tolist()) for n in set(path))

    asked.clear()
    verdict = typical(tree, numbers, case.uniforms, distribution, epsilon=0.2, delta=0.5)
    assert told(verdict) == told(RULES[2](case))
    ends = [(b, path[-1]) for b, path in enumerate(verdict.path.tolist())]
    assert asked[-batch:] == ends
    kept = set(asked[:-batch])
    assert len(kept) == len(asked) - batch
    for b, n in kept:
        assert (tree.real[b] & (tree.parents[b] == n)).any(), "it has children"
        assert n == 0 or (b, int(tree.parents[b, n])) in kept
    assert all((b, n) in kept for b, path in enumerate(verdict.path.tolist()) for n in path[: verdict.accepted[b]])


# --- single cases -----------------------------------------------------------------------------------------------------


def test_greedy_agreement_behind_a_mistake_does_not_count() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 0, 3, 2]]), V).float()
    verdict = greedy(chain_tree(torch.tensor([0]), torch.tensor([[1, 2, 3]])), logits)
    assert told(verdict) == [([0, 1], 0)]
    assert verdict.path.tolist() == [[0, 1, 1, 1]]


def test_of_equal_siblings_the_first_counts_unless_the_other_leads_deeper() -> None:
    logits = torch.nn.functional.one_hot(torch.full((2, 4), 1), V).float()
    parents = torch.tensor([[-1, 0, 0, 2], [-1, 0, 0, 2]])
    depth = torch.tensor([[0, 1, 1, 2], [0, 1, 1, 2]])
    tokens = torch.tensor([[0, 1, 1, 3], [0, 1, 1, 1]])
    tree = DraftTree(tokens, parents, depth, torch.ones_like(tokens, dtype=torch.bool))
    assert told(greedy(tree, logits)) == [([0, 1], 1), ([0, 2, 3], 1)]


def test_greedy_judges_in_the_dtype_of_the_logits() -> None:
    """1.0 and 1.001 are the same bfloat16; its argmax is the first."""
    logits = torch.tensor([[[1.0, 1.001, 0, 0]] * 2])
    tree = chain_tree(torch.tensor([0]), torch.tensor([[1]]))
    assert greedy(tree, logits).accepted.tolist() == [1]
    assert greedy(tree, logits.bfloat16()).accepted.tolist() == [0]


@pytest.mark.parametrize("rule", RULES, ids=["greedy", "sampled", "typical"])
def test_without_drafts_the_target_writes_one_token(rule: Rule) -> None:
    target = torch.tensor([[[0.0, 0.0, 1.0, 0.0]]] * 2)
    tree = chain_tree(torch.tensor([1, 3]), torch.empty(2, 0, dtype=torch.int64))
    assert told(rule(Case(tree, target, torch.full((2, 1), 0.5)))) == [([0], 2), ([0], 2)]


def test_only_uniforms_that_are_needed_are_looked_at() -> None:
    case = Case(
        chain_tree(torch.tensor([0]), torch.tensor([[1, 2]])),
        torch.full((1, 3, V), 1 / V),
        torch.tensor([[0.1, 0.2, 0.9]]),
    )
    more = torch.cat([case.uniforms, torch.tensor([[math.nan]])], dim=1)
    assert uniforms_needed(3) == 3
    assert told(sampled(case.tree, case.target, more, as_given)) == told(
        sampled(case.tree, case.target, case.uniforms, as_given)
    )
    with pytest.raises(AssertionError, match="one uniform per node"):
        sampled(case.tree, case.target, case.uniforms[:, :2], as_given)


def test_typical_thresholds_are_the_papers() -> None:
    """Uniform over 4: exp(-H) is 1/4 and the threshold 0.075; a sure target's is epsilon, 0.09."""
    tree = chain_tree(torch.tensor([0, 0, 0]), torch.tensor([[1], [1], [1]]))
    rows = torch.tensor([[0.25] * 4, [0.90, 0.08, 0.01, 0.01], [0.88, 0.10, 0.01, 0.01]], dtype=torch.float64)
    target = rows[:, None].expand(3, 2, V)
    assert typical(tree, target, torch.zeros(3, 1), as_given).accepted.tolist() == [1, 0, 1]
    assert typical(tree, target, torch.zeros(3, 1), as_given, delta=1.0, epsilon=0.3).accepted.tolist() == [0, 0, 0]


def test_of_equally_long_paths_typical_takes_the_one_with_the_highest_product() -> None:
    """0.3 · 0.5 is more than 0.6 · 0.22, though the sum is less."""
    parents, depth = torch.tensor([[-1, 0, 0, 1, 2]]), torch.tensor([[0, 1, 1, 2, 2]])
    tokens = torch.tensor([[0, 1, 2, 1, 2]])
    tree = DraftTree(tokens, parents, depth, torch.ones_like(tokens, dtype=torch.bool))
    rows = [[0.05, 0.3, 0.6, 0.05], [0.5, 0.5, 0, 0], [0.78, 0, 0.22, 0], [1.0, 0, 0, 0], [1.0, 0, 0, 0]]
    target = torch.tensor([rows], dtype=torch.float64)
    assert told(typical(tree, target, torch.zeros(1, 1), as_given)) == [([0, 1, 3], 0)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 1.5}, r"epsilon of typical acceptance must be between 0 and 1, got 1\.5"),
        ({"epsilon": -0.1}, r"epsilon of typical acceptance must be between 0 and 1, got -0\.1"),
        ({"delta": -1.0}, r"delta of typical acceptance must be at least 0, got -1\.0"),
        ({"delta": math.nan}, "delta of typical acceptance must be at least 0, got nan"),
    ],
)
def test_thresholds_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    tree = chain_tree(torch.tensor([0]), torch.tensor([[1]]))
    with pytest.raises(ValueError, match=message):
        typical(tree, torch.full((1, 2, V), 1 / V), torch.zeros(1, 1), as_given, **options)


def test_inputs_are_left_as_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    target, proposals = random_distributions(generator, 8, 4), random_distributions(generator, 8, 4)
    drafts = draw(proposals[:, :3], torch.rand(8, 3, generator=generator))
    tree = chain_tree(torch.zeros(8, dtype=torch.int64), drafts, proposals=proposals)
    case = Case(tree, target, torch.rand(8, 4, generator=generator))
    before = target.clone(), proposals.clone(), case.uniforms.clone()
    for rule in RULES:
        rule(case)
    assert all(torch.equal(a, b) for a, b in zip(before, (target, proposals, case.uniforms), strict=True))
