"""A trained head in the layout of an engine, tried with the written files, with a model card and sums.

    python scripts/export_heads.py --head runs/eagle3-mxfp4/export --out exports/eagle3 --format eagle3-original
    python scripts/export_heads.py --head runs/eagle3-mxfp4a16/export --with-target --out exports/pair
    python scripts/export_heads.py --head runs/eagle3-fp8/export --head-quant fp8 --with-target --out exports/pair-fp8

Reads any head that Bitdraft can load, its own or one published in an engine's layout, and writes it anew. The files are
read back before anything else: they must draft what the head drafts, bit for bit, and their drafts must be accepted by
the target; the folder appears only then, whole. ``--with-target`` writes the quantized target beside the head, and the
head is tried on that very checkpoint.
"""

import tyro

from bitdraft.train.environment import read_environment, stop_cleanly
from bitdraft.train.exporting.config import ExportConfig
from bitdraft.train.exporting.export import export


def main(config: ExportConfig) -> None:
    export(config, read_environment())


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(ExportConfig)))
