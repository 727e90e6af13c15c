"""The benchmark of traffic matching on a few records."""

import json
from pathlib import Path

import pytest
from bench_scripts import bench_script


def test_the_benchmark_matches_the_pool_that_it_makes(tmp_path: Path) -> None:
    bench = bench_script("traffic_features")
    out = tmp_path / "out.json"
    bench.main(bench.Options(records=300, traffic=120, words=12, domains=3, json=out))
    found = json.loads(out.read_text())
    assert found["records_per_second"] > 0 and found["seconds"]["wall"] > 0
    assert found["peak_mib"] >= found["mib_before"] > 0
    assert found["ess_fraction"] >= 0.3
    assert found["settings"]["records"] == 300


def test_made_traffic_favours_other_domains_than_the_pool() -> None:
    bench = bench_script("traffic_features")
    options = bench.Options(records=4000)
    chunks = list(bench.made_records(options, 4000, of_traffic=False))
    assert [len(chunk) for chunk in chunks] == [2000] * 2
    traffic = [r for chunk in bench.made_records(options, 4000, of_traffic=True) for r in chunk]
    pool = [r for chunk in chunks for r in chunk]
    assert sum(int(r.category) for r in traffic) > 1.3 * sum(int(r.category) for r in pool)


def test_too_few_records_are_refused() -> None:
    with pytest.raises(ValueError, match="must be at least 100"):
        bench_script("traffic_features").Options(records=50)
