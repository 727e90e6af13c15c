"""Medusa heads: they start as the target itself, stay separate, and draft what they are trained to."""

from collections.abc import Callable

import pytest
import torch
from packs import outputs_at
from torch import Tensor
from torch.nn.functional import linear

from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftContext
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.medusa import MedusaConfig, MedusaHead
from bitdraft.speculators.vocab import DraftVocab

MakeMedusa = Callable[..., MedusaHead]
own_or_shared = pytest.mark.parametrize("own_output", [False, True], ids=["shared output", "own outputs"])


def random_tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(2))


def logits_of(head: MedusaHead, outputs: Tensor) -> Tensor:
    """``[K, B, R, V]``."""
    weight = head.output_weight
    return torch.stack([linear(out, weight if weight.ndim == 2 else weight[k]) for k, out in enumerate(outputs)])


def context_of(last_hidden: Tensor, newest: Tensor) -> DraftContext:
    batch, length = last_hidden.shape[:2]
    return DraftContext(
        torch.empty(batch, length, 0, 0),
        last_hidden,
        torch.zeros(batch, length, dtype=torch.int64),
        torch.zeros(batch, dtype=torch.int64),
        newest,
    )


def drafts_after(head: MedusaHead, last_hidden: Tensor, newest: Tensor, k: int) -> Tensor:
    context = context_of(last_hidden, newest)
    state = head.new_state(32, SlotCache(1, 32))
    tree = head.propose(context, state, DraftPlan(length=k), torch.empty(len(newest), 0))
    assert torch.equal(tree.tokens[:, 0], context.newest_token)
    return tree.tokens[:, 1:]


@own_or_shared
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_a_fresh_head_is_the_target_s_own_distribution(
    target: LowBitTarget, own_output: bool, blocks: int, bias: bool
) -> None:
    config = MedusaConfig(heads=3, blocks=blocks, own_output=own_output, bias=bias)
    head = MedusaHead.from_target(config, target, DraftVocab.full(target.vocab_size))
    tokens = random_tokens(2, 9)
    states = target.states(tokens)
    rows = torch.tensor([[1, 4, 8], [0, 2, 3]])
    own = target.logits(states.last_hidden)
    expected = torch.stack([own[b, rows[b]] for b in range(2)])
    with torch.no_grad():
        logits = logits_of(head, outputs_at(head, states, tokens, rows))
    for of_one_head in logits:
        torch.testing.assert_close(of_one_head, expected, rtol=1e-5, atol=1e-5)
    newest = torch.tensor([8, 3])
    greedy = own[torch.arange(2), newest].argmax(-1)
    assert torch.equal(drafts_after(head, states.last_hidden, newest, 3), greedy[:, None].expand(-1, 3))


@own_or_shared
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_drafting_computes_what_training_computes(
    target: LowBitTarget, make_medusa: MakeMedusa, own_output: bool, bias: bool
) -> None:
    head = make_medusa(target, heads=4, blocks=2, own_output=own_output, bias=bias)
    if own_output:
        for own in head.lm_heads.parameters():
            torch.nn.init.normal_(own)
    tokens = random_tokens(3, 9)
    states = target.states(tokens)
    newest = torch.tensor([8, 0, 4])
    with torch.no_grad():
        logits = logits_of(head, outputs_at(head, states, tokens, newest[:, None]))
    drafts = drafts_after(head, states.last_hidden, newest, 4)
    assert torch.equal(drafts, logits[:, :, 0].argmax(-1).T)
    assert len(set(drafts[0].tolist())) > 1, "different heads should disagree, or nothing was compared"
    for k in (1, 3):
        assert torch.equal(drafts_after(head, states.last_hidden, newest, k), drafts[:, :k])


