"""What the modules of a PyTorch model return; and the modules of a model, by their names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from gradscaler.diagnose._gradients.reading import Tensor, floating
from gradscaler.diagnose._graph import module_calls

Module = Any


class ModuleHooks(module_calls.CallListener):
    """Gives what the modules of a model of PyTorch return, between ``start()`` and ``stop()``.

    The modules have no hooks, as one may be saved, copied or scripted.

    Attributes:
        model: the model.
        see_output: called with each tensor that a module returns, and the module's name.
        may_continue: called at each call of a module; returns whether to see it.

    Args:
        model: the model.

    Raises:
        TypeError: ``model`` is not a module.
    """

    def __init__(self, model: Module) -> None:
        self._framework = framework_of(model)
        self.model = model
        self.see_output: Callable[[Tensor, str], None] | None = None
        self.may_continue: Callable[[], bool] | None = None
        self._names: dict[int, str] = {}  # of the modules, by their ids

    def start(self) -> None:
        """Begin to see calls."""
        self.stop()
        scripted = self._framework.jit.ScriptModule
        named = modules_of(self.model)
        self._names = {id(m): name for name, m in named if not isinstance(m, scripted)}
        module_calls.listen(self)

    def stop(self) -> None:
        """See no more."""
        module_calls.ignore(self)

    def enter_module(self, module: Module, *_: object) -> bool:
        """Tell the end of the call of a module of the model."""
        return id(module) in self._names and (self.may_continue is None or self.may_continue())

    def leave_module(self, module: Module, outputs: object) -> None:
        """Give the outputs of a module."""
        for tensor in floating(self._framework.Tensor, outputs):
            if self.see_output is not None:
                self.see_output(tensor, self._names[id(module)])

    @property
    def is_evaluating(self) -> bool:
        """Whether the model is being evaluated."""
        return not (self.model.training or self._framework.is_grad_enabled())


def framework_of(model: Module) -> Any:
    """The framework whose module a model is."""
    for name, base in (("torch", "Module"), ("tensorplay", "Module"), ("paddle", "Layer")):
        framework = sys.modules.get(name)
        if framework is not None and isinstance(model, getattr(framework.nn, base)):
            return framework
    what = "a Module of PyTorch or TensorPlay, a Layer of Paddle, or a Cell of MindSpore"
    raise TypeError(f"model must be {what}, got {type(model).__name__}")


def modules_of(model: Module) -> Iterator[tuple[str, Module]]:
    """A model and all modules in it, with their names."""
    if hasattr(model, "named_sublayers"):  # Paddle's
        return model.named_sublayers(include_self=True)  # type: ignore[no-any-return]
    return model.named_modules()  # type: ignore[no-any-return]


def own_parameters_of(module: Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters, without those of the modules in it."""
    yield from module.named_parameters(**_only_own(module))


def buffers_of(module: Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own buffers; in Paddle, untrained parameters too, such as a running mean."""
    yield from module.named_buffers(**_only_own(module))
    if hasattr(module, "named_sublayers"):
        yield from ((name, p) for name, p in own_parameters_of(module) if p.stop_gradient)


def _only_own(module: Module) -> dict[str, bool]:
    return {"include_sublayers" if hasattr(module, "named_sublayers") else "recurse": False}
