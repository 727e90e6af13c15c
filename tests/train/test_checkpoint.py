"""Checkpoints: exact when resumed, and never taken when damaged."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from bitdraft.train.checkpoint import Checkpoint, checkpoints, newest_checkpoint, save_checkpoint
from bitdraft.train.selection import Choice
from bitdraft.train.sharding import load_module, restore, whole_state

HISTORY = [Choice(1, 1.25), Choice(2, 1.1)]
Saved = tuple[Path, dict[int, dict[str, Tensor]]]


class Small(nn.Module):
    """A matrix that is trained, a vector that never gets a gradient, and a buffer."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.matrix = nn.Linear(width, 2)
        self.idle = nn.Parameter(torch.randn(width))
        self.register_buffer("counter", torch.zeros(1))


def made(seed: int = 0, width: int = 3) -> tuple[Small, torch.optim.AdamW]:
    torch.manual_seed(seed)
    head = Small(width)
    return head, torch.optim.AdamW(head.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.01)


def step(head: Small, optimizer: torch.optim.Optimizer) -> float:
    """One step on random numbers of the global generator."""
    loss = head.matrix(torch.randn(4, 3)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def everything(head: Small, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = {id(p): name for name, p in head.named_parameters()}
    state = {f"{names[id(p)]}/{k}": v.clone() for p, s in optimizer.state.items() for k, v in s.items()}
    return {**{k: v.clone() for k, v in head.state_dict().items()}, **state, "rng": torch.get_rng_state()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def save(folder: Path, done: int, head: Small, optimizer: torch.optim.Optimizer, keep: int) -> Path:
    """As the training loop does it."""
    return save_checkpoint(folder, done, *whole_state(Accelerator(cpu=True), head, optimizer), HISTORY, keep)


def resume_newest(folder: Path, head: Small, optimizer: torch.optim.Optimizer) -> Checkpoint | None:
    """As the training loop does it."""
    found = newest_checkpoint(folder)
    if found:
        load_module(head, found)
        restore(Accelerator(cpu=True), head, optimizer, found)
    return found


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """A folder with the checkpoints of steps 2 and 4, and what the run looked like then."""
    head, optimizer = made()
    then = {}
    for done in range(1, 5):
        step(head, optimizer)
        if done % 2 == 0:
            save(tmp_path, done, head, optimizer, keep=5)
            then[done] = everything(head, optimizer)
    return tmp_path, then


def test_what_is_read_is_what_was_written_bit_for_bit(saved: Saved) -> None:
    folder, then = saved
    head, optimizer = made(seed=99)
    step(head, optimizer)
    resumed = resume_newest(folder, head, optimizer)
    assert resumed is not None
    assert (resumed.step, resumed.path, resumed.history) == (4, folder / "step-000004", HISTORY)
    assert same(everything(head, optimizer), then[4])


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    head, optimizer = made()
    for _ in range(3):
        step(head, optimizer)
    save(tmp_path, 3, head, optimizer, keep=1)
    straight = [step(head, optimizer) for _ in range(3)]
    other, its_optimizer = made(seed=5)
    assert resume_newest(tmp_path, other, its_optimizer) is not None
    assert [step(other, its_optimizer) for _ in range(3)] == straight
    assert same(everything(other, its_optimizer), everything(head, optimizer))


def test_without_a_checkpoint_nothing_changes(tmp_path: Path) -> None:
    head, optimizer = made()
    before = everything(head, optimizer)
    assert resume_newest(tmp_path / "none", head, optimizer) is None
    assert resume_newest(tmp_path, head, optimizer) is None
    assert same(everything(head, optimizer), before)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


FILES = ["module.safetensors", "optimizer.safetensors", "rng.safetensors", "checkpoint.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip_a_byte, cut_in_half, Path.unlink], ids=["flipped", "cut", "gone"])
def test_a_damaged_newest_is_skipped_for_the_one_before(
    saved: Saved, capsys: pytest.CaptureFixture[str], name: str, damage: object
) -> None:
    folder, then = saved
    damage(folder / "step-000004" / name)  # type: ignore[operator]
    head, optimizer = made(seed=1)
    resumed = resume_newest(folder, head, optimizer)
    assert resumed is not None
    assert resumed.step == 2
    assert same(everything(head, optimizer), then[2])
    assert f"{folder / 'step-000004'} is damaged" in capsys.readouterr().err


def test_no_flipped_bit_of_the_description_goes_unnoticed(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    """Either the checkpoint is skipped or it still says the right step."""
    folder, then = saved
    described = folder / "step-000004" / "checkpoint.json"
    whole = described.read_bytes()
    wrong = []
    for at in range(len(whole)):
        for bit in (0, 7):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << bit
            described.write_bytes(damaged)
            head, optimizer = made(seed=1)
            capsys.readouterr()  # one warning for each
            try:
                resumed = resume_newest(folder, head, optimizer)
            except Exception as error:
                wrong.append(f"byte {at} bit {bit}: {type(error).__name__}: {error}")
                continue
            assert resumed is not None
            of = int(resumed.path.name.removeprefix("step-"))
            if resumed.step != of or resumed.history != HISTORY or not same(everything(head, optimizer), then[of]):
                wrong.append(f"byte {at} bit {bit}: {resumed.path.name} resumed as step {resumed.step}")
    assert not wrong, f"{len(wrong)} flips, e.g. {wrong[0]}"


def test_two_damaged_ones_leave_nothing(saved: Saved) -> None:
    folder, _ = saved
    for path in checkpoints(folder):
        flip_a_byte(path / "module.safetensors")
    head, optimizer = made(seed=1)
    before = everything(head, optimizer)
    assert resume_newest(folder, head, optimizer) is None
    assert same(everything(head, optimizer), before)


def test_what_a_killed_writer_left_is_not_a_checkpoint(saved: Saved) -> None:
    folder, _ = saved
    shutil.copytree(folder / "step-000004", folder / ".step-000006.123.tmp")
    (folder / "step-notes.txt").write_text("mine", encoding="utf-8")
    head, optimizer = made()
    resumed = resume_newest(folder, head, optimizer)
    assert resumed is not None
    assert resumed.step == 4


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_stay(tmp_path: Path, keep: int) -> None:
    head, optimizer = made()
    step(head, optimizer)
    for done in (8, 9, 10, 100, 1000):
        save(tmp_path, done, head, optimizer, keep)
    assert [p.name for p in checkpoints(tmp_path)] == [f"step-{n:06d}" for n in (8, 9, 10, 100, 1000)[-keep:]]


@pytest.mark.parametrize(
    ("measured", "kept"),
    [
        ([], [8, 10]),
        ([Choice(2, 1.5), Choice(4, 1.9), Choice(6, 1.7)], [4, 8, 10]),
        ([Choice(2, 1.9), Choice(4, 1.9), Choice(6, 1.8)], [4, 8, 10]),  # of equals the latest
        ([Choice(2, 1.9), Choice(10, 2.0)], [8, 10]),
    ],
)
def test_the_best_by_measured_acceptance_stays_beside_the_newest(
    tmp_path: Path, measured: list[Choice], kept: list[int]
) -> None:
    head, optimizer = made()
    step(head, optimizer)
    for done in (2, 4, 6, 8, 10):
        tensors = whole_state(Accelerator(cpu=True), head, optimizer)
        save_checkpoint(tmp_path, done, *tensors, [c for c in measured if c.step <= done], keep=2)
    assert [p.name for p in checkpoints(tmp_path)] == [f"step-{n:06d}" for n in kept]


def test_the_next_writer_clears_away_what_a_killed_one_left(saved: Saved) -> None:
    folder, _ = saved
    shutil.copytree(folder / "step-000004", folder / ".step-000006.123.tmp")
    head, optimizer = made()
    step(head, optimizer)
    save(folder, 6, head, optimizer, keep=1)
    assert [p.name for p in folder.iterdir()] == ["step-000006"]


def test_an_equal_step_is_written_again(saved: Saved) -> None:
    folder, _ = saved
    head, optimizer = made(seed=7)
    step(head, optimizer)
    save(folder, 4, head, optimizer, keep=5)
    now = everything(head, optimizer)
    other, its_optimizer = made()
    resume_newest(folder, other, its_optimizer)
    assert same(everything(other, its_optimizer), now)
    assert {p.name for p in folder.iterdir()} == {"step-000002", "step-000004"}


def test_a_whole_one_of_another_shape_is_an_error(saved: Saved) -> None:
    """Skipping it would silently start again from nothing."""
    folder, _ = saved
    head, optimizer = made(width=5)
    with pytest.raises(ValueError, match=r"step-000004 does not fit this head: .*size mismatch"):
        resume_newest(folder, head, optimizer)


def test_an_optimizer_state_of_another_shape_is_an_error(saved: Saved) -> None:
    folder, _ = saved
    (found,) = [c for c in [newest_checkpoint(folder)] if c]
    head, optimizer = made(width=5)
    with pytest.raises(ValueError, match=r"step-000004: the optimizer state of matrix\.weight does not fit this head"):
        restore(Accelerator(cpu=True), head, optimizer, found)


def test_an_optimizer_state_of_a_weight_that_is_not_there_is_an_error(saved: Saved) -> None:
    folder, _ = saved
    found = newest_checkpoint(folder)
    assert found is not None
    other = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"step-000004: the optimizer state of matrix\.\w+ does not fit this head"):
        restore(Accelerator(cpu=True), other, torch.optim.AdamW(other.parameters()), found)


def test_a_failed_write_leaves_the_earlier_ones(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, then = saved

    def full_disk(*_args: object, **_options: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(json, "dumps", full_disk)
    head, optimizer = made(seed=3)
    step(head, optimizer)
    with pytest.raises(OSError, match="no space left"):
        save(folder, 4, head, optimizer, keep=1)
    monkeypatch.undo()
    assert {p.name for p in folder.iterdir()} == {"step-000002", "step-000004"}
    assert resume_newest(folder, head, optimizer) is not None
    assert same(everything(head, optimizer), then[4])
