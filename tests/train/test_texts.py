"""What is trained on, selected by and measured on: no prompt in two of them, unless that is asked for by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bitdraft.train.config import AcceptanceConfig, RunConfig, SelectionConfig
from bitdraft.train.texts import Texts, read_texts

SHARED = "Tell me, step by step and in plain words, how a rainbow comes about after a summer storm in the hills."


def file_of(path: Path, prompts: list[str]) -> Path:
    records = ({"id": str(i), "conversations": [{"role": "user", "content": p}]} for i, p in enumerate(prompts))
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


@pytest.fixture
def texts_of(tmp_path: Path) -> Callable[..., tuple[Texts, list[str]]]:
    def read(
        training: list[str], *, selection: list[str] | None = None, heldout: list[str] | None = None, allow: str = ""
    ) -> tuple[Texts, list[str]]:
        chosen = SelectionConfig(prompts=2)
        if selection is not None:
            chosen = replace(chosen, data=(file_of(tmp_path / "live.jsonl", selection),))
        config = RunConfig(
            data=(str(file_of(tmp_path / "train.jsonl", training)),),
            selection=chosen,
            acceptance=AcceptanceConfig(data=(file_of(tmp_path / "exam.jsonl", heldout or ["Who are you?"]),)),
            allow_contamination=(allow,) if allow else (),
        )
        said: list[str] = []
        return read_texts(config, said.append), said

    return read


OTHERS = [f"What is the capital of country number {i}, and since when?" for i in range(12)]


def prompts_of(texts: Texts) -> list[str]:
    return [c.messages[0].content for c in texts.training]


def test_the_last_records_are_held_back(texts_of: Callable[..., tuple[Texts, list[str]]]) -> None:
    texts, said = texts_of(OTHERS)
    assert prompts_of(texts) == OTHERS[:-2]
    assert [c.messages[0].content for c in texts.selection] == OTHERS[-2:]
    assert said == []


def test_what_is_nearly_held_back_is_not_trained_on_either(texts_of: Callable[..., tuple[Texts, list[str]]]) -> None:
    texts, said = texts_of([SHARED, *OTHERS, SHARED.upper() + " And then?"])
    assert prompts_of(texts) == OTHERS[:-1]
    assert said == ["1 records nearly ask what the 2 held back for selection ask: left out"]
    with pytest.raises(ValueError, match="nearly all ask the same"):
        texts_of([SHARED] * 12)


@pytest.mark.parametrize(
    ("held", "name", "use"), [("selection", "live", "selected by"), ("heldout", "exam", "measured")]
)
def test_training_on_what_is_measured_is_refused(
    texts_of: Callable[..., tuple[Texts, list[str]]], held: str, name: str, use: str
) -> None:
    training, other = [*OTHERS, SHARED], ["Hello!", SHARED.replace("Tell", "tell")]
    given = {"selection": ["Another?"], held: other}
    with pytest.raises(ValueError, match=rf"1 training records nearly hold prompts that the head is {use}") as caught:
        texts_of(training, **given)
    assert "train.jsonl, line 13" in str(caught.value) and f"{name}.jsonl, line 2" in str(caught.value)
    assert f"--allow-contamination {name}" in str(caught.value)
    texts, _ = texts_of(training, **given, allow=name)
    assert prompts_of(texts) == training
    with pytest.raises(ValueError, match="nearly hold"):
        texts_of(training, **given, allow="other")


def test_shipped_prompts_share_nothing() -> None:
    texts = read_texts(RunConfig(), lambda said: pytest.fail(said))
    assert (len(texts.training), len(texts.selection), len(texts.heldout)) == (770, 24, 80)


def test_fingerprints_follow_the_text(texts_of: Callable[..., tuple[Texts, list[str]]]) -> None:
    one, again, other = (texts_of(p)[0].fingerprints for p in (OTHERS, OTHERS, [*OTHERS[:-3], "New.", *OTHERS[-2:]]))
    assert one == again and one["data"] != other["data"] and one["selection.data"] == other["selection.data"]
