"""The text that a recipe is calibrated on, as token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitdraft.data.chat import conversation_ids
from bitdraft.data.sources import demo_file, read_conversations
from bitdraft.quant.recipe import Recipe

_LENGTH = 512  # tokens per row
_ROWS = 4  # rows per batch


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """What recipes with static input scales, GPTQ or WUSH are calibrated on."""

    data: tuple[Path, ...] = ()
    """JSONL files of conversations; by default the shipped training prompts for GPTQ and WUSH, and a page of shipped
    text where only input scales are measured."""
    tokens: int = 32768
    """How many tokens of them, in file order."""

    def __post_init__(self) -> None:
        if self.tokens < _LENGTH:
            raise ValueError(f"calibration.tokens must be at least {_LENGTH}, got {self.tokens}")


def calibration_text(config: CalibrationConfig, recipe: Recipe, tokenizer: Any) -> list[Tensor] | None:
    """What to give to ``load_target`` for ``recipe``; ``None`` where it needs nothing or where its default will do.

    Token ids ``[4, 512]`` and fewer rows in the last batch: conversations behind each other, cut into rows without
    padding. Raises ``ValueError`` for data that make no row.
    """
    if not (recipe.looks_at_inputs or (recipe.has_static_inputs and config.data)):
        return None
    conversations = read_conversations(config.data or [demo_file("train")])
    return rows_of_text([conversation_ids(tokenizer, c) for c in conversations], config.tokens)


def rows_of_text(texts: Sequence[Sequence[int]], tokens: int) -> list[Tensor]:
    """Batches ``[4, 512]`` cut from all ``texts`` behind each other, at most ``tokens`` in all."""
    ids = torch.tensor([t for text in texts for t in text][:tokens])
    rows = ids[: len(ids) // _LENGTH * _LENGTH].view(-1, _LENGTH)
    if len(rows) == 0:
        raise ValueError(
            f"the calibration text has {len(ids)} tokens, but needs {_LENGTH}: give more under --calibration.data"
        )
    return list(rows.split(_ROWS))
