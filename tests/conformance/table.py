"""Prints a file that ``replay.py`` wrote as one table; status 1 if any row is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> int:
    """Read all rows, print the table and its notes."""
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    if not rows:
        print("nothing was replayed", file=sys.stderr)
        return 1
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    notes = list(dict.fromkeys(row["result"] for row in rows if row["result"] != "equal"))
    table: dict[str, dict[str, str]] = {}
    for row in rows:
        mark = "=" if row["result"] == "equal" else f"({notes.index(row['result']) + 1})"
        table.setdefault(row["mode"], {})[row["trace"]] = mark
    lines = [["scaler", *traces]]
    lines += [[mode, *(marks.get(trace, "") for trace in traces)] for mode, marks in table.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())
    print("\n=    the scales and counts of the host's policy, bit for bit")
    for number, note in enumerate(notes, 1):
        print(f"{f'({number})':4} {note}")
    return int(any(note.startswith("WRONG") for note in notes))


if __name__ == "__main__":
    sys.exit(main())
