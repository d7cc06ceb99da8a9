"""The diagnosis reads the public names of other packages, and not their private ones."""

import ast
from pathlib import Path

import pytest

from gradscaler import diagnose

PACKAGE = Path(diagnose.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
ALLOWED = {
    "_fields",  # of a named tuple, documented in spite of their underscores
    "_replace",
    "_param_groups",  # Paddle has no public names for these three
    "_parameter_list",
    "_get_tensor_from_selected_rows",
    "_get_current_function_mode",  # without these, leaving ours might leave the user's
    "_get_current_function_mode_stack",
    "_pop_mode",
    "_C",  # of DisableTorchFunction, in PyTorch's documents of how to extend it
    "_push_mode",
    "_GLOBAL_DEVICE_CONTEXT",  # the mode of the default device, below which PyTorch wants none
    "_DummyThread",  # documented in threading, by what it does and not by its name
    "_current_frames",  # documented in sys, in spite of its underscore
    "_version",  # PyTorch's count of changes in place, which has no public name
    "_backward_hooks",  # of its tensors, of which no public name tells whether there are any
    "_sequence_nr",  # of PyTorch's nodes, documented with its profiler
    "_input_metadata",  # the dtype and the shape of a node's result, which have no public name
    "_saved_exponent",  # these are tensors and numbers that a node keeps, documented by this form
    "_saved_other",
    "_base",  # of a view in PyTorch, which its documents of views name
    "_grad_node",  # of a tensor in MindSpore, which has no public name for it
    "_unique_id",  # of its nodes
    "_pynative_executor",  # MindSpore's, whose methods begin and end each pass
    "_KERNEL_SEED",  # its seeds of random operations, of which the public state has no word
    "_C_ops",  # the operations of Paddle, which its own custom operators are found by
    "_register_post_hook",  # of its nodes, which have no public hook that sees what they make
    "_is_initialized",  # of its gradients
    "_autograd",  # TensorPlay's functions that run a backward pass
    "_raw_ptr",  # of its nodes: two objects may be one node
    "_schema",  # of PyTorch's operators, in its documents of custom operators
    "_foreach_norm",  # one pass over many tensors, as in PyTorch's own clipping
    "_id",  # the number of a tensor or a handle in TensorFlow, which no other gets
    "_gradient_function",  # TensorFlow's function whose frame holds the operation of a gradient
    "_TRANSPILER",  # TensorFlow's AutoGraph, which keeps the lines of what it converted in there
    "_cache",
    "_rng",  # TensorFlow's generator of operations' seeds, and the seed; both have a setter alone
    "_seed",
    "_value",  # of a variable in Keras, which `fit` empties on JAX
    "_flatten_layers",  # of a layer in Keras, of whose layers it has no public list
    "_trainable_variables",  # of an optimizer in Keras, to whose gradients JAX gives no names
    "_symbolic_build",  # of a model in Keras, which builds it for a batch as `fit` does
    "_iterations",  # of an optimizer in Keras: the public count leaves out steps that only add
    "_steps_per_execution",  # of a model in tf_keras
    "_random_generator",  # of a layer in tf_keras, which draws from it
    "_generator",  # of that
    "_num_yielded",  # the batches that an iterator of PyTorch's DataLoader has given
    "_checks",  # modules of ours that every package uses
    "_atomic",
    "_in_memory",
    "_notebook",
}


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def foreign_private_names(code):
    """The private names that code reads from an object but does not define itself."""
    own, read = set(), set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Attribute):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (own if of_self else read).add(node.attr)
        elif isinstance(node, ast.ImportFrom) and "diagnose" not in node.module:
            read.update([*node.module.split("."), *(alias.name for alias in node.names)])
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("attr"):
            read.update(a.value for a in node.args[1:2] if isinstance(a, ast.Constant))
    return {name for name in read - own - ALLOWED if is_private(name)}


@pytest.mark.parametrize("module", MODULES)
def test_no_private_name_of_another_package_is_read(module):
    assert foreign_private_names((PACKAGE / module).read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("scaler._records", {"_records"}),
        ("self.scaler._records.pop()", {"_records"}),
        ("getattr(scaler, '_policy', None)", {"_policy"}),
        ("from gradscaler._eager.scaler import _check_retries", {"_eager", "_check_retries"}),
        ("self._model = model", set()),
        ("class Found:\n    def _doubt(self): ...\nfound._doubt()", set()),
        ("step._replace(scale=1.0).__class__", set()),
    ],
)
def test_a_private_name_would_be_noticed(code, found):
    assert foreign_private_names(code) == found
