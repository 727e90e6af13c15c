"""What each way of choosing NVFP4 and MXFP4 block scales costs in weight error, on a real model's matrices.

    python scripts/bench/weight_error.py --json docs/results/quant_scales.json

Error is the sum of squared differences over the sum of squares, added up over all layers of a kind; layers that
engines fuse share a global scale as they do when a recipe is applied. Random matrices stand beside them. For
one decoder layer the outputs are looked at too: scales chosen under the second moments of its real inputs, with
one scale for assigning and storing codes or with two. A Markdown table is written next to the JSON.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor, nn

from bitdraft.data.demo_target import DEMO, resolve_target
from bitdraft.quant.block import Quantized, dequantize, quantize
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.scales.four_over_six import blocks_at_four
from bitdraft.quant.scales.methods import quantize_together, scale_method
from bitdraft.quant.scales.sweep import sweep, sweep_decoupled
from bitdraft.quant.schemes import MXFP4_EVEN, MXFP4_RCEIL, NVFP4, Scheme
from bitdraft.quant.target import LowBitTarget, calibration_ids, load_target, load_tokenizer
from bitdraft.train.environment import machine_facts, read_environment, stop_cleanly

GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
PARTS = {"QKV": ("q_proj", "k_proj", "v_proj"), "MLP": ("gate_proj", "up_proj", "down_proj")}
METHODS: dict[str, tuple[Scheme, str]] = {
    "NVFP4": (NVFP4, "amax"),
    "NVFP4 four-over-six": (NVFP4, "four-over-six"),
    "NVFP4 four-over-six-mae": (NVFP4, "four-over-six-mae"),
    "NVFP4 four-over-six-abs-max": (NVFP4, "four-over-six-abs-max"),
    "NVFP4 soar": (NVFP4, "soar"),
    "NVFP4 sweep": (NVFP4, "sweep"),
    "MXFP4 (even)": (MXFP4_EVEN, "amax"),
    "MXFP4 (even) exponent-bias": (MXFP4_EVEN, "exponent-bias"),
    "MXFP4 (even) sweep-exponent": (MXFP4_EVEN, "sweep-exponent"),
    "MXFP4 (rceil)": (MXFP4_RCEIL, "amax"),
    "MXFP4 (rceil) exponent-bias": (MXFP4_RCEIL, "exponent-bias"),
}
# What an independent implementation measured on draws of its own (SOAR: another reading of the search).
EARLIER = {
    "NVFP4": {"Gaussian": 9.15, "Laplace": 8.62, "Student-t (5)": 8.51},
    "NVFP4 four-over-six": {"Gaussian": 7.61, "Laplace": 7.60, "Student-t (5)": 7.50},
    "NVFP4 soar": {"Gaussian": 7.81, "Laplace": 7.46, "Student-t (5)": 7.51},
    "NVFP4 sweep": {"Gaussian": 6.67, "Laplace": 6.79, "Student-t (5)": 6.75},
}
DEMO_NOTE = (
    " The embedded copy of this model was stored in Q4_1, so its weights already lie on 16 evenly spaced values per "
    "block of 32; a 16-bit original may differ."
)
Table = dict[str, dict[str, float]]  # method → kind of matrix → number


class Totals:
    """Numerators and denominators by method and kind, added up before they are divided."""

    def __init__(self) -> None:
        self.sums: dict[str, dict[str, tuple[float, float]]] = {}

    def add(self, method: str, kind: str, numerator: float, denominator: float) -> None:
        before = self.sums.setdefault(method, {}).get(kind, (0.0, 0.0))
        self.sums[method][kind] = before[0] + numerator, before[1] + denominator

    def add_parts(self, parts: Mapping[str, Sequence[str]]) -> None:
        """Kinds that stand for several others together."""
        for method, kinds in list(self.sums.items()):
            for part, members in parts.items():
                for member in members:
                    self.add(method, part, *kinds[member])

    def ratios(self) -> Table:
        return {method: {kind: a / b for kind, (a, b) in kinds.items()} for method, kinds in self.sums.items()}


@dataclass(frozen=True)
class Options:
    """Measure the weight error of every scale method."""

    target: str = "demo"
    """Model folder or hub id; `demo` is the embedded SmolLM2-135M-Instruct."""
    layers: int = 10
    """How many decoder layers, evenly spread, are measured; 0 is all."""
    json: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Where to write the numbers; the table goes beside them."""


