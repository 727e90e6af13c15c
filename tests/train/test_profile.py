"""``--target-profile`` from the command line to what the exported head remembers."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from bitdraft.quant.profiles import load_recipe_for
from bitdraft.speculators.load import recipe_of_head
from bitdraft.train.config import RunConfig
from bitdraft.train.config_io import to_plain
from bitdraft.train.environment import Environment
from bitdraft.train.run import run

ROOT = Path(__file__).parents[2]


def test_a_run_under_a_profile_trains_on_what_that_engine_computes(
    make_config: Callable[..., RunConfig],
    environment: Environment,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    run(make_config(folder, target_quant="nvfp4", target_profile="vllm-sm90"), environment)
    said = capsys.readouterr().out
    assert "recipe nvfp4@vllm-sm90, profile vllm-sm90, float32 on cpu" in said
    assert "profile vllm-sm90: nvfp4: inputs in 16 bit instead of nvfp4-kernel, weights marlin at load\n" in said
    assert yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))["target_profile"] == "vllm-sm90"
    resolved = load_recipe_for("nvfp4", "vllm-sm90")
    about = recipe_of_head(folder / "export")
    assert (about["recipe"], about["recipe_fingerprint"]) == (resolved.name, resolved.fingerprint)
    measured = json.loads((folder / "acceptance.json").read_text(encoding="utf-8"))
    assert (measured["recipe"], measured["recipe_fingerprint"]) == (resolved.name, resolved.fingerprint)
    assert sum(result["lossless_failed"] for result in measured["results"]) == 0


def test_the_plain_profile_is_written_down_and_another_one_names_its_folder() -> None:
    assert to_plain(RunConfig())["target_profile"] == "plain"
    assert RunConfig(target_quant="nvfp4").run_dir == Path("runs/eagle3-nvfp4")
    assert RunConfig(target_quant="nvfp4", target_profile="vllm-sm90").run_dir == Path("runs/eagle3-nvfp4-vllm-sm90")


def script(name: str) -> ModuleType:
    """A script as a module, so that it runs here and not for ten seconds elsewhere."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up the annotations
    spec.loader.exec_module(module)
    return module


def test_an_unknown_profile_ends_the_command_with_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "train" / "train_heads.py"), "--target-profile", "vlm-sm90"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr[-2000:]
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: unknown target profile 'vlm-sm90': did you mean 'vllm-sm90'?")
    assert list(tmp_path.iterdir()) == [], "nothing was begun"


def test_the_scripts_know_the_same_profiles(tmp_path: Path) -> None:
    for name, options in (
        ("measure_acceptance", {"heads": (str(tmp_path),)}),
        ("measure_gap", {"out": tmp_path / "gap"}),
    ):
        module = script(name)
        with pytest.raises(ValueError, match="did you mean 'vllm-sm90'"):
            module.main(module.Options(target_profile="vlm-sm90", **options))


def test_the_gap_is_measured_under_a_profile(
    tiny_folder: Path, prompt_files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BITDRAFT_CACHE", str(tmp_path / "cache"))
    module = script("measure_gap")
    options = module.Options(
        target=str(tiny_folder), recipes=("nvfp4",), target_profile="vllm-sm90", data=(prompt_files[1],), prompts=2,
        max_new_tokens=4, dtype="float32", compile_quantizer="off", out=tmp_path / "gap",
    )  # fmt: skip
    module.main(options)
    document = json.loads((tmp_path / "gap" / "gap.json").read_text(encoding="utf-8"))
    assert document["target_profile"] == "vllm-sm90"
    assert [r["recipe"] for r in document["results"]] == ["nvfp4@vllm-sm90"]
