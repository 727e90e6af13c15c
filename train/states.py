"""Where the loop gets the target's states from: computed at every step, or once and kept in memory or on disk."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bitdraft.data.capture import DocumentStates, capture, capture_pack, groups_for
from bitdraft.data.chat import Example
from bitdraft.data.packing import Pack, document_length, make_pack
from bitdraft.data.state_cache import CacheIdentity, StateCache, write_cache
from bitdraft.quant.target import LowBitTarget, TargetStates
from bitdraft.speculators.documents import Documents
from bitdraft.train.config import StatesConfig
from bitdraft.train.weighting import Weighting

_AUTO_LIMIT = 2 * 1024**3  # bytes of states that `auto` keeps


@dataclass(frozen=True)
class Supervision:
    """A pack as a head is trained on it."""

    pack: Pack
    states: TargetStates
    documents: Documents
    first_choices: Tensor  # [N] the target's greedy next token, where ``supervised``; 0 elsewhere
    log_normalisers: Tensor  # [N] fp32 logsumexp of the target's logits over its whole vocabulary, likewise
    supervised: Tensor  # [N] bool: the token that the target predicts here was written by the assistant
    weights: Tensor  # [D] what each document's positions weigh
    groups: Tensor  # [D] int64: the group of each document, one of ``group_count``
    group_count: int


class StateSource:
    """Packs of examples with the target's states. All modes give the same supervision."""

    def __init__(
        self,
        target: LowBitTarget,
        examples: Sequence[Example],
        layers: Sequence[int],
        steps: int,
        config: StatesConfig,
        *,
        uses: int,
        cache: Path,
        weighting: Weighting | None = None,
    ) -> None:
        """``layers``: what the head captures; ``steps``: how many tokens ahead it drafts. ``uses``: how many examples
        will be asked for in all: keeping states pays from the second use on. ``cache``: the folder of states on disk,
        which is filled unless it holds them. ``weighting``: has the examples' groups, by default one of all.
        """
        self.target, self.examples, self.layers, self.steps = target, examples, tuple(layers), steps
        self.weighting = weighting or Weighting.even(len(examples))
        self._read: Callable[[int], DocumentStates] | None = None
        tokens = sum(map(document_length, examples))
        needed = tokens * (len(self.layers) + 1) * target.hidden_size * target.dtype.itemsize
        if config.mode == "disk":
            kept = _on_disk(target, examples, self.layers, config, cache)
            self._read = lambda i: kept.read(i, target.device)
        elif config.mode == "memory" or (config.mode == "auto" and needed <= _AUTO_LIMIT and uses > len(examples)):
            self._read = dict(capture(target, examples, self.layers, label="target states")).__getitem__

    def passes(self, indices: Sequence[int]) -> int:
        """How often ``supervision`` of these examples runs the target."""
        if self._read is not None:
            return 0
        return len(groups_for(self.target, [document_length(self.examples[i]) for i in indices]))

    def supervision(self, indices: Sequence[int], weights: Mapping[int, float] | None = None) -> Supervision:
        """The examples at ``indices``, as one pack on the target's device. ``weights``: what the positions of each
        example weigh, by default 1."""
        chosen = [self.examples[i] for i in indices]
        if self._read is None:
            states = capture_pack(self.target, chosen, self.layers)
        else:
            states = DocumentStates.packed([self._read(i) for i in indices])
        factors = [1.0 if weights is None else weights[i] for i in indices]
        groups = self.weighting.groups[list(indices)].tolist()
        return supervise(
            make_pack(chosen), states, self.steps, factors, groups, self.weighting.group_count, self.target.device
        )


def supervise(
    pack: Pack,
    states: DocumentStates,
    steps: int,
    weights: Sequence[float],
    groups: Sequence[int],
    group_count: int,
    device: torch.device,
) -> Supervision:
    """Where drafting begins: at every row from which some of the ``steps`` predicts a supervised position."""
    drafts = []
    for begin, end, prompt in zip(pack.bounds[:-1], pack.bounds[1:], pack.prompt_lengths, strict=True):
        first = begin + max(0, prompt - 1 - steps)
        drafts.append((first, max(first, end - 2)))
    return Supervision(
        pack.to(device),
        TargetStates(states.captured.to(device), states.last_hidden.to(device)),
        Documents(pack.bounds, tuple(drafts), str(device)),
        states.first_choices.to(device),
        states.log_normalisers.to(device),
        pack.predicts_written().to(device),
        torch.tensor(weights, device=device),
        torch.tensor(groups, device=device),
        group_count,
    )


def _on_disk(
    target: LowBitTarget, examples: Sequence[Example], layers: Sequence[int], config: StatesConfig, folder: Path
) -> StateCache:
    identity = CacheIdentity.of(target, examples, layers, config.storage)

    def produce(indices: Sequence[int]) -> Iterator[tuple[int, DocumentStates]]:
        return capture(target, examples, layers, indices=indices)

    write_cache(folder, identity, examples, produce, shard_tokens=config.shard_tokens, label="target states")
    return StateCache.open(folder, identity)
