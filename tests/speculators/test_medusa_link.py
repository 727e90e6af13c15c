"""Linked Medusa heads: what they read, that drafting computes what training does, and who they are written for."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from packs import outputs_at, packed_states
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear

from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftContext, DraftHead, rows_at
from bitdraft.speculators.documents import Documents
from bitdraft.speculators.export import LAYOUTS, default_layout, export_head
from bitdraft.speculators.load import load_head
from bitdraft.speculators.medusa import MedusaHead

MakeMedusa = Callable[..., MedusaHead]
HEADS = 4
VARIANTS = [{}, {"blocks": 2, "bias": True}, {"own_output": True}]
each_variant = pytest.mark.parametrize("settings", VARIANTS, ids=str)


def random_tokens(*shape: int, seed: int = 2) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def logits_of(head: MedusaHead, outputs: Tensor) -> Tensor:
    """``[K, …, V]``."""
    weight = head.output_weight
    return torch.stack([linear(out, weight if weight.ndim == 2 else weight[k]) for k, out in enumerate(outputs)])


def context_of(last_hidden: Tensor, tokens: Tensor, newest: Tensor) -> DraftContext:
    """The context behind a first pass over ``tokens`` ``[B, T]``, whose rows behind ``newest`` are padding."""
    batch, length = tokens.shape
    following = tokens.roll(-1, dims=1)
    start = torch.zeros(batch, dtype=torch.int64)
    return DraftContext(torch.empty(batch, length, 0, 0), last_hidden, following, start, newest)


@each_variant
def test_a_fresh_link_adds_nothing(target: LowBitTarget, make_medusa: MakeMedusa, settings: dict[str, bool]) -> None:
    linked = make_medusa(target, scale=0, heads=3, link=True, **settings)
    tokens, rows = random_tokens(2, 9), torch.tensor([[1, 4], [0, 2]])
    states = target.states(tokens)
    with torch.no_grad():
        outputs = outputs_at(linked, states, tokens, rows)
    torch.testing.assert_close(outputs, rows_at(states.last_hidden, rows).expand_as(outputs), rtol=1e-6, atol=1e-6)
    plain = make_medusa(target, heads=3, **settings)
    missing, unexpected = linked.load_state_dict(plain.state_dict(), strict=False)
    assert missing == [f"links.{k}.weight" for k in range(3)] and not unexpected
    with torch.no_grad():
        mine, its = (outputs_at(h, states, tokens, rows) for h in (linked, plain))
    torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-6)


@each_variant
def test_outputs_are_the_formula_s_and_every_weight_learns(
    target: LowBitTarget, make_medusa: MakeMedusa, settings: dict[str, bool]
) -> None:
    """``h ← h + SiLU(W h + L_k [e_0; …; e_k] + b)`` in the first block, row by row."""
    head, row = make_medusa(target, heads=3, link=True, **settings), 3
    tokens = random_tokens(1, 9)
    states, weights = target.states(tokens), {name: p.detach() for name, p in head.named_parameters()}
    outputs = outputs_at(head, states, tokens, torch.tensor([[row]]))
    read = []
    for k in range(3):
        e = target.embedding.weight[tokens[0, row + 1 + k]]
        read.append(e / e.square().mean().sqrt())
        h = states.last_hidden[0, row]
        for i in range(head.config.blocks):
            y = weights[f"blocks.{k}.layers.{i}.weight"] @ h
            if i == 0:
                y = y + weights[f"links.{k}.weight"] @ torch.cat(read)
            if head.config.bias:
                y = y + weights[f"blocks.{k}.layers.{i}.bias"]
            h = h + y / (1 + (-y).exp())
        torch.testing.assert_close(outputs[k, 0, 0], h, rtol=1e-4, atol=1e-4)
    logits_of(head, outputs).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in head.parameters())
    assert target.embedding.weight.grad is None
    assert target.embedding.weight.data_ptr() not in {p.data_ptr() for p in head.parameters()}


def test_the_size_of_the_target_s_embeddings_does_not_matter(target: LowBitTarget, make_medusa: MakeMedusa) -> None:
    head, tokens, rows = make_medusa(target, heads=2, link=True), random_tokens(1, 9), torch.tensor([[2]])
    states = target.states(tokens)
    with torch.no_grad():
        before = outputs_at(head, states, tokens, rows)
        head._borrowed_embedding = target.embedding.weight.detach() * 50
        torch.testing.assert_close(outputs_at(head, states, tokens, rows), before, rtol=1e-4, atol=1e-4)


@each_variant
def test_drafting_computes_what_training_computes(
    target: LowBitTarget, make_medusa: MakeMedusa, settings: dict[str, bool]
) -> None:
    """Three sequences that end at different rows, each drafting the text's own tokens."""
    head = make_medusa(target, heads=HEADS, link=True, **settings)
    tokens, newest = random_tokens(3, 14), torch.tensor([8, 0, 4])
    states = target.states(tokens)
    state = head.new_state(32, SlotCache(1, 32))
    with torch.no_grad():
        expected = logits_of(head, outputs_at(head, states, tokens, newest[:, None]))[:, :, 0]  # [K, B, V]
        logits = [head.first(context_of(states.last_hidden, tokens, newest), state)]
        for k in range(1, HEADS):
            drafted = tokens.gather(1, newest[:, None] + 1 + k)
            logits.append(head.following(state, drafted, torch.zeros_like(drafted))[:, 0])
    torch.testing.assert_close(torch.stack(logits), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected[0], expected[1], atol=0.1), "different heads should disagree"


