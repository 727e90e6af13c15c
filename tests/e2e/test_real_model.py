"""The embedded SmolLM2-135M-Instruct through the commands of the README, cut short."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from bitdraft.data.sources import demo_file, read_conversations
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import load_target, load_tokenizer

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.real_model


def run(*command: str, expect: int = 0) -> str:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == expect, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def few_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "few.jsonl"
    path.write_text(
        "\n".join(demo_file("train").read_text(encoding="utf-8").splitlines()[:12]) + "\n", encoding="utf-8"
    )
    return path


@pytest.fixture(scope="module")
def trained(few_prompts: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of the main job on the real model; its folder."""
    assert smollm2.is_dir()
    folder = tmp_path_factory.mktemp("runs") / "eagle3"
    run(
        "train/train_heads.py",
        *("--target-quant", "mxfp4", "--data", str(few_prompts), "--output-dir", str(folder)),
        *("--answers.max-new-tokens", "24", "--optim.steps", "12", "--optim.batch-tokens", "80"),
        *("--acceptance.prompts", "4", "--acceptance.max-new-tokens", "12", "--acceptance.check", "2"),
        # From random weights: on so few tokens the least-squares start fits them all, and the loss can only rise.
        *("--eagle3.draft-vocab-size", "2048", "--eagle3.start", "random", "--compile-quantizer", "off"),
    )
    return folder


def test_the_main_job_leaves_a_measured_export(trained: Path) -> None:
    names = {p.name for p in trained.iterdir()}
    assert {"run.yaml", "metrics.jsonl", "checkpoints", "export", "acceptance.json"} <= names
    measured = json.loads((trained / "acceptance.json").read_text(encoding="utf-8"))
    assert [r["draft_length"] for r in measured["results"]] == [3, 4, 5]
    for result in measured["results"]:
        assert result["emitted"] == result["passes"] + result["accepted"]
        assert result["drafted"] == result["passes"] * result["draft_length"]
        assert result["lossless_checked"] == 2
        assert result["lossless_failed"] == 0
    losses = [json.loads(line)["loss"] for line in (trained / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(losses) == 12
    assert sum(losses[-4:]) < sum(losses[:4])


def test_measuring_in_fp32_is_exactly_lossless(trained: Path, few_prompts: Path, tmp_path: Path) -> None:
    """With unquantized activations; FP8 ones can turn a sum's last bit into another code (docs/acceptance.md)."""
    out = tmp_path / "out.json"
    run(
        "scripts/measure_acceptance.py",
        *("--target", "demo", "--target-quant", "mxfp4a16", "--heads", str(trained / "export")),
        *("--draft-length", "3", "--max-new-tokens", "24", "--dtype", "float32", "--prompts", "6", "--check", "6"),
        *("--data", str(few_prompts), "--compile-quantizer", "off", "--out", str(out)),
    )
    (result,) = json.loads(out.read_text(encoding="utf-8"))["results"]
    turns = sum(m.role == "user" for c in read_conversations([few_prompts])[:6] for m in c.messages)
    assert (result["lossless_checked"], result["lossless_failed"], result["lossless_excused_near_ties"]) == (
        turns,
        0,
        0,
    )


@pytest.mark.parametrize("name", ["mt_bench", "gsm8k_test", "sgd_heldout"])
def test_public_prompt_sets_can_be_measured(trained: Path, shared: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out.json"
    run(
        "scripts/measure_acceptance.py",
        *("--heads", str(trained / "export"), "--data", str(shared / "data" / "heldout" / f"{name}.jsonl")),
        *("--draft-length", "2", "--max-new-tokens", "4", "--prompts", "3", "--check", "1", "--out", str(out)),
        *("--compile-quantizer", "off"),
    )
    (result,) = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert (result["set"], result["prompts"]) == (name, 3)


def test_a_head_for_another_target_is_refused(trained: Path, tiny_folder: Path) -> None:
    said = run(
        "scripts/measure_acceptance.py", "--heads", str(trained / "export"), "--target", str(tiny_folder), expect=2
    )
    (sentence,) = [line for line in said.splitlines() if line.startswith("error:")]
    assert "hidden size 576" in sentence
    assert "Traceback" not in said


def test_the_converted_tokenizer_splits_digits_and_renders_chats(smollm2: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer("a  1234", add_special_tokens=False)["input_ids"]
    assert [tokenizer.decode([i]) for i in ids][-4:] == ["1", "2", "3", "4"]
    assert tokenizer.decode(ids) == "a  1234"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_low_bit_moves_the_real_model_as_far_as_expected(smollm2: Path) -> None:
    """Top-1 agreement with bf16 falls from FP8 over NVFP4 to MXFP4 (about 0.91, 0.79, 0.64 on longer text)."""
    tokenizer = load_tokenizer(str(smollm2))
    text = (ROOT / "quant" / "calibration.txt").read_text(encoding="utf-8").split("\n\n")
    choices: dict[str, torch.Tensor] = {}
    for preset in ("none", "fp8", "nvfp4a16", "mxfp4"):
        target = load_target(str(smollm2), load_recipe(preset), dtype=torch.float32, compile_quantizer="off")
        parts = [torch.tensor([tokenizer(p, add_special_tokens=False)["input_ids"]]) for p in text]
        choices[preset] = torch.cat([target.top_tokens(target.states(ids).last_hidden[0]) for ids in parts])
    agreement = {p: float((c == choices["none"]).float().mean()) for p, c in choices.items()}
    assert agreement["fp8"] > 0.85
    assert agreement["fp8"] > agreement["nvfp4a16"] > agreement["mxfp4"]
    assert 0.4 < agreement["mxfp4"] < 0.8
