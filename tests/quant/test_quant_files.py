"""Atomic writes: a reader finds the old content or the new, also when the writer dies half-way."""

import hashlib
from pathlib import Path

import pytest

from bitdraft.quant.files import folder_written_atomically, sha256_of, write_text_atomically


def test_text_is_replaced_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "file.json"
    write_text_atomically(path, "one")
    write_text_atomically(path, "zwei: ä")
    assert path.read_text(encoding="utf-8") == "zwei: ä"
    assert list(path.parent.iterdir()) == [path]


def test_text_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_text_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text_atomically(path, "half of the new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "step-1"
    with folder_written_atomically(path) as temporary:
        (temporary / "a.txt").write_text("a")
        assert not path.exists()
    assert (path / "a.txt").read_text() == "a"
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "step"
    for name in ("old.txt", "new.txt"):
        with folder_written_atomically(path) as temporary:
            (temporary / "sub").mkdir()
            (temporary / "sub" / name).write_text(name)
    assert [f.name for f in path.rglob("*.txt")] == ["new.txt"]
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_folder_vanishes_and_the_old_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "step"
    with folder_written_atomically(path) as temporary:
        (temporary / "a.txt").write_text("old")
    with pytest.raises(KeyboardInterrupt), folder_written_atomically(path) as temporary:
        (temporary / "a.txt").write_text("new")
        raise KeyboardInterrupt
    assert (path / "a.txt").read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_checksum_is_sha256(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"\x00abc" * 100_000)
    assert sha256_of(path) == hashlib.sha256(path.read_bytes()).hexdigest()
