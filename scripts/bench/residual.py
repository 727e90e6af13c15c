"""What residual corrections give back: a low-bit target with corrections of growing size against the 16-bit one.

    python scripts/bench/residual.py --json docs/results/residual.json

Answers that the unquantized model writes to held-out prompts (kept in the cache) are scored: KL divergence from the
unquantized model's distribution, agreement of the first choices, perplexity, all over the tokens of the answers.
Corrections are fitted on training prompts, on which static input scales are measured too, whatever the share.
A Markdown table is written next to the JSON.
"""

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from torch import Tensor

from bitdraft.data.calibration import CalibrationConfig, rows_of_text
from bitdraft.data.chat import Example, conversation_ids, end_of_turn_ids
from bitdraft.data.demo_target import resolve_target
from bitdraft.data.regenerate import AnswerSettings, on_policy_examples
from bitdraft.data.sources import demo_file, read_conversations
from bitdraft.quant.files import write_text_atomically
from bitdraft.quant.gap import Gap
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recipe import Recipe
from bitdraft.quant.target import LowBitTarget, load_target, load_tokenizer
from bitdraft.train.environment import chosen_dtype, machine_facts, read_environment, stop_cleanly
from bitdraft.train.gap import gap_on, mean_interval


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure what residual corrections give back."""

    target: str = "demo"
    """Model folder or hub id; `demo` is the embedded SmolLM2-135M-Instruct."""
    recipes: tuple[str, ...] = ("mxfp4a16", "mxfp4", "nvfp4")
    shares: tuple[float, ...] = (0.0, 0.001, 0.01)
    """Parameters that a correction adds, as a share of its layer's."""
    data: tuple[Path, ...] = ()
    """JSONL files of prompts to score; by default the shipped held-out prompts."""
    prompts: int = 24
    """How many of them."""
    max_new_tokens: int = 48
    """Length of the answers."""
    calibration: CalibrationConfig = field(default_factory=lambda: CalibrationConfig(tokens=4096))
    seed: int = 0
    """Seed of the bootstrap."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    device: str = "cpu"
    json: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Where to write the numbers; the table goes beside them."""

    def __post_init__(self) -> None:
        if not self.shares or self.shares[0] != 0:
            raise ValueError("--shares begin with 0: differences are taken from the target without corrections")


def main(options: Options) -> None:
    start = time.perf_counter()
    cache = read_environment().cache_dir
    name = resolve_target(options.target, cache)
    tokenizer = load_tokenizer(name)
    dtype = chosen_dtype(options.dtype, options.device)

    def load(recipe: Recipe, calibration: Sequence[Tensor] | None = None) -> LowBitTarget:
        return load_target(name, recipe, dtype=dtype, device=options.device, calibration=calibration)

    base = load(load_recipe("none"))
    asked = read_conversations(options.data or [demo_file("heldout")])[: options.prompts]
    settings = AnswerSettings(max_new_tokens=options.max_new_tokens, batch_size=32)
    ends = end_of_turn_ids(base.model, tokenizer)
    scored = on_policy_examples(base, tokenizer, asked, settings, end_ids=ends, cache_dir=cache)
    conversations = read_conversations(options.calibration.data or [demo_file("train")])
    texts = [conversation_ids(tokenizer, c) for c in conversations]
    batches = rows_of_text(texts, options.calibration.tokens)
    tokens = sum(ids.numel() for ids in batches)
    results: list[dict[str, Any]] = []
    for recipe in options.recipes:
        without: Gap | None = None
        for share in options.shares:
            began = time.perf_counter()
            low = load(with_residuals(load_recipe(recipe), share), batches)
            seconds = time.perf_counter() - began
            gap = gap_on(base, low, scored, capture=())
            without = without or gap
            fitted = low.applied.residuals.values()
            added = sum(f.added for f in fitted)
            row = {
                "recipe": recipe,
                "share": share,
                "added": added,
                "added_share": added / max(sum(f.of for f in fitted), 1),
                "seconds_to_load": seconds,
                **numbers(gap, without, scored, options.seed),
            }
            results.append(row)
            print(line(row), flush=True)
            del low  # before the next one is loaded
    document = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "target": Path(name).name,
        "dtype": str(dtype).removeprefix("torch."),
        "answers": len(scored),
        "tokens": sum(len(e.answer) for e in scored),
        "calibration_tokens": tokens,
        "calibration_conversations": conversations_within(texts, tokens),
        "results": results,
        "seconds": time.perf_counter() - start,
        "machine": machine_facts(),
    }
    print(markdown(document))
    if options.json:
        write_text_atomically(options.json, json.dumps(document, indent=2) + "\n")
        write_text_atomically(options.json.with_suffix(".md"), markdown(document))


