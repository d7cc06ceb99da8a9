"""Which module of a PyTorch or TensorPlay model made the first Inf or NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from itertools import chain

from gradscaler.diagnose._gradients.module_hooks import Located, Module, ModuleHooks, framework_of

is_locating = ContextVar("is_locating", default=False)
"""Whether a closure of :func:`locate` runs, whose losses belong to no step."""


def locate(model: Module, closure: Callable[[], object]) -> Located | None:
    """Run a closure, and find the module that makes the first Inf or NaN.

    That is the first in the order of execution whose output is not finite although its inputs
    are. If there is none, it is the first in the backward pass whose input's or parameter's
    gradient is not finite although its output's is. Of nested modules it is the innermost. A
    scripted module counts as part of the module that holds it. -inf counts as finite where it may
    be an attention mask: as an input, and as an output of a module without parameters of its own.

    The model's gradients and buffers, and the framework's random state, are left as they were.

    Args:
        model: a module of PyTorch or TensorPlay.
        closure: computes the loss, and its gradients too if the backward pass should be checked.
            Use the loss scale that overflows: ``scaler.scale(loss).backward()``.

    Returns:
        None if everything is finite, or if the first Inf or NaN appears outside of all modules:
        before the model, in a loss function, in multiplying the loss by its scale.

    Raises:
        TypeError: ``model`` is not such a module.
        ValueError: the model has lazy modules that were not called yet. The closure would change
            them permanently.
    """
    hooks = ModuleHooks(model, backward=True)
    is_lazy = getattr(getattr(framework_of(model).nn, "parameter", None), "is_lazy", None)
    if is_lazy and any(map(is_lazy, chain(model.parameters(), model.buffers()))):
        raise ValueError("model has lazy modules: call it once before, so that they get a shape")
    context = copy_context()  # an interrupt leaves nothing set in the caller's
    context.run(is_locating.set, True)
    with _left_as_it_was(model):
        try:
            hooks.start()
            context.run(closure)
        finally:
            hooks.stop()
    return hooks.located


@contextmanager
def _left_as_it_was(model: Module) -> Iterator[None]:
    """Clear the gradients; afterwards put back gradients, buffers and the random state."""
    framework = framework_of(model)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
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
