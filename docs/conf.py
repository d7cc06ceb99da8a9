"""How Sphinx builds the site from these pages and from the docstrings: ``make docs``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import tomllib  # sorted by ruff as a package, because Python 3.10's standard library lacks it

ROOT = Path(__file__).parents[1]

project = "gradscaler"
author = "the gradscaler authors"
copyright = author  # noqa: A001 # Sphinx' name
version = release = re.findall(
    r'^__version__ = "(.+)"', (ROOT / "src/gradscaler/__init__.py").read_text(), re.MULTILINE
)[0]

extensions = [
    "myst_nb",  # myst_parser, and the notebooks
    "autoapi.extension",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = f"gradscaler {release}"
html_theme_options = {"source_branch": "main", "source_directory": "docs/"}
addresses = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
if "Source" in addresses:
    html_theme_options["source_repository"] = addresses["Source"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]
nb_execution_mode = "off"  # a test compares the outputs in the notebooks with those of today
suppress_warnings = ["autoapi.python_import_resolution"]  # the frameworks are not installed here

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

# The docstrings are read without importing the modules, so no framework is needed.
autoapi_dirs = [str(ROOT / "src")]
autoapi_root = "reference"
autoapi_options = ["members", "inherited-members", "imported-members", "show-module-summary"]
autoapi_python_class_content = "class"
autoapi_member_order = "groupwise"
autoapi_add_toctree_entry = False
autoapi_keep_files = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes beside properties would be documented twice

MODULES = {
    "gradscaler",
    "gradscaler.checkpoint",
    "gradscaler.diagnose",
    "gradscaler.diagnose.report",
    "gradscaler.diagnose.simulate",
    "gradscaler.jax",
    "gradscaler.keras",
    "gradscaler.mindspore",
    "gradscaler.paddle",
    "gradscaler.tensorplay",
    "gradscaler.tf_keras",
    "gradscaler.torch",
    "gradscaler.torch.deepspeed",
    "gradscaler.torch.megatron",
    "gradscaler.torch.sharded",
}


def skip(app: Any, what: str, name: str, node: Any, skipped: bool, options: Any) -> bool:
    """Leave out private names, and modules that users do not import."""
    if what in ("module", "package"):
        return name not in MODULES
    return bool(skipped)


def setup(app: Any) -> None:
    """Register ``skip``, which chooses the contents of the reference."""
    app.connect("autoapi-skip-member", skip)
