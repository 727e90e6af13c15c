"""Measuring acceptance: real speculative decoding of held-out prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from bitdraft.data.chat import Example, end_of_turn_ids
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import Drafter
from bitdraft.speculators.decode import Rule, Seconds, generate
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.lossless import Lossless, compare_with_plain
from bitdraft.speculators.metrics import FEWEST_PROMPTS, Acceptance, total
from bitdraft.speculators.sampling import Sampling
from bitdraft.train.environment import RunFailed
from bitdraft.train.measuring.prompt_sets import Dialogs, PromptSet

FEW_PASSES = 100
"""Passes below which an acceptance says little."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """What decides the answers besides target, drafter and prompts."""

    max_new_tokens: int
    batch_size: int
    rule: Rule = field(default_factory=Rule)
    thinking: bool | None = None
    """The chat template's mode; None leaves its own default."""


@dataclass(frozen=True)
class Decoded:
    """A set's answers and what they took."""

    per_prompt: list[Acceptance]
    """One per conversation, all its turns together."""
    traces: list[list[tuple[list[float], int]]]
    """Per conversation, what ``Generation.trace`` holds."""
    answers: list[list[Example]]
    """Per conversation, its answered turns."""
    seconds: Seconds

    @property
    def tokens(self) -> int:
        return sum(len(e.answer) for turns in self.answers for e in turns)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds.total


@dataclass(frozen=True)
class Measured:
    """One draft plan's result, with the per-prompt counts that intervals need."""

    plan: DraftPlan | None
    decoded: Decoded
    lossless: Lossless
    warnings: list[str]

    @property
    def draft_length(self) -> int:
        return self.plan.length if self.plan else 0

    @property
    def per_prompt(self) -> list[Acceptance]:
        return self.decoded.per_prompt

    @property
    def total(self) -> Acceptance:
        return total(self.per_prompt, self.draft_length)


def decode(
    target: LowBitTarget,
    drafter: Drafter | None,
    tokenizer: Any,
    prompts: PromptSet,
    plan: DraftPlan | None,
    how: Decoding,
    report: Callable[[int], object] = lambda turns: None,
) -> Decoded:
    """Answer every conversation, turn by turn; ``report`` is called with the number of turns answered.

    Raises ``ValueError`` for a prompt that leaves no room for its answer and drafts in the target's context.
    """
    end_ids = end_of_turn_ids(target.model, tokenizer)
    room = how.max_new_tokens + (plan.nodes if plan else 0) + 1
    dialogs = Dialogs(prompts, tokenizer, target.context_length, room, how.thinking)
    count = len(prompts.conversations)
    counts = [Acceptance.none(plan.length if plan else 0) for _ in range(count)]
    traces: list[list[tuple[list[float], int]]] = [[] for _ in range(count)]
    seconds, number = Seconds(), 0
    while turn := dialogs.next_turn():
        # Every turn of every prompt has random numbers of its own.
        rule = replace(how.rule, seed=how.rule.seed + 7919 * number)
        done, took = generate(
            target,
            drafter,
            turn.prompts,
            plan=plan,
            rule=rule,
            max_new_tokens=how.max_new_tokens,
            end_ids=end_ids,
            batch_size=how.batch_size,
            report=report,
        )
        seconds, number = seconds + took, number + 1
        for row, generation in zip(turn.rows, done, strict=True):
            counts[row] += generation.counts
            traces[row] += generation.trace
        dialogs.answered(turn, [g.tokens for g in done], end_ids)
    per_prompt = [replace(c, prompts=1) for c in counts]
    return Decoded(per_prompt, traces, dialogs.examples(), seconds)


def measure(
    target: LowBitTarget,
    drafter: Drafter,
    tokenizer: Any,
    prompts: PromptSet,
    plans: Sequence[DraftPlan],
    how: Decoding,
    *,
    check: int,
) -> list[Measured]:
    """Decode ``prompts`` under every plan; compare the first ``check`` conversations with plain decoding.

    The comparison is greedy, whatever the temperature: it tells whether drafting and verification are sound.
    """
    results = []
    turns = sum(m.role == "user" for c in prompts.conversations for m in c.messages)
    plain: dict[tuple[int, ...], list[int]] = {}
    with tqdm(total=turns * len(plans), unit="prompt", desc=f"acceptance on {prompts.name}") as bar:
        for plan in plans:
            done = decode(target, drafter, tokenizer, prompts, plan, how, bar.update)
            checked = prompts.first(check)
            if how.rule.sampling.is_greedy:
                same = done.answers[:check]
            else:
                greedy = replace(how, rule=Rule())
                same = decode(target, drafter, tokenizer, checked, replace(plan, sampling=Sampling()), greedy).answers
            lossless = _compare(target, tokenizer, [e for turns in same for e in turns], plain, how)
            results.append(Measured(plan, done, lossless, _warnings(prompts, plan, done)))
    return results


def plain_result(done: Decoded) -> Measured:
    """Plain decoding as a measurement: one token per pass, nothing to compare."""
    return Measured(None, done, Lossless(0, 0, ()), [])


def _compare(
    target: LowBitTarget,
    tokenizer: Any,
    drafted: Sequence[Example],
    plain: dict[tuple[int, ...], list[int]],
    how: Decoding,
) -> Lossless:
    """Plain decoding of the same prompts, remembered in ``plain``, against the drafted answers."""
    missing = [e.prompt for e in drafted if e.prompt not in plain]
    done, _ = generate(
        target,
        None,
        missing,
        max_new_tokens=how.max_new_tokens,
        end_ids=end_of_turn_ids(target.model, tokenizer),
        batch_size=how.batch_size,
    )
    plain.update({prompt: g.tokens for prompt, g in zip(missing, done, strict=True)})
    return compare_with_plain(
        target,
        [e.id for e in drafted],
        [e.prompt for e in drafted],
        [e.answer for e in drafted],
        [plain[e.prompt] for e in drafted],
    )


def _warnings(prompts: PromptSet, plan: DraftPlan, done: Decoded) -> list[str]:
    few = (
        [f"{prompts.name}: {len(prompts.ids)} prompts are too few for intervals"]
        if len(prompts.ids) < FEWEST_PROMPTS
        else []
    )
    longest = max((len(e.answer) for turns in done.answers for e in turns), default=0)
    passes = sum(p.passes for p in done.per_prompt)
    if longest <= plan.length:
        return [
            *few,
            f"{prompts.name}: no answer is longer than {longest} tokens, of which {plan.length} are drafted at once: "
            "acceptance from so few passes means little",
        ]
    if passes < FEW_PASSES:
        return [*few, f"{prompts.name}: acceptance from only {passes} passes means little: measure more prompts"]
    return few


def require_lossless(results: Sequence[Measured]) -> None:
    """``RunFailed`` naming the first prompt whose answer differs from plain decoding without excuse."""
    for m in results:
        if m.lossless.failures:
            raise RunFailed(f"draft length {m.draft_length} is not lossless: {m.lossless.failures[0]}")
