"""How far a drafter's own probabilities can be trusted, and where to stop drafting because of them.

A chain drafter says at every depth how probable its best token is, its *confidence*. Calibrated on recorded passes
it is the probability that the draft at this depth is accepted if all before it were; the product down to a depth is
the draft's *survival*. A pass *tried* position ``j`` if it accepted all drafts before ``j``. What was drafted behind
the first rejection says nothing, since it continues a text that the target did not write: every function here that
is given passes looks at tried positions only.

Whatever stops a draft may read the probabilities up to the depth in question, never the token drawn from them: what
is kept must still be a draw from the drafter's distribution, or speculative sampling no longer yields the target's
(Leviathan et al. 2023, appendix A.1). Confidences at later depths depend on that token, so they are as forbidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isfinite

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

# P recorded pass, B sequence, K drafted position, n trial.

FEWEST_TRIES = 100  # below it the standard error of a log temperature passes a quarter
CERTAIN = 1e-6  # confidences this close to 0 or 1 have no usable log odds in fp32


@dataclass(frozen=True)
class Calibration:
    """Temperature and shift of the log odds, per position (temperature scaling: Guo et al. 2017; with a shift: Platt
    1999). The shift is there because a temperature alone moves no probability across ½, so it cannot mend a head that
    is too sure throughout, as one is whose reduced vocabulary lacks some of the target's tokens.
    """

    temperature: tuple[float, ...]
    shift: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.temperature or len(self.temperature) != len(self.shift):
            raise ValueError(
                f"calibration needs a temperature and a shift for each position, "
                f"got {len(self.temperature)} and {len(self.shift)}"
            )
        if not all(isfinite(t) and t > 0 for t in self.temperature):
            raise ValueError(f"calibration.temperature must be positive and finite, got {list(self.temperature)}")
        if not all(isfinite(s) for s in self.shift):
            raise ValueError(f"calibration.shift must be finite, got {list(self.shift)}")

    def calibrated(self, confidence: Tensor) -> Tensor:
        """``sigmoid(logit(confidence) / temperature + shift)``: ``[..., k]``, the first ``k`` positions.

        Raises ``ValueError`` for more positions than were calibrated.
        """
        positions = confidence.shape[-1]
        if positions > len(self.temperature):
            raise ValueError(
                f"the calibration covers {len(self.temperature)} positions, not {positions}: "
                f"record passes of draft length {positions} and fit it on them"
            )
        temperature, shift = (confidence.new_tensor(v[:positions]) for v in (self.temperature, self.shift))  # [k]
        return torch.sigmoid(torch.logit(confidence, eps=CERTAIN) / temperature + shift)


def outcomes(accepted: Tensor, positions: int) -> tuple[Tensor, Tensor]:
    """Which positions the passes tried and which drafts they accepted, both ``[P, K]`` bool, from ``accepted`` ``[P]``.

    ``confidence[tried]`` and ``succeeded[tried]`` are the trials that the measures below want.
    """
    position = torch.arange(positions, device=accepted.device)
    return accepted[:, None] >= position, accepted[:, None] > position


def fit(confidence: Tensor, accepted: Tensor, *, shift: bool = True) -> Calibration:
    """The calibration under which ``confidence`` ``[P, K]`` explains ``accepted`` ``[P]`` best, position by position.

    Each position is fitted on the passes that tried it; one that fewer than ``FEWEST_TRIES`` tried takes over its
    predecessor's values, and ``ValueError`` says so where there is none. ``shift=False`` fits temperatures alone.
    The passes must be verified as the calibration will be used: a draft that is accepted rarely by greedy
    verification may be accepted often by sampling.
    """
    tried, succeeded = outcomes(accepted, confidence.shape[1])
    if len(accepted) < FEWEST_TRIES:
        raise ValueError(
            f"a calibration needs at least {FEWEST_TRIES} passes, got {len(accepted)}: give more traffic prompts"
        )
    fitted: list[tuple[float, float]] = []
    for position in range(confidence.shape[1]):
        here = tried[:, position]
        enough = int(here.sum()) >= FEWEST_TRIES
        fitted.append(
            _most_likely(confidence[here, position], succeeded[here, position], shift) if enough else fitted[-1]
        )
    temperature, shifts = zip(*fitted, strict=True)
    return Calibration(temperature, shifts)


def _most_likely(confidence: Tensor, success: Tensor, shift: bool) -> tuple[float, float]:
    """Temperature and shift of one position, from its trials ``[n]``.

    A standard normal prior on the logarithm of the inverse temperature and on the shift, worth a few trials, keeps
    both finite where all or no drafts were accepted, or all confidences are equal.
    """
    log_odds, outcome = torch.logit(confidence.double(), eps=CERTAIN), success.double()
    parameters = torch.zeros(2, dtype=torch.float64, device=confidence.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([parameters], max_iter=100, tolerance_grad=1e-8, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        predicted = log_odds * parameters[0].exp() + shift * parameters[1]
        value = binary_cross_entropy_with_logits(predicted, outcome, reduction="sum") + parameters.square().sum() / 2
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    inverse, moved = parameters.detach().tolist()
    return exp(-inverse), moved


@dataclass(frozen=True)
class Bin:
    """Trials of similar confidence: a point of the reliability diagram."""

    confidence: float
    accepted: float
    count: int


def reliability(confidence: Tensor, success: Tensor, bins: int = 10) -> list[Bin]:
    """Mean confidence and share accepted of the trials ``[n]``, in ``bins`` of equal counts, ascending.

    Equal counts, not equal widths: most confidences lie close to 1, and a bin of three trials says nothing. Equal
    confidences share a bin, so there may be fewer.
    """
    values, outcome = confidence.double(), success.double()
    ranks = torch.searchsorted(values.sort().values, values)  # the first place of each among the sorted
    members = [ranks * bins // len(values) == b for b in range(bins)]
    return [Bin(float(values[m].mean()), float(outcome[m].mean()), int(m.sum())) for m in members if m.any()]


def expected_calibration_error(confidence: Tensor, success: Tensor, bins: int = 10) -> float:
    """How far confidence and share accepted differ, on average over the trials ``[n]``, within ``reliability``'s bins.

    Never quite 0: even a perfect confidence shows about ``0.4 · sqrt(bins / n)`` at most, by chance.
    """
    found = reliability(confidence, success, bins)
    return sum(b.count * abs(b.confidence - b.accepted) for b in found) / sum(b.count for b in found)


def area_under_curve(confidence: Tensor, success: Tensor) -> float:
    """The probability that an accepted trial has a higher confidence than a rejected one, ties counted half.

    Mann and Whitney's U over the number of pairs; NaN where the trials ``[n]`` are all accepted or all rejected.
    """
    _, place, count = torch.unique(confidence, return_inverse=True, return_counts=True)
    rank = (count.cumsum(0) - (count - 1) / 2).double()[place]  # [n], from 1; equal ones share their mean rank
    accepted = int(success.sum())
    pairs = accepted * (len(success) - accepted)
    return (float(rank[success].sum()) - accepted * (accepted + 1) / 2) / pairs if pairs else float("nan")


def kept_lengths(calibrated: Tensor, threshold: float) -> Tensor:
    """Drafts kept per sequence, ``[B]``: those before the first whose survival lies below ``threshold``.

    ``calibrated``: ``[B, K]``, each position's probability of acceptance if all before it are. Whether position ``j``
    is kept depends on positions up to ``j`` only, as losslessness demands (see the top of this file).
    """
    return (calibrated.cumprod(1) >= threshold).sum(1)


@dataclass(frozen=True)
class Truncation:
    """What truncating recorded passes at a threshold would leave of them."""

    threshold: float
    drafted: float
    """Drafts per pass."""
    rate: float
    """Accepted / drafted; 0 if nothing is drafted."""
    length: float
    """Tokens per pass, bonus included."""
    share: float
    """``length`` relative to that of the untruncated passes."""


def truncation_table(
    confidence: Tensor, accepted: Tensor, calibration: Calibration, thresholds: Sequence[float]
) -> list[Truncation]:
    """Passes of fixed draft length (``confidence`` ``[P, K]``, ``accepted`` ``[P]``), replayed at each threshold.

    Exact for every pass by itself: from the same start the truncated draft is a prefix of the recorded one, and of it
    exactly ``min(accepted, kept)`` tokens are accepted. Not exact for the run: a truncated run emits fewer tokens per
    pass and so starts passes where the recorded one had none. Choose a threshold and draw the frontier with this;
    report what a run with that threshold measures.
    """
    calibrated = calibration.calibrated(confidence)
    return [_truncation(t, kept_lengths(calibrated, t), accepted) for t in thresholds]


def _truncation(threshold: float, kept: Tensor, accepted: Tensor) -> Truncation:
    drafted, still_accepted, untruncated = (int(x.sum()) for x in (kept, torch.minimum(kept, accepted), accepted))
    passes = len(accepted)
    return Truncation(
        threshold=threshold,
        drafted=drafted / passes,
        rate=still_accepted / max(drafted, 1),
        length=1 + still_accepted / passes,
        share=(passes + still_accepted) / (passes + untruncated),
    )
