"""Changes the code in small ways, one at a time, and lists the changes that no test notices.

``make mutants`` makes a sample of them, another each day: a run prints its seed, and
``GRADSCALER_SEED`` repeats it. Arguments are rooms, or ``all`` for every change::

    make mutants OPTIONS='rule weights'
    make mutants OPTIONS='findings all'

Of each room run the tests that ``make test`` runs in it, the fastest first. So a change that they
notice is one that ``make test`` notices.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, singledispatch
from itertools import accumulate, repeat
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from tests.support import programs
from tests.support.chosen import SEED

ROOT = Path(__file__).parents[2]
NUMBER = 25  # in a room; with as many cores as processes, some minutes
SECONDS = 300  # for the tests of a change, which may make a loop endless

# For each room, its files and its tests.
ROOMS = {
    "rule": (
        ["policies/*.py"],
        ["tests/policies", "tests/checkpoint/test_formats.py", "tests/eager/test_policies.py"],
    ),
    "engine": (
        ["_eager/*.py"],
        [
            *("tests/eager", "--ignore=tests/eager/test_interrupts.py"),
            *(f"tests/torch/test_{name}.py" for name in ("api", "retries", "sharded", "traps")),
        ],
    ),
    "weights": (["torch/_weights/*.py", "torch/weights.py"], ["tests/torch/weights"]),
    "findings": (
        ["diagnose/_findings/*.py", "diagnose/_operations/*.py"],
        [
            *(f"tests/diagnose/{name}" for name in ("findings", "operations", "test_kinds.py")),
            "tests/diagnose/test_trainings.py",
        ],
    ),
}

OTHER: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
"""What takes an operator's place."""


@dataclass(frozen=True)
class Mutant:
    """One change of a file: the bytes that it replaces, and the code in their place.

    Attributes:
        lines: from the statement's first to the last that changes.
    """

    path: Path
    line: int
    lines: range
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.old} -> {self.new}"

    def of(self, source: bytes) -> bytes:
        """The file with the change."""
        return source[: self.start] + self.new.encode() + source[self.end :]


def mutants_of(path: Path) -> list[Mutant]:
    """All changes of a file, whose path begins at the root of the checkout."""
    source = (ROOT / path).read_bytes()
    offsets = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    found = []
    tree = ast.parse(source)
    for node, new, statement in _changes(tree, tree.body[0]):
        last = node.end_lineno or node.lineno
        lines = range(statement.lineno, last + 1)
        start = offsets[node.lineno - 1] + node.col_offset
        end = offsets[last - 1] + (node.end_col_offset or 0)
        old = " ".join(source[start:end].decode().split())
        found.append(Mutant(path, node.lineno, lines, start, end, old, new))
    return found


def _changes(
    node: ast.AST, statement: ast.stmt
) -> Iterator[tuple[ast.expr | ast.stmt, str, ast.stmt]]:
    """The expressions and statements of a node, code in the place of each, and its statement.

    Args:
        node: the node.
        statement: that which the node is a part of.
    """
    statement = node if isinstance(node, ast.stmt) else statement
    if isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
        for other in _others(node):
            yield node, f"({ast.unparse(other)})", statement
    elif isinstance(node, ast.Return) and node.value and ast.unparse(node.value) != "None":
        yield node, "return None", statement
    elif isinstance(node, ast.stmt) and _can_be_left_out(node):
        yield node, "pass", statement
    elif isinstance(node, ast.If):
        yield node.test, f"(not ({ast.unparse(node.test)}))", statement
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _is_kept(child):
                    yield from _changes(child, statement)


def _can_be_left_out(node: ast.stmt) -> bool:
    """Whether what comes after a statement can run without it, as it binds no name."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)  # a docstring
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
    return isinstance(node, (ast.Raise, ast.AugAssign, ast.Continue, ast.Break, ast.Delete))


def _is_kept(node: ast.AST) -> bool:
    """Whether nothing is changed below a node: a text, an assertion, what only types need."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        name = node.value.id  # a type and its arguments, such as Mapping[str, Any]
        return name in vars(builtins) or re.fullmatch("[A-Z][a-z][A-Za-z]+", name) is not None
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("dataclass", "TypeVar", "cast")
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    return isinstance(node, (ast.JoinedStr, ast.Assert))


@singledispatch
def _others(node: ast.expr) -> Iterator[ast.expr]:
    """Expressions that may take an expression's place."""
    yield from ()


@_others.register
def _(node: ast.Constant) -> Iterator[ast.expr]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, (int, float)) and node.value + 1 != node.value:
        yield ast.Constant(node.value + 1)


@_others.register
def _(node: ast.Compare) -> Iterator[ast.expr]:
    for number, operator in enumerate(node.ops):
        other = deepcopy(node)
        other.ops[number] = OTHER[type(operator)]()
        yield other


@_others.register(ast.BinOp)
@_others.register(ast.BoolOp)
def _(node: ast.BinOp | ast.BoolOp) -> Iterator[ast.expr]:
    if type(node.op) in OTHER:
        other = deepcopy(node)
        other.op = OTHER[type(node.op)]()
        yield other
    if isinstance(node, ast.BoolOp):
        yield from node.values


