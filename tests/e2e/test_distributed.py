"""Several processes train what one would: DDP, FSDP2 and DeepSpeed ZeRO, each as its configuration file launches it.

The run of one process that they are compared with sees the same examples at every step: both processes' shares.
"""

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from small_runs import ROOT, accelerate_launch, launched, said, small_config, steps_of, torchrun

from bitdraft.data.chat import Example
from bitdraft.train import loop
from bitdraft.train.checkpoint import path_of
from bitdraft.train.config import CheckpointConfig, OptimConfig, RunConfig, StatesConfig
from bitdraft.train.environment import Environment
from bitdraft.train.run import run
from bitdraft.train.steps import StepPacks, step_packs
from bitdraft.train.weighting import Weighting

PROCESSES = 2
STEPS = 8
ENGINES = ["fsdp2", "zero1", "zero2", "zero3"]
Make = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def make(base: Path, tiny_folder: Path) -> Make:
    def of(name: str, **changes: Any) -> RunConfig:
        return small_config(base / name, tiny_folder, checkpoint=CheckpointConfig(every=1, keep=10), **changes)

    return of


taken: list[StepPacks] = []
"""What the run of one process trained on."""


def both_shares(
    first: int,
    examples: Sequence[Example],
    optim: OptimConfig,
    seed: int,
    ranks: int,
    cap: float,
    weighting: Weighting,
) -> Iterator[tuple[int, StepPacks]]:
    """The steps of two processes as one process's."""
    assert ranks == 1
    for step, packs in step_packs(first, examples, optim, seed, PROCESSES, cap, weighting):
        taken.append(packs)
        yield step, replace(packs, of_rank=[[pack for share in packs.of_rank for pack in share]])


def run_alone(config: RunConfig) -> Path:
    assert config.output_dir is not None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "step_packs", both_shares)
        return run(config, Environment(config.output_dir.parent / "cache", launched_processes=1)).folder


@pytest.fixture(scope="module")
def alone(make: Make) -> Path:
    """The run of one process."""
    return run_alone(make("alone"))


def launcher(engine: str) -> list[str]:
    return accelerate_launch(ROOT / "configs" / "accelerate" / f"{engine}-2gpu.yaml")


def run_together(config: RunConfig, engine: str, **settings: str) -> Path:
    """A run of two processes, which has to end well."""
    process = launched(config, *launcher(engine), **settings)
    assert process.wait(timeout=1200) == 0, said(config)[-3000:]
    assert config.output_dir is not None
    return config.output_dir


@pytest.fixture(scope="module")
def together(make: Make) -> Callable[[str], Path]:
    """The folder of a run of two processes under each engine."""
    done: dict[str, Path] = {}

    def folder(engine: str) -> Path:
        if engine not in done:
            done[engine] = run_together(make(engine), engine)
        return done[engine]

    return folder


def assert_same_course(mine: list[dict[str, Any]], its: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in mine] == [line["step"] for line in its]
    for a, b in zip(mine, its, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == pytest.approx(b[key], abs=1e-4), f"step {a['step']}: {key}"


def assert_same_tensors(mine: Path, its: Path) -> None:
    """But for rounding, which AdamW makes steps of where a gradient is next to nothing: in few weights of thousands."""
    for file in ("module.safetensors", "optimizer.safetensors"):
        a, b = load_file(mine / file), load_file(its / file)
        assert a.keys() == b.keys()
        for name in a:
            assert (a[name].shape, a[name].dtype) == (b[name].shape, b[name].dtype), name
            off = (a[name] - b[name]).abs()
            assert off.mean() < 1e-5, name
            assert off.max() < 1e-2, name


def test_shares_of_a_step_are_uneven(alone: Path) -> None:
    """Else the runs below would not show that packs of zero weight keep processes in step."""
    rounds = [tuple(map(len, packs.of_rank)) for packs in taken]
    assert len(rounds) == len(steps_of(alone)) == STEPS
    assert any(a != b for a, b in rounds)
    assert max(map(max, rounds)) > 1, "gradients are accumulated"


def test_two_processes_of_ddp_train_what_one_does(alone: Path, together: Callable[[str], Path]) -> None:
    folder = together("ddp")
    assert_same_course(steps_of(folder), steps_of(alone))
    assert_same_tensors(path_of(folder / "checkpoints", STEPS), path_of(alone / "checkpoints", STEPS))
    assert_exports_the_best(folder)


def assert_exports_the_best(folder: Path) -> None:
    _, step = max((s["measured_acceptance_length"], s["step"]) for s in steps_of(folder) if s["step"] % 2 == 0)
    best = load_file(path_of(folder / "checkpoints", step) / "module.safetensors")
    exported = load_file(folder / "export" / "model.safetensors")
    assert exported["lm_head.weight"].equal(best["head.lm_head.weight"].to(exported["lm_head.weight"].dtype))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_two_processes_that_share_the_head_out_train_what_one_does(
    alone: Path, together: Callable[[str], Path], engine: str
) -> None:
    folder = together(engine)
    assert_same_course(steps_of(folder), steps_of(alone))
    assert_same_tensors(path_of(folder / "checkpoints", STEPS), path_of(alone / "checkpoints", STEPS))
    assert_exports_the_best(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "reader"), [("ddp", "fsdp2"), ("fsdp2", "zero3"), ("zero3", "zero1"), ("zero2", "alone")]
)
def test_a_run_goes_on_under_another_engine(
    make: Make, together: Callable[[str], Path], writer: str, reader: str
) -> None:
    """What was saved after step 3 by one is trained on by the other."""
    began = together(writer)
    config = make(f"{writer}-{reader}", resume=True)
    assert config.output_dir is not None
    shutil.copytree(began, config.output_dir, ignore=shutil.ignore_patterns("export", "step-00000[45678]"))
    described = config.output_dir / "run.yaml"
    described.write_text(described.read_text(encoding="utf-8").replace(str(began), str(config.output_dir)))
    folder = run_alone(config) if reader == "alone" else run_together(config, reader)
    assert_same_course(steps_of(folder), steps_of(began))
    assert_same_tensors(path_of(folder / "checkpoints", STEPS), path_of(began / "checkpoints", STEPS))


@pytest.mark.slow
def test_a_target_in_parts_is_run_by_all_processes_together(make: Make, alone: Path, tmp_path: Path) -> None:
    """They write the answers, train, measure and export in step, and the first one's files stay."""
    config = make("parts", shard_target=True, states=StatesConfig(mode="online"))
    folder = run_together(config, "fsdp2", BITDRAFT_CACHE=str(tmp_path))
    assert_same_course(steps_of(folder), steps_of(alone))
    assert (folder / "export" / "manifest.json").is_file()
    assert_exports_the_best(folder)


@pytest.mark.slow
def test_a_launch_that_starts_fewer_processes_than_it_was_asked_for_is_refused(make: Make) -> None:
    config = make("fewer")
    asked = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    assert launched(config, *asked, BITDRAFT_DEBUG="").wait(timeout=300) != 0
    assert "error: accelerate launch was asked for several processes and started one" in said(config)


@pytest.mark.slow
def test_torchrun_is_a_launcher_too(make: Make, alone: Path) -> None:
    config = make("torchrun")
    assert launched(config, *torchrun(PROCESSES)).wait(timeout=1200) == 0, said(config)[-3000:]
    assert config.output_dir is not None
    assert_same_course(steps_of(config.output_dir), steps_of(alone))
