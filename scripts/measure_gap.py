"""The gap, before anyone trains: how far is the low-bit target from the 16-bit one on your prompts?

    python scripts/measure_gap.py --target demo --recipes fp8 mxfp4 nvfp4 --data prompts.jsonl --out runs/gap

Both targets read the same text: the 16-bit target's own greedy answers, and those of each recipe. Nothing is trained.
Writes gap.json, gap.md and gap.png into ``--out``; docs/gap.md says how to read them.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import tyro
from tqdm import tqdm

from bitdraft.data.calibration import CalibrationConfig, calibration_text
from bitdraft.data.chat import Example, end_of_turn_ids
from bitdraft.data.demo_target import resolve_target
from bitdraft.data.regenerate import AnswerSettings, on_policy_examples
from bitdraft.data.sources import demo_file, read_conversations
from bitdraft.quant.files import write_text_atomically
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.profiles import load_recipe_for
from bitdraft.quant.recipe import Recipe
from bitdraft.quant.target import CompileChoice, LowBitTarget, load_target, load_tokenizer
from bitdraft.speculators.eagle3 import default_capture_layers
from bitdraft.train import gap
from bitdraft.train.environment import chosen_dtype, machine_facts, read_environment, stop_cleanly
from bitdraft.train.gap_report import draw, report


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure how far a target in simulated low bit is from the same target in 16 bit."""

    target: str = "demo"
    """Model folder or hub id; `demo` is the embedded SmolLM2-135M-Instruct."""
    recipes: tuple[str, ...] = ("fp8", "mxfp4", "nvfp4")
    """Presets or YAML recipes to compare with the 16-bit target."""
    target_profile: str = "plain"
    """Who computes: `plain`, or an engine on a chip, as in vllm-sm90 (docs/numerics.md)."""
    data: tuple[Path, ...] = ()
    """JSONL files of prompts; by default the shipped held-out prompts."""
    prompts: int = 40
    """How many prompts, in file order; each is answered up to its first user message."""
    max_new_tokens: int = 64
    """Longest answer."""
    batch_size: int = 64
    """Prompts answered at once."""
    seed: int = 0
    """Seed of the bootstrap; everything else is greedy."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """`auto` is bfloat16 where the hardware multiplies it."""
    device: str = "cpu"
    compile_quantizer: CompileChoice = "auto"
    """Compile the activation quantizer (same bits, faster)."""
    trust_remote_code: bool = False
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    out: Path = Path("runs/gap")
    """Folder for gap.json, gap.md and gap.png."""

    def __post_init__(self) -> None:
        if not self.recipes:
            raise ValueError("--recipes needs at least one preset or recipe file")
        for name, least in (("prompts", 1), ("max_new_tokens", 1), ("batch_size", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}")
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"--out {self.out} is a file: give a folder")


def main(options: Options) -> None:
    recipes = _recipes(options.recipes, options.target_profile)
    print(f"profile {options.target_profile}")
    files = options.data or (demo_file("heldout"),)
    asked = [c.opening for c in read_conversations(files)[: options.prompts]]
    cache = read_environment().cache_dir
    name = resolve_target(options.target, cache)
    dtype = chosen_dtype(options.dtype, options.device)
    tokenizer = load_tokenizer(name, trust_remote_code=options.trust_remote_code)
    options.out.mkdir(parents=True, exist_ok=True)  # now, not after an hour

    def load(recipe: Recipe) -> LowBitTarget:
        return load_target(
            name,
            recipe,
            dtype=dtype,
            device=options.device,
            compile_quantizer=options.compile_quantizer,
            calibration=calibration_text(options.calibration, recipe, tokenizer),
            trust_remote_code=options.trust_remote_code,
        )

    def answers(target: LowBitTarget) -> list[Example]:
        settings = AnswerSettings(options.max_new_tokens, options.batch_size)
        ends = end_of_turn_ids(target.model, tokenizer)
        label = f"answers of {target.recipe.name}"
        return on_policy_examples(target, tokenizer, asked, settings, end_ids=ends, cache_dir=cache, label=label)

    def measured(recipe: Recipe, bar: "tqdm[NoReturn]") -> dict[str, Any]:
        """In a function of its own, so that one low-bit target is gone before the next is loaded."""
        bar.set_description(recipe.name)
        low = load(recipe)
        texts = {"own": answers(low), "reference": reference_answers}
        return gap.measure(reference, low, texts, capture=capture, seed=options.seed, report=bar.update)

    reference = load(load_recipe("none"))
    reference_answers = answers(reference)
    capture = default_capture_layers(reference.layers)
    # smoothing=0: the time left is estimated from the average, which takes in loading and answering.
    with tqdm(total=2 * len(asked) * len(recipes), unit="prompt", smoothing=0) as bar:
        results = [measured(recipe, bar) for recipe in recipes]
    document = {
        "version": 1,
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "seed": options.seed,
        "target": options.target,
        "target_fingerprint": reference.fingerprint,
        "target_profile": options.target_profile,
        "reference": "bf16" if dtype == torch.bfloat16 else "fp32",
        "data": [path.stem for path in files],
        "prompts": len(asked),
        "max_new_tokens": options.max_new_tokens,
        "batch_size": options.batch_size,
        "machine": machine_facts(),
        "results": results,
    }
    write_text_atomically(options.out / "gap.json", json.dumps(document, indent=2) + "\n")
    write_text_atomically(options.out / "gap.md", report(document))
    draw(document, options.out / "gap.png")
    print(f"\n{report(document)}\nalso in {options.out}: gap.json, gap.md, gap.png")


def _recipes(named: Sequence[str], profile: str) -> list[Recipe]:
    """The recipes of the command line; ``ValueError`` where two could not be told apart in a table."""
    recipes = [load_recipe_for(name, profile) for name in named]
    names = [r.name for r in recipes]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"--recipes has two recipes called {twice[0]!r}: name each one once")
    return recipes


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options)))
