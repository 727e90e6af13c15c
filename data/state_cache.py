"""The target's states on disk, so that a target reads the training text once and not in every epoch.

A cache is a folder: ``cache.json`` says whose states these are, and folders ``shard-00000`` hold them
(``data/state_shards.py``). Which documents stand in which shard follows from their lengths, and a shard is computed
apart from the others, so a run that was killed goes on with the shards that are missing, and makes the same ones.

One process calls ``write_cache``; when it has returned, any number of them call ``StateCache.open``.
"""

import hashlib
import json
import shutil
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from bitdraft.data.capture import DocumentStates
from bitdraft.data.chat import Example
from bitdraft.data.packing import by_length, document_length
from bitdraft.data.state_shards import (
    TENSORS,
    Storage,
    bytes_per_token,
    damage,
    decoded,
    joined,
    read_description,
    write_shard,
)
from bitdraft.quant.files import write_text_atomically
from bitdraft.quant.target import LowBitTarget

Produce = Callable[[Sequence[int]], Iterable[tuple[int, DocumentStates]]]
"""Given indices of documents, yields each of them with its states, in any order."""

SHARD_TOKENS = 32768
_HEADER = "cache.json"
_WAY_OUT = "give another folder or delete this one"
_MOST_OPEN = 8  # shards: opening one again takes a moment
_OpenShard = tuple[Any, list[str], list[int]]  # the file, its tensors of states, where documents begin


@dataclass(frozen=True)
class CacheIdentity:
    """Everything that decides what the states are and how they are kept."""

    target: str  # fingerprint
    recipe: str  # fingerprint
    layers: tuple[int, ...]  # capture ids
    hidden_size: int
    vocabulary: int
    dtype: str  # the target's: "bfloat16"
    storage: Storage
    documents: str  # digest

    @classmethod
    def of(
        cls, target: LowBitTarget, examples: Sequence[Example], layers: Sequence[int], storage: Storage
    ) -> "CacheIdentity":
        return cls(
            target.fingerprint,
            target.recipe.fingerprint,
            tuple(layers),
            target.hidden_size,
            target.vocab_size,
            str(target.dtype).removeprefix("torch."),
            storage,
            documents_digest(examples),
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        return {str(d): d for d in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}[f"torch.{self.dtype}"]

    @property
    def bytes_per_token(self) -> int:
        return bytes_per_token(len(self.layers), self.hidden_size, self.torch_dtype, self.storage)


def documents_digest(examples: Sequence[Example]) -> str:
    """32 hex digits over the token ids of all documents, and where their answers begin."""
    digest = hashlib.sha256()
    for e in examples:
        digest.update(array("q", [len(e.prompt), len(e.answer), *e.prompt, *e.answer]).tobytes())
    return digest.hexdigest()[:32]


def write_cache(
    folder: Path,
    identity: CacheIdentity,
    examples: Sequence[Example],
    produce: Produce,
    *,
    shard_tokens: int = SHARD_TOKENS,
    label: str | None = None,
) -> None:
    """Write the shards that ``folder`` lacks; nothing if it is complete.

    ``produce`` is called once per missing shard. ``shard_tokens``: no shard has more, unless a single document has; a
    folder that was begun with another number keeps its own. ``label``: of a progress bar. All sums are checked: a
    damaged shard is named on stderr and written again. Raises ``ValueError`` in one sentence for a folder with other
    states or other files and for a disk with too little room, ``OSError`` where writing fails.
    """
    assert identity.documents == documents_digest(examples)
    lengths = [document_length(e) for e in examples]
    shards = shard_documents(lengths, _begin(folder, identity, shard_tokens, len(examples)))
    missing = [k for k, documents in enumerate(shards) if not _is_whole(_shard_path(folder, k), documents)]
    if not missing:
        return
    total, todo = sum(lengths), sum(lengths[i] for k in missing for i in shards[k])
    _check_room(folder, identity, todo)
    with tqdm(
        total=total, initial=total - todo, unit="token", unit_scale=True, desc=label, disable=label is None
    ) as bar:

        def counted(documents: Sequence[int]) -> Iterator[tuple[int, DocumentStates]]:
            for index, states in produce(documents):
                yield index, states
                bar.update(lengths[index])

        for k in missing:
            path = _shard_path(folder, k)
            tensors = joined(shards[k], [lengths[i] for i in shards[k]], counted(shards[k]), identity.storage)
            try:
                write_shard(path, shards[k], tensors)
            except OSError as error:
                raise OSError(
                    f"{path} could not be written ({error}): make room and start again, the shards already written stay"
                ) from error


def shard_documents(lengths: Sequence[int], shard_tokens: int) -> list[list[int]]:
    """Which documents stand in which shard, in which order: longest first, cut before ``shard_tokens`` are exceeded."""
    shards: list[list[int]] = []
    filled = 0
    for i in by_length(lengths):
        if not shards or filled + lengths[i] > shard_tokens:
            shards.append([])
            filled = 0
        shards[-1].append(i)
        filled += lengths[i]
    return shards


class StateCache:
    """A complete cache, opened for reading. Any number of processes may read one folder, forked ones included: files
    are mapped, and no position in them is shared."""

    def __init__(self, folder: Path, identity: CacheIdentity, places: dict[int, tuple[Path, int]]) -> None:
        """``places``: for every document its shard, and how many stand before it there."""
        self.folder, self.identity = folder, identity
        self._places = places
        self._open: OrderedDict[Path, _OpenShard] = OrderedDict()  # the one used last at the end

    @classmethod
    def open(cls, folder: Path, identity: CacheIdentity) -> "StateCache":
        """``ValueError`` in one sentence for other states than ``identity`` says, and where a shard is missing or has
        another size than it was written with. Sums are checked by ``write_cache``."""
        documents = _read_header(folder, identity)["documents"]
        places: dict[int, tuple[Path, int]] = {}
        for path in sorted(folder.glob("shard-*")):
            if reason := damage(path, sums=False):
                raise ValueError(f"{path} is damaged ({reason}): start again the run that writes this cache")
            places |= {i: (path, place) for place, i in enumerate(read_description(path).documents)}
        if places.keys() != set(range(documents)):
            raise ValueError(
                f"{folder} holds the states of {len(places)} documents instead of {documents}: start again the run "
                "that writes this cache"
            )
        return cls(folder, identity, places)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int, device: torch.device | str = "cpu") -> DocumentStates:
        """The states of document ``index`` on ``device``, in the target's dtype. On the CPU, where that is the dtype on
        disk too, they are views of the mapped file: what is written into them stays in memory."""
        path, place = self._places[index]
        file, names, offsets = self._opened(path)
        begin, end = offsets[place : place + 2]
        stored = {name: file.get_slice(name)[begin:end].to(device) for name in names}
        return decoded(stored, self.identity.torch_dtype)  # codes travel, not what they stand for

    def _opened(self, path: Path) -> _OpenShard:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        try:
            file = safe_open(path / TENSORS, framework="pt")
            self._open[path] = file, sorted({*file.keys()} - {"offsets"}), file.get_tensor("offsets").tolist()
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read ({error}): start again the run that writes this cache") from error
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        return self._open[path]


