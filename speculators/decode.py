"""Decoding with drafts: one loop for every drafter, and for none.

Each pass sends the newest token and a tree of drafts through the target at once, keeps a path of it and adds a token of
the target's own. Sequences of a batch advance at their own pace (``quant/attention/kv_cache.py``); finished ones leave
the batch. Nothing is computed twice.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bitdraft.quant.attention.kv_cache import WORTH_DROPPING
from bitdraft.quant.steady_sums import can_steady, steady_sums
from bitdraft.quant.target import LowBitTarget, TargetStates
from bitdraft.speculators.base import DraftContext, Drafter, DraftState, rows_at
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.metrics import Acceptance
from bitdraft.speculators.sampling import Sampling, draw
from bitdraft.speculators.tree import DraftTree, chain_tree
from bitdraft.speculators.verify import Verdict, greedy, sampled, typical, uniforms_needed


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How the target's tokens are chosen, and drafts with them."""

    sampling: Sampling = field(default_factory=Sampling)
    typical: bool = False
    """Medusa's typical acceptance instead of speculative sampling: more drafts pass, and the output's distribution is
    no longer the target's."""
    seed: int = 0
    """Of the random numbers; every prompt has a stream of its own, whatever batch it is in. (Where a batch decides
    together how long its drafts are, ``EarlyStop.cost``, what the numbers are used for depends on the batch.)"""

    def __post_init__(self) -> None:
        if self.typical and self.sampling.is_greedy:
            raise ValueError("typical acceptance needs a temperature above 0")

    @property
    def is_lossless(self) -> bool:
        return not self.typical

    def verdict(self, tree: DraftTree, logits: Tensor, uniforms: Tensor) -> Verdict:
        """What stays of ``tree``. ``logits``: ``[B, N, V]``. ``uniforms``: ``[B, uniforms_needed(N)]`` at least."""
        if self.sampling.is_greedy:
            return greedy(tree, logits)
        rule = typical if self.typical else sampled
        return rule(tree, logits, uniforms, self.sampling.probabilities)


@dataclass
class Generation:
    """One prompt's continuation and what it took."""

    tokens: list[int]
    counts: Acceptance
    trace: list[tuple[list[float], int]] = field(default_factory=list)
    """Per pass the drafter's confidence at each depth and how many drafts were accepted, where the plan asks for it."""


