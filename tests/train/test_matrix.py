"""Cells of the gap matrix: what is measured, what is kept, and what is refused."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bitdraft.data.conversation import Conversation, Message
from bitdraft.quant.target import LowBitTarget, load_tokenizer
from bitdraft.speculators.eagle3 import Eagle3Config, Eagle3Head
from bitdraft.speculators.export import export_head
from bitdraft.speculators.medusa import MedusaConfig, MedusaHead
from bitdraft.speculators.vocab import DraftVocab
from bitdraft.train.measuring.config import MeasureConfig
from bitdraft.train.measuring.drafters import DrafterSpec
from bitdraft.train.measuring.matrix import Bench
from bitdraft.train.measuring.prompt_sets import PromptSet
from bitdraft.train.report.recovery import comparisons, measurements
from bitdraft.train.report.write import markdown

HOW = MeasureConfig(draft_length=(2,), max_new_tokens=10, batch_size=(4,), check=2)


def asked(name: str, count: int, category: str = "chat") -> PromptSet:
    turns = [(Message("user", f"{name} {i}?"),) for i in range(count)]
    return PromptSet(name, tuple(Conversation(f"{name}-{i}", category, t, name) for i, t in enumerate(turns)))


@pytest.fixture(scope="module")
def exports(tiny_target: Callable[[str], LowBitTarget], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random heads, exported from the targets that they are said to be trained on."""
    folder = tmp_path_factory.mktemp("heads")
    for recipe in ("none", "mxfp4a16"):
        target = tiny_target(recipe)
        torch.manual_seed(3)
        vocab = DraftVocab.full(target.vocab_size)
        eagle3 = Eagle3Head.from_target(Eagle3Config(steps=3), target, vocab)
        export_head(eagle3, target, folder / recipe, draft_length=2)
    medusa = MedusaHead.from_target(MedusaConfig(heads=3), tiny_target("none"), vocab)
    export_head(medusa, tiny_target("none"), folder / "medusa", draft_length=2)
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def bench(tiny_target: Callable[[str], LowBitTarget], tiny_folder: Path, tmp_path: Path) -> Callable[..., Bench]:
    def make(how: MeasureConfig = HOW, recipe: str = "none", **options: Any) -> Bench:
        target = tiny_target(recipe)
        sets = [asked("one", 3), asked("two", 2, "math")]
        tokenizer = load_tokenizer(str(tiny_folder))
        return Bench(
            target, tokenizer, sets, asked("traffic", 16), lambda _name, quant: tiny_target(quant), how, **options
        )

    return make


def cells_of(bench: Bench, *heads: Path | str) -> list[dict[str, Any]]:
    return bench.cells([DrafterSpec(str(head)) for head in heads], lambda what: None)


def test_a_matrix_compares_heads_and_recipes(bench: Callable[..., Bench], exports: dict[str, Path]) -> None:
    heads = (exports["none"], exports["mxfp4a16"])
    cells = [c for recipe in ("none", "mxfp4a16") for c in cells_of(bench(recipe=recipe), *heads)]
    assert [(c["trained_on"], c["served_on"]) for c in cells] == [
        ("none", "none"), ("mxfp4a16", "none"), ("none", "mxfp4a16"), ("mxfp4a16", "mxfp4a16"),
    ]  # fmt: skip
    assert [c["bounds"] is None for c in cells] == [True, True, False, False]
    assert set(cells[2]["bounds"]["sets"]) == {"one", "two"}
    assert 0 < cells[2]["bounds"]["one_minus_tv"] < 1
    for cell in cells:
        assert [r["set"] for r in cell["results"]] == ["one", "two"]
        assert all(r["lossless_checked"] == 2 and r["lossless_failed"] == 0 for r in cell["results"])
        assert all(r["plain_tokens_per_second"] > 0 for r in cell["results"])
    matrix = {"version": 1, "command": "c", "date": "d", "seed": 0, "cells": json.loads(json.dumps(cells))}
    assert len(comparisons(measurements(matrix))) == 2, "one per set"
    assert "Gap recovery" in markdown(matrix)


