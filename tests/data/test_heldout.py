"""Held-out sets by name: every published form is read, the hub is asked for the right thing, bad files say where."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitdraft.data.conversation import Conversation, Message
from bitdraft.data.heldout import HELD_OUT_SETS, _spread, describe, load_set
from bitdraft.data.sources import demo_file, read_conversations

GSM8K = {"question": "Janet's ducks lay 16 eggs. How many?", "answer": "16\n#### 16"}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def f(x):\n    """Return {x}."""\n',
    "entry_point": "f",
    "canonical_solution": "    return x\n",
    "test": "def check(f): ...",
}
MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Rewrite it."], "reference": []}
SPEC_BENCH = {"question_id": 161, "category": "translation", "turns": ["Translate German to English: Hallo"]}
ALPACA = {"instruction": "Sort these.", "input": "3 1 2", "output": "1 2 3", "text": "Below is …"}
SHAREGPT = {
    "id": "QWJhYvA_0",
    "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
}
CEVAL = {
    "id": 0,
    "question": "1+1等于____。",
    "A": "1",
    "B": "2",
    "C": "3",
    "D": "4",
    "answer": "B",
    "explanation": "",
}
PUBLISHED = {
    "gsm8k": (GSM8K, ["Janet's ducks lay 16 eggs. How many?"], "gsm8k-0", "gsm8k"),
    "humaneval": (HUMANEVAL, ['def f(x):\n    """Return {x}."""\n'], "HumanEval/0", "humaneval"),
    "mt-bench": (MT_BENCH, ["Write a post.", "Rewrite it."], "81", "writing"),
    "spec-bench": (SPEC_BENCH, ["Translate German to English: Hallo"], "161", "translation"),
    "alpaca": (ALPACA, ["Sort these.\n\n3 1 2"], "alpaca-0", "alpaca"),
    "sharegpt": (SHAREGPT, ["Hi"], "sharegpt-0", "sharegpt"),
    "ceval": (
        CEVAL,
        ["以下是单项选择题，请选出其中的正确答案。\n\n1+1等于____。\nA. 1\nB. 2\nC. 3\nD. 4\n答案："],
        "ceval-0",
        "ceval",
    ),
}


def write_lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def write_list(path: Path, *records: Any) -> Path:
    path.write_text(json.dumps(records), encoding="utf-8")
    return path


def write_parquet(path: Path, *records: Any) -> Path:
    datasets.Dataset.from_list(list(records)).to_parquet(str(path))
    return path


def asked(conversations: list[Conversation]) -> list[list[str]]:
    assert all(m.role == "user" for c in conversations for m in c.messages)
    return [[m.content for m in c.messages] for c in conversations]


# ---- local files


def test_every_set_but_the_shipped_one_has_a_sample_here() -> None:
    assert set(PUBLISHED) == set(HELD_OUT_SETS) - {"demo"}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize(
    ("suffix", "write", "place"),
    [
        (".jsonl", write_lines, "line 1"),
        (".json", write_list, "record 1"),
        (".parquet", write_parquet, "row 1"),
    ],
)
def test_the_published_form_is_read(
    tmp_path: Path, name: str, suffix: str, write: Callable[..., Path], place: str
) -> None:
    record, questions, key, category = PUBLISHED[name]
    path = write(tmp_path / f"{name}{suffix}", record)
    [conversation] = load_set(name, folder=tmp_path)
    messages = tuple(Message("user", question) for question in questions)
    assert conversation == Conversation(key, category, messages, f"{path}, {place}")


def test_our_own_form_is_read_with_all_its_roles(tmp_path: Path) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    path = write_lines(tmp_path / "gsm8k.jsonl", {"id": "a", "category": "math", "turns": 2, "conversations": turns})
    assert load_set("gsm8k", folder=tmp_path) == read_conversations([path])


def test_eagles_question_files_stand_for_any_set(tmp_path: Path) -> None:
    write_lines(tmp_path / "gsm8k.jsonl", {"question_id": 7, "category": "math", "turns": ["How many?"]})
    [conversation] = load_set("gsm8k", folder=tmp_path)
    assert (conversation.id, conversation.category) == ("7", "math")
    assert asked([conversation]) == [["How many?"]]


def test_an_instruction_without_input_stands_alone(tmp_path: Path) -> None:
    write_lines(tmp_path / "alpaca.jsonl", {**ALPACA, "input": ""})
    assert asked(load_set("alpaca", folder=tmp_path)) == [["Sort these."]]


def test_sharegpt_keeps_the_conversations_that_a_human_opens(tmp_path: Path) -> None:
    human, gpt = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}
    others = [[], [human], [gpt, human], [{"from": "human", "value": " "}, gpt]]
    kept = [[{"from": "user", "value": "A"}, gpt], [human, gpt, {"from": "human", "value": "And then?"}]]
    write_list(tmp_path / "sharegpt.json", *({"conversations": c} for c in [*others, *kept]))
    conversations = load_set("sharegpt", folder=tmp_path)
    assert asked(conversations) == [["A"], ["Hi"]]
    assert [c.source.rpartition(", ")[2] for c in conversations] == ["record 5", "record 6"]


def test_a_set_begins_at_the_start_of_its_file_and_stops_at_the_usual_count(tmp_path: Path) -> None:
    write_lines(tmp_path / "gsm8k.jsonl", *({**GSM8K, "question": str(i)} for i in range(100)), "not a record")
    assert asked(load_set("gsm8k", folder=tmp_path, prompts=3)) == [["0"], ["1"], ["2"]]
    assert asked(load_set("gsm8k", folder=tmp_path)) == [[str(i)] for i in range(80)]


def test_a_part_of_spec_bench_is_a_part_of_every_task(tmp_path: Path) -> None:
    tasks = [f"task-{i // 80}" for i in range(480)]
    write_lines(tmp_path / "spec-bench.jsonl", *({"turns": ["Q"], "category": task} for task in tasks))
    assert [c.category for c in load_set("spec-bench", folder=tmp_path)] == tasks
    assert Counter(c.category for c in load_set("spec-bench", folder=tmp_path, prompts=12)) == dict.fromkeys(tasks, 2)


@given(st.integers(1, 60), st.integers(1, 60))
def test_spread_prompts_are_distinct_in_order_and_evenly_apart(total: int, count: int) -> None:
    rows = [Conversation(str(i), "", (Message("user", "?"),), "") for i in range(total)]
    chosen = [int(c.id) for c in _spread(rows, count)]
    assert len(chosen) == min(total, count)
    gaps = {b - a for a, b in pairwise(chosen)}
    assert chosen[0] == 0
    assert min(gaps, default=1) >= 1
    assert max(gaps, default=1) - min(gaps, default=1) <= 1


def test_the_shipped_set_needs_no_folder(tmp_path: Path) -> None:
    assert load_set("demo") == load_set("demo", folder=tmp_path) == read_conversations([demo_file("heldout")])
    assert len(load_set("demo", prompts=5)) == 5


@pytest.mark.parametrize(
    ("name", "file", "whole", "turns"),
    [
        ("gsm8k", "gsm8k_test", 1319, {1}),
        ("humaneval", "humaneval", 164, {1}),
        ("mt-bench", "mt_bench", 80, {2}),
        ("spec-bench", "spec_bench", 480, {1, 2}),
        ("gsm8k", "eagle_gsm8k", 80, {1}),
        ("humaneval", "eagle_humaneval", 80, {1}),
        ("ceval", "gaokao_zh", 370, {1}),
    ],
)
def test_the_real_files_are_read_whole_and_in_part(
    shared: Path, tmp_path: Path, name: str, file: str, whole: int, turns: set[int]
) -> None:
    path = tmp_path / f"{name}.jsonl"
    path.symlink_to(shared / "data" / "heldout" / f"{file}.jsonl")
    everything = load_set(name, folder=tmp_path, prompts=10_000)
    assert everything == read_conversations([path])
    assert len(everything) == whole
    assert {len(questions) for questions in asked(everything)} == turns
    usual = load_set(name, folder=tmp_path)
    assert len(usual) == min(whole, HELD_OUT_SETS[name].prompts)
    assert set(usual) <= set(everything)


# ---- the hub


class Hub:
    """Stands for ``datasets``' two functions: remembers what was asked, answers with the same records."""

    def __init__(self, records: list[dict[str, Any]], error: Exception | None = None) -> None:
        self.records, self.error = records, error
        self.calls: list[tuple[str, str | None, str, str | None]] = []

    def load_dataset(
        self, path: str, name: str | None, *, split: str, data_files: str | None, streaming: bool
    ) -> list[dict[str, Any]]:
        assert not streaming, "a set that was had once is there without network"
        self.calls.append((path, name, split, data_files))
        if self.error:
            raise self.error
        return self.records

    def get_dataset_config_names(self, path: str) -> list[str]:
        assert path == "ceval/ceval-exam"
        return ["accountant", "logic"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Hub]:
    def serve(*records: dict[str, Any], error: Exception | None = None) -> Hub:
        served = Hub(list(records), error)
        monkeypatch.setattr(datasets, "load_dataset", served.load_dataset)
        monkeypatch.setattr(datasets, "get_dataset_config_names", served.get_dataset_config_names)
        return served

    return serve


