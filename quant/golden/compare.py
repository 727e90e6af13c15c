"""A stored vector against what is computed here: entry by entry, with the parts that may differ named.

Zeros have a sign in the files. In codes every peer gives a number that rounds to zero the sign of that number; of an
input that is itself zero some keep the sign and some do not, so there it is not compared. In values some peers keep the
sign and others write +0: a vector has to be of one mind.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from bitdraft.quant.golden.peers import KNOWN


@dataclass(frozen=True)
class Vectors:
    """One file: its tensors, and the names of the blocks of its inputs."""

    file: str
    tensors: dict[str, Tensor]
    block_names: dict[str, list[str]]

    def __getitem__(self, key: str) -> Tensor:
        if key not in self.tensors:
            raise ValueError(f"{self.file}.safetensors has no tensor {key!r}")
        return self.tensors[key]


@dataclass(frozen=True)
class Finding:
    """What became of one stored vector of ``total`` entries."""

    key: str
    total: int
    wrong: int = 0
    """Entries that differ from what is computed here, named disagreements aside."""
    named: int = 0
    """Entries that differ where a ``Disagreement`` says so."""
    first: str = ""


Checker = Callable[[Vectors, Sequence[str]], Iterator[Finding]]

Labels = Sequence[tuple[str, ...]]
"""For each of the equal parts that a tensor is compared in: its name, and what else a disagreement may call it."""
WHOLE: Labels = [("tensor",)]


def compare(
    file: str, key: str, ours: Tensor, theirs: Tensor, labels: Labels, *, within: Tensor | float = 0.0
) -> Finding:
    """Entry by entry; NaN equals NaN, and zeros of floats differ in their sign too.

    ``within``: the difference that is allowed, for vectors that depend on the order of sums (each use says why).
    """
    total = theirs.numel()
    if ours.shape != theirs.shape:
        return Finding(key, total, total, first=f"shape {list(theirs.shape)}, computed {list(ours.shape)}")
    differs = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    if isinstance(within, Tensor) or within > 0:
        differs &= ~((ours - theirs).abs() <= within)
    elif theirs.is_floating_point():
        differs |= (ours == 0) & (theirs == 0) & (ours.signbit() != theirs.signbit())
    if not differs.any():
        return Finding(key, total)
    known = {b for d in KNOWN if fnmatchcase(f"{file}/{key}", d.keys) for b in d.blocks}
    excused = torch.tensor(["*" in known or not known.isdisjoint(names) for names in labels])
    parts = differs.reshape(len(labels), -1)
    wrong = parts & ~excused[:, None]
    first = ""
    if wrong.any():
        part, place = wrong.nonzero()[0].tolist()
        in_file, computed = (t.reshape(len(labels), -1)[part, place].item() for t in (theirs, ours))
        first = f"{labels[part][0]}, entry {place}: {in_file} in the file, {computed} computed"
    return Finding(key, total, int(wrong.sum()), int((parts & excused[:, None]).sum()), first)


def as_bytes(x: Tensor) -> bytes:
    """The memory of ``x``, whatever its dtype."""
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _flushed(x: Tensor) -> float:
    """Smaller inputs may underflow on the way to their code, and lose their sign there."""
    finite = x.float().abs().nan_to_num(0.0, 0.0)
    return max(2.0**-100, float(finite.max()) * 2.0**-140)


def comparable_codes(ours: Tensor, theirs: Tensor, x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes of ``x`` with its sign where they are zero, and without any where ``x`` itself is (nearly) zero."""
    sign, least = 2 ** (bits - 1), _flushed(x)
    ours, theirs = ours.int(), theirs.int()
    ours = torch.where(ours & ~sign == 0, torch.where(x <= -least, sign, 0), ours)
    return ours, torch.where((theirs & ~sign == 0) & (x.abs() < least), 0, theirs)


def comparable_values(ours: Tensor, theirs: Tensor, x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Values of ``x`` ``[N, K]``: zeros of ours signed as most of theirs are, like ``x`` or +0.

    Where ``x`` itself is (nearly) zero, zeros are +0; blocks that are zero as a whole may be of a mind of their own.
    """
    least = _flushed(x)
    theirs = torch.where((theirs == 0) & (x.abs() < least), 0.0, theirs)
    below_NGE = ((ours == 0) & (theirs == 0) & (x <= -least)).unflatten(-1, (-1, block))
    minus_NGE = below_NGE & theirs.signbit().unflatten(-1, (-1, block))
    like_input = 2 * int(minus_NGE.sum()) > int(below_NGE.sum())
    of_block_NG = 2 * minus_NGE.sum(-1) > below_NGE.sum(-1)
    zero_NG = (ours == 0).unflatten(-1, (-1, block)).all(-1)
    signed_NG = torch.where(zero_NG, of_block_NG, like_input)
    signed = signed_NG.repeat_interleave(block, dim=-1) & (x <= -least)
    return torch.where(ours == 0, torch.where(signed, -0.0, 0.0).to(ours.dtype), ours), theirs


def fields(keys: Sequence[str]) -> dict[str, list[str]]:
    """``<peer>/<set>`` → the fields stored for it."""
    found: dict[str, list[str]] = {}
    for key in keys:
        start, _, field = key.rpartition("/")
        found.setdefault(start, []).append(field)
    return found
