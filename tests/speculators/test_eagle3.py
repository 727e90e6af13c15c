"""EAGLE-3: what is trained is what drafts, and it sees nothing that drafting would not have."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrids import save_hybrid
from packs import outputs_at
from torch import Tensor
from torch.nn.functional import linear

from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget, TargetStates, load_target
from bitdraft.speculators.base import DraftContext, rows_at
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.eagle3 import Eagle3Config, Eagle3Head, default_capture_layers
from bitdraft.speculators.vocab import DraftVocab

STEPS = 4
MakeEagle3 = Callable[..., Eagle3Head]


def random_tokens(*shape: int, seed: int = 3) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def training_logits(head: Eagle3Head, target: LowBitTarget, tokens: list[int], row: int) -> Tensor:
    """``[K, D]``: what training computes at one row of one sequence."""
    ids = torch.tensor([tokens])
    states = target.states(ids, capture=head.capture_layers)
    with torch.no_grad():
        return linear(outputs_at(head, states, ids, torch.tensor([[row]])), head.output_weight)[:, 0, 0]


class Drafting:
    """A head that drafts behind several sequences at once, and the logits that it chooses from."""

    def __init__(self, head: Eagle3Head, target: LowBitTarget, sequences: list[list[int]]) -> None:
        self.head, self.target, self.sequences = head, target, [list(s) for s in sequences]
        self.state = head.new_state(64, SlotCache(1, 64))
        self.logits: list[Tensor] = []
        head.lm_head.register_forward_hook(lambda _module, _args, out: self.logits.append(out[:, 0]))

    def draft(self, first: list[int], newest: list[int], rows: int, behind: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Drafts ``[B, K]`` and their logits ``[K, B, D]`` after a pass over ``rows`` rows beginning at ``first``.

        Every sequence ends with the token that follows its newest row; ``behind`` are the rejected tokens that the pass
        also ran over.
        """
        captured, following = [], []
        for start, tokens, rejected in zip(first, self.sequences, behind, strict=True):
            run = [*tokens, *rejected, *[0] * rows][: start + rows + 1]
            states = self.target.states(torch.tensor([run]), capture=self.head.capture_layers)
            captured.append(states.captured[0, start : start + rows])
            following.append(run[start + 1 :])
        context = DraftContext(
            torch.stack(captured),
            torch.empty(len(first), rows, 0),
            torch.tensor(following),
            torch.tensor(first),
            torch.tensor(newest),
        )
        self.logits.clear()
        tree = self.head.propose(context, self.state, DraftPlan(length=STEPS), torch.empty(len(first), 0))
        assert len(self.logits) == STEPS
        assert tree.is_chain and torch.equal(tree.tokens[:, 0], context.newest_token)
        return tree.tokens[:, 1:], torch.stack(self.logits)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"size": 96},
        {"layers": (5,)},
        {"layers": (0, 7)},
        {"layers": (1, 3, 4, 6), "size": 200},
        {"fc_norm": True, "norm_output": True},
        {"size": 96, "output_rank": 24},
        {"norm_before_fc": True, "norm_before_residual": True, "attention": "qwen3", "layers": (1, 6)},
    ],
    ids=str,
)
def test_drafting_computes_what_training_computes(
    target: LowBitTarget, make_eagle3: MakeEagle3, settings: dict[str, Any]
) -> None:
    """Three sequences of different lengths, two passes; between them drafts are rejected and a sequence leaves."""
    head = make_eagle3(target, steps=STEPS, **settings)
    lengths = [6, 9, 4]
    sequences = [random_tokens(n + 1, seed=n).tolist() for n in lengths]
    drafting = Drafting(head, target, sequences)

    drafts, logits = drafting.draft([0, 0, 0], [n - 1 for n in lengths], max(lengths), [[], [], []])
    for b, n in enumerate(lengths):
        told = [*sequences[b], *drafts[b].tolist()]
        expected = training_logits(head, target, told, n - 1)
        torch.testing.assert_close(logits[:, b], expected, rtol=1e-4, atol=1e-4)
        assert drafts[b].tolist() == head.to_target_ids(expected.argmax(-1)).tolist()

    kept, accepted, bonus = [0, 2], [1, STEPS - 1], [17, 201]
    drafting.state.keep_rows(torch.tensor(kept))
    drafting.sequences = [
        [*sequences[b], *drafts[b, :count].tolist(), extra]
        for b, count, extra in zip(kept, accepted, bonus, strict=True)
    ]
    rejected = [[11] * (STEPS - count) for count in accepted]
    second, logits = drafting.draft([lengths[b] for b in kept], accepted, 1 + STEPS, rejected)
    for row, (b, count) in enumerate(zip(kept, accepted, strict=True)):
        told = [*drafting.sequences[row], *second[row].tolist()]
        expected = training_logits(head, target, told, lengths[b] + count)
        torch.testing.assert_close(logits[:, row], expected, rtol=1e-4, atol=1e-4)
        assert second[row].tolist() == head.to_target_ids(expected.argmax(-1)).tolist()


