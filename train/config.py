"""What a training run is told. Every field's docstring is its ``--help``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bitdraft.data.calibration import CalibrationConfig
from bitdraft.quant.target import CompileChoice
from bitdraft.speculators.eagle3 import Eagle3Config
from bitdraft.speculators.medusa import MedusaConfig


def _at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True, kw_only=True)
class AnswersConfig:
    """Where the assistant's tokens come from."""

    source: Literal["target", "file"] = "target"
    """`target`: the low-bit target answers the prompts itself (on-policy); `file`: keep the data's own answers."""
    quant: str | None = None
    """Recipe of the target that writes the answers, if it is not `--target-quant`."""
    max_new_tokens: int = 128
    """Longest answer."""
    batch_size: int = 128
    """Prompts answered at once."""

    def __post_init__(self) -> None:
        _at_least("answers.max_new_tokens", self.max_new_tokens, 1)
        _at_least("answers.batch_size", self.batch_size, 1)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with linear warm-up and cosine decay."""

    steps: int = 150
    """Optimizer steps."""
    batch_tokens: int = 640
    """Answer tokens per process and step, about: whole examples, as many as hold that many tokens."""
    lr: float = 5e-4
    """Peak learning rate."""
    warmup: float = 0.05
    """Share of the steps spent warming up."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 0.5
    """Largest norm of the gradient."""

    def __post_init__(self) -> None:
        _at_least("optim.steps", self.steps, 1)
        _at_least("optim.batch_tokens", self.batch_tokens, 1)
        if not 0 <= self.warmup < 1:
            raise ValueError(f"optim.warmup must lie in [0, 1), got {self.warmup}")
        if self.lr <= 0:
            raise ValueError(f"optim.lr must be positive, got {self.lr}")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints of the run."""

    every: int = 50
    """Steps between checkpoints; the last step always has one."""
    keep: int = 2
    """Newest checkpoints that stay."""

    def __post_init__(self) -> None:
        _at_least("checkpoint.every", self.every, 1)
        _at_least("checkpoint.keep", self.keep, 1)


@dataclass(frozen=True, kw_only=True)
class AcceptanceConfig:
    """The measurement at the end: speculative decoding on held-out prompts."""

    data: tuple[Path, ...] = ()
    """JSONL files of prompts; by default the shipped held-out prompts."""
    prompts: int = 40
    """How many prompts, in file order."""
    draft_lengths: tuple[int, ...] = (3, 4, 5)
    """Chain lengths to measure."""
    max_new_tokens: int = 64
    batch_size: int = 48
    check: int = 8
    """Prompts whose answers are compared with plain decoding."""

    def __post_init__(self) -> None:
        for name in ("prompts", "max_new_tokens", "batch_size"):
            _at_least(f"acceptance.{name}", getattr(self, name), 1)
        _at_least("acceptance.check", self.check, 0)
        for length in self.draft_lengths:
            _at_least("acceptance.draft_lengths", length, 1)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Train a draft head against a target in simulated low bit, export it and measure its acceptance."""

    target: str = "demo"
    """Model folder or hub id; `demo` is the embedded SmolLM2-135M-Instruct."""
    target_quant: str = "mxfp4"
    """How the target is served: none, fp8, fp8-block, mxfp8, mxfp4, mxfp4a16, mxfp4a4, nvfp4, nvfp4a16, w4a16 (more
    in docs/numerics.md), a YAML recipe, or `auto` for a checkpoint that is already quantized; `+kvfp8` behind any
    of them keeps keys and values in FP8."""
    target_profile: str = "plain"
    """Who computes: `plain` (every format by the rule of its name), vllm-sm80, vllm-sm90, vllm-sm100, sglang-sm90,
    sglang-sm100, vllm-cpu (more in docs/numerics.md); `+exact` behind it multiplies in the engines' order in
    bfloat16 too."""
    head: Literal["eagle3", "medusa"] = "eagle3"
    """Kind of draft head."""
    data: tuple[Path, ...] = ()
    """JSONL files of prompts or conversations; by default the shipped training prompts."""
    prompts: int | None = None
    """Train on the first so many records of the data only."""
    output_dir: Path | None = None
    """Run folder; by default runs/HEAD-QUANT, with the profile behind it if it is not plain."""
    resume: bool = False
    """Go on from the newest whole checkpoint in the run folder."""
    seed: int = 0
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute type of the target and the head; `auto` is bfloat16 where the hardware multiplies it."""
    device: str = "auto"
    """`auto`, cpu, cuda, npu, xpu, …"""
    compile_quantizer: CompileChoice = "auto"
    """Compile the activation quantizer (same bits, faster); `auto` where a C++ compiler is found."""
    states: Literal["auto", "memory", "online"] = "auto"
    """Run the target once and keep its states in memory, or run it at every step; `auto` keeps up to 2 GiB."""
    tracker: str = "tensorboard"
    """Any tracker that accelerate knows by name, or `none`."""
    trust_remote_code: bool = False
    """Let the target's folder run its own Python code."""
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    eagle3: Eagle3Config = field(default_factory=Eagle3Config)
    medusa: MedusaConfig = field(default_factory=MedusaConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)

    def __post_init__(self) -> None:
        if self.prompts is not None:
            _at_least("prompts", self.prompts, 1)
        if self.head == "medusa" and max(self.acceptance.draft_lengths, default=0) > self.medusa.heads:
            raise ValueError(
                f"acceptance.draft_lengths goes to {max(self.acceptance.draft_lengths)}, "
                f"but medusa.heads is {self.medusa.heads}"
            )

    @property
    def run_dir(self) -> Path:
        profile = "" if self.target_profile == "plain" else f"-{self.target_profile}"
        return self.output_dir or Path("runs") / f"{self.head}-{Path(self.target_quant).stem}{profile}"