def test_finished_cells_are_kept_until_something_that_decides_them_changes(
    bench: Callable[..., Bench], exports: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "cells"
    first = cells_of(bench(kept=kept), exports["medusa"])
    assert len(list(kept.iterdir())) == 1
    changed = cells_of(bench(replace(HOW, seed=1), kept=kept), exports["medusa"])
    assert len(list(kept.iterdir())) == 2
    assert changed[0]["seed"] == 1
    monkeypatch.setattr(DrafterSpec, "load", None)  # nothing is loaded again
    assert cells_of(bench(kept=kept), exports["medusa"]) == json.loads(json.dumps(first))


@pytest.mark.parametrize(
    "settings", [{"tree": "static", "tree_nodes": 5}, {"tree": "static", "tree_widths": (2, 2)}, {"tree": "dynamic"}]
)
def test_trees_are_measured(bench: Callable[..., Bench], exports: dict[str, Path], settings: dict[str, Any]) -> None:
    for name in ("none", "medusa"):
        (cell,) = cells_of(bench(replace(HOW, bounds=False, **settings)), exports[name])
        assert cell["tree"] == settings["tree"]
        for r in cell["results"]:
            assert r["lossless_failed"] == 0
            assert r["drafted_per_pass"] == {"static": settings.get("tree_nodes", 6), "dynamic": 16}[cell["tree"]]


def test_every_temperature_and_batch_size_is_a_cell(bench: Callable[..., Bench], exports: dict[str, Path]) -> None:
    how = replace(HOW, temperature=(0.0, 1.0), batch_size=(1, 4), plain=False, check=0)
    cells = cells_of(bench(how), exports["medusa"])
    assert [(c["temperature"], c["batch_size"]) for c in cells] == [(0.0, 1), (0.0, 4), (1.0, 1), (1.0, 4)]
    assert [(c["rule"], c["drafts"]) for c in cells] == [("greedy", "greedy")] * 2 + [("sampling", "sampled")] * 2
    assert cells[0]["results"][0]["per_prompt"] == cells[1]["results"][0]["per_prompt"]
    assert cells[0]["results"][0]["speedup"] is None
    (lossy,) = cells_of(bench(replace(HOW, temperature=(1.0,), typical=True, plain=False)), exports["medusa"])
    assert (lossy["rule"], lossy["lossless"]) == ("typical", False)


def test_confidence_and_early_stops_stand_beside_the_fixed_length(
    bench: Callable[..., Bench], exports: dict[str, Path]
) -> None:
    for stop in ("threshold", "cost"):
        how = replace(HOW, confidence=True, stop=stop, stop_threshold=0.5, plain=False)
        (cell,) = cells_of(bench(how), exports["none"])
        fixed, stopped = cell["results"][:2]
        assert fixed["stopped_early"] is None
        assert len(fixed["confidence"]["positions"]) == 2
        assert stopped["stopped_early"]["fixed"]["acceptance_length"] == fixed["acceptance_length"]
        assert stopped["drafted_per_pass"] <= 2
        assert stopped["lossless_failed"] == 0
    with pytest.raises(ValueError, match="the ngram drafter has no probabilities"):
        cells_of(bench(how), "ngram")


def test_baselines_run_in_the_same_loop(bench: Callable[..., Bench], tiny_folder: Path) -> None:
    made = cells_of(bench(recipe="mxfp4a16"), "none", "ngram", "self=mxfp4a4", f"model={tiny_folder}")
    assert [c["kind"] for c in made] == ["none", "ngram", "self", "model"]
    assert all(c["trained_on"] is None for c in made)
    assert made[0]["results"][0]["acceptance_length"] == 1
    assert made[3]["results"][0]["acceptance_length"] > 1, "the unquantized target agrees now and then"
    with pytest.raises(ValueError, match="say which, as in self=mxfp4a4"):
        DrafterSpec("self=")


def test_a_scale_over_the_whole_pass_is_warned_of(
    bench: Callable[..., Bench], tiny_target: Callable[[str], LowBitTarget]
) -> None:
    assert not tiny_target("mxfp4").recipe.scales_whole_passes
    assert not tiny_target("nvfp4").recipe.scales_whole_passes, "its global scale is fixed beforehand"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_length": ()}, "--draft-length needs numbers of at least 1"),
        ({"batch_size": (0,)}, "--batch-size needs numbers of at least 1"),
        ({"tree": "static", "tree_widths": (2, 2), "draft_length": (2, 3)}, "give --draft-length 2"),
        ({"tree_widths": (2, 2), "draft_length": (2,)}, "--tree-widths is for --tree static"),
        ({"seed": -1}, "--seed must be at least 0"),
        ({"tree": "dynamic", "stop": "cost"}, "are for chains: leave out --tree"),
        ({"stop_threshold": 0.0}, "--stop-threshold must lie in"),
        ({"temperature": (-1.0,)}, "temperature must be at least 0"),
        ({"typical": True}, "typical acceptance needs a temperature above 0"),
        ({"top_p": 0.0}, "top_p must be above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MeasureConfig(**settings)


def test_trees_that_do_not_fit_are_refused(bench: Callable[..., Bench], exports: dict[str, Path]) -> None:
    deep = replace(HOW, draft_length=(4,), tree="static", tree_widths=(2, 1, 1, 1))
    with pytest.raises(ValueError, match="a draft tree of depth 4 tokens are more than the 3 that the medusa drafter"):
        cells_of(bench(deep), exports["medusa"])
    with pytest.raises(ValueError, match="give --tree-widths"):
        cells_of(bench(replace(HOW, tree="static")), "ngram")


def test_lengths_that_a_head_does_not_have_are_left_out_with_a_warning(
    bench: Callable[..., Bench], exports: dict[str, Path]
) -> None:
    (cell,) = cells_of(bench(replace(HOW, draft_length=(3, 5), plain=False)), exports["medusa"])
    assert {r["draft_length"] for r in cell["results"]} == {3}
    assert "drafts of 5 tokens are more than the 3 that the medusa drafter has" in cell["warnings"]


def test_few_prompts_get_no_interval(bench: Callable[..., Bench], exports: dict[str, Path]) -> None:
    (cell,) = cells_of(bench(replace(HOW, plain=False)), exports["medusa"])
    assert [r["ci95"] for r in cell["results"]] == [None, None]
    assert "one: 3 prompts are too few for intervals" in cell["warnings"]
    assert "too few" in markdown({"version": 1, "command": "c", "date": "d", "seed": 0, "cells": [cell]})


def test_a_prompt_beyond_the_context_stops_everything_before_it_begins(
    bench: Callable[..., Bench], exports: dict[str, Path], tmp_path: Path
) -> None:
    kept = tmp_path / "cells"
    made = bench(kept=kept)
    long = Conversation("x", "", (Message("user", "x" * 600),), "q.jsonl, line 7")
    made.sets = [*made.sets, PromptSet("long", (long,))]
    with pytest.raises(ValueError, match=r"q\.jsonl, line 7: the prompt has .* lower --max-new-tokens"):
        cells_of(made, exports["medusa"])
    assert not kept.exists()


def test_cells_of_a_model_or_a_recipe_that_changed_are_made_anew(
    bench: Callable[..., Bench], tiny_folder: Path, tmp_path: Path
) -> None:
    """The word on the command line stays the same."""
    kept, recipe, model = tmp_path / "cells", tmp_path / "rec.yaml", tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    rules = "rules:\n  - {{modules: '*', weights: {}}}\n"
    recipe.write_text(rules.format("mxfp4-even"), encoding="utf-8")
    specs = [DrafterSpec(f"self={recipe}"), DrafterSpec(f"model={model}")]
    before = [spec.identity for spec in specs]
    recipe.write_text(rules.format("nvfp4"), encoding="utf-8")
    os.utime(model / "model.safetensors", (0, 0))
    assert all(spec.identity != old for spec, old in zip(specs, before, strict=True))
    files = [bench(kept=kept)._file(specs[1], 0.0, 4)]
    os.utime(model / "model.safetensors", (1, 1))
    files.append(bench(kept=kept)._file(specs[1], 0.0, 4))
    assert files[0] != files[1]


def test_a_damaged_cell_is_named(bench: Callable[..., Bench], exports: dict[str, Path], tmp_path: Path) -> None:
    cells_of(bench(kept=tmp_path), exports["medusa"])
    (file,) = tmp_path.iterdir()
    file.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"the finished cell {file} is damaged"):
        cells_of(bench(kept=tmp_path), exports["medusa"])


def test_no_bounds_are_made_of_a_target_that_has_no_16_bit_form(
    bench: Callable[..., Bench], exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench(recipe="mxfp4a16")
    monkeypatch.setattr(made.target, "recipe", replace(made.target.recipe, name="auto"))
    (cell,) = cells_of(made, exports["none"])
    assert cell["bounds"] is None
    assert any("--reference" in text for text in cell["warnings"])
