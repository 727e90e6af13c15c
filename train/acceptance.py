"""Measuring acceptance: real speculative decoding of held-out prompts, as a document and a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bitdraft.data.chat import end_of_turn_ids, prompt_ids
from bitdraft.data.sources import Conversation, Message
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.decode import Generation, Seconds, generate
from bitdraft.speculators.lossless import Lossless, compare_with_plain
from bitdraft.speculators.metrics import Acceptance, length_interval, total
from bitdraft.train.config import AcceptanceConfig
from bitdraft.train.environment import RunFailed, machine_facts


@dataclass(frozen=True)
class PromptSet:
    """Named prompts, as token ids."""

    name: str
    ids: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Measured:
    """One draft length's result, with the per-prompt counts that intervals need."""

    draft_length: int
    per_prompt: list[Acceptance]
    seconds: Seconds
    lossless: Lossless

    @property
    def total(self) -> Acceptance:
        return total(self.per_prompt, self.draft_length)


def prompt_set(
    target: LowBitTarget,
    tokenizer: Any,
    conversations: Sequence[Conversation],
    name: str,
    how: AcceptanceConfig,
) -> PromptSet:
    """The first ``how.prompts`` prompts: each conversation up to its first user message, not yet answered.

    Raises ``ValueError`` for a prompt that leaves no room for its answer and drafts in the target's context.
    """
    new_tokens = how.max_new_tokens + max(how.draft_lengths) + 1
    ids, prompts = [], []
    for conversation in conversations[: how.prompts]:
        tokens = prompt_ids(tokenizer, first_turn(conversation))
        if len(tokens) + new_tokens > target.context_length:
            raise ValueError(
                f"{conversation.source}: the prompt has {len(tokens)} tokens, which with {new_tokens} new ones exceeds "
                f"the target's context of {target.context_length}"
            )
        ids.append(conversation.id)
        prompts.append(tuple(tokens))
    return PromptSet(name, tuple(ids), tuple(prompts))


def first_turn(conversation: Conversation) -> list[Message]:
    """Everything up to the first user message."""
    first = next(i for i, m in enumerate(conversation.messages) if m.role == "user")
    return list(conversation.messages[: first + 1])


def measure(
    target: LowBitTarget,
    head: DraftHead,
    tokenizer: Any,
    prompts: PromptSet,
    how: AcceptanceConfig,
) -> list[Measured]:
    """Decode ``prompts`` greedily at every draft length; compare ``how.check`` answers with plain decoding."""
    end_ids = end_of_turn_ids(target.model, tokenizer)
    shared = {"max_new_tokens": how.max_new_tokens, "end_ids": end_ids, "batch_size": how.batch_size}
    plain, _ = generate(target, None, prompts.prompts[: how.check], draft_length=0, **shared)  # type: ignore[arg-type]
    results = []
    with tqdm(
        total=len(prompts.ids) * len(how.draft_lengths), unit="prompt", desc=f"acceptance on {prompts.name}"
    ) as bar:
        for k in how.draft_lengths:
            done, seconds = generate(
                target,
                head,
                prompts.prompts,
                draft_length=k,
                report=bar.update,
                **shared,  # type: ignore[arg-type]
            )
            results.append(Measured(k, [g.acceptance() for g in done], seconds, _check(target, prompts, done, plain)))
    return results


def _check(target: LowBitTarget, prompts: PromptSet, done: list[Generation], plain: list[Generation]) -> Lossless:
    n = len(plain)
    mine, its = [g.tokens for g in done[:n]], [g.tokens for g in plain]
    return compare_with_plain(target, prompts.ids[:n], prompts.prompts[:n], mine, its)


def document(target: LowBitTarget, head: str, prompts: PromptSet, results: Sequence[Measured]) -> dict[str, Any]:
    """``acceptance.json``. ``conditional``: given that all positions before were accepted."""
    return {
        "version": 1,
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "recipe": target.recipe.name,
        "recipe_fingerprint": target.recipe.fingerprint,
        "head": head,
        "dtype": str(target.dtype).removeprefix("torch."),
        "temperature": 0.0,
        "machine": machine_facts(),
        "results": [_result(prompts.name, m) for m in results],
    }


def _result(set_name: str, measured: Measured) -> dict[str, Any]:
    counts, seconds = measured.total, measured.seconds
    return {
        "set": set_name,
        "draft_length": counts.draft_length,
        "prompts": counts.prompts,
        "passes": counts.passes,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "emitted": counts.emitted,
        "acceptance_rate": counts.rate,
        "acceptance_length": counts.length,
        "per_position": counts.per_position,
        "conditional": counts.conditional,
        "ci95": list(length_interval(measured.per_prompt)),
        "seconds": {"draft": seconds.draft, "verify": seconds.verify, "other": seconds.other},
        "lossless_checked": measured.lossless.checked,
        "lossless_failed": measured.lossless.failed,
        "lossless_excused_near_ties": measured.lossless.excused,
    }


_COLUMNS = (
    "draft  acceptance       95 %        acceptance  accepted /             seconds                 accepted at\n"
    "length   length       interval         rate       drafted     passes  draft verify  other  position 1, 2, …"
)


def table(results: Sequence[Measured]) -> str:
    """The same numbers for a person."""
    lines = [_COLUMNS]
    for m in results:
        c, s = m.total, m.seconds
        low, high = length_interval(m.per_prompt)
        positions = " ".join(f"{a:.2f}" for a in c.per_position)
        seconds = f"{s.draft:>6.1f} {s.verify:>6.1f} {s.other:>6.1f}"
        lines.append(
            f"{c.draft_length:>5} {c.length:>10.3f}   {low:6.3f} … {high:<6.3f} {c.rate:>9.1%} "
            f"{c.accepted:>8} /{c.drafted:>6} {c.passes:>8} {seconds}  {positions}"
        )
        if m.lossless.checked:
            excused = f", {m.lossless.excused} part at a near-tie" if m.lossless.excused else ""
            verdict = f"{m.lossless.checked} checked, {m.lossless.failed} failed{excused}"
            lines.append(f"      equal to plain decoding: {verdict}")
    return "\n".join(lines)


def require_lossless(results: Sequence[Measured]) -> None:
    """``RunFailed`` naming the first prompt whose answer differs from plain decoding without excuse."""
    for m in results:
        if m.lossless.failures:
            raise RunFailed(f"draft length {m.draft_length} is not lossless: {m.lossless.failures[0]}")


def set_name(paths: Sequence[Path]) -> str:
    return "+".join(p.stem for p in paths)
