"""What all tests of the diagnosis use."""

import pytest


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"
