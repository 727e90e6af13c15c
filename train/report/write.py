"""The report of measured acceptance, from the numbers of a matrix: Markdown for a terminal, HTML for a browser.

A matrix is ``{"version": 1, "command", "date", "seed", "cells": [document, …]}`` with the documents of
``train/measuring/document.py``; one measurement is a matrix of one cell.
"""

from dataclasses import replace
from pathlib import Path

from bitdraft.quant.files import write_text_atomically
from bitdraft.train.report import details
from bitdraft.train.report.blocks import Alert, Block, Cell, Key, Report, Section, Table, Text
from bitdraft.train.report.html import page
from bitdraft.train.report.reading import Reading
from bitdraft.train.report.recovery import Document, comparisons, measurements
from bitdraft.train.report.sections import alerts, keys, matrices, recovered


def write_report(matrix: Document, where: Path) -> tuple[Path, Path]:
    """Write ``report.md`` and ``report.html`` into the folder ``where``, or both beside each other under the name of
    the ``.md`` or ``.html`` file ``where``. Returns their paths.

    Raises ``ValueError`` for a matrix that cannot be read (``recovery.measurements``).
    """
    path = where if where.suffix in (".md", ".html") else where / "report.md"
    report = assemble(matrix)
    written = path.with_suffix(".md"), path.with_suffix(".html")
    for file, text in zip(written, (_markdown(report), page(report)), strict=True):
        write_text_atomically(file, text)
    return written


def markdown(matrix: Document) -> str:
    """The whole report without pictures. Tables are aligned, so that they read well in a terminal too."""
    return _markdown(assemble(matrix))


def headline(matrix: Document) -> str:
    """Settings and first section of the Markdown: what a terminal shows at the end of a measurement."""
    report = assemble(matrix)
    return _markdown(replace(report, sections=report.sections[:1]))


def assemble(matrix: Document) -> Report:
    """All sections that the matrix has numbers for, in the order of a reader's questions."""
    reading = Reading(tuple(measurements(matrix)))
    compared = comparisons(reading.found)
    sections = [
        Section("In short", (*alerts(reading), *keys(reading, compared), *matrices(reading))),
        Section("Gap recovery", tuple(recovered(reading, compared))),
        Section("What a perfect imitation would reach", tuple(details.bounds(reading))),
        Section("By position", tuple(details.positions(reading))),
        Section("By category", tuple(details.categories(reading))),
        Section("Stopped early", tuple(details.stopped_early(reading))),
        Section("Acceptance against drafted tokens", tuple(details.frontiers(reading))),
        Section("Confidence", tuple(details.confidence(reading))),
        Section("Is the output still the target's?", tuple(details.lossless(reading))),
        Section("Time", tuple(details.speed(reading))),
        Section("All counts", tuple(details.counts(reading))),
    ]
    return Report("Measured acceptance", reading.settings, tuple(s for s in sections if s.blocks), _made_by(matrix))


def _made_by(matrix: Document) -> str:
    machines = [", ".join(f"{key} {value}" for key, value in c["machine"].items()) for c in matrix["cells"]]
    return "; ".join([f"{matrix['command']}, seed {matrix['seed']}, {matrix['date']}", *dict.fromkeys(machines)])


def _markdown(report: Report) -> str:
    lines = [f"# {report.title}", "", _plain(report.settings), ""]
    for i, section in enumerate(report.sections):
        lines += [f"## {section.title}", ""] if i else []
        lines += [line for block in section.blocks for line in _block(block)]
    return "\n".join([*lines, _plain(report.made_by)]) + "\n"


def _block(block: Block) -> list[str]:
    match block:
        case Table():
            return [*([f"**{_plain(block.title)}**", ""] if block.title else []), *_aligned(block), ""]
        case Text(text):
            return [_plain(text), ""]
        case Alert(text):
            return [f"> **Warning:** {_plain(text)}", ""]
        case Key(number, what, text):
            return [f"**{_plain(number)}** {_plain(what)}. {_plain(text)}", ""]
    return []  # pictures stand in the page only


def _aligned(table: Table) -> list[str]:
    rows = [[_plain(cell) for cell in row] for row in (table.header, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head, *body = ("| " + " | ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)) + " |" for row in rows)
    return [head, "|" + "|".join("-" * (w + 2) for w in widths) + "|", *body]


def _plain(cell: str | Cell) -> str:
    """Text that means itself in Markdown, also within a table."""
    if isinstance(cell, Cell):
        text = f"**{_plain(cell.text)}**" if cell.strong else _plain(cell.text)
        return " · ".join([text, *map(_plain, cell.notes)])
    text = " ".join(cell.split())
    for special in ("\\", "|", "*", "`", "<", "["):
        text = text.replace(special, f"\\{special}")
    return text
