"""``gradscaler.watch()``: what ``gradscaler run`` does, from inside the process.

This imports no framework. What watches one is imported once the framework is.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gradscaler._notebook import shell
from gradscaler._run_script.after_import import after_import
from gradscaler._run_script.options import add_options
from gradscaler._run_script.undo import on_stop, replace
from gradscaler._run_script.voice import attempt, voice

if TYPE_CHECKING:  # the script may set its environment before NumPy is imported
    from gradscaler.diagnose import Verdict

# A framework, the module that watches its loops, the class there, and its first arguments.
_WATCHED: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("torch", "session", "Session", ()),
    ("keras", "fits", "Fits", ("keras",)),
    ("tf_keras", "fits", "Fits", ("tf_keras",)),
    ("keras", "tape_loops", "TapeLoops", ("keras",)),
    ("tf_keras", "tape_loops", "TapeLoops", ("tf_keras",)),
    ("keras", "applied_steps", "KerasLoops", ()),
    ("tensorflow", "hand_loops", "HandLoops", ()),
    ("paddle", "backward_loops", "BackwardLoops", ("paddle",)),
    ("tensorplay", "backward_loops", "BackwardLoops", ("tensorplay",)),
    ("jax", "function_loops", "FunctionLoops", ()),
    ("mindspore", "gradient_loops", "GradientLoops", ()),
)
_current: list[Watch] = []  # the one of this process, if there is one


class Watch:
    """The watch of this process, which :func:`watch` began.

    It is a context manager, whose exit stops it.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._process = options, os.getpid()
        self._shell: Any = None  # of a notebook
        self._latest: Any = None  # run of the cells before
        self._is_on = False
        options.latest = None

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the latest run so far; None before its first step, if nothing is wrong.

        That on a ``fit`` of Keras without a ``LossScaleOptimizer`` rests on its losses and weights.
        """
        latest = self._options.latest
        return None if latest is None else latest.verdict

    def __repr__(self) -> str:
        return f"<gradscaler.watch(): {self.verdict or 'no step was seen yet'}>"

    def report(self, path: str | os.PathLike[str] = "report.html") -> None:
        """Write a report on the latest run so far.

        Args:
            path: a name that ends in ``.html``, for a page that needs no other file, or in
                ``.png``.

        Raises:
            ValueError: no step was seen yet, the run has no file, as a ``fit`` of Keras without a
                ``LossScaleOptimizer`` has none, or the name has another ending.
            ImportError: matplotlib is not installed.
            OSError: the file cannot be written.
        """
        if self._options.latest is None:
            raise ValueError("there is no run to report on, as no step was seen yet")
        self._options.latest.report(Path(path))

    def _repr_html_(self) -> str:
        """The report in a notebook's output, or the verdict if no report can be made."""
        latest = self._options.latest
        if latest is None or latest.verdict is None:
            return "<p>No step was seen yet.</p>"
        html: str = latest.html
        return html

    def stop(self) -> None:
        """Say the verdict, and undo all that the watch has changed.

        Scalers that were made meanwhile stay gradscaler's, which take the same decisions as
        PyTorch's. Functions that ``jax.jit`` returned meanwhile pass their calls on.
        """
        if self not in _current:
            return
        _current.remove(self)
        self._end()
        if self._shell is not None:
            self._shell.events.unregister("pre_run_cell", self._before_cell)
            self._shell.events.unregister("post_run_cell", self._after_cell)

    def _end(self) -> None:
        self._is_on = False
        attempt(on_stop.close)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            note_end(self._options, error)
        self.stop()

    def _start(self) -> None:
        self._is_on = True
        voice.begin(self._options)
        state: dict[str, Any] = {"has_raised": False, "has_failed": False, "has_watched": False}
        state |= {"is_watched": self._shell is not None, "cell": ""}
        vars(self._options).update(state, trace=None, is_notebook=self._shell is not None)
        for framework, module, kind, names in _WATCHED:
            after_import(framework, partial(_start_in, module, kind, *names, self._options))

    def _follow_cells(self, shell: Any) -> None:
        """End the runs at the end of each cell of a notebook; the next cell begins new ones."""
        self._shell = shell
        shell.events.register("pre_run_cell", self._before_cell)
        shell.events.register("post_run_cell", self._after_cell)

    def _before_cell(self, _: object) -> None:
        if not self._is_on:
            self._start()

    def _after_cell(self, result: Any) -> None:
        error, self._options.cell = result.error_in_exec, result.info.raw_cell
        if error is not None:
            note_end(self._options, error)
        self._end()
        is_over = self._options.latest is not self._latest or self._options.has_watched
        if is_over:  # a step to watch is one of the next run
            self._latest, self._options.watch = self._options.latest, None

    def _explain_at_end(self) -> None:
        atexit.register(self._say_if_unwatched)
        on_stop.callback(atexit.unregister, self._say_if_unwatched)
        on_stop.callback(self._say_if_unwatched)

    def _say_if_unwatched(self) -> None:
        """Say why there is no verdict, in the process that was started and not in its forks."""
        is_said = "torch" in sys.modules  # its own watch says it
        is_quiet = self._options.has_raised or self._options.is_watched or is_said
        if not is_quiet and os.getpid() == self._process:
            unseen = "no step of a training was seen in this process"
            by_hand = "Weights that a script changes by hand, without an optimizer, are not seen."
            voice.conclude(f"{unseen}, so there is no verdict. {by_hand}")


