"""What choices of training are worth: heads trained on the same text for as many steps, and what each accepts.

    python scripts/bench/training_choices.py --json docs/results/training_choices.json

Every arm is a run of ``train/train_heads.py`` on a target with MXFP4 weights (``runs/choices/ARM``; finished ones are
not trained again), measured on the held-out prompts by greedy decoding and by sampling at temperature 1. Differences
between arms are paired by prompt: 95 % bootstrap intervals over prompts. Arms share the target's states on disk. A
Markdown table is written next to the JSON.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tyro

from bitdraft.data.demo_target import resolve_target
from bitdraft.data.sources import demo_file, read_conversations
from bitdraft.quant.files import write_text_atomically
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget, load_target, load_tokenizer
from bitdraft.speculators.decode import Rule
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.eagle3 import Eagle3Config
from bitdraft.speculators.load import load_head
from bitdraft.speculators.low_bit import quantize_head
from bitdraft.speculators.medusa import MedusaConfig
from bitdraft.speculators.metrics import Acceptance, length_difference, length_interval, total
from bitdraft.speculators.sampling import Sampling
from bitdraft.train.config import AcceptanceConfig, AnswersConfig, OptimConfig, RunConfig, SelectionConfig, StatesConfig
from bitdraft.train.environment import chosen_dtype, give_memory_back, machine_facts, read_environment, stop_cleanly
from bitdraft.train.loss_terms import LossConfig
from bitdraft.train.measuring.acceptance import Decoding, decode
from bitdraft.train.measuring.prompt_sets import PromptSet
from bitdraft.train.run import run


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train and compare."""

    json: Path
    """The numbers; a table goes beside it."""
    output_dir: Path = Path("runs/choices")
    only: tuple[str, ...] = ()
    """Arms by name; by default all. Arms that others go on from or are compared with come along."""
    quant: str = "mxfp4a16"
    data: tuple[Path, ...] = ()
    """JSONL files of training prompts; by default the shipped ones."""
    prompts: int = 770
    """Training prompts."""
    answer_tokens: int = 128
    temperature: float = 0.0
    """Of the training answers; 0 is greedy."""
    steps: int = 300
    tuning_steps: int = 100
    """Of arms that go on from another."""
    measured_prompts: int = 80
    new_tokens: int = 64
    draft_length: int = 3
    seed: int = 0
    sampled: int = 3
    """Seeds of the sampled answers."""


@dataclass(frozen=True)
class Arm:
    """One head."""

    name: str
    config: RunConfig = field(default_factory=RunConfig)
    init: str | None = None
    """The arm whose head it goes on from."""
    against: str | None = None
    """The arm it is compared with."""
    rounded: str | None = None
    """No training: the head of ``init`` in this format."""


@dataclass(frozen=True)
class Row:
    """What an arm accepts, prompt by prompt."""

    greedy: list[Acceptance]
    sampled: list[Acceptance]


def arms(options: Options) -> list[Arm]:
    k = options.draft_length
    base = RunConfig(
        target_quant=options.quant,
        data=tuple(map(str, options.data)),
        prompts=options.prompts,
        seed=options.seed,
        resume=True,
        answers=AnswersConfig(max_new_tokens=options.answer_tokens, temperature=options.temperature),
        eagle3=Eagle3Config(steps=k, draft_vocab_size=4096),
        medusa=MedusaConfig(heads=k),
        optim=OptimConfig(steps=options.steps),
        states=StatesConfig(mode="disk", folder=options.output_dir / "states"),
        selection=SelectionConfig(every=0),
        acceptance=AcceptanceConfig(draft_lengths=()),
    )

    def going_on(init: str, lr: float = 2e-4, **changes: Any) -> RunConfig:
        optim = OptimConfig(steps=options.tuning_steps, lr=lr)
        return replace(base, optim=optim, init_from=options.output_dir / init / "export", **changes)

    medusa = replace(
        base,
        head="medusa",
        optim=OptimConfig(steps=options.steps, lr=1e-3),
        states=StatesConfig(mode="disk", folder=options.output_dir / "states-medusa"),
    )

    def loss(**changes: Any) -> RunConfig:
        return replace(base, loss=LossConfig(**changes))

    on_16_bit = replace(
        base, target_quant="none", states=StatesConfig(mode="disk", folder=options.output_dir / "states-16-bit")
    )
    return [
        Arm("kl", base),
        Arm("lk", loss(kind="lk"), against="kl"),
        Arm("lk-alpha", loss(kind="lk-alpha"), against="kl"),
        Arm("kl-survival", loss(survival=True), against="kl"),
        Arm("lk-survival", loss(kind="lk", survival=True), against="kl"),
        Arm("eagle3.1", replace(base, eagle3=replace(base.eagle3, fc_norm=True, norm_output=True)), against="kl"),
        Arm("low-rank-64", replace(base, eagle3=replace(base.eagle3, output_rank=64)), against="kl"),
        Arm("kl-longer", going_on("kl"), init="kl", against="kl"),
        Arm("mxfp4-rounded", init="kl-longer", against="kl-longer", rounded="mxfp4"),
        Arm("mxfp4-qat", going_on("kl", draft_quant="mxfp4"), init="kl", against="kl-longer"),
        Arm("nvfp4-rounded", init="kl-longer", against="kl-longer", rounded="nvfp4a16"),
        Arm("nvfp4-qat", going_on("kl", draft_quant="nvfp4a16"), init="kl", against="kl-longer"),
        Arm("of-16-bit", on_16_bit),
        Arm("of-16-bit-tuned", going_on("of-16-bit"), init="of-16-bit", against="of-16-bit"),
        Arm("of-16-bit-norms-fc", going_on("of-16-bit", tune="norms-fc"), init="of-16-bit", against="of-16-bit"),
        Arm("of-16-bit-lora", going_on("of-16-bit", 1e-3, tune="lora"), init="of-16-bit", against="of-16-bit"),
        Arm("medusa", medusa),
        Arm("medusa-link", replace(medusa, medusa=replace(base.medusa, link=True)), against="medusa"),
    ]


