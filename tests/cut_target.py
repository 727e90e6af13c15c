"""A process that cuts the tiny target up with others and runs it: what ``test_placement`` launches under FSDP2.

cut_target.py TARGET
"""

import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget, load_target
from bitdraft.train.config import RunConfig
from bitdraft.train.environment import read_environment, stop_cleanly
from bitdraft.train.launch import make_accelerator
from bitdraft.train.placement import first_device, place


def loaded() -> LowBitTarget:
    return load_target(sys.argv[1], load_recipe("mxfp8"), dtype=torch.float32, compile_quantizer="off")


def main() -> None:
    accelerator = make_accelerator(RunConfig(device="cpu", tracker="none"), read_environment(), Path())
    assert first_device(None, True, accelerator) == "cpu"
    whole, target = loaded(), loaded()
    place(target, None, True, accelerator)
    ids = torch.arange(1, 9)[None] + accelerator.process_index  # each process runs tokens of its own
    for _ in range(2):
        for weight in target.decoder.layers.parameters():
            assert isinstance(weight, DTensor)
            assert weight.to_local().numel() * accelerator.num_processes == weight.numel()
        mine, its = target.states(ids, capture=(2, 4)), whole.states(ids, capture=(2, 4))
        assert mine.captured.equal(its.captured)
        assert target.logits(mine.last_hidden).equal(whole.logits(its.last_hidden))
    accelerator.print(f"{accelerator.num_processes} processes ran what none of them holds")
    accelerator.end_training()


if __name__ == "__main__":
    stop_cleanly(main)
