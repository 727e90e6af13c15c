"""A tiny run: target, prompts and configuration for the tests of training."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.eagle3 import Eagle3Config
from bitdraft.speculators.medusa import MedusaConfig
from bitdraft.train.config import (
    AcceptanceConfig,
    AnswersConfig,
    CheckpointConfig,
    OptimConfig,
    RunConfig,
    SelectionConfig,
)
from bitdraft.train.environment import Environment
from bitdraft.train.run import run

QUESTIONS = ["Hello", "What is the time?", "Sing!", "Why is the sky blue?", "1 + 1", "Name a tree.", "Go on.", "Bye"]


@pytest.fixture(scope="session")
def target(tiny_target: Callable[[str], LowBitTarget]) -> LowBitTarget:
    """The tiny target in high precision, fp32."""
    return tiny_target("none")


def write_prompts(path: Path, texts: list[str]) -> Path:
    records = [
        {"id": f"p{i}", "category": "chat", "conversations": [{"role": "user", "content": text}]}
        for i, text in enumerate(texts)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def prompt_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Training and held-out prompts."""
    folder = tmp_path_factory.mktemp("prompts")
    heldout = write_prompts(folder / "heldout.jsonl", ["Who are you?", "Tell me a story.", "2 + 2"])
    return write_prompts(folder / "train.jsonl", QUESTIONS), heldout


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """One cache for all runs: the answers are written once."""
    return Environment(tmp_path_factory.mktemp("cache"), launched_processes=1)


@pytest.fixture(scope="session")
def make_config(tiny_folder: Path, prompt_files: tuple[Path, Path]) -> Callable[..., RunConfig]:
    """``make_config(folder, head="medusa", …)``: a run of six steps."""

    def make(output_dir: Path, **changes: Any) -> RunConfig:
        config = RunConfig(
            target=str(tiny_folder),
            target_quant="mxfp4a16",
            data=(str(prompt_files[0]),),
            output_dir=output_dir,
            dtype="float32",
            device="cpu",
            compile_quantizer="off",
            tracker="none",
            answers=AnswersConfig(max_new_tokens=10, batch_size=8),
            eagle3=Eagle3Config(steps=3, draft_vocab_size=300),
            medusa=MedusaConfig(heads=3),
            optim=OptimConfig(steps=6, batch_tokens=30, lr=3e-3),
            selection=SelectionConfig(every=3, data=(prompt_files[1],), prompts=2, draft_length=2, max_new_tokens=8),
            checkpoint=CheckpointConfig(every=2, keep=2),
            acceptance=AcceptanceConfig(
                data=(prompt_files[1],), prompts=3, draft_lengths=(1, 3), max_new_tokens=10, batch_size=2, check=3
            ),
        )
        return replace(config, **changes)

    return make


@pytest.fixture(scope="session")
def straight(
    make_config: Callable[..., RunConfig], environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The folder of an uninterrupted run of each kind."""
    done: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in done:
            done[kind] = tmp_path_factory.mktemp("straight") / kind
            run(make_config(done[kind], head=kind), environment)
        return done[kind]

    return folder
