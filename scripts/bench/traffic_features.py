"""How many records a second traffic matching takes: two readings of a made pool, features, clusters, ratio, weights.

    python scripts/bench/traffic_features.py --records 100000 --json docs/results/traffic_features.json

The pool is written to a file first, with words whose frequencies follow Zipf's law in some domains of their own
vocabulary. Matching then streams it twice, as ``scripts/match_traffic.py`` does, and keeps of a record its vector,
lengths and place. Time is given by the clock and by the processor, with the peak of the process's memory.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from tqdm import tqdm

from bitdraft.data.conversation import Conversation, Message
from bitdraft.data.sources import iter_conversations
from bitdraft.data.traffic.match import match
from bitdraft.data.traffic.outputs import record_line
from bitdraft.data.traffic.pool import Report
from bitdraft.data.traffic.weighing import MatchSettings
from bitdraft.quant.files import write_text_atomically
from bitdraft.train.environment import machine_facts, resident_bytes, stop_cleanly

VOCABULARY = 20_000
_CHUNK = 2000


@dataclass(frozen=True, kw_only=True)
class Options:
    """Match a made pool to made traffic."""

    records: int = 100_000
    """Of the pool."""
    traffic: int = 2000
    words: int = 200
    """Of a record at most, of which a quarter asks; the rest answers."""
    domains: int = 12
    seed: int = 0
    json: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Where to write the numbers."""

    def __post_init__(self) -> None:
        if min(self.records, self.traffic) < 100:
            raise ValueError("--records and --traffic must be at least 100")
        if self.words < 4 or self.domains < 1:
            raise ValueError("--words must be at least 4 and --domains at least 1")


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pool = Path(folder) / "pool.jsonl"
        with pool.open("w", encoding="utf-8") as file, tqdm(total=options.records, desc="making the pool") as bar:
            for chunk in made_records(options, options.records, of_traffic=False):
                file.writelines(f"{record_line(c)}\n" for c in chunk)
                bar.update(len(chunk))
        traffic = [r for chunk in made_records(options, options.traffic, of_traffic=True) for r in chunk]
        before, wall, cpu = resident_bytes("VmHWM"), time.perf_counter(), time.process_time()
        found = match(lambda: iter_conversations([pool]), traffic, MatchSettings(seed=options.seed), progress=_bar)
        wall, cpu, size = time.perf_counter() - wall, time.process_time() - cpu, pool.stat().st_size
    document = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).date().isoformat(),
        "settings": {name: value for name, value in vars(options).items() if name != "json"},
        "seconds": {"wall": wall, "processor": cpu},
        "records_per_second": options.records / wall,
        "peak_mib": resident_bytes("VmHWM") / 2**20,
        "mib_before": before / 2**20,
        "pool_mib": size / 2**20,
        "ess_fraction": found.finished.ess_fraction,
        "auc_before": found.measures["auc"].before,
        "auc_after": found.measures["auc"].after,
        "machine": machine_facts(),
    }
    print(
        f"{options.records:,} records ({document['pool_mib']:.0f} MiB): {wall:.0f} s, {cpu:.0f} s of processor, "
        f"{document['records_per_second']:.0f} records/s; peak memory {document['peak_mib']:.0f} MiB"
    )
    if options.json:
        write_text_atomically(options.json, json.dumps(document, indent=2) + "\n")


def made_records(options: Options, count: int, *, of_traffic: bool) -> Iterator[list[Conversation]]:
    """Chunks of ``count`` records; traffic favours the last domains."""
    generator = np.random.default_rng([options.seed, int(of_traffic)])
    words = np.array([f"w{i}" for i in range(VOCABULARY)])
    zipf = 1.0 / np.arange(1, VOCABULARY + 1)
    cumulated = np.cumsum(zipf / zipf.sum())
    shares = np.arange(1.0, options.domains + 1) ** 2 if of_traffic else np.ones(options.domains)
    for begin in range(0, count, _CHUNK):
        n = min(_CHUNK, count - begin)
        domains = generator.choice(options.domains, n, p=shares / shares.sum())
        ranks = np.minimum(np.searchsorted(cumulated, generator.random((n, options.words))), VOCABULARY - 1)
        # Half of the words are common to all domains, the others are moved into a domain's own vocabulary.
        own = generator.random(ranks.shape) < 0.5
        ranks = np.where(own, (ranks * 31 + domains[:, None] * 997) % VOCABULARY, ranks)
        ends = generator.integers(options.words // 2, options.words + 1, n)
        asked = options.words // 4
        yield [
            Conversation(
                f"{begin + i}",
                str(domains[i]),
                (
                    Message("user", " ".join(words[ranks[i, :asked]])),
                    Message("assistant", " ".join(words[ranks[i, asked : ends[i]]])),
                ),
                "made",
            )
            for i in range(n)
        ]


@contextmanager
def _bar(label: str, total: int | None) -> Iterator[Report]:
    with tqdm(total=total, desc=label, unit="record") as bar:
        yield bar.update


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options, description=Options.__doc__)))
