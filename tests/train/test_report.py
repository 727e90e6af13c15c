"""The report: every number stands where it belongs, and the page is one file that anyone can read."""

import re
from base64 import b64decode
from copy import deepcopy
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_matrix import CATEGORIES, cell, confidence, matrix, realistic, result, simulated

from bitdraft.train.report.blocks import Picture, Table
from bitdraft.train.report.html import page
from bitdraft.train.report.plots import DARK, LIGHT, spread
from bitdraft.train.report.recovery import SETTINGS, Document
from bitdraft.train.report.write import assemble, headline, markdown, write_report

ROWS = simulated([0.6] * 3, 16, seed=0)


def single(**changes: Any) -> Document:
    """One result of one head: its fields, or those of its cell, changed."""
    of_result = {key: changes.pop(key) for key in list(changes) if key in result("demo", ROWS)}
    return matrix(cell("mxfp4", "mxfp4", [result("demo", ROWS, **of_result)], **changes))


@cache
def whole_page() -> str:
    return page(assemble(realistic()))


def pictures(document: Document) -> list[Picture]:
    return [b for s in assemble(document).sections for b in s.blocks if isinstance(b, Picture)]


def titles(document: Document) -> list[str]:
    return [section.title for section in assemble(document).sections]


def line(text: str, *starts: str) -> str:
    """The one line of a table whose first column holds all of ``starts``."""
    (found,) = (t for t in text.splitlines() if t.startswith("|") and all(s in t.split("|")[1] for s in starts))
    return found


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_matrix_says_length_interval_rate_and_drafted_tokens() -> None:
    document = realistic()
    table = section("\n## In short\n" + markdown(document), "In short").split("**On gsm8k**")[0]
    row = line(table, "eagle3 · trained on mxfp4 · draft length 3")
    by_recipe = {c["served_on"]: c["results"][0] for c in document["cells"] if c["head"] == "runs/eagle3-mxfp4/export"}
    shown = [
        f"{r['acceptance_length']:.3f}{stars} · {r['ci95'][0]:.3f} … {r['ci95'][1]:.3f}"
        f" · {r['acceptance_rate']:.1%} of 3.00"
        for r, stars in ((by_recipe["none"], ""), (by_recipe["mxfp4"], "**"))
    ]
    assert row.index(shown[0]) < row.index(shown[1]), "unquantized first"
    assert "| served on bf16 " in table
    assert f"**{by_recipe['mxfp4']['acceptance_length']:.3f}**" in row, "trained on what is served"


def test_a_rate_never_comes_without_its_length() -> None:
    for s in assemble(realistic()).sections:
        for table in (b for b in s.blocks if isinstance(b, Table)):
            for row in table.rows:
                for c in row:
                    notes = () if isinstance(c, str) else (c.text, *c.notes)
                    if any("% of" in note for note in notes):
                        assert re.search(r"\b\d\.\d{3}\b", " ".join(notes))


def test_the_headline_is_the_recovery() -> None:
    text = markdown(realistic())
    (key,) = (t for t in text.splitlines() if t.startswith("**R = "))
    assert "trained on mxfp4" in key and "trained on bf16" in key and "demo, draft length 3" in key
    recovery = section(text, "Gap recovery")
    assert key.split("**")[1].removeprefix("R = ") in line(recovery, "eagle3 mxfp4 → mxfp4", "demo", "length 3")
    assert "bf16, text of mxfp4" in recovery, "the control is compared too"
    assert " pt" in recovery


def test_no_gap_is_said_in_words() -> None:
    document = realistic()
    for c in document["cells"]:
        if (c["kind"], c["trained_on"], c["served_on"]) == ("eagle3", "none", "none"):
            (low,) = (o for o in document["cells"] if o["trained_on"] == "none" and o["served_on"] == "mxfp4")
            c["results"] = deepcopy(low["results"])
    text = markdown(document)
    assert "no gap to recover (+0.000 (+0.000 … +0.000))" in text
    assert "R = " not in text.split("## Gap recovery")[0]


