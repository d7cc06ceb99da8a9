"""Interrupts a call at its lines: at some of them in ``make test``, at all in ``make test-all``."""

import dis
import gc
import inspect
import linecache
import sys
from contextlib import contextmanager
from functools import cache
from itertools import count

from tests.support.chosen import sample

# The trainings that interrupt one call try some 50 of its 200 lines in a day.
PLACES_A_DAY = 4


@contextmanager
def watching(see, is_traced):
    """Call ``see`` with the place, at each line and return of traced code; it may raise.

    Python ignores an exception at the end of a generator that the collector finishes. What a
    constructor returns is its caller's, as soon as it is made. At the end of a ``with``, Python
    raises no interrupt, so that a lock is always released.
    """

    def trace(frame, event, _):
        code = frame.f_code
        if not is_traced(code):
            return None
        is_left_out = code.co_flags & inspect.CO_GENERATOR or code.co_name == "__init__"
        returns = event == "return" and not is_left_out and frame.f_lasti in _returns_of(code)
        if (event == "line" and not _ends_with(frame)) or returns:
            see((code.co_filename, frame.f_lineno, event))
        return trace

    before = sys.gettrace()
    gc.disable()  # it would call what watches earlier trainings, and ignore the interrupt there
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        gc.enable()


@cache
def _returns_of(code):
    """The places of what returns in code: a frame that an error ends "returns" elsewhere."""
    own = "RETURN_VALUE", "RETURN_CONST"
    return {each.offset for each in dis.get_instructions(code) if each.opname in own}


def _ends_with(frame):
    """Whether a frame is at the end of a ``with``, where its line comes for a second time."""
    code, number = frame.f_code, frame.f_lineno
    first = next(start for start, _, line in code.co_lines() if line == number)
    is_with = linecache.getline(code.co_filename, number).lstrip().startswith("with ")
    return is_with and frame.f_lasti > first


def interrupting(moment, is_traced):
    """Raise KeyboardInterrupt at one moment: the number of an event that :func:`watching` sees."""
    numbers = count()

    def see(_):
        if next(numbers) == moment:
            raise KeyboardInterrupt

    return watching(see, is_traced)


def moments(seen, places=None):
    """The first time and the last of each place, as numbers of events in ``seen``.

    Of these, ``make test`` takes the first, the last, and some of those between.
    """
    last = {each: number for number, each in enumerate(seen) if not places or each in places}
    first, *between, end = sorted({*map(seen.index, last), *last.values()})
    return [first, *sample(between, PLACES_A_DAY), end]
