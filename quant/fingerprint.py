"""Short names for models, tokenizers and texts: equal for equal content anywhere."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")


def fingerprint_of(model: nn.Module, scales: Mapping[str, Tensor] | None = None) -> str:
    """16 hex digits over the architecture and a sample of every weight: equal for equal models anywhere.

    ``scales``: what the weights of a quantized checkpoint are still to be multiplied by, and the scales of its inputs.
    Samples (64 values per tensor) instead of all bytes, so that an 8B model costs a moment.
    """
    config: Any = model.config
    described = {k: v for k, v in config.to_dict().items() if k not in _NOT_THE_MODEL}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode())
    for name, weight in [*sorted(model.named_parameters()), *sorted((scales or {}).items())]:
        flat = weight.detach().reshape(-1)
        # Steps of a large prime wander over all rows and columns.
        index = torch.arange(64, device=flat.device) * 1_000_003 % flat.numel()
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(flat[index].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def digest_of(calibration: Sequence[Tensor]) -> str:
    """16 hex digits over the token ids, in order."""
    digest = hashlib.sha256()
    for ids in calibration:
        digest.update(f"{tuple(ids.shape)}".encode() + ids.to("cpu", torch.int64).numpy().tobytes())
    return digest.hexdigest()[:16]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """16 hex digits over the vocabulary with its ids and the added tokens of a transformers tokenizer.

    How text is cut into tokens is left out: ids mean the same wherever this is equal.
    """
    added = {i: (token.content, token.special) for i, token in tokenizer.added_tokens_decoder.items()}
    described = json.dumps([sorted(tokenizer.get_vocab().items()), sorted(added.items())])
    return hashlib.sha256(described.encode()).hexdigest()[:16]
