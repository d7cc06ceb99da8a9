"""What the texts of findings name is there in the framework that GRADSCALER_FRAMEWORK names."""

import importlib
import os
import re

import pytest

from gradscaler.diagnose._findings.words import PHRASES, text_for

FRAMEWORK = os.environ.get("GRADSCALER_FRAMEWORK", "numpy")
# The names that texts begin with, and the module of each.
ROOTS = {
    "torch": {"torch": "torch", "nn": "torch.nn"},
    "tensorplay": {"tensorplay": "tensorplay"},
    "paddle": {"paddle": "paddle"},
    "jax": {"jax": "jax", "jnp": "jax.numpy", "optax": "optax", "gradscaler": "gradscaler"},
    "keras": {"keras": "keras"},
    "tf_keras": {"tf": "tensorflow", "tf_keras": "tf_keras"},
    "mindspore": {"mindspore": "mindspore", "ops": "mindspore.ops"},
}.get(FRAMEWORK, {})
NAMES = sorted(
    {
        match[0]
        for phrase in PHRASES
        for match in re.finditer(
            rf"(?<![\w.])({'|'.join(ROOTS) or 'none'})(\.[A-Za-z]\w*)+", text_for(FRAMEWORK, phrase)
        )
    }
)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_a_text_is_there(name):
    root, *rest = name.split(".")
    found = importlib.import_module(ROOTS[root])
    for count, each in enumerate(rest):
        if not hasattr(found, each):
            importlib.import_module(".".join([ROOTS[root], *rest[: count + 1]]))
        found = getattr(found, each)
