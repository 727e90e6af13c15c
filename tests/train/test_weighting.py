"""Weights decide how often records are drawn; a run with them trains on those, and goes on after a stop as before."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitdraft.data.chat import Example
from bitdraft.data.conversation import Conversation
from bitdraft.data.sources import read_conversations
from bitdraft.data.weights_file import Weights, write_weights
from bitdraft.train import loop
from bitdraft.train.config import (
    AcceptanceConfig,
    CheckpointConfig,
    OptimConfig,
    RunConfig,
    SelectionConfig,
    WeightsConfig,
)
from bitdraft.train.environment import Environment
from bitdraft.train.run import run
from bitdraft.train.steps import StepPacks, step_packs
from bitdraft.train.weighting import Weighting, headroom

MakeConfig = Callable[..., RunConfig]


def made(count: int) -> list[Example]:
    return [Example(str(i), "", (1, i), (2,) * 5, asked=f"key{i % 3}") for i in range(count)]


WEIGHTS = Weights(Path("w.parquet"), {"key0": 3.0, "key1": 1.0, "key2": 0.5}, {"key0": 7, "key1": 4, "key2": 7}, {})


def test_every_turn_has_its_record_s_weight_and_group() -> None:
    weighting = Weighting.read(made(6), WEIGHTS, 1.0)
    assert weighting.weights.tolist() == pytest.approx([2.0, 2 / 3, 1 / 3] * 2)
    assert weighting.groups.tolist() == [1, 0, 1] * 2
    assert weighting.group_count == 2


def test_steps_draw_by_weight() -> None:
    examples = made(30)
    optim = OptimConfig(steps=60, batch_tokens=25)
    steps = step_packs(0, examples, optim, 0, 1, weighting=Weighting.read(examples, WEIGHTS, 1.0))
    drawn = Counter(examples[i].asked for _, packs in steps for pack in packs.of_rank[0] for i in pack)
    total = sum(drawn.values())
    assert [drawn[f"key{k}"] / total for k in range(3)] == pytest.approx([3 / 4.5, 1 / 4.5, 0.5 / 4.5], abs=0.01)


def test_weights_that_leave_nothing_are_refused() -> None:
    nothing = Weights(WEIGHTS.path, dict.fromkeys(WEIGHTS.by_key, 0.0), WEIGHTS.clusters, {})
    with pytest.raises(ValueError, match="all of these records have weight 0"):
        Weighting.read(made(3), nothing, 1.0)


counts = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=8)


@given(counts, st.floats(1, 5))
def test_headroom_is_capped_and_favours_what_is_refused(pairs: list[tuple[int, int]], cap: float) -> None:
    accepted = np.array([float(min(p)) for p in pairs])
    possible = np.array([float(max(p)) for p in pairs])
    factors = headroom(accepted, possible, np.full(len(pairs), 1 / len(pairs)), cap)
    assert (factors >= 1 / cap - 1e-9).all() and (factors <= cap + 1e-9).all()
    seen = possible > 0
    assert (factors[~seen] == 1).all()
    rate = accepted[seen] / possible[seen]
    order = np.argsort(rate, kind="stable")
    assert (np.diff(factors[seen][order]) <= 1e-9).all()


def test_headroom_by_hand() -> None:
    """Refused 0.2 and 0.6 of what was drafted, mean 0.3 as three quarters of the draws are the first group's."""
    found = headroom(np.array([80.0, 40.0]), np.array([100.0, 100.0]), np.array([0.75, 0.25]), 10.0)
    assert found == pytest.approx([0.2 / 0.3, 0.6 / 0.3])


def test_an_epoch_s_headroom_comes_from_the_epoch_before_and_is_kept() -> None:
    examples = made(6)
    weighting = Weighting.read(examples, WEIGHTS, 2.0)
    base = weighting.weights
    assert weighting.of_epoch(0).tolist() == base.tolist()
    weighting.take_in([10, 90], [100, 100])
    state = json.loads(json.dumps(weighting.state()))
    second = weighting.of_epoch(1)
    assert second[1] / base[1] > 1 > second[0] / base[0]
    assert weighting.of_epoch(2).tolist() == base.tolist(), "what was counted has been used"

    resumed = Weighting.read(examples, WEIGHTS, 2.0)
    resumed.restore(state)
    assert resumed.of_epoch(0).tolist() == base.tolist()
    assert resumed.of_epoch(1).tolist() == second.tolist()


