"""Which rows are supervised, and by whom: a loop over every sequence, row and step.

Step ``k`` at row ``t`` predicts token ``t + 2 + k``; its teacher is the target's distribution at ``t + 1 + k``.
It counts exactly when that token was written by the assistant and the target's own choice can be drafted.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from bitdraft.data.batches import make_batch
from bitdraft.data.chat import Example
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.eagle3 import Eagle3Config, Eagle3Head
from bitdraft.speculators.medusa import MedusaConfig, MedusaHead
from bitdraft.speculators.vocab import DraftVocab
from bitdraft.train.losses import step_weights
from bitdraft.train.objective import objective, wanted_rows
from bitdraft.train.states import StateSource, Supervision

K = 3
LENGTHS = [(6, 5), (2, 3), (9, 1), (1, 4), (4, 8)]  # tokens of prompt and answer, uneven on purpose


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


def supervise(target: LowBitTarget, head: DraftHead, examples: list[Example], mode: Any = "online") -> Supervision:
    source = StateSource(target, examples, head.capture_layers, mode, uses=len(examples))
    return source.supervision(range(len(examples)))


def everywhere(supervision: Supervision) -> Tensor:
    batch, length = supervision.batch.tokens.shape
    return torch.arange(length).expand(batch, -1)


class Oracle:
    """The slow loop. ``terms`` holds the (sequence, row, step) that count."""

    def __init__(
        self, target: LowBitTarget, head: DraftHead, examples: list[Example], outputs: Tensor, weights: list[float]
    ) -> None:
        self.loss = torch.zeros(())
        self.terms: set[tuple[int, int, int]] = set()
        self.left_out: set[tuple[int, int, int]] = set()
        agree: set[tuple[int, int, int]] = set()
        drafted = head.vocab.target_ids.tolist()
        for b, example in enumerate(examples):
            tokens = [*example.prompt, *example.answer]
            own = target.logits(target.states(torch.tensor([tokens])).last_hidden)[0]
            for t in range(len(tokens)):
                for k in range(len(outputs)):
                    predicted = t + 2 + k
                    if not len(example.prompt) <= predicted < len(tokens):
                        continue
                    choice = int(own[predicted - 1].argmax())
                    if choice not in drafted:
                        self.left_out.add((b, t, k))
                        continue
                    self.terms.add((b, t, k))
                    teacher = own[predicted - 1][drafted].softmax(-1)
                    logits = linear(outputs[k, b, t], head.output_weight)
                    self.loss = self.loss - weights[k] * (teacher * logits.log_softmax(-1)).sum()
                    if drafted[int(logits.argmax())] == choice:
                        agree.add((b, t, k))
        rows = {(b, t) for b, t, _ in self.terms | self.left_out}
        supervised = self.terms | self.left_out
        self.possible = [sum(all((*r, i) in supervised for i in range(k + 1)) for r in rows) for k in range(K)]
        self.accepted = [sum(all((*r, i) in agree for i in range(k + 1)) for r in rows) for k in range(K)]


def teacher_of(target: LowBitTarget, head: DraftHead) -> Callable[[Tensor], Tensor]:
    return target.logits_of(head.vocab.target_ids)


@pytest.mark.parametrize("kind", ["eagle3", "eagle3 half", "medusa"])
def test_the_loss_is_that_of_a_loop_over_rows_and_steps(target: LowBitTarget, kind: str) -> None:
    examples, head = make_examples(LENGTHS), make_head(target, kind)
    supervision = supervise(target, head, examples)
    weights, divisor = step_weights(K, 0.7), 13.0
    all_rows, few_rows = everywhere(supervision), wanted_rows(supervision, K)
    outputs = head(supervision.states, supervision.batch.tokens, all_rows)
    oracle = Oracle(target, head, examples, outputs, [w / divisor for w in weights.tolist()])
    parameters = [p for p in head.parameters() if p.requires_grad]
    expected = torch.autograd.grad(oracle.loss, parameters)
    for rows in (all_rows, few_rows):
        outputs = head(supervision.states, supervision.batch.tokens, rows)
        found = objective(outputs, rows, head, teacher_of(target, head), supervision, weights, divisor)
        torch.testing.assert_close(found.loss, oracle.loss, rtol=1e-4, atol=1e-5)
        assert found.possible.tolist() == oracle.possible
        assert found.accepted.tolist() == oracle.accepted
        for mine, its in zip(torch.autograd.grad(found.loss, parameters), expected, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-4)
    if kind == "eagle3 half":
        assert oracle.left_out, "some of the target's choices should be outside the draft vocabulary"


@pytest.mark.parametrize("kind", ["eagle3", "eagle3 half"])
def test_exactly_the_rows_that_predict_the_assistant_get_a_gradient(target: LowBitTarget, kind: str) -> None:
    examples, head = make_examples(LENGTHS), make_head(target, kind)
    supervision, weights = supervise(target, head, examples), step_weights(K, 0.7)
    rows = everywhere(supervision)
    outputs = head(supervision.states, supervision.batch.tokens, rows).detach().requires_grad_()
    objective(outputs, rows, head, teacher_of(target, head), supervision, weights, 1.0).loss.backward()
    assert outputs.grad is not None
    found = {(b, t, k) for k, b, t in (outputs.grad.abs().sum(-1) > 0).nonzero().tolist()}
    assert found == Oracle(target, head, examples, outputs.detach(), weights.tolist()).terms
    if kind == "eagle3":
        for b, (prompt, answer) in enumerate(LENGTHS):
            if answer > 1:
                assert (b, prompt - 1, 0) in found, "drafting begins at the last token of the prompt"
            assert (b, prompt + answer - 2, 0) not in found, "nothing follows the last token"
            assert not [t for row, t, _ in found if row == b and t > prompt + answer - 3]


def test_the_rows_asked_for_are_those_that_count(target: LowBitTarget) -> None:
    """Rows are consecutive per sequence, and cover every term."""
    examples, head = make_examples(LENGTHS), make_head(target, "eagle3")
    supervision = supervise(target, head, examples)
    rows = wanted_rows(supervision, K)
    outputs = head(supervision.states, supervision.batch.tokens, everywhere(supervision)).detach()
    oracle = Oracle(target, head, examples, outputs, [1.0] * K)
    assert {(b, t) for b, t, _ in oracle.terms} <= {(b, int(t)) for b in range(len(rows)) for t in rows[b]}
    longest = max(sum(lengths) for lengths in LENGTHS)
    assert rows.min() >= 0
    assert rows.max() < longest
    assert rows.shape[1] < longest, "rows that no step needs are not computed"


def test_padding_changes_nothing(target: LowBitTarget) -> None:
    """Each sequence's loss is the same alone and beside a much longer one."""
    examples, head = make_examples([*LENGTHS, (20, 15)]), make_head(target, "eagle3 half")
    weights = step_weights(K, 0.8)

    def loss_of(chosen: list[Example]) -> Tensor:
        supervision = supervise(target, head, chosen)
        rows = wanted_rows(supervision, K)
        outputs = head(supervision.states, supervision.batch.tokens, rows)
        return objective(outputs, rows, head, teacher_of(target, head), supervision, weights, 1.0).loss

    together = loss_of(examples)
    apart = torch.stack([loss_of([example]) for example in examples]).sum()
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)


