"""The run's diary: whole lines, and no step twice."""

import json
from pathlib import Path

from bitdraft.train.journal import Journal


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_step_is_a_line_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path, 0)
    journal.write(1, {"loss": 2.5, "accuracy": [0.5, 0.25]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"step": 1, "loss": 2.5, "accuracy": [0.5, 0.25]}
    journal.write(2, {"loss": 2.0})
    assert steps(path) == [1, 2]


def test_numbers_come_back_bit_for_bit(tmp_path: Path) -> None:
    path, value = tmp_path / "metrics.jsonl", 0.1 + 0.2
    Journal(path, 0).write(1, {"loss": value})
    assert json.loads(path.read_text(encoding="utf-8"))["loss"] == value


def test_lines_beyond_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path, 0)
    for step in range(1, 8):
        journal.write(step, {"loss": 1.0 / step})
    before = path.read_text(encoding="utf-8").splitlines()
    again = Journal(path, 4)
    assert path.read_text(encoding="utf-8").splitlines() == before[:4]
    again.write(5, {"loss": 9.0})
    assert steps(path) == [1, 2, 3, 4, 5]


def test_half_a_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n'
    for cut in range(1, 24):
        path.write_text(whole + '{"step": 3, "loss": 0.5}\n'[:cut], encoding="utf-8")
        Journal(path, 3)
        assert path.read_text(encoding="utf-8") == whole


def test_a_fresh_run_drops_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    Journal(path, 0).write(1, {"loss": 2.0})
    Journal(path, 0)
    assert path.read_text(encoding="utf-8") == ""
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
