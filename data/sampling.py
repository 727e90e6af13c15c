"""Which records are drawn, and in what order: by seed and content alone.

Every record's random numbers are a hash of the seed and its key, so neither the order of files nor the number of
processes changes what is drawn.

* A subset without replacement: Gumbel top-k (Efraimidis and Spirakis 2006; Kool et al. 2019, arXiv:1903.06059). The
  first record is drawn with its weight's share, the second with its share of the rest, and so on.
* An epoch: systematic resampling (Madow 1949). A record of weight ``w`` (mean 1) comes ``⌊w⌋`` or ``⌈w⌉`` times, on
  average ``w`` times, which varies less than independent draws; equal weights give every record once.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np
from torch.utils.data import Sampler


def uniforms(keys: Sequence[str], *salt: object) -> np.ndarray:
    """``[n]`` float64 in (0, 1): one for every key, by a hash of the key and ``salt``; other salts are independent."""
    person = blake2b(repr(salt).encode(), digest_size=16).digest()
    digests = b"".join(blake2b(key.encode(), digest_size=8, key=person).digest() for key in keys)
    return ((np.frombuffer(digests, "<u8") >> np.uint64(11)) + 0.5) / 2.0**53


def gumbel_top_k(keys: Sequence[str], weights: np.ndarray, k: int, seed: int) -> np.ndarray:
    """``[k]`` indices, ascending, drawn without replacement in proportion to ``weights``; fewer if fewer have weight.

    Raises ``ValueError`` for weights that are negative or not finite.
    """
    _check(weights, len(keys))
    with np.errstate(divide="ignore"):
        scores = np.log(weights) - np.log(-np.log(uniforms(keys, "subset", seed)))
    best = np.lexsort((np.asarray(keys), -scores))[:k]  # equal scores: copies of one record
    return np.sort(best[weights[best] > 0])


def epoch_order(keys: Sequence[str], weights: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
    """Indices of one epoch's ``n`` draws, as many as there are keys, in random order.

    Raises ``ValueError`` for weights that are negative, not finite or all zero.
    """
    _check(weights, len(keys))
    ranks = uniforms(keys, "epoch", seed, epoch)
    line = np.lexsort((np.asarray(keys), ranks))  # the order in which systematic resampling walks
    ends = np.cumsum(weights[line])
    if not ends[-1] > 0:
        raise ValueError("all weights are zero: there is nothing to train on")
    ends *= len(keys) / ends[-1]
    ends[-1] = len(keys)  # free of rounding: n draws in all
    start = float(uniforms(["start"], "epoch", seed, epoch)[0])
    # Draws lie at start, start + 1, …; record i takes those in its stretch of the line. Sums of equal weights are off
    # by rounding, which must not move a draw from one record to its neighbour.
    reached = np.floor(np.round(ends, 9) - start).astype(int) + 1
    reached[-1] = len(keys)
    copies = np.diff(reached, prepend=0)
    drawn = np.repeat(line, copies)
    copy = np.arange(len(drawn)) - np.repeat(np.cumsum(copies) - copies, copies)
    names = [f"{keys[i]}/{number}" for i, number in zip(drawn.tolist(), copy.tolist(), strict=True)]
    return drawn[np.argsort(uniforms(names, "place", seed, epoch), kind="stable")]


class WeightedSampler(Sampler[int]):
    """An epoch's draws for a ``DataLoader``: the same on every process, which accelerate then deals out.

    ``set_epoch`` moves on to other draws; a run that stopped within an epoch skips what it has seen
    (``accelerate.skip_first_batches``) or is given ``load_state_dict``.
    """

    def __init__(self, keys: Sequence[str], weights: np.ndarray, *, seed: int) -> None:
        _check(weights, len(keys))
        self.keys, self.weights, self.seed = keys, weights, seed
        self.epoch, self.taken = 0, 0

    def __len__(self) -> int:
        return len(self.keys) - self.taken

    def __iter__(self) -> Iterator[int]:
        order = epoch_order(self.keys, self.weights, seed=self.seed, epoch=self.epoch)
        while self.taken < len(order):
            self.taken += 1
            yield int(order[self.taken - 1])
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.taken = epoch, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.taken = state["epoch"], state["taken"]


def _check(weights: np.ndarray, count: int) -> None:
    if weights.shape != (count,):
        raise ValueError(f"{count} records need as many weights, got {weights.shape}")
    if not np.isfinite(weights).all() or (weights < 0).any():
        bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        raise ValueError(f"weights must be finite and not negative: number {bad[0] + 1} is {weights[bad[0]]}")