def test_every_node_of_a_depth_has_its_head_s_logits(target: LowBitTarget, make_medusa: MakeMedusa) -> None:
    head = make_medusa(target, heads=3)
    tokens = random_tokens(2, 9)
    states, newest = target.states(tokens), torch.tensor([8, 4])
    state = head.new_state(32, SlotCache(1, 32))
    with torch.no_grad():
        expected = logits_of(head, outputs_at(head, states, tokens, newest[:, None]))[:, :, 0]  # [K, B, V]
        first = head.first(context_of(states.last_hidden, newest), state)
        levels = [head.following(state, random_tokens(2, w), torch.zeros(2, w, dtype=torch.int64)) for w in (3, 1)]
    torch.testing.assert_close(first, expected[0], rtol=1e-4, atol=1e-4)
    assert [level.shape for level in levels] == [(2, 3, target.vocab_size), (2, 1, target.vocab_size)]
    for level, logits in zip(levels, expected[1:], strict=True):
        torch.testing.assert_close(level, logits[:, None].expand_as(level), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_outputs_are_the_formula_s_and_every_weight_learns(
    target: LowBitTarget, make_medusa: MakeMedusa, bias: bool
) -> None:
    """``h ← h + SiLU(W h + b)``, block after block, row by row."""
    head, row = make_medusa(target, heads=2, blocks=2, bias=bias), 3
    names = {f"blocks.{k}.layers.{i}.{leaf}" for k in range(2) for i in range(2) for leaf in ("weight", "bias")}
    assert set(head.state_dict()) == {name for name in names if bias or name.endswith("weight")}
    tokens = random_tokens(1, 6)
    states, weights = target.states(tokens), {name: p.detach() for name, p in head.named_parameters()}
    outputs = outputs_at(head, states, tokens, torch.tensor([[row]]))
    for k in range(2):
        h = states.last_hidden[0, row]
        for i in range(2):
            y = weights[f"blocks.{k}.layers.{i}.weight"] @ h
            y = y + weights[f"blocks.{k}.layers.{i}.bias"] if bias else y
            h = h + y / (1 + (-y).exp())
        torch.testing.assert_close(outputs[k, 0, 0], h, rtol=1e-5, atol=1e-5)
    outputs.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in head.parameters())


@own_or_shared
def test_blocks_are_separate_modules(target: LowBitTarget, make_medusa: MakeMedusa, own_output: bool) -> None:
    heads, blocks = 3, 2
    head = make_medusa(target, scale=0, heads=heads, blocks=blocks, own_output=own_output)
    assert len({p.data_ptr() for p in head.blocks.parameters()}) == heads * blocks
    tokens = random_tokens(1, 5)
    states, rows = target.states(tokens), torch.tensor([[2, 4]])
    with torch.no_grad():
        before = outputs_at(head, states, tokens, rows)
        next(head.blocks[1].parameters()).fill_(0.1)
        after = outputs_at(head, states, tokens, rows)
    assert [torch.equal(a, b) for a, b in zip(after, before, strict=True)] == [True, False, True]


def test_the_target_s_output_head_is_borrowed_not_trained(target: LowBitTarget, make_medusa: MakeMedusa) -> None:
    shared, own = make_medusa(target, heads=2), make_medusa(target, heads=2, own_output=True)
    its = target.output_head.weight
    assert shared.output_weight.data_ptr() == its.data_ptr()
    assert its.data_ptr() not in {p.data_ptr() for head in (shared, own) for p in head.parameters()}
    assert sum(p.numel() for p in shared.parameters()) == 2 * target.hidden_size**2
    assert own.output_weight.shape == (2, target.vocab_size, target.hidden_size)
    assert own.output_weight.requires_grad
    assert not shared.output_weight.requires_grad
    assert all("lm_head" not in name for name in shared.state_dict())


def test_the_number_of_heads_is_the_longest_draft(target: LowBitTarget, make_medusa: MakeMedusa) -> None:
    assert make_medusa(target, heads=2).longest_draft == 2


def test_a_reduced_vocabulary_is_refused(target: LowBitTarget) -> None:
    vocab = DraftVocab(torch.arange(10), target.vocab_size)
    with pytest.raises(ValueError, match="full vocabulary"):
        MedusaHead.from_target(MedusaConfig(), target, vocab)


@pytest.mark.parametrize("field", ["heads", "blocks"])
def test_a_config_names_the_field_that_is_wrong(field: str) -> None:
    with pytest.raises(ValueError, match=rf"medusa\.{field} must be at least 1, got 0"):
        MedusaConfig(**{field: 0})  # type: ignore[arg-type]
