"""What this package computes, against vectors that other implementations wrote.

    python scripts/check_golden.py ../shared/golden

One line per file: how many vectors are equal (bit for bit, but for the sums that quant/golden/searches.py and
quant/golden/calibrated.py name), how many differ where the two are known to disagree (quant/golden/peers.py), how many
no checker knows. Exit code 1 if anything else differs. A vector without a checker says nothing either way, so it is
reported and fails only under ``--complete``.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bitdraft.quant.golden.check import check_folder
from bitdraft.train.environment import stop_cleanly


@dataclass(frozen=True)
class Options:
    """Check reference vectors."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Folder of `<format>.safetensors` files and `block_names_*.json`."""
    named: bool = False
    """Also list the vectors that differ only where they are known to."""
    complete: bool = False
    """Fail also where a vector has no checker, and list those."""


def main(options: Options) -> None:
    wrong = unchecked = 0
    for report in check_folder(options.folder):
        print("\n".join(report.lines()), flush=True)
        wrong += len(report.wrong)
        unchecked += len(report.unchecked)
        if options.complete:
            print("".join(f"  not checked: {key}\n" for key in report.unchecked), end="")
        if options.named:
            for finding in report.findings:
                if finding.named:
                    print(f"  as named: {finding.key} ({finding.named} of {finding.total})")
    if wrong:
        print(f"error: {wrong} vectors differ from what is computed here", file=sys.stderr)
    if unchecked and options.complete:
        print(f"error: {unchecked} vectors have no checker", file=sys.stderr)
    if wrong or (unchecked and options.complete):
        sys.exit(1)


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options)))
