"""The target's own form in fewer bits drafts for it: QSpec (Zhao et al. 2024, arXiv:2410.11305).

W4A4 drafts and W4A16 verifies, say. The two share a cache: drafts read the keys and values that verification wrote, and
verification overwrites what drafts have written behind them. So the drafting form never has to catch up.
"""

from typing import ClassVar

import torch
from torch import Tensor

from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftContext, DraftState
from bitdraft.speculators.model_drafter import ModelDrafter, ModelState

# B sequence, V vocabulary.


class SelfDrafter(ModelDrafter):
    """A model drafter whose past is the target's."""

    kind: ClassVar[str] = "self"

    def __init__(self, model: LowBitTarget) -> None:
        """``model``: the target's checkpoint under another recipe. ``ValueError`` if that one rounds the cache."""
        if model.applied.cache is not None:
            raise ValueError(
                f"recipe {model.recipe.name} rounds keys and values, but self-drafts share the target's cache: "
                "leave kv out of the recipe of the drafting form"
            )
        super().__init__(model)

    def fits(self, target: LowBitTarget) -> None:
        """``ValueError`` unless both forms are of one checkpoint."""
        if self.model.fingerprint != target.fingerprint:
            raise ValueError(
                f"{self.model.name} is another checkpoint than {target.name}, for which it cannot draft from one "
                "cache: load the target's under the recipe that drafts"
            )

    def new_state(self, slots: int, cache: SlotCache) -> "SharedState":
        """Raises ``ValueError`` where the target remembers more than keys and values."""
        del slots
        if cache.has_states:
            raise ValueError(
                f"{self.model.name} has recurrent states, which drafts cannot share with verification as they share "
                "keys and values: draft with another model"
            )
        return SharedState(cache)

    def first(self, context: DraftContext, state: DraftState) -> Tensor:
        """Logits ``[B, V]`` behind the newest token, the root of the tree: the cache holds what stands before it."""
        assert isinstance(state, SharedState)
        state.plant(context.lengths)
        newest = context.newest_token[:, None]
        return self.following(state, newest, torch.zeros_like(newest))[:, 0]


class SharedState(ModelState):
    """The target's cache, whose rows the decoding loop keeps."""

    def keep_rows(self, rows: Tensor) -> None:
        del rows