def test_a_single_result_is_its_own_headline() -> None:
    document = single()
    (r,) = document["cells"][0]["results"]
    assert f"**{r['acceptance_length']:.3f}** tokens per target pass" in markdown(document)
    assert "Gap recovery" not in titles(document)


def test_every_setting_that_decides_the_numbers_is_named() -> None:
    settings = assemble(realistic()).settings
    first = realistic()["cells"][0]
    for field in SETTINGS:
        value = first[field]
        assert (f"{value:g}" if isinstance(value, float) else str(value)) in settings
    assert "draft length 3, 5" in settings and "demo (40 prompts), gsm8k (40 prompts)" in settings


def test_settings_that_differ_stand_in_the_rows() -> None:
    greedy: dict[str, Any] = {"temperature": 0.0, "rule": "greedy", "drafts": "greedy"}
    sampled: dict[str, Any] = {"temperature": 0.7, "rule": "sampling", "drafts": "sampled"}
    cells = [cell("mxfp4", "mxfp4", [result("demo", ROWS)], **how) for how in (greedy, sampled)]
    plain = [[row[0], 0] for row in ROWS]
    cells.append(cell(None, "mxfp4", [result("demo", plain)], kind="none", **{**sampled, "drafts": "greedy"}))
    report = assemble(matrix(*cells))
    assert "temperature 0 / 0.7 · " in report.settings
    assert "greedy / sampled drafts · greedy / sampling verification" in report.settings
    text = markdown(matrix(*cells))
    for t in ("0", "0.7"):  # and nothing that follows from the temperature
        assert f"| eagle3, temperature {t} · trained on mxfp4 " in text
        assert f"| eagle3 mxfp4 → mxfp4, temperature {t} · demo " in text


def test_two_heads_of_a_kind_are_told_apart() -> None:
    cells = [cell("mxfp4", "mxfp4", [result("demo", ROWS)], head=head) for head in ("runs/a", "runs/b")]
    text = markdown(matrix(*cells))
    assert "| eagle3, runs/a " in text and "| eagle3, runs/b " in text
    assert "runs/eagle3" not in markdown(single()), "no path where none is needed"


def test_details_have_their_numbers() -> None:
    document = realistic()
    text = markdown(document)
    (r, *_) = (c for c in document["cells"] if c["trained_on"] == c["served_on"] == "mxfp4" and c["kind"] == "eagle3")
    three, five, _, stopped = r["results"]
    names = ("eagle3 mxfp4 → mxfp4", "demo", "draft length 5")
    position = line(section(text, "By position"), *names)
    assert f"{five['per_position'][4]:.1%} · {five['conditional'][4]:.1%}" in position
    category = section(text, "By category").split("**On gsm8k**")[0]
    chat = five["by_category"][CATEGORIES[2]]
    assert f"{chat['acceptance_length']:.3f}" in line(category, *names[::2])
    assert f"{chat['acceptance_rate']:.1%} of 5.00" in line(category, *names[::2])
    bound = line(section(text, "What a perfect imitation would reach"), *names)
    assert f"{five['per_position'][0]:.1%}" in bound and "84.3% · 82.9% … 85.7%" in bound and "86.2%" in bound
    time = section(text, "Time")
    assert "1.9 · 9%" in line(time, *names) and "| 1.15" in line(time, *names)
    assert line(time, "eagle3 mxfp4 → mxfp4", "gsm8k").rstrip(" |").endswith("–")
    counts = line(section(text, "All counts"), "eagle3 mxfp4 → mxfp4", "demo", "draft length 3")
    for key in ("passes", "drafted", "accepted", "emitted"):
        assert f"| {three[key]:,} " in counts
    early = line(section(text, "Stopped early"), "eagle3 mxfp4 → mxfp4")
    for numbers in (stopped, five):
        assert f"{numbers['acceptance_length']:.3f}" in early
        assert f"{numbers['acceptance_rate']:.1%} of {numbers['drafted_per_pass']:.2f}" in early
    assert f"{stopped['stopped_early']['share_kept']:.1%}" in early
    frontier = section(text, "Acceptance against drafted tokens")
    assert sum(t.startswith("| eagle3 mxfp4 → mxfp4 ") for t in frontier.splitlines()) == 4
    calibration = section(text, "Confidence")
    assert "| 8.1%" in calibration and "| 0.840 " in calibration


