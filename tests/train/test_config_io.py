"""Configurations: a YAML file is a saved command line, and what is saved reads back equal."""

import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from bitdraft.data.calibration import CalibrationConfig
from bitdraft.speculators.eagle3 import Eagle3Config
from bitdraft.speculators.medusa import MedusaConfig
from bitdraft.train.config import (
    AcceptanceConfig,
    AnswersConfig,
    CheckpointConfig,
    OptimConfig,
    RunConfig,
    SelectionConfig,
    StatesConfig,
    TargetLoraConfig,
    WeightsConfig,
)
from bitdraft.train.config_io import from_plain, parse, to_plain, to_yaml
from bitdraft.train.loss_terms import LossConfig

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))

# No field has its default.
UNUSUAL = RunConfig(
    target="some/model",
    target_quant="recipe.yaml",
    target_profile="vllm-sm90+exact",
    head="medusa",
    data=("a.jsonl", "org/name:train@0.3"),
    skip_bad=True,
    prompts=77,
    output_dir=Path("runs/x"),
    resume=True,
    init_from=Path("runs/other/export"),
    tune="norms-fc",
    tune_rank=4,
    draft_quant="mxfp4",
    shard_target=True,
    seed=-3,
    dtype="bfloat16",
    device="cpu",
    compile_quantizer="off",
    weights=WeightsConfig(file=Path("weights.parquet"), headroom=2.0),
    states=StatesConfig(mode="memory", storage="fp8", folder=Path("states"), shard_tokens=1000),
    tracker="none",
    trust_remote_code=True,
    calibration=CalibrationConfig(data=(Path("text.jsonl"),), tokens=4096),
    answers=AnswersConfig(
        source="file",
        quant="none",
        max_new_tokens=7,
        batch_size=3,
        temperature=0.5,
        top_p=0.9,
        keep_thinking=False,
    ),
    thinking="off",
    allow_contamination=("heldout",),
    eagle3=Eagle3Config(
        steps=2,
        draft_vocab_size=1000,
        capture_layers=(1, 5),
        train_output=True,
        output_rank=8,
        train_embedding=True,
        start="random",
        attention="qwen3",
        norm_before_residual=True,
        norm_before_fc=True,
        fc_norm=True,
        norm_output=True,
    ),
    medusa=MedusaConfig(heads=4, blocks=2, own_output=True, bias=True, link=True),
    target_lora=TargetLoraConfig(rank=4, alpha=8, keep=2.0, lr_share=0.5),
    loss=LossConfig(
        kind="lk",
        lk_eta=1.5,
        step_decay=0.95,
        survival=True,
        survival_smoothing=0.25,
        sequence_cap=0.5,
    ),
    optim=OptimConfig(
        steps=9,
        batch_tokens=2,
        pack_tokens=77,
        lr=1e-5,
        warmup=0.25,
        schedule="wsd",
        decay=0.5,
        final=0.3,
        weight_decay=0.1,
        betas=(0.8, 0.999),
        clip=2.0,
        checkpointing=True,
        compile=True,
    ),
    selection=SelectionConfig(
        every=7, data=(Path("t.jsonl"),), prompts=3, draft_length=2, max_new_tokens=9, batch_size=4, patience=5
    ),
    checkpoint=CheckpointConfig(every=3, keep=4),
    acceptance=AcceptanceConfig(
        data=(Path("h.jsonl"),), prompts=5, draft_lengths=(2,), max_new_tokens=11, batch_size=6, check=0
    ),
)


def saved(folder: Path, content: str | dict[str, Any]) -> Path:
    path = folder / "run.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return path


def test_the_unusual_configuration_has_no_default_left() -> None:
    default = RunConfig()
    for field in fields(RunConfig):
        if field.name != "device_map":  # which goes with no target_lora
            assert getattr(UNUSUAL, field.name) != getattr(default, field.name), field.name
    parts = [f.name for f in fields(RunConfig) if is_dataclass(getattr(default, f.name))]
    assert len(parts) >= 11
    for part in parts:
        for field in fields(getattr(default, part)):
            assert getattr(getattr(UNUSUAL, part), field.name) != getattr(getattr(default, part), field.name), (
                field.name
            )


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(),
        UNUSUAL,
        RunConfig(acceptance=AcceptanceConfig(draft_lengths=())),
        RunConfig(optim=OptimConfig(lr=6e-4, clip=1.0)),
    ],
    ids=["defaults", "unusual", "nothing to measure", "floats"],
)
def test_what_is_saved_reads_back_equal(tmp_path: Path, config: RunConfig) -> None:
    assert parse(RunConfig, ["--config", str(saved(tmp_path, to_yaml(config)))]) == config
    assert from_plain(RunConfig, to_plain(config)) == config
    assert from_plain(RunConfig, json.loads(json.dumps(to_plain(config)))) == config
    assert from_plain(RunConfig, yaml.safe_load(to_yaml(config))) == config


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_shipped_configurations_parse_and_survive_saving(tmp_path: Path, path: Path) -> None:
    config = parse(RunConfig, ["--config", str(path)])
    assert parse(RunConfig, ["--config", str(saved(tmp_path, to_yaml(config)))]) == config


def test_a_file_is_the_command_line_that_it_stands_for(tmp_path: Path) -> None:
    path = saved(tmp_path, {"target_quant": "nvfp4", "optim": {"lr": 2e-4}, "data": ["a", "b"], "resume": True})
    flags = ["--target-quant", "nvfp4", "--optim.lr", "2e-4", "--data", "a", "b", "--resume"]
    assert parse(RunConfig, ["--config", str(path)]) == parse(RunConfig, flags)


