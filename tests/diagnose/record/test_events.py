"""The events that a monitor counts: who writes and who reads each, and their texts in a file."""

import re
from pathlib import Path

import pytest

from gradscaler import diagnose
from gradscaler.diagnose._record.events import Counted, Event, Events, texts_of

ROOM = Path(diagnose.__file__).parent


def naming(event, room):
    """The modules of a room that name an event."""
    code = {path.stem: path.read_text("utf-8") for path in (ROOM / room).rglob("*.py")}
    return {name for name, text in code.items() if re.search(rf"\bEvent\.{event.name}\b", text)}


@pytest.mark.parametrize("event", Event)
def test_each_event_is_written_and_read_by_the_modules_of_its_row(event):
    assert naming(event, "_monitor") == event.writers != set()
    assert naming(event, "_findings") == event.readers != set()


def test_the_counts_in_a_file_are_by_text_and_by_place():
    seen = [Counted(Event.UNZEROED), Counted(Event.UNZEROED, "head"), Counted(Event.UNZEROED)]
    texts = texts_of([*seen, Counted(Event.IDLE, "body.0", 10)])
    assert texts == {"unzeroed": 2, "unzeroed head": 1, "idle body.0": 10}
    events = Events().after(texts)
    assert events.count(Event.UNZEROED) == 2
    assert events.places(Event.UNZEROED) == {"head": 1}
    assert (events.count(Event.IDLE), events.place(Event.IDLE)) == (0, "body.0")


def test_a_place_is_that_of_most_lines():
    events = Events().after({"twice": 1, "twice softmax at a.py:1": 1})
    events = events.after({"twice": 2, "twice sigmoid at b.py:2": 2})
    assert events.count(Event.TWICE) == 3
    assert events.place(Event.TWICE) == "sigmoid at b.py:2"


def test_an_event_of_a_later_version_is_left_out():
    assert Events().after({"invented at a.py:1": 3, "mixed": 1}).counts == {(Event.MIXED, ""): 1}


def test_a_place_without_a_name_in_an_earlier_file_is_not_counted_again():
    assert Events().after({"unzeroed": 1, "unzeroed ": 1}).count(Event.UNZEROED) == 1
