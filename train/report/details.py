"""The later sections of the acceptance report: where the numbers come from."""

from functools import partial

from bitdraft.train.report import plots
from bitdraft.train.report.blocks import Block, Cell, Picture, Row, Table, Text
from bitdraft.train.report.plots import Curve, Dots
from bitdraft.train.report.reading import Reading, acceptance, drafted, interval, number, one_per_cell, recipe, share_of
from bitdraft.train.report.recovery import Document, Measurement

_WHO = "trained → served on"


def bounds(reading: Reading) -> list[Block]:
    """1 − TV and top-1 agreement beside what was accepted at the first position, which they bound."""
    ms = [
        m for name in reading.sets for m in one_per_cell(reading.on(name)) if m.cell["trained_on"] and m.cell["bounds"]
    ]
    rows: list[Row] = []
    for m in ms:
        numbers = m.cell["bounds"]["sets"][m.result["set"]]
        cells = (_with_interval(numbers, key) for key in ("top1_agreement", "one_minus_tv"))
        rows.append((reading.row(m), number(m.result["per_position"][0], ".1%"), *cells))
    if not rows:
        return []
    references = {recipe(m.cell["bounds"]["reference"], m.cell["dtype"]) for m in ms}
    header = (_WHO, "accepted at position 1", "top-1 agreement", "1 − TV")
    text = (
        f"How close the served target stays to the {' or '.join(sorted(references))} one, per position of the served "
        "answers. A head that imitates that target perfectly is accepted at one position as often as the two targets "
        "have the same first choice (temperature 0: top-1 agreement) or as their distributions overlap (temperature 1: "
        "1 − TV, the mean of Σ min(p, q)). It is a ceiling for training on that target, at the first position of a "
        "chain; a head trained on the served target is not bound by it, nor are trees, which try several tokens."
    )
    return [Table(header, tuple(rows)), Text(text)]


def _with_interval(numbers: Document, key: str) -> Cell:
    return Cell(number(numbers[key], ".1%"), (interval(numbers[f"{key}_ci95"], ".1%"),))


def positions(reading: Reading) -> list[Block]:
    blocks: list[Block] = []
    for name in reading.sets:
        drawn = [m for m in one_per_cell(reading.on(name)) if m.result["per_position"]]
        if drawn:
            curves = [
                Curve(
                    reading.series(m),
                    tuple(range(1, len(m.result["per_position"]) + 1)),
                    tuple(m.result["per_position"]),
                )
                for m in drawn
            ]
            told = "; ".join(f"{c.series.label}: {', '.join(f'{y:.2f}' for y in c.y)}" for c in curves)
            blocks.append(
                Picture(
                    f"Accepted by position, {name}", f"One line per cell. {told}", partial(plots.by_position, curves)
                )
            )
    depth = max(len(m.result["per_position"]) for m in reading.found)
    rows: list[Row] = [
        (reading.row(m), *(_position(m, i) for i in range(depth))) for m in reading.found if m.result["per_position"]
    ]
    text = (
        "Share of passes in which a position was accepted, and so all before it; then the share among the passes that "
        "accepted all before it and drafted there."
    )
    header = (_WHO, *(str(i + 1) for i in range(depth)))
    return [*blocks, Table(header, tuple(rows)), Text(text)] if rows else []


def _position(m: Measurement, i: int) -> str | Cell:
    if i >= len(m.result["per_position"]):
        return "–"
    return Cell(f"{m.result['per_position'][i]:.1%}", (f"{m.result['conditional'][i]:.1%}",))


