"""Wall-clock gain of drafting at batch 1: heads against plain decoding in the same loop and transformers' `generate`.

    python scripts/bench/decode_speed.py --heads runs/eagle3-none/export --target-quant none --json OUT.json

Greedy. The variants take turns, prompt by prompt, round after round, so that a drifting machine slows all of them
alike; ratios are taken within each round and their medians printed. A head is measured as a chain and, with `--trees`,
as the sparse tree that fits its accuracies on the traffic prompts. Every drafted answer is compared with the plain one.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from bitdraft.data.chat import end_of_turn_ids, prompt_ids
from bitdraft.data.demo_target import resolve_target
from bitdraft.data.sources import demo_file, read_conversations
from bitdraft.quant.files import write_text_atomically
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget, load_target, load_tokenizer
from bitdraft.speculators.base import Drafter, DraftHead
from bitdraft.speculators.decode import Generation, Seconds, generate
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.load import load_head
from bitdraft.speculators.lossless import compare_with_plain
from bitdraft.speculators.tree_shapes import sparse
from bitdraft.train.environment import chosen_dtype, machine_facts, read_environment, stop_cleanly
from bitdraft.train.measuring.acceptance import Decoding, decode
from bitdraft.train.measuring.prompt_sets import PromptSet
from bitdraft.train.measuring.tree_choice import rank_accuracies


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time speculative decoding against plain decoding, prompt by prompt."""

    heads: tuple[Path, ...]
    """Export folders."""
    target: str = "demo"
    target_quant: str = "none"
    draft_length: tuple[int, ...] = (3, 4)
    """Chains, and with `--trees` the depths of trees."""
    trees: tuple[int, ...] = ()
    """Drafted tokens per pass of trees to time as well."""
    prompts: int = 8
    """Shipped held-out prompts, every tenth."""
    max_new_tokens: int = 96
    rounds: int = 5
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    json: Annotated[Path | None, tyro.conf.arg(name="json")] = None

    def __post_init__(self) -> None:
        for name in ("prompts", "max_new_tokens", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")


@dataclass
class Variant:
    """One way of decoding, and what it took: per round, over all prompts."""

    run: Callable[[list[int]], tuple[list[int], Generation | None, Seconds]]
    head: str = ""
    plan: DraftPlan | None = None
    seconds: list[Seconds] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))


