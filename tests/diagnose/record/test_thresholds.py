"""The thresholds of the findings stand in one module, each with its reason or its case."""

import ast
import re
from pathlib import Path

from gradscaler import diagnose
from gradscaler.diagnose._record import thresholds

ROOM = Path(diagnose.__file__).parent
SCRIPT = ROOM.parent / "_run_script"
TESTS = Path(__file__).parents[2]
LINES = Path(thresholds.__file__).read_text("utf-8").splitlines()


def numbers_of(path):
    """The names of the numbers that a module defines."""
    for node in ast.parse(path.read_text("utf-8")).body:
        is_number = isinstance(node, ast.Assign) and not any(
            isinstance(part, (ast.Call, ast.Name, ast.JoinedStr, ast.Subscript))
            or (isinstance(part, ast.Constant) and not isinstance(part.value, (int, float)))
            for part in ast.walk(node.value)
        )
        if is_number:
            yield from (name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name))


def test_no_detector_has_a_threshold_of_its_own():
    assert len([*numbers_of(Path(thresholds.__file__))]) > 50
    assert [(path.stem, *numbers_of(path)) for path in (ROOM / "_findings").glob("*.py")] == [
        (path.stem,) for path in (ROOM / "_findings").glob("*.py")
    ]


def test_what_decides_a_text_stands_nowhere_else():
    """Other numbers limit time, memory and room, or are facts of a format."""
    limits = re.compile(r"_?(MOST|LONGEST|LARGEST|SMALLEST|FARTHEST|CHUNK|CREDIT|SHARE)(_|$)")
    found = {
        name
        for room in ("_monitor", "_graph", "_seams", "_gradients", "_locate", "_logs", "_script")
        for path in sorted((SCRIPT if room == "_script" else ROOM / room).rglob("*.py"))
        for name in numbers_of(path)
        if name.isupper() and not limits.match(name)
    }
    assert found == {
        *("WATCHED", "LOOKED_AT"),  # of a budget of time
        *("_LITTLE", "_LITTLE_CREDIT", "_AFTER_NAN", "_LOOKS"),  # likewise
        *("_LEAST_NEW", "_LOOKED_AT", "_LAST"),  # steps at which something is looked for
        *("EARLY", "_GOLDEN", "_WHOLE"),  # which steps, and which elements, are sampled
        *(
            "_ALL",
            "LOOP",
            "_USE_SOFTMAX",
            "_SEEDS",
            "STOPPED",
        ),  # keys, places and exit statuses
        *("_DEPTH", "_FEW_ROWS", "_MANY", "_STEPS_BEFORE"),  # of work
    }


def test_each_threshold_is_used_and_has_a_comment():
    used = "".join(
        path.read_text("utf-8")
        for room in (ROOM, SCRIPT)
        for path in room.rglob("*.py")
        if path.name != "thresholds.py"
    )
    for name in numbers_of(Path(thresholds.__file__)):
        assert re.search(rf"\b{name}\b", used), name
        (at,) = (n for n, line in enumerate(LINES) if re.match(rf"(\w+, )?{name}\b[^(]* = ", line))
        assert "  # " in LINES[at] or LINES[at - 1].startswith("# "), name


def test_each_case_that_set_a_threshold_is_there():
    tests = "".join(path.read_text("utf-8") for path in TESTS.rglob("*.py"))
    cases = re.findall(r"`(\w+)`", "\n".join(LINES))
    assert len(cases) > 20
    assert [case for case in cases if f"def {case}(" not in tests] == []
