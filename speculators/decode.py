"""Greedy decoding with drafts: one loop for every head, and for none.

Each pass sends the newest token and ``k`` drafts through the target at once and keeps the drafts that the target
would have written itself, plus the token it adds. Sequences of a batch advance at their own pace
(``quant/attention/kv_cache.py``); finished ones leave the batch. Nothing is computed twice.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bitdraft.quant.attention.kv_cache import WORTH_DROPPING
from bitdraft.quant.target import LowBitTarget, TargetStates
from bitdraft.speculators.base import DraftContext, DraftHead, DraftState
from bitdraft.speculators.metrics import Acceptance
from bitdraft.speculators.verify import accepted_lengths


@dataclass
class Generation:
    """One prompt's greedy continuation and what it took."""

    tokens: list[int]
    passes: int = 0
    accepted_at: list[int] = field(default_factory=list)

    def acceptance(self) -> Acceptance:
        return Acceptance(len(self.accepted_at), 1, self.passes, tuple(self.accepted_at))


@dataclass
class Seconds:
    """Wall time of a decoding run. ``verify`` is the target (prefill included), ``draft`` the head."""

    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0

    def __add__(self, more: "Seconds") -> "Seconds":
        return Seconds(self.draft + more.draft, self.verify + more.verify, self.other + more.other)


