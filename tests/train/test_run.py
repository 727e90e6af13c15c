"""Whole runs on the tiny target: what they write, what they learn, and what they refuse."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from bitdraft.data.generation import greedy_answers
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.eagle3 import Eagle3Config
from bitdraft.speculators.load import load_head, recipe_of_head
from bitdraft.train.checkpoint import checkpoints, newest_checkpoint
from bitdraft.train.config import AcceptanceConfig, AnswersConfig, CheckpointConfig, OptimConfig, RunConfig
from bitdraft.train.config_io import from_plain
from bitdraft.train.environment import Environment
from bitdraft.train.journal import read_metrics
from bitdraft.train.run import run
from bitdraft.train.schedule import learning_rate
from bitdraft.train.selection import best_of

MakeConfig = Callable[..., RunConfig]
KINDS = ["eagle3", "medusa"]


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Every line without what the clock says."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_leaves_a_head_and_its_measured_acceptance(
    straight: Callable[[str], Path],
    make_config: MakeConfig,
    tiny_target: Callable[[str], LowBitTarget],
    kind: str,
) -> None:
    folder = straight(kind)
    config = make_config(folder, head=kind)
    assert from_plain(RunConfig, yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))) == config
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4, 5, 6]
    kept = {p.name for p in checkpoints(folder / "checkpoints")}
    assert kept - {"step-000003"} == {"step-000004", "step-000006"}, "the newest two, and the best"

    target = tiny_target("mxfp4a16")
    head = load_head(folder / "export", target)
    assert head.kind == kind
    assert recipe_of_head(folder / "export")["recipe_fingerprint"] == target.recipe.fingerprint
    newest = newest_checkpoint(folder / "checkpoints")
    assert newest is not None
    best = best_of(newest.history)
    assert best is not None
    module = load_file(folder / "checkpoints" / f"step-{best.step:06d}" / "module.safetensors")
    trained = {name.removeprefix("head."): weight for name, weight in module.items()}
    exported = load_file(folder / "export" / "model.safetensors")
    shared = sorted(trained.keys() & exported.keys() - {"fc.weight"})  # the exported fc has its inputs' scales in it
    assert shared
    for name in shared:
        assert exported[name].equal(trained[name].to(exported[name].dtype)), name

    document = json.loads((folder / "acceptance.json").read_text(encoding="utf-8"))
    assert document["version"] == 1
    assert document["recipe"] == "mxfp4a16"
    assert document["temperature"] == 0.0
    assert document["dtype"] == "float32"
    assert [r["draft_length"] for r in document["results"]] == [1, 3]
    for result in document["results"]:
        check_arithmetic(result)


def check_arithmetic(result: dict[str, Any]) -> None:
    """The counts of one draft length agree with each other and with the rates."""
    k, passes = result["draft_length"], result["passes"]
    assert result["set"] == "heldout"
    assert result["prompts"] == 3
    assert 3 * -(-9 // (k + 1)) <= passes <= 3 * 9  # nine tokens behind the prefill's, at most k + 1 a pass
    assert result["drafted"] == passes * k
    assert result["emitted"] == passes + result["accepted"]
    assert result["acceptance_rate"] == pytest.approx(result["accepted"] / result["drafted"])
    assert result["acceptance_length"] == pytest.approx(result["emitted"] / passes)
    assert len(result["per_position"]) == len(result["conditional"]) == k
    assert sum(result["per_position"]) * passes == pytest.approx(result["accepted"])
    assert result["per_position"] == sorted(result["per_position"], reverse=True)
    assert result["ci95"] is None, "three prompts are too few for an interval"
    assert set(result["seconds"]) == {"draft", "verify", "other"}
    assert (result["lossless_checked"], result["lossless_failed"]) == (3, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_training_learns_its_own_text(
    make_config: MakeConfig, environment: Environment, tmp_path: Path, kind: str
) -> None:
    config = make_config(
        tmp_path / "run",
        head=kind,
        optim=OptimConfig(steps=40, batch_tokens=80, lr=1e-2),
        acceptance=AcceptanceConfig(draft_lengths=()),
    )
    finished = run(config, environment)
    lines = metrics(finished.folder)
    assert lines[-1]["loss"] < 0.85 * lines[0]["loss"], "what remains is mostly the teacher's own entropy"
    assert lines[-1]["acceptance_length"] > lines[0]["acceptance_length"] + 0.3
    assert not finished.acceptance.exists(), "nothing was to be measured"


def test_prompts_takes_the_first_records_only(
    make_config: MakeConfig, environment: Environment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = OptimConfig(steps=1, batch_tokens=30)
    run(make_config(tmp_path, prompts=2, optim=once, acceptance=AcceptanceConfig(draft_lengths=())), environment)
    assert "\n2 examples, " in capsys.readouterr().out


def test_a_folder_with_something_else_in_it_is_refused(
    make_config: MakeConfig, environment: Environment, tmp_path: Path
) -> None:
    (tmp_path / "thesis.tex").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match=r"is not empty and holds no run\.yaml"):
        run(make_config(tmp_path), environment)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_loss_that_is_not_finite_names_the_step(
    make_config: MakeConfig, environment: Environment, tmp_path: Path
) -> None:
    """A learning rate beyond all reason: the first step destroys the head, the second notices."""
    config = make_config(
        tmp_path / "run",
        optim=OptimConfig(steps=6, batch_tokens=30, lr=1e30, warmup=0.0),
        checkpoint=CheckpointConfig(every=1),
    )
    with pytest.raises(RuntimeError, match=r"step 2: the loss \(\S+\) or gradient is not finite") as caught:
        run(config, environment)
    assert "step-000001" in str(caught.value), "the newest checkpoint is named"
    assert "p" in str(caught.value).split("in the batch of ")[1]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1]
    assert not (tmp_path / "run" / "export").exists()


def test_answers_of_the_file_are_what_is_trained_on(
    make_config: MakeConfig, environment: Environment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "answered.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo!"}] * 2
    data.write_text("".join(json.dumps({"conversations": turns}) + "\n" for _ in range(2)), encoding="utf-8")
    config = make_config(
        tmp_path / "run",
        data=(str(data),),
        answers=AnswersConfig(source="file"),
        eagle3=Eagle3Config(steps=2, draft_vocab_size=8),
        optim=OptimConfig(steps=1, batch_tokens=40),
        acceptance=AcceptanceConfig(draft_lengths=()),
    )
    finished = run(config, environment)
    said = capsys.readouterr().out
    assert "4 examples, 16 answer tokens written by the data" in said
    offsets = load_file(finished.export / "model.safetensors")["d2t"]
    kept = {i + int(offset) for i, offset in enumerate(offsets)}
    assert {ord("Y") - 33, ord("o") - 33, ord("!") - 33, 256, 257, 258} <= kept


def test_another_recipe_may_write_the_text(
    make_config: MakeConfig,
    tiny_target: Callable[[str], LowBitTarget],
    tmp_path: Path,
) -> None:
    """The text is the plain target's; the states and the export's recipe are the low-bit target's."""
    config = make_config(
        tmp_path / "run",
        answers=AnswersConfig(quant="none", max_new_tokens=10, batch_size=8),
        optim=OptimConfig(steps=1, batch_tokens=30),
        acceptance=AcceptanceConfig(draft_lengths=()),
    )
    finished = run(config, Environment(tmp_path / "cache", launched_processes=1))
    (file,) = (tmp_path / "cache" / "answers").iterdir()
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    prompts, written = [r["prompt"] for r in records], [r["answer"] for r in records]

    def answers_of(preset: str) -> list[list[int]]:
        return greedy_answers(tiny_target(preset), prompts, end_ids={258}, max_new_tokens=10, batch_size=8)

    assert written == answers_of("none")
    assert written != answers_of("mxfp4a16")
    assert recipe_of_head(finished.export)["recipe"] == "mxfp4a16"


def test_a_conversation_without_an_answer_is_named_when_answers_come_from_the_file(
    make_config: MakeConfig, environment: Environment, tmp_path: Path, prompt_files: tuple[Path, Path]
) -> None:
    config = make_config(tmp_path / "run", answers=AnswersConfig(source="file"))
    with pytest.raises(ValueError, match=r"train\.jsonl, line 1: .*no assistant turn") as caught:
        run(config, environment)
    assert str(prompt_files[0]) in str(caught.value)


def test_a_launcher_that_accelerate_does_not_see_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="started 2 processes but accelerate sees 1"):
        run(make_config(tmp_path / "run"), Environment(tmp_path / "cache", launched_processes=2))
    assert not (tmp_path / "run" / "run.yaml").exists()


def test_the_learning_rate_rises_then_falls_to_a_tenth() -> None:
    optim = OptimConfig(steps=100, lr=2e-3, warmup=0.1)
    rates = [learning_rate(optim, step) for step in range(100)]
    assert rates[0] == pytest.approx(2e-4)
    assert rates[9] == pytest.approx(2e-3)
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(2e-4, rel=0.01)
    assert min(rates) > 0
