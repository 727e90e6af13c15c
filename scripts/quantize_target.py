"""A quantized checkpoint of a target for the engine: the codes and scales that a training run simulates.

    python scripts/quantize_target.py --target demo --target-quant nvfp4a16 --out runs/demo-nvfp4a16

Writes the target's folder with other weights, in compressed-tensors format, whole or not at all. GPTQ's codes depend on
the type it computes in: give ``--dtype`` what training has, or train on what was written. Serve it with vLLM, or
train on it with ``--target runs/demo-nvfp4a16 --target-quant auto``. Needs the ``checkpoints`` extra.

    python scripts/quantize_target.py --target demo --target-quant mxfp4a16 --baked --out runs/demo-mxfp4a16-baked

writes an ordinary checkpoint instead, whose weights are the numbers that the codes stand for: for engines without a
kernel for the format, and for weight-only recipes alone. Serve it as any 16-bit model.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor

from bitdraft.data.calibration import CalibrationConfig, calibration_text
from bitdraft.data.demo_target import resolve_target
from bitdraft.quant.checkpoints.write import write_quantized
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import calibration_ids, load_tokenizer
from bitdraft.train.environment import read_environment, stop_cleanly


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write a quantized checkpoint in compressed-tensors format, or one with the quantized values in 16 bit."""

    out: Path
    """Folder to write."""
    target: str = "demo"
    """Model folder or hub id in 16 bit; `demo` is the embedded SmolLM2-135M-Instruct."""
    target_quant: str = "mxfp4"
    """Preset or YAML recipe: fp8, mxfp4, mxfp4a16, mxfp4a4, nvfp4, nvfp4a16, …"""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """What the weights are loaded in before they are quantized, and what baked weights are written in; `auto` is the
    checkpoint's own type."""
    baked: bool = False
    """Write an ordinary checkpoint whose weights have the low-bit values: weight-only recipes, where the type holds
    those values exactly (mxfp4a16 in 16 bit; nvfp4a16 needs `--dtype float32`)."""
    device: str = "cpu"
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    overwrite: bool = False
    """Replace the folder if it exists."""
    trust_remote_code: bool = False
    """Let the target's folder run its own Python code."""


def main(options: Options) -> None:
    recipe = load_recipe(options.target_quant)
    name = resolve_target(options.target, read_environment().cache_dir)
    calibration: list[Tensor] = []
    if recipe.has_static_inputs or recipe.looks_at_inputs:
        tokenizer = load_tokenizer(name, trust_remote_code=options.trust_remote_code)
        calibration = calibration_text(options.calibration, recipe, tokenizer) or calibration_ids(tokenizer)
    written = write_quantized(
        name,
        recipe,
        options.out,
        dtype=None if options.dtype == "auto" else getattr(torch, options.dtype),
        device=options.device,
        calibration=calibration,
        overwrite=options.overwrite,
        trust_remote_code=options.trust_remote_code,
        baked=options.baked,
    )
    before, after = (size / 2**20 for size in (written.bytes_before, written.bytes_after))
    print(f"{written.applied.summary()}\nweights: {before:,.1f} MiB before, {after:,.1f} MiB now")
    print(f"checkpoint: {written.folder}")


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options)))
