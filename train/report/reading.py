"""A matrix of measured acceptance, read for a person: what its cells are called and how its numbers are written."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import PurePath
from typing import Any

from bitdraft.train.report.blocks import Cell
from bitdraft.train.report.plots import Series
from bitdraft.train.report.recovery import REFERENCE, SETTINGS, Measurement


@dataclass(frozen=True)
class Reading:
    """The measurements of a matrix, their names and what differs between them."""

    found: tuple[Measurement, ...]

    @property
    def varying(self) -> list[str]:
        """Settings in a cell's name: those that tell cells of a kind apart and do not follow from others."""
        chosen: list[str] = []
        cells = [m.cell for m in self.found]
        for field in SETTINGS:
            known = {tuple(c[name] for name in ("kind", *chosen)) for c in cells}
            if len({tuple(c[name] for name in ("kind", *chosen, field)) for c in cells}) > len(known):
                chosen.append(field)
        return chosen

    @property
    def sets(self) -> list[str]:
        return _distinct(m.result["set"] for m in self.found)

    @property
    def served(self) -> list[str]:
        """Recipes served, the reference first."""
        return sorted(_distinct(m.cell["served_on"] for m in self.found), key=lambda name: name != REFERENCE)

    def on(self, name: str) -> list[Measurement]:
        return [m for m in self.found if m.result["set"] == name]

    def head_name(self, m: Measurement) -> str:
        """Kind, and what else tells the head's row from others, except what it was trained on."""
        twins = {o.cell["head"] for o in self.found if _without_path(o) == _without_path(m)}
        path = [str(m.cell["head"])] if len(twins) > 1 else []
        return ", ".join([m.cell["kind"], *(setting(field, m.cell[field]) for field in self.varying), *path])

    def name(self, m: Measurement) -> str:
        """``eagle3 mxfp4 → mxfp4``: trained on, served on."""
        kind, *rest = self.head_name(m).split(", ")
        origin = f" {trained_on(m)}" if m.cell["trained_on"] else ""
        return ", ".join([f"{kind}{origin} → {served_on(m)}", *rest])

    def row(self, m: Measurement) -> Cell:
        """The name of a table's row."""
        return Cell(self.name(m), (m.result["set"], drafted(m)))

    def series(self, m: Measurement) -> Series:
        """Its look in every picture; low bit is drawn solid, the reference broken."""
        heads = _distinct(o.head for o in self.found)
        return Series(self.name(m), heads.index(m.head), self.served[::-1].index(m.cell["served_on"]))

    @property
    def settings(self) -> str:
        values = {field: _distinct(_short(m.cell[field]) for m in self.found) for field in SETTINGS}
        values["target"] = [_target(name) for name in values["target"]]
        chosen = [setting(field, " / ".join(texts)) for field, texts in values.items() if any(texts)]
        lengths = ", ".join(_distinct(str(m.result["draft_length"]) for m in self.found))
        prompts = {m.result["set"]: m.result["prompts"] for m in self.found}
        sets = ", ".join(f"{name} ({count} prompts)" for name, count in prompts.items())
        return " · ".join([*chosen, f"draft length {lengths}", sets])


def _distinct(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))


def _without_path(m: Measurement) -> Sequence[Any]:
    kind, trained, _, *settings = m.head
    return kind, trained, *settings


def one_per_cell(found: Sequence[Measurement]) -> list[Measurement]:
    """Of each cell its longest fixed draft length, or its longest where all stop early: what a picture has room for."""
    last = {id(m.cell): m for m in sorted(found, key=lambda m: (m.stop is None, m.result["draft_length"]))}
    return [m for m in found if last[id(m.cell)] is m]


def recipe(name: str, dtype: str) -> str:
    short = dtype.replace("bfloat", "bf").replace("float", "fp")
    return re.sub(rf"^{REFERENCE}\b", short, name)


def trained_on(m: Measurement) -> str:
    return recipe(m.cell["trained_on"], m.cell["dtype"]) if m.cell["trained_on"] else ""


def served_on(m: Measurement) -> str:
    return recipe(m.cell["served_on"], m.cell["dtype"])


def drafted(m: Measurement) -> str:
    """The draft length, and where drafting stops early."""
    length = m.result["draft_length"]
    if m.stop is None:
        return f"draft length {length}"
    policy, threshold = m.stop
    where = f"below {threshold:g}" if policy == "threshold" else "where drafts do not pay"
    return f"stopped {where}, at most {length}"


_NAMES = {
    "target": "target {}",
    "dtype": "{}",
    "drafts": "{} drafts",
    "rule": "{} verification",
    "tree": "tree {}",
    "tree_settings": "{}",
    "batch_size": "batch of {}",
    "max_new_tokens": "at most {} new tokens",
    "seed": "seed {}",
}


def setting(field: str, value: object) -> str:
    return _NAMES.get(field, field.replace("_", "-") + " {}").format(_short(value))


def _target(value: str) -> str:
    """A folder's name without the way to it; a hub's id as it is."""
    return PurePath(value).name if PurePath(value).is_absolute() else value


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def number(value: float | None, form: str = ".3f") -> str:
    return "–" if value is None or isnan(value) else format(value, form)


def interval(ends: Sequence[float] | None, form: str = ".3f") -> str:
    """The two ends; of too few prompts there are none."""
    if ends is None:
        return "–"
    low, high = ends
    return f"{low:{form}} … {high:{form}}"


def share_of(rate: float, per_pass: float) -> str:
    """A rate with what it is a rate of."""
    return f"{rate:.1%} of {per_pass:.2f}" if per_pass else "nothing drafted"


def acceptance(m: Measurement) -> Cell:
    """The length with its interval, the rate and the drafted tokens per pass: none means much alone."""
    r = m.result
    notes = (interval(r["ci95"]), share_of(r["acceptance_rate"], r["drafted_per_pass"]))
    return Cell(number(r["acceptance_length"]), notes, m.matched)
