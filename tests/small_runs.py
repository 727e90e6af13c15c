"""Small training runs as a user launches them: their configuration, their processes and what they wrote."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from bitdraft.speculators.eagle3 import Eagle3Config
from bitdraft.train.config import (
    AcceptanceConfig,
    AnswersConfig,
    CheckpointConfig,
    OptimConfig,
    RunConfig,
    SelectionConfig,
    StatesConfig,
)
from bitdraft.train.config_io import to_yaml
from bitdraft.train.journal import read_metrics
from bitdraft.train.loss_terms import LossConfig

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "train" / "train_heads.py"
QUESTIONS = ["Hello", "What is the time?", "Sing!", "Why is the sky blue?", "1 + 1", "Name a tree.", "Go on.", "Bye"]


def small_config(folder: Path, target: Path, **changes: Any) -> RunConfig:
    """Eight steps of an EAGLE-3 head on the tiny target's own answers: several packs a step, LK loss, selection."""
    data = folder.parent / "asked.jsonl"
    if not data.exists():
        asked = [f"{text} {'And then? ' * (i % 4)}" for i, text in enumerate(QUESTIONS * 2)]
        records = [{"conversations": [{"role": "user", "content": text}]} for text in asked]
        data.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    config = RunConfig(
        target=str(target),
        target_quant="mxfp4a16",
        data=(str(data),),
        output_dir=folder,
        dtype="float32",
        device="cpu",
        compile_quantizer="off",
        tracker="none",
        answers=AnswersConfig(max_new_tokens=20, batch_size=16),
        states=StatesConfig(mode="memory"),
        eagle3=Eagle3Config(steps=3, draft_vocab_size=301, train_output=True),
        loss=LossConfig(kind="lk"),
        optim=OptimConfig(steps=8, batch_tokens=120, pack_tokens=170, lr=2e-2),
        selection=SelectionConfig(every=2, prompts=4, draft_length=2, max_new_tokens=24, batch_size=4),
        checkpoint=CheckpointConfig(every=1, keep=2),
        acceptance=AcceptanceConfig(draft_lengths=()),
    )
    return replace(config, **changes)


def launched(config: RunConfig, *launcher: str, **settings: str) -> "subprocess.Popen[str]":
    """``launcher train/train_heads.py --config …``; what it says is in ``output_dir.log``."""
    assert config.output_dir is not None
    described = config.output_dir.with_suffix(".yaml")
    described.write_text(to_yaml(replace(config, resume=False)), encoding="utf-8")
    command = [*launcher, str(SCRIPT), "--config", str(described), *(["--resume"] if config.resume else [])]
    environ = {k: v for k, v in os.environ.items() if k not in ("BITDRAFT_DEBUG", "WORLD_SIZE", "MASTER_PORT")}
    environ |= {
        "BITDRAFT_CACHE": str(config.output_dir.parent / "cache"),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONSAFEPATH": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **settings,
    }
    with config.output_dir.with_suffix(".log").open("a", encoding="utf-8") as log:
        return subprocess.Popen(
            command, env=environ, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )


def said(config: RunConfig) -> str:
    assert config.output_dir is not None
    return config.output_dir.with_suffix(".log").read_text(encoding="utf-8")


def torchrun(processes: int) -> list[str]:
    here = ["--standalone", "--nproc_per_node", str(processes)]
    return [sys.executable, "-m", "torch.distributed.run", *here]


def accelerate_launch(file: Path) -> list[str]:
    """With a configuration file, on a free port."""
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), "--main_process_port", "0"]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The diary's lines without what the clock says."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]
