"""What an exported head accepts, measured by real speculative decoding on held-out prompts.

    python scripts/measure_acceptance.py --target demo --target-quant mxfp4 --heads runs/eagle3-mxfp4/export \\
        --data prompts.jsonl --draft-length 3 4 5 --max-new-tokens 64 --out acceptance.json

Greedy chains. The answers of the first ``--check`` prompts are compared with plain decoding; the script fails
(exit code 1) if one differs by more than rounding.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from bitdraft.data.calibration import CalibrationConfig, calibration_text
from bitdraft.data.demo_target import resolve_target
from bitdraft.data.sources import demo_file, read_conversations
from bitdraft.quant.files import write_text_atomically
from bitdraft.quant.profiles import load_recipe_for
from bitdraft.quant.target import CompileChoice, load_target, load_tokenizer
from bitdraft.speculators.export import load_head, recipe_of_head
from bitdraft.train import acceptance
from bitdraft.train.config import AcceptanceConfig
from bitdraft.train.environment import chosen_dtype, read_environment, stop_cleanly


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the acceptance of an exported head on a target in simulated low bit."""

    heads: Path
    """Exported head: the export folder of a run."""
    target: str = "demo"
    """Model folder or hub id; `demo` is the embedded SmolLM2-135M-Instruct."""
    target_quant: str = "mxfp4"
    """Preset or YAML recipe that the target is served with, or `auto` for a checkpoint that is already quantized."""
    target_profile: str = "plain"
    """Who computes: `plain`, or an engine on a chip, as in vllm-sm90 (docs/numerics.md)."""
    data: tuple[Path, ...] = ()
    """JSONL files of prompts, measured one by one; by default the shipped held-out prompts."""
    prompts: int = 80
    """How many prompts of each file, in order."""
    draft_length: tuple[int, ...] = (3, 4, 5)
    """Drafted tokens per pass."""
    max_new_tokens: int = 64
    batch_size: int = 48
    check: int = 8
    """Prompts per file whose answers are compared with plain decoding."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """`auto` is bfloat16 where the hardware multiplies it."""
    device: str = "cpu"
    compile_quantizer: CompileChoice = "auto"
    """Compile the activation quantizer (same bits, faster)."""
    trust_remote_code: bool = False
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    out: Path | None = None
    """Where to write the numbers as JSON."""

    def __post_init__(self) -> None:
        if not self.draft_length or min(self.draft_length) < 1:
            raise ValueError("--draft-length needs numbers of at least 1")
        for name in ("prompts", "max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")


def main(options: Options) -> None:
    recipe = load_recipe_for(options.target_quant, options.target_profile)
    files = options.data or (demo_file("heldout"),)
    sets = [(path.stem, read_conversations([path])) for path in files]
    name = resolve_target(options.target, read_environment().cache_dir)
    dtype = chosen_dtype(options.dtype, options.device)
    tokenizer = load_tokenizer(name, trust_remote_code=options.trust_remote_code)
    target = load_target(
        name,
        recipe,
        dtype=dtype,
        device=options.device,
        compile_quantizer=options.compile_quantizer,
        calibration=calibration_text(options.calibration, recipe, tokenizer),
        trust_remote_code=options.trust_remote_code,
    )
    head = load_head(options.heads, target)
    trained_on = recipe_of_head(options.heads).get("recipe", "unknown")
    print(target.recipe.computed_by)
    print(f"{head.kind} head trained on {trained_on}, served on {recipe.name}, {str(dtype).removeprefix('torch.')}")
    how = AcceptanceConfig(
        prompts=options.prompts,
        draft_lengths=options.draft_length,
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,
        check=options.check,
    )
    everything: dict[str, list[object]] = {"results": []}
    failures = []
    for set_name, conversations in sets:
        prompts = acceptance.prompt_set(target, tokenizer, conversations, set_name, how)
        results = acceptance.measure(target, head, tokenizer, prompts, how)
        print(f"\n{set_name}: {len(prompts.ids)} prompts, up to {options.max_new_tokens} new tokens, greedy")
        print(acceptance.table(results))
        described = acceptance.document(target, str(options.heads), prompts, results)
        everything = {**described, "results": [*everything["results"], *described["results"]]}
        failures += [failure for m in results for failure in m.lossless.failures]
    if options.out:
        everything["command"] = [" ".join(["python", *sys.argv])]
        write_text_atomically(options.out, json.dumps(everything, indent=2) + "\n")
    if failures:
        print(f"error: not lossless: {failures[0]} ({len(failures)} in all)", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options)))
