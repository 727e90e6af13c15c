"""What low-bit simulation costs: forward time of each recipe over the bf16 forward, in one run.

    python scripts/bench/target_forward.py --json docs/results/target_forward.json

Recipes run in turn, round after round, so that a drifting machine slows all of them alike, each round beginning
with another one, because what runs before leaves its mark on caches and memory; the ratio is taken within each
round and its median printed. Captured layers included, no logits.
"""

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from bitdraft.data.demo_target import resolve_target
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import CompileChoice, LowBitTarget, can_compile, load_target
from bitdraft.speculators.eagle3 import default_capture_layers
from bitdraft.train.environment import machine_facts, read_environment, stop_cleanly


@dataclass(frozen=True)
class Options:
    """Time the forward pass of simulated low-bit targets against bf16."""

    target: str = "demo"
    """Model folder or hub id; `demo` is the embedded SmolLM2-135M-Instruct."""
    recipes: tuple[str, ...] = ("mxfp4a16", "mxfp4")
    """Presets or recipe files to time."""
    batch: int = 4
    tokens: int = 512
    rounds: int = 12
    json: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Where to write the numbers."""


def main(options: Options) -> None:
    cache = read_environment().cache_dir
    target = resolve_target(options.target, cache)
    modes: list[CompileChoice] = ["on", "off"] if can_compile() else ["off"]
    variants: dict[str, LowBitTarget] = {"none": load_target(target, load_recipe("none"))}
    for name in options.recipes:
        recipe = load_recipe(name)
        if not any(rule.activations for rule in recipe.rules):
            variants[name] = load_target(target, recipe)  # nothing to compile
            continue
        for mode in modes:
            label = f"{name} ({'compiled' if mode == 'on' else 'eager'})"
            variants[label] = load_target(target, recipe, compile_quantizer=mode)
    base = variants["none"]
    ids = torch.randint(0, base.vocab_size, (options.batch, options.tokens), generator=torch.Generator().manual_seed(0))
    capture = default_capture_layers(base.layers)
    for variant in variants.values():  # warm up: compilation, allocator
        variant.states(ids, capture=capture)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(options.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            variants[name].states(ids, capture=capture)
            seconds[name].append(time.perf_counter() - start)
    results = []
    print(f"median of {options.rounds} rounds, {options.batch} × {options.tokens} tokens")
    print(f"{'recipe':24} {'ms':>8} {'× bf16':>8}")
    for name, times in seconds.items():
        ratio = statistics.median(t / b for t, b in zip(times, seconds["none"], strict=True))
        print(f"{name:24} {statistics.median(times) * 1e3:8.0f} {ratio:8.3f}")
        results.append({"recipe": name, "seconds": statistics.median(times), "ratio_to_bf16": ratio})
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        document = {"batch": options.batch, "tokens": options.tokens, "results": results, "machine": machine_facts()}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options, description=Options.__doc__)))
