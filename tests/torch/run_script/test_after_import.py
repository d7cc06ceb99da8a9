"""A call once a module was imported, whoever imports it and however often it is looked for."""

import importlib
import importlib.util
import sys

import pytest

# The launcher's parts are not public.
from gradscaler._run_script.after_import import after_import


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module that can be imported once by its name."""
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        (tmp_path / "awaited.py").write_text(text)
        importlib.invalidate_caches()
        return "awaited"

    yield write
    sys.modules.pop("awaited", None)


def test_the_call_comes_after_the_module_and_once(module):
    name = module("value = 1")
    seen = []
    after_import(name, lambda: seen.append(sys.modules[name].value))
    assert importlib.util.find_spec(name) is not None
    assert importlib.util.find_spec("nothing_of_this_name") is None
    assert seen == []
    imported = importlib.import_module(name)
    importlib.reload(imported)
    assert seen == [1]
    assert "exec_module" not in vars(imported.__loader__)


def test_an_import_that_fails_is_awaited_again(module):
    name = module("raise ImportError")
    seen = []
    after_import(name, lambda: seen.append(name))
    with pytest.raises(ImportError):
        importlib.import_module(name)
    assert seen == []
    module("value = 22")
    importlib.import_module(name)
    assert seen == [name]


def test_a_module_that_is_there_is_not_awaited():
    seen = []
    after_import("sys", lambda: seen.append(1))
    assert seen == [1]
