"""``scripts/bench/export_head.py`` on a small head: what it writes down, and that its limits are limits."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from bench_scripts import bench_script

from bitdraft.train.environment import RunFailed

SMALL = {"hidden_size": 64, "intermediate_size": 128, "heads": 4, "key_value_heads": 2, "head_dim": 16}
SMALLER = {"layers": 8, "vocab": 320, "draft_vocab": 96}


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return bench_script("export_head")


def test_every_eagle3_format_is_measured(bench: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "export.json"
    bench.main(bench.Options(**SMALL, **SMALLER, folder=tmp_path, json=out))
    document = json.loads(out.read_text(encoding="utf-8"))
    speculators, original = document["results"]
    assert (speculators["format"], original["format"]) == ("eagle3-speculators", "eagle3-original")
    fused, attention, mlp, output, norms = 3 * 64 * 64, (64 + 2 * 32) * 128 + 64 * 64, 3 * 64 * 128, 96 * 64, 4 * 64
    assert document["head"]["parameters"] == fused + attention + mlp + output + norms
    bf16 = document["head"]["gib"] / 2
    assert bf16 < original["file_gib"] < 1.3 * bf16
    assert speculators["file_gib"] > original["file_gib"] + 0.9 * document["target"]["embedding_gib"]
    assert all(0 < row["seconds"] < 60 and 0 <= row["extra_gib"] < 1 for row in document["results"])
    assert [p.name for p in tmp_path.iterdir()] == ["export.json"]


def test_memory_that_is_taken_is_counted(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = bench.write_head

    def wasteful(*arguments: object, **options: object) -> None:
        bytearray(1 << 30)[:: 1 << 12] = b"x" * (1 << 18)  # every page of a GiB: systems may reclaim some meanwhile
        write(*arguments, **options)

    monkeypatch.setattr(bench, "write_head", wasteful)
    with pytest.raises(RunFailed, match=r"eagle3-speculators: over the limits of 60\.0 s and 0\.2 GiB"):
        bench.main(bench.Options(**SMALL, **SMALLER, folder=tmp_path, most_gib=0.2))
