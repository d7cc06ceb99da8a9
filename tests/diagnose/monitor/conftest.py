"""What all tests of the monitor use."""

import gc
import sys

import pytest


@pytest.fixture(autouse=True)
def no_watch_is_left():
    """A monitor that a test did not close may watch until it is collected."""
    yield
    dispatch = sys.modules.get("torch.utils._python_dispatch")
    if dispatch is not None and dispatch.is_in_torch_dispatch_mode():
        gc.collect()