@_others.register
def _(node: ast.UnaryOp) -> Iterator[ast.expr]:
    yield node.operand


@_others.register
def _(node: ast.IfExp) -> Iterator[ast.expr]:
    yield from (node.body, node.orelse)


@_others.register
def _(node: ast.Call) -> Iterator[ast.expr]:
    for number in range(len(node.keywords)):
        other = deepcopy(node)
        del other.keywords[number]
        yield other


@_others.register(ast.Tuple)
@_others.register(ast.List)
@_others.register(ast.Set)
def _(node: ast.Tuple | ast.List | ast.Set) -> Iterator[ast.expr]:
    for number in range(len(node.elts)):
        other = deepcopy(node)
        del other.elts[number]
        yield other


# In a fork of a process that has imported PyTorch: the tests, and which of them run each line.
RUN_TESTS = """
import json, signal, sys
import coverage, pytest
tests, seconds, lines_in = json.loads(sys.argv[1])
sys.path[:0] = ["src", "."]
signal.alarm(seconds)
options = ["-x", "-q", "-p", "no:cacheprovider", *tests]
if lines_in is None:
    sys.exit(pytest.main(options))
measured = coverage.Coverage(None, config_file=False, include=["src/gradscaler/*"])
class Contexts:
    def pytest_runtest_logstart(self, nodeid):
        measured.switch_context(nodeid)
with measured.collect():
    status = pytest.main(options, plugins=[Contexts()])
data = measured.get_data()
found = {path: data.contexts_by_lineno(path) for path in data.measured_files()}
with open(lines_in, "w") as file:
    json.dump(found, file)
sys.exit(status)
"""


def run_tests(folder: Path, tests: list[str], lines_in: Path | None = None) -> int:
    """Run tests in a copy of the checkout, until one fails; return the status."""
    variables = {
        **os.environ,
        "GRADSCALER_FRAMEWORK": "torch",
        "GRADSCALER_MUTANT": "yes",
        "GRADSCALER_TESTS": "some",
        "PYTHONPATH": str(folder / "src"),  # of processes that a test starts
    }
    told = json.dumps([tests, 0 if lines_in else SECONDS, lines_in and str(lines_in)])
    done = programs.run("-c", RUN_TESTS, told, cwd=folder, env=variables)
    if done.returncode and lines_in:
        raise SystemExit(f"a test fails without a change:\n{done.stdout}{done.stderr}")
    if "no match in any of" in done.stderr:  # else it would pass for one that fails
        raise SystemExit(f"a test has another name than it had:\n{done.stderr}")
    return done.returncode


def tests_by_line(folder: Path, tests: list[str]) -> dict[tuple[Path, int], list[str]]:
    """The tests that run each line, in their order; "" stands for an import."""
    copy = _own_copy(folder)
    lines_in = copy / "lines.json"
    run_tests(copy, tests, lines_in)
    return {
        (Path(path).relative_to(copy), int(line)): names
        for path, lines in json.loads(lines_in.read_text()).items()
        for line, names in lines.items()
    }


def is_noticed(folder: Path, mutant: Mutant, tests: list[str]) -> bool:
    """Whether one of some tests fails after a change."""
    copy = _own_copy(folder)
    path = copy / mutant.path
    source = path.read_bytes()
    path.write_bytes(mutant.of(source))
    try:
        return bool(tests) and run_tests(copy, tests) != 0
    finally:
        path.write_bytes(source)


@cache
def _own_copy(folder: Path) -> Path:
    """This process' copy of the files that git knows, in a folder."""
    copy = Path(mkdtemp(dir=folder))
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    return copy


def main(rooms: list[str], number: int | None) -> None:
    """Change each room, and print the changes that no test notices.

    Args:
        rooms: their names.
        number: of the changes of each; None for all.
    """
    print(f"GRADSCALER_SEED={SEED}", flush=True)
    with TemporaryDirectory() as name, ProcessPoolExecutor() as pool:
        folder = Path(name)
        for room in rooms:
            files, tests = ROOMS[room]
            tests_of = pool.submit(tests_by_line, folder, tests).result()
            paths = sorted(path for each in files for path in (ROOT / "src/gradscaler").glob(each))
            mutants = [each for path in paths for each in mutants_of(path.relative_to(ROOT))]
            if number is not None:
                mutants = Random(f"{SEED} {room}").sample(mutants, min(number, len(mutants)))
            chosen = []
            for mutant in mutants:
                names = [
                    each for line in mutant.lines for each in tests_of.get((mutant.path, line), ())
                ]
                # Lines of an import, and those of a decorator, which are before their statement's.
                is_imported = "" in names or not mutant.lines
                chosen.append(tests if is_imported else [*dict.fromkeys(names)])
            verdicts = pool.map(is_noticed, repeat(folder), mutants, chosen)
            unnoticed = 0
            for mutant, noticed in zip(mutants, verdicts, strict=True):
                if not noticed:
                    unnoticed += 1
                    print(f"  {mutant}", flush=True)
            print(f"{room}: {len(mutants) - unnoticed} of {len(mutants)} are noticed", flush=True)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(
        [name for name in arguments if name != "all"] or [*ROOMS],
        None if "all" in arguments else NUMBER,
    )
