"""Fixtures of all tests of the monitor."""

import gc
import math
import sys

import pytest

# Its time between two lines is replaced.
from gradscaler.diagnose._monitor import step_log
from tests.support.ranks import ranks

__all__ = ["ranks"]


@pytest.fixture(autouse=True)
def no_line_is_due(monkeypatch):
    """The lines of a file do not depend on how fast a test is."""
    monkeypatch.setattr(step_log, "_LONGEST_UNWRITTEN", math.inf)


@pytest.fixture(autouse=True)
def no_watch_is_left():
    """A monitor that a test did not close may watch until it is collected."""
    yield
    dispatch = sys.modules.get("torch.utils._python_dispatch")
    if dispatch is not None and dispatch.is_in_torch_dispatch_mode():
        gc.collect()
