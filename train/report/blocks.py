"""What a report is made of, free of any markup: Markdown and HTML are two ways to write the same blocks."""

from collections.abc import Callable
from dataclasses import dataclass

from bitdraft.train.report.plots import Theme


@dataclass(frozen=True)
class Cell:
    """A number and what must stand with it."""

    text: str
    notes: tuple[str, ...] = ()
    strong: bool = False


Row = tuple[str | Cell, ...]


@dataclass(frozen=True)
class Table:
    """The first column names the row, the others hold numbers."""

    header: tuple[str, ...]
    rows: tuple[Row, ...]
    title: str = ""


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Alert:
    """What a reader must not miss."""

    text: str


@dataclass(frozen=True)
class Key:
    """A number in large letters, what it is, and the sentence that explains it."""

    number: str
    what: str
    text: str


@dataclass(frozen=True)
class Picture:
    """Drawn once for each theme."""

    title: str
    alt: str
    """What it shows, with the numbers."""
    draw: Callable[[Theme], bytes]


Block = Table | Text | Alert | Key | Picture


@dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Report:
    title: str
    settings: str
    """One line: every setting that decides the numbers."""
    sections: tuple[Section, ...]
    """The first one is the headline."""
    made_by: str
    """One line: command, seed, date, machine, versions."""