def test_a_batch_without_a_supervised_token_is_named(target: LowBitTarget) -> None:
    head = make_head(target, "medusa")
    examples = [Example("nothing said", "", (1, 2, 3), ())]
    supervision = supervise(target, head, examples)
    rows = torch.zeros(1, 1, dtype=torch.int64)
    outputs = head(supervision.states, supervision.batch.tokens, rows)
    with pytest.raises(ValueError, match="no supervised token in the batch of nothing said"):
        objective(outputs, rows, head, teacher_of(target, head), supervision, step_weights(K, 1.0), 1.0)


@pytest.mark.parametrize("capture", [(2, 4, 5), ()], ids=["three layers", "no layers"])
def test_states_in_memory_are_those_computed_at_every_step(
    exact_target: LowBitTarget, capture: tuple[int, ...]
) -> None:
    examples = make_examples(LENGTHS)
    kept, fresh = (
        StateSource(exact_target, examples, capture, mode, uses=10, batch_size=2) for mode in ("memory", "online")
    )
    for indices in ([0, 1, 2], [3], [4, 2, 0]):
        mine, its = kept.supervision(indices), fresh.supervision(indices)
        assert torch.equal(mine.batch.tokens, its.batch.tokens)
        assert mine.batch.ids == its.batch.ids
        assert torch.equal(mine.supervised, its.supervised)
        assert torch.equal(mine.first_choices, its.first_choices)
        for b, length in enumerate(its.batch.lengths.tolist()):
            for a, c in (
                (mine.states.captured, its.states.captured),
                (mine.states.last_hidden, its.states.last_hidden),
            ):
                torch.testing.assert_close(a[b, :length], c[b, :length], rtol=1e-4, atol=1e-5)


def test_states_in_memory_are_computed_once(target: LowBitTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    run, passes = target.states, []

    def counting(input_ids: Tensor, **options: Any) -> Any:
        passes.append(len(input_ids))
        return run(input_ids, **options)

    monkeypatch.setattr(target, "states", counting)
    examples = make_examples(LENGTHS)
    counts = {}
    for mode in ("memory", "online"):
        passes.clear()
        source = StateSource(target, examples, (2, 4, 5), mode, uses=20)
        for _ in range(4):
            source.supervision(range(len(examples)))
        counts[mode] = sum(passes)
    assert counts == {"memory": len(examples), "online": 4 * len(examples)}


def test_first_choices_are_the_target_s_where_it_is_supervised(target: LowBitTarget) -> None:
    examples = make_examples(LENGTHS)
    supervision = StateSource(target, examples, (), "online", uses=5).supervision(range(len(examples)))
    own = target.logits(supervision.states.last_hidden).argmax(-1)
    assert torch.equal(supervision.first_choices, own * supervision.supervised)
    written = make_batch(examples).written()
    assert torch.equal(supervision.supervised[:, :-1], written[:, 1:])
    assert not supervision.supervised[:, -1].any()
