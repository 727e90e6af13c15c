"""``train/train_heads.py`` as a user meets it: exit codes, sentences, and Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bitdraft.train.checkpoint import checkpoints

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    cache = {"BITDRAFT_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**{k: v for k, v in os.environ.items() if k != "BITDRAFT_DEBUG"}, **cache}


def command(*flags: str) -> list[str]:
    return [sys.executable, str(ROOT / "train" / "train_heads.py"), *flags]


def tiny_flags(folder: Path, data: Path, output_dir: Path) -> list[str]:
    settings = {
        "--target": folder,
        "--target-quant": "none",
        "--data": data,
        "--output-dir": output_dir,
        "--dtype": "float32",
        "--device": "cpu",
        "--compile-quantizer": "off",
        "--tracker": "none",
        "--answers.max-new-tokens": 6,
    }
    return [word for flag, value in settings.items() for word in (flag, str(value))]


def refused(environ: dict[str, str], folder: Path, *flags: str) -> str:
    """What a command that must end with exit code 2 says on stderr."""
    done = subprocess.run(
        command(*flags), env=environ, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stdout + done.stderr
    return done.stderr


def test_an_unknown_preset_is_one_sentence_with_the_nearest(environ: dict[str, str], tmp_path: Path) -> None:
    said = refused(environ, tmp_path, "--target-quant", "mxfp5")
    (line,) = said.strip().splitlines()
    assert line.startswith("error: ")
    assert "'mxfp5'" in line
    assert "did you mean 'mxfp4'" in line
    assert not (tmp_path / "runs").exists(), "nothing was begun"


def test_an_unknown_flag_names_the_nearest(environ: dict[str, str], tmp_path: Path) -> None:
    assert "--optim.steps" in refused(environ, tmp_path, "--optim.stepz", "3")


def test_a_draft_vocabulary_larger_than_the_vocabulary_is_one_sentence(
    environ: dict[str, str], tmp_path: Path, tiny_folder: Path, prompt_files: tuple[Path, Path]
) -> None:
    flags = tiny_flags(tiny_folder, prompt_files[0], tmp_path / "run")
    said = refused(environ, tmp_path, *flags, "--eagle3.draft-vocab-size", "321")
    last = said.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "321" in last
    assert "320" in last


def test_ctrl_c_ends_with_a_checkpoint_and_exit_code_130(
    environ: dict[str, str], tmp_path: Path, tiny_folder: Path, prompt_files: tuple[Path, Path]
) -> None:
    folder = tmp_path / "run"
    flags = tiny_flags(tiny_folder, prompt_files[0], folder)
    settings = ["--optim.steps", "100000", "--optim.batch-tokens", "20", "--checkpoint.every", "100000"]
    with subprocess.Popen(
        command(*flags, *settings),
        env=environ,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            metrics, patience = folder / "metrics.jsonl", time.monotonic() + 100
            while not (metrics.is_file() and metrics.read_text(encoding="utf-8").count("\n") >= 2):
                assert process.poll() is None, process.stderr.read()[-2000:] if process.stderr else ""
                assert time.monotonic() < patience, "no step within 100 seconds"
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, said[-2000:]
    assert "Traceback" not in said
    (checkpoint,) = checkpoints(folder / "checkpoints")
    last = json.loads(metrics.read_text(encoding="utf-8").splitlines()[-1])["step"]
    assert checkpoint.name == f"step-{last:06d}"
    assert not (folder / "export").exists()
