"""The figure of several runs: their curves on the same axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D

from gradscaler.diagnose.report._style import (
    Course,
    Drawing,
    Panel,
    draw_curve,
    draw_panels,
    draw_scale,
    fit_axis,
    mark,
    scales_drawn,
    write_legend,
    write_words,
)
from gradscaler.diagnose.report._words import no_points, shown

_COLOURS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"
_STYLES = "-", "--", "-.", ":"  # so that neither a grey print nor one curve over another hides one


def drawing_of(courses: Mapping[str, Course], name: str, title: str) -> Drawing:
    """The scales and the skips of runs, by their names, and a curve of each, step by step."""
    words = {
        run: no_points(name, course.curve) + scales_drawn(len(course.scales[0]))
        for run, course in courses.items()
    }
    notes = (f" {run}: {text.strip()}" for run, text in words.items() if text)
    caption = "".join(notes).strip()
    if not all(math.isfinite(v) for course in courses.values() for v in course.curve.values()):
        caption = f"A mark above the last curves is a {name} that is NaN or Inf. {caption}"
    panels = [
        Panel("Loss scale", 2.0, partial(_draw_scales, runs=courses)),
        Panel("Skipped steps", 0.3 + 0.25 * len(courses), partial(_draw_skips, runs=courses)),
        Panel(title, 1.7, partial(_draw_curves, runs=courses)),
    ]
    height = sum(panel.height for panel in panels) + 0.7 + 0.2 * math.ceil(len(courses) / 2)
    return Drawing("Over time", caption, height, partial(_draw, runs=courses, panels=panels))


def _draw(figure: FigureBase, runs: Mapping[str, Course], panels: list[Panel]) -> None:
    draw_panels(figure, panels, max(1, *(run.num_steps for run in runs.values())))
    places = {shown(name, 40): place for place, name in enumerate(runs)}
    lines = [
        Line2D([], [], color=_colour(place), linestyle=_style(place), label=name)
        for name, place in places.items()
    ]
    write_legend(figure, lines, columns=2)


def _draw_scales(axes: Axes, runs: Mapping[str, Course]) -> None:
    moved = {place: run for place, run in enumerate(runs.values()) if run.scales[0]}
    for place, run in moved.items():
        draw_scale(axes, run, _colour(place), _style(place))
    if not moved:
        write_words(axes, "No step is recorded.")


def _draw_skips(axes: Axes, runs: Mapping[str, Course]) -> None:
    """A row of marks for each run, the first on top."""
    for place, run in enumerate(runs.values()):
        mark(axes, run.skipped, 1 - (place + 0.5) / len(runs), colour=_colour(place))
    axes.set_ylim(len(runs), 0)
    counts = [f"{len(run.skipped):,}" for run in runs.values()]
    axes.set_yticks([place + 0.5 for place in range(len(runs))], counts)
    axes.tick_params(axis="y", length=0)
    for place, label in enumerate(axes.get_yticklabels()):
        label.set_color(_colour(place))


def _draw_curves(axes: Axes, runs: Mapping[str, Course]) -> None:
    finite, num_marked = False, 0
    for place, run in enumerate(runs.values()):
        lost = [step for step, loss in run.curve.items() if not math.isfinite(loss)]
        if len(lost) < len(run.curve):
            draw_curve(axes, run.curve, _colour(place), _style(place))
            finite = True
        if lost:
            mark(axes, lost, 0.97 - 0.07 * num_marked, colour=_colour(place))
            num_marked += 1
    if finite:
        axes.margins(y=0.05 + 0.08 * num_marked)  # the marks are above the curves
        fit_axis(axes, [loss for run in runs.values() for loss in run.curve.values()])
    else:
        write_words(axes, "There is no finite number.")


def _colour(place: int) -> str:
    return _COLOURS[place % len(_COLOURS)]


def _style(place: int) -> Any:
    return _STYLES[place % len(_STYLES)]
