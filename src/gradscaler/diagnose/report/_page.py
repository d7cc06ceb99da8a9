"""The report as an HTML page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from io import StringIO
from itertools import pairwise
from string import Template

from matplotlib import rc_context
from matplotlib.figure import Figure

from gradscaler.diagnose.report._content import Content, Table
from gradscaler.diagnose.report._figures import (
    LEVELS,
    WIDTH,
    Drawing,
    drawing_settings,
    drawings_of,
)
from gradscaler.diagnose.report._words import shown

_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@drawing_settings()
def page_of(content: Content) -> bytes:
    """An HTML page with the verdict, the figures and the tables, which needs no other file."""
    level, headline = content.headline
    page = _PAGE.substitute(
        **LEVELS,
        level=level,
        headline=escape(headline),
        action=f'<p class="action">{escape(content.action)}</p>\n' * bool(content.action),
        text=escape(shown(content.why, 1000)),
        source="" if content.source is None else content.source.html,
        links=_links(content),
        first="".join(map(_table, content.first)),
        facts="<br>".join(escape(text) for text in (content.facts, content.origin) if text),
        figures="".join(map(_figure, drawings_of(content))),
        tables="".join(map(_table, content.tables)),
        meanings=_meanings(content),
    )
    return page.encode()


def _links(content: Content) -> str:
    """A line of links from the findings to what they mean; empty if that is not known."""
    links = [f'<a href="#{name}">{each.headline}</a>' for name, each in content.meanings.items()]
    return f'<p class="dim">What it means: {", ".join(links)}</p>\n' if links else ""


def _meanings(content: Content) -> str:
    """What the findings mean, each under the name of its kind."""
    texts = [
        f'<dt id="{name}">{each.headline}</dt>\n<dd>{each.meaning}</dd>\n'
        for name, each in content.meanings.items()
    ]
    section = f"<section>\n<h2>What it means</h2>\n<dl>\n{''.join(texts)}</dl>\n</section>\n"
    return section if texts else ""


def _figure(drawing: Drawing) -> str:
    """A figure of the page, as inline SVG."""
    drawn = Figure(figsize=(WIDTH, drawing.height), layout="constrained")
    drawing.draw(drawn)
    file = StringIO()
    with rc_context({"svg.hashsalt": drawing.title}):  # keeps the ids of figures distinct
        drawn.savefig(file, format="svg", metadata=_NO_METADATA)
    found = re.search(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>(.*)</svg>', file.getvalue(), re.DOTALL)
    assert found
    box, shapes = found.groups()
    shapes = re.sub(r'<g id="[^"]*">', "<g>", shapes)  # nothing refers to a group
    shapes += "".join(_readings(drawing, drawn, *map(float, box[:-1].split()[-2:])))
    caption = escape(drawing.caption)
    return _FIGURE.substitute(title=drawing.title, caption=caption, box=box, shapes=shapes)


def _readings(drawing: Drawing, drawn: Figure, width: float, height: float) -> Iterator[str]:
    """Invisible strips over the steps, each with the numbers that a pointer on it shows."""
    steps = list(drawing.readings)
    if not steps:
        return
    to_pixels, whole = drawn.axes[-1].transData.transform, drawn.bbox.width
    middles = [(a + b) / 2 for a, b in pairwise(steps)]
    ends = [steps[0] - 0.5, *middles, steps[-1] + 0.5]
    places = [to_pixels((end, 1))[0] / whole * width for end in ends]
    for text, (left, right) in zip(drawing.readings.values(), pairwise(places), strict=True):
        strip = f'class="at" x="{left:.1f}" y="0" width="{right - left:.1f}" height="{height:.0f}"'
        yield f"<rect {strip}><title>{escape(text)}</title></rect>"


def _table(table: Table) -> str:
    def row(tag: str, cells: tuple[str, ...]) -> str:
        names = [' class="name"' if column == table.names else "" for column in range(len(cells))]
        inner = (f"<{tag}{n}>{escape(c)}</{tag}>" for n, c in zip(names, cells, strict=True))
        return f"<tr>{''.join(inner)}</tr>\n"

    return _TABLE.substitute(
        title=escape(table.title),
        head=row("th", table.headings),
        body="".join(row("td", cells) for cells in table.rows),
    )


_FIGURE = Template("""<section>
<h2>$title</h2>
<figure>
<input type="checkbox" class="zoom" aria-label="Larger" title="Larger">
<div class="scroll" tabindex="0">
<svg role="img" aria-label="$title. $caption" $box>$shapes</svg>
</div>
<figcaption>$caption</figcaption>
</figure>
</section>
""")

_TABLE = Template("""<section>
<h2>$title</h2>
<div class="scroll" tabindex="0">
<table>
<thead>
$head</thead>
<tbody>
$body</tbody>
</table>
</div>
</section>
""")

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>$headline - gradscaler</title>
<style>
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1b1b; --dim: #555; --rule: #ddd; }
.good { --level: $good; }
.warning { --level: $warning; }
.bad { --level: $bad; }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #121212; --ink: #ededed; --dim: #b5b5b5; --rule: #444; }
  .good { --level: #4fd1a5; }
  .warning { --level: #e8b04a; }
  .bad { --level: #ff8f66; }
  svg { filter: invert(.93) hue-rotate(180deg); } /* white becomes the paper, red stays red */
}
body { margin: 0; background: var(--paper); color: var(--ink); }
body { font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 75rem; margin: 0 auto; padding: 1rem; }
header { border-left: .5rem solid var(--level); padding: .1rem 0 .1rem 1rem; }
header { overflow-wrap: anywhere; }
h1 { color: var(--level); font-size: 1.75rem; line-height: 1.2; margin: 0; }
h2 { font-size: 1.15rem; margin: 0 0 .5rem; }
header p { margin: .5rem 0 0; }
section { break-inside: avoid; min-width: 0; padding-top: 1.5rem; }
figure { margin: 0; }
svg { display: block; width: 100%; height: auto; }
.zoom { appearance: none; position: relative; float: right; z-index: 1; cursor: zoom-in; }
.zoom { margin: 0; font: inherit; font-size: .85rem; text-decoration: underline; }
.zoom::before { content: "Larger"; }
.zoom:checked::before { content: "Smaller"; }
.zoom:checked + .scroll svg { width: 300%; } /* the page needs no script */
a { color: inherit; }
dl { margin: 0; }
dt { font-weight: 600; scroll-margin-top: 1rem; }
dt:target { color: var(--level); }
dd { margin: 0 0 .8rem; }
.at { fill: transparent; }
.at:hover { fill: #80808030; }
svg text { font-family: system-ui, sans-serif !important; }
.action { font-weight: 600; user-select: all; } /* one click selects it */
header pre { font-size: .9rem; margin: .3rem 0 .5rem; }
/* What scrolls has a shadow at its right, until it is scrolled to its end. */
header pre, .scroll {
  overflow-x: auto;
  background:
    linear-gradient(to left, var(--paper) 30%, transparent) right / 3rem 100% no-repeat local,
    linear-gradient(to left, var(--dim), transparent) right / .7rem 100% no-repeat scroll;
}
mark { background: none; color: var(--level); font-weight: 700; }
.dim, figcaption { color: var(--dim); font-size: .85rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--rule); padding: .3rem .7rem .3rem 0; text-align: right; }
.name { text-align: left; overflow-wrap: anywhere; min-width: 8rem; }
@media (min-width: 50rem) {
  .figures { columns: 2; column-gap: 2.5rem; }
  .figures section:only-child { column-span: all; max-width: 50rem; }
}
@media print { .zoom { display: none; } }
@media print { main { max-width: none; padding: 0; } }
</style>
</head>
<body>
<main>
<header class="$level">
<h1>$headline</h1>
$action<p>$text</p>
$source$links</header>
$first
<p class="dim">$facts</p>
<div class="figures">
$figures$tables</div>
$meanings</main>
</body>
</html>
""")
