"""The report as one picture: the verdict, the figures and the tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from io import BytesIO
from textwrap import fill

from matplotlib.figure import Figure, FigureBase
from matplotlib.text import Text

from gradscaler.diagnose.report._content import Content, Table
from gradscaler.diagnose.report._figures import LEVELS, WIDTH, drawing_settings, drawings_of
from gradscaler.diagnose.report._words import shown


@drawing_settings()
def picture_of(content: Content) -> bytes:
    """The report as the bytes of a PNG."""
    return png_of(draw(content), dpi=150)


def png_of(figure: Figure, dpi: float | str = "figure") -> bytes:
    """A figure as the bytes of a PNG.

    The PNG's Description holds all texts of the figure, for screen readers and for tests.
    """
    texts = [found.get_text() for found in figure.findobj(Text)]
    description = " | ".join(" ".join(text.split()) for text in texts if text.strip())
    file = BytesIO()
    figure.savefig(file, format="png", dpi=dpi, metadata={"Description": description})
    return file.getvalue()


def draw(content: Content) -> Figure:
    """Draw one figure with the verdict, the drawings and the tables."""
    text = "\n\n".join(
        fill(text, 120)
        for text in (content.action, shown(content.why, 1000), content.facts)
        if text
    )
    heading = partial(_write_heading, content=content, text=text)
    rows: list[tuple[float, Callable[[FigureBase], None]]] = [
        (0.7 + 0.17 * text.count("\n"), heading)
    ]
    rows += map(_row_of_table, content.first)
    rows += [(drawing.height, drawing.draw) for drawing in drawings_of(content)]
    rows += map(_row_of_table, content.tables)
    heights = [height for height, _ in rows]
    whole = Figure(figsize=(2 * WIDTH + 1, sum(heights)), layout="constrained")
    parts = whole.subfigures(len(rows), squeeze=False, height_ratios=heights)[:, 0]
    for part, (_, make) in zip(parts, rows, strict=True):
        make(part)
    return whole


def _write_heading(part: FigureBase, content: Content, text: str) -> None:
    level, headline = content.headline
    colour = LEVELS[level]
    part.suptitle(headline, x=0.02, ha="left", color=colour, fontsize=17, fontweight="bold")
    part.text(0.02, 0.02, text, fontsize=9.5, va="bottom")


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
