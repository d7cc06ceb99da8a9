"""Locate the first Inf or NaN in a model of PyTorch, TensorPlay or Paddle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from itertools import chain

from gradscaler.diagnose._graph.search import Search
from gradscaler.diagnose._locate.module_hooks import (
    Module,
    ModuleHooks,
    buffers_of,
    framework_of,
    modules_of,
)
from gradscaler.diagnose._record.located import Located

is_locating = ContextVar("is_locating", default=False)
"""Whether a closure of :func:`locate` is running. Its losses belong to no step."""


def locate(model: Module, closure: Callable[[], object]) -> Located | None:
    """Run a closure, and locate the operation or module that makes its first Inf or NaN.

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

    In TensorPlay and Paddle, the result is a module, with the line that called it. It is the
    innermost module with the first output that is not finite. The backward pass is not checked.
    -inf counts as finite in inputs, and in outputs of modules without parameters of their own. For
    JAX, see :func:`locate_jax`.

    The model's gradients and buffers, and the framework's random state, are left as they were.

    Args:
        model: a module of PyTorch or TensorPlay, or a layer of Paddle.
        closure: a function that computes the loss. To check the backward pass too, it also calls
            ``scaler.scale(loss).backward()``, with the loss scale that overflows. Without a
            backward pass, the function returns its result, such as the loss.

    Returns:
        The first Inf or NaN and its place. None if no Inf or NaN reaches a result or a gradient, or
        if only the multiplication of the loss by its scale overflows. In TensorPlay and Paddle,
        also None if it is made outside of all modules.

    Raises:
        TypeError: ``model`` is not a module of these frameworks.
        ValueError: the model has lazy modules that were not called yet. The closure would change
            them permanently.
    """
    framework = framework_of(model)
    is_torch = framework.__name__ == "torch"
    is_lazy = framework.nn.parameter.is_lazy if is_torch else lambda _: False
    if any(map(is_lazy, chain(model.parameters(), model.buffers()))):
        raise ValueError("model has lazy modules: call it once before, so that they get a shape")
    context = copy_context()  # so an interrupt cannot leave it set in the caller's context
    context.run(is_locating.set, True)
    search = Search(model) if is_torch else ModuleHooks(model, reads_evaluation=True)
    with _left_as_it_was(model):
        try:
            search.start()
            results = context.run(closure)
            if isinstance(search, Search):
                search.end_in(results)
        finally:
            search.stop()
    return search.located


@contextmanager
def _left_as_it_was(model: Module) -> Iterator[None]:
    """Clear the gradients; afterwards restore gradients, buffers and the random state."""
    framework = framework_of(model)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for _, module in modules_of(model)
        for name, buffer in buffers_of(module)
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