def with_residuals(recipe: Recipe, share: float) -> Recipe:
    rules = tuple(rule if rule.leaves_alone else replace(rule, residual=share) for rule in recipe.rules)
    return replace(recipe, rules=rules)


def numbers(gap: Gap, without: Gap, scored: Sequence[Example], seed: int) -> dict[str, Any]:
    """Means over the answers' tokens; the change of KL with its 95 % interval over prompts, prompt by prompt."""
    positions = [len(e.answer) for e in scored]
    change = gap.kl_reference_low - without.kl_reference_low
    return {
        "kl": float(gap.kl_reference_low.double().mean()),
        "kl_change": float(change.double().mean()),
        "kl_change_ci95": list(mean_interval(change, positions, seed)),
        "top1_agreement": float(gap.agrees.double().mean()),
        "top1_agreement_ci95": list(mean_interval(gap.agrees, positions, seed)),
        "perplexity": math.exp(gap.nll_low.double().mean()),
        "perplexity_unquantized": math.exp(gap.nll_reference.double().mean()),
    }


def conversations_within(texts: Sequence[Sequence[int]], tokens: int) -> int:
    """How many of ``texts``, one behind the other, the first ``tokens`` tokens come from."""
    count = 0
    for text in texts:
        if tokens <= 0:
            break
        tokens -= len(text)
        count += 1
    return count


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    low, high = row["kl_change_ci95"]
    change = f"{row['kl_change']:+.4f} [{low:+.4f}, {high:+.4f}]" if row["share"] else ""
    return (
        f"| {row['recipe']} | {row['share']:g} | {row['added_share']:.2%} | {row['kl']:.4f} | {change} | "
        f"{row['top1_agreement']:.3f} | {row['perplexity']:.3f} | {row['seconds_to_load']:.0f} |"
    )


def markdown(document: dict[str, Any]) -> str:
    """The numbers as a table."""
    machine, own = document["machine"], document["results"][0]["perplexity_unquantized"]
    lines = [
        "# Residual corrections",
        "",
        f"{document['target']} in {document['dtype']}: {document['answers']} answers of the unquantized model, "
        f"{document['tokens']} tokens, on which its own perplexity is {own:.3f}. Corrections fitted on "
        f"{document['calibration_tokens']} samples (tokens) of {document['calibration_conversations']} conversations. "
        "*Asked* and *added*: parameters of the corrections over those of the corrected layers. *KL*: from the "
        "unquantized model's distribution, in nats; its change is taken token by token, the interval over prompts. "
        "*First choice*: share of tokens where the two models' agree. *Seconds*: to load, quantize and fit; what else "
        "the machine did counts too.",
        "",
        "| recipe | asked | added | KL | change of KL [95 %] | first choice | perplexity | seconds |",
        "|---|---|---|---|---|---|---|---|",
        *map(line, document["results"]),
        "",
        f"`{document['command']}`, {document['date']}, {document['seconds']:.0f} s, {machine['threads']} threads, "
        f"{machine['machine']} {machine['device']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options, description=Options.__doc__)))
