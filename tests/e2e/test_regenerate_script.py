"""scripts/regenerate.py as a person runs it: killed and resumed, refused, asked of a server."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_server import Faulty, echo
from tiny import save_tiny_target

from bitdraft.data.chat import written_examples
from bitdraft.data.dialogs import AnswerSettings
from bitdraft.data.regenerate import foreign_answers, on_policy_examples
from bitdraft.data.sources import read_conversations
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget, load_target, load_tokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "regenerate.py"
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    system = {"role": "system", "content": "Be odd."}
    records = [
        {
            "id": f"r{i}",
            "category": "c",
            "conversations": [system, *({"role": "user", "content": f"{t} {i}"} for t in ("one", "two"))],
        }
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def command(prompts: Path, out: Path, folder: Path | None, *flags: object) -> list[str]:
    target = ["--target", folder, "--target-quant", "none", "--dtype", "float32", "--batch-size", 2] if folder else []
    given = [sys.executable, SCRIPT, prompts, "--out", out, "--max-new-tokens", NEW_TOKENS, *target, *flags]
    return [str(part) for part in given]


def run(asked: list[str], *, expect: int = 0, **environment: str) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        asked, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == expect, done.stderr[-2000:]
    return done


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that writes no token which its tokenizer does not know."""
    return save_tiny_target(tmp_path_factory.mktemp("known") / "target", vocab_size=259)


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> LowBitTarget:
    return load_target(str(tiny_folder), load_recipe("none"), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(str(tiny_folder))


@pytest.fixture(scope="module")
def whole(prompts: Path, tiny_folder: Path) -> Path:
    """Sampled answers, written without a break."""
    out = prompts.with_name("whole.jsonl")
    done = run(command(prompts, out, tiny_folder, "--temperature", 1, "--seed", 5))
    assert "12 records, 24 answers" in done.stdout and "tokens/s" in done.stderr
    return out


def test_a_killed_run_goes_on_and_ends_as_if_it_had_not_been(
    prompts: Path, whole: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "killed.jsonl"
    asked = command(prompts, out, tiny_folder, "--temperature", 1, "--seed", 5)
    partial = tmp_path / "killed.jsonl.partial"
    process = subprocess.Popen(asked, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None and not (partial.is_file() and partial.read_bytes().count(b"\n") > 3):
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert partial.is_file() and not out.exists(), "the run ended before it could be killed"
    kept = partial.read_bytes().count(b"\n") - 1
    with partial.open("ab") as file:
        file.write(b'{"id": "half')
    run(asked)
    assert 3 <= kept < 12
    assert out.read_bytes() == whole.read_bytes()


def test_records_hold_what_training_reads(whole: Path, prompts: Path, target: LowBitTarget, tokenizer: Any) -> None:
    asked = read_conversations([prompts])
    answered = read_conversations([whole])
    assert [c.key for c in answered] == [c.key for c in asked]
    assert [c.id for c in answered] == [c.id for c in asked]
    assert {c.answered_by for c in answered} == {f"{target.fingerprint}/{target.recipe.fingerprint}"}
    for record in records(whole):
        assert [m["role"] for m in record["conversations"]] == ["system", *["user", "assistant"] * 2]
        assert record["finished"] == [a[-1] == 258 for a in record["answers"]]
    examples = [e for c in answered for e in written_examples(tokenizer, c, {258})]
    assert [list(e.answer) for e in examples] == [a for r in records(whole) for a in r["answers"]]


def test_greedy_answers_are_those_that_training_writes(
    prompts: Path, tiny_folder: Path, tmp_path: Path, target: LowBitTarget, tokenizer: Any
) -> None:
    run(command(prompts, tmp_path / "a.jsonl", tiny_folder))
    conversations = read_conversations([prompts])
    settings = AnswerSettings(NEW_TOKENS, batch_size=2)
    wanted = on_policy_examples(target, tokenizer, conversations, settings, end_ids={258}, cache_dir=None)
    assert [tuple(a) for r in records(tmp_path / "a.jsonl") for a in r["answers"]] == [e.answer for e in wanted]


def test_other_settings_and_prompts_without_room_are_refused(
    prompts: Path, whole: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    done = run(command(prompts, whole, tiny_folder, "--temperature", 1, "--seed", 6), expect=2)
    assert "was begun with other settings (seed 5, now 6)" in done.stderr
    long = tmp_path / "long.jsonl"
    texts = ["short", "x" * 490]
    long.write_text(
        "".join(json.dumps({"id": t[0], "conversations": [{"role": "user", "content": t}]}) + "\n" for t in texts)
    )
    done = run(command(long, tmp_path / "b.jsonl", tiny_folder), expect=2)
    assert "long.jsonl, line 2" in done.stderr and "--skip-long" in done.stderr
    done = run(command(long, tmp_path / "b.jsonl", tiny_folder, "--skip-long"))
    assert "1 records, 1 answers" in done.stdout and "1 records without an answer" in done.stdout


def test_a_server_answers_and_what_failed_is_asked_again(prompts: Path, tmp_path: Path) -> None:
    faulty, out = Faulty(), tmp_path / "served.jsonl"
    try:
        flags = ("--server", faulty.url, "--model", "m", "--answered-by", "t/r", "--retries", 0)
        faulty.reply = lambda asked, before: (
            (500, {}, b"") if "one 7" in asked["messages"][1]["content"] else echo(asked)
        )
        done = run(command(prompts, out, None, *flags), expect=1, BITDRAFT_API_KEY="secret")
        assert "1 records have no answer (" in done.stderr and "line 8: the server answers 500" in done.stderr
        assert [r["id"] for r in records(out)] == [f"r{i}" for i in range(12) if i != 7]
        assert faulty.headers[0]["Authorization"] == "Bearer secret"
        assert "secret" not in out.with_name("served.jsonl.about.json").read_text(encoding="utf-8")
        asked_before = len(faulty.requests)
        faulty.reply = lambda asked, before: echo(asked)
        run(command(prompts, out, None, *flags))
        assert len(faulty.requests) == asked_before + 2, "only the record that failed is asked again"
        assert [r["id"] for r in records(out)] == [f"r{i}" for i in range(12)]
        assert records(out)[7]["answered_by"] == "t/r"
    finally:
        faulty.server.shutdown()
        faulty.server.server_close()


def test_options_that_do_not_belong_together_are_refused(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    assert "--server and --model" in run(command(prompts, out, None, "--server", "http://x"), expect=2).stderr
    assert "--answered-by is for" in run(command(prompts, out, None, "--answered-by", "t/r"), expect=2).stderr
    assert "temperature must be" in run(command(prompts, out, None, "--temperature", -1), expect=2).stderr


def test_answers_of_another_target_are_noticed(whole: Path, tiny_folder: Path, target: LowBitTarget) -> None:
    answered = read_conversations([whole])
    assert foreign_answers(answered, target) is None
    low_bit = load_target(str(tiny_folder), load_recipe("mxfp4"), dtype=torch.float32, compile_quantizer="off")
    said = foreign_answers(answered, low_bit)
    assert said is not None and f"12 were answered by {answered[0].answered_by}" in said
    silent = read_conversations([Path(whole.with_name("prompts.jsonl"))])
    said = foreign_answers([*answered, *silent], target)
    assert said is not None and said.startswith("of 24 conversations, 12 do not say who answered, not by this")
