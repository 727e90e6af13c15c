"""What it is worth to train on a pool that is weighted to look like the traffic.

    python scripts/bench/traffic_gain.py --sets SETS --json docs/results/traffic.json

``SETS`` is a folder of prompt files, one kind of text each (``MIXES`` below names them). A pool and traffic are drawn
from them in very different shares; the low-bit target answers all of it (``scripts/regenerate.py``), the pool is
matched to the traffic (``scripts/match_traffic.py``, which holds a test split back), and heads are trained for the same
number of answer tokens with every seed:

* ``uniform``: on the pool as it is;
* ``weighted``: on the pool by its weights;
* ``oracle``: on other text in the traffic's shares, as if enough traffic could be had;
* ``wrong``: on the pool, weighted for other traffic;
* ``small-uniform`` and ``small-weighted``: the same with a part of the pool, whose wanted records come again and again.

Acceptance is measured on the traffic's test split by greedy speculative decoding; differences are paired by prompt,
with 95 % bootstrap intervals over prompts. Finished parts are kept under ``--output-dir`` and not done again.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from bitdraft.data.conversation import Conversation
from bitdraft.data.demo_target import resolve_target
from bitdraft.data.sampling import uniforms
from bitdraft.data.sources import read_conversations
from bitdraft.data.traffic.outputs import record_line
from bitdraft.data.traffic.split import contaminated
from bitdraft.quant.files import write_text_atomically
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget, load_target, load_tokenizer
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.eagle3 import Eagle3Config
from bitdraft.speculators.load import load_head
from bitdraft.speculators.metrics import Acceptance, length_difference, length_interval, total
from bitdraft.train.config import (
    AcceptanceConfig,
    AnswersConfig,
    OptimConfig,
    RunConfig,
    SelectionConfig,
    StatesConfig,
    WeightsConfig,
)
from bitdraft.train.environment import chosen_dtype, give_memory_back, machine_facts, read_environment, stop_cleanly
from bitdraft.train.measuring.acceptance import Decoding, decode
from bitdraft.train.measuring.prompt_sets import PromptSet
from bitdraft.train.run import run

MIXES = {
    # file: share of the pool, of the traffic, of the wrong traffic
    "gsm8k_train": (0.12, 0.30, 0.03),
    "gpteacher_code": (0.12, 0.40, 0.03),
    "nq_open": (0.16, 0.05, 0.30),
    "oasst_prompts": (0.18, 0.12, 0.12),
    "gpteacher_roleplay": (0.16, 0.03, 0.30),
    "awesome_prompts": (0.13, 0.03, 0.16),
    "t0_tasks": (0.13, 0.07, 0.06),
}
POOL, TRAFFIC, WRONG = range(3)
ARMS = {
    # what is trained on, and the traffic that it is weighted for
    "uniform": ("pool", None),
    "weighted": ("pool", "traffic"),
    "oracle": ("oracle", None),
    "wrong": ("pool", "wrong"),
    "small-uniform": ("small", None),
    "small-weighted": ("small", "traffic"),
}
AGAINST = {"weighted": "uniform", "oracle": "uniform", "wrong": "uniform", "small-weighted": "small-uniform"}
LONGEST_PROMPT = 1000  # bytes


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train on a pool as it is, weighted for its traffic, and weighted for other traffic."""

    sets: Path
    """Folder with a JSONL file of each kind of text."""
    json: Path
    """The numbers; a table goes beside it."""
    output_dir: Path = Path("runs/traffic")
    quant: str = "mxfp4"
    pool: int = 4000
    """Records of the pool."""
    small: int = 1600
    """Records of the pool's part, and of the text that the oracle is trained on."""
    traffic: int = 600
    """Records of the traffic and of the wrong traffic."""
    answer_tokens: int = 96
    steps: int = 240
    seeds: int = 3
    draft_length: int = 3
    new_tokens: int = 64
    arms: tuple[str, ...] = tuple(ARMS)
    """Heads to train, the first three at least."""

    def __post_init__(self) -> None:
        unknown = [arm for arm in self.arms if arm not in ARMS]
        if unknown or not {"uniform", "weighted", "oracle"} <= set(self.arms):
            raise ValueError(f"--arms are {', '.join(ARMS)}, the first three at least; got {' '.join(self.arms)}")


