"""Targets that remember more than keys, or see less than all: trees are verified, kept and taken back exactly.

The reference is transformers' own cache: the prompt in one pass, then token by token, along every path of a tree. In
fp64, where passes of other shapes differ by rounding alone. (Some recurrences compute in fp32 whatever the model's
dtype, and differently in one pass and token by token: the reference does as decoding does.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrids import HYBRIDS, WINDOW, WITH_STATES, save_hybrid
from tiny import VOCAB
from torch import Tensor
from transformers import DynamicCache

from bitdraft.data.generation import greedy_answers
from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recurrent.node_states import NodeStates
from bitdraft.quant.recurrent.state_store import Level, Nodes
from bitdraft.quant.target import LowBitTarget, load_target

CLOSE = 1e-12  # relative, in fp64
CAPTURE = (0, 2)
PARENTS = torch.tensor([-1, 0, 0, 1, 1, 2])  # siblings at two depths
LENGTHS = torch.tensor([9, 7, 9, 7, 7, 9, 7])  # a row per node, and one more

Get = Callable[..., LowBitTarget]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Get:
    loaded: dict[tuple[Any, ...], LowBitTarget] = {}

    def get(name: str, preset: str = "none", dtype: torch.dtype = torch.float64) -> LowBitTarget:
        if (name, preset, dtype) not in loaded:
            folder = tmp_path_factory.getbasetemp() / f"hybrid-{name}"
            if not folder.is_dir():
                save_hybrid(name, folder)
            loaded[name, preset, dtype] = load_target(
                str(folder), load_recipe(preset), dtype=dtype, compile_quantizer="off"
            )
        return loaded[name, preset, dtype]

    return get


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def path_to(node: int, parents: Tensor) -> list[int]:
    path = [node]
    while (parent := int(parents[path[0]])) >= 0:
        path.insert(0, parent)
    return path


@dataclass
class Told:
    """What a row holds: its prompt, and what was decoded behind it."""

    prompt: Tensor
    answer: Tensor

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)

    def more(self, tokens: Tensor) -> "Told":
        return Told(self.prompt, torch.cat([self.answer, tokens]))


def one_by_one(target: LowBitTarget, rows: list[Told]) -> list[tuple[Tensor, Tensor]]:
    """Captured states ``[A, H]`` and last hidden state ``[H]`` of every row's last token, in transformers' cache."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for length in {len(row.prompt) for row in rows}:
        group = [i for i, row in enumerate(rows) if len(row.prompt) == length]
        cache = DynamicCache(config=target.config)
        target._run(torch.stack([rows[i].prompt for i in group]), (), cache=cache, use_cache=True)
        answers = torch.nn.utils.rnn.pad_sequence([rows[i].answer for i in group], batch_first=True)
        for t, column in enumerate(answers.T):
            states = target._run(column[:, None], CAPTURE, cache=cache, use_cache=True)
            for j, i in enumerate(group):
                if t == len(rows[i].answer) - 1:
                    found[i] = states.captured[j, 0], states.last_hidden[j, 0]
    return [found[i] for i in range(len(rows))]


def distance(got: Tensor, want: Tensor) -> float:
    """Largest distance of a state from the wanted one, relative to its norm."""
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


def tree_error(
    target: LowBitTarget, cache: SlotCache, told: list[Told], parents: Tensor, seed: int
) -> tuple[float, Tensor]:
    """Run a tree behind what the rows hold; the largest error of its states, and its tokens ``[B, N]``."""
    nodes, lengths = tokens(len(told), len(parents), seed=seed), torch.tensor([len(row) for row in told])
    states = target.states(nodes, cache=cache, lengths=lengths, parents=parents.expand_as(nodes), capture=CAPTURE)
    paths = [path_to(n, parents) for n in range(len(parents))]
    wanted = one_by_one(target, [row.more(nodes[b, path]) for b, row in enumerate(told) for path in paths])
    captured, last = (torch.stack(part).unflatten(0, nodes.shape) for part in zip(*wanted, strict=True))
    return max(distance(states.captured, captured), distance(states.last_hidden, last)), nodes


