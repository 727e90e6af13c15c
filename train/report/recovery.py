"""Gap recovery: how much of what low bit costs a head is won back by training it on the low-bit target.

The gap matrix is {trained on} × {served on}. With α the acceptance, the first letter what the head was trained on and
the second what it was served on (B the reference recipe ``none``, Q a low-bit one):

    gain  α_QQ − α_BQ        gap  α_BB − α_BQ        recovery  R = gain / gap

R = 1: the low-bit target costs nothing any more. All cells answer the same prompts, so that one bootstrap draw takes
the same prompts in every cell (paired). The trap is the denominator: where the gap's interval reaches 0 or lies below
it, there is nothing to recover and R, a ratio of noise, is not given.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from bitdraft.speculators.metrics import FEWEST_PROMPTS, bootstrap_draws

Document = dict[str, Any]
"""JSON: a matrix of measured acceptance, one of its cells, or one result of a cell."""

REFERENCE = "none"
"""The recipe that leaves the target as it is."""

SETTINGS = (
    "target",
    "dtype",
    "temperature",
    "top_p",
    "top_k",
    "drafts",
    "rule",
    "tree",
    "tree_settings",
    "batch_size",
    "max_new_tokens",
    "seed",
)
"""Fields of a cell that decide its numbers, beside the head and the recipe. Only equal ones are compared."""

_RESAMPLES, _SEED = 2000, 0  # those of speculators/metrics.py


@dataclass(frozen=True)
class Measurement:
    """One head on one served target and one set at one draft length."""

    cell: Document
    result: Document

    @property
    def head(self) -> tuple[Any, ...]:
        """What tells one row of the gap matrix from another, the draft length aside."""
        cell = self.cell
        return (cell["kind"], cell["trained_on"], cell["head"], *(cell[field] for field in SETTINGS))

    @property
    def stop(self) -> tuple[str, float] | None:
        """Policy and threshold by which drafting stopped early, if it did."""
        stop = self.result["stopped_early"]
        return (stop["policy"], stop["threshold"]) if stop else None

    @property
    def comparable(self) -> tuple[Any, ...]:
        """Equal where two measurements differ in what the head was trained on and served on, and in no setting."""
        cell, result = self.cell, self.result
        settings = (cell[field] for field in SETTINGS)
        return (cell["kind"], *settings, result["set"], result["draft_length"], self.stop)

    @property
    def matched(self) -> bool:
        """The head was trained on what is served."""
        return bool(self.cell["trained_on"] == self.cell["served_on"])


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval."""

    point: float
    low: float
    high: float


@dataclass(frozen=True)
class Recovery:
    """Gap recovery in one measure of acceptance."""

    gain: Estimate
    gap: Estimate | None
    """None: the reference head was not measured on the reference target."""
    ratio: Estimate | None
    """None: not measured, or no gap to recover."""


@dataclass(frozen=True)
class Comparison:
    """A head trained on low bit against one trained on the reference, both served on low bit."""

    trained: Measurement
    reference: Measurement
    length: Recovery
    """In tokens per target pass."""
    rate: Recovery
    """In accepted / drafted."""


def measurements(matrix: Document) -> list[Measurement]:
    """The results of all cells, in order.

    Raises ``ValueError`` for a document of another version, without a result, or with one measurement twice.
    """
    if matrix["version"] != 1:
        raise ValueError(f"the acceptance matrix has version {matrix['version']}; this program reads version 1")
    found = [Measurement(cell, result) for cell in matrix["cells"] for result in cell["results"]]
    if not found:
        raise ValueError("the acceptance matrix holds no result; measure at least one draft length")
    seen = set()
    for m in found:
        key = (m.head, m.cell["served_on"], m.comparable)
        if key in seen:
            raise ValueError(
                f"cells: head {m.cell['head']} served on {m.cell['served_on']} is measured twice on {m.result['set']} "
                f"at draft length {m.result['draft_length']} with the same settings; keep one of the two"
            )
        seen.add(key)
    return found


