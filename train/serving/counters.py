"""The engine's counters of drafts beside ours, and whether they agree.

Both count alike (``speculators/metrics.py``): the first token of an answer comes from the prefill and belongs to no
pass; every pass counts its ``k`` drafts and all that it accepted, also the pass in which the answer ends, at its
end-of-turn token or at its longest.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bitdraft.speculators.metrics import Acceptance

POINTS = 2.0
"""Largest difference of a position's acceptance, in percentage points, where rounding may flip tokens."""
_LINE = re.compile(r"^vllm:spec_decode_(\w+?)_total(?:\{(.*)\})? (\S+)$")
_POSITION = re.compile(r'\bposition="(\d+)"')


def engine_counters(metrics: str, *, draft_length: int, prompts: int) -> Acceptance:
    """What Prometheus lines say of drafts, all the engine's processes together.

    Raises ``ValueError`` if a counter is missing, the parts are not the sum, nothing was drafted, or not
    ``draft_length`` tokens in every pass.
    """
    totals: dict[str, int] = {}
    accepted_at = [0] * draft_length
    for line in metrics.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name, labels, value = match[1], match[2] or "", int(float(match[3]))
        totals[name] = totals.get(name, 0) + value
        if name == "num_accepted_tokens_per_pos":
            position = _POSITION.search(labels)
            if position is None or int(position[1]) >= draft_length:
                raise ValueError(f"the engine drafts other than {draft_length} tokens a pass: it reports {line!r}")
            accepted_at[int(position[1])] += value
    wanted = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    missing = [name for name in wanted if name not in totals]
    if missing:
        raise ValueError(f"the engine's /metrics lack vllm:spec_decode_{missing[0]}_total: it serves without a head")
    if not totals["num_drafts"]:
        raise ValueError("the engine drafted nothing: every answer ended with its first token, or the head is not used")
    if sum(accepted_at) != totals["num_accepted_tokens"]:
        raise ValueError(
            f"the engine's counters contradict each other: {totals['num_accepted_tokens']} accepted, by position "
            f"{accepted_at}"
        )
    passes = totals["num_drafts"]
    if totals["num_draft_tokens"] != passes * draft_length:
        raise ValueError(
            f"the engine drafts other than {draft_length} tokens a pass: {totals['num_draft_tokens']} in {passes} "
            "passes (it cuts the drafts of a sequence that nears its longest)"
        )
    tried_at = (passes, *accepted_at[:-1])
    return Acceptance(draft_length, prompts, passes, totals["num_draft_tokens"], tuple(accepted_at), tried_at)


def points_apart(engine: Acceptance, ours: Acceptance) -> list[float]:
    """Per position, the engine's acceptance minus ours in percentage points."""
    return [100 * (a - b) for a, b in zip(engine.per_position, ours.per_position, strict=True)]


def chance_points(engine: Acceptance, ours: Acceptance) -> list[float]:
    """Per position, the standard error of ``points_apart`` in points if passes were drawn independently on both sides.

    Equal texts make it far smaller; it says what to expect where rounding has made the texts part.
    """
    sides = (engine, ours)
    shares = zip(*(side.per_position for side in sides), strict=True)
    return [
        100 * sum(p * (1 - p) / max(side.passes, 1) for p, side in zip(both, sides, strict=True)) ** 0.5
        for both in shares
    ]


def disagreement(engine: Acceptance, ours: Acceptance, *, exactly: bool) -> str | None:
    """In one sentence, where the counters differ by more than they may; ``None`` where they agree.

    ``exactly``: up to one draft, over all positions together, and one pass, as befits fp32. Else every position within
    ``POINTS``: answers part there and end elsewhere, and ``unaccounted`` says whether the passes cover them. People
    count positions from 1.
    """
    if exactly and abs(engine.passes - ours.passes) > 1:
        return (
            f"passes: the engine counts {engine.passes}, we count {ours.passes}, where fp32 allows a difference of one"
        )
    if exactly:
        pairs = list(zip(engine.accepted_at, ours.accepted_at, strict=True))
        if sum(abs(a - b) for a, b in pairs) <= 1:
            return None
        where = ", ".join(f"{a} and {b} at position {i}" for i, (a, b) in enumerate(pairs, start=1) if a != b)
        return f"drafts accepted, the engine's and ours: {where}, where fp32 allows a difference of one in all"
    apart = points_apart(engine, ours)
    worst = max(range(len(apart)), key=lambda i: abs(apart[i]))
    if abs(apart[worst]) <= POINTS:
        return None
    return (
        f"position {worst + 1}: the engine accepts {100 * engine.per_position[worst]:.2f} % of {engine.passes} passes, "
        f"we {100 * ours.per_position[worst]:.2f} % of {ours.passes}: {abs(apart[worst]):.2f} points apart, where "
        f"{POINTS:g} are allowed (chance alone: {chance_points(engine, ours)[worst]:.2f}, less with more prompts)"
    )


def unaccounted(counts: Acceptance, answers: Sequence[Sequence[int]]) -> str | None:
    """In one sentence, that ``counts`` are not those of ``answers``; ``None`` where they may be.

    No rounding excuses it: an answer's first token comes from the prefill, every other one was accepted or is a pass's
    bonus, and behind an answer's end its last pass emits no more than the draft length.
    """
    behind = sum(len(answer) - 1 for answer in answers)
    most = behind + counts.draft_length * len(answers)
    if behind <= counts.emitted <= most:
        return None
    return (
        f"the engine counts {counts.emitted} tokens out of {counts.passes} passes, but its {len(answers)} answers took "
        f"{behind} to {most}"
    )


@dataclass(frozen=True)
class Parting:
    """Where two answers to one prompt part."""

    prompt: str
    token: int


def partings(ids: Sequence[str], a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> list[Parting]:
    """The prompts whose answers differ, and at which token."""
    found = []
    for name, mine, its in zip(ids, a, b, strict=True):
        if list(mine) != list(its):
            shared = min(len(mine), len(its))
            found.append(Parting(name, next((i for i in range(shared) if mine[i] != its[i]), shared)))
    return found
