"""What passes and draft steps cost here, measured in seconds."""

import time
from collections.abc import Callable
from statistics import median

import torch

from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftContext, Drafter
from bitdraft.speculators.draft_length import CostModel
from bitdraft.speculators.drafting import DraftPlan

_PAST = 128  # tokens of context
_REPEATS = 7


@torch.no_grad()
def measured_cost(target: LowBitTarget, drafter: Drafter, *, length: int, batch: int) -> CostModel:
    """Seconds of target passes over 1 … ``batch · (1 + length)`` tokens, and of one draft step of ``batch`` sequences.

    Medians over random tokens behind a context of 128.
    """
    points: dict[int, float] = {}
    for rows in sorted({1, max(1, batch // 4), max(1, batch // 2), batch}):
        for tokens in (1, 1 + length):
            points[rows * tokens] = _pass_seconds(target, rows, tokens)
    # Cost never falls with more tokens; where the clock says otherwise it is noise.
    seconds = torch.tensor([points[n] for n in sorted(points)]).cummax(0).values.tolist()
    step = _draft_seconds(target, drafter, batch, length)
    return CostModel(draft=step, verified=tuple(zip(sorted(points), seconds, strict=True)))


def _pass_seconds(target: LowBitTarget, rows: int, tokens: int) -> float:
    cache = target.new_cache(_PAST + tokens)
    lengths = torch.full((rows,), _PAST, device=target.device)
    target.prefill(_ids(target, rows, _PAST), lengths, cache=cache)
    ids, nothing = _ids(target, rows, tokens), torch.zeros_like(lengths)

    def once() -> None:
        states = target.states(ids, cache=cache, lengths=lengths)
        target.top_tokens(states.last_hidden.flatten(0, 1))
        cache.commit(torch.zeros_like(ids), nothing)

    return _seconds(once, target.device)


def _draft_seconds(target: LowBitTarget, drafter: Drafter, rows: int, length: int) -> float:
    """One step: the whole chain's time over its length."""
    cache = target.new_cache(_PAST + length + 1)
    lengths = torch.full((rows,), _PAST, device=target.device)
    ids = _ids(target, rows, _PAST)
    states = target.prefill(ids, lengths, cache=cache, capture=drafter.capture_layers)
    state = drafter.new_state(_PAST + 2 * length + 2, cache)
    plan = DraftPlan(length=length)
    last = lengths - 1
    context = DraftContext(
        states.captured, states.last_hidden, ids, torch.zeros_like(lengths), last, first_tokens=ids[:, 0]
    )
    nothing = torch.empty(rows, 0, device=target.device)
    drafter.propose(context, state, plan, nothing)
    # A pass's context is a few rows behind what the drafter already has.
    few = slice(_PAST - 2, _PAST)
    context = DraftContext(
        states.captured[:, few], states.last_hidden[:, few], ids[:, few], last - 1, torch.ones_like(last)
    )
    return _seconds(lambda: drafter.propose(context, state, plan, nothing), target.device) / length


def _ids(target: LowBitTarget, rows: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, target.vocab_size, (rows, tokens), generator=generator).to(target.device)


def _seconds(once: Callable[[], object], device: torch.device) -> float:
    taken = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        once()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    return median(taken)