def main(options: Options) -> None:
    answered = {name: _answered(options, name) for name in _drawn(options)}
    texts = {
        "pool": (answered["small"], answered["rest"]),
        "small": (answered["small"],),
        "oracle": (answered["oracle"],),
    }
    test = read_conversations([_matched(options, texts["small"], answered["traffic"], "split") / "test.jsonl"])
    # Of the pool nothing is left for either matching to drop: its arms train on the same records.
    wrong = read_conversations([_matched(options, texts["small"], answered["wrong"], "wrong-split") / "test.jsonl"])
    texts = {
        "pool": tuple(_without(path, [*test, *wrong], "cleaner") for path in texts["pool"]),
        "small": tuple(_without(path, test, "clean") for path in texts["small"]),
        "oracle": tuple(_without(path, test, "clean") for path in texts["oracle"]),
    }
    environment, chosen = read_environment(), {arm: ARMS[arm] for arm in options.arms}
    for seed in range(options.seeds):
        for arm, (text, wanted) in chosen.items():
            print(f"\n== {arm}, seed {seed}", flush=True)
            matched = _matched(options, texts[text], answered[wanted], f"{text}-{wanted}") if wanted else None
            run(_config(options, arm, seed, texts[text], matched), environment)
            give_memory_back()
    name = resolve_target("demo", environment.cache_dir)
    target = load_target(name, load_recipe(options.quant), dtype=chosen_dtype("auto", "cpu"))
    tokenizer = load_tokenizer(name)
    prompts = PromptSet("test", tuple(c.opening for c in test))
    lengths: dict[str, list[list[Acceptance]]] = {arm: [] for arm in chosen}
    for seed in range(options.seeds):
        for arm in chosen:
            lengths[arm].append(_measured(options, target, tokenizer, prompts, options.output_dir / f"{arm}-{seed}"))
    content = _content(options, lengths, len(prompts.ids))
    write_text_atomically(options.json, json.dumps(content, indent=2) + "\n")
    write_text_atomically(options.json.with_suffix(".md"), _page(content))
    print(_page(content))


def _drawn(options: Options) -> list[str]:
    """Write the prompts of pool, traffic, wrong traffic and the oracle's text, which share no prompt."""
    wanted = {
        "small": (POOL, options.small),
        "traffic": (TRAFFIC, options.traffic),
        "wrong": (WRONG, options.traffic),
        "oracle": (TRAFFIC, options.small),
        "rest": (POOL, options.pool - options.small),
    }
    parts: dict[str, list[Conversation]] = {name: [] for name in wanted}
    for stem, shares in MIXES.items():
        path = options.sets / f"{stem}.jsonl"
        opened = {c.key: replace(c, category=stem) for c in map(_asked, read_conversations([path]))}
        short = {k: c for k, c in opened.items() if sum(len(m.content.encode()) for m in c.messages) <= LONGEST_PROMPT}
        keys = sorted(short)
        shuffled = iter([short[keys[i]] for i in np.argsort(uniforms(keys, "traffic gain"))])
        for name, (column, count) in wanted.items():
            records = list(islice(shuffled, round(shares[column] * count)))
            if len(records) < round(shares[column] * count):
                raise ValueError(f"{path} has too few records of up to {LONGEST_PROMPT} bytes")
            parts[name] += records
    for name, records in parts.items():
        path = options.output_dir / f"{name}.jsonl"
        if not path.is_file():
            write_text_atomically(path, "".join(f"{record_line(record)}\n" for record in records))
    return list(wanted)


def _asked(conversation: Conversation) -> Conversation:
    """The first question, so that every record is one answer."""
    return conversation.opening


def _answered(options: Options, name: str) -> Path:
    out = options.output_dir / f"{name}.answered.jsonl"
    settings = ["--target-quant", options.quant, "--max-new-tokens", str(options.answer_tokens), "--batch-size", "64"]
    _script("regenerate.py", [str(options.output_dir / f"{name}.jsonl"), "--out", str(out), *settings])
    return out


def _without(text: Path, test: Sequence[Conversation], name: str) -> Path:
    """The records that do not nearly hold a prompt of ``test``."""
    out = text.with_name(text.name.replace(".answered", f".{name}"))
    if not out.is_file():
        records = read_conversations([text])
        alike = {place for place, _ in contaminated(records, test)}
        lines = text.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line, record in zip(lines, records, strict=True) if record.source not in alike]
        write_text_atomically(out, "".join(kept))
    return out


def _matched(options: Options, pool: Sequence[Path], traffic: Path, name: str) -> Path:
    out = options.output_dir / f"matched-{name}"
    if not (out / "report.json").is_file():
        _script("match_traffic.py", [*map(str, pool), "--traffic", str(traffic), "--out", str(out)])
    return out


def _script(name: str, arguments: Iterable[str]) -> None:
    subprocess.run([sys.executable, str(Path(__file__).parents[1] / name), *arguments], check=True)


def _config(options: Options, arm: str, seed: int, data: Sequence[Path], matched: Path | None) -> RunConfig:
    return RunConfig(
        target_quant=options.quant,
        data=tuple(map(str, data)),
        allow_contamination=("heldout",),  # the default set, on which nothing is measured here
        seed=seed,
        resume=True,
        output_dir=options.output_dir / f"{arm}-{seed}",
        answers=AnswersConfig(source="file", max_new_tokens=options.answer_tokens),
        weights=WeightsConfig(file=matched / "weights.parquet" if matched else None),
        eagle3=Eagle3Config(steps=options.draft_length, draft_vocab_size=4096),
        optim=OptimConfig(steps=options.steps),
        states=StatesConfig(mode="disk", folder=options.output_dir / f"states-{ARMS[arm][0]}"),
        selection=SelectionConfig(every=0),
        acceptance=AcceptanceConfig(draft_lengths=()),
        tracker="none",
    )


