"""Runs that are killed at random moments and started again end where uninterrupted ones do, bit for bit."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from os import kill
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from small_runs import ROOT, accelerate_launch, launched, said, small_config, steps_of

from bitdraft.train.checkpoint import checkpoints
from bitdraft.train.config import RunConfig

pytestmark = pytest.mark.slow
STEPS = 8
LAUNCHERS = {"alone": [sys.executable]} | {
    engine: accelerate_launch(ROOT / "configs" / "accelerate" / f"{engine}-2gpu.yaml")
    for engine in ("ddp", "fsdp2", "zero2")
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Callable[..., RunConfig]:
    base = tmp_path_factory.mktemp("resume")

    def of(name: str, **changes: Any) -> RunConfig:
        return small_config(base / name, tiny_folder, **changes)

    return of


def family(pid: int) -> list[int]:
    """A process and all that it started: torchrun gives its workers sessions of their own."""
    members = [pid]
    for member in members:
        for thread in Path(f"/proc/{member}/task").glob("*/children"):
            members += map(int, thread.read_text().split())
    return members


def kill_at_once(process: "subprocess.Popen[str]") -> None:
    for member in family(process.pid):
        kill(member, signal.SIGKILL)
    process.wait()


def killed_somewhere(config: RunConfig, launcher: list[str], chance: random.Random) -> bool:
    """Start the run and kill it a moment after some step of it; whether it was faster and ended."""
    assert config.output_dir is not None
    before = len(steps_of(config.output_dir)) if config.resume else 0
    process = launched(config, *launcher)
    further = chance.randint(1, 3)
    while process.poll() is None:
        if len(steps_of(config.output_dir)) >= min(before + further, STEPS - 1):
            time.sleep(chance.uniform(0.0, 0.6))
            break
        time.sleep(0.01)
    if process.poll() is not None:
        assert process.returncode == 0, said(config)[-3000:]
        return True
    kill_at_once(process)
    return False


def assert_same_end(mine: Path, its: Path) -> None:
    assert steps_of(mine) == steps_of(its)
    for file in ("export/model.safetensors", f"checkpoints/step-{STEPS:06d}/module.safetensors"):
        assert (mine / file).read_bytes() == (its / file).read_bytes(), file
    a, b = (load_file(f / f"checkpoints/step-{STEPS:06d}/optimizer.safetensors") for f in (mine, its))
    assert a.keys() == b.keys()
    assert all(a[name].equal(b[name]) for name in a)
    histories = [json.loads((checkpoints(f / "checkpoints")[-1] / "checkpoint.json").read_text()) for f in (mine, its)]
    assert histories[0]["history"] == histories[1]["history"]
    assert [p.name for p in checkpoints(mine / "checkpoints")] == [p.name for p in checkpoints(its / "checkpoints")]


def straight(config: RunConfig, launcher: list[str]) -> Path:
    assert launched(config, *launcher).wait(timeout=1200) == 0, said(config)[-3000:]
    assert config.output_dir is not None
    return config.output_dir


@pytest.mark.parametrize("engine", LAUNCHERS)
def test_a_killed_run_goes_on_bit_for_bit(make: Callable[..., RunConfig], engine: str) -> None:
    launcher, chance = LAUNCHERS[engine], random.Random(engine)
    reference = straight(make(f"{engine}-straight"), launcher)
    config = make(engine)
    assert config.output_dir is not None
    kills = 0
    while kills < 3 and not killed_somewhere(config, launcher, chance):
        kills += 1
        if kills == 2:  # and the newest checkpoint is spoilt besides
            weights = checkpoints(config.output_dir / "checkpoints")[-1] / "module.safetensors"
            weights.write_bytes(weights.read_bytes()[:-1])
        config = replace(config, resume=(config.output_dir / "run.yaml").exists())
    assert kills >= 2
    folder = straight(replace(config, resume=True), launcher)
    assert "module.safetensors has another sha256); trying the one before" in said(config)
    assert_same_end(folder, reference)