SHAREGPT_FILE = "ShareGPT_V4.3_unfiltered_cleaned_split.json"


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("gsm8k", ("openai/gsm8k", "main", "test", None)),
        ("humaneval", ("openai/openai_humaneval", None, "test", None)),
        ("mt-bench", ("philschmid/mt-bench", None, "train", None)),
        ("alpaca", ("tatsu-lab/alpaca", None, "train", None)),
        ("sharegpt", ("Aeala/ShareGPT_Vicuna_unfiltered", None, "train", SHAREGPT_FILE)),
    ],
)
def test_the_hub_is_asked_for_one_split(
    hub: Callable[..., Hub], tmp_path: Path, name: str, call: tuple[str, str | None, str, str | None]
) -> None:
    record, questions, _, category = PUBLISHED[name]
    served = hub(record)
    [conversation] = load_set(name, folder=tmp_path)
    assert served.calls == [call]
    assert asked([conversation]) == [questions]
    assert conversation.category == category
    assert conversation.source == f"{call[0]}, {call[1] or call[2]}, row 1"


def test_every_subject_of_ceval_is_asked_for_and_sampled(hub: Callable[..., Hub]) -> None:
    served = hub(*[CEVAL] * 10)
    conversations = load_set("ceval", prompts=4)
    assert served.calls == [("ceval/ceval-exam", subject, "val", None) for subject in ("accountant", "logic")]
    assert [c.category for c in conversations] == ["accountant", "accountant", "logic", "logic"]
    assert len({c.id for c in conversations}) == 4
    assert conversations[3].source == "ceval/ceval-exam, logic, row 6"


