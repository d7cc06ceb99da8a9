"""Fixtures of all tests of the diagnosis."""

import gc
import sys

import pytest

from tests.support.watched import is_watched


@pytest.fixture(autouse=True)
def no_time_passes(monkeypatch):
    """Stop the clock: no step is watched because time is left for it."""
    for clock in ("clock", "processor_clock"):
        monkeypatch.setattr(f"gradscaler.diagnose._graph.budget.{clock}", lambda: 0.0)


@pytest.fixture(autouse=True)
def each_warning_is_given():
    """PyTorch gives some warnings once in a process; each is an error, also in code of ours."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


@pytest.fixture(autouse=True)
def no_watch_is_left():
    """A monitor that a test did not close may watch, or keep tracebacks, until it is collected."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and (torch.is_anomaly_enabled() or is_watched()):
        gc.collect()
