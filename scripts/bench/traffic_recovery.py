"""How well weights are recovered that are known: a pool and traffic drawn from the same sets in other shares.

    python scripts/bench/traffic_recovery.py --sets SETS --json docs/results/traffic_recovery.json

``SETS`` is a folder of prompt files (``MIX`` names them). Every seed draws other records, matches the pool to the
traffic by what is asked (``data/traffic``; the traffic's categories are not looked at), and compares the mean weight
of each category with the exact one, the traffic's share over the pool's. No part of the draws is left uniform.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from bitdraft.data.conversation import Conversation
from bitdraft.data.sampling import uniforms
from bitdraft.data.sources import read_conversations
from bitdraft.data.traffic.match import Matching, match
from bitdraft.data.traffic.pool import Report
from bitdraft.data.traffic.weighing import MatchSettings
from bitdraft.data.traffic.weights import effective_share
from bitdraft.quant.files import write_text_atomically
from bitdraft.train.environment import machine_facts, stop_cleanly

MIX = {
    # file: percent of the pool, of the traffic
    "awesome_prompts": (6, 5),
    "glaive_toolcall": (3, 10),
    "gpteacher_code": (17.5, 6.34),
    "gpteacher_roleplay": (8, 5),
    "gsm8k_train": (32, 8),
    "llamafactory_chat": (4.5, 8),
    "mbpp_train": (2, 8),
    "nq_open": (9, 5),
    "oasst_prompts": (4, 8),
    "oasst_zh": (3, 8),
    "self_instruct_seeds": (2, 2.66),
    "sgd_dialogues": (3, 17),
    "t0_tasks": (6, 9),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Match pools to traffic whose exact weights are known."""

    sets: Path
    """Folder with a JSONL file of each set."""
    json: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Where to write the numbers."""
    pool: int = 4000
    """Records of the pool."""
    traffic: int = 3300
    """Records of the traffic, of which 68 % are fitted to."""
    seeds: int = 10


def main(options: Options) -> None:
    rows = []
    for seed in range(options.seeds):
        pool, traffic, exact = _drawn(options, seed)
        settings = MatchSettings(read="prompts", seed=seed, shares=(0.68, 0.18, 0.14), uniform=0.0)
        found = match(partial(iter, pool), traffic, settings, progress=_silent)
        rows.append(_row(seed, pool, exact, found))
        print(
            f"seed {seed}: effective share {rows[-1]['ess_fraction']:.3f} (exact weights {rows[-1]['ess_exact']:.3f}), "
            f"AUC {rows[-1]['auc_before']:.3f} → {rows[-1]['auc_after']:.3f}, farthest category "
            f"{rows[-1]['worst']} {rows[-1]['categories'][rows[-1]['worst']]:+.0%}",
            flush=True,
        )
    if options.json:
        content = {
            "command": " ".join(["python", *sys.argv]),
            "date": datetime.now(UTC).date().isoformat(),
            "machine": machine_facts(),
            "pool": options.pool,
            "traffic": options.traffic,
            "seeds": rows,
        }
        write_text_atomically(options.json, json.dumps(content, indent=2) + "\n")


def _drawn(options: Options, seed: int) -> tuple[list[Conversation], list[Conversation], dict[str, float]]:
    """Pool, traffic, and the exact weight of each of the pool's records by key."""
    pool: list[Conversation] = []
    traffic: list[Conversation] = []
    exact: dict[str, float] = {}
    for name, (of_pool, of_traffic) in MIX.items():
        path = options.sets / f"{name}.jsonl"
        records = list({c.key: c for c in read_conversations([path])}.values())
        counts = [options.pool * of_pool / 100, options.traffic * of_traffic / 100]
        if round(sum(counts)) > len(records):
            raise ValueError(
                f"{path} has {len(records)} records, but {round(sum(counts))} are needed: lower --pool or --traffic"
            )
        drawn = [records[i] for i in np.argsort(uniforms([c.key for c in records], "recovery", seed))]
        for category in sorted({c.category for c in drawn}):  # each in the file's share: chance moves no weight
            some = [c for c in drawn if c.category == category]
            of_all = [round(count * len(some) / len(drawn)) for count in counts]
            pool += some[: of_all[0]]
            traffic += some[of_all[0] : sum(of_all)]
            exact |= {c.key: of_traffic / of_pool for c in some[: of_all[0]]}
    return pool, traffic, exact


def _row(seed: int, pool: list[Conversation], exact: dict[str, float], found: Matching) -> dict[str, Any]:
    category = {c.key: c.category for c in pool}
    kept = found.weights > 0
    keys = [key for key, stays in zip(found.keys, kept, strict=True) if stays]
    weights, true = found.weights[kept], np.array([exact[key] for key in keys])
    names = np.array([category[key] for key in keys])
    wrong = {
        str(name): float(weights[names == name].mean() / (true[names == name].mean() / true.mean()) - 1)
        for name in np.unique(names)
    }
    return {
        "seed": seed,
        "ess_exact": effective_share(true),
        "ess_fraction": found.finished.ess_fraction,
        "auc_before": found.measures["auc"].before,
        "auc_after": found.measures["auc"].after,
        "kl_before": found.measures["kl"].before,
        "kl_after": found.measures["kl"].after,
        "worst": max(wrong, key=lambda name: abs(wrong[name])),
        "within_20_percent": sum(abs(error) <= 0.2 for error in wrong.values()),
        "categories": wrong,
    }


@contextmanager
def _silent(label: str, total: int | None) -> Iterator[Report]:
    yield lambda count: None


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options, description=Options.__doc__)))
