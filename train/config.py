"""What a training run is told. Every field's docstring is its ``--help``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bitdraft.data.calibration import CalibrationConfig
from bitdraft.quant.target import CompileChoice
from bitdraft.speculators.eagle3 import Eagle3Config
from bitdraft.speculators.medusa import MedusaConfig
from bitdraft.speculators.sampling import Sampling
from bitdraft.train.loss_terms import LossConfig


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
    temperature: float = 0.0
    """Of the target's answers; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens that hold this share of the probability."""
    keep_thinking: bool = True
    """Train on the thinking that the data's own answers hold too, where the chat template renders it."""

    def __post_init__(self) -> None:
        Sampling(temperature=self.temperature, top_p=self.top_p)  # refuses what is no temperature
        _at_least("answers.max_new_tokens", self.max_new_tokens, 1)
        _at_least("answers.batch_size", self.batch_size, 1)


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """How often each record is drawn."""

    file: Path | None = None
    """Weights by scripts/match_traffic.py for the records of `--data`; by default every record comes once an epoch.
    `--prompts` then draws a subset by weight instead of taking the first, which is trained on evenly."""
    headroom: float = 1.0
    """Draw groups of records more often where the head accepts least, and others less, by this factor at most;
    estimated anew every epoch from what the head accepts on the training text. 1 leaves the weights as they are."""

    def __post_init__(self) -> None:
        if not 1 <= self.headroom < float("inf"):
            raise ValueError(f"weights.headroom must be finite and at least 1, got {self.headroom}")
        if self.headroom > 1 and self.file is None:
            raise ValueError("weights.headroom goes by the groups of a weights file: give --weights.file")


@dataclass(frozen=True, kw_only=True)
class StatesConfig:
    """Where the target's hidden states come from."""

    mode: Literal["auto", "memory", "online", "disk"] = "auto"
    """Run the target once and keep its states in memory or on disk, or run it at every step; `auto` keeps up to 2 GiB
    in memory."""
    storage: Literal["target", "bf16", "fp8"] = "target"
    """How states on disk are stored: in the target's dtype, in bf16, or in FP8 with a scale per token and layer."""
    folder: Path | None = None
    """Where states on disk are kept; by default `states` in the run folder. Runs of one target may share it."""
    shard_tokens: int = 65536
    """Tokens per file, about."""

    def __post_init__(self) -> None:
        _at_least("states.shard_tokens", self.shard_tokens, 1)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with linear warm-up and a falling learning rate."""

    steps: int = 150
    """Optimizer steps."""
    batch_tokens: int = 640
    """Answer tokens per process and step, about: whole examples, as many as hold that many tokens."""
    pack_tokens: int = 8192
    """Tokens that go through the head at once: a step's examples are packed into rows of at most so many, whose
    gradients add up to those of one big row."""
    lr: float = 5e-4
    """Peak learning rate."""
    warmup: float = 0.05
    """Share of the steps spent warming up."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """How the rate falls after the warm-up: along a cosine, or not at all until the last steps and then straight
    (warm-up, stable, decay)."""
    decay: float = 0.2
    """Share of the steps in which wsd falls."""
    final: float = 0.1
    """What the rate falls to, as a share of the peak."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 0.5
    """Largest norm of the gradient."""
    checkpointing: bool = False
    """Compute the head's activations again in the backward pass instead of keeping them: less memory, more time."""
    compile: bool = False
    """Compile the EAGLE-3 layer's MLP in training (torch.compile): fewer kernels on a GPU, after a wait."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_tokens", "pack_tokens"):
            _at_least(f"optim.{name}", getattr(self, name), 1)
        if not 0 <= self.warmup < 1:
            raise ValueError(f"optim.warmup must lie in [0, 1), got {self.warmup}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"optim.decay must lie in (0, 1], got {self.decay}")
        if not 0 <= self.final <= 1:
            raise ValueError(f"optim.final must lie in [0, 1], got {self.final}")
        if self.lr <= 0:
            raise ValueError(f"optim.lr must be positive, got {self.lr}")


@dataclass(frozen=True, kw_only=True)
class TargetLoraConfig:
    """Medusa-2: train the target along with its heads, through a LoRA adapter that is exported beside them."""

    rank: int = 0
    """Rank of the adapter in every attention and MLP layer; 0 leaves the target as it is."""
    alpha: int = 16
    """The adapter's product is scaled by alpha / rank."""
    keep: float = 10.0
    """Weight of the KL divergence from the target's own distribution to the adapted one, beside the heads' loss."""
    lr_share: float = 0.25
    """The adapter's learning rate, as a share of the heads'."""

    def __post_init__(self) -> None:
        _at_least("target_lora.rank", self.rank, 0)
        _at_least("target_lora.alpha", self.alpha, 1)
        if not 0 <= self.keep < float("inf"):
            raise ValueError(f"target_lora.keep must be finite and at least 0, got {self.keep}")
        if not 0 <= self.lr_share < float("inf"):
            raise ValueError(f"target_lora.lr_share must be finite and at least 0, got {self.lr_share}")


