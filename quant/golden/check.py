"""Checks what this package computes against vectors that reference implementations wrote.

A folder holds ``<format>.safetensors`` files: inputs ``in/<set>`` and, for every implementation ("peer"), what it made
of them, ``<peer>/<set>/<field>``. Codes and scales must be equal bit for bit, codes modulo the sign of zero;
dequantized values too, multiplied in the peer's own order. Where peers are known to disagree, ``peers.py``
names the blocks; a difference anywhere else is an error.

A checker for another file or peer is one line in ``CHECKERS``: a pattern over ``<file>/<key>`` and a function. The
longest pattern that matches a key takes it; what no checker takes counts as not checked.

Some bits cannot be told from what is computed: inside named disagreements, signs of zeros that were zero before, the
last digits of long sums. Where an input is one of those that this was written with, a checksum of its outputs holds for
them too.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from zlib import crc32

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bitdraft.quant.golden.calibrated import check_gptq, check_wush
from bitdraft.quant.golden.checks import check_casts, check_fp8, check_int4, check_kv, check_mx, check_nvfp4
from bitdraft.quant.golden.compare import Checker, Finding, Vectors, as_bytes
from bitdraft.quant.golden.peers import CHECKSUMS
from bitdraft.quant.golden.searches import check_four_over_six, check_searches

CHECKERS: dict[str, Checker] = {
    "casts/*": check_casts,
    "fp8/*": check_fp8,
    "fp8/kv_*": check_kv,
    "gptq/*": check_gptq,
    "int4/*": check_int4,
    "mxfp*/*": check_mx,
    "nvfp4/*": check_nvfp4,
    "nvfp4/fouroversix_*": check_four_over_six,
    "soar_sweep/*": check_searches,
    "wush/*": check_wush,
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
    written = [key for key in vectors.tensors if not is_input(key)]
    work: dict[str, list[str]] = {}
    for key in sorted(written):
        patterns = [p for p in CHECKERS if fnmatchcase(f"{path.stem}/{key}", p)]
        if patterns:
            work.setdefault(max(patterns, key=len), []).append(key)
    findings = [finding for pattern, keys in work.items() for finding in CHECKERS[pattern](vectors, keys)]
    findings += _checksums(vectors, findings)
    checked = {finding.key for finding in findings}
    return FileReport(path.name, tuple(findings), tuple(key for key in sorted(written) if key not in checked))


def is_input(key: str) -> bool:
    """Whether a tensor is what implementations were given, not what they made of it."""
    return key.startswith("in/") or key in ("x", "w", "W", "X")


def _checksums(vectors: Vectors, findings: Sequence[Finding]) -> Iterator[Finding]:
    """A finding for every known input whose outputs are not what they were, unless a comparison has said so."""
    for given, keys in by_input(vectors, [finding.key for finding in findings]).items():
        inputs, outputs = CHECKSUMS.get(f"{vectors.file}/{given}", (None, None))
        said = any(finding.wrong for finding in findings if finding.key in keys)
        if not said and inputs == inputs_crc(vectors, given, keys) and outputs != outputs_crc(vectors, keys):
            changed = "what is not computed here (named disagreements, signs of zeros) is not what it was"
            yield Finding(f"vectors of {given}", 0, 1, first=changed)


def by_input(vectors: Vectors, keys: Sequence[str]) -> dict[str, list[str]]:
    """Input → what was made of it; ``*`` where implementations were given all inputs of the file."""
    groups: dict[str, list[str]] = {}
    for key in sorted(keys):
        names = [f"in/{prefix}{part}" for part in key.split("/") for prefix in ("", "w_")]
        names += ["in/kv_bf16"] if key.startswith("kv_") else []
        groups.setdefault(next((name for name in names if name in vectors.tensors), "*"), []).append(key)
    return groups


def inputs_crc(vectors: Vectors, given: str, keys: Sequence[str]) -> int:
    """Checksum of the input ``given`` and of the names of what was made of it."""
    inputs = sorted(key for key in vectors.tensors if is_input(key)) if given == "*" else [given]
    return crc32(b"".join(as_bytes(vectors[key]) for key in inputs), crc32(" ".join(sorted(keys)).encode()))


def outputs_crc(vectors: Vectors, keys: Sequence[str]) -> int:
    """Checksum of what implementations wrote under ``keys``."""
    return crc32(b"".join(as_bytes(vectors[key]) for key in sorted(keys)))


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
