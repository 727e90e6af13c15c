"""What this package computes, against vectors that other implementations wrote.

    python scripts/check_golden.py ../shared/golden

One line per file: how many vectors are equal bit for bit, how many differ where the two are known to disagree (the
named blocks of quant/golden_peers.py), how many no checker knows. Exit code 1 if anything else differs.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bitdraft.quant.golden import check_folder
from bitdraft.train.environment import stop_cleanly


@dataclass(frozen=True)
class Options:
    """Check reference vectors."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Folder of `<format>.safetensors` files and `block_names_*.json`."""
    named: bool = False
    """Also list the vectors that differ only where they are known to."""


def main(options: Options) -> None:
    wrong = 0
    for report in check_folder(options.folder):
        print("\n".join(report.lines()), flush=True)
        wrong += len(report.wrong)
        if options.named:
            for finding in report.findings:
                if finding.named:
                    print(f"  as named: {finding.key} ({finding.named} of {finding.total})")
    if wrong:
        print(f"error: {wrong} vectors differ from what is computed here", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options)))