def levels_of(generator: torch.Generator, batch: int, above: int, width: int) -> tuple[Tensor, Tensor]:
    """Random tokens and parents of one depth, ``[B, W]`` each; several nodes may share a parent, and some have none."""
    tokens = torch.randint(0, 256, (batch, width), generator=generator)
    return tokens, torch.randint(0, above, (batch, width), generator=generator)


@pytest.mark.parametrize("settings", [{}, {"size": 96}, {"size": 96, "output_rank": 24}], ids=str)
def test_a_node_s_logits_are_those_of_a_chain_along_its_path(
    exact_target: LowBitTarget, make_eagle3: MakeEagle3, settings: dict[str, Any]
) -> None:
    """A tree of random shape for three sequences of different lengths, in two passes, in fp64."""
    head, generator = make_eagle3(exact_target, **settings), torch.Generator().manual_seed(4)
    lengths, width = torch.tensor([6, 9, 4]), [1, 3, 5, 4]
    batch = len(lengths)
    tree_state, chain_state = (head.new_state(64, SlotCache(1, 64)) for _ in range(2))
    start = torch.zeros_like(lengths)
    for _ in range(2):
        rows = int((lengths - start).max())
        sequences = torch.randint(0, 256, (batch, int(lengths.max()) + rows + 1), generator=generator)
        captured = exact_target.states(sequences, capture=head.capture_layers).captured
        at = start[:, None] + torch.arange(rows)
        context = DraftContext(
            rows_at(captured, at), torch.empty(batch, rows, 0), rows_at(sequences, at + 1), start, lengths - start - 1
        )
        with torch.no_grad():
            logits = [head.first(context, tree_state)[:, None]]
            levels = [levels_of(generator, batch, *pair) for pair in pairwise(width)]
            logits += [head.following(tree_state, *level) for level in levels]
            for leaf in range(width[-1]):
                paths, node = [], torch.full((batch, 1), leaf)
                for tokens, parents in reversed(levels):
                    paths.append((tokens.gather(1, node), node))
                    node = parents.gather(1, node)
                head.first(context, chain_state)
                for (token, here), expected in zip(reversed(paths), logits[1:], strict=True):
                    alone = head.following(chain_state, token, torch.zeros_like(token))
                    torch.testing.assert_close(alone, rows_at(expected, here), rtol=1e-10, atol=1e-10)
        start, lengths = lengths, lengths + torch.tensor([2, 1, 3])


def test_a_row_sees_states_up_to_itself_and_tokens_up_to_its_step(
    target: LowBitTarget, make_eagle3: MakeEagle3
) -> None:
    head, row, length = make_eagle3(target, steps=STEPS), 5, 14
    tokens = random_tokens(1, length)
    states = target.states(tokens, capture=head.capture_layers)
    rows = torch.tensor([[row]])
    with torch.no_grad():
        before = outputs_at(head, states, tokens, rows)
        garbage = states.captured.clone()
        garbage[:, row + 1 :] = 1e3
        assert torch.equal(outputs_at(head, TargetStates(garbage, states.last_hidden), tokens, rows), before)
        for changed in range(row + 1, length):
            other = tokens.clone()
            other[0, changed] = (other[0, changed] + 1) % 256
            after = outputs_at(head, target.states(other, capture=head.capture_layers), other, rows)
            first_to_see = changed - row - 1  # step k reads x_{t+1+k}
            same = [torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(after, before, strict=True)]
            assert same == [k < first_to_see for k in range(STEPS)]


