"""Constant-decay attention over trees against the recurrence, token by token, and against transformers' MiniMax."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gla_model import MIXERS, save_gla_target
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recurrent.constant_decay import (
    ConstantDecayState,
    advanced_state,
    attend,
    chunked_outputs,
    empty_state,
    tree_outputs,
)
from bitdraft.quant.recurrent.state_store import Nodes
from bitdraft.quant.target import LowBitTarget, TargetStates, load_target

# B sequence, H head, N node, L step of a path, d width of keys, e width of values.

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}  # of a head's norm
RATES = (0.0, 1e-9, 2**-8, 0.5, 0.84, 5.0, 20.0)
D, E = 8, 6


@dataclass(frozen=True)
class Case:
    """Trees behind random states, in fp64: what every function here is given."""

    q: Tensor
    k: Tensor
    v: Tensor
    state: Tensor
    decay: Tensor
    nodes: Nodes

    def to(self, dtype: torch.dtype) -> "Case":
        return replace(self, **{n: getattr(self, n).to(dtype) for n in ("q", "k", "v", "state", "decay")})


def case(parents: list[list[int]], decay: list[float], seed: int = 0, keys: int = D, values: int = E) -> Case:
    batch, nodes, heads = len(parents), len(parents[0]), len(decay)
    rng = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, batch, heads, nodes, keys, generator=rng, dtype=torch.float64)
    v = torch.randn(batch, heads, nodes, values, generator=rng, dtype=torch.float64)
    state = torch.randn(batch, heads, keys, values, generator=rng, dtype=torch.float64)
    hang = Nodes(torch.zeros(batch, dtype=torch.int64), torch.tensor(parents))
    return Case(q, k, v, state, torch.tensor(decay, dtype=torch.float64), hang)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch, nodes = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    rows = [[-1] + [draw(st.integers(-1, n - 1)) for n in range(1, nodes)] for _ in range(batch)]
    return case(rows, draw(st.lists(st.sampled_from(RATES), min_size=1, max_size=3)), draw(st.integers(0, 99)))


def text(tokens: int, decay: list[float], seed: int = 0, batch: int = 1) -> Case:
    return case([list(range(-1, tokens - 1))] * batch, decay, seed)


def node_states(c: Case) -> Tensor:
    """``[B, H, N, d, e]``: every node's state from its parent's, one after the other."""
    states = c.state.new_empty(*c.k.shape, c.v.shape[-1])
    for row, parents in enumerate(c.nodes.parents.tolist()):
        for node, parent in enumerate(parents):
            before = c.state[row] if parent < 0 else states[row, :, parent]
            written = c.k[row, :, node, :, None] * c.v[row, :, node, None, :]
            states[row, :, node] = torch.exp(-c.decay)[:, None, None] * before + written
    return states


def read(c: Case, states: Tensor) -> Tensor:
    return (c.q[..., None, :] @ states).squeeze(-2) / c.q.shape[-1] ** 0.5


def tree(c: Case) -> Tensor:
    return tree_outputs(c.q, c.k, c.v, c.state, c.decay, c.nodes.depth, c.nodes.lineage)


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Equal up to the tolerance of ``found``'s dtype, per sequence and head (dimensions 0 and 1)."""
    assert found.shape == expected.shape
    error, size = ((x.flatten(2).norm(dim=2)) for x in (found.double() - expected, expected))
    assert (error <= TOLERANCES[found.dtype] * size).all(), (error / size).max()


@pytest.mark.parametrize("dtype", TOLERANCES)
@given(c=cases())
@settings(max_examples=40, deadline=None)
def test_every_node_reads_what_its_own_path_gives(dtype: torch.dtype, c: Case) -> None:
    assert_same(tree(c.to(dtype)), read(c, node_states(c)))


