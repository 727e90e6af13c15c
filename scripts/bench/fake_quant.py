"""Speed of fake-quantization on one CPU thread, beside other libraries and a plain copy, in one run.

    python scripts/bench/fake_quant.py --json docs/results/fake_quant.json

Every candidate takes the same tensor and returns a new one, in fresh pages. Per format and dtype all of them run in
turn, round after round in another order, so that a drifting machine slows all alike. Numbers are GB of input per second
of the thread's CPU time, from the median of the rounds; a candidate that needs more than `slow` seconds is measured
twice and no further. A peer counts only where its result is a rounding of the same kind: neither its distance from ours
nor its own error may exceed our error by more than a quarter. Peers are in fake_quant_peers.py; the first run compiles
everything and takes longer than those that find inductor's cache filled.
"""

import contextlib
import ctypes
import json
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from fake_quant_peers import Quantizer, installed_peers  # type: ignore[import-not-found]  # beside this file
from torch import Tensor
from tqdm import tqdm

from bitdraft.quant.fake import fake
from bitdraft.quant.schemes import scheme_named
from bitdraft.train.environment import machine_facts, stop_cleanly

FORMATS = (
    "fp8-token", "fp8-channel", "fp8-group128", "fp8-block128", "mxfp8-rceil", "mxfp6-e2m3-even", "mxfp6-e3m2-floor",
    "mxfp4-floor", "mxfp4-ceil", "mxfp4-even", "mxfp4-rceil", "nvfp4", "nvfp4-kernel", "int8-token", "int8-channel",
    "int4-g128", "int4-g128-asym",
)  # fmt: skip
SHARE_WANTED = {"float32": 0.55, "bfloat16": 0.45}  # of clone's speed, compiled
Row = dict[str, Any]
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h


@dataclass(frozen=True)
class Options:
    """Time fake-quantization against other libraries and clone."""

    formats: tuple[str, ...] = FORMATS
    """Names of `quant/schemes.py`."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    size: int = 4096
    """Rows and columns of the tensor."""
    rounds: int = 7
    slow: float = 0.25
    """Seconds beyond which a candidate is measured twice instead of every round."""
    json: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Where to write the numbers; the table goes to standard output."""


def main(options: Options) -> None:
    torch.set_num_threads(1)
    map_large_tensors_anew()
    warnings.filterwarnings("ignore")
    peers, versions, missing = installed_peers()
    if missing:
        print(f"not installed, left out: {', '.join(missing)}", file=sys.stderr)
    cases = [(name, dtype) for name in options.formats for dtype in options.dtypes]
    rows = []
    for name, dtype in tqdm(cases, desc="formats x dtypes", disable=None):
        x = torch.randn(options.size, options.size, generator=torch.Generator().manual_seed(0)) * 0.02
        offered = {peer: formats[name] for peer, formats in peers.items() if name in formats}
        rows.append(measure(name, x.to(getattr(torch, dtype)), offered, options))
    print(table(rows))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        machine = machine_facts()
        document = {"size": options.size, "rounds": options.rounds, "machine": machine, "peers": versions}
        options.json.write_text(json.dumps({"results": rows} | document, indent=2) + "\n", encoding="utf-8")


