"""Interrupted, finished and foreign run folders: a resumed run ends up where it would have been."""

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from bitdraft.speculators.lossless import Lossless
from bitdraft.train.checkpoint import checkpoints
from bitdraft.train.config import AcceptanceConfig, AnswersConfig, OptimConfig, RunConfig, StatesConfig
from bitdraft.train.environment import Environment
from bitdraft.train.journal import Journal, read_metrics
from bitdraft.train.measuring import acceptance
from bitdraft.train.run import run
from bitdraft.train.stopping import Interrupted

MakeConfig = Callable[..., RunConfig]


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Every line without what the clock says."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def cut_power_behind(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The run dies after the line of ``step`` is written and before its checkpoint is."""
    write = Journal.write

    def write_and_die(self: Journal, done: int, content: dict[str, Any]) -> None:
        write(self, done, content)
        if done == step:
            raise RuntimeError("power cut")

    monkeypatch.setattr(Journal, "write", write_and_die)


@pytest.mark.parametrize(("kind", "states"), [("eagle3", "auto"), ("eagle3", "online"), ("medusa", "auto")])
def test_a_killed_run_resumes_bit_for_bit(
    straight: Callable[[str], Path],
    make_config: MakeConfig,
    environment: Environment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    states: str,
) -> None:
    config = make_config(tmp_path / "run", head=kind)
    reference = straight(kind)
    if states == "online":
        config = replace(config, states=StatesConfig(mode="online"))
        reference = run(replace(config, output_dir=tmp_path / "straight"), environment).folder
    with monkeypatch.context() as patched:
        cut_power_behind(patched, 4)
        with pytest.raises(RuntimeError, match="power cut"):
            run(config, environment)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert [p.name for p in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-000002", "step-000003"]

    finished = run(replace(config, resume=True), environment)
    assert metrics(finished.folder) == metrics(reference)
    for file in ("export/model.safetensors", "checkpoints/step-000006/module.safetensors"):
        assert (finished.folder / file).read_bytes() == (reference / file).read_bytes(), file
    mine, its = (
        json.loads((folder / "acceptance.json").read_text(encoding="utf-8"))["results"]
        for folder in (finished.folder, reference)
    )
    clocked = ("seconds", "tokens_per_second")
    assert [{k: v for k, v in r.items() if k not in clocked} for r in mine] == [
        {k: v for k, v in r.items() if k not in clocked} for r in its
    ]


def test_a_damaged_newest_checkpoint_costs_only_its_steps(
    straight: Callable[[str], Path],
    make_config: MakeConfig,
    environment: Environment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config(tmp_path / "run")
    with monkeypatch.context() as patched:
        cut_power_behind(patched, 5)
        with pytest.raises(RuntimeError, match="power cut"):
            run(config, environment)
    weights = tmp_path / "run" / "checkpoints" / "step-000004" / "module.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    run(replace(config, resume=True), environment)
    assert metrics(tmp_path / "run") == metrics(straight("eagle3"))


def test_a_signal_ends_the_run_with_a_checkpoint_of_its_last_step(
    straight: Callable[[str], Path],
    make_config: MakeConfig,
    environment: Environment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config(tmp_path / "run")
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    write = Journal.write

    def write_and_signal(self: Journal, done: int, content: dict[str, Any]) -> None:
        write(self, done, content)
        if done == 3:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "write", write_and_signal)
        with pytest.raises(Interrupted, match="stopped after step 3; go on with --resume"):
            run(config, environment)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert [p.name for p in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-000002", "step-000003"]
    assert not (tmp_path / "run" / "export").exists()
    run(replace(config, resume=True), environment)
    assert metrics(tmp_path / "run") == metrics(straight("eagle3"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed"),
        ({"head": "medusa"}, "head"),
        ({"target_quant": "none"}, "target_quant"),
        ({"optim": OptimConfig(steps=7)}, "optim"),
        ({"answers": AnswersConfig(max_new_tokens=3), "seed": 2}, "answers, seed"),
    ],
)
@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_of_another_run_is_refused(
    straight: Callable[[str], Path],
    make_config: MakeConfig,
    environment: Environment,
    changes: dict[str, Any],
    named: str,
    resume: bool,
) -> None:
    folder = straight("eagle3")
    before = (folder / "run.yaml").read_bytes()
    with pytest.raises(ValueError, match=rf"holds another run \(different {named}\): choose another --output-dir"):
        run(make_config(folder, **changes, resume=resume), environment)
    assert (folder / "run.yaml").read_bytes() == before


def test_a_run_from_before_there_were_some_fields_is_the_same_run(
    straight: Callable[[str], Path], make_config: MakeConfig, environment: Environment, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(straight("eagle3"), folder)
    described = yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))
    del described["target_profile"], described["calibration"], described["eagle3"]["start"]
    (folder / "run.yaml").write_text(yaml.safe_dump(described), encoding="utf-8")
    with pytest.raises(ValueError, match=r"holds another run \(different target_profile\)"):
        run(make_config(folder, target_profile="vllm-sm90", resume=True), environment)
    run(make_config(folder, resume=True), environment)
    assert yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))["target_profile"] == "plain"


