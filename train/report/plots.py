"""The pictures of the acceptance report, as SVG in a light and a dark style.

The same numbers give the same bytes: no date, fixed ids, text as outlines. Lines are labelled at their ends; colours
are those of Okabe and Ito (lightened for dark ground), which stay apart for colour-blind readers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from matplotlib.transforms import offset_copy

_WIDTH = 4.8  # inches: on a phone's 360 px letters of 9 points are still legible
_LABEL_HEIGHT = 0.145  # inches
_MARKERS = "osD^v<>"
_DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))


@dataclass(frozen=True)
class Theme:
    """Colours on one ground."""

    ink: str
    faint: str
    colours: tuple[str, ...]
    ramp: tuple[str, str]
    """First and last position's colour; those between are mixed."""

    def settings(self) -> Any:
        """matplotlib's rcParams."""
        return {
            "svg.hashsalt": "bitdraft",
            "svg.fonttype": "path",
            "text.parse_math": False,  # a dollar sign in a name is a dollar sign
            "font.size": 9,
            "text.color": self.ink,
            "axes.edgecolor": self.faint,
            "axes.labelcolor": self.ink,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "grid.color": self.faint,
            "grid.alpha": 0.4,
            "grid.linewidth": 0.6,
            "xtick.color": self.faint,
            "xtick.labelcolor": self.ink,
            "ytick.color": self.faint,
            "ytick.labelcolor": self.ink,
        }


LIGHT = Theme(
    ink="#1c1e21",
    faint="#8a9099",
    colours=("#0072B2", "#C14E00", "#00805C", "#A9437C", "#96690A", "#2B86B8", "#000000"),
    ramp=("#0072B2", "#C14E00"),
)
DARK = Theme(
    ink="#e6e8eb",
    faint="#7c838d",
    colours=("#56B4E9", "#FF8A3D", "#2CC295", "#E08FBE", "#F0C23B", "#8FD0F5", "#FFFFFF"),
    ramp=("#56B4E9", "#FF8A3D"),
)


@dataclass(frozen=True)
class Series:
    """A label with its look: the colour and marker say which head, the dashes which served target."""

    label: str
    head: int
    served: int

    def colour(self, theme: Theme) -> str:
        return theme.colours[self.head % len(theme.colours)]

    def look(self, theme: Theme) -> dict[str, Any]:
        dashes, marker = _DASHES[self.served % len(_DASHES)], _MARKERS[self.head % len(_MARKERS)]
        return {"color": self.colour(theme), "linestyle": dashes, "marker": marker, "markersize": 4.5, "linewidth": 1.6}


@dataclass(frozen=True)
class Curve:
    """Points in order of ``x``; ``marks`` are single points ``(x, y, text)`` of the same series."""

    series: Series
    x: tuple[float, ...]
    y: tuple[float, ...]
    marks: tuple[tuple[float, float, str], ...] = ()


@dataclass(frozen=True)
class Dots:
    """One value with its interval per category; None where the category was not measured."""

    series: Series
    values: tuple[tuple[float, float, float] | None, ...]


def by_position(curves: Sequence[Curve], theme: Theme) -> bytes:
    """Share of passes in which a position was accepted, one line per cell."""
    with rc_context(theme.settings()):
        figure, axes = _figure(3.1)
        for c in curves:
            axes.plot(c.x, c.y, clip_on=False, **c.series.look(theme))
        axes.set_ylim(0, 1.02 * max(max(c.y) for c in curves) or 1.0)
        axes.set_xlim(right=max(max(c.x) for c in curves))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlabel("position of the draft")
        axes.set_ylabel("accepted, share of passes")
        _label_right(axes, [End(c.x[-1], c.y[-1], c.series.label, c.series.colour(theme)) for c in curves])
        return _svg(figure)


def by_category(names: Sequence[str], dots: Sequence[Dots], theme: Theme) -> bytes:
    """Acceptance length per category with its interval; the cells stand in the same order in every category."""
    with rc_context(theme.settings()):
        group = len(dots) + 1.0
        figure, axes = _figure(0.6 + _LABEL_HEIGHT * group * len(names))
        for i, d in enumerate(dots):
            rows = [(group * row + i, value) for row, value in enumerate(d.values) if value is not None]
            for y, (_, low, high) in rows:
                axes.plot((low, high), (y, y), color=d.series.colour(theme), linewidth=1.4)
            look = d.series.look(theme) | {"linestyle": "none"}
            if d.series.served:
                look["fillstyle"] = "none"
            axes.plot([value[0] for _, value in rows], [y for y, _ in rows], **look)
        axes.set_yticks(
            [group * row + (len(dots) - 1) / 2 for row in range(len(names))], [_shortened(n, 20) for n in names]
        )
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        for row in range(1, len(names)):
            axes.axhline(group * row - 1, color=theme.faint, linewidth=0.6, alpha=0.5)
        axes.set_ylim(group * len(names) - 1, -1)
        axes.set_xlabel("tokens per target pass, 95 % intervals")
        ends = []
        for i, d in enumerate(dots):
            row, (_, _, high) = next((row, value) for row, value in enumerate(d.values) if value is not None)
            ends.append(End(high, group * row + i, d.series.label, d.series.colour(theme)))
        _label_right(axes, ends)
        return _svg(figure)