class _Clock:
    """Charges the time since the last call to one of the three accounts."""

    def __init__(self, device: torch.device) -> None:
        self.seconds, self.device, self._since = Seconds(), device, time.perf_counter()

    def charge(self, account: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        setattr(self.seconds, account, getattr(self.seconds, account) + now - self._since)
        self._since = now


def generate(
    target: LowBitTarget,
    head: DraftHead | None,
    prompts: Sequence[Sequence[int]],
    *,
    draft_length: int,
    max_new_tokens: int,
    end_ids: set[int],
    batch_size: int,
    report: Callable[[int], object] = lambda finished: None,
) -> tuple[list[Generation], Seconds]:
    """Greedy continuations of ``prompts`` in order, end-of-turn token included, at most ``max_new_tokens`` each.

    ``head=None`` (with ``draft_length=0``) decodes plainly. Raises ``ValueError`` if the head drafts fewer than
    ``draft_length`` tokens.
    """
    if head is None and draft_length:
        raise ValueError("drafts need a head")
    if head is not None:
        head.fits(target)
        longest = head.longest_draft
        if draft_length < 1 or (longest is not None and draft_length > longest):
            raise ValueError(f"draft length {draft_length} is not one the head can draft (1 … {longest or 'any'})")
    generations = [Generation([], 0, [0] * draft_length) for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    seconds = Seconds()
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = _Batch(target, head, [prompts[i] for i in chosen], draft_length, max_new_tokens, end_ids)
        seconds += batch.run([generations[i] for i in chosen], report)
    return generations, seconds


class _Batch:
    """The state of one batch while it is decoded."""

    def __init__(
        self,
        target: LowBitTarget,
        head: DraftHead | None,
        prompts: Sequence[Sequence[int]],
        draft_length: int,
        max_new_tokens: int,
        end_ids: set[int],
    ) -> None:
        self.target, self.head, self.draft_length = target, head, draft_length
        self.max_new_tokens, self.end_ids = max_new_tokens, end_ids
        self.prompts = prompts
        self.lengths = torch.tensor([len(p) for p in prompts], device=target.device)  # [B] tokens in the cache
        slots = int(self.lengths.max()) + max_new_tokens + draft_length + 1
        self.cache = target.new_cache(slots)
        self.state: DraftState | None = head.new_state(slots) if head else None
        self.capture = head.capture_layers if head else ()
        self.clock = _Clock(target.device)

    @torch.no_grad()
    def run(self, generations: list[Generation], report: Callable[[int], object]) -> Seconds:
        context, newest = self._prefill()
        self._emit(generations, newest[:, None], torch.zeros_like(self.lengths))
        reported = 0
        while True:
            going = [i for i, g in enumerate(generations) if not self._finished(g)]
            report(len(generations) - len(going) - reported)
            reported = len(generations) - len(going)
            if not going:
                self.clock.charge("other")
                return self.clock.seconds
            if len(going) <= WORTH_DROPPING * len(generations):
                generations, reported = [generations[i] for i in going], 0
                context, newest = self._keep(torch.tensor(going, device=newest.device), context, newest)
            # Finished sequences that still ride along stay where they are.
            advances = torch.tensor([not self._finished(g) for g in generations], device=newest.device)
            self.clock.charge("other")
            tokens = newest[:, None]  # [B, 1]
            if self.head is not None:
                assert self.state is not None
                drafts = self.head.draft(context, self.state, self.draft_length)
                tokens = torch.cat([tokens, drafts], dim=1)  # [B, 1 + K]
                self.clock.charge("draft")
            states = self.target.states(tokens, capture=self.capture, cache=self.cache, lengths=self.lengths)
            choices = self.target.logits(states.last_hidden).argmax(-1)  # [B, 1 + K]
            self.clock.charge("verify")
            accepted = accepted_lengths(tokens[:, 1:], choices[:, :-1])  # [B]
            if self.head is not None:
                self._count(generations, accepted, advances)
            self._emit(generations, choices, accepted)
            # A sequence that has just ended stays where it was: it must not outgrow the cache while it rides along.
            goes_on = torch.tensor([not self._finished(g) for g in generations], device=newest.device)
            accepted = accepted * goes_on
            context = _context(states, choices, self.lengths, accepted)
            newest = torch.where(goes_on, choices.gather(1, accepted[:, None]).squeeze(1), newest)
            self.lengths = self.lengths + (accepted + 1) * goes_on

    def _prefill(self) -> tuple[DraftContext, Tensor]:
        """Run the prompts; the first token of every answer comes from here."""
        longest = int(self.lengths.max())
        padded = torch.tensor([[*p, *[0] * (longest - len(p))] for p in self.prompts], device=self.lengths.device)
        start = torch.zeros_like(self.lengths)
        states = self.target.states(padded, capture=self.capture, cache=self.cache, lengths=start)
        last = self.lengths - 1
        newest = self.target.logits(states.last_hidden[torch.arange(len(last)), last]).argmax(-1)  # [B]
        following = torch.cat([padded[:, 1:], padded[:, :1]], dim=1)
        following[torch.arange(len(last)), last] = newest
        self.clock.charge("verify")
        return _context(states, following, start, last), newest

    def _keep(self, rows: Tensor, context: DraftContext, newest: Tensor) -> tuple[DraftContext, Tensor]:
        """Let finished sequences leave."""
        self.cache.keep_rows(rows)
        if self.state is not None:
            self.state.keep_rows(rows)
        self.lengths = self.lengths[rows]
        kept = DraftContext(
            context.captured[rows],
            context.last_hidden[rows],
            context.next_tokens[rows],
            context.start[rows],
            context.newest[rows],
        )
        return kept, newest[rows]

    def _emit(self, generations: list[Generation], choices: Tensor, accepted: Tensor) -> None:
        """Append what each sequence gained, up to the end of its answer or the length limit."""
        for generation, row, count in zip(generations, choices.tolist(), accepted.tolist(), strict=True):
            for token in row[: count + 1]:
                if self._finished(generation):
                    break
                generation.tokens.append(token)

    def _count(self, generations: list[Generation], accepted: Tensor, advances: Tensor) -> None:
        """Engines count whole passes, also where the answer ended within one."""
        for generation, count, counts in zip(generations, accepted.tolist(), advances.tolist(), strict=True):
            if counts:
                generation.passes += 1
                for position in range(count):
                    generation.accepted_at[position] += 1

    def _finished(self, generation: Generation) -> bool:
        tokens = generation.tokens
        return bool(tokens) and (len(tokens) >= self.max_new_tokens or tokens[-1] in self.end_ids)


def _context(states: TargetStates, following: Tensor, start: Tensor, newest: Tensor) -> DraftContext:
    return DraftContext(states.captured, states.last_hidden, following, start, newest)
