"""The objects in memory of a class, found while other threads run."""

import pytest

from gradscaler._in_memory import in_memory
from tests.support.threads import repeated_beside


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
    with repeated_beside(lambda: tuple(i for i in range(40))) as errors:
        found = [in_memory(Kept) for _ in range(40)]
    assert found == [[kept]] * 40
    assert errors == []
    assert len(many) == 200_000
