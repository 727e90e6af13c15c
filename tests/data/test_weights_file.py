"""A pool's weights on disk: read back as written, and what cannot be used is refused."""

from pathlib import Path

import numpy as np
import pandas
import pytest

from bitdraft.data.conversation import Conversation, Message
from bitdraft.data.weights_file import Weights, read_weights, write_weights


def asked(text: str, *answers: str) -> Conversation:
    messages = [Message("user", text), *(Message("assistant", a) for a in answers)]
    return Conversation("any", "", tuple(messages), f"pool.jsonl, line {len(text)}")


def written(path: Path, keys: list[str], weights: list[float]) -> Path:
    count = len(keys)
    write_weights(
        path,
        keys=keys,
        ids=[f"id{i}" for i in range(count)],
        places=[f"pool.jsonl, line {i + 1}" for i in range(count)],
        weights=np.array(weights),
        clusters=np.arange(count) % 3,
        about={"traffic": "today"},
    )
    return path


def test_weights_come_back_by_what_is_asked(tmp_path: Path) -> None:
    one, two, both = asked("a"), asked("bb", "yes"), asked("bb", "no")
    found = read_weights(written(tmp_path / "w.parquet", [one.key, two.key], [0.5, 1.5]))
    assert found.about == {"traffic": "today"}
    assert found.of([both, one]).tolist() == [1.5, 0.5]
    assert found.clusters == {one.key: 0, two.key: 1}


def test_records_asked_alike_share_their_mean(tmp_path: Path) -> None:
    found = read_weights(written(tmp_path / "w.parquet", ["k", "other", "k"], [1.0, 4.0, 2.0]))
    assert found.by_key == {"k": 1.5, "other": 4.0}


def test_any_tool_reads_the_file(tmp_path: Path) -> None:
    table = pandas.read_parquet(written(tmp_path / "w.parquet", ["k", "l"], [0.25, 1.75]))
    assert list(table.columns) == ["key", "id", "place", "weight", "cluster"]
    assert table["weight"].tolist() == [0.25, 1.75]


def test_a_record_without_a_weight_is_named() -> None:
    weights = Weights(Path("w.parquet"), {asked("a").key: 1.0}, {asked("a").key: 0}, {})
    with pytest.raises(
        ValueError, match=r"w\.parquet has no weight for 2 of 3 records \(the first is pool.jsonl, line 2"
    ):
        weights.of([asked("a"), asked("bb"), asked("cc")])


@pytest.mark.parametrize("bad", [[1.0, np.nan], [np.inf, 1.0], [-1.0, 1.0], [0.0, 0.0], []])
def test_impossible_weights_are_neither_written_nor_read(tmp_path: Path, bad: list[float]) -> None:
    path = tmp_path / "w.parquet"
    with pytest.raises(ValueError, match=r"w\.parquet"):
        written(path, ["k", "l"][: len(bad)], bad)
    assert not path.exists()
    columns = {name: pandas.Series(["x"] * len(bad), dtype=str) for name in ("key", "id", "place")}
    pandas.DataFrame({**columns, "weight": np.array(bad), "cluster": np.zeros(len(bad), int)}).to_parquet(path)
    with pytest.raises(ValueError, match=r"w\.parquet"):
        read_weights(path)


def test_files_that_are_no_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_weights(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("weights")
    with pytest.raises(ValueError, match="is not a Parquet file"):
        read_weights(tmp_path / "text.parquet")
    pandas.DataFrame({"key": ["a"], "id": ["1"], "place": ["x"], "cluster": [0]}).to_parquet(tmp_path / "less.parquet")
    with pytest.raises(ValueError, match="has no column 'weight'"):
        read_weights(tmp_path / "less.parquet")
