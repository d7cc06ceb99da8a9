"""The counts on docs/scale.md are those of the code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "scale.md").read_text()

pytestmark = pytest.mark.rare(
    "tests/torch/distributed counts collectives; more calls for a tensor change no result"
)


@pytest.fixture(scope="module")
def counted():
    """The command's output for a small world, with the counts of two real processes."""
    command = [sys.executable, "benchmarks/scale.py", "--processes", "8", "--ranks", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [*command, "--tensors", "30"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(text, heading):
    """The rows of the table that begins with a heading, as lists of cells."""
    _, _, rest = text.partition(heading)
    table = rest.split("\n\n")[0].splitlines()[2:]
    assert table, heading
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table]


def test_collectives_and_bytes_are_those_of_the_page_in_a_world_of_any_size(counted):
    heading = "| Layout | Collectives"
    assert rows(counted, heading) == rows(PAGE, heading)


def test_operations_and_memory_traffic_are_those_of_the_page(counted):
    def exact(text):
        return [
            (name, operations, moved)
            for name, operations, *_, moved in rows(text, "| Layout, scaler")
        ]

    assert exact(counted) == exact(PAGE)


def test_python_calls_for_a_tensor_are_not_more_than_on_the_page(counted):
    """Versions of Python and PyTorch count a few more or fewer."""

    def each(text):
        calls = [(row[0], row[2]) for row in rows(text, "| Layout, scaler") if "ours" in row[0]]
        return {name: float(re.search(r"([\d.]+) T", cell)[1]) for name, cell in calls}

    stated = each(PAGE)
    assert all(value <= 1.2 * stated[name] for name, value in each(counted).items())


def test_two_real_processes_count_what_was_predicted(counted):
    ((processes, tensors, steps, *_, differ),) = rows(counted, "| Processes | Tensors | Steps")
    assert (processes, tensors, differ) == ("2", "30", "0")
    assert int(steps) > 10
