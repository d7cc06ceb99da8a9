import importlib.metadata
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import gradscaler
from gradscaler._frameworks import FRAMEWORKS, SCALERS, install_command, installed

FRAMEWORK = os.environ.get("GRADSCALER_FRAMEWORK", "torch")
LIBRARIES = {*FRAMEWORKS, "flax", "jaxlib", "jmp", "optax", "tensorflow"}

# A finder that comes first sees each import that is tried, those that fail too.
RECORD_IMPORTS = """
import json, sys

class Recorder:
    tried = []

    def find_spec(self, name, path=None, target=None):
        self.tried.append(name)

sys.meta_path.insert(0, Recorder())
import {module}
print(json.dumps(Recorder.tried))
"""


def roots_tried_by_importing(module):
    code = RECORD_IMPORTS.format(module=module)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return {name.partition(".")[0] for name in json.loads(result.stdout)}


@pytest.mark.parametrize(
    "module", ["gradscaler", "gradscaler.diagnose", "gradscaler.diagnose.simulate"]
)
def test_importing_it_imports_nothing_but_numpy_and_the_standard_library(module):
    tried = roots_tried_by_importing(module)
    assert not tried & LIBRARIES  # not even where it is missing, and not through NumPy
    beyond_numpy = tried - roots_tried_by_importing("numpy")
    assert beyond_numpy - sys.stdlib_module_names == {"gradscaler"}


def test_numpy_is_left_to_the_script_that_may_set_its_threads_first():
    assert "numpy" not in roots_tried_by_importing("gradscaler")


def test_every_public_name_is_there():
    assert [name for name in gradscaler.__all__ if not hasattr(gradscaler, name)] == []


@pytest.mark.parametrize("name", ["checkpoint", "diagnose", FRAMEWORK])
def test_a_submodule_is_there_without_an_import_of_its_own(name):
    code = f"import gradscaler; print(gradscaler.{name}.__name__)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split()[-1:] == [f"gradscaler.{name}"], result.stderr


def test_another_name_is_missing_as_from_any_module():
    with pytest.raises(AttributeError, match="module 'gradscaler' has no attribute 'nothing'"):
        _ = gradscaler.nothing


@pytest.mark.parametrize("name", SCALERS)
def test_a_class_of_an_adapter_is_missing_with_a_word_on_where_it_is(name):
    message = f"no attribute '{name}'; write gradscaler.{SCALERS[name][0]}.{name}"
    with pytest.raises(ImportError, match=message):
        exec(f"from gradscaler import {name}")
    with pytest.raises(AttributeError, match=message):
        getattr(gradscaler, name)
    assert not hasattr(gradscaler, name)
    assert name not in dir(gradscaler)


def test_without_frames_such_a_class_is_missing_all_the_same(monkeypatch):
    monkeypatch.setattr("inspect.currentframe", lambda: None)
    with pytest.raises(ImportError, match="cannot import name 'GradScaler'"):
        exec("from gradscaler import GradScaler")
    with pytest.raises(AttributeError, match=r"write gradscaler\.torch\.GradScaler"):
        _ = gradscaler.GradScaler


def test_the_classes_are_where_the_words_say():
    names = {name for name, adapters in SCALERS.items() if FRAMEWORK in adapters}
    assert names
    assert names <= set(import_module(f"gradscaler.{FRAMEWORK}").__all__)
    folders = {name: Path(gradscaler.__file__).parent / name for name in FRAMEWORKS}
    texts = {name: (folder / "__init__.py").read_text() for name, folder in folders.items()}
    for name, adapters in SCALERS.items():
        assert {place for place, text in texts.items() if f'"{name}"' in text} == set(adapters)


def test_the_demo_without_what_it_needs_says_what_to_install(monkeypatch):
    for package in ("torch", "sklearn"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            patch.delitem(sys.modules, "gradscaler.demo", raising=False)
            message = re.escape(f"demo needs {package}: {install_command('torch', 'demo')}")
            with pytest.raises(ModuleNotFoundError, match=message) as error:
                import_module("gradscaler.demo")
            assert error.value.name == package


def test_the_version_is_the_distribution_s():
    assert gradscaler.__version__ == importlib.metadata.version("gradscaler")


def test_an_adapter_without_its_framework_says_what_to_install():
    missing = next(name for name in FRAMEWORKS if name != FRAMEWORK and not installed(name))
    extra = missing.replace("_", "-")
    with pytest.raises(ModuleNotFoundError, match=re.escape(install_command(extra))) as error:
        import_module(f"gradscaler.{missing}")
    assert error.value.name == missing


def test_a_folder_of_a_framework_s_name_is_not_the_framework(tmp_path, monkeypatch):
    (tmp_path / "a_folder").mkdir()
    (tmp_path / "a_module.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert not installed("a_folder")
    assert installed("a_module")
    monkeypatch.setitem(sys.modules, "a_module", None)
    assert not installed("a_module")
