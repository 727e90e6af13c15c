"""One head on one target, in the engine and here: the same prompts, decoded three times.

Ours first, since it takes seconds and finds most mistakes; then the engine with the head, then the engine alone.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bitdraft.data.chat import end_of_turn_ids, prompt_ids
from bitdraft.data.conversation import Conversation
from bitdraft.quant.fingerprint import digest_of
from bitdraft.quant.profiles import load_recipe_for
from bitdraft.quant.target import load_target, load_tokenizer
from bitdraft.speculators.decode import generate
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.load import load_head, recipe_of_head
from bitdraft.speculators.lossless import must_be_identical
from bitdraft.speculators.low_bit import low_bit_layers
from bitdraft.speculators.metrics import Acceptance, total
from bitdraft.train.environment import RunFailed, give_memory_back
from bitdraft.train.exporting.adapter import refuse_adapter
from bitdraft.train.serving.client import complete_all, draft_metrics
from bitdraft.train.serving.counters import (
    Parting,
    chance_points,
    disagreement,
    engine_counters,
    partings,
    points_apart,
    unaccounted,
)
from bitdraft.train.serving.engine import EngineSpec, running
from bitdraft.train.serving.pair import Pair, fingerprint_of_head, served_on

_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class How:
    """What both sides do alike."""

    draft_length: int
    max_new_tokens: int
    dtype: str
    batch: int


@dataclass(frozen=True)
class Ours:
    """The in-process measurement, and what the engine needs for its own."""

    kind: str
    head_fingerprint: str
    target_fingerprint: str
    prompts: list[list[int]]
    end_ids: set[int]
    answers: list[list[int]]
    counts: Acceptance
    served_on: str
    computed_by: str
    exact_texts: bool
    """Whether nothing excuses another text: fp32, and no input of the target's is rounded to a few bits."""
    exact_counts: bool
    """Whether nothing excuses other counters: nor is one of the head's."""
    trained: dict[str, Any]


@dataclass(frozen=True)
class Served:
    """What the engine wrote and counted."""

    with_head: list[list[int]]
    alone: list[list[int]]
    counts: Acceptance


def measure_here(pair: Pair, conversations: Sequence[Conversation], quant: str, profile: str, how: How) -> Ours:
    """Decode the opening question of every conversation with the exported files, in this process.

    Raises ``ValueError`` where head, target or prompts are not what they must be, ``RunFailed`` where no draft is
    accepted.
    """
    refuse_adapter(pair.head)
    recipe = load_recipe_for(quant, profile)
    tokenizer = load_tokenizer(pair.target)
    target = load_target(pair.target, recipe, dtype=getattr(torch, how.dtype))
    head = load_head(pair.head, target)
    prompts = [prompt_ids(tokenizer, c.opening.messages) for c in conversations]
    _check_room(conversations, prompts, target.context_length, how)
    end_ids = end_of_turn_ids(target.model, tokenizer)
    with tqdm(total=len(prompts), unit="prompt", desc="in this process") as bar:
        done, _ = generate(
            target,
            head,
            prompts,
            plan=DraftPlan(length=how.draft_length),
            max_new_tokens=how.max_new_tokens,
            end_ids=end_ids,
            batch_size=how.batch,
            report=bar.update,
        )
    counts = total([g.counts for g in done], how.draft_length)
    if counts.passes and not counts.accepted:
        raise RunFailed(f"none of the {counts.drafted} drafts of {pair.head} was accepted: the engine is not started")
    # The engine computes in fp32 too, but a last bit moves codes of its inputs: only without them texts are the same.
    exact = must_be_identical(target) and not target.recipe.rounds_on_the_way
    ours = Ours(
        kind=head.kind,
        head_fingerprint=fingerprint_of_head(pair.head),
        target_fingerprint=target.fingerprint,
        prompts=prompts,
        end_ids=end_ids,
        answers=[g.tokens for g in done],
        counts=replace(counts, prompts=len(prompts)),
        served_on=served_on(target),
        computed_by=target.recipe.computed_by,
        exact_texts=exact,
        exact_counts=exact and not any(layer.activations for layer in low_bit_layers(head).values()),
        trained=recipe_of_head(pair.head),
    )
    del target, head  # the engine needs the memory
    give_memory_back()
    return ours