def prompts_in(target: LowBitTarget, slots: int = 32) -> tuple[SlotCache, list[Told]]:
    """A cache that holds prompts of two lengths in turn, and the prompts."""
    ids, cache = tokens(len(LENGTHS), int(LENGTHS.max())), target.new_cache(slots)
    states, full = target.prefill(ids, LENGTHS, cache=cache, capture=CAPTURE), target.states(ids, capture=CAPTURE)
    assert states.last_hidden.shape == full.last_hidden.shape
    real = torch.arange(ids.shape[1]) < LENGTHS[:, None]
    close = CLOSE if target.dtype == torch.float64 else 1e-5
    assert distance(states.captured[real], full.captured[real]) < close
    assert distance(states.last_hidden[real], full.last_hidden[real]) < close
    return cache, [Told(row[:n], row[:0]) for row, n in zip(ids, LENGTHS.tolist(), strict=True)]


@pytest.mark.parametrize("name", HYBRIDS)
def test_every_path_of_a_tree_can_be_kept_or_taken_back(hybrid: Get, name: str) -> None:
    """Row ``i`` keeps the path to node ``i`` and the last row keeps nothing; all go on as if nothing else had been."""
    target = hybrid(name)
    cache, told = prompts_in(target)
    error, nodes = tree_error(target, cache, told, PARENTS, seed=1)
    assert error < CLOSE
    paths = [path_to(n, PARENTS) for n in range(len(PARENTS))] + [[0]]
    kept = torch.tensor([*(len(p) for p in paths[:-1]), 0])
    cache.commit(torch.tensor([p + [p[-1]] * (3 - len(p)) for p in paths]), kept)
    told = [row.more(nodes[b, paths[b][: kept[b]]]) for b, row in enumerate(told)]
    chain = torch.arange(2) - 1
    assert tree_error(target, cache, told, chain, seed=2)[0] < CLOSE


@pytest.mark.parametrize("name", WITH_STATES)
def test_in_single_precision_nodes_differ_by_rounding(name: str, tmp_path: Path) -> None:
    """With matrices of the usual size: those of the other tests, ten times larger, multiply rounding errors as well."""
    folder = save_hybrid(name, tmp_path / "target", scale=0.1)
    target = load_target(str(folder), load_recipe("none"), dtype=torch.float32, compile_quantizer="off")
    cache, told = prompts_in(target)
    assert tree_error(target, cache, told, PARENTS, seed=1)[0] < 1e-5


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_come_in_the_target_s_dtype(hybrid: Get, name: str) -> None:
    """Also where the residual stream is kept in fp32."""
    target = hybrid(name, dtype=torch.bfloat16)
    ids, nodes, cache = tokens(2, 9), tokens(2, len(PARENTS), seed=1), target.new_cache(16)
    target.prefill(ids, LENGTHS[:2], cache=cache)
    states = target.states(nodes, cache=cache, lengths=LENGTHS[:2], parents=PARENTS.expand_as(nodes), capture=CAPTURE)
    for part in (states.captured, states.last_hidden, target.logits(states.last_hidden)):
        assert part.dtype == torch.bfloat16
        assert part.isfinite().all()


