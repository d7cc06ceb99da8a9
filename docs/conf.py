"""How Sphinx builds the site from these pages and from the docstrings: ``make docs``."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import tomllib  # sorted by ruff as a package, because Python 3.10's standard library lacks it
from docutils import nodes
from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).parents[1]

project = "gradscaler"
author = "the gradscaler authors"
copyright = author  # noqa: A001 # Sphinx' name
version = release = re.findall(
    r'^__version__ = "(.+)"',
    (ROOT / "src/gradscaler/__init__.py").read_text(),
    re.MULTILINE,
)[0]

extensions = [
    "myst_nb",  # myst_parser, and the notebooks
    "autoapi.extension",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
html_theme = "furo"
html_title = f"gradscaler {release}"
html_theme_options = {"source_branch": "main", "source_directory": "docs/"}
addresses = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get(
    "urls", {}
)
if "Source" in addresses:
    html_theme_options["source_repository"] = addresses["Source"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]
# A test compares the outputs in the notebooks with those of today.
nb_execution_mode = "off"
suppress_warnings = [
    "autoapi.python_import_resolution"
]  # the frameworks are not installed here

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

# The docstrings are read without importing the modules, so no framework is needed.
autoapi_dirs = [str(ROOT / "src")]
autoapi_root = "reference"
autoapi_options = [
    "members",
    "inherited-members",
    "imported-members",
    "show-module-summary",
    "show-inheritance",
]
autoapi_python_class_content = "class"
autoapi_member_order = "groupwise"
autoapi_add_toctree_entry = False
autoapi_keep_files = False
toc_object_entries_show_parents = (
    "hide"  # a class's name would be before each method's
)
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = (
    True  # attributes beside properties would be documented twice
)

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


FIRST = {
    "GradScaler",
    "LossScaleOptimizer",
}  # on the page of each module that has it
# The frameworks' names in signatures and bases, which are linked without their inventories, because
# those are on the network.
TORCH = "https://docs.pytorch.org/docs/stable"
PADDLE = "https://www.paddlepaddle.org.cn/documentation/docs/en/api/paddle"
MINDSPORE = "https://www.mindspore.cn/docs/en/master/api_python"
KERAS = "https://keras.io/api/optimizers"
KERAS_2 = "https://keras.io/2/api/mixed_precision/loss_scale_optimizer"
TENSORFLOW = "https://www.tensorflow.org/api_docs/python/tf"
ELSEWHERE = {
    "torch.Tensor": f"{TORCH}/tensors.html",
    "torch.amp.GradScaler": f"{TORCH}/amp.html#gradient-scaling",
    "torch.device": f"{TORCH}/tensor_attributes.html",
    "torch.dtype": f"{TORCH}/tensor_attributes.html",
    "torch.nn.Module": f"{TORCH}/generated/torch.nn.Module.html",
    "torch.optim.Optimizer": f"{TORCH}/optim.html",
    "paddle.Tensor": f"{PADDLE}/Tensor_en.html",
    "paddle.amp.GradScaler": f"{PADDLE}/amp/GradScaler_en.html",
    "keras.optimizers.LossScaleOptimizer": f"{KERAS}/loss_scale_optimizer/",
    "keras.optimizers.Optimizer": f"{KERAS}/",
    "jax.Array": "https://docs.jax.dev/en/latest/_autosummary/jax.Array.html",
    "optax.GradientTransformationExtraArgs": "https://optax.readthedocs.io/en/latest/api/transformations.html",
    "tensorflow.GradientTape": f"{TENSORFLOW}/GradientTape",
    "tensorflow.Variable": f"{TENSORFLOW}/Variable",
    "mindspore.Model": f"{MINDSPORE}/train/mindspore.train.Model.html",
    "mindspore.Parameter": f"{MINDSPORE}/mindspore/mindspore.Parameter.html",
    "mindspore.Tensor": f"{MINDSPORE}/mindspore/mindspore.Tensor.html",
}


def address_of(name: str) -> str | None:
    """The page of a framework's documentation that describes a name."""
    if name.startswith("tf_keras."):
        return KERAS_2
    if found := re.match(r"mindspore\.(amp|nn)\.", name):
        return f"{MINDSPORE}/{found[1]}/{name}.html"
    return ELSEWHERE.get(name)


def skip(
    app: Any, what: str, name: str, node: Any, skipped: bool, options: Any
) -> bool:
    """Leave out private names and bases, and modules that users do not import."""
    if what in ("module", "package"):
        node.children.sort(key=lambda child: child.name not in FIRST)
        return name not in MODULES
    if what == "class":
        node.bases[:] = [each for each in node.bases if "._" not in f".{each}"]
    return bool(skipped)


def refer(app: Any, env: Any, node: Any, shown: Any) -> Any:
    """Link a framework's object to its documentation, and shorten a private name in a signature."""
    name = node.get("reftarget", "")
    if address := address_of(name):
        return nodes.reference("", "", shown, refuri=address, internal=False)
    if not name.startswith(("gradscaler.policies.", "gradscaler._")):
        return None
    short = name.rpartition(".")[2]
    public = env.domains["py"].objects.get(f"gradscaler.{short}")
    if not public:
        return nodes.Text(short)
    place = public.docname, public.node_id
    return make_refnode(app.builder, node["refdoc"], *place, nodes.Text(short))


def add_reports(app: Any, page: str, source: list[str]) -> None:
    """Make the reports of the gallery with PyTorch, which is not installed here, and list them."""
    if page == "gallery":
        python = ROOT / ".venv/torch/bin/python"
        printed = subprocess.check_output(
            [python, "docs/gallery.py", Path(app.outdir, "gallery")],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": "src", "OMP_NUM_THREADS": "1"},
            text=True,
        )
        source[0] += f"\n{printed}"


CELL = re.compile(
    r"(?<=<t[dh]).*?(?=</t[dh]>)|(?<=<h1>).*?(?=</h1>)", re.DOTALL
)
TEXT = re.compile(r"(?<=>)[^<]+")


def may_break(html: str) -> str:
    """Let names break behind their dots and brackets, and long ones behind underscores.

    A browser would break them anywhere, or make a column as wide as a name.
    """

    def parts(text: re.Match[str]) -> str:
        broken = re.sub(
            r"(?<=[a-z)])([.(\[/=]+)(?=[A-Za-z])", r"\1<wbr>", text[0]
        )
        return re.sub(
            r"\w{24,}", lambda name: name[0].replace("_", "_<wbr>"), broken
        )

    return TEXT.sub(parts, html)


def break_names(
    app: Any, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Let names break in tables, in the title, and in those of the pages before and after."""
    context["body"] = CELL.sub(
        lambda cell: may_break(cell[0]), context.get("body", "")
    )
    for neighbour in filter(None, (context.get("prev"), context.get("next"))):
        neighbour["title"] = may_break(f">{neighbour['title']}")[1:]


def setup(app: Any) -> None:
    """Register what lists reports, breaks names, and chooses and links parts of the reference."""
    app.connect("html-page-context", break_names)
    app.connect("source-read", add_reports)
    app.connect("autoapi-skip-member", skip)
    app.connect("missing-reference", refer)
