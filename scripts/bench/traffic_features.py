"""How many records a second traffic matching reads: features, clusters, density ratio and weights of a made pool.

    python scripts/bench/traffic_features.py --records 100000 --json docs/results/traffic_features.json

Records are made as they are read, with words whose frequencies follow Zipf's law in some domains of their own
vocabulary, and forgotten after each chunk; of every record only its vector, lengths and cluster are kept. Time is given
by the clock and by the processor; the making of the records is measured apart and not counted.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from bitdraft.data.conversation import Conversation, Message
from bitdraft.data.traffic.clusters import cluster_count, fit_clusters
from bitdraft.data.traffic.features import FeatureSpace
from bitdraft.data.traffic.ratio import density_ratio
from bitdraft.data.traffic.weights import choose_beta, finished, post_stratified, token_corrected
from bitdraft.quant.files import write_text_atomically
from bitdraft.train.environment import machine_facts, resident_bytes, stop_cleanly

VOCABULARY = 20_000


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure features and weights."""

    records: int = 100_000
    """Of the pool."""
    traffic: int = 2000
    words: int = 200
    """Of a record: a quarter asks, the rest answers."""
    domains: int = 12
    sample: int = 10_000
    """Records of the pool from which features are made."""
    fitted: int = 50_000
    """Records of the pool to which clusters and the density ratio are fitted."""
    chunk: int = 2000
    seed: int = 0
    json: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Where to write the numbers."""

    def __post_init__(self) -> None:
        if min(self.records, self.traffic, self.sample, self.fitted, self.chunk) < 10:
            raise ValueError("--records, --traffic, --sample, --fitted and --chunk must be at least 10")
        if self.words < 4 or self.domains < 1:
            raise ValueError("--words must be at least 4 and --domains at least 1")


class Clock:
    """Seconds by the wall and by the processor since it was made, less those spent in ``making``."""

    def __init__(self) -> None:
        self.begin = time.perf_counter(), time.process_time()
        self.made = [0.0, 0.0]

    def read(self) -> tuple[float, float]:
        wall, cpu = time.perf_counter() - self.begin[0], time.process_time() - self.begin[1]
        return wall - self.made[0], cpu - self.made[1]


def main(options: Options) -> None:
    clock = Clock()
    fit, tune = (
        [r for chunk in made_records(options, n, of_traffic=True, part=part, clock=clock) for r in chunk]
        for part, n in enumerate((options.traffic * 7 // 10, options.traffic * 3 // 10), start=1)
    )
    sample = next(
        made_records(options, min(options.sample, options.records), of_traffic=False, clock=clock, whole=True)
    )
    space = FeatureSpace.fit([*sample, *fit], answers=True, seed=options.seed)
    del sample
    of_fit, of_tune = space.rows(fit), space.rows(tune)
    fitting = clock.read()

    vectors = np.empty((options.records, of_fit.vectors.shape[1]), np.float32)
    tokens = np.empty(options.records, np.float32)
    at = 0
    for chunk in made_records(options, options.records, of_traffic=False, clock=clock):
        rows = space.rows(chunk)
        vectors[at : at + len(chunk)], tokens[at : at + len(chunk)] = rows.vectors, rows.answer_tokens
        at += len(chunk)
    features = clock.read()

    chosen = np.sort(np.random.default_rng(options.seed).permutation(options.records)[: options.fitted])
    clusters = fit_clusters(np.concatenate([vectors[chosen], of_fit.vectors]), cluster_count(len(fit)), options.seed)
    in_pool, in_fit, in_tune = (clusters.assign(v) for v in (vectors, of_fit.vectors, of_tune.vectors))
    estimate = density_ratio(vectors[chosen], of_fit.vectors, seed=options.seed)
    ratio = np.empty(options.records)
    rest = np.ones(options.records, bool)
    rest[chosen] = False
    ratio[chosen] = estimate.pool
    ratio[rest] = estimate.predict(vectors[rest])
    by_cluster = post_stratified(in_pool, in_fit, clusters.count)
    refinement, _ = choose_beta(by_cluster, in_pool, ratio, in_tune, estimate.predict(of_tune.vectors))
    raw = token_corrected(
        refinement.weights(in_pool, ratio), in_pool, tokens, in_fit, of_fit.answer_tokens, clusters.count
    )
    done = finished(raw)
    whole = clock.read()

    parts = {
        "features_fit": fitting,
        "features": (features[0] - fitting[0], features[1] - fitting[1]),
        "weights": (whole[0] - features[0], whole[1] - features[1]),
        "all": whole,
    }
    for name, (wall, cpu) in parts.items():
        print(f"{name:12s} {wall:8.1f} s, {cpu:8.1f} s of processor, {options.records / wall:8.0f} records/s")
    peak = resident_bytes("VmHWM") / 2**20
    print(
        f"peak memory {peak:.0f} MiB; a vector has {vectors.shape[1]} features; effective share {done.ess_fraction:.2f}"
    )
    document = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).date().isoformat(),
        "settings": {name: value for name, value in vars(options).items() if name != "json"},
        "seconds": {name: {"wall": wall, "processor": cpu} for name, (wall, cpu) in parts.items()},
        "records_per_second": options.records / whole[0],
        "records_per_processor_second": options.records / whole[1],
        "peak_mib": peak,
        "features": int(vectors.shape[1]),
        "ess_fraction": done.ess_fraction,
        "machine": machine_facts(),
    }
    if options.json:
        write_text_atomically(options.json, json.dumps(document, indent=2) + "\n")


def made_records(
    options: Options, count: int, *, of_traffic: bool, clock: Clock, part: int = 0, whole: bool = False
) -> Iterator[list[Conversation]]:
    """Chunks of ``count`` records; traffic favours the last domains. ``whole``: in one chunk."""
    generator = np.random.default_rng([options.seed, part])
    words = np.array([f"w{i}" for i in range(VOCABULARY)])
    zipf = 1.0 / np.arange(1, VOCABULARY + 1)
    cumulated = np.cumsum(zipf / zipf.sum())
    shares = np.ones(options.domains) if not of_traffic else np.arange(1.0, options.domains + 1) ** 2
    size = count if whole else options.chunk
    for begin in range(0, count, size):
        before = time.perf_counter(), time.process_time()
        n = min(size, count - begin)
        domains = generator.choice(options.domains, n, p=shares / shares.sum())
        ranks = np.minimum(np.searchsorted(cumulated, generator.random((n, options.words))), VOCABULARY - 1)
        # Half of the words are common to all domains, the others are moved into a domain's own vocabulary.
        own = generator.random(ranks.shape) < 0.5
        ranks = np.where(own, (ranks * 31 + domains[:, None] * 997) % VOCABULARY, ranks)
        ends = generator.integers(options.words // 2, options.words + 1, n)
        asked = options.words // 4
        chunk = [
            Conversation(
                f"{part}-{begin + i}",
                str(domains[i]),
                (
                    Message("user", " ".join(words[ranks[i, :asked]])),
                    Message("assistant", " ".join(words[ranks[i, asked : ends[i]]])),
                ),
                "made",
            )
            for i in range(n)
        ]
        clock.made[0] += time.perf_counter() - before[0]
        clock.made[1] += time.process_time() - before[1]
        yield chunk


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options, description=Options.__doc__)))
