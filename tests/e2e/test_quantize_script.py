"""``scripts/quantize_target.py`` as a user meets it, on the tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recipe import AUTO
from bitdraft.quant.target import load_target

ROOT = Path(__file__).parents[2]


def run(cwd: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    settings = {"BITDRAFT_CACHE": str(cwd / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    environ = {**{k: v for k, v in os.environ.items() if k != "BITDRAFT_DEBUG"}, **settings}
    command = [sys.executable, str(ROOT / "scripts" / "quantize_target.py"), *flags]
    return subprocess.run(command, env=environ, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)


def test_from_target_to_checkpoint(tiny_folder: Path, tmp_path: Path) -> None:
    flags = ["--target", str(tiny_folder), "--target-quant", "nvfp4", "--out", "runs/out"]
    done = run(tmp_path, *flags)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.strip().splitlines()
    assert "56 linear layers: weights nvfp4, activations nvfp4-kernel" in lines
    assert lines[-1] == "checkpoint: runs/out"
    out = tmp_path / "runs" / "out"
    assert sorted(p.name for p in out.parent.iterdir()) == ["out"], "no temporary folder is left"
    assert json.loads((out / "config.json").read_text())["quantization_config"]["format"] == "nvfp4-pack-quantized"
    target = load_target(str(out), AUTO, dtype=torch.float32, compile_quantizer="off")
    assert target.states(torch.arange(5)[None]).last_hidden.isfinite().all()
    again = run(tmp_path, *flags)
    assert again.returncode == 2
    assert again.stderr.strip().splitlines()[-1] == "error: runs/out exists: choose another --out, or add --overwrite"


def test_a_baked_checkpoint_is_an_ordinary_one(tiny_folder: Path, tmp_path: Path) -> None:
    flags = ["--target", str(tiny_folder), "--baked", "--out", "out", "--target-quant"]
    done = run(tmp_path, *flags, "mxfp4a16")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "56 linear layers: weights mxfp4-even, activations in high precision" in done.stdout
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["bitdraft"]["recipe"] == "mxfp4a16"
    baked, simulated = (
        load_target(folder, load_recipe(recipe), dtype=torch.float32, compile_quantizer="off")
        for folder, recipe in ((str(tmp_path / "out"), "none"), (str(tiny_folder), "mxfp4a16"))
    )
    ids = torch.arange(40)[None]
    assert torch.equal(baked.states(ids).last_hidden, simulated.states(ids).last_hidden)
    refused = run(tmp_path, *flags, "mxfp4", "--overwrite")
    assert refused.returncode == 2
    last = refused.stderr.strip().splitlines()[-1]
    assert last.startswith("error: recipe 'mxfp4', rule '*.layers.*': baked weights cannot hold inputs in fp8-token")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config, "what was there stays"


def test_gptq_is_calibrated_on_the_records_given(tiny_folder: Path, tmp_path: Path) -> None:
    records = [{"conversations": [{"role": "user", "content": f"{word} " * 200}]} for word in ("one", "two")]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    flags = ["--target", str(tiny_folder), "--target-quant", "nvfp4a16-gptq", "--out"]
    done = run(tmp_path, *flags, "given", "--calibration.data", "text.jsonl")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "56 linear layers: weights nvfp4 (four-over-six scales, gptq-act-order), activations" in done.stdout
    assert run(tmp_path, *flags, "shipped", "--calibration.tokens", "1024").returncode == 0
    given, shipped = (tmp_path / name / "model.safetensors" for name in ("given", "shipped"))
    assert given.stat().st_size == shipped.stat().st_size
    assert given.read_bytes() != shipped.read_bytes()
    short = run(tmp_path, *flags, "none", "--calibration.data", "text.jsonl", "--calibration.tokens", "100")
    assert short.returncode == 2
    assert "calibration.tokens must be at least 512, got 100" in short.stderr


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--target-quant", "none"), "recipe 'none' quantizes nothing"),
        (("--target", "absent"), "absent"),
    ],
)
def test_mistakes_end_with_one_sentence(
    tiny_folder: Path, tmp_path: Path, flags: tuple[str, ...], complaint: str
) -> None:
    done = run(tmp_path, "--target", str(tiny_folder), "--out", "out", *flags)
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stdout + done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert complaint in last
    assert not (tmp_path / "out").exists()
