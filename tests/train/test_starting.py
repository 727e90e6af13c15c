"""The head that a run begins with, and which of its weights learn."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bitdraft.quant.target import LowBitTarget, can_compile
from bitdraft.speculators.eagle3 import Eagle3Config, Eagle3Head
from bitdraft.speculators.load import load_head
from bitdraft.speculators.low_bit import low_bit_layers
from bitdraft.train.config import AcceptanceConfig, OptimConfig, RunConfig, SelectionConfig
from bitdraft.train.environment import Environment
from bitdraft.train.journal import read_metrics
from bitdraft.train.run import run

MakeConfig = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def going_on(
    make_config: MakeConfig, environment: Environment, straight: Callable[[str], Path], tmp_path_factory: Any
) -> Callable[..., Path]:
    """``going_on(tune="lora", …)``: the folder of a run of four steps from the finished one's head."""

    def go(kind: str = "eagle3", **changes: Any) -> Path:
        config = make_config(
            tmp_path_factory.mktemp("on") / "run",
            head=kind,
            init_from=straight(kind) / "export",
            optim=OptimConfig(steps=4, batch_tokens=30, lr=3e-3),
            selection=SelectionConfig(every=0),
            acceptance=AcceptanceConfig(draft_lengths=()),
        )
        return run(replace(config, **changes), environment).folder

    return go


def differing(target: LowBitTarget, before: Path, after: Path) -> set[str]:
    """Names of the weights that are not the same in two exports."""
    a, b = (dict(load_head(path / "export", target).state_dict()) for path in (before, after))
    assert a.keys() == b.keys()
    return {name for name in a if not torch.equal(a[name], b[name])}


@pytest.mark.parametrize(
    ("tune", "changed"),
    [
        ("all", {"fc", "self_attn", "mlp", "norm", "layernorm"}),
        ("norms-fc", {"fc", "norm", "layernorm"}),
        ("lora", {"fc", "self_attn", "mlp"}),
    ],
)
def test_what_is_tuned_changes_and_nothing_else(
    going_on: Callable[..., Path],
    straight: Callable[[str], Path],
    tiny_target: Callable[[str], LowBitTarget],
    tune: str,
    changed: set[str],
) -> None:
    target = tiny_target("mxfp4a16")
    found = differing(target, straight("eagle3"), going_on(tune=tune))
    kinds = {part for name in found for part in changed if part in name}
    assert kinds == changed
    assert all(any(part in name for part in changed) for name in found), found


def test_a_head_that_is_read_learns_at_the_rate_of_a_fresh_one(
    straight: Callable[[str], Path], tiny_target: Callable[[str], LowBitTarget]
) -> None:
    """Exports have the captured layers' scales in ``fc``; training has them before it, at the same outputs."""
    target = tiny_target("mxfp4a16")
    head = load_head(straight("eagle3") / "export", target)
    assert isinstance(head, Eagle3Head)
    head.float()
    states = target.states(torch.arange(12)[None], capture=head.capture_layers)
    before, folded = head.fuse(states.captured), head.folded_fc
    head.unfold(target)
    fresh = Eagle3Head.from_target(Eagle3Config(steps=3), target, head.vocab)
    assert torch.equal(head.capture_scale, fresh.capture_scale)
    assert not torch.equal(head.capture_scale, torch.ones_like(fresh.capture_scale))
    assert torch.equal(head.folded_fc, folded)
    torch.testing.assert_close(head.fuse(states.captured), before)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_run_goes_on_where_the_other_ended(
    going_on: Callable[..., Path], straight: Callable[[str], Path], kind: str
) -> None:
    """The first loss is near the other run's last, not that of a fresh head."""
    before, after = read_metrics(straight(kind) / "metrics.jsonl"), read_metrics(going_on(kind) / "metrics.jsonl")
    assert after[0]["loss"] < (before[0]["loss"] + before[-1]["loss"]) / 2 + 0.3
    assert after[-1]["loss"] < before[0]["loss"]


def test_medusa_adapters_are_merged(
    going_on: Callable[..., Path], straight: Callable[[str], Path], tiny_target: Callable[[str], LowBitTarget]
) -> None:
    found = differing(tiny_target("mxfp4a16"), straight("medusa"), going_on("medusa", tune="lora"))
    assert found
    assert all(name.startswith("blocks.") for name in found)


def test_a_head_trained_in_low_bit_is_exported_in_low_bit(
    going_on: Callable[..., Path], tiny_target: Callable[[str], LowBitTarget]
) -> None:
    folder = going_on(draft_quant="mxfp4", selection=SelectionConfig(every=2, prompts=2, draft_length=2))
    head = load_head(folder / "export", tiny_target("mxfp4a16"))
    assert low_bit_layers(head)
    assert "fc" not in low_bit_layers(head)


@pytest.fixture
def losses(
    make_config: MakeConfig, environment: Environment, straight: Callable[[str], Path], tmp_path: Path
) -> Callable[..., tuple[list[float], list[float]]]:
    """``losses(compile=True)``: those of the uninterrupted run with other settings of ``optim``, and its own."""

    def of(**optim: Any) -> tuple[list[float], list[float]]:
        config = make_config(tmp_path / "run", acceptance=AcceptanceConfig(draft_lengths=()))
        folder = run(replace(config, optim=replace(config.optim, **optim)), environment).folder
        mine, its = (read_metrics(path / "metrics.jsonl") for path in (folder, straight("eagle3")))
        return [line["loss"] for line in mine], [line["loss"] for line in its]

    return of


def test_recomputed_activations_change_no_loss(losses: Callable[..., tuple[list[float], list[float]]]) -> None:
    mine, its = losses(checkpointing=True)
    assert mine == its


@pytest.mark.skipif(not can_compile(), reason="no C++ compiler on the PATH")
def test_a_compiled_layer_changes_losses_by_rounding_alone(
    losses: Callable[..., tuple[list[float], list[float]]],
) -> None:
    mine, its = losses(compile=True)
    assert mine == pytest.approx(its, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head": "medusa"}, "holds a head of kind eagle3: say --head eagle3"),
        ({"eagle3": Eagle3Config(output_rank=8)}, r"eagle3\.output_rank is of fresh heads"),
        ({"eagle3": Eagle3Config(train_embedding=True)}, r"eagle3\.train_embedding is of fresh heads"),
    ],
)
def test_what_does_not_fit_the_head_is_refused(
    going_on: Callable[..., Path], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        going_on(**changes)


def test_a_low_bit_head_cannot_be_gone_on_from(going_on: Callable[..., Path]) -> None:
    low_bit = going_on(draft_quant="fp8")
    with pytest.raises(ValueError, match="is in low bit, and training needs its masters"):
        going_on(init_from=low_bit / "export")


def test_medusa_heads_have_no_norms(going_on: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="a medusa head has neither norms nor fc"):
        going_on("medusa", tune="norms-fc")


def test_low_bit_training_wants_a_head_to_begin_with() -> None:
    with pytest.raises(ValueError, match="draft_quant starts from a converged head"):
        RunConfig(draft_quant="mxfp4")


def test_the_head_of_a_run_keeps_its_steps(
    going_on: Callable[..., Path], tiny_target: Callable[[str], LowBitTarget]
) -> None:
    folder = going_on(eagle3=Eagle3Config(steps=2))
    head = load_head(folder / "export", tiny_target("mxfp4a16"))
    assert isinstance(head, Eagle3Head)
    assert head.config.steps == 2
