"""The changes that ``make mutants`` makes."""

import ast

import pytest

from tests.support.mutants import ROOMS, ROOT, mutants_of

SOURCE = '''\
"""A text."""
from dataclasses import dataclass

Points = dict[str, "Point"]

@dataclass(frozen=True)
class Point:
    x: int = 1

def told(values, least=0.5):
    """Another."""
    if values:
        raise ValueError(f"{len(values) + 1}")
    values.first = "é" if values < 2 and not values.last else None
    print(*values, end="")
    return [values[0], True]
'''
CHANGES = [
    "1 -> (2)",
    "0.5 -> (1.5)",
    "values -> (not (values))",
    'raise ValueError(f"{len(values) + 1}") -> pass',
    'values.first = "é" if values < 2 and not values.last else None -> pass',
    "\"é\" if values < 2 and not values.last else None -> ('é')",
    '"é" if values < 2 and not values.last else None -> (None)',
    "values < 2 and not values.last -> (values < 2 or not values.last)",
    "values < 2 and not values.last -> (values < 2)",
    "values < 2 and not values.last -> (not values.last)",
    "values < 2 -> (values <= 2)",
    "2 -> (3)",
    "not values.last -> (values.last)",
    'print(*values, end="") -> pass',
    'print(*values, end="") -> (print(*values))',
    "return [values[0], True] -> return None",
    "[values[0], True] -> ([True])",
    "[values[0], True] -> ([values[0]])",
    "0 -> (1)",
    "True -> (False)",
]


def test_each_change_is_one_of_code_and_none_of_texts(tmp_path):
    path = tmp_path / "told.py"
    path.write_text(SOURCE, encoding="utf-8")
    mutants = mutants_of(path)
    assert [f"{each.old} -> {each.new}" for each in mutants] == CHANGES
    source = path.read_bytes()
    for each in mutants:  # though an é has two bytes
        changed = each.of(source).decode()
        begin = len(source[: each.start].decode())
        assert changed[begin:].startswith(each.new)
        assert changed[:begin] + each.old + changed[begin + len(each.new) :] == SOURCE


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_has_files_and_each_change_of_them_is_code(room):
    files, _ = ROOMS[room]
    for each in files:
        paths = list((ROOT / "src/gradscaler").glob(each))
        assert paths
        for path in paths:
            source = path.read_bytes()
            for mutant in mutants_of(path)[::50]:
                ast.parse(mutant.of(source))
