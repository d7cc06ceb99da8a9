"""A run as a page for the browser, as a picture, or in the terminal: the verdict and evidence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gradscaler.diagnose._run.run import Run


def write(run: Run | Mapping[str, Run], path: str | Path) -> None:
    """Write the report of a run, or of several side by side, whole or not at all.

    Args:
        run: from :func:`gradscaler.diagnose.read_run`; or at least one by its name, to compare.
        path: ends in ``.html``, for a page that needs no other file, or in ``.png``.

    Raises:
        ValueError: the name ends in something else.
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from gradscaler.diagnose.report._content import content_of, content_of_runs, save

    save(content_of(run) if isinstance(run, Run) else content_of_runs(run), Path(path))
