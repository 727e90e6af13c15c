"""``gap.json`` for a person: tables in Markdown, which read well in a terminal too, and one picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Document = dict[str, Any]
"""What ``scripts/measure_gap.py`` writes as ``gap.json``."""

_LEGEND = """\
- **Top-1 agreement**: share of positions where both targets have the same first choice. At temperature 0 a head that
  imitates {reference} perfectly is accepted this often.
- **1 − TV**: one minus the total variation distance, the mean of `Σ min(p, q)`. At temperature 1 this is the acceptance
  that a perfect {reference} head can reach.
- **KL** in nats. **Perplexity** of the text, to the {reference} target and to the low-bit one."""


def report(gap: Document) -> str:
    """The whole report. The last line says how the numbers were made."""
    reference, results, facts = gap["reference"], gap["results"], gap["machine"]
    versions = f"torch {facts['torch']}, transformers {facts['transformers']}, Python {facts['python']}"
    lines = [
        f"# {reference} and low bit, before any training",
        "",
        f"Target `{gap['target']}`, {gap['prompts']} prompts ({', '.join(gap['data'])}), greedy answers of up to "
        f"{gap['max_new_tokens']} tokens, which both targets read. In brackets: 95 % bootstrap intervals over prompts.",
        "",
        "## On the answers of the low-bit target itself: the text that is served",
        "",
        *_distributions(results, "own", reference),
        "",
        f"## On the answers of the {reference} target",
        "",
        *_distributions(results, "reference", reference),
        "",
        *_LEGEND.format(reference=reference).splitlines(),
        "",
        f"## Hidden states, on the answers of the {reference} target",
        "",
        *_states(results, "reference"),
        "",
        "Cosine similarity / relative error `‖low − reference‖ / ‖reference‖`, means over positions.",
        "",
        "## Weights",
        "",
        *_weights(results),
        *_fours(results),
        "",
        "Bits per weight with scales; in the whole model, what is not quantized counts 16. By kind of layer: relative "
        "error `‖Ŵ − W‖ / ‖W‖`.",
        "",
        f"`{gap['command']}`, seed {gap['seed']}, {gap['date']}, {facts['threads']} threads, {facts['machine']} "
        f"{facts['device']}, {versions}.",
    ]
    return "\n".join(lines) + "\n"


def _distributions(results: Sequence[Document], text: str, reference: str) -> list[str]:
    header = ["recipe", "top-1 agreement", "1 − TV", f"KL(low‖{reference})", f"KL({reference}‖low)"]
    header += [f"perplexity {reference}", "perplexity low", "positions"]
    rows = []
    for r in results:
        n = r["texts"][text]
        shares = [(n[key], *n[f"{key}_ci95"]) for key in ("top1_agreement", "one_minus_tv")]
        rows.append(
            [
                r["recipe"],
                *(f"{point:.3f} ({low:.3f} … {high:.3f})" for point, low, high in shares),
                *(f"{n[key]:.4f}" for key in ("kl_low_reference", "kl_reference_low")),
                *(f"{n[key]:.3f}" for key in ("perplexity_reference", "perplexity_low")),
                str(n["positions"]),
            ]
        )
    return _aligned(header, rows)


def _states(results: Sequence[Document], text: str) -> list[str]:
    rows = [
        [r["recipe"], *(f"{s['cosine']:.4f} / {s['relative_error']:.3f}" for s in r["texts"][text]["states"])]
        for r in results
    ]
    return _aligned(["recipe", *_layers(results)], rows)


def _layers(results: Sequence[Document]) -> list[str]:
    layers = [s["layer"] for s in results[0]["texts"]["reference"]["states"]]
    return [f"layer {layer}" if layer != "final" else "final" for layer in layers]


def _weights(results: Sequence[Document]) -> list[str]:
    kinds = list(dict.fromkeys(kind for r in results for kind in r["weights"]["relative_error"]))
    rows = []
    for r in results:
        w = r["weights"]
        numbers = [w["bits_of_quantized_layers"], w["bits_of_model"], *(w["relative_error"].get(k) for k in kinds)]
        rows.append([r["recipe"], *("–" if number is None else f"{number:.3f}" for number in numbers)])
    return _aligned(["recipe", "bits, quantized layers", "bits, model", *kinds], rows)


def _fours(results: Sequence[Document]) -> list[str]:
    """How often FourOverSix chose 4, for the recipes that use it."""
    rows = [(r["recipe"], r["weights"]["blocks_at_four"]) for r in results if r["weights"]["blocks_at_four"]]
    shown = [f"{name}: " + ", ".join(f"{kind} {share:.1%}" for kind, share in fours.items()) for name, fours in rows]
    return ["", "Share of blocks scaled to 4 instead of 6:", "", *(f"- {line}" for line in shown)] if shown else []


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    head, *body = (
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in (header, *rows)
    )
    return [head, "|" + "|".join("-" * (w + 2) for w in widths) + "|", *body]


# Okabe and Ito's colours, which stay apart for colour-blind readers.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "os^Dv<>"
_SHARES = (
    ("top1_agreement", "top-1 agreement (T = 0)", "o"),
    ("one_minus_tv", "1 − TV (T = 1)", "s"),
)


def draw(gap: Document, path: Path) -> None:
    """One PNG: what a perfect 16-bit head would be accepted at, and how far the states drift."""
    results, reference = gap["results"], gap["reference"]
    figure = Figure(figsize=(12, 2.2 + 0.5 * max(len(results), 4)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_shares(left, results, reference)
    _draw_states(right, results, reference)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(path)


def _draw_shares(axes: Axes, results: Sequence[Document], reference: str) -> None:
    texts = (("own", "low-bit target's answers"), ("reference", f"{reference} target's answers"))
    for column, (text, whose) in enumerate(texts):
        for (key, name, marker), colour in zip(_SHARES, _COLOURS, strict=False):
            points = [r["texts"][text][key] for r in results]
            ends = [r["texts"][text][f"{key}_ci95"] for r in results]
            axes.errorbar(
                points,
                [row + 0.3 * column + 0.12 * (key == "one_minus_tv") - 0.21 for row in range(len(results))],
                # A percentile interval of few prompts can leave out its own point.
                xerr=[
                    [max(p - low, 0.0) for p, (low, _) in zip(points, ends, strict=True)],
                    [max(high - p, 0.0) for p, (_, high) in zip(points, ends, strict=True)],
                ],
                fmt=marker,
                color=colour,
                markerfacecolor="white" if text == "reference" else colour,
                label=f"{name}, {whose}",
            )
    axes.set_yticks(range(len(results)), [r["recipe"] for r in results])
    axes.invert_yaxis()
    axes.set_xlim(right=1.0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("per position, 95 % intervals")
    axes.set_title(f"Acceptance that a perfect {reference} head can reach", fontsize=11)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False)


def _draw_states(axes: Axes, results: Sequence[Document], reference: str) -> None:
    layers = _layers(results)
    for i, r in enumerate(results):
        errors = [s["relative_error"] for s in r["texts"]["reference"]["states"]]
        axes.plot(
            errors, color=_COLOURS[i % len(_COLOURS)], marker=_MARKERS[i % len(_MARKERS)], label=r["recipe"], alpha=0.9
        )
    axes.set_xticks(range(len(layers)), layers)
    axes.set_ylim(bottom=0.0)
    axes.grid(axis="y", alpha=0.3)
    axes.set_xlabel(f"on answers of the {reference} target")
    axes.set_title("Relative error of the hidden states", fontsize=11)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, frameon=False)
