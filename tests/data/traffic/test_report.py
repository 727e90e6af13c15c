"""The report says what was measured, in words that a table and a terminal bear."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matched_traffic import pool, records, silent, traffic

from bitdraft.data.conversation import Conversation, Message
from bitdraft.data.traffic.document import Document, document, shortened
from bitdraft.data.traffic.groups import Group, names, terms
from bitdraft.data.traffic.match import Matching, match
from bitdraft.data.traffic.picture import draw
from bitdraft.data.traffic.report import aligned, escaped, markdown
from bitdraft.data.traffic.split import split_traffic
from bitdraft.data.traffic.weighing import MatchSettings

SETTINGS = MatchSettings(clusters=5, floor=0.9)
NASTY = "# Title | <b>x</b> `code` *bold*\n\nnext\tline\x07 $a$ [link](x)"
ABOUT: Document = {
    "command": "python scripts/match_traffic.py pool.jsonl",
    "date": "2026-11-30",
    "skipped": {"pool": {"count": 2, "first": "pool.jsonl, line 3: not JSON"}, "traffic": {"count": 0, "first": ""}},
    "hidden_states": "none",
    "seconds": 2.0,
    "records_per_second": 120.0,
}


@pytest.fixture(scope="module")
def found() -> Matching:
    """Traffic partly in a language that the pool lacks, and one of its test prompts in the pool."""
    asked = [*traffic(), *records("chinese", 30, seed=1)]
    held = next(c for c in split_traffic(asked, SETTINGS.shares, 0).test if c.category == "cooking")
    nasty = Conversation("n", "cooking", (Message("user", NASTY),), "pool.jsonl, line 1")
    return match(lambda: iter([*pool(), nasty, held]), asked, SETTINGS, progress=silent)


@pytest.fixture(scope="module")
def report(found: Matching) -> Document:
    return document(found, SETTINGS, ABOUT)


def test_the_document_holds_the_promised_numbers_as_plain_json(report: Document, found: Matching) -> None:
    again = json.loads(json.dumps(report, allow_nan=False))
    assert again == report
    for key in ("ess_fraction", "auc_before", "auc_after", "kl_before", "kl_after", "mmd_p"):
        assert isinstance(report[key], float)
    assert report["ess"] == pytest.approx(report["ess_fraction"] * 181)
    assert report["dropped"]["count"] == 1
    assert report["traffic_records"] == {k: len(getattr(found.split, k)) for k in ("fit", "tune", "test")}
    assert len(report["clusters_without_pool"]) == sum(not g["pool_records"] for g in report["groups"])


def test_the_text_says_the_numbers_and_what_the_pool_lacks(report: Document) -> None:
    text = markdown(report)
    assert f"Effective sample size: {report['ess_fraction']:.1%} of the pool, {report['ess']:,.0f} records" in text
    assert "27.3% of the traffic is in the language 'zh', and no pool record is." in text
    bare = markdown({**report, "groups": [one(traffic_share=0.3, pool_records=0, share_before=0.0)]})
    assert "30.0% of the traffic is in 1 group of which the pool has no record" in bare
    few = markdown({**report, "groups": [one(traffic_share=0.1, pool_records=4, share_before=0.001)] * 2})
    assert "20.0% of the traffic is in 2 groups of which the pool has 8 records" in few
    assert "1 pool records hold a prompt of the traffic's test split" in text
    assert "2 broken records of the pool, the first: pool.jsonl, line 3: not JSON." in text
    assert f"raised to the power {report['temper']:.2f}" in text and report["temper"] < 1
    assert "cannot make up for it.** Add" not in text, "most of this traffic is in the pool"
    assert ABOUT["command"] in text


def one(**changes: Any) -> Document:
    group: Document = {
        "number": 0, "name": "code", "pool_records": 5, "traffic_records": 5, "traffic_share": 0.5,
        "share_before": 0.5, "share_after": 0.5, "weight": 1.0, "prompts": ["Ask"],
    }  # fmt: skip
    return {**group, **changes}


def test_every_table_has_as_many_cells_in_each_row(report: Document) -> None:
    nasty = one(name="a | b", prompts=[NASTY], weight=2.0, share_after=0.1), one(name="c", weight=0.5)
    text = markdown({**report, "groups": [*report["groups"], *nasty]})
    tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert len(tables) == 5
    for table in tables:
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(cells) == 1, table


def section(text: str, title: str) -> list[str]:
    after = text.split(f"## {title}\n", 1)
    return [] if len(after) == 1 else [x for x in after[1].split("\n## ")[0].splitlines() if x.startswith("| ")][1:]


def test_ten_groups_are_shown_each_way_the_most_changed_first(report: Document) -> None:
    groups = [one(number=i, name=f"g{i}", weight=2.0 ** (12 - i)) for i in range(25)]
    text = markdown({**report, "groups": groups})
    raised, lowered = (section(text, f"Most {which} groups") for which in ("raised", "lowered"))
    assert [row.split()[1] for row in raised] == [f"g{i}" for i in range(10)]
    assert [row.split()[1] for row in lowered] == [f"g{i}" for i in range(24, 14, -1)]


def test_groups_that_the_pool_cannot_fill_are_shown_and_others_are_not(report: Document) -> None:
    groups = [
        one(name="bare", pool_records=0, share_before=0.0, share_after=0.0, weight=0.0, traffic_share=0.002),
        one(name="thin", traffic_share=0.4, share_after=0.19),
        one(name="full", traffic_share=0.4, share_after=0.21),
        one(name="tiny", traffic_share=0.004, share_after=0.0),
    ]
    text = markdown({**report, "groups": groups})
    rows = section(text, "Traffic that the weighted pool does not fill")
    assert [row.split()[1] for row in rows] == ["thin", "bare"]
    assert "does not fill" not in markdown({**report, "groups": groups[2:]})


def test_a_pool_without_this_traffic_is_said_first(report: Document) -> None:
    lines = [line for line in markdown({**report, "unmatched": 0.9}).splitlines() if line.startswith("- ")]
    assert lines[0].startswith("- **The pool holds too little of this traffic")


def test_a_match_within_the_noise_of_samples_is_called_so(report: Document) -> None:
    close, far = (markdown({**report, "auc_after": auc, "auc_own": 0.5}) for auc in (0.54, 0.7))
    assert "about what two samples of the traffic show" in close
    assert "differences that the weights do not remove" in far


def test_prompts_are_one_line_and_mean_nothing_to_markdown() -> None:
    line = escaped(shortened(NASTY, 200))
    assert line == (r"\# Title \| \<b\>x\</b\> \`code\` \*bold\* next line \$a\$ \[link\](x)")
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdefg", 6) == "abcde…"


def test_tables_stand_in_columns_with_wide_characters_too() -> None:
    lines = aligned(["a", "b"], [["中文", "x"], ["word", "y"]])
    assert lines == ["| a    | b |", "|------|---|", "| 中文 | x |", "| word | y |"]


def test_groups_are_named_by_what_is_typical_of_them() -> None:
    asked = [*records("cooking", 30), *records("code", 30), *records("chinese", 10)]
    clusters = np.array([0] * 30 + [1] * 30 + [2] * 10)
    (cooking, words), (code, _), (chinese, pairs) = names(asked, clusters, 3)
    assert (cooking, code, chinese) == ("cooking", "code", "chinese, zh")
    assert not set(words) & {"the", "and"}
    assert all(len(pair) == 2 for pair in pairs)
    assert terms("The C3PO says 你好吗") == {"the", "says", "你好", "好吗"}
    mixed, _ = names(asked[:60], np.zeros(60, int), 1)[0]
    assert mixed == "", "no category has the majority"


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    plain = Group(0, "code", ("cost$", "x_1^2"), 5, 5, 0.6, 0.5, 0.7, ("Ask",))
    yield [
        plain,
        replace(plain, number=1, kind="zh", words=("你好",), pool_records=0, share_before=0, share_after=0),
        *(replace(plain, number=i) for i in range(2, 40)),
    ]


@pytest.mark.parametrize("weights", [np.ones(50), np.geomspace(0.02, 30, 50)])
def test_the_picture_is_drawn_without_a_warning(
    groups: list[Group], weights: np.ndarray, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    draw(groups, weights, 0.4, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert [str(w.message) for w in recwarn.list] == []
