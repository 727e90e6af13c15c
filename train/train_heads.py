"""Train a draft head against a target in simulated low bit.

    accelerate launch train/train_heads.py --target-quant mxfp4

Without further options: the embedded SmolLM2-135M-Instruct, the shipped prompts answered by the low-bit target
itself, an EAGLE-3 head, exported for vLLM and measured on held-out prompts. ``--help`` shows every option.
"""

import sys

from bitdraft.train.config import RunConfig
from bitdraft.train.config_io import parse
from bitdraft.train.environment import read_environment, stop_cleanly
from bitdraft.train.run import run


def main() -> None:
    run(parse(RunConfig, sys.argv[1:]), read_environment())


if __name__ == "__main__":
    stop_cleanly(main)
