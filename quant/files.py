"""Writing files so that a reader finds the old content or the new, never a part of either.

Content goes to a temporary name beside the destination, is flushed to the disk and renamed. Lowest layer of
the house, so that every other may use it.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_text_atomically(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` (UTF-8), making its folders."""
    write_bytes_atomically(path, text.encode("utf-8"))


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``, making its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_free(out: Path, overwrite: bool) -> None:
    """``ValueError`` if ``--out`` exists and is not a folder that may be replaced."""
    if out.exists() and not (overwrite and out.is_dir()):
        raise ValueError(f"{out} exists: choose another --out{', or add --overwrite' if out.is_dir() else ''}")


@contextmanager
def folder_written_atomically(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``path`` when the block ends well, and vanishes when it does not.

    An existing ``path`` is replaced as a whole, after the new one is complete, and stays where anything fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
        replaced = path.with_name(f".{path.name}.{os.getpid()}.old")
        existed = path.exists()
        if existed:
            path.rename(replaced)
        try:
            temporary.rename(path)
        except BaseException:
            if existed:
                replaced.rename(path)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sha256_of(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
