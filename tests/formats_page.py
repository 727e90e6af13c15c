"""``docs/formats.md`` as its tests read it: sections by their headings, tables by theirs."""

import re
from itertools import dropwhile, takewhile
from pathlib import Path

Row = dict[str, str]
PAGE = (Path(__file__).parents[1] / "docs" / "formats.md").read_text(encoding="utf-8")


def section(*titles: str) -> str:
    """The text below a heading, and below one within it."""
    text = PAGE
    for level, title in enumerate(titles, 2):
        mark = "#" * level
        start = re.search(rf"^{mark} {re.escape(title)}$", text, re.MULTILINE)
        assert start is not None, title
        text = text[start.end() :]
        end = re.search(rf"^#{{2,{level}}} ", text, re.MULTILINE)
        text = text[: end.start()] if end else text
    return text


def rows(text: str) -> list[Row]:
    """The rows of the first table in ``text``, by its headings, without the quotes of names."""
    from_table = dropwhile(lambda line: not line.startswith("|"), text.splitlines())
    lines = list(takewhile(lambda line: line.startswith("|"), from_table))
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    heads = [head.strip() for head in cells[0]]
    return [dict(zip(heads, row, strict=True)) for row in cells[2:]]
