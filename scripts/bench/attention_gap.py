"""What a low-bit KV cache and low-bit attention cost on the demo target, with and without what is fitted for them.

    python scripts/bench/attention_gap.py --out docs/results

Linear layers stay in high precision unless a row says otherwise, so that each row shows one thing. Answers to held-out
prompts that the unquantized model writes (kept in the cache) are read by every variant; its distributions are compared
with the unquantized model's where the next token was written. Writes attention.json and attention.md into ``--out``.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from bitdraft.data.batches import make_batch
from bitdraft.data.chat import Example, end_of_turn_ids
from bitdraft.data.demo_target import resolve_target
from bitdraft.data.regenerate import AnswerSettings, on_policy_examples
from bitdraft.data.sources import demo_file, read_conversations
from bitdraft.quant.attention.rules import AttentionRule, KvRule
from bitdraft.quant.files import write_text_atomically
from bitdraft.quant.gap import Gap, compare
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recipe import Recipe
from bitdraft.quant.target import LowBitTarget, load_target, load_tokenizer
from bitdraft.train.environment import machine_facts, read_environment, stop_cleanly
from bitdraft.train.gap import mean_interval

NONE = load_recipe("none")
CORRECTIONS: dict[str, dict[str, str]] = {
    "": {},
    ", head scales": {"head_scales": "fitted"},
    ", temperature": {"temperature": "fitted"},
}


def cached(label: str, **rule: str) -> tuple[str, Recipe]:
    return f"cache {label}", replace(NONE, kv=KvRule(**rule))


def attention(label: str, **rule: str) -> tuple[str, Recipe]:
    return label, replace(NONE, attention=AttentionRule(**rule))


FP8_ATTENTION = replace(
    NONE,
    kv=KvRule(scales="calibrated"),
    attention=AttentionRule(queries="fp8-tensor-static", probabilities="fp8-tensor-static"),
)
VARIANTS: dict[str, Recipe] = dict(
    [
        cached("fp8, scale 1"),
        cached("fp8, calibrated", scales="calibrated"),
        cached("fp8, calibrated per head", scales="calibrated", per="head"),
        cached("fp8 E5M2, scale 1", format="fp8-e5m2-kv"),
        cached("int8-token", format="int8-token"),
        cached("mxfp4-rceil", format="mxfp4-rceil"),
        ("mxfp4 linear layers", load_recipe("mxfp4")),
        ("mxfp4 linear layers, cache fp8", load_recipe("mxfp4+kvfp8")),
        *(
            attention(f"QK {name}{words}", queries=name, keys=name, **fitted)
            for name in ("int8-token", "fp8-token", "nvfp4-kernel", "mxfp4-rceil")
            for words, fitted in CORRECTIONS.items()
        ),
        attention(
            "QK mxfp4-rceil, both",
            queries="mxfp4-rceil",
            keys="mxfp4-rceil",
            head_scales="fitted",
            temperature="fitted",
        ),
        attention("PV fp8", probabilities="fp8-tensor-static", values="fp8-token"),
        attention("PV fp8, temperature", probabilities="fp8-tensor-static", values="fp8-token", temperature="fitted"),
        attention("P mxfp4-rceil", probabilities="mxfp4-rceil"),
        attention("P mxfp4-rceil, temperature", probabilities="mxfp4-rceil", temperature="fitted"),
        ("cache fp8, calibrated, fp8 attention", FP8_ATTENTION),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Gap of a target under low-bit KV caches and low-bit attention."""

    target: str = "demo"
    """Model folder or hub id; `demo` is the embedded SmolLM2-135M-Instruct."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    prompts: int = 12
    """How many of the shipped held-out prompts, in file order."""
    max_new_tokens: int = 48
    """Longest answer."""
    seed: int = 0
    """Seed of the bootstrap; everything else is greedy."""
    out: Path = Path("runs/attention")
    """Folder for attention.json and attention.md."""

    def __post_init__(self) -> None:
        if unknown := set(self.variants) - set(VARIANTS):
            raise ValueError(f"unknown variant {sorted(unknown)[0]!r} (known: {', '.join(VARIANTS)})")


def main(options: Options) -> None:
    cache = read_environment().cache_dir
    name = resolve_target(options.target, cache)
    tokenizer = load_tokenizer(name)

    def load(recipe: Recipe) -> LowBitTarget:  # fp32: what 16 bits round off is as large as some of these effects
        return load_target(name, recipe, dtype=torch.float32)

    base = load(NONE)
    asked = [c.opening for c in read_conversations([demo_file("heldout")])]
    settings = AnswerSettings(options.max_new_tokens, batch_size=16)
    ends = end_of_turn_ids(base.model, tokenizer)
    examples = on_policy_examples(base, tokenizer, asked[: options.prompts], settings, end_ids=ends, cache_dir=cache)
    reference = _states(base, examples)
    positions = [len(e.answer) for e in examples]
    results, divergences = [], {}
    for label in options.variants:
        start = time.perf_counter()
        low = load(VARIANTS[label])
        loaded = time.perf_counter() - start
        gap = compare(reference[0], _states(low, examples)[0], base.logits, low.logits, reference[1])
        divergences[label] = gap.kl_reference_low
        row = _row(label, low, gap, positions, options.seed) | {"load_seconds": loaded}
        if (plain := divergences.get(label.rpartition(", ")[0])) is not None and label.startswith(("QK", "P")):
            change = gap.kl_reference_low - plain
            row["kl_change"] = float(change.double().mean())
            row["kl_change_ci95"] = list(mean_interval(change, positions, options.seed))
        results.append(row)
        print(_line(results[-1]), flush=True)
    document = {
        "version": 1,
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "versions": {package: version(package) for package in ("torch", "transformers")},
        "target": options.target,
        "target_fingerprint": base.fingerprint,
        "dtype": "float32",
        "prompts": len(examples),
        "positions": len(reference[1]),
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed,
        "machine": machine_facts(),
        "results": results,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    write_text_atomically(options.out / "attention.json", json.dumps(document, indent=2) + "\n")
    write_text_atomically(options.out / "attention.md", _report(document))


def _states(target: LowBitTarget, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """``[P, 1, H]`` final states where the next token was written, and those tokens ``[P]``."""
    states, tokens = [], []
    for start in range(0, len(examples), 8):
        batch = make_batch(examples[start : start + 8])
        written = batch.written()[:, 1:]
        states.append(target.states(batch.tokens).last_hidden[:, :-1][written][:, None])
        tokens.append(batch.tokens[:, 1:][written])
    return torch.cat(states), torch.cat(tokens)


def _row(label: str, low: LowBitTarget, gap: Gap, positions: Sequence[int], seed: int) -> dict[str, Any]:
    return {
        "variant": label,
        "recipe_fingerprint": low.recipe.fingerprint,
        "summary": [line for line in low.applied.summary().splitlines() if "left in" not in line],
        "kl": float(gap.kl_reference_low.double().mean()),
        "kl_ci95": list(mean_interval(gap.kl_reference_low, positions, seed)),
        "top1_agreement": float(gap.agrees.double().mean()),
        "top1_agreement_ci95": list(mean_interval(gap.agrees, positions, seed)),
        "final_state_relative_error": float(gap.relative_error[:, -1].double().mean()),
    }


def _line(row: Mapping[str, Any]) -> str:
    low, high = row["kl_ci95"]
    return (
        f"{row['variant']:32} KL {row['kl']:.6f} ({low:.6f} … {high:.6f})  top-1 {row['top1_agreement']:.4f}  "
        f"state error {row['final_state_relative_error']:.4f}  {row['load_seconds']:.1f} s"
    )


def _change(row: Mapping[str, Any]) -> str:
    if "kl_change" not in row:
        return "–"
    low, high = row["kl_change_ci95"]
    return f"{row['kl_change']:+.5f} ({low:+.5f} … {high:+.5f})"


def _report(document: Mapping[str, Any]) -> str:
    rows = [
        f"| {r['variant']} | {r['kl']:.5f} ({r['kl_ci95'][0]:.5f} … {r['kl_ci95'][1]:.5f}) | "
        f"{r['top1_agreement']:.3f} ({r['top1_agreement_ci95'][0]:.3f} … {r['top1_agreement_ci95'][1]:.3f}) | "
        f"{r['final_state_relative_error']:.4f} | {_change(r)} |"
        for r in document["results"]
    ]
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    return "\n".join(
        [
            "# Low-bit KV caches and low-bit attention",
            "",
            f"Target {document['target']} in fp32, {document['prompts']} held-out prompts, {document['positions']} "
            "positions of answers that the unquantized model wrote. KL(unquantized ‖ variant) in nats, agreement of",
            "the first choices, relative error of the final state, and what a correction changes in KL, by position;",
            "95 % intervals by bootstrap over prompts.",
            "",
            "| variant | KL | top-1 agreement | state error | KL less that without the correction |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"`{document['command']}`, {document['date']}, seed {document['seed']}, {versions}; machine and recipes' "
            "fingerprints in [attention.json](attention.json).",
            "",
        ]
    )


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options, description=Options.__doc__)))
