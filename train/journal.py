"""The run's diary: one JSON line per step in ``metrics.jsonl``."""

import json
import os
from pathlib import Path
from typing import Any

from bitdraft.quant.files import write_text_atomically


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a diary; a kill can leave half a line at the end."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    return [json.loads(line) for line in (lines if text.endswith("\n") else lines[:-1])]


class Journal:
    """Appends whole lines. After a resume, lines beyond the resumed step are dropped, so no step stands twice."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.path = path
        kept = [line for line in read_metrics(path) if line["step"] <= resumed_step]
        write_text_atomically(path, "".join(f"{json.dumps(line)}\n" for line in kept))

    def write(self, step: int, metrics: dict[str, float | list[float]]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
            file.flush()
            os.fsync(file.fileno())
