"""``scripts/measure_gap.py`` as a user meets it, on the tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = """
name: mlp-only
rules:
  - {modules: "*.mlp.*_proj", weights: mxfp4-even, activations: fp8-token}
"""


def run(cwd: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    settings = {"BITDRAFT_CACHE": str(cwd / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    environ = {**{k: v for k, v in os.environ.items() if k != "BITDRAFT_DEBUG"}, **settings}
    command = [sys.executable, str(ROOT / "scripts" / "measure_gap.py"), *flags]
    return subprocess.run(command, env=environ, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)


def refused(cwd: Path, *flags: str) -> str:
    """The one sentence of a command that must end with exit code 2."""
    done = run(cwd, *flags)
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stdout + done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    return last


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "asked.jsonl"
    texts = ["Who are you?", "Tell me a story.", "2 + 2", "Never asked."]
    records = [{"id": f"p{i}", "conversations": [{"role": "user", "content": t}]} for i, t in enumerate(texts)]
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def test_from_prompts_to_table_numbers_and_picture(tiny_folder: Path, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "mlp.yaml").write_text(RECIPE, encoding="utf-8")
    flags = ["--target", str(tiny_folder), "--data", str(prompts), "--prompts", "3", "--max-new-tokens", "6"]
    flags += [
        "--recipes",
        "none",
        "fp8",
        "mlp.yaml",
        "mxfp4a4-wush",
        "--calibration.tokens",
        "512",
        "--dtype",
        "float32",
        "--compile-quantizer",
        "off",
        "--out",
        "gap",
    ]
    done = run(tmp_path, *flags)
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads((tmp_path / "gap" / "gap.json").read_text(encoding="utf-8"))
    assert (document["reference"], document["prompts"], document["data"]) == ("fp32", 3, ["asked"])
    for key in ("command", "date", "seed", "machine", "target_fingerprint"):
        assert key in document
    none, fp8, mlp, wush = document["results"]
    assert [r["recipe"] for r in (none, fp8, mlp, wush)] == ["none", "fp8", "mlp-only", "mxfp4a4-wush"]
    assert none["texts"]["own"] == none["texts"]["reference"]
    assert none["texts"]["own"]["top1_agreement"] == 1.0
    assert set(mlp["weights"]["relative_error"]) == {"gate_proj", "up_proj", "down_proj"}
    assert fp8["weights"]["relative_error"]["down_proj"] < mlp["weights"]["relative_error"]["down_proj"]
    assert fp8["texts"]["reference"]["tv"] < mlp["texts"]["reference"]["tv"]
    for r in (fp8, mlp, wush):
        for numbers in r["texts"].values():
            assert 3 <= numbers["positions"] <= 18
            low, high = numbers["one_minus_tv_ci95"]
            assert 0 < low <= high < 1
    assert (tmp_path / "gap" / "gap.md").read_text(encoding="utf-8") in done.stdout
    assert (tmp_path / "gap" / "gap.png").stat().st_size > 10_000
    assert len(list((tmp_path / "cache" / "answers").iterdir())) == 4, "answers are kept like training answers"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--recipes", "mxfp5"], "did you mean 'mxfp4'"),
        (["--recipes", "fp8", "mxfp4", "fp8"], "two recipes called 'fp8'"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
    ],
)
def test_bad_input_is_one_sentence(flags: list[str], said: str, tmp_path: Path) -> None:
    assert said in refused(tmp_path, *flags)
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_without_room_for_its_answer_is_one_sentence(tiny_folder: Path, prompts: Path, tmp_path: Path) -> None:
    flags = ["--target", str(tiny_folder), "--data", str(prompts), "--max-new-tokens", "500"]
    said = refused(tmp_path, *flags, "--dtype", "float32", "--compile-quantizer", "off")
    assert "asked.jsonl, line 1" in said
    assert "512" in said
