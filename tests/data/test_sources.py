"""Conversations from files, folders and the hub: what is read, in which shares, and what each bad source says."""

import gzip
import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitdraft.data.conversation import Conversation, Message
from bitdraft.data.sources import demo_file, iter_conversations, mix_counts, read_conversations

GOOD = '{"id": "a", "category": "chat", "conversations": [{"role": "user", "content": "Hi"}]}'


def written(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_records_are_read_in_order_with_their_place(tmp_path: Path) -> None:
    second = {
        "conversations": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Grüß Gott\n🙂"},
            {"role": "assistant", "content": ""},
        ]
    }
    path = written(tmp_path, GOOD, "", json.dumps(second), GOOD.replace('"a"', "7"))
    first, other, third = read_conversations([path])
    assert first == Conversation("a", "chat", (Message("user", "Hi"),), f"{path}, line 1")
    assert [m.as_dict() for m in other.messages] == second["conversations"]
    assert other.source == f"{path}, line 3"
    assert other.id, "a record without an id still gets one"
    assert third.id == "7"


def test_several_files_follow_each_other(tmp_path: Path) -> None:
    paths = []
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        paths.append(written(tmp_path / name, GOOD.replace('"a"', f'"{name}"')))
    assert [c.id for c in read_conversations(paths)] == ["b", "a"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"conversations": [', "not JSON"),
        ("plain text", r"not JSON \(.* at column 1\)"),
        ('["a", "b"]', "expected the key 'conversations', found list"),
        ('{"turns": 1, "id": 1}', r"expected the key 'conversations' \(or 'messages', .*\), found id, turns"),
        ("{}", "found no key"),
        ('{"conversations": []}', "at least one message"),
        ('{"conversations": "Hi"}', "must be a list"),
        ('{"conversations": ["Hi"]}', "every message needs a 'role'"),
        ('{"conversations": [{"role": "poet", "content": "Hi"}]}', r"'role' \(system, user, assistant, tool\)"),
        ('{"conversations": [{"content": "Hi"}]}', "every message needs a 'role'"),
        ('{"conversations": [{"role": "user", "content": null}]}', "text 'content'"),
        ('{"conversations": [{"role": "user", "content": ["Hi"]}]}', "text 'content'"),
        ('{"conversations": [{"role": "assistant", "content": "Hi"}]}', "no user message"),
    ],
)
def test_a_bad_record_names_its_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path, GOOD, line, GOOD)
    with pytest.raises(ValueError, match=message) as caught:
        read_conversations([path])
    assert str(caught.value).startswith(f"{path}, line 2: ")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.jsonl does not exist"):
        read_conversations([tmp_path / "none.jsonl"])


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_an_empty_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"{path} is empty"):
        read_conversations([written(tmp_path, GOOD), path])


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "binary.jsonl"
    path.write_bytes(GOOD.encode() + b"\n\xff\xfe\x00")
    with pytest.raises(ValueError, match=rf"{path} is not UTF-8"):
        read_conversations([path])


def test_the_shipped_prompts_load_and_no_two_files_share_one() -> None:
    files = {split: read_conversations([demo_file(split)]) for split in ("train", "traffic", "heldout")}
    assert {split: len(records) for split, records in files.items()} == {"train": 770, "traffic": 40, "heldout": 80}
    every = [record for records in files.values() for record in records]
    assert len({record.id for record in every}) == len(every)
    prompts = ["\n".join(m.content for m in record.messages) for record in every]
    assert len(set(prompts)) == len(prompts)
    assert {m.role for record in every for m in record.messages} == {"user"}


def test_no_two_shipped_prompts_share_eight_words_in_a_row() -> None:
    seen: dict[tuple[str, ...], str] = {}
    for split in ("train", "traffic", "heldout"):
        for record in read_conversations([demo_file(split)]):
            words = " ".join(m.content for m in record.messages).lower().split()
            for run in {tuple(words[i : i + 8]) for i in range(len(words) - 7)}:
                assert seen.setdefault(run, record.id) == record.id, f"{record.id} and {seen[run]}: {' '.join(run)}"


