"""Run files with any value or line in the wrong place, in every command that reads one."""

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscaler.__main__ import main
from gradscaler.diagnose import Finding, Located
from gradscaler.outcome import NonfiniteGradient
from tests.support import run_files

pytest.importorskip("matplotlib", reason="the report is drawn with it")
pytest.importorskip("rich", reason="the terminal is written to with it")

BINS = -12, [3, 0, 5]
SHARES = run_files.shares(0.0, 0.01, 0.04, 0.95, 0.0, 0.0)
PARAMETER = run_files.parameter(0.0, 0.01, 0.04, 0.0, BINS)
SAMPLE = run_files.sample(
    *(2, 8.0, [(1, 16.0), (2, 8.0)], 2, [1], 2.5, 1.5, SHARES, BINS),
    parameters={"a.weight": PARAMETER, "b.bias": PARAMETER},
    worst=["b.bias"],
    losses=(None, 2.5),
    largest=0.0007,
    backward=("float16",),
    calls={"unstepped": 1},
    missing=("v",),
    cut={"v": "round"},
    unmoved=0.5,
)
CHANGES = {"step": 4, "scales": [(3, 8.0)], "skips": [], "norm": float("inf"), "loss": None}
GRADIENT = NonfiniteGradient("a.weight", (2, 3), "float16", 1, 2, 5e4)
LOCATED = Located("a", "forward", "Linear", "float16", 1, 2, 6, 5e4, 1.0, None, "matmul", "t.py:3")
STATES = {"parameter": "b.bias", "state": "exp_avg of b.bias", "calls": {"idle": 1}}
FINDING = Finding("nan", "NaN at every scale.", "Look for a division by zero.", "a.weight")
LINES = (
    run_files.skip(1, 16.0, float("nan"), [GRADIENT], more=4),
    SAMPLE,
    run_files.watched(2, LOCATED, **STATES),
    {**SAMPLE, **CHANGES, "cut": None},
    run_files.skip(5, 8.0, 1e5),
    {**run_files.verdict(5, "nan", FINDING.text, "a.weight"), "findings": [FINDING]},
)
NUMBERS = 0, -1, 3, 0.5, 10**12, 2**63 - 1, 2**70, 5e-324, 1e308, "nan", "inf", "-inf"
EXTREMES = *NUMBERS, None, [], {}, "", True, [[1]]
COMMANDS = {
    "explain": ["explain", "RUN"],
    "page": ["report", "RUN", "-o", "OUT.html"],
    "picture": ["report", "RUN", "-o", "OUT.png"],
    "comparison": ["compare", "RUN", "OTHER", "-o", "OUT.html"],
    "ranks": ["explain", "RANK", "OTHER"],
    "simulate": ["simulate", "RUN", "-o", "OUT.png"],
}

DRAWN = "page", "picture", "comparison", "simulate"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def records(folder):
    """The lines of a run in which every key has a value."""
    policy = {"name": "DynamicScale", "init_scale": 8.0}
    start = run_files.start(every=1, policy=policy, rank=0, world_size=2)
    return run_files.append(folder / "whole.jsonl", start, *LINES).read_text().splitlines()


def places_in(value, place=()):
    """The places of all values within a JSON value."""
    if isinstance(value, dict):
        items = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list) else []
    for key, item in items:
        yield (*place, key)
        yield from places_in(item, (*place, key))


def changed(lines, draw):
    """Lines with a value, a key or a line changed, left out, repeated or moved."""
    lines = list(lines)
    row = draw(st.integers(0, len(lines) - 1))
    change = draw(st.sampled_from(["replace"] * 6 + ["delete", "repeat", "rename", "drop", "swap"]))
    if change == "drop":
        del lines[row]
        return lines
    if change == "swap":
        other = draw(st.integers(0, len(lines) - 1))
        lines[row], lines[other] = lines[other], lines[row]
        return lines
    if change == "repeat":
        return [*lines[: row + 1], *lines[row:]]
    record = json.loads(lines[row])
    *path, key = draw(st.sampled_from(list(places_in(record))))
    holder = record
    for part in path:
        holder = holder[part]
    if change == "delete":
        del holder[key]
    elif change == "rename" and isinstance(holder, dict):
        holder["another"] = holder.pop(key)
    else:
        holder[key] = draw(st.sampled_from(EXTREMES))
    lines[row] = json.dumps(record)
    return lines


def status_of(command, folder):
    """A command's exit status, and its stderr."""
    names = {"RUN": "run.jsonl", "RANK": "run.jsonl", "OTHER": "whole.jsonl"}
    arguments = [names.get(each, each) for each in command]
    paths = {"run.jsonl", "whole.jsonl", "OUT.html", "OUT.png"}
    arguments = [str(folder / each) if each in paths else each for each in arguments]
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()


def check_command(name, lines, folder):
    (folder / "run.jsonl").write_text("".join(f"{line}\n" for line in lines))
    status, out, err = status_of(COMMANDS[name], folder)
    assert status in (0, 1)
    if status:
        assert err.count("\n") == 1
        assert "jsonl" in err
    elif name not in DRAWN:
        assert out


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_reads_any_file_or_says_what_is_wrong_in_one_line(folder, records, name):
    @settings(max_examples=3 if name in DRAWN else 30)  # a drawing takes long
    @given(st.data())
    def check(data):
        lines = records
        for _ in range(data.draw(st.integers(1, 2))):
            lines = changed(lines, data.draw) if lines else lines
        check_command(name, lines, folder)

    check()


@pytest.mark.parametrize("value", NUMBERS)
@pytest.mark.parametrize(
    ("row", "keys"),
    [(0, ["step"]), (1, ["step", "scale", "loss"]), (2, ["step", "scale", "steps", "largest"])],
)
@pytest.mark.covering(1)  # a row shows what another does: each number is replayed once
def test_no_extreme_number_stops_a_replay(folder, records, row, keys, value):
    for key in keys:
        line = json.dumps({**json.loads(records[row]), key: value})
        check_command("simulate", [*records[:row], line, *records[row + 1 :]], folder)
