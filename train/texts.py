"""The text of a run: what is trained on, what the head is selected by and what it is measured on share no prompt."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from bitdraft.data.chat import Example
from bitdraft.data.conversation import Conversation
from bitdraft.data.sampling import gumbel_top_k
from bitdraft.data.sources import demo_file, read_conversations
from bitdraft.data.traffic.split import contaminated
from bitdraft.data.weights_file import Weights, read_weights
from bitdraft.quant.files import sha256_of
from bitdraft.train.config import RunConfig
from bitdraft.train.weighting import Weighting


@dataclass(frozen=True)
class Texts:
    """Conversations by their use."""

    training: list[Conversation]
    selection: list[Conversation]
    heldout: list[Conversation]
    weights: Weights | None

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Of contents that a configuration only names, and that may change under their names."""
        found = {"data": _digest(self.training), "selection.data": _digest(self.selection)}
        return found | ({"weights.file": sha256_of(self.weights.path)} if self.weights else {})


def read_texts(config: RunConfig, say: Callable[[str], None]) -> Texts:
    """Raises ``ValueError`` for data that cannot be read, for weights of other data, and where records to train on hold
    prompts, nearly, that the head is selected by or measured on."""
    weights = read_weights(config.weights.file) if config.weights.file else None
    data = read_conversations(
        config.data or [demo_file("train")], skip_bad=config.skip_bad, seed=config.seed, report=say
    )
    if weights is None:
        data = data[: config.prompts]
    else:
        shares = weights.of(data)
        wanted = len(data) if config.prompts is None else config.prompts
        data = [data[i] for i in gumbel_top_k([c.key for c in data], shares, wanted, config.seed)]
    training, selection = _selection(config, data, say)
    heldout = read_conversations(config.acceptance.data or [demo_file("heldout")])
    _guard(config, training, heldout, config.acceptance.data or [demo_file("heldout")], "measured on")
    return Texts(training, selection, heldout, weights)


def weighting_of(config: RunConfig, examples: Sequence[Example], weights: Weights | None) -> Weighting:
    """A subset that was drawn by weight is trained on evenly."""
    if weights is None:
        return Weighting.even(len(examples))
    weighting = Weighting.read(examples, weights, config.weights.headroom)
    return weighting if config.prompts is None else replace(weighting, weights=np.ones(len(examples)))


def _selection(
    config: RunConfig, data: list[Conversation], say: Callable[[str], None]
) -> tuple[list[Conversation], list[Conversation]]:
    """What is trained on, and the traffic by which the head is selected."""
    chosen = config.selection
    if not chosen.every:
        return data, []
    if chosen.data or not config.data:
        files = chosen.data or (demo_file("traffic"),)
        traffic = read_conversations(files)[: chosen.prompts]
        _guard(config, data, traffic, files, "selected by")
        return data, traffic
    held = min(chosen.prompts, len(data) // 5)
    if held == 0:
        raise ValueError(
            f"the data has {len(data)} records, too few to hold some back for selection: give selection.data, or set "
            "selection.every to 0"
        )
    training, traffic = data[:-held], data[-held:]
    alike = {place for place, _ in contaminated(training, traffic)}
    kept = [c for c in training if c.source not in alike]
    if alike:
        say(f"{len(training) - len(kept)} records nearly ask what the {held} held back for selection ask: left out")
    if not kept:
        raise ValueError(
            "the data's records nearly all ask the same, so that none can be held back for selection: give "
            "selection.data, or set selection.every to 0"
        )
    return kept, traffic


def _guard(
    config: RunConfig, training: Sequence[Conversation], held: Sequence[Conversation], files: Sequence[Path], use: str
) -> None:
    """``ValueError`` if training records nearly hold a prompt of ``held``, unless its files are allowed by name."""
    if all(path.stem in config.allow_contamination for path in files):
        return
    found = contaminated(training, held)
    if found:
        (mine, its), names = found[0], " ".join(path.stem for path in files)
        raise ValueError(
            f"{len(found)} training records nearly hold prompts that the head is {use}, the first: {mine} ({its}); "
            f"leave them out, or allow it with --allow-contamination {names}"
        )


def _digest(conversations: list[Conversation]) -> str:
    texts = json.dumps([[m.as_dict() for m in c.messages] for c in conversations])
    return hashlib.sha256(texts.encode()).hexdigest()[:16]