def test_a_node_s_logits_are_those_of_a_chain_along_its_path(
    exact_target: LowBitTarget, make_medusa: MakeMedusa
) -> None:
    """A tree of random shape for three sequences, in two passes, in fp64."""
    head, generator = make_medusa(exact_target, heads=4, link=True), torch.Generator().manual_seed(4)
    width, tree_state, chain_state = [1, 3, 5, 4], *(head.new_state(64, SlotCache(1, 64)) for _ in range(2))
    for _ in range(2):
        tokens = torch.randint(0, 256, (3, 9), generator=generator)
        context = context_of(exact_target.states(tokens).last_hidden, tokens, torch.tensor([5, 7, 3]))
        levels = [
            (
                torch.randint(0, 256, (3, here), generator=generator),
                torch.randint(0, above, (3, here), generator=generator),
            )
            for above, here in pairwise(width)
        ]
        with torch.no_grad():
            logits = [head.first(context, tree_state)[:, None]]
            logits += [head.following(tree_state, *level) for level in levels]
            for leaf in range(width[-1]):
                path, node = [], torch.full((3, 1), leaf)
                for level, parents in reversed(levels):
                    path.append((level.gather(1, node), node))
                    node = parents.gather(1, node)
                torch.testing.assert_close(head.first(context, chain_state), logits[0][:, 0], rtol=1e-10, atol=1e-10)
                for (token, here), of_level in zip(reversed(path), logits[1:], strict=True):
                    alone = head.following(chain_state, token, torch.zeros_like(token))
                    torch.testing.assert_close(alone, rows_at(of_level, here), rtol=1e-10, atol=1e-10)
        assert not torch.allclose(logits[-1][:, 0], logits[-1][:, 1]), "nodes behind other tokens have other logits"


def test_a_row_sees_tokens_up_to_its_step_and_none_of_another_document(
    target: LowBitTarget, make_medusa: MakeMedusa
) -> None:
    head, row = make_medusa(target, heads=HEADS, link=True), 5
    tokens = random_tokens(1, 14)
    states, rows = target.states(tokens), torch.tensor([[row]])
    documents = Documents((0, 8, 14), ((0, 8), (8, 14)))
    with torch.no_grad():
        before = outputs_at(head, states, tokens, rows)
        packed = head.training_outputs(packed_states(states), tokens[0], documents)
        for changed in range(row + 1, 14):
            other = tokens.clone()
            other[0, changed] = (other[0, changed] + 1) % 256
            after = outputs_at(head, states, other, rows)
            same = [torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(after, before, strict=True)]
            assert same == [k < changed - row - 1 for k in range(HEADS)]  # head k reads up to x_{t+1+k}
            if changed >= 8:
                again = head.training_outputs(packed_states(states), other[0], documents)
                assert torch.equal(again[:, :8], packed[:, :8])


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def make(make_head: Callable[[str], DraftHead]) -> Callable[[str], MedusaHead]:
    def linked(kind: str) -> MedusaHead:
        head = make_head(kind)
        assert isinstance(head, MedusaHead)
        return head

    return linked


def test_no_engine_is_named_and_vllm_s_own_layout_names_the_way_out(make: Callable[[str], MedusaHead]) -> None:
    linked, plain = make("medusa linked"), make("medusa")
    assert LAYOUTS["medusa-original"].engines(linked) == ()
    assert default_layout(linked) == "medusa-original" and default_layout(plain) == "medusa-vllm"
    with pytest.raises(ValueError, match=r"medusa\.link.*use the format medusa-original"):
        LAYOUTS["medusa-vllm"].check(linked)


def test_an_export_is_for_our_reader_alone(
    make: Callable[[str], MedusaHead], rounded: LowBitTarget, tmp_path: Path
) -> None:
    """By default in the layout that holds it; nothing in it looks like a Medusa head to an engine."""
    head = make("medusa linked")
    export_head(head, rounded, tmp_path / "head", draft_length=2)
    config = json.loads((tmp_path / "head" / "config.json").read_text(encoding="utf-8"))
    assert config["bitdraft"]["format"] == "medusa-original"
    assert config["model_type"] != "medusa" and config["architectures"] != ["MedusaModel"]
    assert not [name for name in config if "num" in name and ("heads" in name or "layers" in name)]
    loaded = load_head(tmp_path / "head", rounded)
    assert isinstance(loaded, MedusaHead) and loaded.config == head.config
    mine, its = head.state_dict(), loaded.state_dict()
    assert mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in mine)


@pytest.mark.parametrize("drop", ["tensor", "setting"])
def test_a_link_that_is_only_half_there_is_refused(
    make: Callable[[str], MedusaHead], rounded: LowBitTarget, tmp_path: Path, drop: str
) -> None:
    folder = tmp_path / "head"
    export_head(make("medusa linked"), rounded, folder, draft_length=2)
    (folder / "manifest.json").unlink()
    file, config = folder / "medusa_lm_head.safetensors", json.loads((folder / "config.json").read_text())
    if drop == "tensor":
        weights = load_file(file)
        del weights["1.link.weight"]
        save_file(weights, file)
    else:
        config |= {"medusa_num_layers": 2, "bitdraft_head": {**config["bitdraft_head"], "link": False}}
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"links\.1\.weight"):
        load_head(folder, rounded)
