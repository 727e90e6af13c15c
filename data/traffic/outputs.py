"""The folder of a matching: weights, report, picture, the traffic's splits, and the subset to answer.

``weights.parquet`` (``weights_file.py``), ``report.json``, ``report.md``, ``report.png``; ``tune.jsonl`` and
``test.jsonl``, the traffic to select heads by and to measure on; ``splits.json``, the keys of the traffic's three
parts; with a subset, ``subset.jsonl``. The folder appears whole or not at all.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from bitdraft.data.conversation import Conversation
from bitdraft.data.sampling import gumbel_top_k
from bitdraft.data.traffic.document import Document
from bitdraft.data.traffic.match import Matching
from bitdraft.data.traffic.picture import draw
from bitdraft.data.traffic.report import markdown
from bitdraft.data.weights_file import write_weights
from bitdraft.quant.files import folder_written_atomically


def write_matching(
    out: Path,
    found: Matching,
    report: Document,
    read_pool: Callable[[], Iterable[Conversation]],
    *,
    subset: int | None = None,
    seed: int,
) -> None:
    """``subset``: how many records to draw by weight, without replacement; the pool is then read once more."""
    with folder_written_atomically(out) as folder:
        write_weights(
            folder / "weights.parquet",
            keys=found.keys,
            ids=found.ids,
            places=found.places,
            weights=found.weights,
            clusters=found.clusters,
            about={"command": report["command"], "date": report["date"], "seed": str(seed)},
        )
        _write(folder / "report.json", [json.dumps(report, indent=2, ensure_ascii=False)])
        _write(folder / "report.md", [markdown(report).rstrip("\n")])
        draw(found.groups, found.weights[found.weights > 0], found.finished.ess_fraction, folder / "report.png")
        parts = {name: getattr(found.split, name) for name in ("fit", "tune", "test")}
        _write(folder / "splits.json", [json.dumps({k: [c.key for c in part] for k, part in parts.items()}, indent=2)])
        _write(folder / "tune.jsonl", map(record_line, found.split.tune))
        _write(folder / "test.jsonl", map(record_line, found.split.test))
        if subset is not None:
            chosen = set(found.numbers[gumbel_top_k(found.keys, found.weights, subset, seed)].tolist())
            _write(folder / "subset.jsonl", (record_line(c) for i, c in enumerate(read_pool()) if i in chosen))


def check_subset(subset: int | None, found: Matching) -> None:
    """``ValueError`` if more records are wanted than have a weight."""
    if subset is not None and subset > (most := int(np.count_nonzero(found.weights))):
        raise ValueError(f"--subset {subset}: only {most} records of the pool have a weight")


def record_line(conversation: Conversation) -> str:
    """The record as ``read_conversations`` reads it, on one line."""
    return json.dumps(conversation.record, ensure_ascii=False)


def _write(path: Path, lines: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
