"""Faults that engines would not notice cannot be written, and a disk that fills up leaves the old files whole."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from full_disk import full_after
from torch import Tensor

from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators import export
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.eagle3 import Eagle3Head
from bitdraft.speculators.export import LAYOUTS, export_head, layout_of
from bitdraft.speculators.load import load_head
from bitdraft.speculators.vocab import DraftVocab

Make = Callable[[str], DraftHead]
EAGLE3 = ["eagle3-speculators", "eagle3-original"]


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def forced(ids: list[int]) -> DraftVocab:
    """A vocabulary that its own check has not seen."""
    vocab = object.__new__(DraftVocab)
    object.__setattr__(vocab, "target_ids", torch.tensor(ids))
    object.__setattr__(vocab, "target_size", 320)
    return vocab


@pytest.mark.parametrize("layout", EAGLE3)
@pytest.mark.parametrize(
    "ids",
    [
        [1, 0, *range(2, 96)],
        [0, 0, *range(2, 96)],
        [*range(95), 400],
        [-1, *range(1, 96)],
    ],
    ids=["out of order", "twice", "too large", "negative"],
)
def test_a_wrong_map_cannot_be_written(
    make_head: Make, rounded: LowBitTarget, tmp_path: Path, layout: str, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_head("eagle3")
    head.vocab = forced(ids)
    # a mask that goes with whatever the ids are, as far as there is one
    mask = torch.zeros(320, dtype=torch.bool).index_fill(0, torch.tensor(ids).clamp(0, 319), value=True)
    monkeypatch.setattr(DraftVocab, "t2d", mask)
    with pytest.raises(
        ValueError, match="not exported: the map d2t is wrong: drafted tokens must ascend within 0 … 319"
    ):
        export_head(head, rounded, tmp_path / "head", draft_length=2, layout=layout)
    assert list(tmp_path.iterdir()) == []


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda weights: weights.__delitem__(name)


def other_mask(weights: dict[str, Tensor]) -> None:
    weights["t2d"] = weights["t2d"].roll(1)


def absolute_ids(weights: dict[str, Tensor]) -> None:
    weights["d2t"] = weights["d2t"] + torch.arange(96)


def stray(weights: dict[str, Tensor]) -> None:
    weights["layers.1.mlp.up_proj.weight"] = torch.zeros(128, 64)


def short_output(weights: dict[str, Tensor]) -> None:
    weights["lm_head.weight"] = weights["lm_head.weight"][:95]


def infinite_output(weights: dict[str, Tensor]) -> None:
    weights["lm_head.weight"] = weights["lm_head.weight"].clone()
    weights["lm_head.weight"][-1, -1] = float("inf")


@pytest.mark.parametrize("layout", EAGLE3)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (drop("lm_head.weight"), r"lm_head\.weight is missing, not \[96, 64\]"),
        (drop("d2t"), r"d2t is missing, not \[96\]"),
        (drop("t2d"), r"t2d is missing, not \[320\]"),
        (other_mask, "d2t and t2d do not describe the same tokens"),
        (absolute_ids, "the map d2t is wrong"),
        (stray, r"layers\.1\.mlp\.up_proj\.weight is \[128, 64\], not no tensor"),
        (short_output, r"lm_head\.weight is \[95, 64\], not \[96, 64\]"),
        (infinite_output, r"lm_head\.weight holds NaN or infinity"),
    ],
)
def test_a_layout_that_writes_something_else_is_caught(
    make_head: Make,
    rounded: LowBitTarget,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    fault: Callable[[dict[str, Tensor]], None],
    message: str,
) -> None:
    module, head = LAYOUTS[layout], make_head("eagle3")
    right = module.tensors

    def wrong(head: Eagle3Head) -> dict[str, Tensor]:
        weights = dict(right(head))
        fault(weights)
        return weights

    monkeypatch.setattr(module, "tensors", wrong)
    with pytest.raises(ValueError, match=f"not exported: .*{message}"):
        export_head(head, rounded, tmp_path / "head", draft_length=2, layout=layout)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_weight_is_looked_at(
    make_head: Make, rounded: LowBitTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """A NaN at the end of any tensor, in whichever part of it."""
    monkeypatch.setattr(export, "_PART", 100)
    head = make_head("eagle3 norm_before_fc" if layout in EAGLE3 else "medusa own")
    for name, weight in head.named_parameters():
        kept = weight.data.clone()
        weight.data.view(-1)[-1] = float("nan")
        with pytest.raises(ValueError, match="holds NaN or infinity"):
            export_head(head, rounded, tmp_path / "head", draft_length=2, layout=layout)
        weight.data = kept
        assert list(tmp_path.iterdir()) == [], name


def test_a_head_for_another_target_is_not_written(
    make_head: Make, target: LowBitTarget, rounded: LowBitTarget, tmp_path: Path
) -> None:
    head = make_head("eagle3")
    head.target_hidden_size = 96
    with pytest.raises(ValueError, match="trained for a target with hidden size 96"):
        export_head(head, rounded, tmp_path / "head", draft_length=2)
    assert list(tmp_path.iterdir()) == []


def test_a_layout_is_chosen_by_the_kind_of_head(make_head: Make) -> None:
    def of(kind: str, name: str | None = None) -> ModuleType:
        chosen: ModuleType = layout_of(make_head(kind).kind, name)
        return chosen

    assert of("eagle3") is LAYOUTS["eagle3-speculators"]
    assert of("medusa") is LAYOUTS["medusa-vllm"]
    assert of("medusa", "medusa-original") is LAYOUTS["medusa-original"]


@pytest.mark.parametrize("size", [0, 1000, 50_000], ids=["at once", "in the header", "in the weights"])
@pytest.mark.parametrize("layout", ["medusa-vllm", "medusa-original"])
def test_a_full_disk_leaves_the_old_files_whole(
    exported: Callable[..., Path], make_head: Make, rounded: LowBitTarget, tmp_path: Path, layout: str, size: int
) -> None:
    path = exported("eagle3")
    before = contents(path)
    with (
        full_after(size),
        pytest.raises(OSError, match=r"safetensors could not be written: .*large"),
    ):
        export_head(make_head("medusa"), rounded, path, draft_length=2, layout=layout)
    assert contents(path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["head"]
    assert load_head(path, rounded).kind == "eagle3"


@pytest.mark.parametrize("fails", ["save_tensors", "write_manifest"])
@pytest.mark.parametrize("error", [OSError("no space left on device"), KeyboardInterrupt()], ids=["full", "stopped"])
def test_whatever_fails_the_earlier_export_stays(
    exported: Callable[..., Path],
    make_head: Make,
    rounded: LowBitTarget,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
    error: BaseException,
) -> None:
    path = exported("eagle3")
    before = contents(path)

    def broken(*arguments: Any, **_options: Any) -> None:
        folder = next(a for a in arguments if isinstance(a, Path))
        (folder if folder.is_dir() else folder.parent).joinpath("half").write_bytes(b"half")
        raise error

    monkeypatch.setattr(export, fails, broken)
    with pytest.raises(type(error)):
        export_head(make_head("medusa"), rounded, path, draft_length=2)
    assert contents(path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


def test_a_folder_that_cannot_be_put_in_place_leaves_the_old_one(
    exported: Callable[..., Path],
    make_head: Make,
    rounded: LowBitTarget,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = exported("eagle3")
    before, rename = contents(path), Path.rename

    def refuse(self: Path, to: Path) -> Path:
        if self.name.endswith(".tmp"):
            raise OSError("permission denied")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="permission denied"):
        export_head(make_head("medusa"), rounded, path, draft_length=2)
    monkeypatch.undo()
    assert contents(path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["head"]