def reliability(positions: Sequence[Sequence[tuple[float, float, int]]], theme: Theme) -> bytes:
    """Accepted share against stated confidence, ``(confidence, accepted, count)`` per bin, one line per position."""
    with rc_context(theme.settings()):
        figure, axes = _figure(3.6)
        axes.plot((0, 1), (0, 1), color=theme.faint, linewidth=1, linestyle=(0, (4, 3)))
        largest = max(count for bins in positions for _, _, count in bins)
        labels = []
        for i, bins in enumerate(positions):
            if not bins:  # no pass got there
                continue
            colour = _mixed(*theme.ramp, i / max(len(positions) - 1, 1))
            x, y, counts = zip(*bins, strict=True)
            axes.plot(x, y, color=colour, linewidth=1.4)
            axes.scatter(x, y, s=[6 + 44 * count / largest for count in counts], color=colour, linewidth=0)
            labels.append(End(x[-1], y[-1], f"position {i + 1}", colour))
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlabel("calibrated confidence")
        axes.set_ylabel("accepted, share of tries")
        _label_right(axes, labels)
        return _svg(figure)


def frontier(lengths: Sequence[Curve], rates: Sequence[Curve], theme: Theme) -> bytes:
    """Acceptance length and rate against drafted tokens: lines are thresholds, single points fixed lengths."""
    with rc_context(theme.settings()):
        figure = Figure(figsize=(_WIDTH, 5.0), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        for axes, curves in ((above, lengths), (below, rates)):
            for c in curves:
                look = c.series.look(theme)
                axes.plot(c.x, c.y, **(look | {"marker": "."}))
                axes.plot(*zip(*((x, y) for x, y, _ in c.marks), strict=True), **(look | {"linestyle": "none"}))
            highest: dict[tuple[float, str], float] = {}
            for x, y, text in (mark for c in curves for mark in c.marks):
                highest[x, text] = max(y, highest.get((x, text), y))
            for (x, text), y in highest.items():
                axes.annotate(text, (x, y), (0, 6), textcoords="offset points", ha="center")
            axes.margins(x=0.12, y=0.2)
            _label_right(axes, [End(c.x[-1], c.y[-1], c.series.label, c.series.colour(theme)) for c in curves])
        above.set_ylabel("tokens per target pass")
        below.set_ylabel("accepted / drafted")
        below.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        below.set_xlabel("drafted tokens per pass")
        return _svg(figure)


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


@dataclass(frozen=True)
class End:
    """Where a line ends, and the label that belongs there."""

    x: float
    y: float
    label: str
    colour: str


def _label_right(axes: Axes, ends: Sequence[End]) -> None:
    """Labels beside the axes, each led to by a thin line.

    They are ticks of an axis of their own, because the layout leaves room for ticks.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    height = (figure.get_size_inches()[1] - 0.6) / len(figure.axes)  # inches, about, less the labels of the x axis
    low, high = sorted(axes.get_ylim())
    ends = sorted(ends, key=lambda end: end.y)
    at = spread([end.y for end in ends], _LABEL_HEIGHT / height * (high - low), low, high)
    side = axes.secondary_yaxis("right")
    side.set_yticks(at, [_shortened(end.label, 36) for end in ends])
    side.tick_params(length=0, pad=13, labelsize=8.5)
    side.spines["right"].set_visible(False)
    for tick, y, end in zip(side.get_yticklabels(), at, ends, strict=True):
        tick.set_color(end.colour)
        axes.annotate(
            "",
            (end.x, end.y),
            xytext=(1.0, y),
            textcoords=offset_copy(axes.get_yaxis_transform(), figure, x=12, units="points"),
            arrowprops={"arrowstyle": "-", "color": end.colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3},
            annotation_clip=False,
        ).set_in_layout(False)


def _shortened(text: str, most: int) -> str:
    """At most so many letters: names differ at their ends rather than in the middle."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most - most // 2 - 1) :]}"


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the ascending ``wanted``, at least ``gap`` apart, inside ``low … high`` if they fit there."""
    placed: list[float] = []
    for y in wanted:
        placed.append(max(y, placed[-1] + gap) if placed else max(y, low))
    ceiling = high
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - gap
    return placed


def _mixed(first: str, last: str, share: float) -> str:
    a, b = (np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) for colour in (first, last))
    return "#" + "".join(f"{round(c):02x}" for c in a + share * (b - a))


def _svg(figure: Figure) -> bytes:
    file = BytesIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return file.getvalue()
