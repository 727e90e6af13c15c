"""Which examples each optimizer step trains on, rank by rank and pack by pack."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bitdraft.data.batches import epoch_batches
from bitdraft.data.capture import predicting_rows
from bitdraft.data.chat import Example
from bitdraft.data.packing import document_length, first_fit
from bitdraft.train.config import OptimConfig
from bitdraft.train.loss_terms import sequence_cap
from bitdraft.train.weighting import Weighting


@dataclass(frozen=True)
class StepPacks:
    """One optimizer step's examples."""

    of_rank: list[list[list[int]]]
    """For every rank its packs, for every pack its examples."""
    weights: dict[int, float]
    """By example, what its positions weigh: 1, or less where it would have more than its share of the step."""
    positions: float
    """Weight of the supervised positions of all examples."""
    tokens: int

    @property
    def rounds(self) -> int:
        """How many packs the busiest rank has."""
        return max(map(len, self.of_rank))


def step_packs(
    first: int,
    examples: Sequence[Example],
    optim: OptimConfig,
    seed: int,
    ranks: int,
    cap: float = 1.0,
    weighting: Weighting | None = None,
) -> Iterator[tuple[int, StepPacks]]:
    """Steps from ``first`` to the last, with their packs; epochs follow each other without end. No example has more
    than the share ``cap`` of a step's weight. ``weighting``: how often each is drawn, by default once an epoch.

    The order depends on ``seed`` and the number of ranks alone, not on ``first``, and how a step is cut into packs
    changes none of its examples.
    """
    epoch = 0
    drawn = weighting or Weighting.even(len(examples))
    waiting: list[list[int]] = []
    for step in range(optim.steps):
        while len(waiting) < ranks:
            waiting += epoch_batches(
                examples, optim.batch_tokens, seed=seed, epoch=epoch, weights=drawn.of_epoch(epoch)
            )
            epoch += 1
        share, waiting = waiting[:ranks], waiting[ranks:]
        if step >= first:
            yield step, _packed(share, examples, optim.pack_tokens, cap)


def _packed(share: Sequence[Sequence[int]], examples: Sequence[Example], capacity: int, cap: float) -> StepPacks:
    of_rank = []
    for batch in share:
        lengths = [document_length(examples[i]) for i in batch]
        of_rank.append([[batch[k] for k in pack] for pack in first_fit(lengths, capacity)])
    chosen = [i for batch in share for i in batch]
    counts = [behind - begin for begin, behind in (predicting_rows(examples[i]) for i in chosen)]
    factors = sequence_cap(counts, cap).tolist()
    positions = sum(factor * count for factor, count in zip(factors, counts, strict=True))
    tokens = sum(document_length(examples[i]) for i in chosen)
    return StepPacks(of_rank, dict(zip(chosen, factors, strict=True)), positions, tokens)
