"""Interrupts a call at each place in it."""

import itertools

import pytest


def moments(seen, places=None):
    """The first time and the last of each place, as numbers of events in ``seen``."""
    last = {each: number for number, each in enumerate(seen) if not places or each in places}
    return sorted({*map(seen.index, last), *last.values()})


def interrupt(moment, call, each_event):
    """Raise KeyboardInterrupt at one moment of a call, whose events ``each_event`` looks at."""
    events = itertools.count()

    def look(_):
        if next(events) == moment:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        each_event(look, call)
