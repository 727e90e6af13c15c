"""The head that a run exports is the one that accepted most, whatever came after it and however often it was killed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from small_runs import small_config, steps_of
from torch import Tensor

from bitdraft.train import run as runs
from bitdraft.train.checkpoint import checkpoints, path_of
from bitdraft.train.config import RunConfig, SelectionConfig
from bitdraft.train.environment import Environment, RunFailed
from bitdraft.train.journal import Journal

MEASURED = {1: 1.1, 2: 1.6, 3: 1.2, 4: 1.4}
WEIGHT = "lm_head.weight"


@pytest.fixture
def config(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunConfig]:
    """A run whose head is said to accept what ``MEASURED`` says."""
    folder = tmp_path / "run"
    monkeypatch.setattr(runs, "acceptance_of", lambda *_args: MEASURED[len(steps_of(folder)) + 1])
    config = small_config(folder, tiny_folder)
    yield replace(config, optim=replace(config.optim, steps=4), selection=SelectionConfig(every=1, prompts=2))


def run(config: RunConfig) -> Path:
    assert config.output_dir is not None
    return runs.run(config, Environment(config.output_dir.parent / "cache", launched_processes=1)).folder


def saved(folder: Path, step: int) -> Tensor:
    return load_file(path_of(folder / "checkpoints", step) / "module.safetensors")[f"head.{WEIGHT}"]


def test_the_best_is_kept_and_exported(config: RunConfig) -> None:
    folder = run(config)
    assert [p.name for p in checkpoints(folder / "checkpoints")] == ["step-000002", "step-000003", "step-000004"]
    exported = load_file(folder / "export" / "model.safetensors")[WEIGHT]
    assert exported.equal(saved(folder, 2).to(exported.dtype))
    assert not exported.equal(saved(folder, 4).to(exported.dtype))


@pytest.mark.parametrize("killed_after", [3, 4])
def test_the_best_is_exported_after_a_resume_too(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, killed_after: int
) -> None:
    write = Journal.write

    def write_and_die(self: Journal, step: int, metrics: dict[str, float | list[float]]) -> None:
        write(self, step, metrics)
        if step == killed_after:
            raise RuntimeError("power cut")

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "write", write_and_die)
        with pytest.raises(RuntimeError, match="power cut"):
            run(config)
    folder = run(replace(config, resume=True))
    exported = load_file(folder / "export" / "model.safetensors")[WEIGHT]
    assert exported.equal(saved(folder, 2).to(exported.dtype))


def test_patience_ends_the_run_and_a_resumed_one_does_not_go_on(config: RunConfig) -> None:
    few = replace(config, selection=replace(config.selection, patience=1))
    assert [line["step"] for line in steps_of(run(few))] == [1, 2, 3]
    folder = run(replace(few, resume=True))
    assert [line["step"] for line in steps_of(folder)] == [1, 2, 3]
    exported = load_file(folder / "export" / "model.safetensors")[WEIGHT]
    assert exported.equal(saved(folder, 2).to(exported.dtype))


def test_a_best_head_that_is_damaged_is_not_replaced_in_silence(config: RunConfig) -> None:
    folder = run(config)
    weights = path_of(folder / "checkpoints", 2) / "module.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (folder / "export" / "manifest.json").unlink()
    with pytest.raises(RunFailed, match=r"the head of step 2 was the best by acceptance, but .*step-000002 is damaged"):
        run(replace(config, resume=True))


def test_without_measurements_the_last_is_exported(config: RunConfig) -> None:
    folder = run(replace(config, selection=SelectionConfig(every=0)))
    exported = load_file(folder / "export" / "model.safetensors")[WEIGHT]
    assert exported.equal(saved(folder, 4).to(exported.dtype))
