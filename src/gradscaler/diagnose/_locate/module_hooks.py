"""Calls of the modules of a PyTorch model, which show the first Inf or NaN; names of modules."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from traceback import walk_stack
from typing import Any

from gradscaler.diagnose._gradients.reading import Tensor, floating, largest, largest_of
from gradscaler.diagnose._graph import module_calls
from gradscaler.diagnose._graph.call_site import users_line
from gradscaler.diagnose._graph.site import Site, located_at
from gradscaler.diagnose._record.located import Located

Module = Any


class ModuleHooks:
    """Finds the first module of a model of PyTorch whose output is not finite.

    Between ``start()`` and ``stop()``, every input and output of every module is read once, which
    waits for the device. An error in that never stops the training. The modules have no hooks, as
    one may be saved, copied or scripted.

    Attributes:
        located: the first module that made an Inf or a NaN since ``start()``, or None.
        model: the model.
        see_output: called with each tensor that a module returns, and the module's name and type.
        may_continue: called at each call of a module; returns whether to read that call.

    Args:
        model: the model.

    Raises:
        TypeError: ``model`` is not a module.
    """

    def __init__(self, model: Module) -> None:
        self.located: Located | None = None
        self._framework = framework_of(model)
        self.model = model
        self.see_output: Callable[[Tensor, str, str], None] | None = None
        self.may_continue: Callable[[], bool] | None = None
        self._inputs: defaultdict[str, list[float]] = defaultdict(list)  # the largest of each call
        self._names: dict[int, str] = {}  # of the modules, by their ids

    def start(self) -> None:
        """Begin to read."""
        self.stop()
        self.located = None
        scripted = self._framework.jit.ScriptModule
        named = modules_of(self.model)
        self._names = {id(m): name for name, m in named if not isinstance(m, scripted)}
        module_calls.listen(self)

    def stop(self) -> None:
        """Read no more."""
        module_calls.ignore(self)
        self._inputs.clear()

    def enter_module(self, module: Module, *inputs: object) -> bool:
        """Read the inputs of a module."""
        is_own = id(module) in self._names
        if is_own:
            self._enter(self._names[id(module)], module, *inputs)
        return is_own

    def leave_module(self, module: Module, outputs: object) -> None:
        """Read the outputs of a module."""
        self._leave(self._names[id(module)], module, outputs)

    def end_module(self) -> None:
        """Nothing to do."""

    @property
    def is_evaluating(self) -> bool:
        """Whether the model is being evaluated."""
        return not (self.model.training or self._framework.is_grad_enabled())

    def _enter(self, name: str, _: Module, *inputs: object) -> None:
        is_seen = self.may_continue() if self.may_continue is not None else not self.is_evaluating
        if is_seen and not self.located:
            # The input is read now, as the module may change it in place.
            self._inputs[name].append(self._largest(inputs))

    def _leave(self, name: str, module: Module, output: object) -> None:
        outputs = list(floating(self._framework.Tensor, output))
        for tensor in outputs:
            if self.see_output is not None:
                self.see_output(tensor, name, type(module).__name__)
        if self.located or not self._inputs[name]:
            return
        largest_input = self._inputs[name].pop()
        own = list(own_parameters_of(module))
        bad = (t for t in outputs if not math.isfinite(largest(t, masks=not own)))
        if math.isfinite(largest_input) and (tensor := next(bad, None)) is not None:
            frames = ((frame.f_code.co_filename, number) for frame, number in walk_stack(None))
            site = Site(None, users_line(frames), name, type(module).__name__)
            given = (key for key, each in own if not math.isfinite(largest(each)))
            parameter = next(given, None)
            self.located = located_at(site, "forward", tensor, largest_input, parameter=parameter)

    def _largest(self, value: object) -> float:
        """The largest magnitude in a structure; -inf does not count."""
        tensors = floating(self._framework.Tensor, value)
        return largest_of(largest(tensor, masks=True) for tensor in tensors)


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
