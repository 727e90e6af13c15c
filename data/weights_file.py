"""The weights of a pool's records, as a Parquet file that any tool opens.

One row a record: ``key`` (``Conversation.key``: what is asked), ``id``, ``place`` (file and line), ``weight`` (mean 1),
``cluster``. What made them stands in the schema's metadata.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bitdraft.data.conversation import Conversation
from bitdraft.quant.files import write_bytes_atomically

_COLUMNS = ("key", "id", "place", "weight", "cluster")
_ABOUT = "bitdraft."


@dataclass(frozen=True)
class Weights:
    """What a weights file says, by ``Conversation.key``; records asked alike share the mean of their weights."""

    path: Path
    by_key: dict[str, float]
    clusters: dict[str, int]
    about: dict[str, str]

    def of(self, conversations: Sequence[Conversation]) -> np.ndarray:
        """``[n]`` one weight a conversation.

        Raises ``ValueError`` if a record has none: its file is not the pool that was matched.
        """
        missing = [c for c in conversations if c.key not in self.by_key]
        if missing:
            raise ValueError(
                f"{self.path} has no weight for {len(missing)} of {len(conversations)} records (the first is "
                f"{missing[0].source}): match these data with scripts/match_traffic.py, or leave the records out that "
                "it dropped"
            )
        return np.array([self.by_key[c.key] for c in conversations])


def write_weights(
    path: Path,
    *,
    keys: Sequence[str],
    ids: Sequence[str],
    places: Sequence[str],
    weights: np.ndarray,
    clusters: np.ndarray,
    about: dict[str, str],
) -> None:
    """One row a record, all columns as long. Raises ``ValueError`` for weights that are negative or not finite."""
    _check(weights, path)
    columns = [
        *(pa.array(list(texts), pa.string()) for texts in (keys, ids, places)),
        pa.array(np.asarray(weights, np.float64)),
        pa.array(np.asarray(clusters, np.int32)),
    ]
    metadata = {_ABOUT + name: value for name, value in about.items()}
    buffer = BytesIO()
    pq.write_table(pa.table(columns, names=list(_COLUMNS)).replace_schema_metadata(metadata), buffer)
    write_bytes_atomically(path, buffer.getvalue())


def read_weights(path: Path) -> Weights:
    """Raises ``ValueError`` for a file that is missing, is not Parquet, lacks a column or holds impossible weights."""
    if not path.is_file():
        raise ValueError(f"weights file {path} does not exist")
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"weights file {path} is not a Parquet file: {error}") from error
    if missing := [name for name in _COLUMNS if name not in table.column_names]:
        raise ValueError(f"weights file {path} has no column {missing[0]!r}: it needs {', '.join(_COLUMNS)}")
    keys, weights = table["key"].to_pylist(), table["weight"].to_numpy().astype(np.float64)
    _check(weights, path)
    unique, place = np.unique(np.asarray(keys, dtype=object).astype(str), return_inverse=True)
    means = np.bincount(place, weights, len(unique)) / np.bincount(place, minlength=len(unique))
    about = {
        name.decode().removeprefix(_ABOUT): value.decode()
        for name, value in (table.schema.metadata or {}).items()
        if name.decode().startswith(_ABOUT)
    }
    clusters = dict(zip(keys, table["cluster"].to_pylist(), strict=True))
    return Weights(path, dict(zip(unique.tolist(), means.tolist(), strict=True)), clusters, about)


def _check(weights: np.ndarray, path: Path) -> None:
    if len(weights) == 0:
        raise ValueError(f"weights file {path} has no row")
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum() > 0:
        raise ValueError(f"weights file {path}: weights must be finite, not negative, and not all zero")
