"""``scripts/bench/train_throughput.py`` on a small shape: what it writes down, and that trainers that do other work, or
none, are errors."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from bench_scripts import bench_script

from bitdraft.train.environment import RunFailed

SMALL = {"hidden_size": 64, "intermediate_size": 128, "heads": 4, "key_value_heads": 2, "head_dim": 16}
SMALLER = {"layers": 8, "vocab": 320, "draft_vocab": 96, "documents": 2, "tokens": 24, "steps": 3, "rounds": 2}
CASES = ("cached", "with_target", "cached_all", "with_target_all")
SCRIPTED = """
import json, sys
who = sys.argv[1]
losses = {"half": [3.0, SECOND[who]]}
print(json.dumps({"trained_parameters": WEIGHTS[who], "versions": {}, "first_losses": losses}), flush=True)
for number, line in enumerate(sys.stdin):
    if number == LAST:
        sys.exit("no more")
    print(json.dumps(
        {"cpu_seconds": SECONDS[who], "seconds": 9.0, "peak_rss_mib": 2.0, "rss_before_mib": 1.0}
    ), flush=True)
"""


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return bench_script("train_throughput")


def scripted(bench: ModuleType, path: Path, monkeypatch: pytest.MonkeyPatch, **values: Any) -> Any:
    """Options by which both trainers are a script that answers with ``values``."""
    both = {"SECONDS": {"bitdraft": 0.25, "specforge": 0.75}, "WEIGHTS": {"bitdraft": 7, "specforge": 7}}
    given = {**both, "SECOND": {"bitdraft": 2.5, "specforge": 2.5}, "LAST": -1, **values}
    path.write_text("".join(f"{name} = {value!r}\n" for name, value in given.items()) + SCRIPTED, encoding="utf-8")
    monkeypatch.setattr(bench, "_TRAINERS", path)
    return bench.Options(**SMALL, **SMALLER, specforge_python=Path(sys.executable), json=path.with_suffix(".json"))


def test_our_trainer_is_measured(bench: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "throughput.json"
    bench.main(bench.Options(**SMALL, **SMALLER, json=out))
    document = json.loads(out.read_text(encoding="utf-8"))
    for case in CASES:
        found = document[case]
        assert found["tokens_per_cpu_second"] * found["cpu_seconds_per_step"] == pytest.approx(2 * 24)
        assert found["best_tokens_per_cpu_second"] >= found["tokens_per_cpu_second"] > 0
    assert document["peak_rss_mib"] > document["rss_before_mib"] > 0
    fused, attention, mlp, output, norms = 3 * 64 * 64, (64 + 2 * 32) * 128 + 64 * 64, 3 * 64 * 128, 96 * 64, 4 * 64
    assert document["trained_parameters"] == fused + attention + mlp + output + norms
    for losses in document["first_losses"]["bitdraft"].values():
        assert len(losses) == 3
        assert all(0 < loss < 2 * math.log(96) for loss in losses)
    assert "specforge" not in document


def test_a_peer_is_compared_within_each_round(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = scripted(bench, tmp_path / "both.py", monkeypatch, SECOND={"bitdraft": 2.5, "specforge": 2.50005})
    bench.main(options)
    document = json.loads(options.json.read_text(encoding="utf-8"))
    assert document["ratios"] == dict.fromkeys(CASES, 3.0)
    assert document["cached"]["tokens_per_cpu_second"] == 2 * 24 / 0.25
    assert document["specforge"]["with_target_all"]["tokens_per_cpu_second"] == 2 * 24 / 0.75
    assert document["first_losses"]["largest_difference"] == pytest.approx(5e-5, rel=1e-6)


def test_trainers_that_do_other_work_are_an_error(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = scripted(bench, tmp_path / "both.py", monkeypatch, SECOND={"bitdraft": 2.5, "specforge": 2.501})
    with pytest.raises(RunFailed, match=r"differ by 1\.0e-03"):
        bench.main(options)
    assert options.json.is_file()  # the numbers are there to look at
    options = scripted(bench, tmp_path / "both.py", monkeypatch, WEIGHTS={"bitdraft": 7, "specforge": 8})
    with pytest.raises(RunFailed, match="bitdraft trains 7 parameters and specforge 8"):
        bench.main(options)


def test_a_trainer_that_ends_is_named_with_its_last_words(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = scripted(bench, tmp_path / "both.py", monkeypatch, LAST=3)
    with pytest.raises(RunFailed, match="bitdraft has ended: no more"):
        bench.main(options)


def test_an_interpreter_that_is_none_is_refused(bench: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--specforge-python .*nowhere is not a file"):
        bench.Options(specforge_python=tmp_path / "nowhere")


def test_some_first_choices_stay_outside_the_draft_vocabulary(bench: ModuleType) -> None:
    choices = torch.arange(0, 120, 2)
    options = bench.Options(**SMALL, **SMALLER)
    vocab = bench.draft_vocab(choices, options)
    assert len(vocab) == 96
    assert int(vocab.t2d[choices].sum()) == 57  # of 60, each twentieth is left out
    with pytest.raises(ValueError, match="--draft-vocab 96 must be smaller: 1 tokens stay outside"):
        bench.draft_vocab(torch.arange(20), bench.Options(**SMALL, **{**SMALLER, "vocab": 96}))