def categories(reading: Reading) -> list[Block]:
    """Per set with more than one category."""
    blocks: list[Block] = []
    for name in reading.sets:
        ms = [m for m in reading.on(name) if m.result["by_category"]]
        found = list(dict.fromkeys(category for m in ms for category in m.result["by_category"]))
        if len(found) < 2:
            continue
        dots = [
            Dots(reading.series(m), tuple(_dot(m.result["by_category"].get(c)) for c in found))
            for m in one_per_cell(ms)
        ]
        told = "; ".join(
            f"{d.series.label}: " + ", ".join(f"{c} {v[0]:.2f}" for c, v in zip(found, d.values, strict=True) if v)
            for d in dots
        )
        blocks.append(
            Picture(
                f"Acceptance length by category, {name}",
                f"One dot per cell. {told}",
                partial(plots.by_category, found, dots),
            )
        )
        rows: list[Row] = [
            (Cell(reading.name(m), (drafted(m),)), *(_category(m.result["by_category"].get(c)) for c in found))
            for m in ms
        ]
        blocks.append(Table((_WHO, *found), tuple(rows), title=f"On {name}"))
    return blocks


def _dot(numbers: Document | None) -> tuple[float, float, float] | None:
    if numbers is None:
        return None
    length = numbers["acceptance_length"]
    low, high = numbers["ci95"] or (length, length)
    return length, low, high


def _category(numbers: Document | None) -> str | Cell:
    if numbers is None:
        return "–"
    per_pass = numbers["drafted"] / max(numbers["passes"], 1)
    notes = (interval(numbers["ci95"]), share_of(numbers["acceptance_rate"], per_pass), f"{numbers['prompts']} prompts")
    return Cell(number(numbers["acceptance_length"]), notes)


def counts(reading: Reading) -> list[Block]:
    header = (_WHO, "length", "rate", "drafted per pass", "prompts", "passes", "drafted", "accepted", "emitted")
    rows: list[Row] = []
    for m in reading.found:
        r = m.result
        length = Cell(number(r["acceptance_length"]), (interval(r["ci95"]),))
        rate = Cell(number(r["acceptance_rate"], ".1%"), (interval(r["rate_ci95"], ".1%"),))
        whole = (f"{r[key]:,}" for key in ("prompts", "passes", "drafted", "accepted", "emitted"))
        rows.append((reading.row(m), length, rate, number(r["drafted_per_pass"], ".2f"), *whole))
    return [Table(header, tuple(rows))]


def speed(reading: Reading) -> list[Block]:
    parts = ("draft", "verify", "other")
    header = (_WHO, "length", *(f"{part}, s" for part in parts), "tokens/s", "plain tokens/s", "speedup")
    rows: list[Row] = []
    for m in reading.found:
        r, seconds = m.result, m.result["seconds"]
        whole = sum(seconds.values()) or 1.0
        split = (Cell(f"{seconds[part]:.1f}", (f"{seconds[part] / whole:.0%}",)) for part in parts)
        pace = (number(r["tokens_per_second"], ".1f"), number(r["plain_tokens_per_second"], ".1f"))
        rows.append((reading.row(m), number(r["acceptance_length"]), *split, *pace, number(r["speedup"], ".2f")))
    text = (
        "Wall time of this simulation, not of an engine with low-bit kernels: the numbers compare heads on one machine."
    )
    return [Table(header, tuple(rows)), Text(text)]


def lossless(reading: Reading) -> list[Block]:
    """A line per verification rule."""
    lines: list[Block] = []
    for rule in dict.fromkeys(m.cell["rule"] for m in reading.found):
        ms = [m for m in reading.found if m.cell["rule"] == rule]
        kept = "keeps the target's answers" if rule == "greedy" else "keeps the target's distribution"
        kept = kept if all(m.cell["lossless"] for m in ms) else "is lossy: it changes what the target would write"
        checked, failed, excused = (
            sum(m.result[f"lossless_{key}"] for m in ms) for key in ("checked", "failed", "excused_near_ties")
        )
        text = (
            f"{checked} greedy answers compared with plain decoding: {failed} failed, {excused} part at a near-tie "
            "(two tokens equal up to rounding)."
            if checked
            else "No answer was compared with plain decoding."
        )
        lines.append(Text(f"{rule.capitalize()} verification {kept}. {text}"))
    return lines


