"""``acceptance.json`` and the table on the terminal: the same numbers for a program and for a person."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.confidence import (
    Calibration,
    area_under_curve,
    expected_calibration_error,
    outcomes,
    reliability,
    truncation_table,
)
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.metrics import FEWEST_PROMPTS, Acceptance, length_interval, rate_interval, total
from bitdraft.speculators.tree_shapes import TreeShape
from bitdraft.train.environment import machine_facts
from bitdraft.train.measuring.acceptance import Decoded, Decoding, Measured
from bitdraft.train.measuring.prompt_sets import PromptSet

_THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def document(
    target: LowBitTarget,
    *,
    head: str,
    kind: str,
    trained_on: str | None,
    plan: DraftPlan | None,
    how: Decoding,
    tree_settings: str = "",
    results: Sequence[dict[str, Any]],
    bounds: dict[str, Any] | None = None,
    warnings: Sequence[str] = (),
) -> dict[str, Any]:
    """``acceptance.json``: what was measured and how, and the ``results`` of every set and draft length.

    ``plan``: one of the plans measured, which differ in length only.
    """
    sampling = how.rule.sampling
    return {
        "version": 1,
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "recipe": target.recipe.name,
        "recipe_fingerprint": target.recipe.fingerprint,
        "head": head,
        "kind": kind,
        "trained_on": trained_on,
        "served_on": target.recipe.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "drafts": "greedy" if plan is None or plan.draws == 0 else "sampled",
        "rule": "typical" if how.rule.typical else "greedy" if sampling.is_greedy else "sampling",
        "lossless": how.rule.is_lossless,
        "tree": tree_name(plan),
        "tree_settings": tree_settings,
        "batch_size": how.batch_size,
        "max_new_tokens": how.max_new_tokens,
        "seed": how.rule.seed,
        "machine": machine_facts(),
        "warnings": list(warnings),
        "bounds": bounds,
        "results": list(results),
    }


def tree_name(plan: DraftPlan | None) -> str:
    if plan is None or plan.shape is None:
        return "none"
    return "static" if isinstance(plan.shape, TreeShape) else "dynamic"


def tree_shape(plan: DraftPlan | None) -> str:
    """What else there is to say about the tree; empty for chains."""
    if plan is None or plan.shape is None:
        return ""
    if isinstance(plan.shape, TreeShape):
        return " ".join(".".join(map(str, node)) for node in plan.shape.nodes)
    return f"{plan.shape.nodes} nodes, width {plan.shape.width}"


def result(prompts: PromptSet, measured: Measured, plain: Decoded | None = None) -> dict[str, Any]:
    """One entry of ``results``. ``conditional``: given that all positions before were accepted.

    ``plain``: the same prompts decoded without drafts, for the speed.
    """
    counts, seconds, lossless = measured.total, measured.decoded.seconds, measured.lossless
    speed = measured.decoded.tokens_per_second
    return {
        "set": prompts.name,
        "draft_length": counts.draft_length,
        "tree_shape": tree_shape(measured.plan),
        **_counts(counts),
        "drafted_per_pass": counts.drafted_per_pass,
        "per_position": counts.per_position,
        "conditional": counts.conditional,
        "ci95": _interval(length_interval, measured.per_prompt),
        "rate_ci95": _interval(rate_interval, measured.per_prompt),
        "seconds": asdict(seconds),
        "tokens_per_second": speed,
        "plain_tokens_per_second": plain.tokens_per_second if plain else None,
        "speedup": speed / plain.tokens_per_second if plain else None,
        "lossless_checked": lossless.checked,
        "lossless_failed": lossless.failed,
        "lossless_failures": list(lossless.failures),
        "lossless_excused_near_ties": lossless.excused,
        "by_category": _by_category(prompts, measured.per_prompt),
        "per_prompt": [p.row for p in measured.per_prompt],
        "confidence": None,
        "stopped_early": None,
    }


def _counts(counts: Acceptance) -> dict[str, Any]:
    return {
        "prompts": counts.prompts,
        "passes": counts.passes,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "emitted": counts.emitted,
        "acceptance_rate": counts.rate,
        "acceptance_length": counts.length,
    }


def _interval(
    of: Callable[[Sequence[Acceptance]], tuple[float, float]], parts: Sequence[Acceptance]
) -> list[float] | None:
    """``None`` for so few prompts that resampling them would pretend to know."""
    return list(of(parts)) if len(parts) >= FEWEST_PROMPTS else None


def _by_category(prompts: PromptSet, per_prompt: Sequence[Acceptance]) -> dict[str, Any]:
    found: dict[str, list[Acceptance]] = {}
    for conversation, counts in zip(prompts.conversations, per_prompt, strict=True):
        found.setdefault(conversation.category or "(none)", []).append(counts)
    return {
        name: {**_counts(total(parts, parts[0].draft_length)), "ci95": _interval(length_interval, parts)}
        for name, parts in sorted(found.items())
    }


def trace_tensors(decoded: Decoded) -> tuple[torch.Tensor, torch.Tensor]:
    """The recorded passes of a fixed-length chain: confidences ``[P, K]`` and accepted drafts ``[P]``."""
    passes = [entry for trace in decoded.traces for entry in trace]
    return torch.tensor([c for c, _ in passes]), torch.tensor([a for _, a in passes])


def confidence_report(decoded: Decoded, calibration: Calibration) -> dict[str, Any] | None:
    """How far the calibrated confidence can be trusted on these passes, and what stopping by it would trade; ``None``
    without a pass."""
    confidence, accepted = trace_tensors(decoded)
    if len(accepted) == 0:
        return None
    tried, success = outcomes(accepted, confidence.shape[1])
    calibrated = calibration.calibrated(confidence)
    positions = []
    for j in range(confidence.shape[1]):
        raw, good, hit = confidence[tried[:, j], j], calibrated[tried[:, j], j], success[tried[:, j], j]
        positions.append(
            {
                "temperature": calibration.temperature[j],
                "shift": calibration.shift[j],
                "tries": len(hit),
                "ece_before": expected_calibration_error(raw, hit) if len(hit) else None,
                "ece": expected_calibration_error(good, hit) if len(hit) else None,
                "auc": area_under_curve(good, hit) if 0 < hit.sum() < len(hit) else None,
                "bins": [asdict(b) for b in reliability(good, hit)] if len(hit) else [],
            }
        )
    rows = truncation_table(confidence, accepted, calibration, _THRESHOLDS)
    frontier = [
        {
            "threshold": row.threshold,
            "drafted_per_pass": row.drafted,
            "acceptance_rate": row.rate,
            "acceptance_length": row.length,
            "share_kept": row.share,
        }
        for row in rows
    ]
    return {"positions": positions, "frontier": frontier}


def stopped_early(stopped: Measured, fixed: Measured) -> dict[str, Any]:
    """What stopping changed: a rate alone could be raised at will, so the fixed length's numbers stand beside it."""
    stop = stopped.plan and stopped.plan.stop
    assert stop
    return {
        "threshold": stop.threshold,
        "policy": "cost" if stop.cost else "threshold",
        "fixed": {
            "acceptance_rate": fixed.total.rate,
            "acceptance_length": fixed.total.length,
            "drafted_per_pass": fixed.total.drafted_per_pass,
        },
        "share_kept": stopped.total.length / fixed.total.length if fixed.total.passes else 1.0,
    }


