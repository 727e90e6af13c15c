"""Training heads in low bit: steps, wrappers, and what it is good for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trained_heads import DOWN, Batch, adam_steps, layers, trained

from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.eagle3 import Eagle3Head
from bitdraft.speculators.low_bit import low_bit_layers, quantize_head

Make = Callable[..., Eagle3Head]


@pytest.fixture
def head(make_eagle3: Make, rounded: LowBitTarget) -> Eagle3Head:
    return make_eagle3(rounded, size=96, steps=3)


class Wrapped(nn.Module):
    """The head behind one forward, as what shards it sees it."""

    def __init__(self, head: Eagle3Head, batch: Batch) -> None:
        super().__init__()
        self.head, self.batch = head, batch

    def forward(self, scale: Tensor) -> Tensor:
        return self.batch.loss(self.head) * scale


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_wrappers_train_what_is_trained_without(
    head: Eagle3Head, rounded: LowBitTarget, tmp_path: Path, how: str
) -> None:
    """FSDP2 gathers weights without a trace in their versions: those of an old step would go on computing."""
    head.lm_head.requires_grad_(False)
    batch = Batch(rounded, head)

    def losses(model: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        seen = []
        for _ in range(4):
            loss = model(torch.ones(()))
            loss.backward()
            seen.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return seen

    expected = losses(Wrapped(trained(head, rounded, "mxfp4"), batch))
    assert len(set(expected)) == 4
    with one_rank(tmp_path):
        model: nn.Module = Wrapped(trained(head, rounded, "mxfp4"), batch)
        if how == "ddp":
            model = DistributedDataParallel(model)
        else:
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        assert losses(model) == pytest.approx(expected, rel=1e-5)
        del model  # before its process group: the other way round once waited for a thread without end


def test_weights_are_quantized_once_in_a_forward_pass_and_again_after_a_step(
    head: Eagle3Head, rounded: LowBitTarget
) -> None:
    done, batch = trained(head, rounded, "mxfp4"), Batch(rounded, head)
    optimizer = torch.optim.AdamW(done.parameters(), lr=1e-2)
    down = layers(done)[DOWN]
    for step in range(1, 4):
        with torch.no_grad():
            before = down.fused.weights(torch.float32)[0].weight.clone()
        batch.loss(done).backward()  # three draft steps
        assert {layer.fused.quantizations for layer in layers(done).values()} == {step}
        optimizer.step()
        after = down.fused.weights(torch.float32)[0].weight
        assert not torch.equal(after, before)
        for layer in layers(done).values():
            layer.fused.weights(torch.float32)
    assert {layer.fused.quantizations for layer in layers(done).values()} == {4}


def test_a_head_trained_in_low_bit_is_better_in_low_bit(head: Eagle3Head, rounded: LowBitTarget) -> None:
    """Both go on for 30 steps from one head that has converged; the one in fp32 is rounded afterwards."""
    batches, recipe = [Batch(rounded, head, seed) for seed in range(4)], load_recipe("mxfp4a4")
    adam_steps(head, batches, 120, rate=2e-3)
    low = trained(head, rounded, recipe)
    losses = []
    for start in (low, head):
        adam_steps(start, batches, 30, rate=3e-4)
        exported = quantize_head(start, recipe)
        assert isinstance(exported, Eagle3Head) and low_bit_layers(exported)
        with torch.no_grad():
            losses.append(sum(float(batch.loss(exported)) for batch in batches))
    assert losses[0] < 0.8 * losses[1]
