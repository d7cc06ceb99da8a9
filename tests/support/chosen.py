"""What ``make test`` runs of tests that have many cases; ``make test-all`` runs every case.

Of a test with several arguments, as many cases run as are needed for each pair of their values: few
faults need three values at once. A mark leaves as many as are needed for each value::

    @pytest.mark.covering(1)

Of these, another mark leaves so many, those first that have the most values::

    @pytest.mark.some(3, "what else fails on the same faults")

Two other marks leave out a test, or run it on one of Keras' backends::

    @pytest.mark.rare("what stays and fails on the same faults")
    @pytest.mark.one_backend  # or one_backend("jax")

Of Hypothesis' examples a third run, where a test says ``max_examples=examples(30)``.

The same cases run each day, so that a change alone makes a test fail. Which lines are interrupted
changes with the day. A run prints its seed, and ``GRADSCALER_SEED`` repeats it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

# A run's processes inherit the seed, as its tests may begin before midnight and end after it.
SEED = os.environ.setdefault("GRADSCALER_SEED", date.today().isoformat())
# The runs of several frameworks and backends choose different cases of the tests that they share.
_RUN = " ".join(map(os.environ.get, ("GRADSCALER_FRAMEWORK", "KERAS_BACKEND"), ("", "")))
_BACKENDS = "tensorflow", "jax", "torch"
IS_ALL = os.environ.get("GRADSCALER_TESTS") == "all"


def sample(values: Sequence[T], size: int) -> list[T]:
    """Today's sample of values, in their order; all of them in ``make test-all``."""
    if IS_ALL or len(values) <= size:
        return list(values)
    return [values[i] for i in sorted(Random(f"{SEED} {_RUN}").sample(range(len(values)), size))]


def examples(number: int) -> int:
    """How many examples of Hypothesis run of so many: a third, as of those that name no number.

    At least four, as the first is the simplest one, such as an empty list.
    """
    return number if IS_ALL else max(number // 3, min(number, 4))


def covering(cases: Sequence[Mapping[str, int]], strength: int) -> list[int]:
    """The numbers of cases in which all values, or pairs of values, of all the cases occur.

    The first of them have the most.

    Args:
        cases: the value of each argument, by the argument's name.
        strength: 1 for values, 2 for pairs of them.
    """
    wanted = [set(combinations(sorted(case.items()), min(strength, len(case)))) for case in cases]
    todo, chosen = set().union(*wanted), []
    order = Random(_RUN).sample(range(len(cases)), len(cases))
    while todo:  # the case that has most of what is left
        best = max(order, key=lambda number: len(wanted[number] & todo))
        todo -= wanted[best]
        chosen.append(best)
    return chosen


def cover_values(items: Iterable[Any], conftest: str) -> None:
    """Leave as many cases as each value needs, in the folder of a conftest.py."""
    for item in items:
        if item.path.is_relative_to(Path(conftest).parent):
            item.add_marker(pytest.mark.covering(1))


def left_out(items: Iterable[Any]) -> set[Any]:
    """The collected tests that ``make test`` does not run."""
    if IS_ALL:
        return set()
    tests = defaultdict(list)
    found = set()
    for item in items:
        one = item.get_closest_marker("one_backend")
        is_elsewhere = one and not _is_here(item.parent.nodeid, *one.args)
        if item.get_closest_marker("rare") or is_elsewhere:
            found.add(item)
        elif hasattr(item, "callspec"):
            tests[item.parent.nodeid, item.originalname].append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("covering")
        strength = mark.args[0] if mark else 2
        values = [{k: id(v) for k, v in case.callspec.params.items()} for case in cases]
        some = cases[0].get_closest_marker("some")
        keep = covering(values, strength)[: some.args[0] if some else None]
        found.update(case for number, case in enumerate(cases) if number not in keep)
    return found


def _is_here(file: str, backend: str | None = None) -> bool:
    """Whether the tests of a file run on this backend: each file on one, or on that of its mark."""
    chosen = backend or Random(file).choice(_BACKENDS)
    return os.environ.get("KERAS_BACKEND", chosen) == chosen