def test_shipped_files_begin_with_a_balanced_sample() -> None:
    for split in ("train", "traffic", "heldout"):
        first = read_conversations([demo_file(split)])[:5]
        assert len({record.category for record in first}) == 5


# ---- kinds of sources


def record(text: str) -> str:
    return json.dumps({"conversations": [{"role": "user", "content": text}]})


def asked(conversations: list[Conversation]) -> list[str]:
    return [c.messages[0].content for c in conversations]


def file_of(path: Path, *texts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{record(text)}\n" for text in texts), encoding="utf-8")
    return path


def test_a_file_is_read_by_its_suffix(tmp_path: Path) -> None:
    records = [json.loads(record(text)) for text in ("a", "b")]
    (tmp_path / "list.json").write_text(json.dumps(records), encoding="utf-8")
    datasets.Dataset.from_list(records).to_parquet(str(tmp_path / "rows.parquet"))
    with gzip.open(tmp_path / "lines.jsonl.gz", "wt", encoding="utf-8") as lines:
        lines.write(f"{record('a')}\n{record('b')}\n")
    for name, place in [("list.json", "record 2"), ("rows.parquet", "row 2"), ("lines.jsonl.gz", "line 2")]:
        conversations = read_conversations([tmp_path / name])
        assert asked(conversations) == ["a", "b"]
        assert conversations[1].source == f"{tmp_path / name}, {place}"


def test_folders_and_globs_are_their_files_by_name(tmp_path: Path) -> None:
    file_of(tmp_path / "b.jsonl", "b")
    file_of(tmp_path / "a.jsonl", "a")
    file_of(tmp_path / "deep" / "c.jsonl", "c")
    (tmp_path / "README.md").write_text("no data")
    (tmp_path / ".half.jsonl").write_text("not yet whole")
    assert asked(read_conversations([str(tmp_path)])) == ["a", "b", "c"]
    assert asked(read_conversations([f"{tmp_path}/*.jsonl"])) == ["a", "b"]
    assert asked(read_conversations([f"{tmp_path}/**/[bc].jsonl"])) == ["b", "c"]
    assert asked(read_conversations([f"{tmp_path}/*"])) == ["a", "b", "c"]


def test_a_byte_order_mark_and_odd_line_ends_are_no_part_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + record("a").encode() + b"\r\n\r\n" + record("b").encode())
    assert asked(read_conversations([path])) == ["a", "b"]


def test_records_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    path = file_of(tmp_path / "a.jsonl", "a", "b")
    path.write_text(path.read_text() + "broken\n")
    assert asked(list(islice(iter_conversations([path]), 2))) == ["a", "b"]


class Hub:
    """Stands for ``datasets.load_dataset``: remembers what was asked."""

    def __init__(self, rows: int, error: Exception | None = None) -> None:
        self.rows, self.error = rows, error
        self.calls: list[tuple[Any, ...]] = []

    def load_dataset(self, path: str, name: str | None, *, split: str, data_files: Any, streaming: bool) -> Any:
        self.calls.append((path, name, split, data_files, streaming))
        return self._rows()

    def _rows(self) -> Iterator[dict[str, Any]]:
        for number in range(self.rows):
            yield {"prompt": f"question {number}", "completion": "answer", "id": None}
        if self.error:
            raise self.error


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("org/set", ("org/set", None, "train")),
        ("org/set:main", ("org/set", "main", "train")),
        ("org/set:main:test", ("org/set", "main", "test")),
        ("org/set::test_sft", ("org/set", None, "test_sft")),
    ],
)
def test_a_dataset_of_the_hub_is_streamed(
    monkeypatch: pytest.MonkeyPatch, source: str, call: tuple[str, str | None, str]
) -> None:
    hub = Hub(3)
    monkeypatch.setattr(datasets, "load_dataset", hub.load_dataset)
    conversations = read_conversations([source])
    assert hub.calls == [(*call, None, True)]
    assert asked(conversations) == ["question 0", "question 1", "question 2"]
    assert conversations[2].source == conversations[2].id == f"org/set, {call[1] or call[2]}, row 3"