@pytest.fixture
def weighted(make_config: MakeConfig, prompt_files: tuple[Path, Path], tmp_path: Path) -> RunConfig:
    """Half of the records, by turns, weigh nothing; the others are of two groups."""
    records = read_conversations([prompt_files[0]])
    write_weights(
        tmp_path / "weights.parquet",
        keys=[c.key for c in records],
        ids=[c.id for c in records],
        places=[c.source for c in records],
        weights=np.array([float(i % 2) for i in range(len(records))]),
        clusters=np.array([i // 2 % 2 for i in range(len(records))]),
        about={},
    )
    return make_config(
        tmp_path / "run",
        weights=WeightsConfig(file=tmp_path / "weights.parquet", headroom=3.0),
        checkpoint=CheckpointConfig(every=1),
        selection=SelectionConfig(every=0),
        acceptance=AcceptanceConfig(draft_lengths=()),
    )


def watch(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Which records every step trains on."""
    seen: list[list[str]] = []

    def watched(first: int, examples: Sequence[Example], *rest: Any) -> Any:
        for step, packs in step_packs(first, examples, *rest):
            assert isinstance(packs, StepPacks)
            seen.append([examples[i].asked for pack in packs.of_rank[0] for i in pack])
            yield step, packs

    monkeypatch.setattr(loop, "step_packs", watched)
    return seen


def asked(config: RunConfig) -> list[Conversation]:
    return read_conversations(config.data)


def test_a_run_trains_on_what_has_weight(
    weighted: RunConfig, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch(monkeypatch)
    run(weighted, environment)
    allowed = {c.key for i, c in enumerate(asked(weighted)) if i % 2}
    assert {key for step in seen for key in step} <= allowed
    states = json.loads((weighted.run_dir / "checkpoints" / "step-000006" / "checkpoint.json").read_text())["weighting"]
    assert len(states["factors"]) > 1, "the run is longer than an epoch"
    assert all(len(f) == 2 for f in states["factors"])
    assert any(f != [1.0, 1.0] for f in states["factors"]), "groups are never accepted alike throughout"


def test_a_stopped_run_with_headroom_goes_on_as_if_it_had_not_stopped(
    weighted: RunConfig, environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(weighted, environment)
    again = replace(weighted, output_dir=tmp_path / "again")
    saving = loop.save_checkpoint

    def stop_behind(folder: Path, step: int, *rest: Any) -> Path:
        path = saving(folder, step, *rest)
        if step == 4:
            raise KeyboardInterrupt
        return path

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(loop, "save_checkpoint", stop_behind)
        run(again, environment)
    run(replace(again, resume=True), environment)
    last = "checkpoints/step-000006"
    for file in ("module.safetensors", "optimizer.safetensors"):
        assert (weighted.run_dir / last / file).read_bytes() == (again.run_dir / last / file).read_bytes()


def test_a_subset_is_drawn_by_weight_and_trained_on_evenly(
    weighted: RunConfig, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch(monkeypatch)
    run(replace(weighted, prompts=2, weights=replace(weighted.weights, headroom=1.0)), environment)
    drawn = Counter(key for step in seen for key in step)
    assert len(drawn) == 2 and max(drawn.values()) - min(drawn.values()) <= len(seen)
    assert set(drawn) <= {c.key for i, c in enumerate(asked(weighted)) if i % 2}


def test_weights_for_other_data_are_refused(weighted: RunConfig, environment: Environment, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"conversations": [{"role": "user", "content": "Unknown"}]}) + "\n")
    with pytest.raises(ValueError, match=r"weights\.parquet has no weight for 1 of 1 records"):
        run(replace(weighted, data=(str(other),)), environment)


def test_changed_weights_are_another_run(weighted: RunConfig, environment: Environment, tmp_path: Path) -> None:
    run(weighted, environment)
    records = asked(weighted)
    write_weights(
        tmp_path / "weights.parquet",
        keys=[c.key for c in records],
        ids=[c.id for c in records],
        places=[c.source for c in records],
        weights=np.ones(len(records)),
        clusters=np.zeros(len(records)),
        about={},
    )
    with pytest.raises(ValueError, match=r"what (data, )?weights\.file names has changed"):
        run(replace(weighted, resume=True), environment)


@pytest.mark.parametrize("bad", [0.5, float("inf"), float("nan")])
def test_headroom_has_bounds(bad: float) -> None:
    with pytest.raises(ValueError, match=r"weights\.headroom must be finite and at least 1"):
        WeightsConfig(file=Path("w.parquet"), headroom=bad)
    with pytest.raises(ValueError, match=r"give --weights\.file"):
        WeightsConfig(headroom=2.0)