def test_sections_without_numbers_are_left_out() -> None:
    assert titles(single(by_category={})) == [
        "In short",
        "By position",
        "Is the output still the target's?",
        "Time",
        "All counts",
    ]


def test_plain_decoding_is_a_cell_too() -> None:
    rows = [[20, 0] for _ in range(8)]
    document = matrix(cell(None, "mxfp4", [result("demo", rows)], kind="none"))
    text = markdown(document)
    assert "1.000" in text and "nothing drafted" in text
    assert "By position" not in text
    assert "nothing drafted" in page(assemble(document))


def test_stopping_says_by_what() -> None:
    stop = {"threshold": 0.3, "policy": "cost", "share_kept": 0.9}
    fixed = {"acceptance_rate": 0.4, "acceptance_length": 2.2, "drafted_per_pass": 3.0}
    text = markdown(single(stopped_early={**stop, "fixed": fixed}))
    assert "stopped where drafts do not pay, at most 3" in text
    assert "2.200 · 40.0% of 3.00" in section(text, "Stopped early")


def test_a_position_that_no_pass_reached_is_left_blank() -> None:
    found = confidence(ROWS)
    found["positions"][2] |= {"bins": [], "tries": 0, "auc": float("nan"), "ece": None, "ece_before": None}
    document = single(confidence=found)
    assert re.search(
        r"\| 3 +\| 1\.20 +\| -0\.10 +\| – +\| – +\| – +\| 0 +\|", section(markdown(document), "Confidence")
    )
    assert "nan" not in markdown(document)
    (picture,) = (p for p in pictures(document) if "Reliability" in p.title)
    assert "position 3 –" in picture.alt
    assert picture.draw(LIGHT) != picture.draw(DARK)


def test_the_headline_is_the_start_of_the_report() -> None:
    text = headline(realistic())
    assert "**R = " in text and "## " not in text
    assert markdown(realistic()).startswith(text[: text.rstrip().rindex("\n\n")])


def test_a_failed_comparison_and_warnings_come_first() -> None:
    lines = markdown(single(lossless_failed=2, warnings=["a warning", "a warning"])).splitlines()
    alerts = [t for t in lines if t.startswith("> **Warning:**")]
    assert lines.index(alerts[0]) == 4, "right under the settings"
    assert "2 of 8 answers of eagle3 mxfp4 → mxfp4 on demo" in alerts[0]
    assert alerts[1:] == ["> **Warning:** a warning"]


@pytest.mark.parametrize(
    "rule, lossless, said",
    [
        ("greedy", True, "Greedy verification keeps the target's answers. 8 greedy answers compared"),
        ("sampling", True, "Sampling verification keeps the target's distribution."),
        ("typical", False, "Typical verification is lossy"),
    ],
)
def test_each_rule_says_what_it_keeps(rule: str, lossless: bool, said: str) -> None:
    assert said in markdown(single(rule=rule, lossless=lossless))


HOSTILE = "$\\y$<script>alert(1)</script>&\"'|`*"


def hostile() -> Document:
    parts = result(HOSTILE, ROWS, confidence=confidence(ROWS))
    parts["by_category"] = {f"{HOSTILE}{i}": numbers for i, numbers in enumerate(parts["by_category"].values())}
    return matrix(cell(HOSTILE, HOSTILE, [parts], kind=HOSTILE, head=HOSTILE, target=HOSTILE, warnings=[HOSTILE]))


