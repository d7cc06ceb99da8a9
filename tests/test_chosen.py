"""The cases that ``make test`` runs: each value or pair of values, the same each day."""

from collections import Counter
from itertools import combinations, product
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import chosen

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def full_product(sizes):
    names = "abcd"[: len(sizes)]
    return [dict(zip(names, values, strict=True)) for values in product(*map(range, sizes))]


def pairs(cases):
    return {pair for case in cases for pair in combinations(sorted(case.items()), 2)}


@given(SIZES)
def test_each_value_occurs(sizes):
    cases = full_product(sizes)
    kept = [cases[number] for number in chosen.covering(cases, 1)]
    assert {value for case in kept for value in case.items()} == {
        value for case in cases for value in case.items()
    }
    assert len(kept) < len(cases) or sum(size > 1 for size in sizes) < 2


@given(SIZES)
def test_each_pair_of_values_occurs(sizes):
    cases = full_product(sizes)
    kept = [cases[number] for number in chosen.covering(cases, 2)]
    assert pairs(kept) == pairs(cases)
    if len(sizes) < 3:
        assert len(kept) == len(cases)


def test_the_first_cases_have_the_most_values():
    cases = full_product([5, 2])
    for number, size in ((1, 2), (2, 4), (3, 5)):
        kept = [cases[each] for each in chosen.covering(cases, 1)[:number]]
        assert len({value for case in kept for value in case.items()}) == size


def test_another_day_samples_other_lines_of_the_same_cases(monkeypatch):
    monkeypatch.setattr(chosen, "IS_ALL", False)
    cases = full_product([4, 4, 4])
    days = []
    for day in ("2026-01-01", "2026-01-02"):
        monkeypatch.setattr(chosen, "SEED", day)
        days.append((chosen.covering(cases, 1), chosen.sample(range(100), 10)))
        assert days[-1][1] == sorted(days[-1][1])
    assert days[0][0] == days[1][0]
    assert days[0][1] != days[1][1]


def test_another_framework_chooses_other_cases(monkeypatch):
    cases = full_product([4, 4, 4])
    runs = set()
    for run in ("jax ", "paddle ", "keras torch"):
        monkeypatch.setattr(chosen, "_RUN", run)
        runs.add(tuple(chosen.covering(cases, 1)))
    assert len(runs) == 3


class Item(SimpleNamespace):
    """A collected test, with as much of it as is looked at."""

    __hash__ = object.__hash__
    parent = SimpleNamespace(nodeid="tests/test_it.py")

    def get_closest_marker(self, name):
        return self.marks.get(name)


def cases_of(name, **marks):
    cases = (SimpleNamespace(params=case) for case in full_product([2, 2, 2]))
    return [Item(originalname=name, marks=marks, callspec=case) for case in cases]


@pytest.fixture
def collected():
    return [
        Item(originalname="alone", marks={}),
        *cases_of("pairs"),
        *cases_of("values", covering=pytest.mark.covering(1).mark),
        *cases_of("some", some=pytest.mark.some(3, "why").mark),
        Item(originalname="rare", marks={"rare": pytest.mark.rare("why").mark}),
        *cases_of("rare", rare=pytest.mark.rare("why").mark),
    ]


def test_a_mark_says_how_many_cases_run(monkeypatch, collected):
    monkeypatch.setattr(chosen, "IS_ALL", False)
    left_out = chosen.left_out(collected)
    kept = Counter(each.originalname for each in collected if each not in left_out)
    assert kept == {"alone": 1, "pairs": kept["pairs"], "values": 2, "some": 3}
    assert 4 <= kept["pairs"] < 8


def test_test_all_runs_every_case(monkeypatch, collected):
    monkeypatch.setattr(chosen, "IS_ALL", True)
    assert chosen.left_out(collected) == set()


def test_a_test_of_one_backend_runs_on_one(monkeypatch):
    monkeypatch.setattr(chosen, "IS_ALL", False)
    item = Item(originalname="trains", marks={"one_backend": pytest.mark.one_backend.mark})
    runs = []
    for backend in ("tensorflow", "jax", "torch"):
        monkeypatch.setenv("KERAS_BACKEND", backend)
        runs.append(chosen.left_out([item]) == set())
    assert sorted(runs) == [False, False, True]
    monkeypatch.delenv("KERAS_BACKEND")
    assert chosen.left_out([item]) == set()
