"""A run in one picture: the verdict, the figures and the tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from io import BytesIO
from textwrap import fill

from matplotlib.figure import Figure, FigureBase

from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose.report._figures import LEVELS, WIDTH, drawings_of
from gradscaler.diagnose.report._summary import Table, facts_of, headline_of, tables_of
from gradscaler.diagnose.report._texts import shown


def picture_of(run: Run) -> bytes:
    """The picture as a PNG."""
    file = BytesIO()
    draw(run).savefig(file, format="png", dpi=150)
    return file.getvalue()


def draw(run: Run) -> Figure:
    """One figure of everything: the verdict, the drawings and the tables."""
    drawn, tables = drawings_of(run), tables_of(run)
    text = fill(shown(run.verdict.text, 1000), 120)
    rows: list[tuple[float, list[Callable[[FigureBase], None]]]] = [
        (0.9 + 0.17 * text.count("\n"), [partial(_write_verdict, run=run, text=text)])
    ]
    if drawn:
        rows.append((max(drawing.height for drawing in drawn), [d.draw for d in drawn]))
    rows += [(0.5 + 0.2 * len(t.rows), [partial(_write_table, table=t)]) for t in tables]
    heights = [height for height, _ in rows]
    whole = Figure(figsize=(2 * WIDTH + 1, sum(heights)), layout="constrained")
    parts = whole.subfigures(len(rows), squeeze=False, height_ratios=heights)[:, 0]
    for part, (_, draws) in zip(parts, rows, strict=True):
        sides = part.subfigures(1, len(draws), squeeze=False)[0]
        for side, make in zip(sides, draws, strict=True):
            make(side)
    return whole


def _write_verdict(part: FigureBase, run: Run, text: str) -> None:
    headline = headline_of(run)
    colour = LEVELS[headline.level]
    facts = "     ".join(f"{name}: {fact}" for name, fact in facts_of(run).items())
    part.suptitle(headline.text, x=0.02, ha="left", color=colour, fontsize=17, fontweight="bold")
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
