"""One shard of a cache of target states: some documents in a safetensors file, and what it takes to trust that file.

A shard is a folder with ``states.safetensors`` (documents one behind the other, and the ``offsets`` where they begin)
and ``shard.json`` (which documents, size and sha256 of the file). It is written under a temporary name and renamed.

Storage: ``target`` keeps everything in the target's dtype, bit for bit; ``bf16`` rounds to bf16, which changes nothing
for a bf16 target; ``fp8`` keeps captured layers as E4M3 codes with an fp32 scale per token and layer, and the last
hidden state in bf16: the teacher's logits are computed from that one, and from E4M3 they would be so far off that their
distribution no longer adds up to one under the stored normaliser.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from bitdraft.data.capture import DocumentStates
from bitdraft.quant.block import quantize
from bitdraft.quant.checkpoints.tensors import save_tensors
from bitdraft.quant.files import folder_written_atomically, sha256_of
from bitdraft.quant.schemes import FP8_CHANNEL

# n token of the document or shard, A captured layer, H hidden.

Storage = Literal["target", "bf16", "fp8"]
TENSORS, DESCRIPTION = "states.safetensors", "shard.json"


@dataclass(frozen=True)
class Description:
    """What ``shard.json`` says."""

    sha256: str
    bytes: int
    documents: list[int]


def bytes_per_token(layers: int, hidden: int, dtype: torch.dtype, storage: Storage) -> int:
    """Of the states of one token on disk."""
    wide = dtype.itemsize if storage == "target" else torch.bfloat16.itemsize
    of_layer = hidden + 4 if storage == "fp8" else wide * hidden
    return layers * of_layer + wide * hidden + 8 + 4


def encoded(states: DocumentStates, storage: Storage) -> dict[str, Tensor]:
    """What is stored of a document: tensors ``[n, …]`` by name, on the device of its states."""
    wide = states.last_hidden.dtype if storage == "target" else torch.bfloat16
    tensors = {
        "last_hidden": states.last_hidden.to(wide),
        "first_choices": states.first_choices,
        "log_normalisers": states.log_normalisers,
    }
    if states.captured.shape[1] == 0:
        return tensors
    if storage != "fp8":
        return {**tensors, "captured": states.captured.to(wide)}
    q = quantize(states.captured.float(), FP8_CHANNEL)  # a row [H] is one token at one layer
    return {**tensors, "captured": q.values.to(torch.float8_e4m3fn), "scales": q.scale}


def decoded(tensors: dict[str, Tensor], dtype: torch.dtype) -> DocumentStates:
    """What ``encoded`` stored, states in ``dtype``."""
    last = tensors["last_hidden"].to(dtype)
    captured = tensors.get("captured", last.new_empty(len(last), 0, 0))
    if "scales" in tensors:
        captured = captured.float().mul_(tensors["scales"])
    return DocumentStates(captured.to(dtype), last, tensors["first_choices"], tensors["log_normalisers"])


def joined(
    documents: Sequence[int],
    lengths: Sequence[int],
    produced: Iterable[tuple[int, DocumentStates]],
    storage: Storage,
) -> dict[str, Tensor]:
    """A shard's tensors ``[n, …]`` on the CPU, with ``documents`` one behind the other, and their ``offsets``.

    ``lengths``: tokens of each of ``documents``. ``produced``: ``(index, states)`` of all of them, in any order.
    """
    offsets = list(accumulate(lengths, initial=0))
    waiting = dict(zip(documents, pairwise(offsets), strict=True))
    tensors: dict[str, Tensor] = {}
    for index, states in produced:
        begin, end = waiting.pop(index)
        for name, part in encoded(states, storage).items():
            assert len(part) == end - begin, f"document {index} has {end - begin} tokens and {len(part)} {name}"
            if name not in tensors:
                tensors[name] = torch.empty(offsets[-1], *part.shape[1:], dtype=part.dtype)
            tensors[name][begin:end] = part
    assert not waiting, f"no states came for the documents {sorted(waiting)}"
    return {**tensors, "offsets": torch.tensor(offsets)}


def write_shard(path: Path, documents: Sequence[int], tensors: dict[str, Tensor]) -> None:
    """The folder ``path``, whole or not at all; ``OSError`` where it cannot be written."""
    with folder_written_atomically(path) as fresh:
        save_tensors(tensors, fresh / TENSORS)
        size, sha256 = (fresh / TENSORS).stat().st_size, sha256_of(fresh / TENSORS)
        description = Description(sha256, size, list(documents))
        (fresh / DESCRIPTION).write_text(json.dumps(asdict(description)), encoding="utf-8")


def read_description(path: Path) -> Description:
    """``ValueError`` where ``shard.json`` is missing or damaged."""
    try:
        described = Description(**json.loads((path / DESCRIPTION).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{DESCRIPTION}: {type(error).__name__}") from error
    if not isinstance(described.documents, list) or any(type(i) is not int for i in described.documents):
        raise ValueError(f"{DESCRIPTION} does not list its documents")
    return described


def damage(path: Path, *, sums: bool) -> str | None:
    """Why a shard cannot be trusted, or ``None``. ``sums``: read the whole file, not only its size."""
    file = path / TENSORS
    try:
        described = read_description(path)
        if not file.is_file():
            return f"{TENSORS} is missing"
        if file.stat().st_size != described.bytes:
            return f"{TENSORS} has {file.stat().st_size} bytes instead of {described.bytes}"
        if sums and sha256_of(file) != described.sha256:
            return f"{TENSORS} has another sha256"
    except (ValueError, OSError) as error:
        return str(error)
    return None
