"""The objects in memory of a class, found while other threads run."""

import sys
import threading

import pytest

from gradscaler._in_memory import in_memory


class Kept:
    """What is looked for."""


class Below(Kept):
    """What is found too."""


class Missing:
    """What nothing is of."""


class Proxy:
    """What pretends to have the class of another object, by code of its own."""

    @property
    def __class__(self):
        raise AssertionError("its code ran")


class OfNoHash(type):
    """A class of classes that cannot be in a set."""

    def __eq__(cls, other):
        raise AssertionError("its code ran")


class Unhashed(metaclass=OfNoHash):
    """What has such a class."""


@pytest.mark.parametrize("kinds", [Kept, (Kept,), (Missing, Kept, Below)], ids=str)
def test_those_of_a_class_and_below_it_are_found(kinds):
    kept = [Kept(), Below(), Proxy(), Unhashed()]
    assert set(map(id, in_memory(kinds))) == set(map(id, kept[:2]))


def test_those_of_no_class_are_none():
    assert in_memory(()) == []


def test_a_thread_may_make_a_tuple_meanwhile():
    kept, many = Kept(), [[i] for i in range(200_000)]  # as a framework has
    errors, num_made, is_over = [], [], threading.Event()

    def make():
        try:
            while not is_over.is_set():
                num_made.append(len(tuple(i for i in range(40))))
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=make) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        found = [in_memory(Kept) for _ in range(40)]
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert found == [[kept]] * 40
    assert set(num_made) == {40}
    assert errors == []
    assert len(many) == 200_000
