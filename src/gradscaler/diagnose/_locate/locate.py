"""Locate the first Inf or NaN in a model of any framework."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from copy import deepcopy
from itertools import chain
from typing import Any, Protocol

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.search import Search
from gradscaler.diagnose._locate.jaxpr import locate_closure
from gradscaler.diagnose._locate.module_hooks import (
    Module,
    buffers_of,
    framework_of,
    modules_of,
    own_parameters_of,
)
from gradscaler.diagnose._record.located import Located
from gradscaler.diagnose._seams import keras as of_keras
from gradscaler.diagnose._seams import mindspore as on_mindspore
from gradscaler.diagnose._seams.eager import EagerSeam
from gradscaler.diagnose._seams.judge import Owned
from gradscaler.diagnose._seams.paddle import PaddleSeam
from gradscaler.diagnose._seams.tensorflow import TensorFlowSeam
from gradscaler.diagnose._seams.tensorplay import TensorPlaySeam

is_locating = ContextVar("is_locating", default=False)
"""Whether a closure of :func:`locate` is running. Its losses belong to no step."""


def locate(model: Module, closure: Callable[[], object]) -> Located | None:
    """Run a closure, and locate the operation that makes its first Inf or NaN.

    In PyTorch, the result is an operation, inside a module or outside all of them, with the user's
    line. It is the first function of PyTorch whose output is not finite although its inputs are,
    and whose Inf or NaN reaches the loss or another result. If there is none, the backward pass is
    searched. There, the result is the first operation whose input has a gradient that is not finite
    although its outputs' gradients are, and whose Inf or NaN reaches the gradient of a leaf. Its
    line is then that of the forward pass. An Inf or NaN that ``where`` or a softmax leaves out does
    no harm. Neither does -inf, unless it becomes +Inf or NaN.

    Autocast, checkpoints and in-place operations are supported. Compiled modules run eagerly. Of
    operations in other threads, as in ``DataParallel``, those that record a graph are seen. A sum
    of finite gradients that overflows is not found.

    In TensorPlay, Paddle and MindSpore, the result is an operation, in both passes, as in PyTorch.
    An operation is named as the function that the user called, such as a norm. TensorPlay and
    Paddle show the operations of the thread that calls ``locate``. In MindSpore, what is compiled,
    in graph mode or by ``mindspore.jit``, runs operation by operation meanwhile, in all threads.

    In Keras 3 and in tf_keras, the result is an operation, too. On TensorFlow, what ``tf.function``
    compiled runs eagerly meanwhile, in all threads; operations of other threads are not seen. On
    JAX, the closure is traced, so it must not depend on values. On PyTorch, no layer is named but
    that of a parameter. For JAX without Keras, see :func:`locate_jax`.

    The model's gradients, buffers and variables, and the framework's random state, are left as they
    were. In MindSpore, ``nn.Dropout`` draws from another state meanwhile, as nobody can read its
    own. The state of a random operation of TensorFlow with a seed of its own moves on.

    Args:
        model: a module of PyTorch or TensorPlay, a layer of Paddle, a cell of MindSpore, or a model
            of Keras 3 or tf_keras.
        closure: a function that computes the loss. To check the backward pass too, it also calls
            ``scaler.scale(loss).backward()``, with the loss scale that overflows; a tape's
            ``gradient`` in TensorFlow; or what ``value_and_grad`` returns in MindSpore and JAX,
            whose result it returns. Without a backward pass, the function returns its result, such
            as the loss.

    Returns:
        The first Inf or NaN and its place. None if no Inf or NaN reaches a result or a gradient, or
        if only the multiplication of the loss by its scale overflows.

    Raises:
        TypeError: ``model`` is not a module of these frameworks.
        ValueError: the model has lazy modules that were not called yet, or, in Keras, no variables.
            The closure would change them permanently.
    """
    is_keras = of_keras.is_keras(model)
    if is_keras and not model.built:
        raise ValueError("model has no variables yet: call it once before, so that it gets them")
    context = copy_context()  # so an interrupt cannot leave it set in the caller's context
    context.run(is_locating.set, True)
    with of_keras.left_as_it_was(model) if is_keras else nullcontext():
        if is_keras and of_keras.backend_of(model) == "jax":
            layers, parameters = of_keras.layers_of(model), of_keras.parameters_of(model)
            return context.run(locate_closure, closure, layers, parameters)
        seam, left_as_it_was = _seam_of(model)
        with left_as_it_was:
            return context.run(locate_in, seam, closure)


class Seam(Protocol):
    """The operations of one step in a framework, and where an Inf or NaN of them began."""

    @property
    def located(self) -> Located | None:
        """The first Inf or NaN that reached a result or a gradient; None if none did."""

    def start(self) -> None:
        """Begin to see operations."""

    def stop(self) -> None:
        """See no more, and leave the framework as it was."""

    def end_in(self, results: object) -> None:
        """Note the results of a step."""


def locate_in(seam: Seam, closure: Callable[[], object]) -> Located | None:
    """Run a closure, and locate its first Inf or NaN by what shows its operations."""
    try:
        seam.start()
        seam.end_in(closure())
    finally:
        seam.stop()
    return seam.located


def _seam_of(model: Module) -> tuple[Seam, AbstractContextManager[None]]:
    """The seam of a model's framework, and what leaves the model as it was."""
    mindspore: Any = sys.modules.get("mindspore")
    if mindspore is not None and isinstance(model, mindspore.nn.Cell):
        return on_mindspore.Seam(model), on_mindspore.left_as_it_was(model)
    if of_keras.is_keras(model):
        layers, parameters = of_keras.layers_of(model), of_keras.parameters_of(model)
        if of_keras.backend_of(model) == "tensorflow":
            return TensorFlowSeam(layers, parameters), nullcontext()
        owned = [(each.tensor, each.module, each.name) for each in parameters]
        return Search(model, modules=layers, owned=owned), _left_as_it_was(model)
    framework = framework_of(model)
    if framework.__name__ != "torch":
        return seam_of(model), _left_as_it_was(model)
    if any(map(framework.nn.parameter.is_lazy, chain(model.parameters(), model.buffers()))):
        raise ValueError("model has lazy modules: call it once before, so that they get a shape")
    return Search(model), _left_as_it_was(model)


