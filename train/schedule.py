"""Learning rates by step."""

import math

from bitdraft.train.config import OptimConfig


def learning_rate(optim: OptimConfig, step: int) -> float:
    """Rate of step ``step`` (from 0): linear warm-up, then down to ``final`` of the peak.

    ``cosine``: half a cosine over the rest (Loshchilov & Hutter 2017, arXiv:1608.03983). ``wsd``: the peak, and a
    straight fall in the last ``decay`` of all steps (Hu et al. 2024, arXiv:2404.06395).
    """
    warmup = max(1, round(optim.warmup * optim.steps))
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if optim.schedule == "cosine":
        progress = (step - warmup) / max(1, optim.steps - warmup)
        share = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        falling = max(1, min(optim.steps - warmup, round(optim.decay * optim.steps)))
        share = min(1.0, (optim.steps - step) / falling)
    return optim.lr * (optim.final + (1 - optim.final) * share)
