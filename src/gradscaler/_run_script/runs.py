"""The runs of a process: each begins at a step, and all end with the process."""

from __future__ import annotations

import argparse
import atexit
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from gradscaler._run_script.files import RunFiles
from gradscaler._run_script.options import MOST_RUNS
from gradscaler._run_script.step_watch import Search
from gradscaler._run_script.termination import before_termination
from gradscaler._run_script.undo import on_stop, replace
from gradscaler._run_script.voice import attempt, voice
from gradscaler._run_script.watched_run import WatchedRun
from gradscaler.diagnose._findings.frameworks import framework_named
from gradscaler.diagnose._graph import threads
from gradscaler.diagnose._graph.guard import guard

LOOP = 0  # the key of a loop without a scaler, where others are the ids of scalers


class Runs:
    """The runs of loops in one framework, by a key.

    Args:
        name: the framework's package.
        options: those of the command line.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self._name, self._options, self._files = name, options, RunFiles(options)
        self._process, self._num_left = os.getpid(), MOST_RUNS
        self._is_over = self._is_broken = False
        self.open: dict[object, WatchedRun] = {}
        self.before_end: Callable[[], object] = bool  # called before all end
        replace(guard, "say", voice.note)
        guard.add(self)
        on_stop.callback(self.stop)

    def break_off(self, _: str) -> None:
        """Begin and see no more, as something has ended the watch of those that are open."""
        self._num_left, self._is_broken = 0, True
        self._options.is_watched = True  # and a word has said why it is no more

    def stop(self) -> None:
        """End all runs, and begin no more."""
        self.end()
        guard.remove(self)
        atexit.unregister(self.end)
        self._is_over = True
        threads.forget()

    @property
    def is_off(self) -> bool:
        """Whether no more steps are to be seen."""
        return self._is_broken or self._has_no_word

    @property
    def _has_no_word(self) -> bool:
        """Whether this is a child that was forked, or the watch has stopped."""
        return self._is_over or os.getpid() != self._process

    def begin(
        self,
        key: object,
        scaler: Any,
        model: Any,
        search: Search | None = None,
        has_watch: bool = True,
    ) -> None:
        """Begin a run, unless there were enough; what it takes is what WatchedRun does.

        Without ``has_watch``, a watch of a step would show no more than the run does.
        """
        if not self._num_left:
            return
        self._num_left -= 1
        self._options.is_watched |= self._name != "torch"  # where each run says why it saw no step
        attempt(partial(before_termination, self.end))
        attempt(partial(self._open, key, scaler, model, search, has_watch))
        self._end_first()

    def _end_first(self) -> None:
        """Let the verdict come before monitors close by themselves at exit."""
        atexit.unregister(self.end)
        atexit.register(self.end)

    def end_step(self, key: object) -> None:
        """Note that a step of a run has ended, if that run is open."""
        if key in self.open:
            self.open[key].step_ended()

    def _open(
        self, key: object, scaler: Any, model: Any, search: Search | None, has_watch: bool = True
    ) -> None:
        framework = framework_named(self._name, {})
        framework = framework._replace(has_watch=framework.has_watch and has_watch)
        given = scaler, model, self._files, self._options, framework
        self.open[key] = WatchedRun(*given, search)

    def end(self) -> None:
        """Close all files, and print the verdicts."""
        if not self._has_no_word:
            attempt(self.before_end)
            self._end_open()

    def _end_open(self) -> None:
        runs, self.open = self.open, {}
        for run in runs.values():
            attempt(partial(run.end, proposes_watch=not _follows(run, runs.values())))


def _follows(run: WatchedRun, others: Iterable[WatchedRun]) -> bool:
    """Whether a run lost its weights after another that ran meanwhile, most likely by that."""
    if run.lost_at is None:
        return False
    losses = [other.lost_at for other in others if other.lost_at is not None]
    return any(run.began < lost < run.lost_at for lost in losses)
