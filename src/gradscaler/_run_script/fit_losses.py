"""Mistakes in the loss that ``compile()`` was given, which its kind and its arguments show."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscaler._run_script.step_shapes import in_fit
from gradscaler.diagnose._gradients.arrays import to_numpy
from gradscaler.diagnose._graph.call_site import is_of_user, shown_line
from gradscaler.diagnose._locate.unnoticed import unnoticed
from gradscaler.diagnose._record.located import Located, Made
from gradscaler.diagnose._seams.keras import backend_of, package_of

Model = Any

# Losses that take logits with from_logits=True, else probabilities, and what makes these.
_MAKERS = {
    "categoricalcrossentropy": "softmax",
    "sparsecategoricalcrossentropy": "softmax",
    "categoricalfocalcrossentropy": "softmax",
    "binarycrossentropy": "sigmoid",
    "binaryfocalcrossentropy": "sigmoid",
}
_OF_OUTPUTS, _OF_LABELS = ("pred", "output", "logit"), ("true", "label", "target")


def swapped(model: Model) -> str:
    """What says that the user's loss takes the labels for predictions; empty if it does not."""
    loss = getattr(model, "loss", None)
    function: Any = loss if inspect.isfunction(loss) else getattr(loss, "fn", None)
    if function is None and loss is not None:
        function = getattr(type(loss), "call", None)
    if not inspect.isfunction(function) or not is_of_user(function):
        return ""
    names = [name for name in inspect.signature(function).parameters if name != "self"][:2]
    if len(names) < 2 or not (_is_of(names[0], _OF_OUTPUTS) and _is_of(names[1], _OF_LABELS)):
        return ""
    code = function.__code__
    at = shown_line(code.co_filename, code.co_firstlineno)
    return (
        f"Keras calls a loss with (y_true, y_pred), and {function.__name__} at {at} takes "
        f"({names[0]}, {names[1]}): {names[0]} is the labels. Exchange its arguments."
    )


def broadcast(model: Model, labels: tuple[int, ...] | None) -> str:
    """What says that a loss of the user's compares each output with each label; empty if not.

    Keras gives its own losses, and functions, outputs and labels of one shape. A class of the
    user's gets them as they are. It is called twice with four labels, which it should not tell
    apart from a column of four. On TensorFlow, the graph of the step shows it of any loss.
    """
    if where := next((in_fit.get(each, "") for each in model.trainable_variables), ""):
        return (
            f"The loss compares each output with each label of the batch, not with its own: {where}"
            ", by broadcasting. Unless all pairs are meant, give labels and outputs one shape."
        )
    loss = getattr(model, "loss", None)
    outputs = getattr(model, "outputs", None) or []
    shape = tuple(outputs[0].shape) if len(outputs) == 1 else ()
    package: Any = sys.modules[package_of(model)]
    if not isinstance(loss, package.losses.Loss) or not is_of_user(type(loss).call):
        return ""
    if package_of(model) != "keras" or labels is None or len(labels) != 1 or shape[1:] != (1,):
        return ""
    tensor, numpy_of = package.ops.convert_to_tensor, package.ops.convert_to_numpy
    row = np.array([0.1, 0.2, 0.6, 0.9], np.float32)
    made = tensor(np.array([[0.3], [0.8], [0.5], [0.7]], np.float32))
    with suppress(Exception), unnoticed():  # it may take nothing of these shapes
        losses = (loss.call(tensor(each), made) for each in (row, row[:, None]))
        as_row, as_column = (float(np.mean(numpy_of(each))) for each in losses)
        if np.isfinite([as_row, as_column]).all() and not np.isclose(as_row, as_column, rtol=1e-3):
            return (
                f"{type(loss).__name__} compares each output with each label of the batch, not "
                "with its own: outputs have the shape [n, 1], and labels [n]. Give it labels of "
                "the shape [n, 1], or take [:, 0] of the outputs in it."
            )
    return ""


def of_labels(model: Model, batch: Any, located: Located) -> str:
    """What says that a logarithm was taken of the labels of a batch; empty if it was not.

    Its inputs are those if the largest is the same, and as many are 0 as made it Inf.
    """
    is_made = isinstance(located, Made) and not located.module  # in no layer of the model
    if not (is_made and (located.operation or "").startswith("log")):
        return ""
    if text := swapped(model):
        return text
    _, labels, _ = sys.modules[package_of(model)].utils.unpack_x_y_sample_weight(batch)
    if not hasattr(labels, "shape"):
        return ""
    values = to_numpy(labels).astype(np.float32)
    num_zero, largest = int((values == 0).sum()), float(np.abs(values).max(initial=0))
    if num_zero != located.num_inf + located.num_nan or largest != located.largest_input:
        return ""
    return (
        "It is the logarithm of the labels: Keras calls a loss with (y_true, y_pred), so look at "
        "the order of its arguments, or clamp it to a small number if the logarithm of the labels "
        "is meant."
    )