def test_dashes_and_underscores_are_the_same(tmp_path: Path) -> None:
    path = saved(tmp_path, {"target-quant": "fp8", "answers": {"max-new-tokens": 5}})
    config = parse(RunConfig, ["--config", str(path)])
    assert (config.target_quant, config.answers.max_new_tokens) == ("fp8", 5)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert parse(RunConfig, ["--config", str(saved(tmp_path, "# nothing\n"))]) == RunConfig()


@pytest.mark.parametrize("place", ["before", "after"])
def test_the_command_line_wins_wherever_the_file_stands(tmp_path: Path, place: str) -> None:
    path = saved(tmp_path, to_yaml(replace(UNUSUAL, head="eagle3", target_lora=TargetLoraConfig())))
    flags = [
        "--seed",
        "5",
        "--data",
        "c.jsonl",
        "--optim.lr",
        "0.5",
        "--no-resume",
        "--acceptance.draft-lengths",
        "1",
        "4",
    ]
    file = ["--config", str(path)]
    config = parse(RunConfig, [*file, *flags] if place == "before" else [*flags, *file])
    assert (config.seed, config.data, config.optim.lr, config.resume) == (5, ("c.jsonl",), 0.5, False)
    assert config.acceptance.draft_lengths == (1, 4)
    assert config.optim.betas == UNUSUAL.optim.betas
    assert config.target == "some/model"


def test_a_later_file_wins_over_an_earlier_one(tmp_path: Path) -> None:
    first = saved(tmp_path, {"seed": 1, "head": "medusa"})
    second = tmp_path / "second.yaml"
    second.write_text("seed: 2\n", encoding="utf-8")
    config = parse(RunConfig, ["--config", str(first), "--config", str(second)])
    assert (config.seed, config.head) == (2, "medusa")


@pytest.mark.parametrize(
    ("content", "key", "nearest"),
    [
        ({"target_quants": "mxfp4"}, "target_quants", "target_quant"),
        ({"optim": {"step": 1}}, "optim.step", "optim.steps"),
        ({"Seed": 1}, "Seed", "seed"),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest(
    tmp_path: Path, content: dict[str, Any], key: str, nearest: str
) -> None:
    path = saved(tmp_path, content)
    with pytest.raises(ValueError, match=rf"unknown key '{key}'") as caught:
        parse(RunConfig, ["--config", str(path)])
    assert str(path) in str(caught.value)
    assert f"did you mean '{nearest}'?" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("seed: [1", "is not YAML"),
        ("- seed\n", "must hold options by name"),
        ("just text\n", "must hold options by name"),
        ("optim: 3\n", "'optim' must hold options by name"),
        ("optim:\n", "'optim' must hold options by name"),
    ],
)
def test_a_file_of_another_shape_is_an_error_that_names_it(tmp_path: Path, content: str, message: str) -> None:
    path = saved(tmp_path, content)
    with pytest.raises(ValueError, match=message) as caught:
        parse(RunConfig, ["--config", str(path)])
    assert str(path) in str(caught.value)


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.yaml does not exist"):
        parse(RunConfig, ["--config", str(tmp_path / "none.yaml")])
    with pytest.raises(ValueError, match="--config needs a YAML file"):
        parse(RunConfig, ["--seed", "1", "--config"])


@pytest.mark.parametrize(
    ("content", "named"),
    [({"seed": "many"}, "--seed"), ({"head": "eagle4"}, "--head"), ({"optim": {"steps": 1.5}}, "--optim.steps")],
)
def test_a_value_of_another_type_ends_with_the_flag_s_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: dict[str, Any], named: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(RunConfig, ["--config", str(saved(tmp_path, content))])
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


def test_an_unknown_flag_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(RunConfig, ["--target-quants", "mxfp4"])
    assert stopped.value.code == 2
    assert "--target-quant" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        (OptimConfig, "steps", 0),
        (OptimConfig, "batch_tokens", 0),
        (OptimConfig, "pack_tokens", 0),
        (OptimConfig, "decay", 0.0),
        (OptimConfig, "final", 1.5),
        (SelectionConfig, "every", -1),
        (SelectionConfig, "prompts", 0),
        (SelectionConfig, "draft_length", 0),
        (StatesConfig, "shard_tokens", 0),
        (OptimConfig, "lr", 0.0),
        (OptimConfig, "warmup", 1.0),
        (CheckpointConfig, "every", 0),
        (CheckpointConfig, "keep", 0),
        (AnswersConfig, "max_new_tokens", 0),
        (AnswersConfig, "batch_size", 0),
        (AcceptanceConfig, "prompts", 0),
        (AcceptanceConfig, "check", -1),
        (AcceptanceConfig, "draft_lengths", (3, 0)),
    ],
)
def test_a_value_out_of_range_names_its_field(part: type, field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{part.__name__.removesuffix('Config').lower()}\.{field} must"):
        part(**{field: value})


def test_no_prompts_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="prompts must be at least 1, got 0"):
        RunConfig(prompts=0)


def test_more_drafts_than_medusa_has_heads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"draft_lengths goes to 5, but medusa\.heads is 3"):
        RunConfig(head="medusa", medusa=MedusaConfig(heads=3))
