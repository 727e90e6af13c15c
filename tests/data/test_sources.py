"""Conversations from files: what is read, and what each kind of bad file says."""

import json
from pathlib import Path

import pytest

from bitdraft.data.sources import Conversation, Message, demo_file, read_conversations

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
        ('{"messages": [], "id": 1}', "expected the key 'conversations', found id, messages"),
        ('{"conversations": []}', "at least one message"),
        ('{"conversations": "Hi"}', "must be a list"),
        ('{"conversations": ["Hi"]}', "every message needs a 'role'"),
        ('{"conversations": [{"role": "human", "content": "Hi"}]}', r"'role' \(system, user, assistant, tool\)"),
        ('{"conversations": [{"from": "user", "value": "Hi"}]}', "every message needs a 'role'"),
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
