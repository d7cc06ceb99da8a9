"""The report in the terminal as plain text, where rich is not installed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from io import TextIOWrapper
from typing import TextIO

from gradscaler.diagnose.report._content import Content, Course, Table
from gradscaler.diagnose.report._words import ends, number, sentence_of, shown

_WIDTH = 80  # columns of a terminal, and of a message in a tracker


def print_content(content: Content, output: TextIO) -> None:
    """Print a report: drawn by rich if that is installed, else as plain text."""
    try:
        from gradscaler.diagnose.report._terminal import Printed, console_of
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "rich":
            raise
        if isinstance(output, TextIOWrapper):
            output.reconfigure(errors="replace")
        output.write("\n\n".join(_parts_of(content)) + "\n")
    else:
        console_of(output).print(Printed(content))


def _parts_of(content: Content) -> Iterator[str]:
    """Yield the parts of a report, in the order of the others."""
    if content.action:
        yield _filled(content.action)
    if content.text:
        yield _filled(f"{content.headline.text}: {content.why}")
    yield from map(_table, content.first)
    yield from filter(None, ("\n".join(filter(None, (content.facts, content.origin))),))
    courses = [_course(name, course) for name, course in content.courses.items()]
    yield from filter(None, ("\n".join(courses),))
    if content.fit is not None:
        yield _filled(sentence_of(content.fit))
    yield from map(_table, content.tables)


def _filled(text: str) -> str:
    return textwrap.fill(shown(text, 1000), _WIDTH, break_long_words=False, break_on_hyphens=False)


def _table(table: Table) -> str:
    """A title, and rows below their headings; numbers are at the right of their columns."""
    widths = [max(map(len, column)) for column in zip(table.headings, *table.rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if place == table.names else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (table.headings, *table.rows)
    ]
    return "\n".join([*filter(None, (table.title,)), *lines])


def _course(name: str, course: Course) -> str:
    """A line for each quantity of a run: its first and its last number, and the skipped steps."""
    curves: dict[str, Mapping[int, float]] = {"loss scale": course.scales, **course.curves}
    lines = [f"{shown(name, 60)}:"] if name else []
    for title, points in curves.items():
        values = [number(value) for value in points.values()]
        lines += [f"{title.lower()}: {ends(values)}"] if values else []
    count = len(course.skipped)
    return "\n".join([*lines, *[f"skipped: {count:,} step{'s' * (count != 1)}"] * bool(count)])
