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
