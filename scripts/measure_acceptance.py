"""What heads accept, measured by real speculative decoding on held-out prompts.

    python scripts/measure_acceptance.py --target-quant mxfp4 --heads runs/eagle3-mxfp4/export --out acceptance.json
    python scripts/measure_acceptance.py --compare runs/eagle3-none/export runs/eagle3-mxfp4/export --report report
    python scripts/measure_acceptance.py --heads runs/eagle3-mxfp4/export ngram none --temperature 0 1 --sets mt-bench

A head is an export folder, or a baseline: `none` (plain decoding), `ngram` (prompt lookup), `self=RECIPE` (the
target's own form under another recipe, as in `--target-quant nvfp4a16 --heads self=nvfp4`) or
`model=FOLDER_OR_ID[:RECIPE]`. The greedy answers of the first `--check` prompts are compared with plain decoding; the
script fails (exit code 1) if one differs by more than rounding.
"""

import json
import sys
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from bitdraft.data.calibration import CalibrationConfig
from bitdraft.data.heldout import describe, load_set
from bitdraft.data.sources import demo_file, read_conversations
from bitdraft.quant.files import write_text_atomically
from bitdraft.quant.profiles import load_recipe_for
from bitdraft.quant.target import CompileChoice
from bitdraft.train.environment import give_memory_back, stop_cleanly
from bitdraft.train.measuring.config import MeasureConfig
from bitdraft.train.measuring.drafters import DrafterSpec
from bitdraft.train.measuring.matrix import Bench, Cell
from bitdraft.train.measuring.prompt_sets import PromptSet
from bitdraft.train.opening import open_target
from bitdraft.train.report.write import write_report


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure what draft heads accept on a target in simulated low bit."""

    heads: tuple[str, ...] = ()
    """Export folders of runs, or baselines: none, ngram, self=RECIPE, model=FOLDER_OR_ID."""
    compare: tuple[str, ...] = ()
    """Heads for the gap matrix: each is served on every recipe that one of them was trained on (or `--served-on`)."""
    served_on: tuple[str, ...] = ()
    """Recipes to serve on, instead of `--target-quant`."""
    target: str = "demo"
    """Model folder or hub id; `demo` is the embedded SmolLM2-135M-Instruct."""
    target_quant: str = "mxfp4"
    """Preset or YAML recipe that the target is served with, or `auto` for a checkpoint that is already quantized."""
    target_profile: str = "plain"
    """Who computes: `plain`, or an engine on a chip, as in vllm-sm90 (docs/numerics.md)."""
    data: tuple[Path, ...] = ()
    """JSONL files of prompts, measured one by one; by default the shipped held-out prompts."""
    sets: tuple[str, ...] = ()
    """Named held-out sets (docs/heldout-sets.md): demo, gsm8k, mt-bench, humaneval, spec-bench, …"""
    set_dir: Path | None = None
    """Folder with local files of the named sets; by default they come from the hub."""
    prompts: int | None = None
    """How many prompts of each file or set, in order; by default 80 of a file, and of a set what peers take."""
    category: tuple[str, ...] = ()
    """Only prompts of these categories."""
    traffic: tuple[Path, ...] = ()
    """JSONL files of prompts that confidence and sparse trees are fitted on; by default the shipped traffic prompts."""
    reference: str | None = None
    """16-bit model for the upper bounds, where `--target` is a checkpoint that is already quantized."""
    measure: Annotated[MeasureConfig, tyro.conf.OmitArgPrefixes] = field(default_factory=MeasureConfig)
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """`auto` is bfloat16 where the hardware multiplies it."""
    device: str = "cpu"
    compile_quantizer: CompileChoice = "auto"
    """Compile the activation quantizer (same bits, faster)."""
    trust_remote_code: bool = False
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    out: Path | None = None
    """Where to write the numbers as JSON; cells that are finished stay in OUT.cells and are not measured again."""
    report: Path | None = None
    """Folder for report.md and report.html."""

    def __post_init__(self) -> None:
        if bool(self.heads) == bool(self.compare):
            raise ValueError("give either --heads or --compare, with export folders or baselines")
        if self.prompts is not None and self.prompts < 1:
            raise ValueError("--prompts must be at least 1")
        for name in ("heads", "compare", "served_on", "data", "sets"):
            given = [path.stem for path in self.data] if name == "data" else getattr(self, name)
            twice = [x for i, x in enumerate(given) if x in given[:i]]
            if twice:
                raise ValueError(f"--{name.replace('_', '-')} names {twice[0]} twice: give each once")

    @property
    def specs(self) -> list[DrafterSpec]:
        return [DrafterSpec(head) for head in self.heads or self.compare]

    @property
    def recipes(self) -> list[str]:
        """What the target is served with, one after the other."""
        if self.served_on or not self.compare:
            return list(self.served_on or (self.target_quant,))
        trained = dict.fromkeys(spec.trained_on for spec in self.specs)
        return [recipe.partition("@")[0] for recipe in trained if recipe] or [self.target_quant]

    def check(self) -> None:
        """``ValueError`` for what would otherwise come to light when hours have been measured."""
        for recipe in self.recipes:
            try:
                load_recipe_for(recipe, self.target_profile if recipe != "none" else "plain")
            except ValueError as error:
                hint = ": say with --served-on what to serve" if self.compare and not self.served_on else ""
                raise ValueError(f"{error}{hint}") from error
        for spec in self.specs:
            if spec.is_export and not (Path(spec.head) / "config.json").is_file():
                raise ValueError(f"--heads {spec.head} is no exported head: {spec.head}/config.json is missing")
        for path in (self.out and self.out.parent, self.report):
            if path is not None:
                try:
                    path.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise ValueError(f"nothing can be written to {path}: {error.strerror}") from error


def main(options: Options) -> None:
    options.check()
    for name in options.sets:
        print(describe(name))
    sets = _sets(options)
    traffic = PromptSet("traffic", tuple(read_conversations(options.traffic or [demo_file("traffic")])))
    specs, recipes = options.specs, options.recipes
    count = len(recipes) * len(specs) * len(options.measure.temperature) * len(options.measure.batch_size)
    started: list[str] = []

    def announce(what: str) -> None:
        started.append(what)
        print(f"\n[{len(started)}/{count}] {what}", flush=True)

    cells: list[Cell] = []
    for recipe in recipes:
        target, tokenizer = open_target(options, options.target, recipe)
        print(target.recipe.computed_by)
        kept = options.out.with_suffix(".cells") if options.out else None
        bench = Bench(
            target,
            tokenizer,
            sets,
            traffic,
            lambda name, quant: open_target(options, name, quant)[0],
            options.measure,
            kept,
            options.reference,
        )
        cells += bench.cells(specs, announce)
        del target, bench
        give_memory_back()
    matrix = {
        "version": 1,
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "seed": options.measure.seed,
        "cells": cells,
    }
    if options.out:
        about = {key: matrix[key] for key in ("command", "date", "seed")}
        content = {**cells[0], **about} if len(cells) == 1 else matrix
        write_text_atomically(options.out, json.dumps(content, indent=2) + "\n")
    if options.report:
        for path in write_report(matrix, options.report):
            print(f"report: {path}")
    _stop_if_lossy(cells)


def _sets(options: Options) -> list[PromptSet]:
    """The prompts of every file and set, of the categories wanted."""
    files = options.data or (() if options.sets else (demo_file("heldout"),))
    everything = [(PromptSet(path.stem, tuple(read_conversations([path]))), options.prompts or 80) for path in files]
    for name in options.sets:
        # Of a set that is cut, the peers' first so many; of its categories, from all of it.
        wanted = sys.maxsize if options.category else options.prompts
        found = PromptSet(name, tuple(load_set(name, folder=options.set_dir, prompts=wanted)))
        everything.append((found, options.prompts or len(found.ids)))
    if options.category:
        everything = [(prompts.of_category(options.category), count) for prompts, count in everything]
    return [prompts.first(count) for prompts, count in everything]


def _stop_if_lossy(cells: list[dict[str, Any]]) -> None:
    failed = [(cell, r) for cell in cells for r in cell["results"] if r["lossless_failed"]]
    if failed:
        cell, first = failed[0]
        print(
            f"error: not lossless: {cell['head']} on {cell['served_on']}, {first['set']}, draft length "
            f"{first['draft_length']}: {first['lossless_failures'][0]} "
            f"({sum(r['lossless_failed'] for _, r in failed)} in all)",
            file=sys.stderr,
        )
        sys.exit(1)


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options)))
