"""``scripts/export_heads.py`` as a user runs it: exit codes and sentences."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/export_heads.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_help_names_every_choice() -> None:
    done = run("--help")
    assert done.returncode == 0
    for word in ("--head", "--out", "eagle3-original", "medusa-original", "--with-target", "--baked", "--overwrite"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "--head nowhere holds no head: config.json is missing"),
        (("--baked",), "--baked is a form of the target: add --with-target"),
    ],
)
def test_a_users_mistake_is_a_sentence_and_exit_code_2(tmp_path: Path, options: tuple[str, ...], sentence: str) -> None:
    done = run("--head", "nowhere", *options, "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert sentence in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
