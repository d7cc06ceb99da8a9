"""A run in one picture: the verdict, the figures and the tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from textwrap import fill

from matplotlib.figure import Figure, FigureBase

from gradscaler.diagnose._findings.kinds import Kind
from gradscaler.diagnose.report._alt_text import png_of
from gradscaler.diagnose.report._content import Content
from gradscaler.diagnose.report._style import LEVELS, WIDTH, Drawing
from gradscaler.diagnose.report._summary import Table
from gradscaler.diagnose.report._texts import shown


def picture_of(content: Content) -> bytes:
    """The picture as a PNG."""
    return png_of(draw(content), dpi=150)


def draw(content: Content) -> Figure:
    """One figure of everything: the verdict, the drawings and the tables."""
    text = fill(shown(content.text, 1000), 120)
    facts = _facts(content)
    columns = _columns(content.drawings)
    rows: list[tuple[float, Callable[[FigureBase], None]]] = [
        (
            0.9 + 0.17 * (text.count("\n") + facts.count("\n")),
            partial(_write_verdict, headline=content.headline, text=text, facts=facts),
        )
    ]
    if columns:
        rows.append((max(map(_height, columns)), partial(_draw_columns, columns=columns)))
    rows += [(0.5 + 0.2 * len(t.rows), partial(_write_table, table=t)) for t in content.tables]
    heights = [height for height, _ in rows]
    whole = Figure(figsize=(2 * WIDTH + 1, sum(heights)), layout="constrained")
    parts = whole.subfigures(len(rows), squeeze=False, height_ratios=heights)[:, 0]
    for part, (_, make) in zip(parts, rows, strict=True):
        make(part)
    return whole


def _columns(drawings: list[Drawing]) -> list[list[Drawing]]:
    """The drawings in two columns of about the same height."""
    columns: tuple[list[Drawing], list[Drawing]] = [], []
    for drawing in drawings:
        min(columns, key=_height).append(drawing)
    return [column for column in columns if column]


def _height(column: list[Drawing]) -> float:
    return sum(drawing.height for drawing in column)


def _draw_columns(part: FigureBase, columns: list[list[Drawing]]) -> None:
    """The drawings, in columns of the same height."""
    sides = part.subfigures(1, len(columns), squeeze=False)[0]
    for side, column in zip(sides, columns, strict=True):
        heights = [drawing.height for drawing in column]
        places = side.subfigures(len(column), squeeze=False, height_ratios=heights)[:, 0]
        for place, drawing in zip(places, column, strict=True):
            drawing.draw(place)


def _facts(content: Content) -> str:
    """The facts in lines; a no-break space keeps each in one."""
    facts = (f"{name}: {fact}".replace(" ", "\xa0") for name, fact in content.facts.items())
    return fill("     ".join(facts), 130)


def _write_verdict(part: FigureBase, headline: Kind, text: str, facts: str) -> None:
    colour = LEVELS[headline.level]
    part.suptitle(
        headline.headline, x=0.02, ha="left", color=colour, fontsize=17, fontweight="bold"
    )
    part.text(0.02, 0.5, text, fontsize=10, va="center")
    part.text(0.02, 0.02, facts, color="#555555", va="bottom")


def _write_table(part: FigureBase, table: Table) -> None:
    axes = part.subplots()
    axes.set_axis_off()
    axes.set_title(table.title)
    drawn = axes.table(
        [[f"  {shown(cell, 70)}  " for cell in row] for row in table.rows],
        colLabels=[f"  {heading}  " for heading in table.headings],
        loc="upper left",
        edges="horizontal",
    )
    drawn.auto_set_font_size(False)
    drawn.auto_set_column_width(list(range(len(table.headings))))
    for (_, column), cell in drawn.get_celld().items():
        cell.PAD = 0
        cell.set_edgecolor("#DDDDDD")
        cell.set_text_props(ha="left" if column == table.names else "right", fontsize=8)
