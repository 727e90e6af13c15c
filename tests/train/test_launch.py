"""Launches that would do something else than they were asked to are refused."""

from pathlib import Path

import pytest
from small_runs import ROOT, small_config

from bitdraft.train.config import RunConfig
from bitdraft.train.environment import Environment, read_environment
from bitdraft.train.launch import make_accelerator

NAMES = ("WORLD_SIZE", "MASTER_PORT", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what accelerate sets is taken back
        monkeypatch.delenv(name)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return small_config(tmp_path / "run", tmp_path / "target")


@pytest.mark.parametrize(
    ("settings", "processes", "alone", "engine"),
    [
        ({}, 1, False, ""),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, 1, False, ""),  # accelerate launch of one process
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"}, 1, True, ""),  # --cpu --num_processes 2
        ({"MASTER_PORT": "29500"}, 1, False, ""),  # anybody's shell
        ({"WORLD_SIZE": "2", "MASTER_PORT": "29500"}, 2, False, ""),  # torchrun
        ({"WORLD_SIZE": "2", "MASTER_PORT": "1", "ACCELERATE_MIXED_PRECISION": "no"}, 2, False, ""),
        ({"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"}, 2, False, "fsdp"),
        ({"WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true"}, 2, False, "deepspeed"),
        ({"ACCELERATE_USE_FSDP": "false"}, 1, False, ""),
    ],
)
def test_what_launchers_leave_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], processes: int, alone: bool, engine: str
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    found = read_environment()
    assert (found.launched_processes, found.left_alone, found.asked_engine) == (processes, alone, engine)


def refused(config: RunConfig, environment: Environment, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        make_accelerator(config, environment, Path("run"))
    assert "\n" not in str(caught.value)


def test_one_process_where_several_were_asked_for(config: RunConfig) -> None:
    refused(config, Environment(Path(), 1, left_alone=True), "asked for several processes and started one: .* torchrun")
    refused(config, Environment(Path(), 3), "the launcher started 3 processes but accelerate sees 1")


def test_an_engine_that_would_not_run(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_VERSION", "2")
    refused(config, Environment(Path(), 1, asked_engine="fsdp"), "asks for fsdp, but accelerate would run NO: start it")


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("FSDP_VERSION", "1", "in fsdp_config: fsdp_version: 2$"),
        ("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP", r"fsdp_auto_wrap_policy: NO_WRAP \("),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true", "fsdp_cpu_ram_efficient_loading: false"),
        ("FSDP_OFFLOAD_PARAMS", "true", "fsdp_offload_params: false"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", r"fsdp_activation_checkpointing: false \(--optim.checkpointing\)"),
    ],
)
def test_settings_of_fsdp_that_a_head_does_not_bear(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, setting: str, value: str, said: str
) -> None:
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv(setting, value)
    refused(config, Environment(Path(), 1, asked_engine="fsdp"), said)


def test_a_plain_run_needs_no_launcher(config: RunConfig) -> None:
    assert make_accelerator(config, Environment(Path(), 1), Path("run")).num_processes == 1


def test_every_configuration_file_says_its_own_command() -> None:
    for file in sorted((ROOT / "configs" / "accelerate").iterdir()):
        first = file.read_text(encoding="utf-8").splitlines()[0]
        assert first == f"# accelerate launch --config_file configs/accelerate/{file.name} train/train_heads.py …"
