"""Acceptance documents as a measurement would write them, from simulated passes: numbers agree with each other."""

from collections.abc import Sequence
from typing import Any

import numpy as np

Document = dict[str, Any]

CATEGORIES = ("math", "code", "chat", "translation")
MACHINE = {
    "python": "3.11.7",
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "machine": "x86_64",
    "device": "AVX512",
    "threads": 2,
}


def counts_of(rows: Sequence[Sequence[int]]) -> Document:
    """The sums and ratios of ``per_prompt`` rows ``[passes, drafted, accepted at 1 … K]``."""
    passes, drafted, *at = np.sum(rows, axis=0).tolist()
    accepted = sum(at)
    before = [passes, *at][: len(at)]
    return {
        "prompts": len(rows),
        "passes": passes,
        "drafted": drafted,
        "accepted": accepted,
        "emitted": passes + accepted,
        "drafted_per_pass": drafted / max(passes, 1),
        "acceptance_rate": accepted / max(drafted, 1),
        "acceptance_length": (passes + accepted) / max(passes, 1),
        "per_position": [a / max(passes, 1) for a in at],
        "conditional": [a / max(b, 1) for a, b in zip(at, before, strict=True)],
    }


def simulated(chances: Sequence[float], prompts: int, seed: int) -> list[list[int]]:
    """``per_prompt`` rows of a chain whose position ``i`` is accepted with ``chances[i]``, given all before it."""
    hard = np.random.default_rng(99).normal(0, 0.07, prompts)  # the same prompts are hard in every cell
    rng = np.random.default_rng(seed)
    rows = []
    for prompt in range(prompts):
        passes = int(rng.integers(20, 40))
        given = np.clip(np.array(chances) + hard[prompt], 0.01, 0.99)
        accepted = (rng.random((passes, len(chances))) < given).cumprod(axis=1)  # [passes, K]
        rows.append([passes, passes * len(chances), *accepted.sum(axis=0).tolist()])
    return rows


def result(name: str, rows: Sequence[Sequence[int]], **changes: Any) -> Document:
    counts = counts_of(rows)
    length, rate, step = counts["acceptance_length"], counts["acceptance_rate"], len(rows) // len(CATEGORIES)
    by_category = {}
    for i, category in enumerate(CATEGORIES):
        part = counts_of(rows[i * step : (i + 1) * step])
        keys = ("prompts", "passes", "drafted", "accepted", "emitted", "acceptance_rate", "acceptance_length")
        ends = [part["acceptance_length"] - 0.08, part["acceptance_length"] + 0.08]
        by_category[category] = {**{key: part[key] for key in keys}, "ci95": ends}
    return {
        "set": name,
        "draft_length": len(rows[0]) - 2,
        **counts,
        "ci95": [length - 0.04, length + 0.04],
        "rate_ci95": [rate - 0.02, rate + 0.02],
        "seconds": {"draft": 1.9, "verify": 18.1, "other": 0.3},
        "tokens_per_second": 101.5,
        "plain_tokens_per_second": 88.2,
        "speedup": 1.15,
        "lossless_checked": 8,
        "lossless_failed": 0,
        "lossless_excused_near_ties": 1,
        "by_category": by_category,
        "per_prompt": [list(row) for row in rows],
        "confidence": None,
        "stopped_early": None,
        **changes,
    }


def cell(
    trained_on: str | None, served_on: str, results: Sequence[Document], *, kind: str = "eagle3", **changes: Any
) -> Document:
    return {
        "version": 1,
        "target": "SmolLM2-135M-Instruct",
        "target_fingerprint": "8a34507a8020d279",
        "recipe": served_on,
        "recipe_fingerprint": "4f53cda18c2baa0c",
        "head": f"runs/{kind}-{trained_on}/export",
        "kind": kind,
        "trained_on": trained_on,
        "served_on": served_on,
        "dtype": "bfloat16",
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "drafts": "greedy",
        "rule": "greedy",
        "lossless": True,
        "tree_settings": "",
        "tree": "none",
        "batch_size": 48,
        "max_new_tokens": 64,
        "seed": 0,
        "machine": MACHINE,
        "warnings": [],
        "bounds": None,
        "results": list(results),
        **changes,
    }


def matrix(*cells: Document) -> Document:
    command = "python scripts/measure_acceptance.py --quant none mxfp4"
    return {"version": 1, "command": command, "date": "2026-12-01", "seed": 0, "cells": list(cells)}