@dataclass(frozen=True, kw_only=True)
class SelectionConfig:
    """The head is chosen by what it accepts while it is trained: loss goes on falling where acceptance does not."""

    every: int = 50
    """Steps between measurements (decoding with the head as it is then); 0 measures never and exports the last head."""
    data: tuple[Path, ...] = ()
    """JSONL files of prompts like the traffic to come; by default the shipped traffic prompts, or with data of your own
    its last records (a fifth at most), which are then not trained on."""
    prompts: int = 24
    """How many prompts, in file order."""
    draft_length: int = 3
    """Tokens drafted per pass."""
    max_new_tokens: int = 48
    batch_size: int = 48
    patience: int = 0
    """Stop after so many measurements in a row without a better head; 0 trains to the end."""

    def __post_init__(self) -> None:
        for name in ("every", "patience"):
            _at_least(f"selection.{name}", getattr(self, name), 0)
        for name in ("prompts", "draft_length", "max_new_tokens", "batch_size"):
            _at_least(f"selection.{name}", getattr(self, name), 1)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints of the run."""

    every: int = 50
    """Steps between checkpoints; the last step always has one."""
    keep: int = 2
    """Newest checkpoints that stay, beside the best by acceptance."""

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
    init_from: Path | None = None
    """A head to go on from, in any layout that exports have, ours or published by others; its shape and vocabulary stay
    as they are."""
    tune: Literal["all", "norms-fc", "lora"] = "all"
    """What is trained: everything; of an EAGLE-3 head the norms and `fc` alone, which align a head with another format
    of its target in a few hundred steps; or LoRA adapters on the layers, which the export has merged (output heads stay
    as they are)."""
    tune_rank: int = 16
    """Rank of the adapters of `--tune lora`."""
    draft_quant: str | None = None
    """Train the head itself in low bit, in this preset or recipe (fp8, mxfp4, nvfp4, nvfp4a16, …), and export it so:
    the layers that it names compute as the engine will. Go on from a converged 16-bit head: `--init-from`."""
    data: tuple[str, ...] = ()
    """Prompts or conversations: JSON, JSONL or Parquet files, folders, globs, hub ids, each with its share of the mix
    behind it if wanted (`chat.jsonl@0.7 code/@0.3`; docs/data.md); by default the shipped training prompts."""
    skip_bad: bool = False
    """Leave records out that cannot be read, and count them, instead of stopping at the first."""
    allow_contamination: tuple[str, ...] = ()
    """Names of files (without their ending) that the head may be selected by or measured on although records that it
    is trained on nearly hold their prompts."""
    prompts: int | None = None
    """Train on the first so many records of the data only; with `--weights.file`, on as many drawn by weight."""
    output_dir: Path | None = None
    """Run folder; by default runs/HEAD-QUANT, with the profile behind it if it is not plain."""
    resume: bool = False
    """Go on from the newest whole checkpoint in the run folder."""
    seed: int = 0
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute type of the target and the head; `auto` is bfloat16 where the hardware multiplies it."""
    device: str = "auto"
    """`auto`, cpu, cuda, npu, xpu, …"""
    device_map: str | None = None
    """Split the target over devices, in a run of one process: `auto` by their free memory, or a YAML file that names
    the device of each module (`model.layers.0: cuda:1`)."""
    shard_target: bool = False
    """Cut the target's layers up over the processes of an FSDP2 run, besides the head; they then run it together."""
    compile_quantizer: CompileChoice = "auto"
    """Compile the activation quantizer (same bits, faster); `auto` where a C++ compiler is found."""
    tracker: str = "tensorboard"
    """Any tracker that accelerate knows by name, or `none`."""
    trust_remote_code: bool = False
    """Let the target's folder run its own Python code."""
    thinking: Literal["on", "off"] | None = None
    """Switch the chat template's thinking mode, in training and in measuring; by default the template decides."""
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    eagle3: Eagle3Config = field(default_factory=Eagle3Config)
    medusa: MedusaConfig = field(default_factory=MedusaConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    states: StatesConfig = field(default_factory=StatesConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    target_lora: TargetLoraConfig = field(default_factory=TargetLoraConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)

    def __post_init__(self) -> None:
        if self.prompts is not None:
            _at_least("prompts", self.prompts, 1)
        _at_least("tune_rank", self.tune_rank, 1)
        if self.shard_target and self.states.mode == "disk":
            raise ValueError(
                "states.mode disk: one process fills the folder, but a target that is cut up (shard_target) is run by "
                "all of them together: take memory or online"
            )
        if self.draft_quant and (self.init_from is None or self.tune == "lora"):
            raise ValueError(
                "draft_quant starts from a converged head and trains its masters: give --init-from, and --tune all or "
                "norms-fc"
            )
        if self.target_lora.rank and self.head != "medusa":
            raise ValueError(
                "target_lora.rank: the target is trained along with Medusa heads only: give --head medusa, or rank 0"
            )
        if self.target_lora.rank and self.device_map:
            raise ValueError("target_lora.rank: a target trained along lies on one device: leave out device_map")
        if self.head == "medusa" and max(self.acceptance.draft_lengths, default=0) > self.medusa.heads:
            raise ValueError(
                f"acceptance.draft_lengths goes to {max(self.acceptance.draft_lengths)}, "
                f"but medusa.heads is {self.medusa.heads}"
            )
        if self.head == "medusa" and self.selection.every and self.selection.draft_length > self.medusa.heads:
            raise ValueError(
                f"selection.draft_length is {self.selection.draft_length}, but medusa.heads is {self.medusa.heads}"
            )

    @property
    def run_dir(self) -> Path:
        profile = "" if self.target_profile == "plain" else f"-{self.target_profile}"
        return self.output_dir or Path("runs") / f"{self.head}-{Path(self.target_quant).stem}{profile}"
