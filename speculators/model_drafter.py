"""A smaller language model drafts.

It runs as the target does (``LowBitTarget``), so it can be quantized too. A pass's drafts are the nodes of a tree
behind what the cache holds. Every level runs the whole tree so far and leaves nothing of it in the cache: recurrent
states have no other way back, and a model's time goes into the number of passes more than into their few tokens.
"""

from functools import cache as once
from pathlib import Path
from typing import ClassVar

import torch
from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer
from torch import Tensor

from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftContext, Drafter, DraftState, rows_at
from bitdraft.speculators.drafting import DraftPlan, build_tree
from bitdraft.speculators.tree import DraftTree

# B sequence, T row of the context, W node of one depth, M node of the tree so far, V vocabulary.


class ModelDrafter(Drafter):
    """A smaller model with the target's vocabulary (Leviathan et al. 2023, arXiv:2211.17192)."""

    kind: ClassVar[str] = "model"

    def __init__(self, model: LowBitTarget) -> None:
        self.model = model

    def fits(self, target: LowBitTarget) -> None:
        """``ValueError`` if the model's tokens are not the target's, as far as their files tell."""
        if self.model.vocab_size != target.vocab_size:
            raise ValueError(
                f"{self.model.name} has a vocabulary of {self.model.vocab_size} tokens and {target.name} one of "
                f"{target.vocab_size}: draft with a model of the target's family"
            )
        mine, its = _vocabulary(self.model.name), _vocabulary(target.name)
        for number in sorted(mine.keys() & its.keys()):
            if mine[number] != its[number]:
                raise ValueError(
                    f"token {number} is {mine[number]!r} to {self.model.name} and {its[number]!r} to {target.name}: "
                    "draft with a model of the target's family"
                )

    def new_state(self, slots: int, cache: SlotCache) -> "ModelState":
        del cache
        return ModelState(self.model.new_cache(slots))

    @torch.no_grad()
    def propose(self, context: DraftContext, state: DraftState, plan: DraftPlan, uniforms: Tensor) -> DraftTree:
        return build_tree(self, context, state, plan, uniforms)

    def first(self, context: DraftContext, state: DraftState) -> Tensor:
        """Logits ``[B, V]`` behind the newest token, once the model has read what ``context`` adds."""
        assert isinstance(state, ModelState)
        read, rows, newest = state.lengths, context.next_tokens, context.newest
        if read is None:
            assert context.first_tokens is not None, "the first context is that of the prompts"
            rows, newest = torch.cat([context.first_tokens[:, None], rows], dim=1), newest + 1
            states = self.model.prefill(rows, newest + 1, cache=state.cache)
        else:
            states = self.model.states(rows, cache=state.cache, lengths=read)
            path = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
            # Nothing of a finished sequence that rides along: it shows its newest token again.
            state.cache.commit(path, context.lengths + 1 - read)
        state.plant(context.lengths + 1)
        return self.model.logits(rows_at(states.last_hidden, newest))

    def following(self, state: DraftState, tokens: Tensor, parents: Tensor) -> Tensor:
        """Logits ``[B, W, V]`` behind ``tokens`` ``[B, W]``; ``parents`` ``[B, W]`` are nodes of the last call."""
        assert isinstance(state, ModelState)
        assert state.tokens is not None and state.parents is not None and state.lengths is not None
        above = state.tokens.shape[1]
        state.tokens = torch.cat([state.tokens, tokens], dim=1)  # [B, M]
        state.parents = torch.cat([state.parents, parents + state.level], dim=1)
        state.level = above
        states = self.model.states(state.tokens, cache=state.cache, lengths=state.lengths, parents=state.parents)
        state.cache.commit(torch.zeros_like(parents[:, :1]), torch.zeros_like(state.lengths))
        return self.model.logits(states.last_hidden[:, above:])

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids

    def over_target(self, probabilities: Tensor) -> Tensor:
        return probabilities


class ModelState(DraftState):
    """What a drafting model has read, and the tree that it drafts."""

    def __init__(self, cache: SlotCache) -> None:
        self.cache = cache
        self.lengths: Tensor | None = None  # [B] tokens in the cache
        self.tokens: Tensor | None = None  # [B, M] nodes of the tree so far
        self.parents: Tensor | None = None  # [B, M]; -1 follows what the cache holds
        self.level = -1  # the first node of the tree's deepest level

    def plant(self, lengths: Tensor) -> None:
        """Begin a tree behind ``lengths`` ``[B]`` tokens in the cache."""
        self.lengths, self.level = lengths, -1
        self.tokens = self.parents = lengths.new_empty(len(lengths), 0)

    def keep_rows(self, rows: Tensor) -> None:
        if self.lengths is not None:
            self.lengths = self.lengths[rows]
            self.cache.keep_rows(rows)


@once
def _vocabulary(name: str) -> dict[int, str]:
    """The tokens of a model folder or hub id by number; empty where no tokenizer file lies on this machine."""
    file = Path(name) / "tokenizer.json" if Path(name).is_dir() else try_to_load_from_cache(name, "tokenizer.json")
    if not isinstance(file, str | Path) or not Path(file).is_file():
        return {}
    return {number: token for token, number in Tokenizer.from_file(str(file)).get_vocab().items()}