def main(options: Options) -> None:
    wanted = _wanted(arms(options), options.only)
    environment = read_environment()
    for arm in wanted:
        if arm.rounded is None:
            print(f"\n== {arm.name}", flush=True)
            run(replace(arm.config, output_dir=options.output_dir / arm.name), environment)
            give_memory_back()
    name = resolve_target("demo", environment.cache_dir)
    target = load_target(name, load_recipe(options.quant), dtype=chosen_dtype("auto", "cpu"))
    prompts = PromptSet("heldout", tuple(read_conversations([demo_file("heldout")])[: options.measured_prompts]))
    found: dict[str, Row] = {}
    for arm in wanted:
        found[arm.name] = _measured(arm, options, target, load_tokenizer(name), prompts)
        _write(options, wanted, found)
    print(_table(options, wanted, found))


def _wanted(every: Sequence[Arm], only: Sequence[str]) -> list[Arm]:
    by_name = {arm.name: arm for arm in every}
    if unknown := [name for name in only if name not in by_name]:
        raise ValueError(f"there is no arm {unknown[0]!r}: choose from {', '.join(by_name)}")
    chosen = set(only or by_name)
    while more := {n for a in chosen for n in (by_name[a].init, by_name[a].against) if n} - chosen:
        chosen |= more
    return [arm for arm in every if arm.name in chosen]


def _measured(arm: Arm, options: Options, target: LowBitTarget, tokenizer: Any, prompts: PromptSet) -> Row:
    """Kept beside the run, so that a stopped measurement goes on."""
    source = arm.init if arm.rounded else arm.name
    assert source is not None
    export = options.output_dir / source / "export"
    kept = options.output_dir / f"{arm.name}.acceptance.json"
    asked = [options.measured_prompts, options.new_tokens, options.draft_length, options.sampled, options.seed]
    if kept.is_file() and kept.stat().st_mtime > (export / "manifest.json").stat().st_mtime:
        content = json.loads(kept.read_text(encoding="utf-8"))
        if content["asked"] == asked:
            return Row(*([Acceptance.of_row(row) for row in content[key]] for key in ("greedy", "sampled")))
    head = load_head(export, target)
    if arm.rounded:
        quantize_head(head, load_recipe(arm.rounded))
    print(f"measuring {arm.name}", flush=True)
    warm = Sampling(temperature=1.0)
    rules = [Rule(), *(Rule(sampling=warm, seed=options.seed + s) for s in range(options.sampled))]
    parts = []
    for rule in rules:
        plan = DraftPlan(length=options.draft_length, sampling=rule.sampling)
        how = Decoding(max_new_tokens=options.new_tokens, batch_size=options.measured_prompts, rule=rule)
        parts.append(decode(target, head, tokenizer, prompts, plan, how).per_prompt)
    sampled = [total(of_prompt, options.draft_length) for of_prompt in zip(*parts[1:], strict=True)]
    row = Row(parts[0], sampled)
    content = {"asked": asked, "greedy": [a.row for a in row.greedy], "sampled": [a.row for a in row.sampled]}
    write_text_atomically(kept, json.dumps(content) + "\n")
    return row


def _summary(arm: Arm, found: dict[str, Row], key: str) -> dict[str, Any]:
    mine: list[Acceptance] = getattr(found[arm.name], key)
    counts = total(mine, mine[0].draft_length)
    out: dict[str, Any] = {
        "acceptance_length": counts.length,
        "acceptance_rate": counts.rate,
        "ci95": length_interval(mine),
        "passes": counts.passes,
        "drafted_per_pass": counts.drafted_per_pass,
    }
    if arm.against:
        out["against"] = arm.against
        out["difference"], out["difference_ci95"] = length_difference(mine, getattr(found[arm.against], key))
    return out


def _write(options: Options, wanted: Sequence[Arm], found: dict[str, Row]) -> None:
    content = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine_facts(),
        "options": {key: str(value) for key, value in vars(options).items()},
        "arms": {
            arm.name: {key: _summary(arm, found, key) for key in ("greedy", "sampled")}
            for arm in wanted
            if arm.name in found
        },
    }
    write_text_atomically(options.json, json.dumps(content, indent=2) + "\n")
    write_text_atomically(options.json.with_suffix(".md"), _table(options, wanted, found) + "\n")


def _table(options: Options, wanted: Sequence[Arm], found: dict[str, Row]) -> str:
    k = options.draft_length
    lines = [
        f"Acceptance length (acceptance rate) at k = {k} on the {options.quant} target, {options.measured_prompts} "
        "held-out prompts; difference to the arm named, paired by prompt.",
        "",
        "| arm | against | T = 0 | difference (95 %) | T = 1 | difference (95 %) |",
        "|---|---|---|---|---|---|",
    ]
    for arm in (a for a in wanted if a.name in found):
        cells = []
        for key in ("greedy", "sampled"):
            s = _summary(arm, found, key)
            cells.append(f"{s['acceptance_length']:.3f} ({s['acceptance_rate']:.1%})")
            low, high = s.get("difference_ci95", (0.0, 0.0))
            cells.append(f"{s['difference']:+.3f} [{low:+.3f}, {high:+.3f}]" if arm.against else "")
        lines.append(f"| {arm.name} | {arm.against or ''} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options)))
