"""The whole idea on a real model: heads trained on the bf16 and on the MXFP4 target, each served on both.

    make demo          (or: python scripts/demo.py)

Four heads are trained on the same prompts, with the same answer tokens per step, steps and seed:

    eagle3  on the bf16 target (its states, logits and text)
    eagle3  on the MXFP4 target (its states, logits and text)
    eagle3  on the bf16 target's states and logits, but the MXFP4 target's text
    medusa  on the MXFP4 target

Each is exported, loaded back and measured on both targets by speculative decoding of held-out prompts. A second
run reuses every finished part. Ends with runs/demo/acceptance.json and report.md.
"""

import json
import sys
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

import tyro

from bitdraft.data.demo_target import resolve_target
from bitdraft.data.sources import demo_file, read_conversations
from bitdraft.quant.files import sha256_of, write_text_atomically
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget, load_target, load_tokenizer
from bitdraft.speculators.eagle3 import Eagle3Config
from bitdraft.speculators.export import load_head
from bitdraft.speculators.medusa import MedusaConfig
from bitdraft.speculators.metrics import Acceptance, length_difference_interval
from bitdraft.train import acceptance
from bitdraft.train.config import AcceptanceConfig, AnswersConfig, CheckpointConfig, OptimConfig, RunConfig
from bitdraft.train.config_io import to_plain
from bitdraft.train.environment import default_dtype, give_memory_back, machine_facts, read_environment, stop_cleanly
from bitdraft.train.run import run


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train and measure the 2×2 of {trained on bf16, on MXFP4} × {served in bf16, in MXFP4}."""

    target: str = "demo"
    """Model folder or hub id; `demo` is the embedded SmolLM2-135M-Instruct."""
    quant: str = "mxfp4"
    """The low-bit recipe that is compared with bf16."""
    output_dir: Path = Path("runs/demo")
    seed: int = 0
    prompts: int = 512
    """Training prompts."""
    answer_tokens: int = 96
    """Longest training answer."""
    eagle3: OptimConfig = field(default_factory=lambda: OptimConfig(steps=150))
    medusa: OptimConfig = field(default_factory=lambda: OptimConfig(steps=40, lr=2e-3))
    draft_vocab_size: int = 4096
    measured: AcceptanceConfig = field(
        default_factory=lambda: AcceptanceConfig(
            prompts=80, draft_lengths=(3,), max_new_tokens=64, batch_size=80, check=4
        )
    )
    """The measurement of every cell."""


@dataclass(frozen=True)
class Arm:
    """One head to train."""

    kind: Literal["eagle3", "medusa"]
    quant: str
    text: str

    @property
    def trained_on(self) -> str:
        return self.quant if self.text == self.quant else f"{self.quant}, text of {self.text}"

    @property
    def folder(self) -> str:
        return f"{self.kind}-{self.quant}" + ("" if self.text == self.quant else f"-text-{self.text}")


class Progress:
    """Says what is being done and how long the rest takes, from each part's usual share of the whole."""

    def __init__(self, parts: list[tuple[str, float]]) -> None:
        self.parts, self.at, self.started = parts, 0, time.monotonic()

    def next(self) -> None:
        name, _ = self.parts[self.at]
        done, elapsed = sum(w for _, w in self.parts[: self.at]), time.monotonic() - self.started
        left = sum(w for _, w in self.parts[self.at :]) * (elapsed / done if done else 1.0)
        print(
            f"\n[{self.at + 1}/{len(self.parts)}] {name} (about {max(1, round(left / 60))} min left in all)", flush=True
        )
        self.at += 1


def main(options: Options) -> None:
    low = Path(options.quant).stem
    arms = [
        Arm("eagle3", "none", "none"),
        Arm("eagle3", options.quant, options.quant),
        Arm("eagle3", "none", options.quant),
        Arm("medusa", options.quant, options.quant),
    ]
    progress = Progress(
        [
            (f"training {a.kind} on the target in {a.trained_on}", seconds)
            for a, seconds in zip(arms, (230.0, 250.0, 110.0, 80.0), strict=True)
        ]
        + [(f"measuring {len(arms)} heads on the target in {served}", 100.0) for served in ("none", options.quant)]
    )
    environment = read_environment()
    for arm in arms:
        progress.next()
        run(_run_config(options, arm), environment)
        give_memory_back()
    cells: list[dict[str, Any]] = []
    counts: dict[tuple[str, str, str, int], list[Acceptance]] = {}
    for served in ("none", options.quant):
        progress.next()
        cells += _measure(options, arms, served, resolve_target(options.target, environment.cache_dir), counts)
        give_memory_back()
    report = _report(options, low, cells, counts)
    write_text_atomically(
        options.output_dir / "acceptance.json",
        json.dumps({"command": " ".join(["python", *sys.argv]), "seed": options.seed, "cells": cells}, indent=2) + "\n",
    )
    write_text_atomically(options.output_dir / "report.md", report)
    print(f"\n{report}\nnumbers: {options.output_dir / 'acceptance.json'}")
    failed = sum(r["lossless_failed"] for c in cells for r in c["results"])
    if failed:
        print(f"error: {failed} answers differ from plain decoding by more than rounding", file=sys.stderr)
        sys.exit(1)


