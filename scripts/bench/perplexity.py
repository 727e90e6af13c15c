"""What each way of quantizing the demo target costs in perplexity, and in divergence from the model as it was.

    python scripts/bench/perplexity.py --json docs/results/perplexity.json

Answers to held-out prompts are scored: those that the records hold, else greedy answers that the unquantized model
writes (kept in the cache). Perplexity and KL divergence (from the unquantized model's distribution, in nats) are means
over the tokens of the answers. What a method adds to another ("nvfp4a16 4/6" to "nvfp4a16") is taken token by token,
with a bootstrap interval over prompts. Methods that look at inputs are calibrated block by block on ``--calibration``.
A Markdown table is written next to the JSON.
"""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from torch import Tensor

from bitdraft.data.calibration import CalibrationConfig, rows_of_text
from bitdraft.data.chat import Example, conversation_ids, end_of_turn_ids, written_examples
from bitdraft.data.conversation import Conversation
from bitdraft.data.demo_target import resolve_target
from bitdraft.data.regenerate import AnswerSettings, on_policy_examples
from bitdraft.data.sources import demo_file, read_conversations
from bitdraft.quant.files import write_text_atomically
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recipe import Recipe, Rule
from bitdraft.quant.schemes import MXFP4_EVEN, MXFP4_RCEIL, NVFP4, NVFP4_KERNEL, Scheme
from bitdraft.quant.target import LowBitTarget, load_target, load_tokenizer
from bitdraft.train.environment import chosen_dtype, machine_facts, read_environment, stop_cleanly
from bitdraft.train.gap import gap_on, mean_interval

_UNQUANTIZED = "unquantized"
_HEAD = "| method | perplexity | KL | adds to | change | seconds |\n|---|---:|---:|---|---:|---:|"


def _everywhere(
    name: str,
    weights: Scheme,
    activations: Scheme | None = None,
    scales: str = "amax",
    rounding: str = "nearest",
    transform: str = "none",
) -> Recipe:
    inputs = activations.name if activations else None
    return Recipe(name, (Rule("*.layers.*", weights.name, inputs, scales, rounding, transform),))


