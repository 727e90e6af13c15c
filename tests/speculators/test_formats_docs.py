"""``docs/formats.md`` says what exports hold: every tensor and config field of every format, in both directions."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from formats_page import PAGE, rows, section
from safetensors.torch import load_file
from tiny import save_tiny_target

from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget, load_target
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.eagle3 import Eagle3Head
from bitdraft.speculators.export import LAYOUTS, export_head
from bitdraft.speculators.formats import eagle3_original
from bitdraft.speculators.low_bit import low_bit_layers, low_bit_tensors, quantize_head
from bitdraft.speculators.low_bit_rules import LOADABLE
from bitdraft.speculators.medusa import MedusaHead

Make = Callable[[str], DraftHead]
MakeFor = Callable[[str, LowBitTarget], DraftHead]
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
    "eagle3 one layer",
    "eagle3 six heads",
    "eagle3 low rank",
]
ENGINES = ("SGLang", "vLLM", "TensorRT-LLM", "text-generation-inference")
READERS = (*ENGINES, "all", "none", "people", "informative", "Bitdraft", "the speculators library", "engines on")
DRAFTED = 2
LOW_BIT = LOADABLE.split(", ")
WHOLE = ("quantization_config", "rope_parameters", "rope_scaling")  # objects that the page does not take apart


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> LowBitTarget:
    """A target whose heads divide into blocks of 128."""
    folder = save_tiny_target(
        tmp_path_factory.mktemp("wide") / "target",
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
    )
    return load_target(str(folder), load_recipe("none"), dtype=torch.float32, compile_quantizer="off")


def holds(condition: str, head: DraftHead) -> bool:
    if isinstance(head, MedusaHead):
        known = {"biases": head.config.bias, "shared output": not head.config.own_output}
        known |= {"own outputs": head.config.own_output, "always": True, "low bit": False}
        known |= {"link": head.config.link, "no link": not head.config.link}
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


def sizes(head: DraftHead, tensor: str = "") -> dict[str, int]:
    number = tensor.partition(".")[0]
    found = {
        "J": int(number) + 1 if number.isdigit() else 0,
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
        linked = ["medusa linked", "medusa linked own"] if layout == "medusa-original" else []
        return ["medusa", "medusa own", "medusa bias", *linked]
    if layout == "eagle3-speculators":
        return EAGLE3
    return [
        "eagle3",
        "eagle3 full",
        "eagle3 four layers",
        "eagle3 norm_before_fc",
        "eagle3 fc_norm",
        "eagle3 norm_output",
        "eagle3 low rank",
    ]


PAIRS = [(layout, kind) for layout in LAYOUTS for kind in held(layout)]


@pytest.mark.parametrize(("layout", "kind"), PAIRS)
def test_the_page_and_the_file_hold_the_same_tensors(
    exported: Callable[..., Path], make_head: Make, layout: str, kind: str
) -> None:
    head = make_head(kind)
    described = {
        name: (shape_of(row["shape"], sizes(head, name)), row["dtype"])
        for row in rows(section(f"`{layout}`", "Tensors"))
        if holds(row["when"], head)
        for name in spelled_out(row["name"].strip("`"), head)
    }
    weights = load_file(exported(kind, layout) / LAYOUTS[layout].WEIGHTS)
    stored = {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in weights.items()}
    assert described == stored


def meant(cell: str, field: str, head: DraftHead, target: LowBitTarget) -> Any:
    """The value that a cell says ``field`` has: one JSON value in quotes, a size, or words for what is in the head."""
    if cell.startswith("`") and cell.count("`") == 2 and cell.endswith("`"):
        return json.loads(cell[1:-1])
    leaf, known = field.rpartition(".")[2], sizes(head)
    if re.fullmatch(r"[A-Z]( / [A-Z])?", cell):
        size, _, divisor = cell.partition(" / ")
        return known[size] // (known[divisor] if divisor else 1)
    common: dict[str, Callable[[], Any]] = {
        "the target's": lambda: getattr(target.config, leaf),
        "folder or hub id of the target": lambda: target.name,
    }
    if isinstance(head, MedusaHead):
        medusa: dict[str, Callable[[], Any]] = {
            "heads": lambda: head.config.heads,
            "blocks per head": lambda: head.config.blocks,
            "whether blocks have biases": lambda: head.config.bias,
            "whether the output is shared": lambda: not head.config.own_output,
            "whether heads have outputs of their own": lambda: head.config.own_output,
        }
        return {**common, **medusa}[cell]()
    assert isinstance(head, Eagle3Head)
    config, shape, captured = head.config, head.shape, list(head.capture_layers)
    rotation = shape.rope_parameters
    eagle3: dict[str, Callable[[], Any]] = {
        "true or false": lambda: shape.attention_bias if leaf == "attention_bias" else getattr(config, leaf),
        "as above": lambda: getattr(config, leaf),
        "as `norm_output`": lambda: config.norm_output,
        "`llama` or `qwen3`": lambda: config.attention,
        "ids of the captured layers": lambda: captured,
        "each id − 1": lambda: [k - 1 for k in captured],
        "tokens drafted per pass": lambda: DRAFTED,
        "training steps ahead": lambda: config.steps,
        "`rope_theta`, `rope_type` and what the type needs": lambda: rotation,
        "as in `rope_parameters`": lambda: rotation["rope_theta"],
        "null, or `rope_parameters` without `rope_theta`": lambda: (
            None if rotation["rope_type"] == "default" else {k: v for k, v in rotation.items() if k != "rope_theta"}
        ),
    }
    return {**common, **eagle3}[cell]()


def compare_config(folder: Path, layout: str, head: DraftHead, target: LowBitTarget) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stored = dict(flattened({k: v for k, v in config.items() if k != "bitdraft"}))
    table = {
        row["field"].strip("`"): row["value"]
        for row in rows(section(f"`{layout}`", "config.json"))
        if holds(row["when"], head)
    }
    assert table.pop("bitdraft.*") == "see below"
    assert table.keys() == stored.keys()
    elsewhere = {name for name, cell in table.items() if cell == "compressed-tensors, see below"}
    assert elsewhere == ({"quantization_config"} if low_bit_layers(head) else set())
    described = {name: meant(cell, name, head, target) for name, cell in table.items() if name not in elsewhere}
    assert described == {name: value for name, value in stored.items() if name not in elsewhere}
    block = {row["field"].strip("`") for row in rows(section("The block `bitdraft`"))}
    assert block == {f"bitdraft.{name}" for name in config["bitdraft"]}


@pytest.mark.parametrize(("layout", "kind"), PAIRS)
def test_the_page_and_the_config_have_the_same_fields(
    exported: Callable[..., Path], make_head: Make, rounded: LowBitTarget, layout: str, kind: str
) -> None:
    compare_config(exported(kind, layout), layout, make_head(kind), rounded)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("table", ["Tensors", "config.json"])
def test_what_the_page_says_reads_a_row_is_an_engine_of_the_layout(layout: str, table: str) -> None:
    for row in rows(section(f"`{layout}`", table)):
        cell = row["read by"]
        assert cell.startswith(READERS), cell
        named = {engine for engine in ENGINES if engine in cell}
        assert named <= set(LAYOUTS[layout].ENGINES), cell


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        *(("eagle3-speculators", recipe) for recipe in LOW_BIT),
        *(("eagle3-original", recipe) for recipe in LOW_BIT if not recipe.startswith("mxfp4")),
    ],
)
def test_the_page_says_what_low_bit_layers_hold(
    make_head_for: MakeFor, wide: LowBitTarget, tmp_path: Path, layout: str, recipe: str
) -> None:
    plain = make_head_for("eagle3", wide)
    assert isinstance(plain, Eagle3Head)
    weights = {name: tuple(w.shape) for name, w in plain.named_parameters()}
    head = quantize_head(plain, load_recipe(recipe), target=wide, calibration=[torch.arange(64)[None]])
    export_head(head, wide, tmp_path / "head", draft_length=DRAFTED, layout=layout)
    compare_config(tmp_path / "head", layout, head, wide)
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


def test_the_page_has_rows_for_every_low_bit_format_that_engines_load() -> None:
    assert {row["recipe"].strip("`") for row in rows(section("Low-bit heads"))} == set(LOW_BIT)


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


def with_low_bit_fc(head: DraftHead) -> DraftHead:
    """No recipe does this, but heads are read that others have written so."""
    quantize_head(head, load_recipe("fp8"))
    head.set_submodule("fc", low_bit_layers(head)["layers.0.mlp.up_proj"])
    return head


def test_the_page_lists_what_the_original_layout_refuses(make_head: Make) -> None:
    """By the first cell of its row: heads that are refused for it, and a word of the refusal."""
    refused: dict[str, tuple[str, list[DraftHead]]] = {
        "`norm_before_residual`": ("norm_before_residual", [make_head("eagle3 norm_before_residual")]),
        "attention `qwen3`": (r"norms of .* \(attention qwen3\)", [make_head("eagle3 qwen3")]),
        "attention biases": ("attention biases", [make_head("eagle3 biases")]),
        "`norm_before_fc` together with `fc_norm`": ("norm_before_fc and fc_norm", [make_head("eagle3 both norms")]),
        "an embedding of its own, or another hidden size than the target's": (
            "an embedding of its own",
            [make_head("eagle3 own embedding"), make_head("eagle3 narrow")],
        ),
        "a hidden size that is no multiple of the attention heads": (
            "a hidden size that is no multiple",
            [make_head("eagle3 six heads")],
        ),
        "weights in MXFP4": (
            "weights in MXFP4",
            [quantize_head(make_head("eagle3"), load_recipe("mxfp4a16"))],
        ),
        "`fc` in low bit": ("fc in low bit", [with_low_bit_fc(make_head("eagle3"))]),
        "one captured layer": ("one captured layer", [make_head("eagle3 one layer")]),
        "the input of layer 0 captured": ("the input of layer 0", [make_head("eagle3 first layer")]),
    }
    assert [row["refused"] for row in rows(section("`eagle3-original`"))] == list(refused)
    for word, heads in refused.values():
        for head in heads:
            assert isinstance(head, Eagle3Head)
            with pytest.raises(ValueError, match=f"the head has {word}.*: use the format eagle3-speculators"):
                eagle3_original.check(head)
