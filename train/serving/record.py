"""``serving.json``: one row per measurement. A later run replaces the row of the very same measurement only."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from bitdraft.quant.files import write_text_atomically

VERSION = 2
KEY = (
    "head",
    "head_fingerprint",
    "target",
    "target_fingerprint",
    "served_on",
    "target_profile",
    "emulated_nvfp4",
    "dtype",
    "draft_length",
    "max_new_tokens",
    "batch",
    "prompts",
    "prompts_fingerprint",
)
"""All that the numbers follow from; names beside fingerprints, since equal names may stand for other files."""


def check_place(path: Path) -> None:
    """Everything that writing a row needs, tried before minutes are measured.

    Raises ``ValueError`` for a folder, a file of another kind, and a place that cannot be written.
    """
    try:
        read_rows(path)
        with _alone_with(path):
            pass
    except OSError as error:
        raise ValueError(f"--json {path} cannot be written ({error}): give another file") from error


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of an earlier run; none if there is no file. ``ValueError`` for a file of another kind."""
    if not path.exists():
        return []
    if not path.is_file():
        raise ValueError(f"--json {path} exists and is no file: give the name of one")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--json {path} exists and is not JSON: give another file") from error
    rows = content.get("rows") if isinstance(content, dict) and content.get("version") == VERSION else None
    if not isinstance(rows, list) or any(not isinstance(row, dict) or not set(KEY) <= set(row) for row in rows):
        raise ValueError(f"--json {path} exists and holds no serving results of this version: give another file")
    return rows


def add_row(path: Path, row: dict[str, Any]) -> None:
    """Write ``row`` in place of the one with the same key, or behind the others; runs that share a file take turns."""
    with _alone_with(path):
        rows = read_rows(path)
        at = next((i for i, other in enumerate(rows) if all(other[k] == row[k] for k in KEY)), len(rows))
        rows[at : at + 1] = [row]
        write_text_atomically(path, json.dumps({"version": VERSION, "rows": rows}, indent=2) + "\n")


@contextmanager
def _alone_with(path: Path) -> Iterator[None]:
    """No other run in between: an exclusive lock on a file beside ``path``, which is gone afterwards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    side = path.with_name(f".{path.name}.lock")
    while True:
        with side.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(side, file):
                continue  # who had the lock before has removed it: others lock a new one
            try:
                yield
            finally:
                side.unlink()
            return


def _is_at(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