_COLUMNS = (
    "draft  acceptance       95 %        acceptance  accepted /             seconds                 accepted at\n"
    "length   length       interval         rate       drafted     passes  draft verify  other  position 1, 2, …"
)


def table(results: Sequence[Measured]) -> str:
    """The same numbers for a person."""
    lines = [_COLUMNS]
    for m in results:
        c, s = m.total, m.decoded.seconds
        interval = _interval(length_interval, m.per_prompt)
        shown = f"{interval[0]:6.3f} … {interval[1]:<6.3f}" if interval else " too few prompts"
        positions = " ".join(f"{a:.2f}" for a in c.per_position)
        seconds = f"{s.draft:>6.1f} {s.verify:>6.1f} {s.other:>6.1f}"
        lines.append(
            f"{c.draft_length:>5} {c.length:>10.3f}   {shown:15} {c.rate:>9.1%} "
            f"{c.accepted:>8} /{c.drafted:>6} {c.passes:>8} {seconds}  {positions}"
        )
        if m.lossless.checked:
            excused = f", {m.lossless.excused} part at a near-tie" if m.lossless.excused else ""
            verdict = f"{m.lossless.checked} checked, {m.lossless.failed} failed{excused}"
            lines.append(f"      equal to plain decoding: {verdict}")
        lines += [f"      warning: {text}" for text in m.warnings]
    return "\n".join(lines)
