"""What ``+exact`` behind a profile changes and costs: products rounded once instead of twice in bf16.

    python scripts/bench/product_order.py --json docs/results/product_order.json

For every recipe: the share of the outputs of its linear layers that differ between the two orders, given the same
inputs; how far the final hidden states go apart; how often the next token changes; and the time of the forward pass
in the exact order over that in the fast one, the median of rounds in turn.
"""

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor, nn

from bitdraft.data.demo_target import resolve_target
from bitdraft.quant.linear import LowBitLinear
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget, calibration_ids, load_target, load_tokenizer
from bitdraft.train.environment import machine_facts, read_environment, stop_cleanly


@dataclass(frozen=True)
class Options:
    """Compare the fast and the exact order of bf16 products."""

    target: str = "demo"
    """Model folder or hub id; `demo` is the embedded SmolLM2-135M-Instruct."""
    recipes: tuple[str, ...] = ("fp8", "mxfp4", "mxfp4a16", "nvfp4", "nvfp4a16")
    """Presets or recipe files."""
    tokens: int = 512
    """How many tokens of the shipped calibration text."""
    rounds: int = 3
    json: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Where to write the numbers."""


def main(options: Options) -> None:
    name = resolve_target(options.target, read_environment().cache_dir)
    ids = torch.cat(calibration_ids(load_tokenizer(name)), dim=1)[:, : options.tokens]
    results: list[dict[str, Any]] = []
    for recipe in options.recipes:
        target = load_target(name, load_recipe(recipe))
        results.append({"recipe": recipe, **compared(target, ids, options.rounds)})
        print(
            "{recipe:10s} {differing:7.2%} of the layers' outputs differ, last states by {last_hidden_error:.4f}, "
            "{next_token_changed:.2%} of next tokens; exact takes {time_ratio:.2f} of the time".format(**results[-1]),
            flush=True,
        )
    if options.json:
        settings = {"tokens": ids.shape[1], "rounds": options.rounds}
        document = {"target": options.target, "machine": machine_facts(), **settings, "results": results}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def compared(target: LowBitTarget, ids: Tensor, rounds: int) -> dict[str, float]:
    """``ids`` ``[1, T]``: the numbers of one recipe, the first pass not timed."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    last: dict[bool, Tensor] = {}
    for round_number in range(rounds + 1):
        for exact in (False, True):
            in_exact_order(target, exact)
            start = time.perf_counter()
            last[exact] = target.states(ids).last_hidden
            if round_number:
                seconds[exact].append(time.perf_counter() - start)
    tokens = {exact: target.top_tokens(states.flatten(0, 1)) for exact, states in last.items()}
    fast, exact_states = last[False].double(), last[True].double()
    return {
        "differing": share_that_differs(target, ids),
        "last_hidden_error": float((fast - exact_states).norm() / exact_states.norm()),
        "next_token_changed": float((tokens[False] != tokens[True]).double().mean()),
        "time_ratio": statistics.median(b / a for a, b in zip(seconds[False], seconds[True], strict=True)),
    }


def in_exact_order(target: LowBitTarget, exact: bool) -> None:
    for layer in target.model.modules():
        if isinstance(layer, LowBitLinear):
            layer.exact_product = exact


def share_that_differs(target: LowBitTarget, ids: Tensor) -> float:
    """Of all outputs of low-bit layers in a fast pass over ``ids``, those that the exact order rounds otherwise."""
    counts = {"differing": 0, "all": 0}

    def compare(layer: nn.Module, args: tuple[Any, ...], fast: Tensor) -> None:
        assert isinstance(layer, LowBitLinear)
        layer.exact_product = True
        exact = layer.product(args[0])
        layer.exact_product = False
        counts["differing"] += int((exact != fast).sum())
        counts["all"] += fast.numel()

    in_exact_order(target, False)
    layers = [m for m in target.model.modules() if isinstance(m, LowBitLinear)]
    handles = [layer.register_forward_hook(compare) for layer in layers]
    target.states(ids)
    for handle in handles:
        handle.remove()
    return counts["differing"] / counts["all"]


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options)))
