"""Fixtures for all tests."""

import gc
import os
import re
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.support import chosen, programs
from tests.support.ranks import seed_frameworks

ROOT = Path(__file__).parent.parent

# Scripts that tests run. To look for doctests in them would train at once, and choose a backend.
collect_ignore_glob = ["*/loops.py", "*/graph_loops.py"]

# A shell's background job ignores Ctrl-C, and so would the programs that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine may take its time. `make test` has the same examples each time, so that a change
# alone makes it fail, and `make test-all` has others.
settings.register_profile(
    "untimed",
    deadline=None,
    derandomize=not chosen.IS_ALL,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=100 if chosen.IS_ALL else 30,
)
settings.load_profile("untimed")
if "GRADSCALER_MUTANT" in os.environ:  # `make mutants` needs any failing example
    settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate])
    settings.load_profile("mutants")


def pytest_report_header():
    """The seed of what changes with the day, or that all cases run."""
    if chosen.IS_ALL:
        return "all cases"
    return f"GRADSCALER_SEED={chosen.SEED} chose the lines that are interrupted"


def pytest_configure(config):
    config.addinivalue_line("markers", "some(number, reason): in make test, so many cases run")


@pytest.hookimpl(trylast=True)  # after those that add marks
def pytest_collection_modifyitems(config, items):
    """Leave out what ``make test`` does not run, unless a test is asked for by its name."""
    if not any("::" in argument for argument in config.args):
        left_out = chosen.left_out(items)
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    """Leave what is imported by now out of the collections of garbage, which many tests ask for.

    PyTorch's compiler is imported in an optimizer's first step, and is most of it.
    """
    if "torch" in sys.modules:
        import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


KILLED_IN_ITS_SECOND_SAVE = """
import os, runpy, signal, sys

saves = 0


def fsync(descriptor):
    global saves
    saves += 1
    if saves == 2:
        os.kill(os.getpid(), signal.SIGKILL)


os.fsync = fsync
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(autouse=True)
def _each_test_starts_alike():
    """Tests may run in any order: seed all frameworks, and set MindSpore's default mode.

    A fixture of a whole module may have changed it.
    """
    seed_frameworks()
    if mindspore := sys.modules.get("mindspore"):
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)


@pytest.fixture
def own_random_numbers_and_one_thread(monkeypatch):
    """For trainings with PyTorch: one thread is enough for a small network beside other tests."""
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of a subprocess
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def killed_in_its_second_save(tmp_path):
    """Run an example in its own process and kill it just before its second save is on disk.

    The kill is real, so Python flushes no file and runs no exit handler. Its moment is fixed, so
    the test does not depend on how busy the machine is.
    """

    def run(script, *arguments):
        done = programs.run("-c", KILLED_IN_ITS_SECOND_SAVE, script, *arguments, cwd=tmp_path)
        assert done.returncode == -signal.SIGKILL, done.stderr

    return run


@pytest.fixture
def check_types(tmp_path):
    """Compare mypy's errors in a script with the comments that name them; allow no others."""

    def check(code):
        (tmp_path / "script.py").write_text(code)
        # The project's own cache and settings: without them mypy reads all of a framework again.
        cache = [
            "--cache-dir",
            os.environ.get("MYPY_CACHE_DIR", str(ROOT / ".mypy_cache")),
            "--config-file",
            str(ROOT / "pyproject.toml"),
        ]
        command = [sys.executable, "-m", "mypy", *cache, "script.py"]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        lines = enumerate(code.splitlines(), start=1)
        expected = {number: line.partition("  # ")[2] for number, line in lines if "  # " in line}
        errors = re.findall(r"script.py:(\d+): error: .*\[([a-z-]+)\]", result.stdout)
        assert {int(number): error for number, error in errors} == expected, result.stdout

    return check