@pytest.mark.parametrize("name", WITH_STATES)
def test_drafts_that_follow_each_other_are_kept_in_part(hybrid: Get, name: str) -> None:
    """A pass without ``parents``, as decoding without trees runs it."""
    target = hybrid(name)
    cache, told = prompts_in(target)
    drafts, kept = tokens(len(told), 3, seed=3), torch.arange(len(told)) % 4
    target.states(drafts, cache=cache, lengths=LENGTHS)
    cache.commit(torch.arange(3).expand(len(told), -1), kept)
    told = [row.more(drafts[b, : kept[b]]) for b, row in enumerate(told)]
    assert tree_error(target, cache, told, PARENTS, seed=4)[0] < CLOSE


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1", "lfm2"])
def test_rows_come_and_go(hybrid: Get, name: str) -> None:
    target = hybrid(name)
    cache, told = prompts_in(target)
    later, ids = target.new_cache(20), tokens(2, 11, seed=5)
    target.prefill(ids, torch.tensor([11, 11]), cache=later)
    cache.keep_rows(torch.tensor([4, 0, 6]))
    cache.join(later)
    cache.keep_rows(torch.tensor([0, 2, 3, 4]))
    told = [told[4], told[6], *(Told(row, row[:0]) for row in ids)]
    assert tree_error(target, cache, told, PARENTS, seed=6)[0] < CLOSE


@pytest.mark.parametrize("name", HYBRIDS)
def test_greedy_answers_are_those_of_transformers(hybrid: Get, name: str) -> None:
    """Five rows of which the first ends early and rides along, and one that takes a place later."""
    target = hybrid(name)
    model: Any = target.model
    prompts = [row[:n].tolist() for row, n in zip(tokens(6, 9, seed=7), (9, 3, 6, 6, 9, 2), strict=True)]

    def answer(prompt: list[int], end: int) -> list[int]:
        ids = torch.tensor([prompt])
        settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
        return model.generate(ids, eos_token_id=end, **settings)[0, len(prompt) :].tolist()

    end = answer(prompts[0], 258)[1]
    answers = greedy_answers(target, prompts, end_ids={end}, max_new_tokens=6, batch_size=5)
    assert answers == [answer(prompt, end) for prompt in prompts]
    assert sum(len(a) < 6 for a in answers) < len(answers)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_window_counts_positions_not_nodes(hybrid: Get, name: str) -> None:
    """A tree deeper than the window: a node's distance from an ancestor is that of their depths."""
    target = hybrid(name)
    cache, told = prompts_in(target)
    parents = torch.tensor([-1, 0, 0, *range(2, 2 + WINDOW)])
    assert tree_error(target, cache, told, parents, seed=1)[0] < CLOSE


@pytest.mark.parametrize("name", WITH_STATES)
def test_under_a_recipe_trees_are_verified_alike(hybrid: Get, name: str) -> None:
    target = hybrid(name, "mxfp4")
    assert target.applied.quantized, "the recipe reaches layers"
    cache, told = prompts_in(target)
    assert tree_error(target, cache, told, PARENTS, seed=1)[0] < CLOSE


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_attention_that_adds_its_mask_sees_the_same(hybrid: Get, name: str) -> None:
    target = hybrid(name)
    model: Any = target.model
    before = target.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        cache, told = prompts_in(target)
        assert tree_error(target, cache, told, PARENTS, seed=1)[0] < CLOSE
    finally:
        model.set_attn_implementation(before)


def test_a_low_bit_cache_goes_with_windows_but_not_with_states(hybrid: Get) -> None:
    target = hybrid("gemma3", "none+kvfp8")
    ids, nodes, cache = tokens(1, 9), tokens(1, len(PARENTS), seed=1), target.new_cache(16)
    target.prefill(ids, LENGTHS[:1], cache=cache)
    last = target.states(nodes, cache=cache, lengths=LENGTHS[:1], parents=PARENTS[None]).last_hidden
    for node in range(len(PARENTS)):
        whole = torch.cat([ids[0], nodes[0, path_to(node, PARENTS)]])[None]
        assert distance(last[0, node], target.states(whole).last_hidden[0, -1]) < CLOSE
    for name in WITH_STATES:
        with pytest.raises(ValueError, match="which cache no keys"):
            hybrid(name, "none+kvfp8")


