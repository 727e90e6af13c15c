"""What an export is told. Every field's docstring is its ``--help``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bitdraft.data.calibration import CalibrationConfig


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a draft head for an engine, after trying the written files on its target."""

    head: Path
    """Folder of a head: a run's export, or one published in any layout that is written here."""
    out: Path
    """Folder to write. It appears whole, when the head in it was found to draft as it should."""
    format: Literal["eagle3-speculators", "eagle3-original", "medusa-vllm", "medusa-original"] | None = None
    """Layout (docs/formats.md); by default vLLM's for the kind of head."""
    head_quant: str | None = None
    """Recipe for the head's own weights: fp8, fp8-block, nvfp4, nvfp4a16, mxfp4, mxfp4a16, mxfp4a4 (EAGLE-3 only); by
    default they stay as they are."""
    target: str = "demo"
    """Model folder or hub id; `demo` is the embedded SmolLM2-135M-Instruct."""
    target_quant: str | None = None
    """Preset or YAML recipe that the target is served with, or `auto` for a checkpoint that is already quantized; by
    default the recipe that the head was trained on."""
    target_profile: str | None = None
    """Who computes: `plain`, or an engine on a chip, as in vllm-sm90 (docs/numerics.md); by default as in training."""
    with_target: bool = False
    """Write the target beside the head, quantized, in compressed-tensors format."""
    baked: bool = False
    """With `--with-target`: a 16-bit checkpoint whose weights hold the quantized values, where no kernel exists."""
    served_as: str | None = None
    """What the files and the card call the target that is served: a path or a hub id; by default the target beside the
    head, or `--target`."""
    license: str | None = None
    """The target's license for the model card; by default what its own card says."""
    overwrite: bool = False
    """Replace the folder if it exists."""
    draft_length: int = 3
    """Drafted tokens per pass: in the check, in the engine's config and in the commands."""
    data: tuple[Path, ...] = ()
    """JSONL files of held-out prompts for the check; by default the shipped ones."""
    prompts: int = 8
    """How many of them are decoded; more make the model card's numbers surer."""
    max_new_tokens: int = 64
    """Longest answer of the check."""
    batch_size: int = 8
    """Prompts decoded at once."""
    acceptance: Path | None = None
    """acceptance.json whose rows go into the model card too; by default that of the run that the head comes from."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """`auto` is bfloat16 where the hardware multiplies it."""
    device: str = "cpu"
    """cpu, cuda, npu, xpu, …"""
    trust_remote_code: bool = False
    """Let the target's folder run its own Python code."""
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)

    def __post_init__(self) -> None:
        for name in ("draft_length", "prompts", "max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
        if self.baked and not self.with_target:
            raise ValueError("--baked is a form of the target: add --with-target")
