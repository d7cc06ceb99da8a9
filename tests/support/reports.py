"""The text that a command prints on a run, and the figure that it draws."""

import os
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from gradscaler.__main__ import main
from gradscaler.diagnose import report
from tests.support.run_files import append_run


def explained(run, width=80):
    """The text that ``python -m gradscaler explain`` prints on a run, at this width."""
    with TemporaryDirectory() as folder:
        path = append_run(Path(folder) / "run.jsonl", run)
        return printed("explain", path, width=width)


def printed(*arguments, width=80):
    """The text that ``python -m gradscaler`` prints with these arguments."""
    output = StringIO()
    with redirect_stdout(output), mock.patch.dict(os.environ, COLUMNS=str(width)):
        assert main([*map(str, arguments)]) == 0
    return output.getvalue()


def line_of(text, name):
    """The first line that begins with a name."""
    return next(line for line in text.splitlines() if line.startswith(name))


def drawn(run, path):
    """Write the report on a run, or on several, as a picture; return matplotlib's figure of it."""
    with figures_saved() as figures:
        report.write(run, path)
    (figure,) = figures
    return figure


@contextmanager
def figures_saved():
    """Collect the figures that matplotlib saves."""
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig

    def savefig(figure, *arguments, **options):
        figures.append(figure)
        save(figure, *arguments, **options)

    with mock.patch.object(Figure, "savefig", savefig):
        yield figures
