"""What all conformance tests share."""

import os
import sys

import pytest

from tests.support.chosen import cover_values

collect_ignore_glob = ["on_*.py"]  # only that of the framework that is installed can be imported


def pytest_collection_modifyitems(items):
    """These compile for each mode or trace, and their own tests compare them with the host, too."""
    if os.environ["GRADSCALER_FRAMEWORK"] in ("mindspore", "keras", "tf_keras", "jax"):
        cover_values(items, __file__)


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
