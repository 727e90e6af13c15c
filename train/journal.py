"""The run's diary: one JSON line per logged step in ``metrics.jsonl``."""

import json
import os
from pathlib import Path

from bitdraft.quant.files import write_text_atomically


class Journal:
    """Appends whole lines. After a resume, lines beyond the resumed step are dropped, so no step stands twice."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.path = path
        kept = [line for line in self._lines() if json.loads(line)["step"] <= resumed_step]
        write_text_atomically(path, "".join(f"{line}\n" for line in kept))

    def _lines(self) -> list[str]:
        if not self.path.is_file():
            return []
        text = self.path.read_text(encoding="utf-8")
        lines = text.splitlines()
        # A kill can leave half a line at the end.
        return lines if text.endswith("\n") else lines[:-1]

    def write(self, step: int, metrics: dict[str, float | list[float]]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
            file.flush()
            os.fsync(file.fileno())
