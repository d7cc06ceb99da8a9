"""A run as a page for the browser, as a picture, or in the terminal: the verdict and evidence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gradscaler._atomic import replacing
from gradscaler.diagnose._run.run import Run


def write(run: Run, path: str | Path) -> None:
    """Write the report of a run, whole or not at all.

    Args:
        run: from :func:`gradscaler.diagnose.read_run`.
        path: ends in ``.html``, for a page that needs no other file, or in ``.png``.

    Raises:
        ValueError: the name ends in something else.
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from gradscaler.diagnose.report._figures import drawing_settings
    from gradscaler.diagnose.report._page import page_of
    from gradscaler.diagnose.report._picture import picture_of

    path = Path(path)
    makers: dict[str, Callable[[Run], bytes]] = {".html": page_of, ".png": picture_of}
    make = makers.get(path.suffix.lower())
    if make is None:
        raise ValueError(f"{path}: the name must end in {' or '.join(makers)}")
    with drawing_settings():
        data = make(run)
    with replacing(path) as file:
        file.write(data)