def test_chosen_rows_are_the_same_as_among_all_rows(target: LowBitTarget, make_eagle3: MakeEagle3) -> None:
    head = make_eagle3(target, steps=STEPS)
    tokens = random_tokens(2, 11)
    states = target.states(tokens, capture=head.capture_layers)
    everywhere = torch.arange(11).expand(2, -1)
    some = torch.tensor([[2, 3, 6], [0, 1, 5]])
    with torch.no_grad():
        full = outputs_at(head, states, tokens, everywhere)
        few = outputs_at(head, states, tokens, some)
    assert full.shape == (STEPS, 2, 11, target.hidden_size)
    for b in range(2):
        torch.testing.assert_close(few[:, b], full[:, b, some[b]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("train_output", [False, True])
def test_the_target_s_weights_are_never_trained(
    target: LowBitTarget, make_eagle3: MakeEagle3, train_output: bool
) -> None:
    head = make_eagle3(target, size=96, steps=2, train_output=train_output)
    borrowed = {target.embedding.weight.data_ptr(), target.output_head.weight.data_ptr()}
    assert not borrowed & {p.data_ptr() for p in head.parameters()}
    assert not [name for name in head.state_dict() if "embed" in name]
    trained = {name for name, p in head.named_parameters() if p.requires_grad}
    everything = {name for name, _ in head.named_parameters()}
    assert everything - trained == (set() if train_output else {"lm_head.weight"})
    frozen = [target.embedding.weight.clone(), target.output_head.weight.clone()]

    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    tokens = random_tokens(1, 9)
    states = target.states(tokens, capture=head.capture_layers)
    outputs = outputs_at(head, states, tokens, torch.tensor([[1, 2, 3]]))
    linear(outputs, head.output_weight).logsumexp(-1).sum().backward()
    assert {name for name, p in head.named_parameters() if p.grad is not None and p.grad.any()} == trained
    optimizer.step()
    assert target.embedding.weight.grad is None
    assert torch.equal(target.embedding.weight, frozen[0])
    assert torch.equal(target.output_head.weight, frozen[1])


def test_the_output_head_starts_as_the_target_s_rows(target: LowBitTarget, make_eagle3: MakeEagle3) -> None:
    head = make_eagle3(target, size=96)
    assert torch.equal(head.lm_head.weight, target.output_head.weight[head.vocab.target_ids])
    assert torch.equal(head.norm.weight, target.final_norm.weight)  # type: ignore[arg-type]


def test_drafts_are_target_tokens_of_the_draft_vocabulary(target: LowBitTarget, make_eagle3: MakeEagle3) -> None:
    head = make_eagle3(target, size=40, steps=STEPS)
    drafts, _ = Drafting(head, target, [random_tokens(7, seed=s).tolist() for s in range(6)]).draft(
        [0] * 6, [5] * 6, 6, [[]] * 6
    )
    assert set(drafts.flatten().tolist()) <= set(head.vocab.target_ids.tolist())


@pytest.mark.parametrize("layers", range(3, 41))
def test_default_layers_are_three_and_engines_defaults_where_they_can_be(layers: int) -> None:
    chosen = default_capture_layers(layers)
    assert len(set(chosen)) == 3
    assert list(chosen) == sorted(chosen)
    assert chosen[0] >= 0 and chosen[-1] < layers
    if layers >= 7:
        assert set(chosen) == {2, layers // 2, layers - 3}


@pytest.mark.parametrize("layers", [(5, 2), (2, 2), (2, 8), (-1, 2)])
def test_capture_layers_must_ascend_within_the_target(target: LowBitTarget, layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must ascend within 0 … 7"):
        Eagle3Head.from_target(Eagle3Config(capture_layers=layers), target, DraftVocab.full(target.vocab_size))


@pytest.mark.parametrize(("field", "value"), [("steps", 0), ("draft_vocab_size", 0)])
def test_a_config_names_the_field_that_is_wrong(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"eagle3\.{field} must .*{value}"):
        Eagle3Config(**{field: value})  # type: ignore[arg-type]


def test_a_fresh_norm_multiplies_as_the_targets_does(tmp_path: Path, make_eagle3: MakeEagle3) -> None:
    """Gemma's norms multiply by 1 + weight."""
    folder = save_hybrid("gemma3", tmp_path / "target")
    target = load_target(str(folder), load_recipe("none"), dtype=torch.float32, compile_quantizer="off")
    x = torch.randn(3, target.hidden_size, generator=torch.Generator().manual_seed(0))
    head = make_eagle3(target)
    torch.testing.assert_close(head.norm(x), target.final_norm(x))
