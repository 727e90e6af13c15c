"""Checking that decoding with drafts wrote what plain decoding writes.

In fp32 the two must be identical; where inputs are quantized, sums are made in fp64 for it (``quant/steady_sums.py``).
In bf16 a pass over several tokens rounds differently from a pass over one, which can flip the choice between two
tokens whose logits are equal up to that. Such a flip is excused, counted and shown; nothing else is. How far rounding
moves the two is measured where it matters, at the very prefix: the same tokens in several batch shapes, without any
cache, so that a fault of the cache or of the loop cannot excuse itself. A fault that writes a second choice as close as
that is excused with it: only fp32 proves, bf16 catches what is far off.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitdraft.quant.steady_sums import can_steady
from bitdraft.quant.target import LowBitTarget

_SHAPES = ((1, 0), (2, 0), (3, 0), (5, 0), (1, 3), (1, 13), (1, 50), (2, 29))
"""Rows and padding of the passes that show what rounding does."""
_SPREAD = 4.0
"""Standard deviations of that within which a difference is put down to rounding."""


@dataclass(frozen=True)
class Lossless:
    """Outcome of the check. ``excused`` answers differ from a near-tie on; ``failures`` say what differs and where."""

    checked: int
    excused: int
    failures: tuple[str, ...]

    @property
    def failed(self) -> int:
        return len(self.failures)


def compare_with_plain(
    target: LowBitTarget,
    ids: Sequence[str],
    prompts: Sequence[Sequence[int]],
    drafted: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
) -> Lossless:
    """Compare answers written with drafts and without, prompt by prompt."""
    excused, failures = 0, []
    for name, prompt, mine, its in zip(ids, prompts, drafted, plain, strict=True):
        if list(mine) == list(its):
            continue
        shared = min(len(mine), len(its))
        at = next((i for i in range(shared) if mine[i] != its[i]), shared)
        if at == shared:
            failures.append(f"{name}: one answer ends after {at} tokens, the other goes on")
            continue
        gap, noise = gap_and_noise(target, [*prompt, *its[:at]], mine[at], its[at])
        if not must_be_identical(target) and gap <= noise:
            excused += 1
        else:
            failures.append(
                f"{name}: token {at} differs from plain decoding, where the two logits lie {gap:.3g} apart and "
                f"rounding moves them by {noise:.3g}"
            )
    return Lossless(len(ids), excused, tuple(failures))


def must_be_identical(target: LowBitTarget) -> bool:
    """Whether nothing excuses a difference: fp32, and no token's result depends on what is beside it in the pass."""
    if target.dtype != torch.float32 or target.recipe.scales_whole_passes:
        return False
    return not target.recipe.rounds_on_the_way or can_steady(target.model)


@torch.no_grad()
def gap_and_noise(target: LowBitTarget, prefix: list[int], a: int, b: int) -> tuple[float, float]:
    """Distance of the logits of tokens ``a`` and ``b`` after ``prefix``, and how far rounding can move it.

    The same distance is computed in passes of several shapes, without a cache. Rounding can move it by ``_SPREAD``
    times its standard deviation over them, and by four bf16 units in the last place, two of each logit.
    """
    row = torch.tensor([prefix], device=target.device)
    logits = torch.stack([_next_logits(target, row, len(prefix), *shape) for shape in _SHAPES])  # [S, V]
    distance = (logits[:, a] - logits[:, b]).double()
    moved = _SPREAD * float(distance.std())
    magnitude = max(float(logits[:, [a, b]].abs().max()), 1.0)
    units = 4 * torch.finfo(torch.bfloat16).eps * 2.0 ** math.floor(math.log2(magnitude))
    return abs(float(distance.mean())), max(moved, units)


def _next_logits(target: LowBitTarget, row: Tensor, length: int, rows: int, padding: int) -> Tensor:
    """``[V]`` fp32 behind the first ``length`` tokens of ``row`` ``[1, length]``, in a pass of ``rows`` such rows."""
    ids = torch.cat([row, row.new_zeros(1, padding)], dim=1).expand(rows, -1)
    return target.logits(target.states(ids).last_hidden[:1, length - 1])[0].float()
