"""A report as one HTML file: no script, no font and no picture from anywhere else.

It follows the reader's light or dark ground, pictures too, and fits a phone: text wraps, a wide table scrolls within
its own box while its first column stays.
"""

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from itertools import groupby

from bitdraft.train.report.blocks import Alert, Block, Cell, Key, Picture, Report, Section, Table, Text
from bitdraft.train.report.plots import DARK, LIGHT

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1c1e21; --muted: #5b626b; --line: #d9dce1; --tint: #eaf2f9;
  --accent: #0072b2; --alert: #b3261e; --alert-tint: #fdecea }
@media (prefers-color-scheme: dark) { :root { --ground: #15171a; --ink: #e6e8eb; --muted: #a0a7b0; --line: #33383f;
  --tint: #1b2a36; --accent: #56b4e9; --alert: #ff8a80; --alert-tint: #33191a } }
* { box-sizing: border-box }
html { -webkit-text-size-adjust: 100% }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 72rem; background: var(--ground); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.5rem; line-height: 1.2; margin: 0 0 .4rem }
h2 { font-size: 1.15rem; line-height: 1.3; margin: 2.75rem 0 .75rem; padding-top: .75rem;
  border-top: 1px solid var(--line) }
h3 { font-size: .95rem; margin: 1.5rem 0 -.4rem }
p { margin: .75rem 0; max-width: 44rem }
a { color: var(--accent) }
.settings, .note, footer { color: var(--muted); font-size: .875rem }
.settings { max-width: none; margin-top: 0 }
.alert { padding: .6rem .9rem; border-left: 4px solid var(--alert); background: var(--alert-tint); max-width: none }
.alert b { color: var(--alert) }
.keys { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)) }
.key { padding: .9rem 1.1rem; border-radius: .5rem; background: var(--tint) }
.key p { margin: .3rem 0 0; font-size: .9rem }
.key .number { margin: 0; font-size: 2.1rem; font-weight: 650; line-height: 1.15; letter-spacing: -.01em;
  font-variant-numeric: tabular-nums }
.key .what { font-weight: 600 }
.scroll { overflow-x: auto; margin: 1rem 0; border: 1px solid var(--line); border-radius: .5rem;
  overflow-wrap: normal }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: .875rem; line-height: 1.35;
  font-variant-numeric: tabular-nums }
th, td { padding: .45rem .75rem; text-align: right; vertical-align: top; white-space: nowrap;
  border-top: 1px solid var(--line) }
thead th { border-top: 0; vertical-align: bottom; font-weight: 600; color: var(--muted); white-space: normal;
  min-width: 4.5rem }
th[scope=row] { font-weight: 600; white-space: normal }
th:first-child { position: sticky; left: 0; min-width: 8.5rem; text-align: left; background: var(--ground);
  border-right: 1px solid var(--line) }
td.strong { background: var(--tint); font-weight: 700 }
small { display: block; font-size: .8125rem; font-weight: 400; color: var(--muted) }
th small { display: inline-block; margin-right: .9em }
.pictures { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)) }
figure { margin: 1rem 0 0; max-width: 40rem }
figure img { display: block; width: 100%; height: auto }
figcaption { font-size: .875rem; font-weight: 600; margin-bottom: .4rem }
nav { margin-top: 1.5rem; font-size: .875rem }
nav a { margin-right: 1rem; white-space: nowrap }
footer { margin-top: 3rem; padding-top: .75rem; border-top: 1px solid var(--line) }
@media (max-width: 40rem) { th, td { padding: .4rem .55rem } }
@media print { .scroll { overflow: visible } }
"""


def page(report: Report) -> str:
    """The whole file."""
    first, *rest = report.sections
    links = "\n".join(f'<a href="#s{i}">{escape(s.title)}</a>' for i, s in enumerate(rest, 1))
    body = "\n".join(_section(i, s) for i, s in enumerate(rest, 1))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(report.title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<header>
<h1>{escape(report.title)}</h1>
<p class="settings">{escape(report.settings)}</p>
</header>
<main>
{_blocks(first.blocks)}
<nav aria-label="Sections">
{links}
</nav>
{body}
</main>
<footer>{escape(report.made_by)}</footer>
</body>
</html>
"""


def _section(i: int, section: Section) -> str:
    return f'<section id="s{i}">\n<h2>{escape(section.title)}</h2>\n{_blocks(section.blocks)}\n</section>'


def _blocks(blocks: Sequence[Block]) -> str:
    """Neighbours of a kind that stand side by side where there is room share a grid."""
    grids = {Key: "keys", Picture: "pictures"}
    parts = []
    for kind, group in groupby(blocks, type):
        inner = "\n".join(map(_block, group))
        parts.append(f'<div class="{grids[kind]}">\n{inner}\n</div>' if kind in grids else inner)
    return "\n".join(parts)


def _block(block: Block) -> str:
    match block:
        case Text(text):
            return f'<p class="note">{escape(text)}</p>'
        case Alert(text):
            return f'<p class="alert"><b>Warning:</b> {escape(text)}</p>'
        case Key(number, what, text):
            return (
                f'<div class="key"><p class="number">{escape(number)}</p><p class="what">{escape(what)}</p>'
                f"<p>{escape(text)}</p></div>"
            )
        case Picture():
            return _picture(block)
        case Table():
            return _table(block)


def _picture(picture: Picture) -> str:
    light, dark = (b64encode(picture.draw(theme)).decode("ascii") for theme in (LIGHT, DARK))
    data = "data:image/svg+xml;base64,"
    return (
        f"<figure><figcaption>{escape(picture.title)}</figcaption>"
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{data}{dark}">'
        f'<img src="{data}{light}" alt="{escape(picture.alt)}"></picture></figure>'
    )


def _table(table: Table) -> str:
    title = f"<h3>{escape(table.title)}</h3>\n" if table.title else ""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in table.header)
    body = "\n".join(
        f"<tr>{_cell(first, 'th')}{''.join(_cell(cell, 'td') for cell in numbers)}</tr>"
        for first, *numbers in table.rows
    )
    label = table.title or ", ".join(table.header)
    # Keyboards reach what scrolls only if it takes the focus.
    return (
        f'{title}<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">\n'
        f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def _cell(cell: str | Cell, tag: str) -> str:
    scope = ' scope="row"' if tag == "th" else ""
    if isinstance(cell, str):
        return f"<{tag}{scope}>{escape(cell)}</{tag}>"
    strong = ' class="strong"' if cell.strong else ""
    notes = "".join(f"<small>{escape(note)}</small>" for note in cell.notes)
    return f"<{tag}{scope}{strong}><div>{escape(cell.text)}</div>{notes}</{tag}>"
