"""``serving.json``: one row per head, target, dtype and draft length. A later run replaces its own row only."""

import json
from pathlib import Path
from typing import Any

from bitdraft.quant.files import write_text_atomically

VERSION = 1
KEY = ("head", "target", "dtype", "draft_length")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of an earlier run; none if there is no file. ``ValueError`` for a file of another kind."""
    if not path.is_file():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--json {path} exists and is not JSON: give another file") from error
    rows = content.get("rows") if isinstance(content, dict) and content.get("version") == VERSION else None
    if not isinstance(rows, list) or any(not isinstance(row, dict) or not set(KEY) <= set(row) for row in rows):
        raise ValueError(f"--json {path} exists and holds no serving results of this version: give another file")
    return rows


def add_row(path: Path, row: dict[str, Any]) -> None:
    """Write ``row`` in place of the one with the same key, or behind the others."""
    rows = read_rows(path)
    at = next((i for i, other in enumerate(rows) if all(other[k] == row[k] for k in KEY)), len(rows))
    rows[at : at + 1] = [row]
    write_text_atomically(path, json.dumps({"version": VERSION, "rows": rows}, indent=2) + "\n")
