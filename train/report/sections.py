"""The first sections of the acceptance report: was the gap recovered, and from what to what."""

from collections.abc import Callable, Sequence

from bitdraft.train.report.blocks import Alert, Block, Cell, Key, Table, Text
from bitdraft.train.report.reading import Reading, acceptance, drafted, served_on, share_of, trained_on
from bitdraft.train.report.recovery import Comparison, Estimate, Measurement, Recovery

Write = Callable[[float], str]
"""How a measure is written."""

_WORDS = (
    "Acceptance length: tokens per target pass, the bonus token included (1 is plain decoding), with its 95 % interval "
    "(bootstrap over prompts); then accepted / drafted, of so many tokens drafted per pass."
)
_MATCHED = " Bold: trained on what is served."
_RECOVERY = (
    "With α the acceptance, the first letter what the head was trained on and the second what it was served on (B the "
    "unquantized target, Q the low-bit one): gain = α_QQ − α_BQ, gap = α_BB − α_BQ, recovery R = gain / gap. R = 1: "
    "low bit costs nothing any more. At a fixed draft length R is the same by length and by rate. The intervals (95 %) "
    "are over prompts, the same in all cells; they do not cover another training."
)


def alerts(reading: Reading) -> list[Alert]:
    """Failed comparisons with plain decoding, then the warnings of the measurement, each once."""
    failed = [
        f"{m.result['lossless_failed']} of {m.result['lossless_checked']} answers of {reading.name(m)} on "
        f"{m.result['set']}, {drafted(m)}, differ from plain decoding by more than rounding."
        for m in reading.found
        if m.result["lossless_failed"]
    ]
    warnings = [warning for m in reading.found for warning in m.cell["warnings"]]
    return [Alert(text) for text in dict.fromkeys([*failed, *warnings])]


def keys(reading: Reading, compared: Sequence[Comparison]) -> list[Block]:
    """Per head and low-bit target the recovery on the first set and draft length; of a single result its acceptance."""
    first = [c for c in compared if c.trained.matched and _is_first(reading, c)]
    if first:
        return [_recovery_key(reading, c) for c in first]
    if len(reading.found) == 1:
        m = reading.found[0]
        cell = acceptance(m)
        text = f"{reading.name(m)}, {m.result['set']}, {drafted(m)}: {cell.notes[1]} drafted tokens per pass accepted."
        return [Key(cell.text, f"tokens per target pass ({cell.notes[0]})", text)]
    return []


def _is_first(reading: Reading, c: Comparison) -> bool:
    """Whether it is the first comparison of its head and target: another set or draft length comes later."""
    m = c.trained
    first = next(o for o in reading.found if o.head == m.head and o.cell["served_on"] == m.cell["served_on"])
    return first is m


def _recovery_key(reading: Reading, c: Comparison) -> Key:
    qq, bq = c.trained, c.reference
    text = (
        f"{reading.head_name(qq)} served on {served_on(qq)}, {qq.result['set']}, {drafted(qq)}: "
        f"{_together(qq)} trained on {trained_on(qq)}, {_together(bq)} trained on {trained_on(bq)}; "
        f"difference {_estimate(c.length.gain, _tokens)}."
    )
    ratio = c.length.ratio
    if ratio:
        return Key(f"R = {_plain(ratio.point)}", f"gap recovery by length (95 %: {_ends(ratio, _plain)})", text)
    return Key(_tokens(c.length.gain.point), f"tokens per pass; {_no_ratio(c.length, _tokens)}", text)


def _together(m: Measurement) -> str:
    r = m.result
    rate = share_of(r["acceptance_rate"], r["drafted_per_pass"])
    return f"{r['acceptance_length']:.3f} tokens per pass ({rate} drafted)"


def matrices(reading: Reading) -> list[Block]:
    """{trained on} × {served on} per set: a row per head and draft length."""
    served = {m.cell["served_on"]: served_on(m) for m in reading.found}
    header = ("head", *(f"served on {served[name]}" for name in reading.served))
    blocks: list[Block] = []
    for name in reading.sets:
        rows: dict[Cell, dict[str, Cell]] = {}
        for m in reading.on(name):
            origin = [f"trained on {trained_on(m)}"] if m.cell["trained_on"] else []
            head = Cell(reading.head_name(m), (*origin, drafted(m)))
            rows.setdefault(head, {})[m.cell["served_on"]] = acceptance(m)
        body = ((head, *(cells.get(s, "–") for s in reading.served)) for head, cells in rows.items())
        blocks.append(Table(header, tuple(body), title=f"On {name}"))
    matched = any(m.matched for m in reading.found)
    return [*blocks, Text(_WORDS + _MATCHED * matched)]


def recovered(reading: Reading, compared: Sequence[Comparison]) -> list[Block]:
    """Gains, gaps and R, by length and by rate."""
    if not compared:
        return []
    header = ["trained → served on", "R by length", "gain, tokens per pass", "gap, tokens per pass"]
    header += ["R by rate", "gain, rate", "gap, rate"]
    rows = [
        (
            reading.row(c.trained),
            *_recovery_cells(c.length, _tokens, strong=c.trained.matched),
            *_recovery_cells(c.rate, _points, strong=c.trained.matched),
        )
        for c in compared
    ]
    return [Table(tuple(header), tuple(rows)), Text(_RECOVERY)]


def _recovery_cells(r: Recovery, write: Write, *, strong: bool) -> tuple[str | Cell, ...]:
    if r.gap is None:
        return "–", _cell(r.gain, write), "not measured"
    ratio = _cell(r.ratio, _plain, strong=strong) if r.ratio else "no gap to recover"
    return ratio, _cell(r.gain, write), _cell(r.gap, write)


def _tokens(length: float) -> str:
    return f"{length:+.3f}"


def _points(rate: float) -> str:
    """Percentage points."""
    return f"{100 * rate:+.1f} pt"


def _plain(ratio: float) -> str:
    return f"{ratio:.2f}"


def _ends(e: Estimate, write: Write) -> str:
    return f"{write(e.low)} … {write(e.high)}"


def _estimate(e: Estimate, write: Write) -> str:
    return f"{write(e.point)} ({_ends(e, write)})"


def _cell(e: Estimate, write: Write, *, strong: bool = False) -> Cell:
    return Cell(write(e.point), (_ends(e, write),), strong)


def _no_ratio(r: Recovery, write: Write) -> str:
    if r.gap is None:
        return "gap not measured"
    return f"no gap to recover ({_estimate(r.gap, write)})"
