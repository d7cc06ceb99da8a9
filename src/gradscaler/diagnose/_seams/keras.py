"""The models of Keras 3 and of tf_keras: their layers, their parameters and their state."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from gradscaler.diagnose._seams.judge import Owned

Model = Any
Layer = Any
Variable = Any


def is_keras(model: object) -> bool:
    """Whether an object is a model or a layer of Keras 3 or of tf_keras."""
    packages = (sys.modules.get(name) for name in ("keras", "tf_keras"))
    found = (getattr(getattr(each, "layers", None), "Layer", ()) for each in packages)
    return any(isinstance(model, each) for each in found)


def package_of(model: Model) -> str:
    """The package of a model: ``"keras"``, which is Keras 3, or ``"tf_keras"``."""
    keras: Any = sys.modules.get("keras")
    is_new = keras is not None and hasattr(keras, "Variable")
    return "keras" if is_new and isinstance(model, keras.layers.Layer) else "tf_keras"


def backend_of(model: Model) -> str:
    """The backend of a model: ``"tensorflow"``, ``"jax"``, ``"torch"``, or another of Keras 3."""
    is_new = package_of(model) == "keras"
    return str(sys.modules["keras"].backend.backend()) if is_new else "tensorflow"


def layers_of(model: Model) -> dict[str, Layer]:
    """A model and its layers, by their names: one in another is named ``"block.dense"``."""
    found = {"": model}
    waiting = [("", model)]
    while waiting:
        prefix, layer = waiting.pop(0)
        for inner in layer._flatten_layers(include_self=False, recursive=False):
            name = f"{prefix}{inner.name}"
            if all(inner is not each for each in found.values()):
                found.setdefault(name, inner)
                waiting.append((f"{name}.", inner))
    return found


def parameters_of(model: Model) -> list[Owned]:
    """The variables of a model, trained or not, and the layers that own them."""
    found = {}
    for name, layer in layers_of(model).items():  # the inner ones last: those own it
        for variable in layer.weights:
            own = variable.name.partition(":")[0].rpartition("/")[2]
            found[id(variable)] = Owned(_value(variable), name, type(layer).__name__, own)
    return list(found.values())


@contextmanager
def left_as_it_was(model: Model) -> Iterator[None]:
    """Afterwards, restore the variables of a model and of its optimizer, seeds among them."""
    before = [(each, _copy(each)) for each in _variables_of(model)]
    known = {id(variable) for variable, _ in before}
    seeds = [(each, each._seed) for each in _generators_of(model)]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)
        for metric in getattr(model, "metrics", ()):  # the first step makes some of its metrics
            if not known.issuperset(map(id, metric.variables)):
                metric.reset_state()
        for generator, seed in seeds:
            generator._seed = seed


def _variables_of(model: Model) -> list[Variable]:
    """The variables that a step may change."""
    optimizer = getattr(model, "optimizer", None)
    own = getattr(optimizer, "variables", ())
    found = [*model.variables, *(own() if callable(own) and not isinstance(own, list) else own)]
    for metric in getattr(model, "metrics", ()):
        found += metric.variables
    found += [
        each._generator.state for each in _generators_of(model) if each._generator is not None
    ]
    found += _of_all_models()
    return list({id(each): each for each in found}.values())


def _of_all_models() -> list[Variable]:
    """The states of the random numbers that have no layer."""
    found = []
    with suppress(Exception):
        state = import_module("keras.src.backend.common.global_state")
        generator = state.get_global_attribute("global_seed_generator")
        found += [] if generator is None else [generator.state]
    tensorflow = sys.modules.get("tensorflow.python.ops.stateful_random_ops")
    generator = getattr(tensorflow, "global_generator", None)
    return found + ([] if generator is None else [generator.state])


def _generators_of(model: Model) -> list[Any]:
    """The generators of random numbers in the layers of tf_keras."""
    found = (getattr(each, "_random_generator", None) for each in layers_of(model).values())
    return [each for each in found if hasattr(each, "_generator")]


def _copy(variable: Variable) -> Any:
    """The value of a variable, which a step does not change."""
    value = _value(variable)
    if hasattr(value, "detach"):  # PyTorch's
        return value.detach().clone()
    return value.read_value() if hasattr(value, "read_value") else value


def _value(variable: Variable) -> Any:
    """What a variable of Keras 3 holds: an array of JAX, or a variable of the backend."""
    return (
        variable._value if hasattr(variable, "_value") and hasattr(variable, "path") else variable
    )
