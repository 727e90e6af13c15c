"""At temperatures above 0 decoding with drafts samples from the target: chi-square tests against exact enumeration.

Thousands of copies of one prompt, each with its own random numbers, write four tokens through ``generate`` itself. The
target keeps its three likeliest tokens at every step, so there are 81 answers, and their probabilities are known.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import bitdraft.speculators.decode as decode_module
import bitdraft.speculators.verify as verify_module
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.confidence import Calibration
from bitdraft.speculators.decode import Generation, Rule, generate
from bitdraft.speculators.draft_length import CostModel
from bitdraft.speculators.drafting import DraftPlan, DynamicShape
from bitdraft.speculators.early_stop import EarlyStop
from bitdraft.speculators.metrics import total
from bitdraft.speculators.sampling import Sampling
from bitdraft.speculators.tree import DraftTree
from bitdraft.speculators.tree_shapes import cartesian
from bitdraft.speculators.verify import Distribution, Verdict, sampled

NEW_TOKENS, COPIES = 4, 1500
PROMPT = [0, 3, 7]
RULE = Rule(sampling=Sampling(temperature=1.3, top_k=3), seed=1)
DRAWN = Sampling(temperature=1.5)
CALIBRATION = Calibration((1.0,) * 3, (0.0,) * 3)
BY_COST = EarlyStop(
    calibration=CALIBRATION,
    cost=CostModel(draft=1.0, verified=((1, 1000.0), (4 * COPIES, 1000.0 + COPIES))),
    per_position=(0.5, 0.3, 0.2),
)
PLANS = {
    "chain of drawn drafts": DraftPlan(length=3, sampling=DRAWN),
    "chain of greedy drafts": DraftPlan(length=3),
    "tree of drawn drafts": DraftPlan(length=3, shape=cartesian([3, 2, 1]), sampling=DRAWN),
    "tree of greedy drafts": DraftPlan(length=2, shape=cartesian([3, 2])),
    "dynamic tree": DraftPlan(length=3, shape=DynamicShape(8, 3), sampling=DRAWN),
    "threshold": DraftPlan(length=3, sampling=DRAWN, stop=EarlyStop(calibration=CALIBRATION, threshold=0.2)),
    "cost": DraftPlan(length=3, sampling=DRAWN, stop=BY_COST),
}
QuickTarget = Callable[[torch.dtype], LowBitTarget]
QuickHead = Callable[[str, LowBitTarget], DraftHead]


@pytest.fixture(scope="module")
def target(quick_target: QuickTarget) -> LowBitTarget:
    return quick_target(torch.float32)


@pytest.fixture(scope="module")
def chances(target: LowBitTarget) -> dict[tuple[int, ...], float]:
    """The probability of every answer that the target can write."""
    answers: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NEW_TOKENS):
        ids = torch.tensor([[*PROMPT, *answer] for answer in answers])
        rows = RULE.sampling.probabilities(target.logits(target.states(ids).last_hidden[:, -1])).tolist()
        answers = {
            (*answer, token): chance * p
            for (answer, chance), row in zip(answers.items(), rows, strict=True)
            for token, p in enumerate(row)
            if p > 0
        }
    assert len(answers) == 3**NEW_TOKENS
    return answers


def p_value(written: list[tuple[int, ...]], chances: dict[tuple[int, ...], float]) -> float:
    """Pearson's chi-square test, rare answers together; 0 if something impossible was written."""
    if not set(written) <= set(chances):
        return 0.0
    expected = {answer: chance * len(written) for answer, chance in chances.items()}
    counts = dict.fromkeys(chances, 0)
    for answer in written:
        counts[answer] += 1
    rare = [answer for answer, count in expected.items() if count < 5]
    cells = [(counts[a], expected[a]) for a in chances if expected[a] >= 5]
    cells.append((sum(counts[a] for a in rare), sum(expected[a] for a in rare)))
    statistic = torch.tensor(sum((count - mean) ** 2 / mean for count, mean in cells if mean), dtype=torch.float64)
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2, dtype=torch.float64), statistic / 2))


