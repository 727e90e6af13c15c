"""Which files are served, how we read them, and where the numbers go."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bitdraft.quant.presets import load_recipe
from bitdraft.quant.profiles import load_recipe_for
from bitdraft.quant.target import load_target
from bitdraft.train.serving.pair import Pair, find_pair, fingerprint_of_head, label, reading, served_on
from bitdraft.train.serving.record import KEY, add_row, check_place, read_rows


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


def test_labels_are_names_without_the_way_to_them(tmp_path: Path) -> None:
    assert label(folder(tmp_path / "eagle3" / "export")) == "eagle3/export"
    assert label("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"


def test_a_head_is_told_from_another_of_the_same_name_by_its_bytes(tmp_path: Path) -> None:
    heads = [folder(tmp_path / which / "eagle3" / "export") for which in "abc"]
    for head in heads:
        (head / "model.safetensors").write_bytes(b"weights")
        (head / "README.md").write_text(str(head), encoding="utf-8")  # which no engine reads
    assert len({label(head) for head in heads}) == len({fingerprint_of_head(head) for head in heads}) == 1
    (heads[1] / "model.safetensors").write_bytes(b"Weights")
    (heads[2] / "config.json").write_text("{} ", encoding="utf-8")
    assert len({fingerprint_of_head(head) for head in heads}) == 3


def test_a_baked_target_is_said_to_hold_its_recipes_values(tiny_folder: Path, tmp_path: Path) -> None:
    for recipe in ("none", "fp8"):
        assert served_on(load_target(str(tiny_folder), load_recipe(recipe), compile_quantizer="off")) == recipe
    shutil.copytree(tiny_folder, tmp_path / "baked")
    file = tmp_path / "baked" / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, "bitdraft": {"baked": True, "recipe": "mxfp4a16"}}), encoding="utf-8")
    assert served_on(load_target(str(tmp_path / "baked"), load_recipe("none"))) == "mxfp4a16 (baked)"


def row(head: str, passes: int = 1) -> dict[str, Any]:
    return {**dict.fromkeys(KEY, "same"), "head": head, "passes": passes}


def test_a_later_run_replaces_its_own_row_only(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "serving.json"
    assert read_rows(path) == []
    check_place(path)
    for one in (row("a"), row("b"), row("a", passes=2)):
        add_row(path, one)
    assert read_rows(path) == [row("a", passes=2), row("b")]
    assert [p.name for p in path.parent.iterdir()] == ["serving.json"], "no temporary file is left"


@pytest.mark.parametrize(
    "what",
    [
        "head_fingerprint",
        "target_fingerprint",
        "dtype",
        "draft_length",
        "max_new_tokens",
        "prompts",
        "prompts_fingerprint",
        "emulated_nvfp4",
        "target_profile",
        "batch",
    ],
)
def test_another_measurement_has_a_row_of_its_own(tmp_path: Path, what: str) -> None:
    path = tmp_path / "serving.json"
    rows = [row("a"), row("a") | {what: "other"}]
    for one in rows:
        add_row(path, one)
    assert read_rows(path) == rows


def test_runs_that_share_a_file_lose_no_row(tmp_path: Path) -> None:
    """Without a lock a few of these 80 go missing every time."""
    path = tmp_path / "serving.json"
    code = (
        "import sys\nfrom pathlib import Path\nfrom bitdraft.train.serving.record import KEY, add_row\n"
        "print(flush=True); sys.stdin.readline()\n"
        "for i in range(20): add_row(Path(sys.argv[1]), {**dict.fromkeys(KEY, 0), 'head': f'{sys.argv[2]} {i}'})\n"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path), str(i)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for i in range(4)
    ]
    for run in runs:
        assert run.stdout is not None
        run.stdout.readline()
    for run in runs:
        assert run.stdin is not None
        run.stdin.write("go\n")
        run.stdin.flush()
    for run in runs:
        run.communicate(timeout=60)
    assert [run.returncode for run in runs] == [0] * 4
    assert len({str(r["head"]) for r in read_rows(path)}) == 80
    assert [p.name for p in tmp_path.iterdir()] == ["serving.json"], "the lock is gone"


def test_a_place_that_takes_no_file_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exists and is no file"):
        check_place(tmp_path)
    with pytest.raises(ValueError, match="exists and is no file"):
        check_place(Path())
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=r"--json .*/file/serving\.json cannot be written"):
        check_place(tmp_path / "file" / "serving.json")
    (tmp_path / "closed").mkdir(mode=0o500)
    if not os.access(tmp_path / "closed", os.W_OK):  # which it is for root
        with pytest.raises(ValueError, match=r"cannot be written .*Permission denied"):
            check_place(tmp_path / "closed" / "serving.json")
    with pytest.raises(ValueError, match="is no file"):  # which a rename would replace
        check_place(Path("/dev/null"))


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 1, "rows": []}', '{"version": 2, "rows": [{"head": "a"}]}'])
def test_a_file_of_another_kind_is_not_overwritten(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serving.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"--json .*serving\.json exists and"):
        add_row(path, row("a"))
    assert path.read_text(encoding="utf-8") == text
