"""Which files are served, how we read them, and where the numbers go."""

import json
from pathlib import Path

import pytest

from bitdraft.quant.profiles import load_recipe_for
from bitdraft.train.serving.pair import Pair, find_pair, label, reading
from bitdraft.train.serving.record import add_row, read_rows


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}", encoding="utf-8")
    return path


def test_a_pair_brings_its_target(tmp_path: Path) -> None:
    head, target = folder(tmp_path / "head"), folder(tmp_path / "target")
    assert find_pair(tmp_path, None, tmp_path) == Pair(head, str(target))
    assert find_pair(tmp_path, "other/model", tmp_path) == Pair(head, "other/model")


def test_a_lone_head_needs_its_target_named(tmp_path: Path) -> None:
    head = folder(tmp_path / "export")
    assert find_pair(head, "some/model", tmp_path) == Pair(head, "some/model")
    with pytest.raises(ValueError, match="without a target: say with --target"):
        find_pair(head, None, tmp_path)


def test_a_folder_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no exported head"):
        find_pair(tmp_path, "some/model", tmp_path)


@pytest.mark.parametrize(("emulate", "profile"), [(False, "vllm-cpu"), (True, "plain")])
def test_a_quantized_target_is_read_as_the_engine_computes_it(
    tiny_folder: Path, tmp_path: Path, emulate: bool, profile: str
) -> None:
    assert reading(str(tiny_folder), emulate_nvfp4=emulate) == ("none", profile)
    config = json.loads((tiny_folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "compressed-tensors"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert reading(str(tmp_path), emulate_nvfp4=emulate) == ("auto", profile)
    load_recipe_for("auto", profile)
    assert load_recipe_for("none", profile).leaves_all_alone


def test_labels_tell_rows_apart_without_the_way_to_them(tmp_path: Path) -> None:
    assert label(folder(tmp_path / "eagle3" / "export")) == "eagle3/export"
    assert label("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"


def row(head: str, length: int = 3, passes: int = 1) -> dict[str, object]:
    return {"head": head, "target": "t", "dtype": "float32", "draft_length": length, "passes": passes}


def test_a_later_run_replaces_its_own_row_only(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "serving.json"
    assert read_rows(path) == []
    for one in (row("a"), row("b"), row("a", length=5), row("a", passes=2)):
        add_row(path, one)
    assert read_rows(path) == [row("a", passes=2), row("b"), row("a", length=5)]
    assert [p.name for p in path.parent.iterdir()] == ["serving.json"], "no temporary file is left"


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 2, "rows": []}', '{"version": 1, "rows": [{"head": "a"}]}'])
def test_a_file_of_another_kind_is_not_overwritten(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serving.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"--json .*serving\.json exists and"):
        add_row(path, row("a"))
    assert path.read_text(encoding="utf-8") == text