def note_end(options: argparse.Namespace, error: BaseException) -> None:
    """Note what a script has raised at its end."""
    is_exit = isinstance(error, (SystemExit, KeyboardInterrupt))
    options.has_raised, options.trace = True, error.__traceback__
    options.has_failed = bool(error.code) if isinstance(error, SystemExit) else not is_exit


def _start_in(module: str, kind: str, *given: Any) -> None:
    """Watch the loops of a framework, now that it is imported."""
    getattr(import_module(f"gradscaler._run_script.{module}"), kind)(*given).start()


def is_watched() -> bool:
    """Whether this process has a watch."""
    return bool(_current) and _current[0]._process == os.getpid()


def begin(options: argparse.Namespace, notebook: Any = None) -> Watch:
    """Watch the trainings of this process from now on, or those of a notebook's cells."""
    started = Watch(options)
    _current[:] = [started]
    if notebook is not None:
        started._follow_cells(notebook)
    started._start()
    return started


def watch(
    folder: str | os.PathLike[str] | None = None,
    *,
    every: int | None = None,
    step: int | None = None,
    quiet: bool | None = None,
) -> Watch:
    """Watch the trainings of this process, as ``gradscaler run`` does, from inside it.

    Call it before the loop, also after the model and the optimizer are made, in any framework that
    ``gradscaler run`` watches, whether it is imported before or after the call. Findings go to
    stderr. So does the verdict: at :meth:`Watch.stop`, at the end of a ``with`` block, or when the
    process ends. The training stays the same to the bit.

    In PyTorch, call it before a ``GradScaler`` is made. In JAX, call it before ``jax.jit``,
    ``jax.grad`` and ``jax.value_and_grad`` are called, or imported by name. In TensorFlow, call it
    before the first call of what ``tf.function`` compiles. Objects that were made before cannot be
    watched.

    In a notebook, ``%load_ext gradscaler`` does the same. Findings are shown under the cell that
    runs, and the verdict when it ends or is interrupted. The next cell that trains begins a new
    run.

    A process has one watch. A second call returns it; what the call is given counts for the runs
    that begin after it.

    Args:
        folder: the folder of the run files; ``gradscaler-runs`` in the working directory by
            default.
        every: sample the gradients of one step in ``every``, on average; 100 by default.
        step: watch each operation of this step, which takes as long as some steps do. PyTorch's
            loops, and TensorFlow's own, are watched from step 2 on.
        quiet: say nothing during the training, and the verdict at its end; False by default.

    Returns:
        The watch, which has the verdict.

    Raises:
        ValueError: ``every`` or ``step`` is less than 1.

    >>> import tempfile
    >>> import torch
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with watch(tempfile.mkdtemp()) as watched:
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(4)).square().sum().backward()
    ...         optimizer.step()
    >>> watched.verdict.kind
    'normal'
    """
    for name, number in (("every", every), ("step", step)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number!r}")
    if not is_watched():  # as in a child that was forked
        on_stop.pop_all()
        parser = argparse.ArgumentParser("gradscaler.watch")
        add_options(parser)  # whose defaults are those of `gradscaler run`
        options = parser.parse_args([])
        options.folder = options.output.absolute()
        options.again, options.elsewhere = "gradscaler.watch(step={})", "gradscaler.watch(folder)"
        started = begin(options, shell())
        if started._shell is None:
            started._explain_at_end()
            _see_uncaught(options)
    options = _current[0]._options
    given = {"folder": None if folder is None else Path(folder).absolute(), "every": every}
    given |= {"watch": step, "quiet": quiet}
    vars(options).update({name: value for name, value in given.items() if value is not None})
    return _current[0]


def _see_uncaught(options: argparse.Namespace) -> None:
    """Note an exception that ends the script."""
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        note_end(options, error)
        shown(kind, error, trace)

    replace(sys, "excepthook", show)