@pytest.mark.parametrize("dtype", TOLERANCES)
@given(c=cases(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_the_replayed_state_is_that_of_the_last_accepted_node(dtype: torch.dtype, c: Case, data: st.DataObject) -> None:
    nodes, last = c.nodes.parents.shape[1], []
    paths, kept = [], []
    for row, parents in enumerate(c.nodes.parents.tolist()):
        node = data.draw(st.integers(-1, nodes - 1))
        last.append(c.state[row] if node < 0 else node_states(c)[row, :, node])
        path: list[int] = []
        while node >= 0:
            path, node = [node, *path], parents[node]
        kept.append(len(path))
        paths.append(path + [path[-1] if path else 0] * (nodes - len(path)))
    low = c.to(dtype)
    found = advanced_state(low.k, low.v, low.state, low.decay, torch.tensor(paths), torch.tensor(kept))
    assert_same(found, torch.stack(last))
    unmoved = torch.tensor(kept) == 0
    assert torch.equal(found[unmoved], low.state[unmoved])


@pytest.mark.parametrize("decay", [[0.0, 1e-9], [2**-8, 0.5], [0.84, 20.0]])
def test_long_texts_in_chunks_equal_the_recurrence(decay: list[float]) -> None:
    c = text(4100, decay)
    states = node_states(c)
    for low in map(c.to, TOLERANCES):
        outputs, last = chunked_outputs(low.q, low.k, low.v, low.state, low.decay)
        assert_same(outputs, read(c, states))
        assert_same(last, states[:, :, -1])


@given(tokens=st.integers(1, 20), chunk=st.integers(1, 24))
@settings(max_examples=20, deadline=None)
def test_the_size_of_chunks_changes_nothing(tokens: int, chunk: int) -> None:
    c = text(tokens, [0.3, 2.0], batch=2)
    outputs, last = chunked_outputs(c.q, c.k, c.v, c.state, c.decay, chunk)
    assert_same(outputs, tree(c))
    assert_same(last, node_states(c)[:, :, -1])


def test_minimax_of_transformers_computes_the_same() -> None:
    config = MiniMaxConfig(
        hidden_size=32, num_attention_heads=4, head_dim=D, num_hidden_layers=3, block_size=7, hidden_act="silu"
    )
    torch.manual_seed(0)
    module = MiniMaxLightningAttention(config, 1).double()
    module.norm = torch.nn.Identity()  # transformers computes it in fp32
    module.query_decay, module.key_decay, module.diagonal_decay = module.decay_factors(module.slope_rate)
    x = torch.randn(2, 30, 32, dtype=torch.float64)
    expected, _ = module(x, (x, x), None)
    qkv = module.act_fn(module.qkv_proj(x)).unflatten(-1, (4, 3 * D)).transpose(1, 2)
    q, k, v = qkv.split(D, dim=-1)
    outputs = attend(q * D**0.5, k, v, module.slope_rate.flatten(), None, 1).transpose(1, 2).flatten(2)
    found = module.out_proj(torch.sigmoid(module.output_gate(x)) * outputs)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_negative_rates_are_refused() -> None:
    c = text(3, [0.5, -0.25])
    with pytest.raises(ValueError, match=r"at least 0, got -0\.25"):
        attend(c.q, c.k, c.v, c.decay, None, 0)


def test_caches_from_elsewhere_are_refused() -> None:
    c = text(3, [0.5])
    with pytest.raises(ValueError, match=r"layer 2 is linear .* a DynamicCache does not"):
        attend(c.q, c.k, c.v, c.decay, DynamicCache(), 2)


def test_half_precision_is_summed_in_fp32() -> None:
    c = text(300, [2**-8, 0.84]).to(torch.bfloat16)
    assert empty_state(c.k, c.v, c.decay).dtype == torch.float32
    found = attend(c.q, c.k, c.v, c.decay, None, 0)
    wide = c.to(torch.float64)
    expected = read(wide, node_states(replace(wide, state=torch.zeros_like(wide.state))))
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() < 2**-9 * expected.norm()  # the last rounding alone


# The store of one layer.

BRANCHING = [[-1, 0, 0, 1, 2, 2, 4], [-1, 0, 1, 1, 1, 0, 3]]
PATHS = torch.tensor([[0, 2, 4, 6], [0, 1, 1, 1]])
KEPT = torch.tensor([4, 2])


def opened(c: Case, store: ConstantDecayState) -> Tensor:
    """A pass through ``store``; its outputs."""
    store.begin(c.nodes)
    return store.attend(c.q, c.k, c.v, c.decay)


def prefilled(batch: int, seed: int = 1, tokens: int = 5) -> tuple[ConstantDecayState, Tensor]:
    """A store that remembers prompts, and the state that it has to hold."""
    c, store = text(tokens, [0.1, 1.0], seed, batch), ConstantDecayState()
    nodes = Nodes.chain(torch.zeros(batch, dtype=torch.int64), tokens, stays=True)
    c = replace(c, state=torch.zeros_like(c.state), nodes=nodes)
    assert_same(opened(c, store), read(c, node_states(c)))
    return store, node_states(c)[:, :, -1]


def state_of(store: ConstantDecayState) -> Tensor:
    assert store.state is not None
    return store.state


def verified(store: ConstantDecayState, state: Tensor, seed: int = 0) -> None:
    """A tree's pass and the state behind its accepted path are those of the recurrence."""
    c = replace(case(BRANCHING, [0.1, 1.0], seed), state=state)
    assert_same(opened(c, store), read(c, node_states(c)))
    store.commit(PATHS, KEPT)
    expected = torch.stack([node_states(c)[0, :, 6], node_states(c)[1, :, 1]])
    assert_same(state_of(store), expected)


def test_passes_follow_one_another() -> None:
    store, state = prefilled(2)
    for seed in range(3):
        verified(store, state, seed)
        state = state_of(store)


def test_a_first_pass_may_be_a_tree() -> None:
    verified(ConstantDecayState(), torch.zeros(2, 2, D, E, dtype=torch.float64))


def test_a_pass_that_keeps_nothing_leaves_no_trace() -> None:
    store, _ = prefilled(2)
    before = state_of(store)
    opened(case(BRANCHING, [0.1, 1.0]), store)
    store.commit(PATHS, torch.zeros(2, dtype=torch.int64))
    assert torch.equal(state_of(store), before)
    verified(store, before)


def test_rows_leave_and_join() -> None:
    store, state = prefilled(3)
    store.keep_rows(torch.tensor([2, 0]))
    assert_same(state_of(store), state[[2, 0]])
    store.keep_rows(torch.tensor([1]))
    other, more = prefilled(1, seed=4, tokens=9)
    store.join(other)
    verified(store, torch.cat([state[:1], more]))


class SiblingsInherit(ConstantDecayState):
    """Wrong on purpose: a node starts from the state of the node before it, where that is a sibling."""

    def begin(self, nodes: Nodes) -> None:
        parents = nodes.parents.clone()
        again = parents[:, 1:] == nodes.parents[:, :-1]
        parents[:, 1:][again] = torch.arange(parents.shape[1] - 1).expand_as(again)[again]
        super().begin(replace(nodes, parents=parents))


def test_a_store_whose_siblings_inherit_is_found_out() -> None:
    with pytest.raises(AssertionError):
        verified(SiblingsInherit(), torch.zeros(2, 2, D, E, dtype=torch.float64))


# Memory.


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("nodes", [8, 64])
def test_memory_grows_with_nodes_times_width(nodes: int, width: int) -> None:
    parents = [[-1] + [n // 2 for n in range(nodes - 1)]]
    c = case(parents, [0.5], keys=width, values=width).to(torch.float32)
    store = ConstantDecayState()
    with Largest() as largest:
        opened(c, store)
        kept = store.drafted
        assert kept is not None
        store.commit(torch.tensor([[0, 1, 3]]), torch.tensor([3]))
    # One head of one sequence: a state, the nodes' keys or their products with one another, never a state per node.
    assert largest.elements <= max(width * width, nodes * width, nodes * nodes)
    assert sum(x.numel() for x in kept) == 2 * nodes * width + 1  # keys, values and a rate
    assert store.drafted is None
    assert state_of(store).untyped_storage().nbytes() == 4 * width * width


# A whole model.

PROMPTS = [[7, 99, 4, 31, 5], [12, 3, 250, 8, 8, 41, 17, 66, 2]]
LEAVES = ([3, 5, 6], [2, 4, 5, 6])  # of BRANCHING
CAPTURE = (1, 3)


@pytest.fixture(scope="module", params=[MIXERS, ("lightning", "lightning", "attention", "lightning")])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return save_gla_target(tmp_path_factory.mktemp("gla"), mixer_types=list(request.param))


def loaded(folder: Path, dtype: torch.dtype, recipe: str = "none") -> LowBitTarget:
    return load_target(str(folder), load_recipe(recipe), dtype=dtype, compile_quantizer="off")


def padded(texts: list[list[int]]) -> tuple[Tensor, Tensor]:
    lengths = [len(t) for t in texts]
    return torch.tensor([t + [0] * (max(lengths) - len(t)) for t in texts]), torch.tensor(lengths)


def path_to(row: int, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path, node = [node, *path], BRANCHING[row][node]
    return path


def one_by_one(target: LowBitTarget, prompt: list[int], tokens: list[int]) -> TargetStates:
    """``tokens`` behind ``prompt``, each decoded in a pass of its own."""
    cache = target.new_cache(40)
    target.prefill(*padded([prompt]), cache=cache, capture=CAPTURE)
    steps = []
    for step, token in enumerate(tokens):
        lengths = torch.tensor([len(prompt) + step])
        steps.append(target.states(torch.tensor([[token]]), cache=cache, lengths=lengths, capture=CAPTURE))
        cache.commit(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))
    return TargetStates(torch.cat([s.captured for s in steps], 1), torch.cat([s.last_hidden for s in steps], 1))


def check_tree(target: LowBitTarget, texts: list[list[int]], cache: Any, drafts: Tensor) -> None:
    """A pass over the trees ``drafts`` ``[B, N]`` gives every path what decoding it one by one gives."""
    dtype = target.dtype
    found = target.states(
        drafts, cache=cache, lengths=padded(texts)[1], parents=torch.tensor(BRANCHING), capture=CAPTURE
    )
    for row, leaves in enumerate(LEAVES):
        for path in (path_to(row, leaf) for leaf in leaves):
            expected = one_by_one(target, texts[row], drafts[row, path].tolist())
            for got, right in zip(
                (found.last_hidden[row, path], found.captured[row, path].flatten(1)),
                (expected.last_hidden[0], expected.captured[0].flatten(1)),
                strict=True,
            ):
                assert (got - right).norm() <= TOLERANCES[dtype] * right.norm()


@pytest.mark.parametrize(
    ("dtype", "recipe"), [(torch.float64, "none"), (torch.float32, "none"), (torch.float64, "mxfp4a16")]
)
def test_the_model_verifies_trees_as_it_decodes_one_by_one(folder: Path, dtype: torch.dtype, recipe: str) -> None:
    target = loaded(folder, dtype, recipe)
    rng = torch.Generator().manual_seed(3)
    cache, texts = target.new_cache(40), PROMPTS
    whole = target.prefill(*padded(texts), cache=cache, capture=CAPTURE).last_hidden
    assert_same(whole[1:, None], target.states(torch.tensor(texts[1:])).last_hidden[:, None].double())
    for kept in ([4, 2], [0, 2], [1, 0], [3, 1]):
        drafts = torch.randint(0, 320, (2, len(BRANCHING[0])), generator=rng)
        check_tree(target, texts, cache, drafts)
        cache.commit(PATHS, torch.tensor(kept))
        texts = [t + drafts[row, PATHS[row, :n]].tolist() for row, (t, n) in enumerate(zip(texts, kept, strict=True))]


def test_a_state_per_node_gives_the_same(folder: Path, tmp_path: Path) -> None:
    mixers = [
        ("stepwise" if kind == "lightning" else kind) for kind in loaded(folder, torch.float64).config.mixer_types
    ]
    targets = [loaded(f, torch.float64) for f in (folder, save_gla_target(tmp_path, mixer_types=mixers))]
    caches = [target.new_cache(40) for target in targets]
    for target, cache in zip(targets, caches, strict=True):
        target.prefill(*padded(PROMPTS), cache=cache)
    lengths, rng = padded(PROMPTS)[1], torch.Generator().manual_seed(5)
    for kept in (KEPT, torch.tensor([0, 1]), KEPT):
        drafts = torch.randint(0, 320, (2, len(BRANCHING[0])), generator=rng)
        exact, stepwise = (
            target.states(drafts, cache=cache, lengths=lengths, parents=torch.tensor(BRANCHING)).last_hidden
            for target, cache in zip(targets, caches, strict=True)
        )
        assert_same(exact, stepwise)
        for cache in caches:
            cache.commit(PATHS, kept)
        lengths = lengths + kept
