"""One picture of a matching: shares by group, and how the weights are spread."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bitdraft.data.traffic.groups import Group

# Okabe and Ito's colours, which stay apart for colour-blind readers.
_TRAFFIC, _BEFORE, _AFTER = "#000000", "#E69F00", "#0072B2"
_MOST = 24  # groups that fit on a page
_TICKS = [10.0**e * m for e in range(-6, 6) for m in (1, 2, 5)]


def draw(groups: Sequence[Group], weights: np.ndarray, ess_fraction: float, path: Path) -> None:
    """A PNG. ``weights [n]``: of the records that are kept, mean 1."""
    shown = sorted(groups, key=lambda g: (-max(g.traffic_share, g.share_before), g.number))[:_MOST]
    shown.sort(key=lambda g: (-g.traffic_share, g.number))
    figure = Figure(figsize=(13, 2.4 + 0.32 * max(len(shown), 8)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_groups(left, shown, len(groups) - len(shown))
    _draw_weights(right, weights, ess_fraction)
    figure.savefig(path, format="png", dpi=120)


def _draw_groups(axes: Axes, groups: Sequence[Group], hidden: int) -> None:
    rows = np.arange(len(groups))
    before, after = ([100 * getattr(g, name) for g in groups] for name in ("share_before", "share_after"))
    axes.barh(rows - 0.2, before, 0.38, color=_BEFORE, label="pool before")
    axes.barh(rows + 0.2, after, 0.38, color=_AFTER, label="pool weighted")
    axes.plot([100 * g.traffic_share for g in groups], rows, "D", color=_TRAFFIC, markersize=5, label="traffic")
    axes.set_yticks(rows, [_label(g) for g in groups], fontsize=8)
    axes.margins(y=0.02)
    axes.invert_yaxis()
    axes.set_xlabel("share of the records, %" + (f" ({hidden} smaller groups not shown)" if hidden else ""))
    axes.set_title("Groups of records", fontsize=11)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")


def _label(group: Group) -> str:
    """matplotlib's own font has no Chinese or other letters far from Latin: such words give way to a number."""
    shows = all(ord(c) < 0x250 for c in group.name)
    name = group.name if shows else f"{group.kind or 'group'} (group {group.number})"
    bare = "" if group.pool_records else " – no pool record"
    return name.replace("$", r"\$") + bare


def _draw_weights(axes: Axes, weights: np.ndarray, ess_fraction: float) -> None:
    low, high = float(weights.min()), float(weights.max())
    if high / low > 1.001:
        edges = np.geomspace(low, high, 41)
        axes.set_xscale("log")
        ticks = [t for t in _TICKS if low / 1.2 <= t <= high * 1.2]
        axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axes.minorticks_off()
    else:  # all alike
        edges = np.linspace(0.5, 1.5, 41)
    share = 100 / len(weights)
    bins = edges.tolist()
    axes.hist(weights, bins, weights=np.full(len(weights), share), color=_BEFORE, alpha=0.7, label="records")
    axes.hist(weights, bins, weights=weights * share, histtype="step", color=_AFTER, linewidth=1.8, label="draws")
    axes.axvline(1.0, color=_TRAFFIC, linewidth=1, linestyle=":")
    axes.set_xlabel("weight (1: drawn once an epoch)")
    axes.set_ylabel("share of the records and of the draws, %")
    axes.set_title(f"Weights: effective sample size {ess_fraction:.1%}", fontsize=11)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)