def measure_engine(spec: EngineSpec, ours: Ours, how: How, logs: Path, start_seconds: float) -> Served:
    """The same prompts through the engine's API, with the head and without.

    Logs carry this process's number: others may measure into the same folder. Raises ``ValueError`` where the engine
    fails, or drafts when it should not.
    """
    alone = replace(spec, head=None, method="", draft_length=0)
    with_head, metrics = engine_answers(spec, ours, how, logs / f"{os.getpid()}-with-head.log", start_seconds)
    counts = engine_counters(metrics, draft_length=how.draft_length, prompts=len(ours.prompts))
    plain, metrics = engine_answers(alone, ours, how, logs / f"{os.getpid()}-alone.log", start_seconds)
    if metrics:
        raise ValueError(f"the engine drafts without a head, so its texts compare nothing: {metrics.splitlines()[0]}")
    return Served(with_head, plain, counts)


def engine_answers(
    spec: EngineSpec, ours: Ours, how: How, log: Path, start_seconds: float
) -> tuple[list[list[int]], str]:
    """Start the engine, ask it everything; also its metrics on drafts. ``ValueError`` in its own words if it fails."""
    what = "engine with the head" if spec.head else "engine alone"
    with (
        running(spec, log, start_seconds=start_seconds) as engine,
        tqdm(total=len(ours.prompts), unit="prompt", desc=what) as bar,
    ):
        try:
            answers = complete_all(
                engine.url,
                ours.prompts,
                max_new_tokens=how.max_new_tokens,
                end_ids=ours.end_ids,
                at_once=how.batch,
                report=bar.update,
            )
            return answers, draft_metrics(engine.url)
        except (ValueError, OSError) as error:
            engine.check_alive()
            raise ValueError(f"{error} (log: {log})") from error


def _check_room(conversations: Sequence[Conversation], prompts: list[list[int]], context: int, how: How) -> None:
    for conversation, prompt in zip(conversations, prompts, strict=True):
        if (needed := needed_context([prompt], how)) > context:
            raise ValueError(
                f"{conversation.source}: the prompt has {len(prompt)} tokens, which with the answer and its drafts "
                f"makes {needed}, more than the target's context of {context}: shorten it or lower --max-new-tokens"
            )


def needed_context(prompts: Sequence[Sequence[int]], how: How) -> int:
    """Tokens that the longest sequence may come to, a pass's drafts behind its last token included.

    Engines cut the drafts of a sequence that nears its limit, and would then count fewer than we do.
    """
    return max(map(len, prompts)) + how.max_new_tokens + 2 * (how.draft_length + 1)


def verdict(ours: Ours, served: Served, ids: Sequence[str]) -> list[str]:
    """What is wrong, one sentence each; nothing if engine and simulation agree and the engine's texts are equal."""
    wrong = []
    difference = disagreement(served.counts, ours.counts, exactly=ours.exact_counts)
    wrong += [sentence for sentence in (difference, unaccounted(served.counts, served.with_head)) if sentence]
    changed = partings(ids, served.with_head, served.alone)
    if ours.exact_texts and changed:
        wrong.append(f"with the head the engine writes {len(changed)} answers that differ: {_named(changed)}")
    return wrong


def numbers(ours: Ours, served: Served, ids: Sequence[str]) -> dict[str, Any]:
    """The measured part of a row of ``serving.json``."""
    apart = points_apart(served.counts, ours.counts)
    return {
        "prompts": len(ids),
        "prompts_fingerprint": digest_of([torch.tensor(prompt) for prompt in ours.prompts]),
        "engine": _counts(served.counts),
        "ours": _counts(ours.counts),
        "points_apart": apart,
        "largest_points_apart": max(map(abs, apart)),
        "chance_points": chance_points(served.counts, ours.counts),
        "must_be_exact": {"counters": ours.exact_counts, "texts": ours.exact_texts},
        "texts": {
            "tokens": sum(map(len, served.with_head)),
            "engine_with_and_without_head": _parted(partings(ids, served.with_head, served.alone)),
            "engine_and_ours": _parted(partings(ids, served.with_head, ours.answers)),
        },
    }


def _counts(counts: Acceptance) -> dict[str, Any]:
    return {
        "passes": counts.passes,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "accepted_at": list(counts.accepted_at),
        "per_position": counts.per_position,
        "acceptance_rate": counts.rate,
        "acceptance_length": counts.length,
    }


def _parted(found: list[Parting]) -> dict[str, Any]:
    return {"differ": len(found), "part_at": [asdict(p) for p in found]}


def _named(found: list[Parting]) -> str:
    return ", ".join(f"{p.prompt} at token {p.token}" for p in found[:_NAMED]) + ", …" * (len(found) > _NAMED)
