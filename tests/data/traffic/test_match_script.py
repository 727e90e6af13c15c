"""``scripts/match_traffic.py``: files in, a folder out, and one sentence where something is wrong."""

import os
import random
import subprocess
import sys
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matched_traffic import pool, read_json, records, traffic, write

from bitdraft.data.conversation import Message
from bitdraft.data.sampling import gumbel_top_k
from bitdraft.data.sources import read_conversations
from bitdraft.data.traffic.split import contaminated
from bitdraft.data.weights_file import read_weights

SCRIPT = Path(__file__).parents[3] / "scripts" / "match_traffic.py"
FILES = {"weights.parquet", "report.json", "report.md", "report.png", "splits.json", "tune.jsonl", "test.jsonl"}


@pytest.fixture(scope="module")
def script() -> Any:
    spec = util.spec_from_file_location("match_traffic_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matched")


@pytest.fixture(scope="module")
def made(script: Any, folder: Path) -> Path:
    """One file of the pool, one of traffic, and a subset."""
    write(folder / "pool.jsonl", [replace(c, answered_by="t/r") for c in pool(answer=6)])
    write(folder / "traffic.jsonl", traffic())
    script.main(
        script.Options(
            pool=(str(folder / "pool.jsonl"),),
            traffic=(str(folder / "traffic.jsonl"),),
            out=folder / "out",
            clusters=4,
            floor=0.1,
            subset=40,
        )
    )
    return folder / "out"


def test_the_folder_holds_the_promised_files(made: Path) -> None:
    assert {p.name for p in made.iterdir()} == FILES | {"subset.jsonl"}
    report = read_json(made / "report.json")
    assert report["records"] == 180
    assert report["records_per_second"] == pytest.approx(180 / report["seconds"])
    assert "| group" in (made / "report.md").read_text(encoding="utf-8")


def test_weights_are_found_for_every_record_of_the_pool(made: Path, folder: Path) -> None:
    weights = read_weights(made / "weights.parquet")
    asked = read_conversations([folder / "pool.jsonl"])
    of = weights.of(asked)
    assert of.mean() == pytest.approx(1)
    assert of[[c.category == "cooking" for c in asked]].mean() > 1.5
    assert weights.about["seed"] == "0"


def test_the_test_split_can_be_read_and_no_training_record_holds_it(made: Path, folder: Path) -> None:
    test = read_conversations([made / "test.jsonl"])
    splits = read_json(made / "splits.json")
    assert [c.key for c in test] == splits["test"]
    assert sum(map(len, splits.values())) == 80
    assert contaminated(read_conversations([folder / "pool.jsonl"]), test) == []


def test_the_subset_holds_records_as_they_stand(made: Path, folder: Path) -> None:
    every = {c.id: c for c in read_conversations([folder / "pool.jsonl"])}
    subset = read_conversations([made / "subset.jsonl"])
    assert len(subset) == 40
    assert all(replace(c, source="") == replace(every[c.id], source="") for c in subset)
    weights = read_weights(made / "weights.parquet").by_key
    keys = list(weights)
    drawn = gumbel_top_k(keys, np.array(list(weights.values())), 40, seed=0)
    assert {c.key for c in subset} == {keys[i] for i in drawn}


def test_files_and_their_order_change_nothing(script: Any, made: Path, folder: Path) -> None:
    shuffled, asked = read_conversations([folder / "pool.jsonl"]), traffic()
    random.Random(3).shuffle(shuffled)
    random.Random(4).shuffle(asked)
    parts = [str(write(folder / f"part{i}.jsonl", shuffled[i::3])) for i in range(3)]
    lines = (folder / "part1.jsonl").read_text(encoding="utf-8")
    (folder / "part1.jsonl").write_text("{broken\n" + lines, encoding="utf-8")
    asked_files = tuple(str(write(folder / f"asked{i}.jsonl", asked[i::2])) for i in range(2))
    options: dict[str, Any] = {"clusters": 4, "floor": 0.1, "subset": 40, "skip_bad": True}
    script.main(script.Options(pool=tuple(parts), traffic=asked_files, out=folder / "again", **options))
    first, again = (read_weights(out / "weights.parquet") for out in (made, folder / "again"))
    assert again.by_key == pytest.approx(first.by_key, rel=1e-4)
    subsets = [{c.id for c in read_conversations([out / "subset.jsonl"])} for out in (made, folder / "again")]
    assert subsets[0] == subsets[1]
    assert read_json(made / "splits.json") == read_json(folder / "again" / "splits.json")
    skipped = read_json(folder / "again" / "report.json")["skipped"]
    assert skipped["pool"]["count"] == 1, "a broken line is counted once, however often the pool is read"
    assert "part1.jsonl, line 1" in skipped["pool"]["first"]


