"""Fixtures of all tests of the monitor."""

import math

import pytest

# Its time between two lines is replaced.
from gradscaler.diagnose._monitor import step_log
from tests.support.ranks import ranks

__all__ = ["ranks"]


@pytest.fixture(autouse=True)
def no_line_is_due(monkeypatch):
    """The lines of a file do not depend on how fast a test is."""
    monkeypatch.setattr(step_log, "_LONGEST_UNWRITTEN", math.inf)


@pytest.fixture
def nothing_was_compiled(monkeypatch):
    """As if no test before had compiled anything in this process."""
    import torch._dynamo.utils

    monkeypatch.delitem(torch._dynamo.utils.counters, "frames", raising=False)
