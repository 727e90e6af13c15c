"""``scripts/bench/train_memory.py`` on a small head: what it writes down, and that its limit is one."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from bench_scripts import bench_script

from bitdraft.train.environment import RunFailed

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts the memory")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return bench_script("train_memory")


SMALL = {"hidden_size": 64, "intermediate_size": 128, "heads": 4, "key_value_heads": 2, "steps": 3}


def test_memory_and_times_are_written_down(bench: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "memory.json"
    bench.main(bench.Options(**SMALL, vocab=16384, draft_vocab=8192, tokens=1024, contexts=(32, 64), json=out))
    found = json.loads(out.read_text(encoding="utf-8"))
    memory = found["memory"]
    assert 0 < memory["peak_mib"] < memory["formula_mib"] / 3
    assert memory["formula_mib"] == pytest.approx(
        4 * (sum(4 * 1024 * (1024 + k) for k in range(3)) + 1024 * (16384 + 9 * 8192)) / 2**20
    )
    assert [row["context"] for row in found["times"]] == [32, 64]
    for row in found["times"]:
        whole = row["attention_microseconds"] + row["other_microseconds"]
        assert row["microseconds_per_token"] == pytest.approx(whole)


def test_a_step_over_the_limit_is_an_error(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "memory.json"
    monkeypatch.setattr(bench, "MOST", -1.0)  # a step this small may take no new memory at all
    with pytest.raises(RunFailed, match="more than a third"):
        bench.main(bench.Options(**SMALL, vocab=512, draft_vocab=512, tokens=64, contexts=(16,), json=out))
    assert out.is_file(), "the numbers are there to be looked at"
