"""A run in one picture: the verdict, the figures and the tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from io import BytesIO
from textwrap import fill

from matplotlib.figure import Figure, FigureBase
from matplotlib.text import Text

from gradscaler.diagnose._findings.finding import Kind
from gradscaler.diagnose.report._style import LEVELS, WIDTH, Drawing, drawing_settings
from gradscaler.diagnose.report._summary import Content, Table, in_lines
from gradscaler.diagnose.report._words import shown


@drawing_settings()
def picture_of(content: Content) -> bytes:
    """The picture as a PNG."""
    return png_of(draw(content), dpi=150)


def png_of(figure: Figure, dpi: float | str = "figure") -> bytes:
    """A figure as a PNG. Its texts are its Description, for who cannot see it, and for tests."""
    texts = [found.get_text() for found in figure.findobj(Text)]
    description = " | ".join(" ".join(text.split()) for text in texts if text.strip())
    file = BytesIO()
    figure.savefig(file, format="png", dpi=dpi, metadata={"Description": description})
    return file.getvalue()


def draw(content: Content) -> Figure:
    """One figure of everything: the verdict, the drawings and the tables."""
    text = fill(shown(content.text, 1000), 120)
    facts = in_lines(content.facts, 130)
    rows: list[tuple[float, Callable[[FigureBase], None]]] = [
        (
            0.9 + 0.17 * (text.count("\n") + facts.count("\n")),
            partial(_write_verdict, headline=content.headline, text=text, facts=facts),
        )
    ]
    rows += map(_row_of_table, content.first)
    if content.drawings:
        tallest = max(drawing.height for drawing in content.drawings)
        draw = partial(_draw_columns, drawings=content.drawings, tallest=tallest)
        rows.append((tallest, draw))
    rows += map(_row_of_table, content.tables)
    heights = [height for height, _ in rows]
    whole = Figure(figsize=(2 * WIDTH + 1, sum(heights)), layout="constrained")
    parts = whole.subfigures(len(rows), squeeze=False, height_ratios=heights)[:, 0]
    for part, (_, make) in zip(parts, rows, strict=True):
        make(part)
    return whole


def _draw_columns(part: FigureBase, drawings: list[Drawing], tallest: float) -> None:
    """The drawings beside each other, with empty space below all but the tallest."""
    sides = part.subfigures(1, len(drawings), squeeze=False)[0]
    for side, drawing in zip(sides, drawings, strict=True):
        heights = drawing.height, tallest + 0.01 - drawing.height
        drawing.draw(side.subfigures(2, height_ratios=heights)[0])


def _write_verdict(part: FigureBase, headline: Kind, text: str, facts: str) -> None:
    colour = LEVELS[headline.level]
    part.suptitle(
        headline.headline, x=0.02, ha="left", color=colour, fontsize=17, fontweight="bold"
    )
    part.text(0.02, 0.5, text, fontsize=10, va="center")
    part.text(0.02, 0.02, facts, color="#555555", va="bottom")


def _row_of_table(table: Table) -> tuple[float, Callable[[FigureBase], None]]:
    return 0.5 + 0.2 * len(table.rows), partial(_write_table, table=table)


def _write_table(part: FigureBase, table: Table) -> None:
    axes = part.subplots()
    axes.set_axis_off()
    axes.set_title(table.title)
    longest = max(40, 160 - 18 * len(table.headings))
    drawn = axes.table(
        [[f"  {shown(cell, longest)}  " for cell in row] for row in table.rows],
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