def seam_of(model: Module) -> EagerSeam:
    """What shows the operations of a model of TensorPlay or Paddle."""
    modules = dict(modules_of(model))
    parameters = (
        Owned(tensor, name, type(module).__name__, own)
        for name, module in modules.items()
        for own, tensor in chain(own_parameters_of(module), module.named_buffers())
        if "." not in own
    )
    return seam_named(framework_of(model).__name__, modules, parameters)


def seam_named(
    framework: str, modules: Mapping[str, Module] | None = None, parameters: Iterable[Owned] = ()
) -> EagerSeam:
    """What shows the operations of TensorPlay or Paddle, and of these modules."""
    kind = {"paddle": PaddleSeam, "tensorplay": TensorPlaySeam}[framework]
    return kind(modules or {}, parameters)


@contextmanager
def _left_as_it_was(model: Module) -> Iterator[None]:
    """Clear the gradients; afterwards restore gradients, buffers and the random state."""
    framework = framework_of(model)
    gradients = [(parameter, _kept(parameter.grad)) for parameter in model.parameters()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for _, module in modules_of(model)
        for name, buffer in buffers_of(module)
        if getattr(buffer, "_is_initialized", lambda: True)()  # as those of an LSTM of Paddle
    ]
    state = framework.get_rng_state()
    cuda = framework.cuda if framework.cuda.is_available() else None
    on_devices = cuda.get_rng_state_all() if cuda else None
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for parameter, grad in gradients:
            parameter.grad = grad
        with framework.no_grad():
            for module, name, buffer, value in buffers:
                buffer.copy_(value)
                setattr(module, name, buffer)
        framework.set_rng_state(state)
        if cuda:
            cuda.set_rng_state_all(on_devices)


def _kept(gradient: Tensor | None) -> Tensor | None:
    """A gradient that is kept: Paddle empties the tensor of one that is set to None."""
    return deepcopy(gradient) if hasattr(gradient, "is_selected_rows") else gradient