def test_a_local_file_is_preferred_to_the_hub(hub: Callable[..., Hub], tmp_path: Path) -> None:
    served = hub(GSM8K)
    write_lines(tmp_path / "gsm8k.jsonl", {**GSM8K, "question": "Local?"})
    assert asked(load_set("gsm8k", folder=tmp_path)) == [["Local?"]]
    assert served.calls == []


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub"),
        datasets.exceptions.DatasetNotFoundError("Dataset 'openai/gsm8k' doesn't exist on the Hub"),
        datasets.exceptions.DatasetGenerationError("An error occurred while generating the dataset"),
        ValueError("Unknown split 'test'"),
        RuntimeError("Dataset scripts are no longer supported"),
    ],
)
def test_a_set_that_cannot_be_fetched_says_how_to_give_it(
    hub: Callable[..., Hub], tmp_path: Path, error: Exception
) -> None:
    hub(error=error)
    with pytest.raises(ValueError, match="'gsm8k' cannot be had from the hub as openai/gsm8k") as caught:
        load_set("gsm8k")
    assert str(error) in str(caught.value)
    assert "gsm8k.jsonl in a folder named by --set-dir" in str(caught.value)
    with pytest.raises(ValueError, match=rf"write it to {tmp_path}/gsm8k\.jsonl"):
        load_set("gsm8k", folder=tmp_path)


def test_a_set_that_is_not_on_the_hub_says_so(hub: Callable[..., Hub]) -> None:
    served = hub()
    with pytest.raises(ValueError, match=r"'spec-bench' is not on the hub: write it to spec-bench\.jsonl"):
        load_set("spec-bench")
    assert served.calls == []


# ---- what goes wrong


@pytest.mark.parametrize(
    ("name", "nearest"), [("mtbench", "mt-bench"), ("GSM8K", "gsm8k"), ("human-eval", "humaneval")]
)
def test_an_unknown_set_names_the_nearest_and_all(name: str, nearest: str) -> None:
    for function in (load_set, describe):
        with pytest.raises(ValueError, match=rf"'{name}' \(did you mean '{nearest}'\?\): the sets are demo, mt-bench"):
            function(name)


