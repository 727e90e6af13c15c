"""Files of answers: appended record by record, found again after a kill, put in order at the end."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bitdraft.data.answer_files import AnswerFile, answered_record, key_of
from bitdraft.data.conversation import Conversation, Message
from bitdraft.data.sources import read_conversations

SETTINGS = {"target": "t", "max_new_tokens": 8}


def asked(*texts: str) -> list[Conversation]:
    return [Conversation(f"c{i}", "chat", (Message("user", t),), f"f, line {i}") for i, t in enumerate(texts)]


def answer(conversation: Conversation, *, finished: bool = True, text: str = "yes") -> dict[str, Any]:
    messages = [*conversation.messages, Message("assistant", text)]
    return answered_record(conversation, messages, answered_by="t/r", finished=[finished], answers=[[1, 2]])


def ids_in(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_records_come_out_in_the_order_in_which_they_were_asked(tmp_path: Path) -> None:
    out, wanted = tmp_path / "new" / "a.jsonl", asked("one", "zwei ä🙂", "three")
    with AnswerFile(out, SETTINGS) as file:
        assert file.waiting(wanted) == wanted
        for conversation in reversed(wanted):
            file.append(
                answer(
                    conversation, finished=conversation is not wanted[0], text="" if conversation is wanted[1] else "x"
                )
            )
        assert not out.exists()
        counts = file.finish(wanted, {"date": "today"})
    assert ids_in(out) == ["c0", "c1", "c2"]
    assert sorted(p.name for p in out.parent.iterdir()) == ["a.jsonl", "a.jsonl.about.json"]
    assert vars(counts) == {"records": 3, "answers": 3, "tokens": 6, "empty": 1, "cut": 1, "unanswered": 0}
    about = json.loads((tmp_path / "new" / "a.jsonl.about.json").read_text(encoding="utf-8"))
    assert about["settings"] == SETTINGS and about["cut"] == 1 and about["date"] == "today"


def test_a_reader_finds_what_was_written(tmp_path: Path) -> None:
    out, wanted = tmp_path / "a.jsonl", asked("one")
    with AnswerFile(out, SETTINGS) as file:
        file.append(answer(wanted[0]))
        file.finish(wanted, {})
    (read,) = read_conversations([out])
    assert (read.id, read.category, read.answers, read.answered_by) == ("c0", "chat", ((1, 2),), "t/r")
    assert read.key == wanted[0].key
    assert [m.content for m in read.messages] == ["one", "yes"]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 10_000))
def test_a_file_cut_off_anywhere_goes_on(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    """Whatever a kill or a power cut leaves, finished records are found again and half a line is written anew."""
    out, wanted = tmp_path_factory.mktemp("cut") / "a.jsonl", asked("one", "zwei ä🙂", "three", "four")
    with AnswerFile(out, SETTINGS) as file:
        for conversation in wanted[:3]:
            file.append(answer(conversation))
    content = file.partial.read_bytes()
    kept = content[: cut % (len(content) + 1)]
    file.partial.write_bytes(kept)
    whole = max(kept.count(b"\n") - 1, 0)
    with AnswerFile(out, SETTINGS) as file:
        waiting = file.waiting(wanted)
        assert [c.id for c in waiting] == [c.id for c in wanted[whole:]]
        for conversation in waiting:
            file.append(answer(conversation))
        assert file.finish(wanted, {}).records == 4
    assert ids_in(out) == ["c0", "c1", "c2", "c3"]


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    out, wanted = tmp_path / "a.jsonl", asked("one")
    with AnswerFile(out, SETTINGS) as file:
        file.append(answer(wanted[0]))
    other = {**SETTINGS, "max_new_tokens": 9, "seed": 1}
    message = r"a\.jsonl was begun with other settings \(max_new_tokens 8, now 9, seed None, now 1\)"
    with pytest.raises(ValueError, match=message), AnswerFile(out, other):
        pass
    with AnswerFile(out, SETTINGS) as file:
        file.finish(wanted, {})
    with pytest.raises(ValueError, match=message), AnswerFile(out, other):
        pass
    assert ids_in(out) == ["c0"]


def test_a_finished_file_takes_further_records_and_loses_none(tmp_path: Path) -> None:
    out, wanted = tmp_path / "a.jsonl", asked("one", "two", "three")
    with AnswerFile(out, SETTINGS) as file:
        file.append(answer(wanted[1]))
        file.finish(wanted[1:2], {})
    with AnswerFile(out, SETTINGS) as file:
        assert file.waiting(wanted) == [wanted[0], wanted[2]]
        file.append(answer(wanted[2]))  # and is killed
    assert ids_in(out) == ["c1"]
    with AnswerFile(out, SETTINGS) as file:
        (left,) = file.waiting(wanted)
        file.append(answer(left))
        file.finish(wanted, {})
    assert ids_in(out) == ["c0", "c1", "c2"]
    with AnswerFile(out, SETTINGS) as file, pytest.raises(ValueError, match="holds 2 answered records that are not"):
        file.waiting(wanted[:1])
    assert ids_in(out) == ["c0", "c1", "c2"]


def test_records_that_ask_the_same_are_answered_once_and_written_each(tmp_path: Path) -> None:
    out, wanted = tmp_path / "a.jsonl", asked("same", "other", "same")
    with AnswerFile(out, SETTINGS) as file:
        assert [c.id for c in file.waiting(wanted)] == ["c0", "c1"]
        for conversation in file.waiting(wanted):
            file.append(answer(conversation))
        assert file.finish(wanted, {}).records == 3
    assert ids_in(out) == ["c0", "c1", "c2"]


def test_records_without_an_answer_are_left_for_the_next_time(tmp_path: Path) -> None:
    out, wanted = tmp_path / "a.jsonl", asked("one", "two")
    with AnswerFile(out, SETTINGS) as file:
        file.append(answer(wanted[1]))
        assert file.finish(wanted, {}).records == 1
    with AnswerFile(out, SETTINGS) as file:
        assert file.waiting(wanted) == [wanted[0]]


def test_turns_behind_the_last_answer_stay_in_the_record_and_count(tmp_path: Path) -> None:
    two = Conversation("c", "", (Message("user", "one"), Message("user", "two")), "f")
    messages = [two.messages[0], Message("assistant", "yes"), two.messages[1]]
    record = answered_record(two, messages, answered_by="", finished=[True])
    assert key_of(record) == two.key
    assert "answers" not in record and "answered_by" not in record
    with AnswerFile(tmp_path / "a.jsonl", SETTINGS) as file:
        file.append(record)
        assert file.finish([two], {}).unanswered == 1


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    with (
        AnswerFile(tmp_path / "a.jsonl", SETTINGS),
        pytest.raises(ValueError, match="another run writes"),
        AnswerFile(tmp_path / "a.jsonl", SETTINGS),
    ):
        pass


def test_somebody_elses_file_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    out.write_text("mine\n", encoding="utf-8")
    with pytest.raises(ValueError, match="was not written by this script"), AnswerFile(out, SETTINGS):
        pass
    out.unlink()
    (tmp_path / "a.jsonl.partial").write_text('{"also": "mine"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="does not begin as"), AnswerFile(out, SETTINGS):
        pass
    assert (tmp_path / "a.jsonl.partial").read_text(encoding="utf-8") == '{"also": "mine"}\n'


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    with AnswerFile(tmp_path / "a.jsonl", SETTINGS) as file:
        file.append(answer(asked("one")[0]))
    with file.partial.open("a") as lines:
        lines.write("{broken\n")
    with pytest.raises(ValueError, match=r"partial, line 3: no answered record"), AnswerFile(file.out, SETTINGS):
        pass


def test_a_full_disk_is_said_and_loses_nothing(tmp_path: Path) -> None:
    wanted = asked("one", "two")
    with AnswerFile(tmp_path / "a.jsonl", SETTINGS) as file:
        file.append(answer(wanted[0]))
        with Path("/dev/full").open("a+b") as full:
            real, file._file = file._file, full
            with pytest.raises(OSError, match=r"No space left on device; 1 finished records are kept: make room"):
                file.append(answer(wanted[1]))
            file._file = real
            full.raw.close()  # what it buffers has no place to go
    with AnswerFile(tmp_path / "a.jsonl", SETTINGS) as file:
        assert file.waiting(wanted) == [wanted[1]]