def test_a_path_that_exists_is_no_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file_of(tmp_path / "org" / "set" / "a.jsonl", "a")
    file_of(tmp_path / "odd@0.5.jsonl", "odd")
    assert asked(read_conversations(["org/set"])) == ["a"]
    assert asked(read_conversations(["odd@0.5.jsonl"])) == ["odd"]


@pytest.mark.parametrize("error", [ConnectionError("no network"), datasets.exceptions.DatasetNotFoundError("gone")])
def test_a_dataset_that_cannot_be_had_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(datasets, "load_dataset", Hub(2, error).load_dataset)
    with pytest.raises(ValueError, match="no file or folder org/set exists, and as a dataset org/set cannot be had"):
        read_conversations(["org/set"], skip_bad=True)


# ---- shares


def pools(folder: Path, **records: int) -> dict[str, Path]:
    return {name: file_of(folder / f"{name}.jsonl", *(f"{name}{i}" for i in range(n))) for name, n in records.items()}


def shares_of(conversations: list[Conversation]) -> Counter[str]:
    return Counter(text[0] for text in asked(conversations))


def test_the_mix_has_the_shares_and_is_as_large_as_it_can_be(tmp_path: Path) -> None:
    paths = pools(tmp_path, a=60, b=100, c=100)
    mix = read_conversations([f"{paths['a']}@0.6", f"{paths['b']}@0.3", f"{paths['c']}@0.1"])
    assert shares_of(mix) == {"a": 60, "b": 30, "c": 10}
    assert len(set(asked(mix))) == 100, "no record twice"
    assert shares_of(read_conversations([f"{paths['a']}@6", f"{paths['b']}@3", f"{paths['c']}@1"])) == shares_of(mix)
    for size in (10, 20, 50):
        assert all(
            abs(shares_of(mix[:size])[name] - size * share) <= 1
            for name, share in zip("abc", (0.6, 0.3, 0.1), strict=True)
        )


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-3, 1e3)), min_size=1, max_size=6),
)
def test_counts_of_a_mix_follow_the_shares_and_use_up_a_source(pairs: list[tuple[int, float]]) -> None:
    records, shares = [n for n, _ in pairs], [share for _, share in pairs]
    counts = mix_counts(records, shares)
    assert all(1 <= count <= n for count, n in zip(counts, records, strict=True))
    assert any(count == n for count, n in zip(counts, records, strict=True)), "the mix could be larger"
    size = min(n / share for n, share in pairs)
    assert all(abs(count - share * size) <= 1 for count, share in zip(counts, shares, strict=True))


def test_which_records_stay_depends_on_what_they_ask_and_on_the_seed(tmp_path: Path) -> None:
    small, large = pools(tmp_path, a=10, b=200).values()
    shuffled = tmp_path / "shuffled.jsonl"
    lines = large.read_text().splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    shuffled.write_text("".join(lines))

    def chosen(path: Path, seed: int = 0) -> list[str]:
        return [t for t in asked(read_conversations([f"{small}@1", f"{path}@1"], seed=seed)) if t[0] == "b"]

    assert sorted(chosen(large)) == sorted(chosen(shuffled))
    assert len(chosen(large)) == 10
    assert chosen(large) == chosen(large), "the order is stable"
    assert set(chosen(large)) != set(chosen(large, seed=1))
    assert set(chosen(large)) != {f"b{i}" for i in range(10)}
    positions = [int(t[1:]) for t in chosen(large)]
    assert positions == sorted(positions), "in the order of the file"