def test_a_name_like_no_other_has_no_nearest() -> None:
    with pytest.raises(ValueError, match="unknown held-out set 'zzz': the sets are demo"):
        load_set("zzz")


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        (
            "gsm8k",
            {"prompt": "How many?"},
            "a record of gsm8k needs 'question' or our own JSON lines, but here are 'prompt'",
        ),
        ("ceval", {"question": "?", "A": "1"}, "needs 'question', 'A', 'B', 'C', 'D' or our own JSON lines"),
        ("mt-bench", {"prompt": ["a", "b"]}, "a record of mt-bench needs 'turns' or our own JSON lines"),
        ("sharegpt", {"items": []}, "needs 'conversations' or our own JSON lines"),
        ("gsm8k", ["How many?"], "expected a record, found list"),
        ("gsm8k", {"question": " \n"}, "no question: 'question' must hold text"),
        ("gsm8k", {"question": None}, "no question: 'question' must hold text"),
        ("gsm8k", {"question": ["How many?"]}, "no question: 'question' must hold text"),
        ("alpaca", {"instruction": "", "input": ""}, "no question: 'instruction', 'input' must hold text"),
        ("ceval", {**CEVAL, "question": ""}, "no question"),
        ("ceval", {**CEVAL, "C": None}, "no question"),
        ("mt-bench", {"turns": []}, "no question: 'turns' must hold text"),
        ("mt-bench", {"turns": ["Write.", ""]}, "no question: 'turns' must hold text"),
        ("mt-bench", {"turns": "Write."}, "no question: 'turns' must hold text"),
        ("mt-bench", {"turns": [{"content": "Write."}]}, "no question: 'turns' must hold text"),
        ("sharegpt", {"conversations": ["Hi", "Hello"]}, "no question: 'conversations' must hold text"),
        ("sharegpt", {"conversations": [{"from": "human", "value": None}]}, "no question"),
    ],
)
def test_a_bad_record_names_its_file_and_line(tmp_path: Path, name: str, record: Any, message: str) -> None:
    path = write_lines(tmp_path / f"{name}.jsonl", PUBLISHED[name][0], record)
    with pytest.raises(ValueError, match=message) as caught:
        load_set(name, folder=tmp_path, prompts=10)
    assert str(caught.value).startswith(f"{path}, line 2: ")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("gsm8k.jsonl", b'{"question": "?"}\n{', r"gsm8k\.jsonl, line 2: not JSON \("),
        ("gsm8k.jsonl", b"\xff\xfe{}", r"gsm8k\.jsonl is not UTF-8 text"),
        ("gsm8k.jsonl", b"", r"gsm8k\.jsonl is empty: it holds no prompt of the held-out set 'gsm8k'"),
        ("gsm8k.jsonl", b" \n\n", r"gsm8k\.jsonl is empty"),
        ("gsm8k.json", b"[]", r"gsm8k\.json is empty"),
        ("gsm8k.json", b"{}\n{}\n", r"gsm8k\.json, line 2: .*; records that stand one a line belong into a \.jsonl"),
        ("gsm8k.json", b'{"question": "?"}', r"gsm8k\.json: expected a JSON list of records, found dict"),
        ("gsm8k.json", b"\xff\xfe[]", r"gsm8k\.json is not UTF-8 text"),
        ("gsm8k.parquet", b"PAR1 not really", r"gsm8k\.parquet is not a Parquet file"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_set("gsm8k", folder=tmp_path)


def test_sharegpt_without_a_human_opening_is_empty(tmp_path: Path) -> None:
    write_lines(tmp_path / "sharegpt.jsonl", {"conversations": []})
    with pytest.raises(ValueError, match="is empty"):
        load_set("sharegpt", folder=tmp_path)


def test_two_files_for_one_set_are_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "gsm8k.jsonl", GSM8K)
    write_list(tmp_path / "gsm8k.json", GSM8K)
    with pytest.raises(ValueError, match=r"holds gsm8k\.jsonl and gsm8k\.json; keep the one to measure"):
        load_set("gsm8k", folder=tmp_path)


def test_a_missing_folder_and_no_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none does not exist"):
        load_set("gsm8k", folder=tmp_path / "none")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        load_set("demo", prompts=0)


def test_a_description_is_one_line_with_the_usual_counts() -> None:
    assert describe("mt-bench").startswith("mt-bench: 80 prompts × 2 turns; ")
    assert describe("spec-bench").startswith("spec-bench: 480 prompts × 1 or 2 turns; ")
    assert all("\n" not in describe(name) for name in HELD_OUT_SETS)
