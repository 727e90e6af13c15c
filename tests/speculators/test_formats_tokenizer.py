"""A head belongs to a tokenizer: the export names it, and a target with another one is refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import save_tiny_target, tiny_tokenizer
from tokenizers import AddedToken

from bitdraft.quant.fingerprint import tokenizer_fingerprint
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget, load_target, load_tokenizer
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.export import export_head, write_head
from bitdraft.speculators.formats.facts import TargetFacts, tokenizer_of
from bitdraft.speculators.load import load_head, recipe_of_head

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def load(folder: Path) -> LowBitTarget:
    return load_target(str(folder), load_recipe("none"), dtype=torch.float32, compile_quantizer="off")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("one") / "target")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The same model in another folder, for a tokenizer of its own."""
    return Path(shutil.copytree(folder, tmp_path / "elsewhere"))


def renamed(folder: Path, old: str, new: str) -> None:
    """Let the tokenizer in ``folder`` call a token otherwise."""
    for name in TOKENIZER:
        file = folder / name
        if file.is_file():
            file.write_text(file.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")


def test_a_fingerprint_is_that_of_the_vocabulary(folder: Path, copy: Path) -> None:
    own = tokenizer_fingerprint(load_tokenizer(str(folder)))
    assert own == tokenizer_fingerprint(load_tokenizer(str(copy))) == tokenizer_fingerprint(tiny_tokenizer())
    assert len(own) == 16


def swap_ids(tokenizer: Any) -> Any:
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = described["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    return type(tokenizer.backend_tokenizer).from_str(json.dumps(described))


def add_token(tokenizer: Any) -> Any:
    tokenizer.add_tokens(["<|think|>"])
    return tokenizer.backend_tokenizer


def add_special(tokenizer: Any) -> Any:
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|think|>", special=True)]})
    return tokenizer.backend_tokenizer


def test_ids_and_added_tokens_change_the_fingerprint() -> None:
    found = {tokenizer_fingerprint(tiny_tokenizer())}
    for change in (swap_ids, add_token, add_special):
        changed = tiny_tokenizer()
        backend = change(changed)
        found.add(tokenizer_fingerprint(type(changed)(tokenizer_object=backend)))
    assert len(found) == 4


@pytest.mark.parametrize("layout", ["eagle3-speculators", "eagle3-original", "medusa-vllm", "medusa-original"])
def test_another_tokenizer_is_refused(
    make_head_for: Callable[[str, LowBitTarget], DraftHead], folder: Path, copy: Path, tmp_path: Path, layout: str
) -> None:
    target = load(folder)
    head = make_head_for(layout.partition("-")[0], target)
    export_head(head, target, tmp_path / "head", draft_length=2, layout=layout)
    assert recipe_of_head(tmp_path / "head")["tokenizer"] == tokenizer_fingerprint(load_tokenizer(str(folder)))
    load_head(tmp_path / "head", load(copy))
    renamed(copy, "<|im_start|>", "<|turn|>")
    other = load(copy)
    assert other.fingerprint == target.fingerprint, "the same weights"
    with pytest.raises(ValueError, match=rf"{tmp_path / 'head'}: the head drafts tokens of another tokenizer .*{copy}"):
        load_head(tmp_path / "head", other)


def test_a_target_without_a_tokenizer_says_so_and_is_not_compared(
    make_head_for: Callable[[str, LowBitTarget], DraftHead], folder: Path, copy: Path, tmp_path: Path
) -> None:
    for name in TOKENIZER:
        (copy / name).unlink(missing_ok=True)
    bare = load(copy)
    assert tokenizer_of(bare) is None
    export_head(make_head_for("eagle3", bare), bare, tmp_path / "head", draft_length=2)
    assert recipe_of_head(tmp_path / "head")["tokenizer"] is None
    load_head(tmp_path / "head", load(folder))


def test_a_tokenizer_with_code_of_its_own_is_not_run_and_not_compared(copy: Path) -> None:
    target = load(copy)
    settings = json.loads((copy / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (copy / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    ran = copy / "ran"
    (copy / "own.py").write_text(f"open({str(ran)!r}, 'w')\n", encoding="utf-8")
    assert tokenizer_of(target) is None
    assert not ran.exists()


def test_a_tokenizer_that_is_damaged_is_an_error(
    make_head_for: Callable[[str, LowBitTarget], DraftHead], copy: Path, tmp_path: Path
) -> None:
    target = load(copy)
    head = make_head_for("eagle3", target)
    (copy / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=f"the tokenizer of target '{copy}' cannot be loaded"):
        export_head(head, target, tmp_path / "head", draft_length=2)


def test_files_may_call_the_target_otherwise_than_it_was_loaded(
    make_head_for: Callable[[str, LowBitTarget], DraftHead], folder: Path, tmp_path: Path
) -> None:
    target = load(folder)
    served = replace(TargetFacts.of(target), name="somebody/a-name-on-a-hub")
    write_head(make_head_for("eagle3", target), served, tmp_path, draft_length=2)
    load_head(tmp_path, target)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["speculators_config"]["verifier"]["name_or_path"] == "somebody/a-name-on-a-hub"
    assert config["bitdraft"]["tokenizer"] == tokenizer_of(target)


def test_facts_add_to_what_an_export_says_but_not_against_its_files(
    make_head_for: Callable[[str, LowBitTarget], DraftHead], folder: Path, tmp_path: Path
) -> None:
    target = load(folder)
    told = {
        "recipe": "mxfp4",
        "data_fingerprint": "1234",
        "tokenizer": "wrong",
        "format": "wrong",
        "residual_basis": "w",
    }
    write_head(make_head_for("eagle3", target), TargetFacts.of(target), tmp_path, draft_length=2, facts=told)
    said = recipe_of_head(tmp_path)
    assert (said["recipe"], said["data_fingerprint"]) == ("mxfp4", "1234")
    assert (said["format"], said["residual_basis"]) == ("eagle3-speculators", "original")
    assert said["tokenizer"] == tokenizer_of(target)
    load_head(tmp_path, target)
