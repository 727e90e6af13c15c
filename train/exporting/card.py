"""The model card: what an exported head is, what it accepts, and how it is served."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FRONT_MATTER_LICENSE = re.compile(r"\A---\n(?:.*\n)*?license:[ \t]*(\S.*)\n(?:.*\n)*?---", re.MULTILINE)
UNKNOWN_LICENSE = "unknown"

Row = Mapping[str, Any]
"""A result of ``acceptance.json``, and who measured it (``by``) and how (``served_on``, ``dtype``, …)."""


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What a model card says. Everything was measured or is in the files beside it."""

    kind: str
    layout: str
    engines: Sequence[str]
    target: str
    """The 16-bit model's id or folder, as the user named it."""
    license: str
    served: str
    """The target that is served, as the commands name it."""
    recipe: str
    numerics: str
    """What the recipe does to the target, in a few lines."""
    head_recipe: str | None
    trained: Mapping[str, Any]
    """What the head says of its training: recipe, data, steps."""
    results: Sequence[Row]
    measured_on: str
    """Date of the newest rows."""
    commands: Mapping[str, str]
    """By engine."""


def model_card(facts: CardFacts) -> str:
    """``README.md`` of an export: Markdown with the front matter that model hubs read."""
    parts = [
        _front_matter(facts),
        f"# {facts.kind} draft head for {facts.target} served in {facts.recipe}",
        f"A draft head for speculative decoding in the layout `{facts.layout}` ({', '.join(facts.engines)}). It drafts "
        "for the target below and for no other; decoding stays lossless: the target verifies every draft.",
        "## Serve",
        *(f"{engine}:\n\n```sh\n{text}\n```" for engine, text in facts.commands.items()),
        "## Acceptance",
        _table(facts.results),
        "Chains of drafts; an acceptance length counts tokens per target pass, the bonus token included. `position k`: "
        f"share of passes that accepted drafts up to there. These files were measured on {facts.measured_on}.",
        "## The target as it is served",
        f"`{facts.served}`, recipe `{facts.recipe}`:\n\n```\n{facts.numerics}\n```",
        "## Training",
        _training(facts),
        "## License",
        f"The target's license is **{facts.license}**, and a head trained on its states and its text comes with the "
        "duties of that license."
        + (
            " It could not be read from the target's files: see the target's own page."
            if facts.license == UNKNOWN_LICENSE
            else ""
        ),
        "`manifest.json` holds the sha256 of every file.",
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
    if not facts.target.startswith((".", "/")):  # a folder on somebody's disk is no model id
        lines.append(f"base_model: {facts.target}")
    return "\n".join([*lines, f"tags: [speculative-decoding, {facts.kind}, {facts.recipe.partition(',')[0]}]", "---"])


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


def _training(facts: CardFacts) -> str:
    lines = [f"- {words}: `{facts.trained[key]}`" for key, words in _SAID.items() if facts.trained.get(key) is not None]
    weights = f"`{facts.head_recipe}`, quantized after training" if facts.head_recipe else "bfloat16"
    return "\n".join(
        [*(lines or ["The files do not say what the head was trained on."]), f"- the head's weights: {weights}"]
    )
