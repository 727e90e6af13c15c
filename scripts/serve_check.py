"""The real engine's acceptance beside ours: vLLM serves an exported head, and both decode the same held-out prompts.

    python scripts/serve_check.py --export runs/eagle3/export --target demo --prompts data/demo/heldout.jsonl --json OUT

The engine runs on this machine's CPU, in an environment of its own (`make test-serve` makes `.venv-serve`; by hand:
docs/serving.md). Both sides read the same checkpoint and decode greedily, by token ids. The script fails (exit code 1)
where in fp32 the counters differ by more than one draft or the engine writes another text with the head than without,
where elsewhere they differ by more than 2 points at a position, and where the engine's counters do not account for
what it wrote.
"""

import shlex
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from bitdraft.data.sources import demo_file, read_conversations
from bitdraft.train.environment import RunFailed, machine_facts, read_environment, stop_cleanly
from bitdraft.train.serving.check import How, measure_engine, measure_here, needed_context, numbers, verdict
from bitdraft.train.serving.engine import EngineSpec, engine_versions
from bitdraft.train.serving.pair import find_pair, label, reading
from bitdraft.train.serving.record import add_row, check_place


@dataclass(frozen=True, kw_only=True)
class Options:
    """Serve an exported head with vLLM and compare what it accepts with our own measurement."""

    export: Path
    """Folder of an exported head, or of a pair with `head/` and `target/` in it."""
    target: str | None = None
    """Checkpoint that the engine serves and we read: folder, hub id or `demo`; by default the pair's."""
    target_quant: str | None = None
    """How we read it; by default `auto` for a quantized checkpoint and `none` for another."""
    target_profile: str | None = None
    """Who computes; by default what this engine does on a CPU (docs/numerics.md)."""
    prompts: Path | None = None
    """JSONL file of prompts; by default the shipped held-out ones. Of a conversation the opening question is asked."""
    prompts_count: int = 80
    """How many of them, in order."""
    draft_length: int = 3
    """Tokens drafted in every pass."""
    max_new_tokens: int = 64
    """Longest answer, in tokens."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What both sides compute in. In float32 the counters must be equal up to one draft."""
    batch: int = 8
    """Sequences decoded at once."""
    emulate_nvfp4: bool = False
    """Let the engine serve NVFP4 checkpoints with its own emulation, which it has on no CPU by itself."""
    engine_python: Path = Path(".venv-serve/bin/python")
    """Python of the environment that holds vLLM."""
    start_seconds: float = 600.0
    """How long the engine may take to start."""
    logs: Path = Path("runs/serve_check")
    """Folder for the engine's logs."""
    json: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Where to write the numbers; rows of other files or settings in it are kept."""

    def __post_init__(self) -> None:
        for name in ("prompts_count", "draft_length", "max_new_tokens", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.start_seconds <= 0:
            raise ValueError(f"--start-seconds must be above 0, got {self.start_seconds:g}")


def main(options: Options) -> None:
    versions = engine_versions(options.engine_python)
    pair = find_pair(options.export, options.target, read_environment().cache_dir)
    if options.json:
        check_place(options.json)
    conversations = read_conversations([options.prompts or demo_file("heldout")])[: options.prompts_count]
    quant, profile = reading(pair.target, emulate_nvfp4=options.emulate_nvfp4)
    how = How(
        draft_length=options.draft_length,
        max_new_tokens=options.max_new_tokens,
        dtype=options.dtype,
        batch=options.batch,
    )
    profile = options.target_profile or profile
    ours = measure_here(pair, conversations, options.target_quant or quant, profile, how)
    print(ours.computed_by, flush=True)
    spec = EngineSpec(
        python=options.engine_python,
        target=pair.target,
        dtype=options.dtype,
        context=needed_context(ours.prompts, how),
        sequences=options.batch,
        head=pair.head,
        method=ours.kind,
        draft_length=options.draft_length,
        emulate_nvfp4=options.emulate_nvfp4,
    )
    served = measure_engine(spec, ours, how, options.logs, options.start_seconds)
    ids = [c.id for c in conversations]
    wrong = verdict(ours, served, ids)
    row = {
        "head": label(pair.head),
        "head_fingerprint": ours.head_fingerprint,
        "kind": ours.kind,
        "trained_on": ours.trained.get("recipe"),
        "target": label(pair.target),
        "target_fingerprint": ours.target_fingerprint,
        "served_on": ours.served_on,
        "target_profile": profile,
        "emulated_nvfp4": options.emulate_nvfp4,
        "dtype": options.dtype,
        "draft_length": options.draft_length,
        "max_new_tokens": options.max_new_tokens,
        "batch": options.batch,
        "prompts_file": (options.prompts or demo_file("heldout")).name,
        **numbers(ours, served, ids),
        "agrees": not wrong,
        "wrong": wrong,
        "engine_versions": versions,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "machine": machine_facts(),
    }
    _print(row)
    if options.json:
        add_row(options.json, row)
    if wrong:
        raise RunFailed("; ".join(wrong))


def _print(row: dict[str, Any]) -> None:
    print(f"\n{row['kind']} head {row['head']} on {row['target']}, {row['dtype']}, {row['prompts']} prompts")
    print(f"{'':24}{'engine':>10}{'ours':>10}")
    for what in ("passes", "drafted", "accepted"):
        print(f"{what:24}{row['engine'][what]:10,}{row['ours'][what]:10,}")
    for i, apart in enumerate(row["points_apart"], start=1):
        engine, ours = (100 * row[side]["per_position"][i - 1] for side in ("engine", "ours"))
        print(f"{f'accepted at position {i}':24}{engine:9.2f}%{ours:9.2f}%{apart:+9.2f} points")
    lengths = (row[side]["acceptance_length"] for side in ("engine", "ours"))
    print(f"{'acceptance length':24}" + "".join(f"{length:10.3f}" for length in lengths))
    texts = row["texts"]
    for key in ("engine_with_and_without_head", "engine_and_ours"):
        print(f"answers that differ, {key.replace('_', ' ')}: {texts[key]['differ']} of {row['prompts']}")


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options, description=__doc__)))