@dataclass
class Seconds:
    """Wall time of a decoding run. ``verify`` is the target (prefill included), ``draft`` the drafter."""

    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0

    def __add__(self, more: "Seconds") -> "Seconds":
        return Seconds(self.draft + more.draft, self.verify + more.verify, self.other + more.other)

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.other


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
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    plan: DraftPlan | None = None,
    rule: Rule | None = None,
    max_new_tokens: int,
    end_ids: set[int],
    batch_size: int,
    report: Callable[[int], object] = lambda finished: None,
) -> tuple[list[Generation], Seconds]:
    """Continuations of ``prompts`` in order, end-of-turn token included, at most ``max_new_tokens`` each.

    Without ``drafter`` and ``plan`` decodes plainly; without ``rule``, greedily. Raises ``ValueError`` if the drafter
    does not fit the target or cannot draft as deep as the plan asks.
    """
    if (drafter is None) != (plan is None):
        raise ValueError("drafts need both a drafter and a plan")
    if drafter is not None and plan is not None:
        drafter.fits(target)
        longest = drafter.longest_draft
        if longest is not None and plan.length > longest:
            what = "draft length" if plan.shape is None else "a draft tree of depth"
            raise ValueError(f"{what} {plan.length} is more than the {drafter.kind} drafter has (1 … {longest})")
        if plan.shape is not None and not drafter.drafts_trees:
            raise ValueError(f"the {drafter.kind} drafter drafts chains only: leave out the tree")
        if (plan.stop or plan.confidence) and not drafter.has_confidence:
            raise ValueError(f"the {drafter.kind} drafter has no probabilities: leave out --confidence and --stop")
    depth = plan.length if plan else 0
    generations = [Generation([], Acceptance.none(depth, prompts=1)) for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    seconds = Seconds()
    with steady_sums(target.model) if _needs_steady_sums(target) else nullcontext():
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            batch = _Batch(target, drafter, plan, rule or Rule(), prompts, chosen, max_new_tokens, end_ids)
            seconds += batch.run([generations[i] for i in chosen], report)
    return generations, seconds


def _needs_steady_sums(target: LowBitTarget) -> bool:
    """Whether a last bit could decide about a token: fp32 alone promises that it does not."""
    return target.dtype == torch.float32 and target.recipe.rounds_on_the_way and can_steady(target.model)


class _Batch:
    """The state of one batch while it is decoded."""

    def __init__(
        self,
        target: LowBitTarget,
        drafter: Drafter | None,
        plan: DraftPlan | None,
        rule: Rule,
        prompts: Sequence[Sequence[int]],
        chosen: Sequence[int],
        max_new_tokens: int,
        end_ids: set[int],
    ) -> None:
        self.target, self.drafter, self.plan, self.rule = target, drafter, plan, rule
        self.max_new_tokens, self.end_ids = max_new_tokens, end_ids
        self.prompts = [prompts[i] for i in chosen]
        self.chance = [torch.Generator().manual_seed(rule.seed * 1_000_003 + i) for i in chosen]
        self.lengths = torch.tensor([len(p) for p in self.prompts], device=target.device)  # [B] tokens in the cache
        nodes = plan.nodes if plan else 0
        self.draws = (plan.draws if plan else 0, 0 if rule.sampling.is_greedy else uniforms_needed(nodes + 1))
        slots = int(self.lengths.max()) + max_new_tokens + max(nodes, plan.slots if plan else 0) + 1
        self.cache = target.new_cache(slots)
        self.state: DraftState | None = drafter.new_state(slots, self.cache) if drafter else None
        self.capture = drafter.capture_layers if drafter else ()
        self.clock = _Clock(target.device)

    @torch.no_grad()
    def run(self, generations: list[Generation], report: Callable[[int], object]) -> Seconds:
        context = self._prefill()
        for generation, token in zip(generations, context.newest_token.tolist(), strict=True):
            self._emit(generation, [token])
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
                context = self._keep(going, context)
            context = self._pass(generations, context)

    def _pass(self, generations: list[Generation], context: DraftContext) -> DraftContext:
        """Draft, verify, keep; returns what the next drafts follow."""
        for_drafts, for_verdict = self._uniforms(*self.draws)
        self.clock.charge("other")
        tree = self._draft(context, for_drafts)
        self.clock.charge("draft" if self.drafter else "other")
        parents = None if tree.is_chain else tree.parents
        states = self.target.states(
            tree.tokens, capture=self.capture, cache=self.cache, lengths=self.lengths, parents=parents
        )
        verdict = self.rule.verdict(tree, self.target.logits(states.last_hidden), for_verdict)
        self.clock.charge("verify")
        moves = torch.tensor([not self._finished(g) for g in generations], device=self.lengths.device)
        self._count(generations, tree, verdict, moves)
        path_tokens = tree.tokens.gather(1, verdict.path)  # [B, L]
        following = torch.cat([path_tokens[:, 1:], path_tokens[:, :1]], dim=1)
        following.scatter_(1, verdict.accepted[:, None], verdict.bonus[:, None])
        for generation, row, count in zip(generations, following.tolist(), verdict.accepted.tolist(), strict=True):
            self._emit(generation, row[: count + 1])
        # A sequence that has ended stays where it was: it must not outgrow the cache while it rides along.
        goes_on = torch.tensor([not self._finished(g) for g in generations], device=self.lengths.device)
        kept = (verdict.accepted + 1) * goes_on
        self.cache.commit(verdict.path, kept)
        before, self.lengths = self.lengths, self.lengths + kept
        ended = ~goes_on
        following[ended, 0] = context.newest_token[ended]
        newest = verdict.accepted * goes_on
        if tree.is_chain:
            return DraftContext(states.captured, states.last_hidden, following, before, newest)
        return DraftContext(*_along(states, verdict.path), following, before, newest)

    def _draft(self, context: DraftContext, uniforms: Tensor) -> DraftTree:
        if self.drafter is None:
            newest = context.newest_token
            return chain_tree(newest, newest[:, None][:, :0])
        assert self.plan is not None and self.state is not None
        return self.drafter.propose(context, self.state, self.plan, uniforms)

    def _prefill(self) -> DraftContext:
        """Run the prompts; the first token of every answer comes from here."""
        longest = int(self.lengths.max())
        padded = torch.tensor([[*p, *[0] * (longest - len(p))] for p in self.prompts], device=self.lengths.device)
        states = self.target.prefill(padded, self.lengths, cache=self.cache, capture=self.capture)
        last = self.lengths - 1
        logits = self.target.logits(rows_at(states.last_hidden, last))  # [B, V]
        if self.rule.sampling.is_greedy:
            newest = logits.max(-1).indices
        else:
            newest = draw(self.rule.sampling.probabilities(logits), self._uniforms(1)[0][:, 0])
        following = torch.cat([padded[:, 1:], padded[:, :1]], dim=1).scatter_(1, last[:, None], newest[:, None])
        self.clock.charge("verify")
        return DraftContext(
            states.captured, states.last_hidden, following, torch.zeros_like(last), last, first_tokens=padded[:, 0]
        )

    def _uniforms(self, *counts: int) -> list[Tensor]:
        """The next ``[B, count]`` random numbers of every sequence, for each count."""
        if not any(counts):
            return [torch.empty(len(self.chance), 0, device=self.lengths.device) for _ in counts]
        numbers = torch.stack([torch.rand(sum(counts), generator=g) for g in self.chance])
        return list(numbers.to(self.lengths.device).split(counts, dim=1))

    def _keep(self, going: list[int], context: DraftContext) -> DraftContext:
        """Let finished sequences leave."""
        rows = torch.tensor(going, device=self.lengths.device)
        self.cache.keep_rows(rows)
        if self.state is not None:
            self.state.keep_rows(rows)
        self.lengths, self.chance = self.lengths[rows], [self.chance[i] for i in going]
        return context.rows(rows)

    def _emit(self, generation: Generation, tokens: list[int]) -> None:
        """Append what a sequence gained, up to the end of its answer or the length limit."""
        for token in tokens:
            if self._finished(generation):
                break
            generation.tokens.append(token)

    def _count(self, generations: list[Generation], tree: DraftTree, verdict: Verdict, moves: Tensor) -> None:
        """Engines count whole passes, also where the answer ended within one."""
        length = self.plan.length if self.plan else 0
        # Whether anything was drafted behind the last accepted node: if not, no draft was refused there.
        refused_B = ((tree.parents == verdict.path[:, -1:]) & tree.real).any(1)
        numbers = zip(verdict.accepted.tolist(), refused_B.tolist(), tree.drafted.tolist(), moves.tolist(), strict=True)
        for i, (accepted, refused, drafted, counts) in enumerate(numbers):
            if counts:
                generations[i].counts += Acceptance.of_pass(length, drafted=drafted, accepted=accepted, refused=refused)
                if tree.confidence is not None:
                    generations[i].trace.append((tree.confidence[i].tolist(), accepted))

    def _finished(self, generation: Generation) -> bool:
        tokens = generation.tokens
        return bool(tokens) and (len(tokens) >= self.max_new_tokens or tokens[-1] in self.end_ids)


def _along(states: TargetStates, path: Tensor) -> tuple[Tensor, Tensor]:
    """The captured and last states of the accepted path, ``[B, L, …]``."""
    return rows_at(states.captured, path), rows_at(states.last_hidden, path)
