"""What all conformance tests share."""

import sys

import pytest

collect_ignore_glob = ["on_*.py"]  # only that of the framework that is installed can be imported


@pytest.fixture(autouse=True)
def _mindspore_waits_for_each_operation():
    """The traces have thousands of tiny operations, and its waiting threads take processor time."""
    mindspore = sys.modules.get("mindspore")
    if mindspore is None:
        yield
        return
    mindspore.set_context(pynative_synchronize=True)
    yield
    mindspore.set_context(pynative_synchronize=False)