def sample(target: LowBitTarget, head: DraftHead | None, plan: DraftPlan | None) -> list[Generation]:
    done, _ = generate(
        target,
        head,
        [PROMPT] * COPIES,
        plan=plan,
        rule=RULE,
        max_new_tokens=NEW_TOKENS,
        end_ids=set(),
        batch_size=COPIES,
    )
    return done


def answers(generations: list[Generation]) -> list[tuple[int, ...]]:
    return [tuple(g.tokens) for g in generations]


def test_plain_sampling_has_the_target_s_distribution(
    target: LowBitTarget, chances: dict[tuple[int, ...], float]
) -> None:
    written = answers(sample(target, None, None))
    assert p_value(written, chances) > 1e-4
    likeliest = max(chances, key=lambda answer: chances[answer])
    assert p_value([likeliest if answer[0] == likeliest[0] else answer for answer in written], chances) < 1e-9


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["eagle3", "eagle3 reduced", "eagle3 low rank", "medusa", "medusa linked"])
def test_drafts_leave_the_target_s_distribution(
    target: LowBitTarget, quick_head: QuickHead, chances: dict[tuple[int, ...], float], kind: str, plan: str
) -> None:
    chosen = PLANS[plan]
    done = sample(target, quick_head(kind, target), chosen)
    counts = total([g.counts for g in done], chosen.length)
    assert counts.accepted > 100, "too few drafts were accepted to tell"
    if chosen.stop:
        assert counts.drafted < counts.passes * chosen.length, "no chain ended early"
    assert p_value(answers(done), chances) > 1e-4


# --- what is wrong is found -------------------------------------------------------------------------------------------


def lenient(tree: DraftTree, logits: Tensor, uniforms: Tensor, distribution: Distribution) -> Verdict:
    """Drafts are kept with probability min(1, 2 p / q)."""
    return sampled(tree, logits, uniforms / 2, distribution)


def without_residual(tree: DraftTree, logits: Tensor, uniforms: Tensor, distribution: Distribution) -> Verdict:
    """After a refusal siblings are judged, and the bonus is drawn, by the target's distribution as it was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_module, "_residual", lambda rest, _proposal: rest)
        return sampled(tree, logits, uniforms, distribution)


def as_if_drawn(tree: DraftTree, logits: Tensor, uniforms: Tensor, distribution: Distribution) -> Verdict:
    """Greedy drafts are judged as if any token could have been proposed."""
    return sampled(replace(tree, proposals=torch.full(logits.shape, 1 / 12)), logits, uniforms, distribution)


def by_token(tree: DraftTree, logits: Tensor, uniforms: Tensor, distribution: Distribution) -> Verdict:
    """Chains end where the drawn token is an even one."""
    real = tree.real & torch.cat([tree.real[:, :1], tree.tokens[:, 1:] % 2 == 1], dim=1).cumprod(1).bool()
    return sampled(replace(tree, real=real), logits, uniforms, distribution)


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        ("chain of drawn drafts", lenient),
        ("chain of drawn drafts", without_residual),
        ("chain of drawn drafts", by_token),
        ("chain of greedy drafts", lenient),
        ("chain of greedy drafts", as_if_drawn),
        ("tree of drawn drafts", without_residual),
        ("dynamic tree", without_residual),
    ],
)
def test_a_rule_that_is_not_lossless_is_found_out(
    target: LowBitTarget,
    quick_head: QuickHead,
    chances: dict[tuple[int, ...], float],
    plan: str,
    rule: Callable[..., Verdict],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_module, "sampled", rule)
    assert p_value(answers(sample(target, quick_head("medusa", target), PLANS[plan])), chances) < 1e-6


def test_typical_acceptance_is_not_lossless(
    target: LowBitTarget, quick_head: QuickHead, chances: dict[tuple[int, ...], float]
) -> None:
    done, _ = generate(
        target,
        quick_head("medusa", target),
        [PROMPT] * COPIES,
        plan=PLANS["chain of greedy drafts"],
        rule=replace(RULE, typical=True),
        max_new_tokens=NEW_TOKENS,
        end_ids=set(),
        batch_size=COPIES,
    )
    assert p_value(answers(done), chances) < 1e-6
