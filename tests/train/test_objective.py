"""Which rows are supervised, and by whom: a loop over every document, row and step.

Step ``k`` at row ``t`` predicts token ``t + 2 + k``; its teacher is the target's distribution at ``t + 1 + k``.
It counts exactly when that token was written by the assistant and the target's own choice can be drafted.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from bitdraft.data.chat import Example
from bitdraft.data.packing import make_pack
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.documents import Documents
from bitdraft.speculators.eagle3 import Eagle3Config, Eagle3Head
from bitdraft.speculators.medusa import MedusaConfig, MedusaHead
from bitdraft.speculators.vocab import DraftVocab
from bitdraft.train.config import StatesConfig
from bitdraft.train.loss_terms import LossConfig, step_weights
from bitdraft.train.module import TrainedHead
from bitdraft.train.states import StateSource, Supervision

K = 3
LENGTHS = [(6, 5), (2, 3), (9, 1), (1, 4), (4, 8)]  # tokens of prompt and answer, uneven on purpose
Mode = Literal["memory", "online", "disk"]


def make_examples(lengths: list[tuple[int, int]]) -> list[Example]:
    generator = torch.Generator().manual_seed(8)

    def random(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 256, (n,), generator=generator).tolist())

    return [Example(f"e{i}", "", random(p), random(a)) for i, (p, a) in enumerate(lengths)]


def make_head(target: LowBitTarget, kind: str) -> DraftHead:
    torch.manual_seed(0)
    full = DraftVocab.full(target.vocab_size)
    if kind == "medusa":
        head: DraftHead = MedusaHead.from_target(MedusaConfig(heads=K), target, full)
        for weight in head.parameters():
            torch.nn.init.normal_(weight, std=0.3)
        return head
    half = DraftVocab(torch.arange(0, target.vocab_size, 2), target.vocab_size)
    if kind == "eagle3":
        return Eagle3Head.from_target(Eagle3Config(steps=K), target, full)
    return Eagle3Head.from_target(Eagle3Config(steps=K, train_output=True), target, half)


def source_of(
    target: LowBitTarget, head: DraftHead, examples: list[Example], folder: Path, mode: Mode = "online"
) -> StateSource:
    return StateSource(target, examples, head.capture_layers, K, StatesConfig(mode=mode), uses=10, cache=folder)


def supervised(target: LowBitTarget, head: DraftHead, examples: list[Example]) -> Supervision:
    return source_of(target, head, examples, Path()).supervision(range(len(examples)))


def trained(target: LowBitTarget, head: DraftHead, decay: float = 0.7) -> TrainedHead:
    return TrainedHead(head, target.logits_of(head.vocab.target_ids), LossConfig(step_decay=decay))


def everywhere(head: DraftHead, supervision: Supervision) -> Tensor:
    """``[K, N, H]``: the outputs with drafts at every row."""
    lengths = [end - begin for begin, end in pairwise(supervision.pack.bounds)]
    return head.training_outputs(supervision.states, supervision.pack.tokens, Documents.whole(lengths))


class Oracle:
    """The slow loop. ``terms`` holds the (row of the pack, step) that count."""

    def __init__(
        self, target: LowBitTarget, head: DraftHead, examples: list[Example], outputs: Tensor, weights: list[float]
    ) -> None:
        self.loss = torch.zeros(())
        self.terms: set[tuple[int, int]] = set()
        self.left_out: set[tuple[int, int]] = set()
        agree: set[tuple[int, int]] = set()
        drafted = head.vocab.target_ids.tolist()
        begin = 0
        for example in examples:
            tokens = [*example.prompt, *example.answer]
            own = target.logits(target.states(torch.tensor([tokens])).last_hidden)[0]
            for t in range(len(tokens)):
                for k in range(len(outputs)):
                    predicted = t + 2 + k
                    if not len(example.prompt) <= predicted < len(tokens):
                        continue
                    choice = int(own[predicted - 1].argmax())
                    if choice not in drafted:
                        self.left_out.add((begin + t, k))
                        continue
                    self.terms.add((begin + t, k))
                    teacher = own[predicted - 1][drafted].softmax(-1)
                    logits = linear(outputs[k, begin + t], head.output_weight)
                    self.loss = self.loss - weights[k] * (teacher * logits.log_softmax(-1)).sum()
                    if drafted[int(logits.argmax())] == choice:
                        agree.add((begin + t, k))
            begin += len(tokens)
        supervised = self.terms | self.left_out
        rows = {row for row, _ in supervised}
        self.possible = [sum(all((r, i) in supervised for i in range(k + 1)) for r in rows) for k in range(K)]
        self.accepted = [sum(all((r, i) in agree for i in range(k + 1)) for r in rows) for k in range(K)]


@pytest.mark.parametrize("kind", ["eagle3", "eagle3 half", "medusa"])
def test_the_loss_is_that_of_a_loop_over_rows_and_steps(target: LowBitTarget, kind: str) -> None:
    examples, head = make_examples(LENGTHS), make_head(target, kind)
    supervision, divisor = supervised(target, head, examples), 13.0
    weights = [w / divisor for w in step_weights(K, 0.7).tolist()]
    oracle = Oracle(target, head, examples, everywhere(head, supervision), weights)
    parameters = [p for p in head.parameters() if p.requires_grad]
    expected = torch.autograd.grad(oracle.loss, parameters)
    found = trained(target, head)(supervision, divisor)
    torch.testing.assert_close(found.loss, oracle.loss, rtol=1e-4, atol=1e-5)
    assert found.possible.tolist() == oracle.possible
    assert found.accepted.tolist() == oracle.accepted
    assert found.terms.tolist() == [sum(k == step for _, k in oracle.terms) for step in range(K)]
    for mine, its in zip(torch.autograd.grad(found.loss, parameters), expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-4)
    if kind == "eagle3 half":
        assert oracle.left_out, "some of the target's choices should be outside the draft vocabulary"


class Watched(Eagle3Head):
    """Keeps its outputs, to see which of them get a gradient."""

    outputs: Tensor

    def training_outputs(self, *arguments: Any) -> Tensor:
        self.outputs = super().training_outputs(*arguments).detach().requires_grad_()
        return self.outputs


@pytest.mark.parametrize("kind", ["eagle3", "eagle3 half"])
def test_exactly_the_rows_that_predict_the_assistant_get_a_gradient(target: LowBitTarget, kind: str) -> None:
    examples, head = make_examples(LENGTHS), make_head(target, kind)
    supervision = supervised(target, head, examples)
    oracle = Oracle(target, head, examples, everywhere(head, supervision), [1.0] * K)
    head.__class__ = Watched
    assert isinstance(head, Watched)
    trained(target, head)(supervision, 1.0).loss.backward()
    assert head.outputs.grad is not None
    rows = supervision.documents.rows.tolist()
    found = {(rows[r], k) for k, r in (head.outputs.grad.abs().sum(-1) > 0).nonzero().tolist()}
    assert found == oracle.terms
    if kind == "eagle3":
        for (begin, end), (prompt, answer) in zip(pairwise(supervision.pack.bounds), LENGTHS, strict=True):
            if answer > 1:
                assert (begin + prompt - 1, 0) in found, "drafting begins at the last token of the prompt"
            assert not [t for t, _ in found if end - 3 < t < end], "nothing follows the last token"


def test_the_drafting_rows_are_few_and_cover_every_term(target: LowBitTarget) -> None:
    examples, head = make_examples([*LENGTHS, (30, 4)]), make_head(target, "eagle3")
    supervision = supervised(target, head, examples)
    oracle = Oracle(target, head, examples, everywhere(head, supervision), [1.0] * K)
    rows = set(supervision.documents.rows.tolist())
    assert {t for t, _ in oracle.terms} <= rows
    assert len(rows) <= sum(answer + K for _, answer in [*LENGTHS, (30, 4)]), "rows that no step needs are left out"


def test_packing_changes_nothing(target: LowBitTarget) -> None:
    """Each document's loss is the same alone and beside others."""
    examples, head = make_examples([*LENGTHS, (20, 15)]), make_head(target, "eagle3 half")
    module = trained(target, head)
    together = module(supervised(target, head, examples), 1.0).loss
    apart = torch.stack([module(supervised(target, head, [example]), 1.0).loss for example in examples]).sum()
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)


