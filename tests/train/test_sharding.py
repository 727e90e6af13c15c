"""A checkpoint holds the same tensors whatever cut the run up, and every kind of run takes it up bit for bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from small_runs import ROOT, accelerate_launch
from torch import Tensor

from bitdraft.train.checkpoint import path_of

ENGINES = {"ddp": "MULTI_CPU", "fsdp2": "FSDP", "zero1": "DEEPSPEED", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}


def tensors(folder: Path, step: int) -> dict[str, Tensor]:
    at = path_of(folder, step)
    return {**load_file(at / "module.safetensors"), **load_file(at / "optimizer.safetensors")}


def resharded(launcher: list[str], checkpoints: Path, out: Path) -> str:
    """Run ``resharded.py``; what it printed."""
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    command = [*launcher, str(ROOT / "tests" / "resharded.py"), str(checkpoints), str(out)]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of one process: after a step, and after one more."""
    folder = tmp_path_factory.mktemp("alone")
    assert "NO, 1 processes" in resharded([sys.executable], folder / "none", folder / "out")
    return folder / "out"


def test_one_process_takes_up_its_own(alone: Path, tmp_path: Path) -> None:
    resharded([sys.executable], first_of(alone, tmp_path), tmp_path / "out")
    for step in (1, 2):
        assert_equal(tensors(tmp_path / "out", step), tensors(alone, step))


def first_of(folder: Path, tmp_path: Path) -> Path:
    """A folder with the first checkpoint only."""
    only = tmp_path / "only"
    only.mkdir()
    path_of(only, 1).symlink_to(path_of(folder, 1))
    return only


def assert_equal(mine: dict[str, Tensor], its: dict[str, Tensor]) -> None:
    assert mine.keys() == its.keys()
    assert len(mine) == 5 + 3 * 3  # four weights and a buffer; two moments and a count of each that is trained
    for name in mine:
        assert (mine[name].dtype, mine[name].shape) == (its[name].dtype, its[name].shape), name
        assert mine[name].equal(its[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_saves_what_it_loaded(alone: Path, tmp_path: Path, engine: str) -> None:
    launcher = accelerate_launch(ROOT / "configs" / "accelerate" / f"{engine}-2gpu.yaml")
    if engine == "zero3":
        launcher = accelerate_launch(cut_everything_up(tmp_path))
    printed = resharded(launcher, first_of(alone, tmp_path), tmp_path / "out")
    assert f"{ENGINES[engine]}, 2 processes" in printed
    assert_equal(tensors(tmp_path / "out", 1), tensors(alone, 1))
    resharded([sys.executable], first_of(tmp_path / "out", tmp_path / "out"), tmp_path / "back")
    assert_equal(tensors(tmp_path / "back", 1), tensors(alone, 1))
    for name, tensor in tensors(tmp_path / "out", 2).items():  # the states are used, not only kept
        if name.endswith("/step"):
            assert tensor == 2
        elif not name.startswith("frozen"):
            assert not tensor.equal(tensors(alone, 1)[name]), name


def cut_everything_up(folder: Path) -> Path:
    """ZeRO-3's configuration without its wish to leave small weights whole, which all of a test's are."""
    settings = folder / "zero3.json"
    settings.write_text('{"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}')
    content = (ROOT / "configs" / "accelerate" / "zero3-2gpu.yaml").read_text(encoding="utf-8")
    file = folder / "zero3.yaml"
    before = content.split("mixed_precision:")[0]  # which such a file says itself
    file.write_text(f"{before}deepspeed_config:\n  deepspeed_config_file: {settings}\n", encoding="utf-8")
    return file
