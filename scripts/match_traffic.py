"""Weights for a pool of training records, such that the weighted pool looks like your traffic.

    python scripts/match_traffic.py pool/*.jsonl --traffic traffic.jsonl --out runs/matched
    python scripts/match_traffic.py pool/*.jsonl --traffic traffic.jsonl --out runs/matched --subset 20000 --target demo

Writes weights.parquet for ``--weights.file`` of the training, report.json, report.md and report.png, the traffic's test
split as test.jsonl to measure acceptance on, and with ``--subset`` the records that need answers as subset.jsonl. Files
may be given as globs, folders or datasets on the hub. docs/traffic.md says how to read the report.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from tqdm import tqdm

from bitdraft.data.calibration import CalibrationConfig
from bitdraft.data.conversation import Conversation
from bitdraft.data.sources import iter_conversations
from bitdraft.data.traffic.document import Document, document
from bitdraft.data.traffic.match import match
from bitdraft.data.traffic.outputs import check_subset, write_matching
from bitdraft.data.traffic.pool import Report, States
from bitdraft.data.traffic.pooled_states import target_vectors
from bitdraft.data.traffic.report import markdown
from bitdraft.data.traffic.weighing import MatchSettings
from bitdraft.data.traffic.weights import FLOOR, UNIFORM
from bitdraft.quant.files import check_free
from bitdraft.quant.target import CompileChoice
from bitdraft.train.environment import machine_facts, stop_cleanly
from bitdraft.train.opening import open_target


@dataclass(frozen=True, kw_only=True)
class Options:
    """Weigh a pool's records so that they look like the traffic."""

    pool: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Files, globs, folders or hub datasets to train on; `SOURCE@SHARE` mixes them."""
    traffic: tuple[str, ...]
    """The same for what will be served: some hundreds of prompts and more."""
    out: Path
    """Folder to write."""
    target: str | None = None
    """Model folder or hub id whose hidden states join the features; `demo` is the embedded SmolLM2-135M-Instruct. It
    reads every record once."""
    target_quant: str = "mxfp4"
    """How that target is quantized: a preset or a YAML recipe."""
    target_profile: str = "plain"
    """Who computes: `plain`, or an engine on a chip (docs/numerics.md)."""
    read: Literal["auto", "prompts", "answers"] = "auto"
    """Compare prompts alone or answers too; `auto`: answers if every record has one."""
    clusters: int | None = None
    """Groups of records; by default the square root of the traffic's records, from 16 to 256."""
    floor: float = FLOOR
    """Least effective share of the pool: lower matches more closely and leaves fewer effective records."""
    uniform: float = UNIFORM
    """Share of the draws that ignore the weights."""
    shares: tuple[float, float, float] = (0.5, 0.2, 0.3)
    """Of the traffic's parts fit, tune and test."""
    subset: int | None = None
    """Draw so many records by weight and write them as subset.jsonl."""
    seed: int = 0
    skip_bad: bool = False
    """Leave broken records out and count them, instead of stopping."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of the target; `auto` is bfloat16 where the hardware multiplies it."""
    device: str = "cpu"
    compile_quantizer: CompileChoice = "auto"
    """Compile the activation quantizer (same bits, faster)."""
    trust_remote_code: bool = False
    """Let the target's folder run its own Python code."""
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    overwrite: bool = False
    """Replace the folder if it exists."""

    def __post_init__(self) -> None:
        if not self.pool:
            raise ValueError("name the files of the pool first, as in: match_traffic.py POOL… --traffic FILE --out DIR")
        if not self.traffic:
            raise ValueError("--traffic needs at least one file")
        if self.subset is not None and self.subset < 1:
            raise ValueError(f"--subset must be at least 1, got {self.subset}")


def main(options: Options) -> None:
    check_free(options.out, options.overwrite)
    settings = MatchSettings(
        clusters=options.clusters,
        floor=options.floor,
        uniform=options.uniform,
        shares=options.shares,
        read=options.read,
        seed=options.seed,
    )
    skipped: dict[str, dict[str, None]] = {"pool": {}, "traffic": {}}

    def read(side: str, sources: Sequence[str]) -> Iterator[Conversation]:
        """The pool is read several times: a broken line is counted once."""
        told = skipped[side]
        return iter_conversations(sources, skip_bad=options.skip_bad, skipped=lambda error: told.setdefault(str(error)))

    traffic = list(read("traffic", options.traffic))
    start = time.perf_counter()
    found = match(lambda: read("pool", options.pool), traffic, settings, progress=bar, states=hidden_states(options))
    check_subset(options.subset, found)
    seconds = time.perf_counter() - start
    about: Document = {
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "pool": list(options.pool),
        "traffic": list(options.traffic),
        "skipped": {s: {"count": len(told), "first": str(next(iter(told), ""))} for s, told in skipped.items()},
        "hidden_states": f"{options.target} in {options.target_quant}" if options.target else "none",
        "subset": options.subset,
        "machine": machine_facts(),
        "seconds": seconds,
        "records_per_second": found.survey.records / seconds,
    }
    report = document(found, settings, about)
    write_matching(
        options.out, found, report, lambda: read("pool", options.pool), subset=options.subset, seed=options.seed
    )
    print(f"\n{markdown(report)}\nalso in {options.out}, with weights.parquet and test.jsonl")


@contextmanager
def bar(label: str, total: int | None) -> Iterator[Report]:
    with tqdm(total=total, desc=label, unit=" records", smoothing=0) as shown:
        yield shown.update


def hidden_states(options: Options) -> States | None:
    """What the low-bit target makes of records, if one is given."""
    if options.target is None:
        return None
    target, tokenizer = open_target(options, options.target, options.target_quant)

    def states(records: Sequence[Conversation], answers: bool) -> np.ndarray:
        return target_vectors(target, tokenizer, records, answers=answers)

    return states


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options)))