def main(options: Options) -> None:
    folder = resolve_target(options.target, read_environment().cache_dir)
    target = load_target(folder, load_recipe("none"))
    every = target.layers / (options.layers or target.layers)
    numbers = sorted({int(i * every) for i in range(options.layers or target.layers)})
    start = time.perf_counter()
    errors, fours, seconds = measure_weights(target, numbers)
    document = {
        "command": "python scripts/bench/weight_error.py"
        + (f" --layers {options.layers}" if options.layers != 10 else ""),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "target": Path(folder).name,
        "note": DEMO_NOTE if options.target == DEMO else "",
        "layers": len(numbers),
        "relative_error": errors,
        "share_of_blocks_at_four": fours,
        "seconds": seconds,
        "outputs": measure_outputs(target, numbers[len(numbers) // 2], calibration_ids(load_tokenizer(folder))),
        "machine": machine_facts(),
    }
    text = markdown(document)
    print(text)
    print(f"{time.perf_counter() - start:.0f} s")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        options.json.with_suffix(".md").write_text(text + "\n", encoding="utf-8")


def measure_weights(target: LowBitTarget, numbers: Sequence[int]) -> tuple[Table, Table, dict[str, float]]:
    """Relative errors by method and matrix kind (or distribution), shares of blocks at 4 likewise, and seconds."""
    errors, fours, seconds = Totals(), Totals(), dict.fromkeys(METHODS, 0.0)
    groups = [
        {leaf.rpartition(".")[2]: target.decoder.layers[n].get_submodule(leaf).weight.detach() for leaf in group}
        for n in numbers
        for group in GROUPS
    ]
    random = random_weights()
    for weights in [*groups, *({name: weight} for name, weight in random.items())]:
        for label, (scheme, method) in METHODS.items():
            start = time.perf_counter()
            results = quantize_together(list(weights.values()), scheme, scale_method(method, scheme))
            if random.keys().isdisjoint(weights):
                seconds[label] += time.perf_counter() - start
            for (kind, weight), q in zip(weights.items(), results, strict=True):
                exact = weight.double()
                wrong = (dequantize(q).double() - exact).square().sum()
                errors.add(label, kind, float(wrong), float(exact.square().sum()))
                if method.startswith("four-over-six"):
                    four = blocks_at_four(q)
                    fours.add(label, kind, float(four.sum()), float(four.numel()))
    fours.add_parts(PARTS)
    return errors.ratios(), fours.ratios(), seconds


def random_weights() -> dict[str, Tensor]:
    """A million draws each from the distributions that weights are compared with, fp32 ``[1024, 1024]``."""
    torch.manual_seed(0)
    shape = torch.Size((1024, 1024))
    return {
        "Gaussian": torch.randn(shape),
        "Laplace": torch.distributions.Laplace(0.0, 1.0).sample(shape),
        "Student-t (5)": torch.distributions.StudentT(5.0).sample(shape),
    }


def measure_outputs(target: LowBitTarget, number: int, texts: Sequence[Tensor]) -> dict[str, dict[str, Table]]:
    """For decoder layer ``number``, by matrix: ``tr(E H Eᵀ) / tr(W H Wᵀ)`` of each choice of scales.

    ``H``: the second moments of the matrix's real inputs, whole (``outputs``), their diagonal, their diagonal blocks.
    """
    results: dict[str, Table] = {"outputs": {}, "diagonal": {}, "blocks": {}}
    for leaf in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        linear = target.decoder.layers[number].get_submodule(leaf)
        moments = second_moments(target, linear, texts)  # [K, K]
        weight = linear.weight.detach().float()
        diagonal, blocks = moments.diagonal(), diagonal_blocks(moments, 16)
        choices: dict[str, Quantized] = {
            "amax": quantize(weight, NVFP4),
            "sweep": sweep(weight, NVFP4),
            "sweep under the diagonal": sweep(weight, NVFP4, hessian=diagonal),
            "two scales under the diagonal": sweep_decoupled(weight, NVFP4, hessian=diagonal),
            "sweep under the blocks": sweep(weight, NVFP4, hessian=blocks),
            "two scales under the blocks": sweep_decoupled(weight, NVFP4, hessian=blocks),
        }
        measures = {"outputs": moments, "diagonal": diagonal.diag(), "blocks": torch.block_diag(*blocks)}
        for measure, h in measures.items():
            whole = energy(weight, h)
            for name, q in choices.items():
                by_matrix = results[measure].setdefault(name, {})
                by_matrix[leaf.rpartition(".")[2]] = energy(dequantize(q) - weight, h) / whole
    return {f"decoder layer {number}": results}


def energy(e: Tensor, h: Tensor) -> float:
    """``tr(e h eᵀ)`` for ``[M, K]`` and ``[K, K]``."""
    return float(((e @ h).double() * e.double()).sum())


def second_moments(target: LowBitTarget, linear: nn.Module, texts: Sequence[Tensor]) -> Tensor:
    """``E[x xᵀ]`` ``[K, K]`` fp32 of a layer's inputs over ``texts`` (token ids ``[1, T]`` each)."""
    seen: list[Tensor] = []
    handle = linear.register_forward_pre_hook(lambda _module, args: seen.append(args[0].float().flatten(0, -2)))
    try:
        for ids in texts:
            target.states(ids)
    finally:
        handle.remove()
    x = torch.cat(seen)
    return x.T @ x / len(x)


def diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """``[K, K]`` → ``[K / size, size, size]``."""
    parts = matrix.unflatten(0, (-1, size)).unflatten(-1, (-1, size))  # [B, size, B, size]
    return parts.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()


def markdown(document: dict[str, Any]) -> str:
    """The numbers as tables."""
    errors, fours, machine = document["relative_error"], document["share_of_blocks_at_four"], document["machine"]
    seconds = document["seconds"]
    lines = [
        "# Weight scales",
        "",
        f"Relative weight error × 1000 (squared differences over squares), {document['target']}, {document['layers']} "
        "decoder layers, and a million random draws. Seconds: all layers, one after the other." + document["note"],
        "",
        *table(errors, lambda error: f"{error * 1e3:.3f}", {"seconds": {m: f"{s:.1f}" for m, s in seconds.items()}}),
        "",
        order(errors),
        "",
        "An independent implementation measured, on draws of its own:",
        "",
        *table(EARLIER, lambda error: f"{error:.2f}"),
        "",
        "Blocks that FourOverSix scales to 4 instead of 6 (40 to 43 % have been reported):",
        "",
        *table(fours, lambda share: f"{share:.1%}"),
    ]
    for where, found in document["outputs"].items():
        lines += [
            "",
            f"Relative output error × 1000 of {where} under the second moments of its own inputs (NVFP4). Scales are "
            "chosen under no moments, their diagonal or their 16 × 16 diagonal blocks; *two scales*: another one "
            "assigns the codes.",
            "",
            *table(found["outputs"], lambda error: f"{error * 1e3:.3f}"),
            "",
            *(
                f"- Under the {measure}, the second scale lowers the error that both minimise by "
                + gains(found[measure][f"sweep under the {measure}"], found[measure][f"two scales under the {measure}"])
                for measure in ("diagonal", "blocks")
            ),
        ]
    lines += [
        "",
        f"`{document['command']}`, {document['date']}, {machine['threads']} threads, {machine['machine']} "
        f"{machine['device']}, torch {machine['torch']}.",
    ]
    return "\n".join(lines)


def table(numbers: Table, show: Callable[[float], str], further: dict[str, dict[str, str]] | None = None) -> list[str]:
    """Markdown lines: one row per method, one column per kind, then the ``further`` columns by name and method."""
    further = further or {}
    kinds = list(next(iter(numbers.values())))
    header = ["", *kinds, *further]
    rows = [
        [method, *(show(by_kind[kind]) for kind in kinds), *(column[method] for column in further.values())]
        for method, by_kind in numbers.items()
    ]
    return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows)]


def order(errors: Table) -> str:
    """Whether sweep < (SOAR, FourOverSix) < plain, kind by kind."""
    plain, four, soar, best = (errors[m] for m in ("NVFP4", "NVFP4 four-over-six", "NVFP4 soar", "NVFP4 sweep"))
    wrong = [k for k in plain if not best[k] < min(four[k], soar[k]) <= max(four[k], soar[k]) < plain[k]]
    held = f"everywhere except in {', '.join(wrong)}" if wrong else "in every column"
    return f"The order sweep < SOAR and FourOverSix < plain NVFP4 holds {held}."


def gains(one: dict[str, float], two: dict[str, float]) -> str:
    return ", ".join(f"{1 - two[kind] / one[kind]:.2%} ({kind})" for kind in one) + "."


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options, description=Options.__doc__)))