def test_a_folder_that_exists_is_refused_before_anything_is_read(script: Any, made: Path) -> None:
    options = script.Options(pool=("nowhere.jsonl",), traffic=("nowhere.jsonl",), out=made)
    with pytest.raises(ValueError, match="exists: choose another --out, or add --overwrite"):
        script.main(options)


def test_a_subset_larger_than_the_pool_is_refused_and_nothing_is_written(script: Any, made: Path, folder: Path) -> None:
    options = script.Options(
        pool=(str(folder / "pool.jsonl"),), traffic=(str(folder / "traffic.jsonl"),), out=folder / "much", subset=181
    )
    with pytest.raises(ValueError, match="--subset 181: only 180 records of the pool have a weight"):
        script.main(options)
    assert not (folder / "much").exists()


def test_the_target_adds_what_it_makes_of_every_record(script: Any, folder: Path, tiny_folder: Path) -> None:
    script.main(
        script.Options(
            pool=(str(write(folder / "few.jsonl", pool(each=10))),),
            traffic=(str(write(folder / "asked.jsonl", traffic(cooking=20, code=5, travel=5))),),
            out=folder / "states",
            clusters=2,
            target=str(tiny_folder),
            target_quant="mxfp4a16",
            dtype="float32",
        )
    )
    assert read_json(folder / "states" / "report.json")["hidden_states"].endswith("in mxfp4a16")


def test_the_public_sets_can_be_matched(script: Any, shared: Path, tmp_path: Path) -> None:
    def some(path: str, count: int, name: str) -> str:
        return str(write(tmp_path / name, read_conversations([shared / "data" / path])[:count]))

    chosen = ("gpteacher_code", "gsm8k_train", "nq_open", "oasst_zh", "sgd_dialogues")
    few = tuple(some(f"train/{name}.jsonl", 120, f"{name}.jsonl") for name in chosen)
    asked = some("heldout/humaneval.jsonl", 40, "a.jsonl"), some("heldout/belle_eval_zh.jsonl", 60, "b.jsonl")
    script.main(script.Options(pool=few, traffic=asked, out=tmp_path / "out", floor=0.1))
    report = read_json(tmp_path / "out" / "report.json")
    assert report["kl_after"] < report["kl_before"]
    assert report["languages"]["zh"]["before"] < 0.25 < report["languages"]["zh"]["after"]
    weights = read_weights(tmp_path / "out" / "weights.parquet")
    means = {name: weights.of(read_conversations([path])).mean() for name, path in zip(chosen, few, strict=True)}
    others = max(means[name] for name in ("gsm8k_train", "nq_open", "sgd_dialogues"))
    assert means["oasst_zh"] > 2
    # HumanEval's bare functions are no group of this pool: what is nearest, code that is asked for, stands in.
    assert means["gpteacher_code"] > 1.3 * others


def refused(cwd: Path, *flags: str) -> str:
    environ = {k: v for k, v in os.environ.items() if k != "BITDRAFT_DEBUG"}
    command = [sys.executable, str(SCRIPT), *flags]
    done = subprocess.run(command, env=environ, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stdout + done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_a_mistake_ends_with_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    broken = write(tmp_path / "broken.jsonl", pool())
    broken.write_text(broken.read_text(encoding="utf-8") + "{oops\n", encoding="utf-8")
    write(tmp_path / "traffic.jsonl", traffic())
    said = refused(tmp_path, "broken.jsonl", "--traffic", "traffic.jsonl", "--out", "out")
    assert said.startswith("error: broken.jsonl, line 181: not JSON")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty: it holds no record"),
        ('{"id": 1}\n', "line 1"),
        (5 * '{"conversations": [{"role": "user", "content": "q"}]}\n', "has 5 records"),
    ],
)
def test_traffic_that_cannot_be_used_is_named(script: Any, tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "traffic.jsonl").write_text(content, encoding="utf-8")
    write(tmp_path / "pool.jsonl", pool())
    options = script.Options(
        pool=(str(tmp_path / "pool.jsonl"),), traffic=(str(tmp_path / "traffic.jsonl"),), out=tmp_path / "out"
    )
    with pytest.raises(ValueError, match=said):
        script.main(options)


def test_options_that_make_no_sense_are_refused(script: Any, tmp_path: Path) -> None:
    good: dict[str, Any] = {"pool": ("a",), "traffic": ("b",), "out": tmp_path}
    for change, said in (({"pool": ()}, "name the files of the pool"), ({"traffic": ()}, "--traffic needs"),
                         ({"subset": 0}, "--subset must be at least 1")):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            script.Options(**{**good, **change})


def test_thinking_survives_the_way_through_the_files(tmp_path: Path) -> None:
    [one] = records("code", 1)
    turns = (*one.messages, Message("assistant", "Yes.", thinking="Hm."))
    thought = replace(one, messages=turns, answers=((1, 2),), answered_by="t/r")
    [again] = read_conversations([write(tmp_path / "one.jsonl", [thought])])
    assert replace(again, source=thought.source) == thought