def one_node_at_a_time(nodes: Nodes, *, inherit: bool) -> list[Level]:
    """A level per node; with ``inherit``, a node's state follows the sibling that was computed before it."""
    levels = []
    for row, parents in enumerate(nodes.parents.tolist()):
        for node, parent in enumerate(parents):
            before = [n for n in range(node) if parents[n] == parent]
            follows = before[-1] if inherit and before else parent
            levels.append(Level(torch.tensor([row]), torch.tensor([node]), torch.tensor([follows])))
            if follows < 0:
                levels[-1] = Level(levels[-1].rows, levels[-1].nodes, None)
    return levels


@pytest.mark.parametrize("inherit", [False, True])
@pytest.mark.parametrize("name", WITH_STATES)
def test_siblings_that_inherit_each_other_s_state_are_noticed(
    hybrid: Get, name: str, inherit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks above can fail: the same order of nodes passes without and fails with the mistake."""
    target = hybrid(name)
    cache, told = prompts_in(target)
    monkeypatch.setattr(Nodes, "levels", property(lambda nodes: one_node_at_a_time(nodes, inherit=inherit)))
    error, _ = tree_error(target, cache, told, PARENTS, seed=1)
    assert (error > 0.1) if inherit else (error < CLOSE)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_window_that_is_forgotten_is_noticed(hybrid: Get, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = hybrid(name)
    cache, told = prompts_in(target)
    monkeypatch.setattr(SlotCache, "nearer_than", lambda cache, window: torch.tensor(True))
    assert min(LENGTHS) > WINDOW
    assert tree_error(target, cache, told, PARENTS, seed=1)[0] > 0.1


@pytest.mark.parametrize("name", WITH_STATES)
def test_states_of_nodes_are_freed_by_commit(hybrid: Get, name: str) -> None:
    target = hybrid(name)
    cache, told = prompts_in(target)

    def held() -> int:
        stores = [store for store in cache.layers if isinstance(store, NodeStates)]
        return sum(x.nbytes for s in stores for states in (s.kept, s.of_nodes, s.running) for x in states.values())

    before = held()
    tree_error(target, cache, told, PARENTS, seed=1)
    assert held() == (1 + len(PARENTS)) * before, "one state per node beside the snapshot"
    cache.commit(torch.zeros(len(told), 1, dtype=torch.int64), torch.ones(len(told), dtype=torch.int64))
    assert held() == before


def test_a_pass_that_was_not_committed_is_noticed(hybrid: Get) -> None:
    target = hybrid("lfm2")
    cache, _ = prompts_in(target)
    ids = tokens(len(LENGTHS), 1)
    target.states(ids, cache=cache, lengths=LENGTHS)
    with pytest.raises(AssertionError, match="not committed"):
        target.states(ids, cache=cache, lengths=LENGTHS)
    cache.commit(torch.zeros_like(ids), torch.zeros_like(LENGTHS))
    with pytest.raises(AssertionError, match="other tokens than the pass"):
        target.states(ids, cache=cache, lengths=LENGTHS + 1)


def test_a_layer_that_keeps_its_state_to_itself_is_refused(hybrid: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = hybrid("lfm2")
    target = LowBitTarget(loaded.model, loaded.recipe, loaded.applied, name=loaded.name, fingerprint=loaded.fingerprint)
    conv: Any = target.decoder.layers[2].conv
    run = conv.forward
    monkeypatch.setattr(conv, "forward", lambda *args, cache=None, **options: run(*args, **options))
    with pytest.raises(ValueError, match="layer 2 is recurrent but keeps its state elsewhere"):
        target.states(tokens(1, 1), cache=target.new_cache(4), lengths=torch.zeros(1, dtype=torch.int64))


def test_what_a_target_without_attention_says_of_itself(hybrid: Get) -> None:
    target = hybrid("mamba2")
    assert target.context_length > 10**12
    assert target.final_norm is target.decoder.norm_f
    target.decoder.norm_f, norm = None, target.decoder.norm_f
    del target.decoder.norm_f
    try:
        with pytest.raises(ValueError, match="Mamba2Model has no final norm"):
            _ = target.final_norm
    finally:
        target.decoder.norm_f = norm