def map_large_tensors_anew() -> None:
    """Have every candidate find large pieces of memory as fresh pages and small ones warm.

    Left to itself glibc does either with a result, depending on what others freed: clone runs at 3 or at 18 GB/s.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        print("this is not glibc: results may or may not come in fresh pages", file=sys.stderr)
        return
    mallopt(_MMAP_THRESHOLD, 8 * 2**20)
    mallopt(_TRIM_THRESHOLD, 16 * 2**20)


def measure(name: str, x: Tensor, peers: dict[str, Quantizer], options: Options) -> Row:
    """One row of ``results``; refuses to compare where compiled is not eager bit for bit."""
    torch._dynamo.reset()
    ours: Quantizer = partial(fake, scheme=scheme_named(name))
    expected = ours(x)
    candidates: dict[str, Quantizer] = {"clone": torch.clone, "eager": ours, "compiled": torch.compile(ours)}
    if not torch.equal(candidates["compiled"](x), expected):
        raise ValueError(f"{name} in {x.dtype}: the compiled result is not the eager one")
    refused = {}
    for peer, quantizer in peers.items():
        for mode, function in (("eager", quantizer), ("compiled", torch.compile(quantizer))):
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    why_not = unlike(function(x), expected, x)
            except Exception as error:  # whatever a peer's own code or its compilation raises
                why_not = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100] if str(error) else ''}"
            if why_not:
                refused[f"{peer}_{mode}"] = why_not
            else:
                candidates[f"{peer}_{mode}"] = function
    seconds = median_seconds(candidates, x, options)
    speed = {which: x.nbytes / 1e9 / s for which, s in seconds.items()}
    row: Row = {"format": name, "dtype": str(x.dtype).removeprefix("torch.")}
    row |= {f"{which}_gbps": speed.pop(which) for which in ("clone", "eager", "compiled")}
    return row | {"peers": speed, "refused_peers": refused}


def unlike(theirs: Tensor, ours: Tensor, x: Tensor) -> str | None:
    """Why ``theirs`` cannot be compared with ``ours``, or ``None``."""
    if theirs.dtype != ours.dtype or theirs.shape != ours.shape:
        return f"returns {theirs.dtype} {list(theirs.shape)}"
    error = (ours.float() - x.float()).norm()
    for what, distance in (("distance", theirs.float() - ours.float()), ("error", theirs.float() - x.float())):
        if not distance.norm() <= 1.25 * error:
            return f"its {what} is {(distance.norm() / error).item():.2f} of our error"
    return None


def median_seconds(candidates: dict[str, Callable[[Tensor], Tensor]], x: Tensor, options: Options) -> dict[str, float]:
    """CPU seconds of this thread per call."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    names, order = list(candidates), random.Random(0)
    for _ in range(options.rounds):
        order.shuffle(names)  # what runs before leaves its mark on caches and memory
        for name in names:
            if len(times[name]) >= 2 and min(times[name]) > options.slow:
                continue
            start = time.thread_time()
            result = candidates[name](x)
            times[name].append(time.thread_time() - start)
            del result
    return {name: statistics.median(t) for name, t in times.items()}


def table(rows: list[Row]) -> str:
    """Markdown: speeds as shares of clone, and how much faster we are than the fastest peer of the same mode."""
    lines = [
        "| format | dtype | clone GB/s | eager | compiled | eager peer | ours ÷ it | compiled peer | ours ÷ it |",
        "|---|---|---:|---:|---:|---|---:|---|---:|",
    ]
    missed = []
    for row in rows:
        clone, label = row["clone_gbps"], f"{row['format']} {row['dtype']}"
        cells = [row["format"], row["dtype"], f"{clone:.2f}"]
        cells += [f"{row[mode + '_gbps'] / clone:.2f}" for mode in ("eager", "compiled")]
        for mode in ("eager", "compiled"):
            speeds = {peer: speed for peer, speed in row["peers"].items() if peer.endswith(mode)}
            if not speeds:
                cells += ["–", "–"]
                continue
            best = max(speeds, key=lambda peer: speeds[peer])
            ratio = row[mode + "_gbps"] / speeds[best]
            cells += [f"{best.removesuffix('_' + mode)} {speeds[best] / clone:.2f}", f"{ratio:.2f}"]
            if ratio <= 1:
                missed.append(f"{label} {mode} is not faster than {best} ({ratio:.2f})")
        share, wanted = row["compiled_gbps"] / clone, SHARE_WANTED.get(row["dtype"], 0.0)
        if share < wanted:
            missed.append(f"{label} compiled has {share:.2f} of clone, {wanted} wanted")
        lines.append("| " + " | ".join(cells) + " |")
    refused = sorted({f"{peer} in {row['format']} {row['dtype']}" for row in rows for peer in row["refused_peers"]})
    lines += ["", "Targets missed: " + ("; ".join(missed) if missed else "none") + "."]
    lines += ["", "Peers left out of a row (failed, or round differently): " + ("; ".join(refused) or "none") + "."]
    return "\n".join(lines)


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options, description=Options.__doc__)))
