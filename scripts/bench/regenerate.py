"""How fast the target answers prompts, beside transformers' ``generate`` on the same prompts in the same run.

    python scripts/bench/regenerate.py --json docs/results/regenerate.json

The prompts are asked in batches of ``--batch-size``: ``generate`` takes them in file order, pads each batch on the left
and runs until its last row has ended; we keep one batch full. Both decode greedily and stop at the end of a turn; a
token counts up to there. Sides take turns, in alternating order, and the median of the ratios is printed, of wall time
and of CPU time. In bf16 the two may choose different tokens where two are all but equal, as batches of other shapes are
summed otherwise: how many answers are equal is printed.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from bitdraft.data.chat import end_of_turn_ids, prompt_ids
from bitdraft.data.demo_target import resolve_target
from bitdraft.data.generation import greedy_answers
from bitdraft.data.sources import demo_file, read_conversations
from bitdraft.quant.files import write_text_atomically
from bitdraft.quant.loading import load_model, read_config
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import load_target, load_tokenizer
from bitdraft.train.environment import chosen_dtype, machine_facts, read_environment, stop_cleanly

Answers = list[list[int]]


@dataclass(frozen=True)
class Options:
    """Time the target's answers against transformers' generate."""

    target: str = "demo"
    """Model folder or hub id; `demo` is the embedded SmolLM2-135M-Instruct."""
    recipes: tuple[str, ...] = ("none", "mxfp4")
    """What the target answers in; `generate` runs the 16-bit model."""
    data: Path | None = None
    """JSONL file of prompts; by default the shipped training prompts. Of each the opening question is asked."""
    prompts: int = 128
    """How many of them, in order."""
    batch_size: int = 32
    max_new_tokens: int = 128
    rounds: int = 3
    json: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Where to write the numbers."""

    def __post_init__(self) -> None:
        for name in ("prompts", "batch_size", "max_new_tokens", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Took:
    wall: float
    cpu: float
    answers: Answers

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))


def main(options: Options) -> None:
    name = resolve_target(options.target, read_environment().cache_dir)
    tokenizer = load_tokenizer(name)
    dtype = chosen_dtype("auto", "cpu")
    plain: Any = load_model(name, read_config(name, False), dtype, False, None).eval()
    plain.set_attn_implementation("sdpa")  # transformers' own
    asked = read_conversations([options.data or demo_file("train")])[: options.prompts]
    prompts = [prompt_ids(tokenizer, c.opening.messages) for c in asked]
    ends = end_of_turn_ids(plain, tokenizer)
    sides: dict[str, Callable[[], Answers]] = {"generate": lambda: generated(plain, prompts, ends, options)}
    for recipe in options.recipes:
        target = load_target(name, load_recipe(recipe), dtype=dtype)
        sides[recipe] = partial(
            greedy_answers,
            target,
            prompts,
            end_ids=ends,
            max_new_tokens=options.max_new_tokens,
            batch_size=options.batch_size,
        )
    took = _timed(sides, options.rounds)
    document = _numbers(took, options, prompts, str(dtype).removeprefix("torch."))
    if options.json:
        write_text_atomically(options.json, json.dumps(document, indent=2) + "\n")


def generated(model: Any, prompts: Answers, ends: set[int], options: Options) -> Answers:
    """transformers' greedy answers, batch after batch."""
    answers: Answers = []
    for first in range(0, len(prompts), options.batch_size):
        batch = prompts[first : first + options.batch_size]
        longest = max(map(len, batch))
        with torch.inference_mode():
            out = model.generate(
                input_ids=torch.tensor([[0] * (longest - len(p)) + p for p in batch]),
                attention_mask=torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch]),
                do_sample=False,
                max_new_tokens=options.max_new_tokens,
                eos_token_id=sorted(ends),
                pad_token_id=0,
            )
        answers += [_until_end(row, ends) for row in out[:, longest:].tolist()]
    return answers


def _until_end(row: list[int], ends: set[int]) -> list[int]:
    return row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))]


def _timed(sides: dict[str, Callable[[], Answers]], rounds: int) -> dict[str, list[Took]]:
    took: dict[str, list[Took]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            wall, cpu = time.perf_counter(), time.process_time()
            answers = sides[name]()
            took[name].append(Took(time.perf_counter() - wall, time.process_time() - cpu, answers))
            last = took[name][-1]
            print(f"{name:12} {last.tokens / last.wall:8.1f} tokens/s, {last.cpu:6.1f} s of CPU", flush=True)
    return took


def _numbers(took: dict[str, list[Took]], options: Options, prompts: Answers, dtype: str) -> dict[str, Any]:
    base = took["generate"]
    results = []
    print(f"\n{'':12} {'tokens/s':>9} {'× generate':>11} {'× by CPU time':>14} {'equal answers':>14}")
    for name, rounds in took.items():
        wall = statistics.median(t.tokens / t.wall for t in rounds)
        ratio = statistics.median(t.tokens / t.wall * b.wall / b.tokens for t, b in zip(rounds, base, strict=True))
        by_cpu = statistics.median(t.tokens / t.cpu * b.cpu / b.tokens for t, b in zip(rounds, base, strict=True))
        equal = sum(a == b for a, b in zip(rounds[0].answers, base[0].answers, strict=True))
        print(f"{name:12} {wall:9.1f} {ratio:11.2f} {by_cpu:14.2f} {equal:7} of {len(prompts)}")
        results.append(
            {
                "who": name,
                "tokens_per_second": wall,
                "ratio_to_generate": ratio,
                "ratio_by_cpu_time": by_cpu,
                "tokens": rounds[0].tokens,
                "equal_answers": equal,
                "seconds": [t.wall for t in rounds],
                "cpu_seconds": [t.cpu for t in rounds],
            }
        )
    made = {"command": " ".join(["python", *sys.argv]), "date": datetime.now(UTC).date().isoformat()}
    facts = made | {k: getattr(options, k) for k in ("target", "batch_size", "max_new_tokens", "rounds")}
    lengths = {
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "longest_prompt": max(map(len, prompts)),
    }
    return {**facts, **lengths, "dtype": dtype, "results": results, "machine": machine_facts()}


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options, description=__doc__)))