def _shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}"


def _begin(folder: Path, identity: CacheIdentity, shard_tokens: int, documents: int) -> int:
    """Make the folder, or go on with it without what a killed run left half-written; returns its tokens per shard."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give a folder for the target's states")
    if (folder / _HEADER).exists():
        begun = _read_header(folder, identity)
        for half_written in folder.glob(".shard-*"):
            shutil.rmtree(half_written)
        return int(begun["shard_tokens"])
    for unfinished in folder.glob(f".{_HEADER}.*.tmp"):
        unfinished.unlink()
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} has files but no {_HEADER}, so it is no cache of states: give another folder")
    header = {"version": 1, "identity": asdict(identity), "shard_tokens": shard_tokens, "documents": documents}
    write_text_atomically(folder / _HEADER, json.dumps(header, indent=2) + "\n")
    return shard_tokens


def _read_header(folder: Path, identity: CacheIdentity) -> dict[str, Any]:
    """What ``cache.json`` says; ``ValueError`` if that is not about states of ``identity``."""
    path = folder / _HEADER
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        written = {**header["identity"], "layers": tuple(header["identity"]["layers"])}
        version, _, _ = header["version"], int(header["shard_tokens"]), int(header["documents"])
    except FileNotFoundError as error:
        raise ValueError(f"{folder} has no {_HEADER}, so it is no cache of states: give another folder") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {_WAY_OUT}") from error
    if version != 1:
        raise ValueError(f"{path} is of version {version}, and this program reads 1: {_WAY_OUT}")
    for name, wanted in asdict(identity).items():
        if written.get(name) != wanted:
            raise ValueError(
                f"{folder} was written with {name} {written.get(name)!r}, and this run has {wanted!r}: {_WAY_OUT}"
            )
    return dict(header)


def _is_whole(path: Path, documents: Sequence[int]) -> bool:
    """Whether the shard is there; one that is damaged is named on stderr and removed."""
    if not path.exists():
        return False
    reason = damage(path, sums=True)
    if reason is None and read_description(path).documents != documents:
        reason = "it holds other documents"
    if reason is None:
        return True
    print(f"warning: {path} is damaged ({reason}) and will be computed again", file=sys.stderr)
    shutil.rmtree(path)
    return False


def _check_room(folder: Path, identity: CacheIdentity, tokens: int) -> None:
    """Print what will be written; ``ValueError`` if the disk lacks the room for it."""
    bytes_needed, bytes_free = tokens * identity.bytes_per_token, shutil.disk_usage(folder).free
    needed, free = f"{bytes_needed / 2**30:.2f} GiB", f"{bytes_free / 2**30:.2f} GiB"
    print(f"{folder}: the target's states of {tokens:,} tokens, {needed} to write, {free} free", flush=True)
    if bytes_needed > bytes_free:
        raise ValueError(
            f"{folder}: the target's states need {needed} and the disk has {free} left: make room, give a folder on "
            "another disk, or store them as bf16 or fp8"
        )
