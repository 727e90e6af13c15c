"""Choosing the head by what it accepts: real decoding on the validation traffic, every so many steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bitdraft.data.chat import thinking_mode
from bitdraft.data.conversation import Conversation
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.metrics import total
from bitdraft.train.config import RunConfig
from bitdraft.train.measuring.acceptance import Decoding, decode
from bitdraft.train.measuring.prompt_sets import PromptSet


@dataclass(frozen=True)
class Choice:
    """One measurement of the head in training."""

    step: int
    acceptance_length: float


def acceptance_of(
    target: LowBitTarget, head: DraftHead, tokenizer: Any, traffic: Sequence[Conversation], config: RunConfig
) -> float:
    """Tokens per target pass, bonus included, of greedy chains over the first turns of ``traffic``."""
    chosen = config.selection
    prompts = PromptSet("traffic", tuple(traffic[: chosen.prompts]))
    how = Decoding(
        max_new_tokens=chosen.max_new_tokens,
        batch_size=chosen.batch_size,
        thinking=thinking_mode(config.thinking),
    )
    training = head.training
    head.eval()
    decoded = decode(target, head, tokenizer, prompts, DraftPlan(length=chosen.draft_length), how)
    head.train(training)
    return total(decoded.per_prompt, chosen.draft_length).length


def best_of(history: Sequence[Choice]) -> Choice | None:
    """The highest acceptance length, the latest of equals; ``None`` where nothing was measured."""
    return max(history, key=lambda c: (c.acceptance_length, c.step), default=None)


def is_exhausted(history: Sequence[Choice], patience: int) -> bool:
    """Whether the last ``patience`` measurements (if any) brought no better head."""
    lengths = [c.acceptance_length for c in history]
    return bool(patience) and bool(lengths) and len(lengths) - 1 - lengths.index(max(lengths)) >= patience