def comparisons(found: Sequence[Measurement]) -> list[Comparison]:
    """Every head trained on another recipe than the reference, on every low-bit target, against each reference head."""
    trained = [m for m in found if m.cell["trained_on"] not in (None, REFERENCE) and m.cell["served_on"] != REFERENCE]
    compared = []
    for qq in trained:
        peers = [m for m in found if m.comparable == qq.comparable and m.cell["trained_on"] == REFERENCE]
        for bq in (m for m in peers if m.cell["served_on"] == qq.cell["served_on"]):
            bb = next((m for m in peers if m.head == bq.head and m.cell["served_on"] == REFERENCE), None)
            compared.append(Comparison(qq, bq, _recovery(qq, bq, bb, _lengths), _recovery(qq, bq, bb, _rates)))
    return compared


Draws = np.ndarray[tuple[int, int], np.dtype[np.float64]]
"""How often each prompt is taken [draws, prompts]: row 0 takes each once (the measurement itself), the others are
bootstrap resamples."""


def _recovery(
    qq: Measurement, bq: Measurement, bb: Measurement | None, measure: Callable[[Measurement, Draws], np.ndarray]
) -> Recovery:
    draws = _draws(_shared_prompts([m for m in (qq, bq, bb) if m is not None]))
    low = measure(bq, draws)
    gains = measure(qq, draws) - low
    if bb is None:
        return Recovery(_estimate(gains), None, None)
    gaps = measure(bb, draws) - low
    gap = _estimate(gaps)
    known = gap.low > 0 and len(bq.result["per_prompt"]) >= FEWEST_PROMPTS
    return Recovery(_estimate(gains), gap, _ratio(gains, gaps) if known else None)


def _shared_prompts(cells: Sequence[Measurement]) -> int:
    counts = [len(m.result["per_prompt"]) for m in cells]
    if len(set(counts)) > 1:
        raise ValueError(
            f"per_prompt of set {cells[0].result['set']} has {counts} prompts in cells that are compared prompt by "
            "prompt; measure all cells on the same prompts"
        )
    return counts[0]


@lru_cache(maxsize=4)
def _draws(prompts: int) -> Draws:
    drawn = bootstrap_draws(prompts, _RESAMPLES, _SEED)
    cells = drawn + prompts * np.arange(_RESAMPLES)[:, None]
    times = np.bincount(cells.ravel(), minlength=_RESAMPLES * prompts).reshape(_RESAMPLES, prompts)
    return np.concatenate([np.ones((1, prompts)), times])


def _totals(m: Measurement, draws: Draws) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(passes, drafted, accepted), each [draws]."""
    counts = np.array(m.result["per_prompt"], dtype=np.float64)  # [prompts, 2 + K]: passes, drafted, accepted at 1 … K
    passes, drafted, *accepted = (draws @ counts).T
    return passes, drafted, np.sum(accepted, axis=0)


def _lengths(m: Measurement, draws: Draws) -> np.ndarray:
    passes, _, accepted = _totals(m, draws)
    return (passes + accepted) / np.maximum(passes, 1)


def _rates(m: Measurement, draws: Draws) -> np.ndarray:
    _, drafted, accepted = _totals(m, draws)
    return accepted / np.maximum(drafted, 1)


def _estimate(values: np.ndarray) -> Estimate:
    """Percentile interval of the resamples ``values[1:]`` around the measured ``values[0]``."""
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return Estimate(float(values[0]), float(low), float(high))


def _ratio(gains: np.ndarray, gaps: np.ndarray) -> Estimate:
    """R. As a gap shrinks to 0, R grows without bound; the few draws beyond 0 stay there and do not change sign."""
    unbounded = np.copysign(np.inf, gains)
    ratios = np.divide(gains, gaps, out=unbounded, where=gaps > 0)
    # Nearest draws, not interpolated: between two infinities there is no number.
    low = np.quantile(ratios[1:], 0.025, method="lower")
    high = np.quantile(ratios[1:], 0.975, method="higher")
    return Estimate(float(ratios[0]), float(low), float(high))
