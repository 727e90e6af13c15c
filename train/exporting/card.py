"""The model card: what an exported head is, what it accepts, and how it is served."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FRONT_MATTER_LICENSE = re.compile(r"\A---\n(?:.*\n)*?license:[ \t]*(\S.*)\n(?:.*\n)*?---", re.MULTILINE)
UNKNOWN_LICENSE = "unknown"
ROW_KEYS = (
    *("set", "prompts", "draft_length", "passes", "acceptance_length", "acceptance_rate"),
    *("per_position", "ci95"),
)
"""What the card says of a result of ``acceptance.json``."""
Row = Mapping[str, Any]
"""``ROW_KEYS`` of a result, and who measured it (``by``) and how (``served_on``, ``dtype``, …)."""


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What a model card says. Everything was measured or is in the files beside it."""

    kind: str
    layout: str
    engines: Sequence[str]
    target: str
    """The 16-bit model, as the user named it."""
    base_model: str | None
    """Its id on the hub, if it is one."""
    license: str
    with_target: bool
    """Whether the served target lies beside the head."""
    recipe: str
    numerics: str
    """What the recipe does to the target, in a few lines."""
    captured: Sequence[int]
    vocabulary: tuple[int, int]
    """Tokens of the draft and of the target."""
    head_recipe: str | None
    trained: Mapping[str, Any]
    """What the head says of its training: recipe, data, steps."""
    results: Sequence[Row]
    """Those of these very files first."""
    made: str
    """Version, date and machine of the export and of its measurement."""
    commands: Mapping[str, str]
    """By engine."""


def model_card(facts: CardFacts) -> str:
    """``README.md`` of an export: Markdown with the front matter that model hubs read."""
    parts = [
        _front_matter(facts),
        f"# {facts.kind} draft head for {facts.target} served in {facts.recipe}",
        f"A draft head for speculative decoding in the layout `{facts.layout}` ({_readers(facts)}). It drafts "
        "for the target below and for no other; decoding stays lossless: the target verifies every draft.",
        "## Serve",
        _where(facts),
        *(f"{engine}:\n\n```sh\n{text}\n```" for engine, text in facts.commands.items()),
        "## Acceptance",
        _table(facts.results),
        "Chains of drafts, T the temperature; an acceptance length counts tokens per target pass, the bonus token "
        "included. `position k`: share of passes that accepted drafts up to there. Rows compare where target, set and "
        "tokens are the same.",
        "## The target as it is served",
        f"{facts.target} in {facts.recipe}:\n\n```\n{facts.numerics}\n```",
        "## The head",
        _head(facts),
        "## License",
        _license(facts),
        f"Written by {facts.made}. `manifest.json` holds the sha256 of every file.",
    ]
    return "\n\n".join(parts) + "\n"


def license_of(folder: Path) -> str:
    """What a model folder says its license is: its model card's front matter, or else ``unknown``."""
    card = folder / "README.md"
    found = _FRONT_MATTER_LICENSE.search(card.read_text(encoding="utf-8")) if card.is_file() else None
    return found.group(1).strip().strip("\"'") if found else UNKNOWN_LICENSE


def _front_matter(facts: CardFacts) -> str:
    lines = ["---", "library_name: bitdraft"]
    if facts.license != UNKNOWN_LICENSE:
        lines.append(f"license: {facts.license}")
    if facts.base_model:
        lines.append(f"base_model: {facts.base_model}")
    return "\n".join([*lines, f"tags: [speculative-decoding, {facts.kind}]", "---"])


def _readers(facts: CardFacts) -> str:
    return ", ".join(facts.engines) or "which no engine computes for this kind of head"


def _where(facts: CardFacts) -> str:
    if not facts.engines:
        return "Not yet: no engine computes such heads. Bitdraft does, as in `scripts/measure_acceptance.py`."
    if facts.with_target:
        where = "In this folder, where `head` and `target` lie."
    else:
        where = f"`HEAD` is this folder, `TARGET` the checkpoint of {facts.target} in {facts.recipe}."
    if facts.layout == "eagle3-speculators":
        where += " For SGLang and TensorRT-LLM, export with `--format eagle3-original`."
    return where


def _table(results: Sequence[Row]) -> str:
    longest = max(len(r["per_position"]) for r in results)
    heads = ["measured by", "target in", "dtype", "T", "set", "prompts", "tokens", "draft length"]
    heads += ["acceptance length", "95 %", "acceptance rate", *(f"position {i + 1}" for i in range(longest))]
    lines = [heads, ["---"] * len(heads)]
    for r in results:
        interval = "too few prompts" if r["ci95"] is None else "{:.3f} … {:.3f}".format(*r["ci95"])
        told = (r[key] for key in ("by", "served_on", "dtype", "temperature", "set", "prompts", "max_new_tokens"))
        numbers = [r["draft_length"], f"{r['acceptance_length']:.3f}", interval, f"{r['acceptance_rate']:.1%}"]
        shares = [f"{share:.1%}" for share in r["per_position"]]
        lines.append([*map(str, [*told, *numbers]), *shares, *[""] * (longest - len(shares))])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


_SAID = {
    "recipe": "trained on the target in",
    "recipe_fingerprint": "fingerprint of that recipe",
    "target_fingerprint": "fingerprint of the target",
    "answers_by": "training answers written by the target in",
    "data_fingerprint": "fingerprint of the training prompts",
    "examples": "training examples",
    "steps": "training steps",
    "seed": "seed",
}


def _head(facts: CardFacts) -> str:
    drafted, known = facts.vocabulary
    lines = [f"- drafts {drafted:,} of the target's {known:,} tokens"]
    if facts.captured:
        lines.append(f"- reads the target's states before layers {', '.join(map(str, facts.captured))}")
    weights = f"`{facts.head_recipe}`, quantized after training" if facts.head_recipe else "bfloat16, or as they came"
    lines.append(f"- its weights: {weights}")
    said = [f"- {words}: `{facts.trained[key]}`" for key, words in _SAID.items() if facts.trained.get(key) is not None]
    return "\n".join([*lines, *(said or ["- its files do not say what it was trained on"])])


def _license(facts: CardFacts) -> str:
    unknown = facts.license == UNKNOWN_LICENSE
    return (
        f"The target's license is **{facts.license}**, and a head trained on its states and its text comes with the "
        "duties of that license."
        + " It could not be read from the target's files: see the target's own page."
        * unknown
    )
