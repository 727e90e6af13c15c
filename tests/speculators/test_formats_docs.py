"""``docs/formats.md`` says what exports hold: every tensor and config field of every format, in both directions."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.eagle3 import Eagle3Head
from bitdraft.speculators.export import LAYOUTS, export_head
from bitdraft.speculators.formats import eagle3_original
from bitdraft.speculators.low_bit import low_bit_layers, low_bit_tensors, quantize_head
from bitdraft.speculators.medusa import MedusaHead

Make = Callable[[str], DraftHead]
Row = dict[str, str]
PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
EAGLE3 = [
    "eagle3",
    "eagle3 full",
    "eagle3 four layers",
    "eagle3 norm_before_residual",
    "eagle3 norm_before_fc",
    "eagle3 fc_norm",
    "eagle3 norm_output",
    "eagle3 qwen3",
    "eagle3 biases",
    "eagle3 qwen3 biases",
    "eagle3 own embedding",
    "eagle3 narrow",
]
WHOLE = ("quantization_config", "rope_parameters", "rope_scaling")  # objects that the page does not take apart


def section(*titles: str) -> str:
    """The text below a heading, and below one within it."""
    text = PAGE
    for level, title in enumerate(titles, 2):
        mark = "#" * level
        start = re.search(rf"^{mark} {re.escape(title)}$", text, re.MULTILINE)
        assert start is not None, title
        text = text[start.end() :]
        end = re.search(rf"^#{{2,{level}}} ", text, re.MULTILINE)
        text = text[: end.start()] if end else text
    return text


def rows(text: str) -> list[Row]:
    """The rows of the first table in ``text``, by its headings, without the quotes of names."""
    from_table = dropwhile(lambda line: not line.startswith("|"), text.splitlines())
    lines = list(takewhile(lambda line: line.startswith("|"), from_table))
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    heads = [head.strip() for head in cells[0]]
    return [dict(zip(heads, row, strict=True)) for row in cells[2:]]


def holds(condition: str, head: DraftHead) -> bool:
    if isinstance(head, MedusaHead):
        known = {"biases": head.config.bias, "shared output": not head.config.own_output}
        known |= {"own outputs": head.config.own_output, "always": True, "low bit": False}
        return known[condition]
    assert isinstance(head, Eagle3Head)
    known = {
        "always": True,
        "`norm_before_fc`": head.config.norm_before_fc,
        "`fc_norm`": head.config.fc_norm,
        "Qwen3 attention": head.shape.qk_norm,
        "attention biases": head.shape.attention_bias,
        "attention biases, Llama attention": head.shape.attention_bias and not head.shape.qk_norm,
        "reduced vocabulary": not head.vocab.is_full,
        "low bit": bool(low_bit_layers(head)),
    }
    return known[condition]


def sizes(head: DraftHead) -> dict[str, int]:
    found = {
        "H": head.target_hidden_size,
        "S": head.target_hidden_size,
        "V": head.vocab.target_size,
        "D": len(head.vocab),
    }
    if isinstance(head, Eagle3Head):
        shape = head.shape
        found |= {"H": shape.hidden_size}
        found |= {"A": len(head.capture_layers), "E": shape.head_dim, "I": shape.intermediate_size}
        found |= {"Q": shape.num_attention_heads * shape.head_dim, "K": shape.num_key_value_heads * shape.head_dim}
    return found


def shape_of(cell: str, known: dict[str, int]) -> tuple[int, ...]:
    """``[H, 2H]``, ``[A·S]``, ``[M, N/16]`` as numbers."""
    out = []
    for part in cell.strip("`[]").split(", "):
        product, _, divisor = part.partition("/")
        number = 1
        for factor in re.findall(r"\d+|[A-Z]", product):
            number *= int(factor) if factor.isdigit() else known[factor]
        out.append(number // int(divisor or 1))
    return tuple(out)


def spelled_out(name: str, head: DraftHead) -> Iterator[str]:
    """A name with its places filled in."""
    if "{i}" in name:
        yield from (name.replace("{i}", str(i)) for i in range(len(head.capture_layers)))
        return
    if not isinstance(head, MedusaHead):
        yield name
        return
    name = name.replace("{blocks}", str(head.config.blocks))
    for i in range(head.config.heads if "{head}" in name else 1):
        for j in range(head.config.blocks if "{block}" in name else 1):
            yield name.replace("{head}", str(i)).replace("{block}", str(j))


def flattened(config: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict) and name not in WHOLE:
            yield from flattened(value, f"{before}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for i, item in enumerate(value):
                yield from flattened(item, f"{before}{name}[{i}].")
        else:
            yield f"{before}{name}", value


def held(layout: str) -> list[str]:
    if layout.startswith("medusa"):
        return ["medusa", "medusa own", "medusa bias"]
    if layout == "eagle3-speculators":
        return EAGLE3
    return [
        "eagle3",
        "eagle3 full",
        "eagle3 four layers",
        "eagle3 norm_before_fc",
        "eagle3 fc_norm",
        "eagle3 norm_output",
    ]


PAIRS = [(layout, kind) for layout in LAYOUTS for kind in held(layout)]


@pytest.mark.parametrize(("layout", "kind"), PAIRS)
def test_the_page_and_the_file_hold_the_same_tensors(
    exported: Callable[..., Path], make_head: Make, layout: str, kind: str
) -> None:
    head = make_head(kind)
    described = {
        name: (shape_of(row["shape"], sizes(head)), row["dtype"])
        for row in rows(section(f"`{layout}`", "Tensors"))
        if holds(row["when"], head)
        for name in spelled_out(row["name"].strip("`"), head)
    }
    weights = load_file(exported(kind, layout) / LAYOUTS[layout].WEIGHTS)
    stored = {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in weights.items()}
    assert described == stored


def literal(cell: str) -> Any:
    """What a cell says if it is one JSON value in quotes, else ``None``."""
    try:
        return json.loads(cell[1:-1]) if cell.startswith("`") and cell.endswith("`") else None
    except ValueError:
        return None


def compare_config(folder: Path, layout: str, head: DraftHead) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stored = dict(flattened({k: v for k, v in config.items() if k != "bitdraft"}))
    table = [row for row in rows(section(f"`{layout}`", "config.json")) if holds(row["when"], head)]
    described = {row["field"].strip("`"): literal(row["value"]) for row in table}
    assert described.pop("bitdraft.*", "missing") is None
    assert described.keys() == stored.keys()
    assert [n for n, value in described.items() if value is not None and stored[n] != value] == []
    block = {row["field"].strip("`") for row in rows(section("The block `bitdraft`"))}
    assert block == {f"bitdraft.{name}" for name in config["bitdraft"]}


@pytest.mark.parametrize(("layout", "kind"), PAIRS)
def test_the_page_and_the_config_have_the_same_fields(
    exported: Callable[..., Path], make_head: Make, layout: str, kind: str
) -> None:
    compare_config(exported(kind, layout), layout, make_head(kind))


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        *(("eagle3-speculators", recipe) for recipe in ("fp8", "nvfp4", "nvfp4a16", "mxfp4", "mxfp4a16")),
        *(("eagle3-original", recipe) for recipe in ("fp8", "nvfp4", "nvfp4a16")),
    ],
)
def test_the_page_says_what_low_bit_layers_hold(
    make_head: Make, rounded: LowBitTarget, tmp_path: Path, layout: str, recipe: str
) -> None:
    plain = make_head("eagle3")
    assert isinstance(plain, Eagle3Head)
    weights = {name: tuple(w.shape) for name, w in plain.named_parameters()}
    head = quantize_head(plain, load_recipe(recipe), target=rounded, calibration=[torch.arange(64)[None]])
    export_head(head, rounded, tmp_path / "head", draft_length=2, layout=layout)
    compare_config(tmp_path / "head", layout, head)
    leaves = [row for row in rows(section("Low-bit heads")) if row["recipe"] == f"`{recipe}`"]
    described = {
        f"{layer}.{row['leaf'].strip('`')}": (
            shape_of(row["shape"], dict(zip("MN", weights[f"{layer}.weight"], strict=True))),
            row["dtype"],
        )
        for layer in low_bit_layers(head)
        for row in leaves
    }
    stored = {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in low_bit_tensors(head).items()}
    assert described == stored


def test_every_condition_of_the_page_is_met_by_some_head(make_head: Make) -> None:
    """Else a row could say anything."""
    for layout in LAYOUTS:
        heads = [make_head(kind) for kind in held(layout)]
        conditions = {row["when"] for row in rows(section(f"`{layout}`", "Tensors"))}
        assert {c for c in conditions if any(holds(c, head) for head in heads)} == conditions


def test_the_page_names_the_formats_their_engines_and_their_files() -> None:
    table = rows(PAGE)
    assert [row["format"].strip("`") for row in table] == list(LAYOUTS)
    for row in table:
        layout = LAYOUTS[row["format"].strip("`")]
        assert row["read by"] == ", ".join(layout.ENGINES)
        assert row["file"].strip("`") == layout.WEIGHTS


def test_the_page_lists_what_the_original_layout_refuses(make_head: Make) -> None:
    listed = len(rows(section("`eagle3-original`")))
    kinds = ("norm_before_residual", "qwen3", "biases", "both norms", "own embedding", "first layer")
    heads = [make_head(f"eagle3 {kind}") for kind in kinds]
    heads.append(quantize_head(make_head("eagle3"), load_recipe("mxfp4a16")))
    for head in heads:
        assert isinstance(head, Eagle3Head)
        with pytest.raises(ValueError, match="use the format eagle3-speculators"):
            eagle3_original.check(head)
    assert listed == len(heads)