_A4 = (MXFP4_EVEN, MXFP4_RCEIL)
METHODS = {
    r.name: r
    for r in (
        _everywhere("nvfp4a16", NVFP4),
        _everywhere("nvfp4a16 4/6", NVFP4, scales="four-over-six"),
        _everywhere("nvfp4a16 sweep", NVFP4, scales="sweep"),
        _everywhere("nvfp4a16 gptq", NVFP4, rounding="gptq"),
        _everywhere("nvfp4a16 4/6 gptq", NVFP4, scales="four-over-six", rounding="gptq"),
        _everywhere("nvfp4a16 4/6 gptq act-order", NVFP4, scales="four-over-six", rounding="gptq-act-order"),
        _everywhere("mxfp4a16", MXFP4_EVEN),
        _everywhere("mxfp4a16 gptq", MXFP4_EVEN, rounding="gptq"),
        _everywhere("mxfp4a16 gptq act-order", MXFP4_EVEN, rounding="gptq-act-order"),
        _everywhere("mxfp4a4", *_A4),
        _everywhere("mxfp4a4 hadamard", *_A4, transform="hadamard"),
        _everywhere("mxfp4a4 wush", *_A4, transform="wush"),
        _everywhere("mxfp4a4 wush gptq", *_A4, transform="wush", rounding="gptq"),
        _everywhere("nvfp4", NVFP4, NVFP4_KERNEL),
        _everywhere("nvfp4 hadamard", NVFP4, NVFP4_KERNEL, transform="hadamard"),
        _everywhere("nvfp4 wush", NVFP4, NVFP4_KERNEL, transform="wush"),
    )
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Perplexity of a target under different ways of quantizing it."""

    target: str = "demo"
    """Model folder or hub id; `demo` is the embedded SmolLM2-135M-Instruct."""
    methods: tuple[str, ...] = tuple(METHODS)
    data: tuple[Path, ...] = ()
    """JSONL files of conversations to score; by default the shipped held-out prompts."""
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    calibrate_on_answers: bool = False
    """Let the unquantized model answer the calibration records first."""
    records: int = 80
    """How many conversations to score."""
    max_new_tokens: int = 128
    """Length of the answers that the unquantized model writes where the records hold none."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    device: str = "cpu"
    json: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Where to write the numbers."""

    def __post_init__(self) -> None:
        if unknown := set(self.methods) - set(METHODS):
            raise ValueError(f"unknown method {sorted(unknown)[0]!r} (known: {', '.join(METHODS)})")


def main(options: Options) -> None:
    cache = read_environment().cache_dir
    name = resolve_target(options.target, cache)
    tokenizer = load_tokenizer(name)
    dtype = chosen_dtype(options.dtype, options.device)

    def load(recipe: Recipe, calibration: Sequence[Tensor] | None = None) -> LowBitTarget:
        return load_target(name, recipe, dtype=dtype, device=options.device, calibration=calibration)

    base = load(load_recipe("none"))
    asked = read_conversations(options.data or [demo_file("heldout")])[: options.records]
    scored = _answered(base, tokenizer, asked, options.max_new_tokens, cache)
    texts = read_conversations(options.calibration.data or [demo_file("train")])
    ids = [conversation_ids(tokenizer, c) for c in texts]
    if options.calibrate_on_answers:
        ids = [[*e.prompt, *e.answer] for e in _answered(base, tokenizer, texts, options.max_new_tokens, cache)]
    batches = rows_of_text(ids, options.calibration.tokens)
    tokens = sum(len(e.answer) for e in scored)
    print(f"{len(scored)} answers, {tokens} tokens; calibration on {sum(b.numel() for b in batches)} tokens; {dtype}")
    print(_HEAD, flush=True)
    positions = [len(e.answer) for e in scored]
    losses: dict[str, Tensor] = {}
    results: list[dict[str, Any]] = []
    for label in (None, *options.methods):
        target, seconds = base, 0.0
        if label is not None:
            start = time.perf_counter()
            target = load(METHODS[label], batches)
            seconds = time.perf_counter() - start
        gap = gap_on(base, target, scored, capture=())
        shown = label or _UNQUANTIZED
        losses[shown] = gap.nll_low.double()
        row: dict[str, Any] = {"method": shown, "perplexity": math.exp(losses[shown].mean()), "seconds": seconds}
        row["kl"] = float(gap.kl_reference_low.double().mean())
        if (before := _what_it_adds_to(shown, losses)) is not None:
            change = losses[shown] - losses[before]
            row |= {"adds_to": before, "change": float(change.mean())}
            row["change_ci95"] = list(mean_interval(change, positions, seed=0))
        results.append(row)
        print(_line(row), flush=True)
    if options.json:
        document = {
            "command": " ".join(["python", *sys.argv]),
            "date": date.today().isoformat(),
            "target": options.target,
            "dtype": str(dtype),
            "answers": len(scored),
            "tokens": tokens,
            "calibration_tokens": sum(b.numel() for b in batches),
            "results": results,
            "machine": machine_facts(),
        }
        write_text_atomically(options.json, json.dumps(document, indent=2) + "\n")
        write_text_atomically(options.json.with_suffix(".md"), _report(document))


def _what_it_adds_to(method: str, measured: Mapping[str, object]) -> str | None:
    """The method whose name is the longest beginning of this one's, in words; else the unquantized model."""
    words = method.split()
    shorter = [" ".join(words[:n]) for n in range(len(words) - 1, 0, -1)]
    return next((name for name in (*shorter, _UNQUANTIZED) if name in measured and name != method), None)


def _line(row: Mapping[str, Any]) -> str:
    change = "– | –"
    if "adds_to" in row:
        low, high = row["change_ci95"]
        change = f"{row['adds_to']} | {row['change']:+.4f} ({low:+.4f} … {high:+.4f})"
    return f"| {row['method']} | {row['perplexity']:.4f} | {row['kl']:.4f} | {change} | {row['seconds']:.0f} |"


def _report(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    return "\n".join(
        [
            "# Perplexity of the quantized target",
            "",
            f"{document['target']} in {document['dtype'].removeprefix('torch.')}, {document['answers']} answers of the "
            f"unquantized model, {document['tokens']} tokens; {document['calibration_tokens']} tokens to calibrate on. "
            "KL from the unquantized model's distribution, in nats. Change: of the log of the perplexity, token by "
            "token, from the method named, with its 95 % interval over prompts. Seconds: to load and quantize.",
            "",
            _HEAD,
            *(_line(row) for row in document["results"]),
            "",
            f"`{document['command']}`, {document['date']}, {machine['threads']} threads, {machine['machine']} "
            f"{machine['device']}, torch {machine['torch']}, transformers {machine['transformers']}.",
            "",
        ]
    )


def _answered(
    base: LowBitTarget, tokenizer: Any, conversations: Sequence[Conversation], new_tokens: int, cache: Path
) -> list[Example]:
    """The answers that the records hold, or the unquantized model's where they hold none."""
    ends = end_of_turn_ids(base.model, tokenizer)
    if all(any(m.role == "assistant" for m in c.messages) for c in conversations):
        return [e for c in conversations for e in written_examples(tokenizer, c, ends)]
    settings = AnswerSettings(max_new_tokens=new_tokens, batch_size=32)
    return on_policy_examples(base, tokenizer, conversations, settings, end_ids=ends, cache_dir=cache)


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options, description=Options.__doc__)))