class Reader(HTMLParser):
    """Tags in order, those left open, and what is loaded."""

    VOID = ("meta", "img", "source", "!doctype", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.ids: set[str | None] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self.loaded += [str(v) for name, v in attrs if name in ("src", "srcset", "href")]
        self.ids |= {v for name, v in attrs if name == "id"}
        if tag == "img":
            self.images.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


def test_the_page_needs_nothing_else() -> None:
    text = whole_page()
    reader = read(text)
    assert "script" not in reader.tags and "link" not in reader.tags
    assert "@import" not in text and "url(" not in text and "http" not in re.sub(r"base64,[\w+/=]+", "", text)
    assert all(u.startswith(("data:image/svg+xml;base64,", "#")) for u in reader.loaded)
    assert {u[1:] for u in reader.loaded if u.startswith("#")} <= reader.ids


def test_the_page_fits_a_phone_and_a_dark_room() -> None:
    text = whole_page()
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert "@media (prefers-color-scheme: dark)" in text
    assert text.count('<source media="(prefers-color-scheme: dark)"') == text.count("<img ") > 5
    assert text.count("<table>") == text.count('<div class="scroll" tabindex="0"')


def test_every_picture_is_told_in_words() -> None:
    images = read(whole_page()).images
    drawn = pictures(realistic())
    assert [image["alt"] for image in images] == [picture.alt for picture in drawn]
    assert all(re.search(r"\d", picture.alt) for picture in drawn)


def test_page_and_markdown_have_the_same_sections() -> None:
    text = markdown(realistic())
    assert re.findall(r"(?m)^## (.*)$", text) == [
        t.replace("&#x27;", "'") for t in re.findall(r"<h2>(.*?)</h2>", whole_page())
    ]


def test_names_are_only_names() -> None:
    text = page(assemble(hostile()))
    reader = read(text)
    assert "script" not in reader.tags
    assert "<script" not in text and "alert(1)" in text
    images = [b64decode(u.split(",")[1]) for u in reader.loaded if u.startswith("data:")]
    assert len(images) == 8
    for drawn, theme in zip(images, [DARK, LIGHT] * 4, strict=True):
        assert ElementTree.fromstring(drawn).tag.endswith("svg")
        assert theme.ink in drawn.decode()
        assert b"dc:date" not in drawn
    tables = [t for t in markdown(hostile()).splitlines() if t.startswith("|")]
    assert not any("<script" in re.sub(r"\\<", "", t) for t in tables)
    # A name's bar does not make a column.
    widths = [len(re.findall(r"(?<!\\)\|", t)) for t in tables]
    assert all(a == b for a, b, t in zip(widths, widths[1:], tables[1:], strict=False) if t.startswith("|--"))


def test_the_same_numbers_give_the_same_bytes() -> None:
    assert page(assemble(single(by_category={}))) == page(assemble(single(by_category={})))


def test_a_changed_number_changes_the_picture() -> None:
    other = single()
    other["cells"][0]["results"][0]["per_position"][1] *= 0.9
    before, after = ([p.draw(LIGHT) for p in pictures(document)] for document in (single(), other))
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True]


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=8).map(sorted),
    st.floats(0.001, 0.1),
)
def test_labels_are_moved_apart_in_order(wanted: list[float], gap: float) -> None:
    placed = spread(wanted, gap, 0.0, 1.0)
    assert all(b - a >= gap - 1e-9 for a, b in pairwise(placed))
    assert placed[0] >= -1e-9
    assert placed[-1] <= 1.0
    if all(b - a >= gap for a, b in pairwise(wanted)):
        assert placed == pytest.approx(wanted, abs=1e-12), "labels that do not meet stay where they belong"


@pytest.mark.parametrize(
    "where, stem", [("out", "out/report"), ("out/acceptance.html", "out/acceptance"), ("v1.0", "v1.0/report")]
)
def test_both_files_are_written_side_by_side(tmp_path: Path, where: str, stem: str) -> None:
    document = single(by_category={})
    written = write_report(document, tmp_path / where)
    assert written == (tmp_path / f"{stem}.md", tmp_path / f"{stem}.html")
    assert written[0].read_text(encoding="utf-8") == markdown(document)
    assert written[1].read_text(encoding="utf-8") == page(assemble(document))
    assert sorted(written[0].parent.iterdir()) == sorted(written)


def test_a_picture_in_the_page_is_the_picture_drawn() -> None:
    picture = pictures(realistic())[0]
    reader = read(whole_page())
    data = [b64decode(u.split(",")[1]) for u in reader.loaded if u.startswith("data:")]
    assert data[:2] == [picture.draw(DARK), picture.draw(LIGHT)]
