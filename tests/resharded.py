"""A process of a run that loads a checkpoint, saves it again and takes a step: what ``test_sharding`` launches.

resharded.py CHECKPOINTS OUT     under any launcher; CHECKPOINTS may be empty
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitdraft.train.checkpoint import newest_checkpoint, save_checkpoint
from bitdraft.train.config import OptimConfig, RunConfig
from bitdraft.train.distribution import accumulating, any_process, backward, prepared, update
from bitdraft.train.environment import read_environment, stop_cleanly
from bitdraft.train.launch import make_accelerator
from bitdraft.train.sharding import load_module, restore, whole_state


class Odd(nn.Module):
    """Sizes that do not divide by two, a frozen matrix, a weight used beside its layer, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 3, bias=False)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(3, 11, bias=False)
        self.counter: Tensor
        self.register_buffer("counter", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.frozen(self.first(x).tanh()) @ self.last.weight.T).square().mean()


def step(accelerator: Any, module: Odd, wrapped: nn.Module, optimizer: Any, seed: int) -> float:
    """Two packs of numbers that differ from process to process."""
    generator = torch.Generator().manual_seed(100 * seed + accelerator.process_index)
    for last in (False, True):
        with accumulating(accelerator, wrapped, last):
            backward(accelerator, wrapped, wrapped(torch.randn(4, 5, generator=generator)))
    module.counter += 1
    return update(accelerator, wrapped, optimizer, clip=0.05)


def main() -> None:
    checkpoints, out = map(Path, sys.argv[1:])
    config = RunConfig(device="cpu", dtype="float32", tracker="none")
    accelerator = make_accelerator(config, read_environment(), out)
    found = newest_checkpoint(checkpoints)
    torch.manual_seed(1 if found is None else 2)
    module = Odd()
    if found:
        load_module(module, found)
    wrapped, optimizer = prepared(accelerator, module, OptimConfig(lr=0.1, weight_decay=0.01), torch.float32)
    if found:
        restore(accelerator, wrapped, optimizer, found)
    else:
        step(accelerator, module, wrapped, optimizer, 1)
    for done in (1, 2):
        tensors = whole_state(accelerator, wrapped, optimizer)
        assert accelerator.is_main_process or tensors == ({}, {})
        if accelerator.is_main_process:
            save_checkpoint(out, done, *tensors, [], keep=2)
        step(accelerator, module, wrapped, optimizer, 2)
    assert any_process(accelerator, accelerator.is_main_process)
    assert not any_process(accelerator, False)
    accelerator.print(f"{accelerator.distributed_type.value}, {accelerator.num_processes} processes")
    accelerator.end_training()


if __name__ == "__main__":
    stop_cleanly(main)
