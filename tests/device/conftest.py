"""Tests on a device that is not the CPU. They run in a process of their own: it stays loaded."""

import pytest

from tests.support import device


@pytest.fixture(scope="session", autouse=True)
def _loaded():
    if not device.is_possible():
        pytest.skip("the device of the tests is compiled, which needs g++")
    device.load()