@pytest.mark.parametrize("named", ["target_quant", "data"])
def test_files_that_changed_under_their_names_are_another_run(
    make_config: MakeConfig, environment: Environment, prompt_files: tuple[Path, Path], tmp_path: Path, named: str
) -> None:
    recipe, data = tmp_path / "mine.yaml", tmp_path / "asked.jsonl"
    recipe.write_text("rules: [{modules: '*.layers.*', weights: mxfp4-even}]", encoding="utf-8")
    shutil.copyfile(prompt_files[0], data)
    config = make_config(
        tmp_path / "run", target_quant=str(recipe), data=(str(data),), acceptance=AcceptanceConfig(draft_lengths=())
    )
    run(config, environment)
    finished = run(replace(config, resume=True), environment)
    before = sorted((p, p.stat().st_mtime_ns) for p in finished.folder.rglob("*.*"))
    if named == "data":
        data.write_text("".join(data.read_text(encoding="utf-8").splitlines(keepends=True)[1:]), encoding="utf-8")
    else:
        recipe.write_text("rules: [{modules: '*.layers.*', weights: nvfp4}]", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"on other contents \(what .*{named} names has changed since it began\)"):
        run(replace(config, resume=True), environment)
    assert sorted((p, p.stat().st_mtime_ns) for p in finished.folder.rglob("*.*")) == before


def test_the_same_run_again_needs_resume(
    straight: Callable[[str], Path], make_config: MakeConfig, environment: Environment
) -> None:
    with pytest.raises(ValueError, match="already holds this run: add --resume"):
        run(make_config(straight("eagle3")), environment)


def test_a_trained_run_without_its_export_only_writes_that(
    straight: Callable[[str], Path], make_config: MakeConfig, environment: Environment, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(straight("eagle3"), folder)
    before = (folder / "export" / "model.safetensors").read_bytes()
    shutil.rmtree(folder / "export")
    (folder / "acceptance.json").unlink()
    finished = run(make_config(folder, resume=True), environment)
    assert (finished.export / "model.safetensors").read_bytes() == before
    assert finished.acceptance.is_file()
    assert metrics(folder) == metrics(straight("eagle3"))


def test_a_finished_run_resumed_stays_as_it_is(
    straight: Callable[[str], Path], make_config: MakeConfig, environment: Environment
) -> None:
    folder = straight("medusa")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "acceptance.json"}
    run(make_config(folder, head="medusa", resume=True), environment)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "acceptance.json"} == before


def test_a_finished_run_resumed_with_another_measurement_measures(
    make_config: MakeConfig, environment: Environment, tmp_path: Path, prompt_files: tuple[Path, Path]
) -> None:
    """``acceptance.json`` and ``run.yaml`` say the same."""
    shared: dict[str, Any] = {"data": (prompt_files[1],), "prompts": 2, "max_new_tokens": 4, "check": 1}
    config = make_config(tmp_path / "run", head="medusa", acceptance=AcceptanceConfig(draft_lengths=(1,), **shared))
    run(config, environment)
    other = AcceptanceConfig(draft_lengths=(2, 3), **shared)
    finished = run(replace(config, acceptance=other, resume=True), environment)
    document = json.loads(finished.acceptance.read_text(encoding="utf-8"))
    assert [r["draft_length"] for r in document["results"]] == [2, 3]


def test_a_failed_comparison_with_plain_decoding_is_not_forgotten(
    make_config: MakeConfig,
    environment: Environment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config(tmp_path / "run", head="medusa")
    with monkeypatch.context() as patched:
        broken = Lossless(checked=3, excused=0, failures=("p1: token 2 differs",))
        patched.setattr(acceptance, "compare_with_plain", lambda *_args: broken)
        with pytest.raises(RuntimeError, match="draft length 1 is not lossless: p1: token 2 differs"):
            run(config, environment)
    finished = run(replace(config, resume=True), environment)
    document = json.loads(finished.acceptance.read_text(encoding="utf-8"))
    assert [r["lossless_failed"] for r in document["results"]] == [0, 0], "it was measured again"