def test_records_that_are_the_same_are_still_counted(tmp_path: Path) -> None:
    one, same = file_of(tmp_path / "a.jsonl", "x", "y"), file_of(tmp_path / "b.jsonl", *["same"] * 5)
    assert sorted(asked(read_conversations([f"{one}@1", f"{same}@1"]))) == ["same", "same", "x", "y"]


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        (("@0.5", ""), "b.jsonl has no share, but others have"),
        (("@0", "@1"), "must be above 0 and finite, got 0"),
        (("@-1", "@1"), "must be above 0"),
        (("@nan", "@1"), "must be above 0"),
        (("@half", "@1"), "must be a number, got 'half'"),
    ],
)
def test_shares_that_make_no_mix_are_refused(tmp_path: Path, shares: tuple[str, str], message: str) -> None:
    a, b = pools(tmp_path, a=2, b=2).values()
    with pytest.raises(ValueError, match=message):
        read_conversations([f"{a}{shares[0]}", f"{b}{shares[1]}"])


# ---- bad records that are left out


def test_bad_records_can_be_left_out_and_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    lines = [record("a").encode(), b"{broken", b"\xff\xfe", b"[1]", record("b").encode(), b'{"messages": []}']
    path.write_bytes(b"\n".join(lines) + b"\n")
    said: list[str] = []
    assert asked(read_conversations([path], skip_bad=True, report=said.append)) == ["a", "b"]
    assert said == [
        f"4 bad records skipped, the first: {path}, line 2: not JSON "
        "(Expecting property name enclosed in double quotes at column 2)"
    ]
    skipped: list[ValueError] = []
    both = [f"{path}@1", f"{file_of(tmp_path / 'whole.jsonl', 'c')}@1"]
    mix = list(iter_conversations(both, skip_bad=True, skipped=skipped.append))
    assert len(mix) == 2
    assert len(skipped) == 4, "once each, though a mix reads its sources twice"
    with pytest.raises(ValueError, match="line 2: not JSON"):
        read_conversations([path])


def test_nothing_is_said_where_nothing_is_left_out(tmp_path: Path) -> None:
    said: list[str] = []
    read_conversations([file_of(tmp_path / "a.jsonl", "a")], skip_bad=True, report=said.append)
    assert said == []


def test_a_file_of_nothing_but_bad_records_is_refused_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("{}\n{}\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl is empty: none of its 2 records can be used"):
        read_conversations([path], skip_bad=True)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cut.jsonl.gz", gzip.compress(b"{}" * 9000)[:40], r"cut\.jsonl\.gz cannot be read to its end"),
        ("no.jsonl.gz", b"plain", r"no\.jsonl\.gz cannot be read to its end: Not a gzipped file"),
        ("no.parquet", b"plain", r"no\.parquet is not a Parquet file"),
        ("no.json", b"{}\n{}", r"no\.json, line 2: not a JSON list"),
        ("table.csv", b"a,b", r"table\.csv is none of \.jsonl, .*: rename it"),
        ("deep.jsonl", b"[" * 100_000, r"deep\.jsonl, line 1: not a record \(nested too deeply\)"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_conversations([tmp_path / name])


def test_a_source_that_names_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the folder .* holds no \.jsonl"):
        read_conversations([tmp_path])
    with pytest.raises(ValueError, match=r"no data file is named like .*\*\.jsonl"):
        read_conversations([f"{tmp_path}/*.jsonl"])


# ---- real public sets


def test_every_public_set_reads_and_traces_without_text_say_so(shared: Path) -> None:
    files = sorted((shared / "data").glob("[!t]*/*.jsonl")) + sorted((shared / "data" / "train").glob("*.jsonl"))
    assert len(files) == 23
    for path in files:
        conversations = read_conversations([path])
        assert len(conversations) == sum(1 for line in path.open(encoding="utf-8") if line.strip())
        assert all(any(m.role == "user" for m in c.messages) for c in conversations)
    for path in (shared / "data" / "traces").glob("*.jsonl"):
        with pytest.raises(ValueError, match=r"line 1: expected the key 'conversations' .*found output_tokens"):
            read_conversations([path])