def _bins(power: float, most: float) -> list[Document]:
    stated = [most * (0.06 + 0.1 * i) for i in range(10)]
    return [{"confidence": c, "accepted": c**power, "count": 400 - 30 * i} for i, c in enumerate(stated)]


def confidence(rows: Sequence[Sequence[int]]) -> Document:
    """Confidence and frontier of a run with these ``per_prompt`` rows; the frontier ends at the run itself."""
    whole = counts_of(rows)
    found = [
        {
            "temperature": 1.4 - 0.1 * i,
            "shift": -0.05 * i,
            "ece_before": 0.081,
            "ece": 0.012 + 0.001 * i,
            "auc": 0.84,
            "tries": 3000 // (i + 1),
            "bins": _bins(1.05 + 0.1 * i, 0.98 - 0.04 * i),
        }
        for i in range(len(whole["per_position"]))
    ]
    frontier = []
    for threshold, drafted, kept in ((0.0, 1.0, 1.0), (0.2, 0.75, 0.98), (0.4, 0.5, 0.92), (0.6, 0.3, 0.84)):
        per_pass, length = drafted * whole["drafted_per_pass"], kept * whole["acceptance_length"]
        frontier.append(
            {
                "threshold": threshold,
                "drafted_per_pass": per_pass,
                "acceptance_rate": (length - 1) / per_pass,
                "acceptance_length": length,
                "share_kept": kept,
            }
        )
    return {"positions": found, "frontier": frontier}


def bounds(sets: Sequence[str]) -> Document:
    numbers = {
        "one_minus_tv": 0.862,
        "one_minus_tv_ci95": [0.851, 0.873],
        "top1_agreement": 0.843,
        "top1_agreement_ci95": [0.829, 0.857],
    }
    return {"reference": "none", **numbers, "sets": dict.fromkeys(sets, numbers)}


def realistic() -> Document:
    """Two sets, two draft lengths, an EAGLE-3 head of either training and a control, a Medusa head and n-grams."""
    chances = {
        ("eagle3", "none", "none"): 0.62,
        ("eagle3", "none", "mxfp4"): 0.48,
        ("eagle3", "mxfp4", "none"): 0.52,
        ("eagle3", "mxfp4", "mxfp4"): 0.61,
        ("eagle3", "none, text of mxfp4", "none"): 0.56,
        ("eagle3", "none, text of mxfp4", "mxfp4"): 0.53,
        ("medusa", "mxfp4", "none"): 0.28,
        ("medusa", "mxfp4", "mxfp4"): 0.34,
        ("ngram", None, "none"): 0.22,
        ("ngram", None, "mxfp4"): 0.21,
    }
    cells = []
    for i, ((kind, trained_on, served_on), chance) in enumerate(chances.items()):
        results = []
        for name, k in (("demo", 3), ("demo", 5), ("gsm8k", 3)):
            rows = simulated([chance * 0.97**j for j in range(k)], 40, seed=1000 * i + 10 * k + len(name))
            knows = kind == "eagle3" and trained_on == served_on and (name, k) == ("demo", 5)
            unchecked = {"plain_tokens_per_second": None, "speedup": None, "lossless_checked": 0}
            extra = {"confidence": confidence(rows) if knows else None, **(unchecked if name == "gsm8k" else {})}
            results.append(result(name, rows, **extra))
        if (kind, trained_on, served_on) == ("eagle3", "mxfp4", "mxfp4"):
            results.append(_stopped(results[1], i))
        low = {"bounds": bounds(["demo", "gsm8k"])} if served_on != "none" else {}
        cells.append(cell(trained_on, served_on, results, kind=kind, **low))
    return matrix(*cells)


def _stopped(fixed: Document, seed: int) -> Document:
    """Longest chains of 5, of which drafting stops after 2.4 on average."""
    rows = [
        [passes, int(2.4 * passes), *(int(0.9 * a) for a in at)]
        for passes, _, *at in simulated([0.61] * 5, 40, seed=100 * seed + 9)
    ]
    keys = ("acceptance_rate", "acceptance_length", "drafted_per_pass")
    stop = {"threshold": 0.3, "policy": "threshold", "fixed": {key: fixed[key] for key in keys}}
    kept = counts_of(rows)["acceptance_length"] / fixed["acceptance_length"]
    return result("demo", rows, stopped_early={**stop, "share_kept": kept})