def main(options: Options) -> None:
    name = resolve_target(options.target, read_environment().cache_dir)
    target = load_target(name, load_recipe(options.target_quant), dtype=chosen_dtype(options.dtype, "cpu"))
    tokenizer = load_tokenizer(name)
    end_ids = end_of_turn_ids(target.model, tokenizer)
    conversations = read_conversations([demo_file("heldout")])
    chosen = conversations[:: max(1, len(conversations) // options.prompts)][: options.prompts]
    prompts = [prompt_ids(tokenizer, c.messages) for c in chosen]
    variants = _variants(options, target, tokenizer, end_ids)
    for variant in variants.values():  # warm up
        variant.run(prompts[0])
    started = time.monotonic()
    for number in range(options.rounds):
        for variant in variants.values():
            variant.seconds.append(Seconds())
            variant.answers.clear()
            variant.generations.clear()
        for prompt in prompts:
            for variant in variants.values():
                answer, generation, seconds = variant.run(prompt)
                variant.seconds[-1] += seconds
                variant.answers.append(answer)
                variant.generations += [generation] if generation else []
        left = (time.monotonic() - started) / (number + 1) * (options.rounds - number - 1)
        print(f"round {number + 1} of {options.rounds}, about {left / 60:.1f} min left", flush=True)
    document = _document(options, target, [c.id for c in chosen], prompts, variants)
    _print(document)
    if options.json:
        write_text_atomically(options.json, json.dumps(document, indent=2) + "\n")
    failed = [name for name, h in document["variants"].items() if h["lossless_failed"]]
    if failed:
        print(f"error: not lossless: {', '.join(failed)}", file=sys.stderr)
        sys.exit(1)


def _variants(options: Options, target: LowBitTarget, tokenizer: Any, end_ids: set[int]) -> dict[str, Variant]:
    def ours(drafter: Drafter | None, plan: DraftPlan | None) -> Callable[[list[int]], Any]:
        def run(prompt: list[int]) -> tuple[list[int], Generation, Seconds]:
            (done,), seconds = generate(
                target,
                drafter,
                [prompt],
                plan=plan,
                max_new_tokens=options.max_new_tokens,
                end_ids=end_ids,
                batch_size=1,
            )
            return done.tokens, done, seconds

        return run

    def theirs(prompt: list[int]) -> tuple[list[int], None, Seconds]:
        ids = torch.tensor([prompt], device=target.device)
        started = time.perf_counter()
        out = target.model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=options.max_new_tokens,
            eos_token_id=sorted(end_ids),
            pad_token_id=min(end_ids),
        )
        return out[0, len(prompt) :].tolist(), None, Seconds(verify=time.perf_counter() - started)

    variants = {"plain": Variant(ours(None, None)), "generate": Variant(theirs)}
    traffic = PromptSet("traffic", tuple(read_conversations([demo_file("traffic")])))
    answers = None
    heads = [load_head(path, target) for path in options.heads]
    kinds = [head.kind for head in heads]
    for path, head in zip(options.heads, heads, strict=True):
        name = head.kind if kinds.count(head.kind) == 1 else f"{head.kind} {path}"
        for length in options.draft_length:
            plan = DraftPlan(length=length)
            variants[f"{name} chain {length}"] = Variant(ours(head, plan), name, plan)
            for nodes in options.trees:
                if answers is None:
                    how = Decoding(max_new_tokens=64, batch_size=40)
                    answers = decode(target, None, tokenizer, traffic, None, how).answers
                assert isinstance(head, DraftHead)
                accuracies = rank_accuracies(target, head, [e for t in answers for e in t], depth=length, ranks=8)
                plan = DraftPlan(length=length, shape=sparse(accuracies, nodes, depth=length))
                variants[f"{name} tree {length}/{nodes}"] = Variant(ours(head, plan), name, plan)
    return variants


def _document(
    options: Options, target: LowBitTarget, ids: list[str], prompts: list[list[int]], variants: dict[str, Variant]
) -> dict[str, Any]:
    plain, generic = variants["plain"], variants["generate"]
    passes = sum(g.counts.passes for g in plain.generations)
    drafted: dict[str, dict[str, Any]] = {}
    for name, variant in variants.items():
        if variant.plan is None:
            continue
        counts = sum((g.counts for g in variant.generations[1:]), variant.generations[0].counts)
        steps = counts.passes * variant.plan.length
        checked = compare_with_plain(target, ids, prompts, variant.answers, plain.answers)
        shares = [{k: v / s.total for k, v in asdict(s).items()} for s in variant.seconds]
        drafted[name] = {
            "head": variant.head,
            "tokens_per_second": statistics.median(variant.tokens / s.total for s in variant.seconds),
            "speedup": _ratio(variant, plain),
            "speedup_over_generate": _ratio(variant, generic),
            # One draft step over one plain target pass.
            "cost_ratio": statistics.median(
                (s.draft / steps) / (p.verify / passes) for s, p in zip(variant.seconds, plain.seconds, strict=True)
            ),
            "verify_ratio": statistics.median(
                (s.verify / counts.passes) / (p.verify / passes)
                for s, p in zip(variant.seconds, plain.seconds, strict=True)
            ),
            "shares": {key: statistics.median(row[key] for row in shares) for key in shares[0]},
            "acceptance_length": counts.length,
            "acceptance_rate": counts.rate,
            "drafted_per_pass": counts.drafted_per_pass,
            "lossless_checked": checked.checked,
            "lossless_failed": checked.failed,
            "lossless_excused_near_ties": checked.excused,
        }
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "recipe": target.recipe.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": len(prompts),
        "max_new_tokens": options.max_new_tokens,
        "rounds": options.rounds,
        "machine": machine_facts(),
        "plain_tokens_per_second": statistics.median(plain.tokens / s.total for s in plain.seconds),
        "generate_tokens_per_second": statistics.median(generic.tokens / s.total for s in generic.seconds),
        "heads": {head: _best(drafted, head) for head in dict.fromkeys(d["head"] for d in drafted.values())},
        "variants": drafted,
    }


def _best(drafted: dict[str, dict[str, Any]], head: str) -> dict[str, Any]:
    """A head's fastest variant."""
    name = max((n for n, d in drafted.items() if d["head"] == head), key=lambda n: drafted[n]["speedup"])
    return {"variant": name, **drafted[name]}


def _ratio(variant: Variant, base: Variant) -> float:
    """Tokens per second over the base's, round by round; the median."""
    return statistics.median(
        (variant.tokens / s.total) / (base.tokens / b.total) for s, b in zip(variant.seconds, base.seconds, strict=True)
    )


def _print(document: dict[str, Any]) -> None:
    print(f"plain decoding {document['plain_tokens_per_second']:.1f} tokens/s, ", end="")
    print(f"transformers' generate {document['generate_tokens_per_second']:.1f} tokens/s")
    columns = f"{'tokens/s':>8} {'× plain':>8} {'× generate':>10} {'c':>6} {'verify':>7} {'length':>7}"
    print(f"{'':22} {columns}  draft / verify / other")
    for name, h in document["variants"].items():
        shares = " / ".join(f"{h['shares'][k]:.0%}" for k in ("draft", "verify", "other"))
        print(
            f"{name:22} {h['tokens_per_second']:8.1f} {h['speedup']:8.2f} {h['speedup_over_generate']:10.2f} "
            f"{h['cost_ratio']:6.3f} {h['verify_ratio']:7.2f} {h['acceptance_length']:7.2f}  {shares}"
        )


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options, description=Options.__doc__)))