def _run_config(options: Options, arm: Arm) -> RunConfig:
    return RunConfig(
        target=options.target,
        target_quant=arm.quant,
        head=arm.kind,
        output_dir=options.output_dir / arm.folder,
        resume=True,
        seed=options.seed,
        prompts=options.prompts,
        answers=AnswersConfig(quant=None if arm.text == arm.quant else arm.text, max_new_tokens=options.answer_tokens),
        eagle3=Eagle3Config(steps=max(options.measured.draft_lengths), draft_vocab_size=options.draft_vocab_size),
        medusa=MedusaConfig(heads=max(options.measured.draft_lengths)),
        optim=options.eagle3 if arm.kind == "eagle3" else options.medusa,
        checkpoint=CheckpointConfig(every=50),
        acceptance=AcceptanceConfig(draft_lengths=()),
    )


def _measure(
    options: Options, arms: list[Arm], served: str, name: str, counts: dict[tuple[str, str, str, int], list[Acceptance]]
) -> list[dict[str, Any]]:
    """Cells of one target, each kept in a file of its own so that a second run need not measure again."""
    settings = options.measured
    target: LowBitTarget | None = None
    prompts: acceptance.PromptSet | None = None
    cells = []
    for arm in arms:
        export = options.output_dir / arm.folder / "export"
        kept = options.output_dir / arm.folder / f"served-{Path(served).stem}.json"
        key = {"head": sha256_of(export / "manifest.json"), "settings": to_plain(settings)}
        content = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
        if content.get("key") != key:
            if target is None:
                target = load_target(name, load_recipe(served), dtype=default_dtype("cpu"))
                tokenizer = load_tokenizer(name)
                data = settings.data or [demo_file("heldout")]
                conversations = read_conversations(data)
                prompts = acceptance.prompt_set(target, tokenizer, conversations, acceptance.set_name(data), settings)
            assert prompts is not None
            print(f"{arm.kind} trained on {arm.trained_on}, served on {served}:")
            results = acceptance.measure(target, load_head(export, target), tokenizer, prompts, settings)
            print(acceptance.table(results), flush=True)
            cell = {
                "trained_on": arm.trained_on,
                "served_on": served,
                "kind": arm.kind,
                **acceptance.document(target, str(export), prompts, results),
            }
            per_prompt = {str(m.draft_length): [[p.passes, *p.accepted_at] for p in m.per_prompt] for m in results}
            content = {"key": key, "cell": cell, "per_prompt": per_prompt}
            write_text_atomically(kept, json.dumps(content) + "\n")
        cells.append(content["cell"])
        for length, rows in content["per_prompt"].items():
            counts[arm.kind, arm.trained_on, served, int(length)] = [
                Acceptance(int(length), 1, passes, tuple(accepted)) for passes, *accepted in rows
            ]
    return cells


def _report(
    options: Options, low: str, cells: list[dict[str, Any]], counts: dict[tuple[str, str, str, int], list[Acceptance]]
) -> str:
    """The table that this is about, as Markdown."""
    length = options.measured.draft_lengths[0]
    first = cells[0]["results"][0]
    names = {"none": "bf16", options.quant: low.upper()}
    lines = [
        f"Acceptance length (tokens per target pass) and acceptance rate, greedy, {length} drafted tokens per pass, "
        f"{first['prompts']} held-out prompts × {options.measured.max_new_tokens} tokens:",
        "",
        f"| head | trained on | served in bf16 | served in {low.upper()} |",
        "|---|---|---|---|",
    ]
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for cell in cells:
        result = next(r for r in cell["results"] if r["draft_length"] == length)
        rows.setdefault((cell["kind"], cell["trained_on"]), {})[cell["served_on"]] = result
    for (kind, trained_on), served in rows.items():
        base, _, text = trained_on.partition(", text of ")
        label = names[base] + (f" states, {names[text]} text" if text else "")
        shown = [
            f"{r['acceptance_length']:.3f} ({r['acceptance_rate']:.1%})"
            for r in (served["none"], served[options.quant])
        ]
        lines.append(f"| {kind} | {label} | {shown[0]} | {shown[1]} |")
    lines.append("")
    for k in options.measured.draft_lengths:
        ours = counts["eagle3", options.quant, options.quant, k]
        for other, label in (
            ("none", "bf16"),
            (f"none, text of {options.quant}", f"bf16 states on {low.upper()} text"),
        ):
            point, least, most = length_difference_interval(ours, counts["eagle3", other, options.quant, k])
            lines.append(
                f"- served in {low.upper()}, {k} drafted: trained on {low.upper()} minus trained on {label}: "
                f"{point:+.3f} acceptance length, 95 % interval {least:+.3f} … {most:+.3f}"
            )
    facts = machine_facts()
    lines += [
        "",
        f"`{' '.join(['python', *sys.argv])}`, seed {options.seed}, {date.today().isoformat()}, "
        f"{facts['threads']} threads, {facts['machine']} {facts['device']}, {cells[0]['dtype']}, "
        f"torch {facts['torch']}, transformers {facts['transformers']}.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options)))
