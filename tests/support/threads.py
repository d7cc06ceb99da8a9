"""Runs threads beside a test, and trainings of any framework in some, under a watch."""

import io
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import gradscaler
from gradscaler._run_script import voice

ENDED = "the watch ended, and the training goes on: a second thread trains"


@contextmanager
def repeated_beside(work: Callable[[], object]) -> Iterator[list[BaseException]]:
    """Repeat a call in two threads, all of which take turns as often as they can; the errors."""
    errors: list[BaseException] = []
    is_over = threading.Event()

    def repeat():
        try:
            while not is_over.is_set():
                work()
        except BaseException as error:
            errors.append(error)

    threads, interval = [threading.Thread(target=repeat) for _ in range(2)], sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for each in threads:
            each.start()
        yield errors
    finally:
        is_over.set()
        for each in threads:
            each.join()
        sys.setswitchinterval(interval)


def _told(watched: Callable[[], object], folder: Path) -> str:
    """What is said of what a call trains."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(voice, "_STDERR", io.StringIO())
        with gradscaler.watch(folder):
            watched()
        return " ".join(voice._STDERR.getvalue().split())


def check_that_the_watch_ends(train: Callable[[], object], folder: Path) -> None:
    """Check that one word says it where threads train at once, and that none says more."""
    begin = threading.Barrier(3)

    def begin_and_train():
        begin.wait()
        train()

    def in_threads():
        threads = [threading.Thread(target=begin_and_train) for _ in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    told = _told(in_threads, folder)
    assert told.count(ENDED) == 1, told
    assert "Nothing wrong was seen" not in told
    assert "so there is no verdict" not in told


def check_that_others_do_not_end_it(
    train: Callable[[], object], evaluate: Callable[[], object], folder: Path
) -> None:
    """Check that the watch goes on where one thread evaluates, and others train in turn."""
    is_over = threading.Event()

    def evaluate_on():
        while not is_over.is_set():
            evaluate()

    def in_turn():
        aside = threading.Thread(target=evaluate_on)
        aside.start()
        try:
            train()
        finally:
            is_over.set()
            aside.join()
        for _ in range(2):  # while this one is alive, and waits
            other = threading.Thread(target=train)
            other.start()
            other.join()

    told = _told(in_turn, folder)
    assert ENDED not in told
    assert told.count("None of 30 steps had a gradient of NaN or Inf. Nothing wrong was seen") == 3