def confidence(reading: Reading) -> list[Block]:
    ms = [m for m in reading.found if m.result["confidence"]]
    if not ms:
        return []
    blocks: list[Block] = []
    for m in ms:
        found = m.result["confidence"]["positions"]
        bins = [[(b["confidence"], b["accepted"], b["count"]) for b in p["bins"]] for p in found]
        errors = ", ".join(f"position {i} {number(p['ece'], '.1%')}" for i, p in enumerate(found, 1))
        title = f"Reliability of {reading.name(m)}, {m.result['set']}, {drafted(m)}"
        alt = f"Accepted share against calibrated confidence. Calibration error: {errors}"
        blocks.append(Picture(title, alt, partial(plots.reliability, bins)))
    header = (_WHO, "position", "temperature", "shift", "ECE before", "ECE", "AUC", "tries")
    rows: list[Row] = []
    for m in ms:
        for i, p in enumerate(m.result["confidence"]["positions"], 1):
            fitted = (number(p["temperature"], ".2f"), number(p["shift"], "+.2f"))
            quality = (number(p["ece_before"], ".1%"), number(p["ece"], ".1%"), number(p["auc"]))
            rows.append((reading.row(m), str(i), *fitted, *quality, f"{p['tries']:,}"))
    text = (
        "The drafter's top-1 probability as a forecast of acceptance. ECE: expected calibration error, before and "
        "after its log odds are divided by the temperature and shifted; AUC: how well it tells accepted from rejected; "
        "a position is tried in passes that accepted all before it and drafted there."
    )
    return [*blocks, Table(header, tuple(rows)), Text(text)]


def frontiers(reading: Reading) -> list[Block]:
    """Acceptance against drafted tokens: what thresholds would give, beside the fixed lengths that were measured."""
    blocks: list[Block] = []
    rows: list[Row] = []
    for name in reading.sets:
        ms = [m for m in reading.on(name) if m.result["confidence"]]
        if ms:
            lengths, rates = (
                [_frontier(reading, m, key) for m in one_per_cell(ms)]
                for key in ("acceptance_length", "acceptance_rate")
            )
            alt = "One line per cell over thresholds. " + "; ".join(
                f"{c.series.label}: length {c.y[0]:.2f} to {c.y[-1]:.2f} at {c.x[0]:.2f} to {c.x[-1]:.2f} drafted"
                for c in lengths
            )
            title = f"Acceptance against drafted tokens per pass, {name}"
            blocks.append(Picture(title, alt, partial(plots.frontier, lengths, rates)))
        for m in ms:
            for f in m.result["confidence"]["frontier"]:
                rate = share_of(f["acceptance_rate"], f["drafted_per_pass"])
                length = Cell(number(f["acceptance_length"]), (rate,))
                rows.append((reading.row(m), f"{f['threshold']:g}", length, number(f["share_kept"], ".1%")))
    if not rows:
        return []
    header = (_WHO, "threshold", "acceptance", "length kept")
    text = (
        "A replay of the passes that drafted to the end, cut where the calibrated chance that all drafts so far are "
        "accepted falls below the threshold. In the picture, lines are thresholds and markers are measured "
        "fixed lengths."
    )
    return [*blocks, Table(header, tuple(rows)), Text(text)]


def _frontier(reading: Reading, m: Measurement, key: str) -> Curve:
    points = sorted((f["drafted_per_pass"], f[key]) for f in m.result["confidence"]["frontier"])
    fixed = [o for o in reading.on(m.result["set"]) if o.cell is m.cell and o.stop is None]
    marks = tuple((o.result["drafted_per_pass"], o.result[key], f"K = {o.result['draft_length']}") for o in fixed)
    x, y = zip(*points, strict=True)
    return Curve(reading.series(m), x, y, marks)


def stopped_early(reading: Reading) -> list[Block]:
    """Measured runs that stop drafting early, never without their fixed-length values."""
    rows: list[Row] = []
    for m in reading.found:
        stop = m.result["stopped_early"]
        if stop:
            fixed = stop["fixed"]
            whole = Cell(
                number(fixed["acceptance_length"]), (share_of(fixed["acceptance_rate"], fixed["drafted_per_pass"]),)
            )
            rows.append((reading.row(m), acceptance(m), whole, number(stop["share_kept"], ".1%")))
    header = (_WHO, "stopped early", "fixed length", "length kept")
    return [Table(header, tuple(rows))] if rows else []
