"""What learning scales gives over taking them from the maximum: the output error of one real matrix.

    python scripts/bench/learned_scale.py --json docs/results/learned_scale.json

The weight stays as it is; its scales are trained by ``LearnedScale`` (LSQ gradients, Adam) to lower the squared error
of the outputs on the inputs that training prompts make. Printed is the error on the inputs of held-out prompts, as a
share of the outputs' energy. A Markdown table is written next to the JSON.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor

from bitdraft.data.calibration import rows_of_text
from bitdraft.data.chat import conversation_ids
from bitdraft.data.demo_target import resolve_target
from bitdraft.data.sources import demo_file, read_conversations
from bitdraft.quant.files import write_text_atomically
from bitdraft.quant.gptq import output_error
from bitdraft.quant.learned_scale import LearnedScale, Start
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.schemes import scheme_named
from bitdraft.quant.target import LowBitTarget, load_target, load_tokenizer
from bitdraft.train.environment import machine_facts, read_environment, stop_cleanly

WAYS: tuple[tuple[str, Start], ...] = (
    ("int4-g128", "maximum"),
    ("int4-g128", "mean"),
    ("int4-channel", "maximum"),
    ("fp8-channel", "maximum"),
    ("nvfp4", "maximum"),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure what learned scales give over those of the maximum."""

    target: str = "demo"
    """Model folder or hub id; `demo` is the embedded SmolLM2-135M-Instruct."""
    module: str = "layers.15.mlp.down_proj"
    """The linear layer, by its name in the decoder."""
    tokens: int = 4096
    """Inputs to learn on; as many again, of other prompts, are for the error."""
    steps: int = 300
    batch: int = 256
    """Inputs per step."""
    rate: float = 0.01
    """Adam's learning rate, as a share of the mean scale; it falls to zero along a cosine."""
    seed: int = 0
    json: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Where to write the numbers; the table goes beside them."""


def main(options: Options) -> None:
    folder = resolve_target(options.target, read_environment().cache_dir)
    target, tokenizer = load_target(folder, load_recipe("none")), load_tokenizer(folder)
    layer = target.decoder.get_submodule(options.module)
    weight = layer.weight.detach()
    learning, judging = (
        inputs(target, layer, [conversation_ids(tokenizer, c) for c in read_conversations([file])], options.tokens)
        for file in (demo_file("train"), demo_file("heldout"))
    )
    moments = judging.T @ judging / len(judging)
    results = []
    for name, start in WAYS:
        torch.manual_seed(options.seed)
        began = time.perf_counter()
        scale = LearnedScale(weight, scheme_named(name), start=start)
        before = output_error(weight, scale(weight).detach(), moments)
        learn(scale, weight, learning, options)
        after = output_error(weight, scale(weight).detach(), moments)
        seconds = time.perf_counter() - began
        results.append({"format": name, "start": start, "before": before, "learned": after, "seconds": seconds})
        print(line(results[-1]), flush=True)
    document = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "target": Path(folder).name,
        "module": options.module,
        "shape": list(weight.shape),
        "inputs": [len(learning), len(judging)],
        "steps": options.steps,
        "seed": options.seed,
        "results": results,
        "machine": machine_facts(),
    }
    print(markdown(document))
    if options.json:
        write_text_atomically(options.json, json.dumps(document, indent=2) + "\n")
        write_text_atomically(options.json.with_suffix(".md"), markdown(document))


def inputs(target: LowBitTarget, layer: torch.nn.Module, texts: Sequence[Sequence[int]], tokens: int) -> Tensor:
    """What ``layer`` reads in the unquantized model, ``[N, K]`` fp32."""
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _module, args: seen.append(args[0].float().flatten(0, -2)))
    try:
        for ids in rows_of_text(texts, tokens):
            target.states(ids)
    finally:
        handle.remove()
    return torch.cat(seen)


def learn(scale: LearnedScale, weight: Tensor, x_NK: Tensor, options: Options) -> None:
    """Train the scales, and nothing else, on the squared error of the outputs."""
    rate = options.rate * scale.scale.abs().mean().item()
    optimizer = torch.optim.Adam(scale.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    for _ in range(options.steps):
        x = x_NK[torch.randint(len(x_NK), (options.batch,))]
        error = x @ (scale(weight).float() - weight.float()).T
        loss = error.square().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    before, learned = row["before"], row["learned"]
    numbers = f"{before * 1e3:.3f} | {learned * 1e3:.3f} | {learned / before - 1:+.1%} | {row['seconds']:.0f}"
    return f"| {row['format']} | {row['start']} | {numbers} |"


def markdown(document: dict[str, Any]) -> str:
    """The numbers as a table."""
    machine, (learning, judging) = document["machine"], document["inputs"]
    lines = [
        "# Learned scales",
        "",
        f"Relative output error × 1000 of {document['module']} ({document['shape'][0]} × {document['shape'][1]}) of "
        f"{document['target']}, on {judging} inputs from held-out prompts. Scales alone are learned, in "
        f"{document['steps']} steps on {learning} inputs from training prompts, from those of the maximum or from "
        "LSQ's `2 mean|w| / sqrt(Qp)`.",
        "",
        "| format | start | at the start | learned | change | seconds |",
        "|---|---|---|---|---|---|",
        *map(line, document["results"]),
        "",
        f"`{document['command']}`, seed {document['seed']}, {document['date']}, {machine['threads']} threads, "
        f"{machine['machine']} {machine['device']}, torch {machine['torch']}.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options, description=Options.__doc__)))
