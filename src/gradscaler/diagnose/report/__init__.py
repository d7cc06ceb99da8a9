"""Shows a run's verdict and evidence as a web page, as a picture, or in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gradscaler._atomic import replacing
from gradscaler.diagnose._findings.run import Run
from gradscaler.diagnose.report._content import Content, content_of, content_of_runs


def write(run: Run | Mapping[str, Run] | Content, path: str | Path) -> None:
    """Write the report on a run, or on several runs side by side.

    If writing fails, the file stays as it was.

    Args:
        run: a run from :func:`gradscaler.diagnose.read_run`; or runs by their names, at least one,
            to compare; or the content of a report on something else.
        path: a name that ends in ``.html``, for a page that needs no other file, or in ``.png``.

    Raises:
        ValueError: the name has another ending.
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from gradscaler.diagnose.report._page import page_of
    from gradscaler.diagnose.report._picture import picture_of

    path, makers = Path(path), {".html": page_of, ".png": picture_of}
    make = makers.get(path.suffix.lower())
    if make is None:
        raise ValueError(f"{path}: the name must end in {' or '.join(makers)}")
    if isinstance(run, Run):
        run = content_of(run)
    data = make(run if isinstance(run, Content) else content_of_runs(run))
    with replacing(path) as file:
        file.write(data)
