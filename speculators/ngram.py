"""Drafting by looking up the text itself: no model, no training.

Prompt lookup decoding (Saxena 2023; vLLM's method ``ngram``): where the last tokens stood before, what followed them
there is drafted. The longest match counts, of equally long ones the first, as in vLLM, whose ``prompt_lookup_max`` and
``prompt_lookup_min`` are ``longest`` and ``shortest``.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftContext, Drafter, DraftState
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.tree import DraftTree, chain_tree

# B sequence, S position, K depth, n tokens that are compared.

UNKNOWN = -1
"""Stands where a token is not known: equal to none, itself included."""


class NgramDrafter(Drafter):
    """Drafts what followed the sequence's last tokens when they stood there before.

    Drafts are deterministic: at temperatures above 0 verification takes them as point masses, without loss.
    """

    kind: ClassVar[str] = "ngram"
    drafts_trees: ClassVar[bool] = False
    has_confidence: ClassVar[bool] = False

    def __init__(self, longest: int, shortest: int = 1) -> None:
        """Matches of ``longest`` tokens at most count, and none of fewer than ``shortest``."""
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams need 1 ≤ shortest ≤ longest, got shortest {shortest} and longest {longest}")
        self.longest, self.shortest = longest, shortest

    def fits(self, target: LowBitTarget) -> None:
        """Every target's tokens can be looked up."""

    def new_state(self, slots: int, cache: SlotCache) -> "NgramState":
        del cache
        return NgramState(slots)

    def propose(self, context: DraftContext, state: DraftState, plan: DraftPlan, uniforms: Tensor) -> DraftTree:
        """A chain of up to ``plan.length`` drafts, of none where nothing is found."""
        del uniforms
        assert isinstance(state, NgramState)
        tokens, lengths = state.learn(context), context.lengths + 1
        drafts, found = continuations(
            tokens[:, : int(lengths.max())], lengths, longest=self.longest, shortest=self.shortest, count=plan.length
        )
        return chain_tree(context.newest_token, drafts[:, : int(found.max())], lengths=found)


class NgramState(DraftState):
    """The tokens of every sequence."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.tokens: Tensor | None = None  # [B, S] int64

    def learn(self, context: DraftContext) -> Tensor:
        """Write down what ``context`` adds; returns ``[B, S]``, of which ``context.lengths + 1`` tokens count."""
        batch, rows = context.next_tokens.shape
        if self.tokens is None:
            self.tokens = context.next_tokens.new_zeros(batch, self.slots)
            self.tokens[:, 0] = UNKNOWN if context.first_tokens is None else context.first_tokens
        row = torch.arange(rows, device=context.start.device)
        sequence, kept = (row <= context.newest[:, None]).nonzero(as_tuple=True)
        self.tokens[sequence, context.start[sequence] + 1 + kept] = context.next_tokens[sequence, kept]
        return self.tokens

    def keep_rows(self, rows: Tensor) -> None:
        if self.tokens is not None:
            self.tokens = self.tokens[rows]


def continuations(tokens: Tensor, lengths: Tensor, *, longest: int, shortest: int, count: int) -> tuple[Tensor, Tensor]:
    """What followed each row's last tokens at their first occurrence.

    ``tokens``: ``[B, S]``, the first ``lengths`` ``[B]`` of which count. The longest match wins, of ``longest`` tokens
    at most and ``shortest`` at least; it may overlap the tokens that are looked for. Returns ``[B, count]`` tokens and
    how many of them there are, ``[B]``; behind them stands filler.
    """
    last = lengths[:, None] - 1  # [B, 1]
    back = torch.arange(longest, device=tokens.device)  # [n]
    wanted = tokens.gather(1, (last - back).clamp(min=0))  # [B, n]: the last tokens, from the last one on
    before = pad(tokens, (longest - 1, 0), value=UNKNOWN).unfold(1, longest, 1).flip(-1)  # [B, S, n]: up to each one
    agree = (before == wanted[:, None]) & (before != UNKNOWN)
    matched = agree.cumprod(-1).sum(-1)  # [B, S]: tokens that agree, going back from each position
    position = torch.arange(tokens.shape[1], device=tokens.device)
    matched.masked_fill_(position >= last, 0)
    best = matched.amax(1, keepdim=True)
    end = matched.argmax(1, keepdim=True)  # [B, 1]: where the first of the best matches ends
    found = (last - end).clamp(max=count) * (best >= shortest)
    steps = torch.arange(1, count + 1, device=tokens.device)
    return tokens.gather(1, (end + steps).minimum(last)), found[:, 0]
