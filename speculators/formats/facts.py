"""What an export says of its target: all that writing a head needs to know of it, without the model itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoTokenizer

from bitdraft.quant.fingerprint import tokenizer_fingerprint
from bitdraft.quant.loading import first_line
from bitdraft.quant.rotation import basis_name
from bitdraft.quant.target import LowBitTarget

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "*.model", "*.tiktoken", "vocab.*", "merges.txt")
_BESIDE_THEM = ("config.json", "added_tokens.json", "special_tokens_map.json")

WRITTEN = torch.bfloat16
"""What a head's plain weights are written in, whatever they were trained in; engines compute in the target's dtype."""
DTYPE = str(WRITTEN).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """A target as an export names it."""

    name: str
    """Model folder or hub id."""
    architectures: tuple[str, ...]
    recipe: str
    recipe_fingerprint: str
    fingerprint: str
    residual_basis: str
    tokenizer: str | None
    """``tokenizer_fingerprint``; ``None`` for a target without a tokenizer."""

    @classmethod
    def of(cls, target: LowBitTarget) -> "TargetFacts":
        """Raises ``ValueError`` for a tokenizer that is there and cannot be loaded."""
        return cls(
            name=target.name,
            architectures=tuple(target.config.architectures or ()),
            recipe=target.recipe.name,
            recipe_fingerprint=target.recipe.fingerprint,
            fingerprint=target.fingerprint,
            residual_basis=basis_name(target.model),
            tokenizer=tokenizer_of(target),
        )


def tokenizer_of(target: LowBitTarget) -> str | None:
    """The fingerprint of the tokenizer that lies where ``target`` was loaded from.

    ``None`` where there is none, and for one that runs code of its own. Raises ``ValueError`` for one that cannot be
    loaded.
    """
    source = target.name
    try:
        folder = Path(source)
        if not folder.is_dir():  # a hub id: its small files, which are in the cache already
            folder = Path(snapshot_download(source, allow_patterns=[*_TOKENIZER_FILES, *_BESIDE_THEM]))
        if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
            return None
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            return None
        raise ValueError(f"the tokenizer of target {source!r} cannot be loaded: {first_line(error)}") from error
    return tokenizer_fingerprint(tokenizer)
