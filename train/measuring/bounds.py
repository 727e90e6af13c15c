"""How well the 16-bit target itself would imitate the low-bit one: no head trained on 16 bit alone can do better."""

from collections.abc import Mapping, Sequence
from typing import Any

from bitdraft.data.chat import Example
from bitdraft.quant.target import LowBitTarget
from bitdraft.train.gap import gap_on, mean_interval


def upper_bounds(
    reference: LowBitTarget, low: LowBitTarget, answers: Mapping[str, Sequence[Sequence[Example]]], *, seed: int
) -> dict[str, Any]:
    """``1 − TV`` and top-1 agreement of the two targets on the low-bit target's own answers, by set and in all.

    Per position they bound the acceptance of a draft that imitates ``reference`` perfectly: the former at temperature
    1 (Leviathan et al. 2023), the latter when both choose greedily. ``answers``: by set, the turns of each
    conversation.
    """
    by_set = {name: _numbers(reference, low, turns, seed) for name, turns in answers.items()}
    together = [turns for conversations in answers.values() for turns in conversations]
    everything = next(iter(by_set.values())) if len(by_set) == 1 else _numbers(reference, low, together, seed)
    return {"reference": reference.recipe.name, **everything, "sets": by_set}


def _numbers(
    reference: LowBitTarget, low: LowBitTarget, answers: Sequence[Sequence[Example]], seed: int
) -> dict[str, Any]:
    written = [turns for turns in answers if turns]
    gap = gap_on(reference, low, [e for turns in written for e in turns], capture=())
    positions = [sum(len(e.answer) for e in turns) for turns in written]
    return {
        "one_minus_tv": 1 - float(gap.tv.double().mean()),
        "one_minus_tv_ci95": list(mean_interval(1 - gap.tv, positions, seed)),
        "top1_agreement": float(gap.agrees.double().mean()),
        "top1_agreement_ci95": list(mean_interval(gap.agrees, positions, seed)),
    }
