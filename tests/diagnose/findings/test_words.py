"""Each text of a finding speaks the words of its framework alone, and names what is there."""

import ast
import re
from pathlib import Path

import pytest

from gradscaler.diagnose import _findings, _operations
from gradscaler.diagnose._findings import judge
from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._findings.frameworks import framework_named
from gradscaler.diagnose._findings.words import PHRASES, text_for
from gradscaler.diagnose._record.events import Events

PATHS = [
    *Path(_findings.__file__).parent.glob("*.py"),
    *Path(_operations.__file__).parent.glob("repairs.py"),
]
# Words of PyTorch that a framework lacks. In Keras, a model has a zero_grad() of its own.
OF_TORCH = (
    r"torch\b|(?<!self\.)zero_grad|\.float\(\)|\bautocast\(|autocast\b|requires_grad_\(|\bnn\.Module|"
    r"set_stance|use_reentrant|load_state_dict"
)
OF_TENSORS = (
    r"|detach\(\)|\.item\(\)|\.data\b|no_grad|\.backward\(\)|optimizer\.step\(\)|model\.train\(\)"
)
# And functions' names and parameters of PyTorch that a repair may name.
OF_FUNCTIONS = r"|logsigmoid|\(binary_cross_|zero_infinity|correction=|\(eps="
FOREIGN = {
    "tensorplay": r"\btorch\.",
    "paddle": OF_TORCH.replace(r"autocast\b|", ""),
    "jax": OF_TORCH + OF_TENSORS + OF_FUNCTIONS + "|masked_fill",
    "keras": OF_TORCH + OF_TENSORS + OF_FUNCTIONS + "|masked_fill|init_scale",
    "tf_keras": OF_TORCH + OF_TENSORS + OF_FUNCTIONS + "|masked_fill|init_scale",
    "mindspore": OF_TORCH + OF_TENSORS,
}
# What a detector compares with, and texts that are the only ones of another framework.
NOT_SAID = {"torch", "keras on torch", "autocast"}


def texts(path):
    """The texts of a file, those in f-strings as one, with what is computed left out."""
    tree = ast.parse(path.read_text())
    silent = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            silent |= {id(part) for part in node.values}
            yield "".join(p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from [] if id(node) in silent else [node.value]


TEXTS = sorted({t for path in PATHS if path.stem != "words" for t in texts(path)} - NOT_SAID)


@pytest.mark.parametrize("framework", FOREIGN)
def test_no_text_has_words_of_another_framework(framework):
    assert len(TEXTS) > 300
    foreign = re.compile(FOREIGN[framework])
    found = {text: text_for(framework, text) for text in TEXTS}
    assert not [said for said in found.values() if foreign.search(said)]


def test_pytorch_keeps_its_words():
    assert all(text_for("torch", text) == text for text in TEXTS)


def test_each_phrase_is_in_a_text():
    assert {len(others) for others in PHRASES.values()} == {5}
    assert not [phrase for phrase in PHRASES if not any(phrase in text for text in TEXTS)]


def test_a_verdict_has_the_words_of_the_run_s_framework():
    events = Events().after({"unzeroed": 39})
    found = Evidence(40, 0, events=events, framework=framework_named("paddle", {}))
    assert "optimizer.clear_grad() after each step" in judge(found).text
