"""The whole idea on a real model: heads trained on the bf16 and on the MXFP4 target, each served on both.

    make demo          (or: python scripts/demo.py)

Four heads are trained on the same prompts, with the same answer tokens per step, steps and seed:

    eagle3  on the bf16 target (its states, logits and text)
    eagle3  on the MXFP4 target (its states, logits and text)
    eagle3  on the bf16 target's states and logits, but the MXFP4 target's text
    medusa  on the MXFP4 target

Each is exported, loaded back and measured on both targets by speculative decoding of held-out prompts. A second
run reuses every finished part. Ends with runs/demo/acceptance.json, report.md and report.html.
"""

import json
import sys
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Literal

import tyro

from bitdraft.data.demo_target import DEMO, DEMO_NAME, resolve_target
from bitdraft.data.sources import demo_file, read_conversations
from bitdraft.quant.files import write_text_atomically
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget, load_target, load_tokenizer
from bitdraft.speculators.eagle3 import Eagle3Config
from bitdraft.speculators.medusa import MedusaConfig
from bitdraft.train.config import (
    AcceptanceConfig,
    AnswersConfig,
    CheckpointConfig,
    OptimConfig,
    RunConfig,
    SelectionConfig,
)
from bitdraft.train.environment import default_dtype, give_memory_back, read_environment, stop_cleanly
from bitdraft.train.measuring.config import MeasureConfig
from bitdraft.train.measuring.drafters import DrafterSpec
from bitdraft.train.measuring.matrix import Bench, Cell
from bitdraft.train.measuring.prompt_sets import PromptSet
from bitdraft.train.report.write import headline, write_report
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
        quant, text = Path(self.quant).stem, Path(self.text).stem
        return quant if text == quant else f"{quant}, text of {text}"

    @property
    def folder(self) -> str:
        quant, text = Path(self.quant).stem, Path(self.text).stem
        return f"{self.kind}-{quant}" + ("" if text == quant else f"-text-{text}")


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
    measured = options.measured
    config = MeasureConfig(
        draft_length=measured.draft_lengths,
        batch_size=(measured.batch_size,),
        max_new_tokens=measured.max_new_tokens,
        check=measured.check,
        seed=options.seed,
    )
    cells: list[Cell] = []
    for served in ("none", options.quant):
        progress.next()
        cells += _measure(options, arms, served, resolve_target(options.target, environment.cache_dir), config)
        give_memory_back()
    matrix = {
        "version": 1,
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "seed": options.seed,
        "cells": cells,
    }
    write_text_atomically(options.output_dir / "acceptance.json", json.dumps(matrix, indent=2) + "\n")
    text, page = write_report(matrix, options.output_dir)
    print(f"\n{headline(matrix)}\nreport: {text}, {page}\nnumbers: {options.output_dir / 'acceptance.json'}")
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
        selection=SelectionConfig(every=0),  # the arms are compared after as many steps each
        checkpoint=CheckpointConfig(every=50),
        acceptance=AcceptanceConfig(draft_lengths=()),
    )


def _measure(options: Options, arms: list[Arm], served: str, name: str, config: MeasureConfig) -> list[Cell]:
    """All heads on one target."""

    def load(model: str, quant: str) -> LowBitTarget:
        return load_target(model, load_recipe(quant), dtype=default_dtype("cpu"))

    target = load(name, served)
    data = options.measured.data or (demo_file("heldout"),)
    heldout = PromptSet("+".join(p.stem for p in data), tuple(read_conversations(data)[: options.measured.prompts]))
    traffic = PromptSet("traffic", tuple(read_conversations([demo_file("traffic")])))
    bench = Bench(target, load_tokenizer(name), [heldout], traffic, load, config, options.output_dir / "cells")
    specs = [DrafterSpec(str(options.output_dir / arm.folder / "export")) for arm in arms]
    cells = bench.cells(specs, lambda what: print(f"\n{what}:", flush=True))
    named = DEMO_NAME if options.target == DEMO else options.target
    return [{**cell, "target": named, "trained_on": arm.trained_on} for arm, cell in zip(arms, cells, strict=True)]


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options)))