def _is_of(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name.lower() for word in words)


def of_logits(model: Model) -> str:
    """What says that a loss takes probabilities for logits, or logits for probabilities."""
    loss, layer = getattr(model, "loss", None), _last_layer(model)
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    maker = _MAKERS.get(name.replace("_", "").lower())
    if maker is None or layer is None or (callable(loss) and not _is_of_keras(loss)):
        return ""
    settings = getattr(loss, "_fn_kwargs", {})
    made_by = _activation_of(layer)
    if settings.get("from_logits", False):
        # TensorFlow's backend takes what softmax or sigmoid were given, so nothing is lost.
        if made_by not in ("softmax", "sigmoid") or backend_of(model) == "tensorflow":
            return ""
        return (
            f"{name} takes logits (from_logits=True), and {layer.name} makes probabilities by "
            f"{made_by}: they are normalised once more, so the loss cannot come near 0. Leave out "
            "this activation, or from_logits=True."
        )
    is_dense = hasattr(layer, "units") or hasattr(layer, "filters")  # or a convolution
    if made_by != "linear" or not is_dense:
        return ""
    return (
        f"{name} takes probabilities, as from_logits is False, and {layer.name} makes logits, "
        "which it clips to 0 and 1: there, they have no gradient. Pass from_logits=True to the "
        f'loss, or activation="{maker}" to {layer.name}.'
    )


def of_one_output(model: Model) -> str:
    """What says that a model's last softmax is over one output; empty if it is not.

    A step of the user's may use what is before it.
    """
    layer = _last_layer(model)
    if layer is None or is_of_user(type(model).train_step):
        return ""
    is_last_axis = getattr(layer, "axis", -1) == -1
    if _activation_of(layer) != "softmax" or is_of_user(layer.call) or not is_last_axis:
        return ""
    size = getattr(layer, "units", 0)
    with suppress(Exception):  # it was not called yet, or in several places
        size = layer.output.shape[-1]
    if size != 1 or is_of_user(getattr(layer, "activation", layer.call)):
        return ""
    return (
        f"The softmax of {layer.name} is taken over one output, so it is 1 whatever the weights "
        "are, and passes no gradient: use a sigmoid (and binary_crossentropy), or one output for "
        "each class."
    )


def ends_in_relu(model: Model) -> bool:
    """Whether a ReLU makes the only output of a model."""
    layer = _last_layer(model)
    names = _activation_of(layer), type(layer).__name__.lower()
    return layer is not None and not {"relu", "relu6"}.isdisjoint(names)


def dead_output(model: Model, inputs: NDArray[Any] | None) -> str:
    """What says that a model's last ReLU gives 0 for all of some inputs; empty if it does not."""
    with suppress(Exception), unnoticed():  # code of the user's runs in it
        if inputs is not None and not to_numpy(model(inputs, training=False)).any():
            name = _last_layer(model).name
            return (
                f"No weight has changed: the ReLU of {name}, the last layer, gives 0 for all "
                "inputs that were looked at. It has a slope of 0 there, so that all gradients are "
                "0. Leave out the activation of the last layer, or begin with other weights."
            )
    return ""


def _is_of_keras(loss: Callable[..., Any]) -> bool:
    kind = loss if inspect.isfunction(loss) else type(loss)
    return kind.__module__.startswith(("keras.", "tf_keras."))


def _last_layer(model: Model) -> Any:
    """The layer that makes the only output of a model; None if it is not known."""
    package: Any = sys.modules[package_of(model)]
    while isinstance(model, package.Model):
        layers = getattr(model, "layers", [])
        if isinstance(model, package.Sequential):
            model = layers[-1] if layers else None
            continue
        outputs = getattr(model, "outputs", None) or []
        history = getattr(outputs[0], "_keras_history", None) if len(outputs) == 1 else None
        model = getattr(history, "operation", None) or getattr(history, "layer", None)
    return model


def _activation_of(layer: Any) -> str:
    """The name of what a layer applies last, as far as that is known."""
    if type(layer).__name__ in ("Softmax", "Sigmoid"):
        return type(layer).__name__.lower()
    return str(getattr(getattr(layer, "activation", None), "__name__", ""))