def test_no_token_of_a_document_is_visible_to_another(target: LowBitTarget) -> None:
    """Another document in the middle of the pack changes no bit of the others' outputs."""
    examples, head = make_examples(LENGTHS), make_head(target, "eagle3")
    other = [*examples[:2], Example("other", "", tuple(range(100, 109)), (7,)), *examples[3:]]
    assert sum(map(len, (other[2].prompt, other[2].answer))) == sum(LENGTHS[2])
    before, after = (supervised(target, head, e) for e in (examples, other))
    a, b = before.pack.bounds[2:4]
    inside = (before.documents.rows >= a) & (before.documents.rows < b)
    with torch.no_grad():
        mine, its = (head.training_outputs(s.states, s.pack.tokens, s.documents) for s in (before, after))
    assert torch.equal(mine[:, ~inside], its[:, ~inside])
    assert not torch.equal(mine[:, inside], its[:, inside])


def test_a_pack_without_a_supervised_token_is_named(target: LowBitTarget) -> None:
    head = make_head(target, "medusa")
    supervision = supervised(target, head, [Example("nothing said", "", (1, 2, 3), ())])
    with pytest.raises(ValueError, match="no supervised token in the batch of nothing said"):
        trained(target, head)(supervision, 1.0)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_kept_states_are_those_computed_at_every_step(exact_target: LowBitTarget, kind: str, tmp_path: Path) -> None:
    examples, head = make_examples(LENGTHS), make_head(exact_target, kind)
    modes: tuple[Mode, ...] = ("online", "memory", "disk")
    fresh, *kept = (source_of(exact_target, head, examples, tmp_path, mode) for mode in modes)
    for indices in ([0, 1, 2], [3], [4, 2, 0]):
        its = fresh.supervision(indices)
        for mine in (source.supervision(indices) for source in kept):
            assert torch.equal(mine.pack.tokens, its.pack.tokens)
            assert (mine.pack.ids, mine.pack.bounds) == (its.pack.ids, its.pack.bounds)
            assert torch.equal(mine.supervised, its.supervised)
            assert torch.equal(mine.first_choices, its.first_choices)
            torch.testing.assert_close(mine.log_normalisers, its.log_normalisers, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(mine.states.captured, its.states.captured, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(mine.states.last_hidden, its.states.last_hidden, rtol=1e-4, atol=1e-5)


def test_kept_states_are_computed_once(target: LowBitTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, passes = target.states, []

    def counting(input_ids: Tensor, **options: Any) -> Any:
        passes.append(len(input_ids))
        return run(input_ids, **options)

    monkeypatch.setattr(target, "states", counting)
    examples, head = make_examples(LENGTHS), make_head(target, "eagle3")
    counts = {}
    modes: tuple[Mode, ...] = ("memory", "disk", "online")
    for mode in modes:
        passes.clear()
        for _ in range(2):
            source = source_of(target, head, examples, tmp_path, mode)
            for _ in range(2):
                source.supervision(range(len(examples)))
        counts[mode] = sum(passes)
    each = len(examples)
    assert counts == {"memory": 2 * each, "disk": each, "online": 4 * each}


def test_first_choices_are_the_target_s_where_it_is_supervised(target: LowBitTarget) -> None:
    examples = make_examples(LENGTHS)
    supervision = supervised(target, make_head(target, "medusa"), examples)
    logits = target.logits(supervision.states.last_hidden)
    assert torch.equal(supervision.first_choices, logits.argmax(-1) * supervision.supervised)
    normalisers = logits.float().logsumexp(-1) * supervision.supervised
    torch.testing.assert_close(supervision.log_normalisers, normalisers)
    written = make_pack(examples).written()
    for begin, end in pairwise(supervision.pack.bounds):
        assert torch.equal(supervision.supervised[begin : end - 1], written[begin + 1 : end])
        assert not supervision.supervised[end - 1]
