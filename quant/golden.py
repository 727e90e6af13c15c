"""Checks what this package computes against vectors that reference implementations wrote.

A folder holds ``<format>.safetensors`` files: inputs ``in/<set>`` and, for every implementation ("peer"), what it made
of them, ``<peer>/<set>/<field>``. Codes and scales must be equal bit for bit, codes modulo the sign of zero;
dequantized values too, multiplied in the peer's own order. Where peers are known to disagree, ``golden_peers.py``
names the blocks; a difference anywhere else is an error.

A checker for another file or peer is one line in ``CHECKERS``: a pattern over ``<file>/<key>`` and a function. The
longest pattern that matches a key takes it; what no checker takes counts as not checked.

Inside named disagreements nothing is computed that could be compared. There the file is held against a checksum of
the vectors that the disagreements were found on, if its inputs are still theirs.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from zlib import crc32

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bitdraft.quant.golden_checks import (
    Checker,
    Finding,
    Vectors,
    as_bytes,
    check_casts,
    check_fp8,
    check_int4,
    check_kv,
    check_mx,
    check_nvfp4,
)
from bitdraft.quant.golden_peers import NAMED

CHECKERS: dict[str, Checker] = {
    "casts/*": check_casts,
    "fp8/*": check_fp8,
    "fp8/kv_*": check_kv,
    "int4/*": check_int4,
    "mxfp*/*": check_mx,
    "nvfp4/*": check_nvfp4,
}


@dataclass(frozen=True)
class FileReport:
    """What became of one file's vectors."""

    file: str
    findings: tuple[Finding, ...]
    unchecked: tuple[str, ...]

    @property
    def wrong(self) -> list[Finding]:
        return [f for f in self.findings if f.wrong]

    def lines(self) -> list[str]:
        """One line of counts, and the first mismatch if there is one."""
        named = sum(bool(f.named and not f.wrong) for f in self.findings)
        equal = len(self.findings) - named - len(self.wrong)
        entries = sum(f.total for f in self.findings)
        text = f"{self.file}: {len(self.findings)} vectors ({entries} entries) checked: {equal} equal, "
        text += f"{named} differ as named, {len(self.wrong)} WRONG" if self.wrong else f"{named} differ as named"
        lines = [text + (f"; {len(self.unchecked)} NOT CHECKED" if self.unchecked else "")]
        if self.wrong:
            lines.append(f"  first mismatch: {self.wrong[0].key}: {self.wrong[0].first}")
        return lines


def check_folder(folder: Path) -> Iterator[FileReport]:
    """Check every ``*.safetensors`` file in ``folder``, in the order of names.

    Raises ``ValueError`` where there is none, and where a file lacks the input of one of its vectors.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"{folder} holds no .safetensors files of reference vectors")
    for path in paths:
        yield check_file(path)


def check_file(path: Path) -> FileReport:
    """Check one file; block names come from ``block_names_mx32.json`` and ``block_names_nv16.json`` beside it."""
    try:
        vectors = Vectors(path.stem, load_file(path), _block_names(path))
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    outputs = [key for key in vectors.tensors if not key.startswith("in/") and key != "x"]
    work: dict[str, list[str]] = {}
    for key in sorted(outputs):
        patterns = [p for p in CHECKERS if fnmatchcase(f"{path.stem}/{key}", p)]
        if patterns:
            work.setdefault(max(patterns, key=len), []).append(key)
    findings: list[Finding] = []
    for pattern, keys in work.items():
        some = list(CHECKERS[pattern](vectors, keys))
        findings += some
        inputs, named = NAMED.get(pattern_key(path.stem, pattern), (None, None))
        if inputs == inputs_crc(vectors) and named != named_crc(some) and not any(f.wrong for f in some):
            changed = "what peers wrote in the named blocks is not what it was"
            findings.append(Finding(pattern, 0, 1, first=changed))
    checked = {finding.key for finding in findings}
    return FileReport(path.name, tuple(findings), tuple(key for key in sorted(outputs) if key not in checked))


def pattern_key(file: str, pattern: str) -> str:
    """Under which the checksums of one checker's share of a file are kept."""
    return f"{file}/{pattern.partition('/')[2]}"


def inputs_crc(vectors: Vectors) -> int:
    """Checksum of a file's inputs."""
    inputs = sorted(key for key in vectors.tensors if key.startswith("in/") or key == "x")
    return crc32(b"".join(as_bytes(vectors[key]) for key in inputs))


def named_crc(findings: list[Finding]) -> int:
    """Checksum of what a file holds where it differs as named."""
    parts = [f"{f.key} {f.named_crc}" for f in sorted(findings, key=lambda f: f.key) if f.named]
    return crc32("\n".join(parts).encode())


def _block_names(path: Path) -> dict[str, list[str]]:
    """Names of the blocks of every input set of a file, in order."""
    width = 16 if path.stem == "nvfp4" else 32
    names = path.parent / f"block_names_{'nv16' if width == 16 else 'mx32'}.json"
    if not names.is_file():
        return {}
    return {f"{key.removesuffix('_blocks')}_f32": value for key, value in json.loads(names.read_text()).items()}


def flip_bit(x: Tensor, position: int, bit: int) -> Tensor:
    """A copy of ``x`` with bit ``bit`` of its byte ``position`` flipped: what every check must notice."""
    changed = x.clone()
    changed.view(-1).view(torch.uint8)[position] ^= 1 << bit
    return changed
