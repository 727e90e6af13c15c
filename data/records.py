"""Raw records from files and from the hub, one at a time, each with the place that messages name.

JSON lines are read here, because a broken line must be named by its number; Parquet and the hub come through
``datasets``. A JSON list is one value and is read whole.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any, cast

Placed = tuple[str, Any]
"""Where a record stands, and the record."""
Bad = Callable[[ValueError], None]
"""Told about every line that is no record; reading goes on with the next one if it returns."""


class HubError(ValueError):
    """A dataset that cannot be had."""


def refuse(error: ValueError) -> None:
    """The ``Bad`` that takes none."""
    raise error


def read_records(path: Path, bad: Bad = refuse) -> Iterator[Placed]:
    """The records of one file, by its suffix (``SUFFIXES``).

    Raises ``ValueError`` naming the file for one that cannot be read at all, and for a broken line unless ``bad``
    returns.
    """
    suffix = next(s for s in SUFFIXES if path.name.endswith(s))
    return _READERS[suffix](path, bad)


def is_record_file(path: Path) -> bool:
    """Whether the name ends as a file of records does; hidden files are none."""
    return path.name.endswith(SUFFIXES) and not path.name.startswith(".")


def hub_records(
    name: str, config: str | None, split: str, *, data_file: str | None = None, streaming: bool = False
) -> Iterator[Placed]:
    """The rows of one split of a dataset on the hub. Raises ``ValueError`` if it cannot be had."""
    import datasets  # heavy, and rarely needed

    rows = _from_hub(
        lambda: datasets.load_dataset(name, config, split=split, data_files=data_file, streaming=streaming), name
    )
    return ((f"{name}, {config or split}, row {number}", row) for number, row in enumerate(rows, start=1))


def hub_configs(name: str) -> list[str]:
    """The names of a dataset's configs. Raises ``ValueError`` if they cannot be had."""
    import datasets  # heavy, and rarely needed

    return list(_from_hub(lambda: datasets.get_dataset_config_names(name), name))


def _from_hub(load: Callable[[], Iterable[Any]], name: str) -> Iterator[Any]:
    return _guarded(load, lambda error: HubError(f"{name} cannot be had from the hub: {error}"))


def _json_lines(path: Path, bad: Bad) -> Iterator[Placed]:
    with closing(_opened(path)) as lines:
        for number, line in enumerate(_whole_lines(lines, path), start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    continue
                record = json.loads(text)
            except UnicodeDecodeError as error:
                bad(ValueError(f"{path} is not UTF-8 text: {error.reason} in line {number}"))
            except json.JSONDecodeError as error:
                bad(ValueError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})"))
            except RecursionError:
                bad(ValueError(f"{path}, line {number}: not a record (nested too deeply)"))
            else:
                yield f"{path}, line {number}", record


def _opened(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _whole_lines(lines: Iterable[bytes], path: Path) -> Iterator[bytes]:
    try:
        yield from lines
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read to its end: {error}") from error


def _json_list(path: Path, bad: Bad) -> Iterator[Placed]:
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason}") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {error.lineno}: not a JSON list of records ({error.msg}); "
            "records that stand one a line belong into a .jsonl file"
        ) from error
    if not isinstance(records, list):
        raise ValueError(f"{path}: expected a JSON list of records, found {type(records).__name__}")
    yield from ((f"{path}, record {number}", record) for number, record in enumerate(records, start=1))


def _parquet(path: Path, bad: Bad) -> Iterator[Placed]:
    import datasets  # heavy, and rarely needed

    rows = _guarded(  # streamed, so that no copy goes into the cache
        lambda: datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True),
        lambda error: ValueError(f"{path} is not a Parquet file: {error}"),
    )
    yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))


def _guarded(load: Callable[[], Iterable[Any]], said: Callable[[Exception], ValueError]) -> Iterator[Any]:
    """What ``load`` gives, item by item; whatever ``datasets`` raises becomes what ``said`` makes of it."""
    import datasets

    # RuntimeError: a dataset that would have to run a script of its own
    errors = (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError)
    try:
        rows = iter(load())
    except errors as error:
        raise said(error) from error
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except errors as error:
            raise said(error) from error
        yield row


_READERS: dict[str, Callable[[Path, Bad], Iterator[Placed]]] = {
    ".jsonl": _json_lines,
    ".jsonl.gz": _json_lines,
    ".json": _json_list,
    ".parquet": _parquet,
}
SUFFIXES = tuple(_READERS)
