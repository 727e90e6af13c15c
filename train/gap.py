"""Measuring the gap between a low-bit target and its 16-bit reference, as a document.

Both targets read the same texts. A text is a list of examples, one per prompt; positions count where the next token
was written by the assistant, as they do in training.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from bitdraft.data.batches import make_batch
from bitdraft.data.chat import Example
from bitdraft.quant.gap import Gap, compare, compare_weights, joined
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.metrics import ratio_interval

_ROWS = 8  # sequences per forward pass: their captured states are the largest thing in memory beside the models


def measure(
    reference: LowBitTarget,
    low: LowBitTarget,
    texts: Mapping[str, Sequence[Example]],
    *,
    capture: Sequence[int],
    seed: int,
    report: Callable[[int], object] = lambda prompts: None,
) -> dict[str, Any]:
    """The entry of ``low`` in ``gap.json``: its weights, and the gap on every text, by name.

    ``capture``: layers whose states are compared, beside the final one. ``report`` is called with the number of
    prompts read since the last call, ``Σ len(texts)`` in all.
    """
    gaps = {name: gap_on(reference, low, examples, capture, report) for name, examples in texts.items()}
    return {
        "recipe": low.recipe.name,
        "recipe_fingerprint": low.recipe.fingerprint,
        "weights": {
            **asdict(compare_weights(reference.model, low.model)),
            "blocks_at_four": {kind: four / blocks for kind, (four, blocks) in low.applied.fours_by_kind().items()},
        },
        "texts": {
            name: _numbers(gap, [len(e.answer) for e in texts[name]], capture, seed) for name, gap in gaps.items()
        },
    }


@torch.no_grad()
def gap_on(
    reference: LowBitTarget,
    low: LowBitTarget,
    examples: Sequence[Example],
    capture: Sequence[int],
    report: Callable[[int], object] = lambda prompts: None,
) -> Gap:
    """The gap at every position that predicts an answer's token, in the order of the examples.

    Nothing of the reference is kept between two calls: running it again costs less than storing its states.
    """
    parts = []
    for start in range(0, len(examples), _ROWS):
        batch = make_batch(examples[start : start + _ROWS]).to(reference.device)
        written = batch.written()[:, 1:]  # [B, T - 1]: position t counts if token t + 1 was written
        ours, theirs = (_states(target, batch.tokens, capture)[:, :-1][written] for target in (reference, low))
        parts.append(compare(ours, theirs, reference.logits, low.logits, batch.tokens[:, 1:][written]))
        report(len(batch.ids))
    return joined(parts)


def _states(target: LowBitTarget, tokens: Tensor, capture: Sequence[int]) -> Tensor:
    """``[B, T, S, H]``: the captured layers, then the final state."""
    states = target.states(tokens, capture=capture)
    last = states.last_hidden[:, :, None]
    return torch.cat([states.captured, last], dim=2) if capture else last


def _numbers(gap: Gap, positions: Sequence[int], capture: Sequence[int], seed: int) -> dict[str, Any]:
    """The numbers of one text: means over its positions, intervals over its prompts."""
    tv = _mean(gap.tv)
    return {
        "prompts": len(positions),
        "positions": sum(positions),
        "top1_agreement": _mean(gap.agrees),
        "top1_agreement_ci95": list(mean_interval(gap.agrees, positions, seed)),
        "one_minus_tv": 1 - tv,
        "one_minus_tv_ci95": list(mean_interval(1 - gap.tv, positions, seed)),
        "tv": tv,
        "kl_low_reference": _mean(gap.kl_low_reference),
        "kl_reference_low": _mean(gap.kl_reference_low),
        "perplexity_reference": math.exp(_mean(gap.nll_reference)),
        "perplexity_low": math.exp(_mean(gap.nll_low)),
        "states": [
            {"layer": layer, "cosine": _mean(gap.cosine[:, i]), "relative_error": _mean(gap.relative_error[:, i])}
            for i, layer in enumerate([*capture, "final"])
        ],
    }


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def mean_interval(values_N: Tensor, positions_P: Sequence[int], seed: int) -> tuple[float, float]:
    """95 % bootstrap interval, over prompts, of the mean; prompt ``i`` has the next ``positions_P[i]`` values."""
    sums = [part.double().sum().item() for part in values_N.cpu().split(list(positions_P))]
    return ratio_interval(sums, positions_P, seed=seed)