def _measured(
    options: Options, target: LowBitTarget, tokenizer: Any, prompts: PromptSet, folder: Path
) -> list[Acceptance]:
    """By prompt; kept beside the run, so that a stopped measurement goes on."""
    kept = folder / "test.acceptance.json"
    asked = [options.new_tokens, options.draft_length, list(prompts.ids)]
    if kept.is_file():
        content = json.loads(kept.read_text(encoding="utf-8"))
        if content["asked"] == asked:
            return [Acceptance.of_row(row) for row in content["greedy"]]
    print(f"measuring {folder.name}", flush=True)
    how = Decoding(max_new_tokens=options.new_tokens, batch_size=64)
    head = load_head(folder / "export", target)
    found = decode(target, head, tokenizer, prompts, DraftPlan(length=options.draft_length), how).per_prompt
    write_text_atomically(kept, json.dumps({"asked": asked, "greedy": [a.row for a in found]}) + "\n")
    return found


def _content(options: Options, lengths: dict[str, list[list[Acceptance]]], prompts: int) -> dict[str, Any]:
    k = options.draft_length
    pooled = {arm: [total(of, k) for of in zip(*lengths[arm], strict=True)] for arm in lengths}  # seeds, by prompt
    content: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine_facts(),
        "options": {key: str(value) for key, value in vars(options).items()},
        "prompts": prompts,
        "matching": {name: _matching(options, name) for name in _matchings(lengths)},
        "arms": {arm: _arm(lengths[arm], pooled[arm], k) for arm in lengths},
    }
    for arm, other in _pairs(lengths):
        mean, interval = length_difference(pooled[arm], pooled[other])
        by_seed = [length_difference(a, b)[0] for a, b in zip(lengths[arm], lengths[other], strict=True)]
        content[f"{arm}_minus_{other}"] = {"mean": mean, "ci95": interval, "by_seed": by_seed}
    return content


def _pairs(arms: Iterable[str]) -> list[tuple[str, str]]:
    known = set(arms)
    return [pair for pair in AGAINST.items() if known.issuperset(pair)]


def _matchings(arms: Iterable[str]) -> list[str]:
    return [f"{text}-{wanted}" for text, wanted in (ARMS[arm] for arm in arms) if wanted]


def _matching(options: Options, name: str) -> dict[str, float]:
    report = json.loads((options.output_dir / f"matched-{name}" / "report.json").read_text(encoding="utf-8"))
    return {key: report[key] for key in ("records", "ess_fraction", "auc_before", "auc_after", "kl_before", "kl_after")}


def _arm(by_seed: Sequence[Sequence[Acceptance]], pooled: Sequence[Acceptance], k: int) -> dict[str, Any]:
    whole = total(pooled, k)
    return {
        "acceptance_length": whole.length,
        "acceptance_rate": whole.rate,
        "ci95": length_interval(pooled),
        "by_seed": [total(of_seed, k).length for of_seed in by_seed],
    }


def _page(content: dict[str, Any]) -> str:
    settings, matching = content["options"], content["matching"]["pool-traffic"]
    lines = [
        "# What matching the traffic is worth",
        "",
        f"`{content['command']}`, {content['date']}, {content['machine']}.",
        "",
        f"SmolLM2-135M-Instruct served in {settings['quant']}, EAGLE-3 heads, {settings['steps']} steps of 640 answer "
        f"tokens, {settings['seeds']} seeds. Pool: {settings['pool']} records, the small one {settings['small']} of "
        f"them; traffic: {settings['traffic']} records from the same kinds of text in other shares, of which "
        f"{content['prompts']} are the test split. Acceptance length at {settings['draft_length']} drafted tokens per "
        f"pass, greedy, {settings['new_tokens']} new tokens, all seeds together; differences are paired by prompt "
        "(95 % bootstrap over prompts).",
        "",
        f"The weights: effective sample {matching['ess_fraction']:.2f} of the pool; a classifier tells pool from "
        f"traffic with AUC {matching['auc_before']:.3f} before and {matching['auc_after']:.3f} after weighting "
        f"(0.5: not at all); KL by group {matching['kl_before']:.3f} and {matching['kl_after']:.3f}.",
        "",
        "| trained on | acceptance length | rate | by seed | difference | to |",
        "|---|---|---|---|---|---|",
    ]
    for arm, row in content["arms"].items():
        other = dict(_pairs(content["arms"])).get(arm, "")
        seeds = ", ".join(f"{length:.3f}" for length in row["by_seed"])
        difference = _interval(content[f"{arm}_minus_{other}"]) if other else ""
        lines.append(
            f"| {arm} | {row['acceptance_length']:.3f} | {row['acceptance_rate']:.1%} | {seeds} | {difference} | "
            f"{other} |"
        )
    if content["oracle_minus_uniform"]["mean"] > 0:
        share = content["weighted_minus_uniform"]["mean"] / content["oracle_minus_uniform"]["mean"]
        lines += ["", f"Weighting captures {share:.0%} of what text in the traffic's own shares brings."]
    return "\n".join([*lines, ""])


def _interval(found: dict[str, Any]) -> str:
    low, high = found["ci95"]
    return f"{found['mean']:+.3f} [{low:+.3f}, {high:+.3f}]"


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options, description=Options.__doc__)))
