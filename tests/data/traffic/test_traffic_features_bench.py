"""The benchmark of traffic matching on a few records."""

import json
from pathlib import Path

from bench_scripts import bench_script


def test_the_benchmark_counts_records_and_leaves_out_their_making(tmp_path: Path) -> None:
    bench = bench_script("traffic_features")
    out = tmp_path / "out.json"
    bench.main(bench.Options(records=60, traffic=40, words=12, sample=50, fitted=50, chunk=20, json=out))
    found = json.loads(out.read_text())
    assert found["records_per_second"] > 0
    assert found["seconds"]["all"]["wall"] >= found["seconds"]["features"]["wall"] > 0
    assert found["ess_fraction"] >= 0.3


def test_made_traffic_favours_other_domains_than_the_pool() -> None:
    bench = bench_script("traffic_features")
    options, clock = bench.Options(records=400, chunk=50), bench.Clock()
    chunks = list(bench.made_records(options, 400, of_traffic=False, clock=clock))
    assert [len(chunk) for chunk in chunks] == [50] * 8
    traffic = [r for chunk in bench.made_records(options, 400, of_traffic=True, part=1, clock=clock) for r in chunk]
    pool = [r for chunk in chunks for r in chunk]
    assert sum(int(r.category) for r in traffic) > 1.3 * sum(int(r.category) for r in pool)
    assert clock.made[1] > 0
