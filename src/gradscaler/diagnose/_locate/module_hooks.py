"""Hooks on the modules of a PyTorch, TensorPlay or Paddle model that find the first Inf or NaN."""

from __future__ import annotations

import math
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from traceback import walk_stack
from typing import Any

from gradscaler.diagnose._gradients.arrays import dtype_name
from gradscaler.diagnose._gradients.reading import Tensor, floating, largest, largest_of
from gradscaler.diagnose._graph.call_site import users_line
from gradscaler.diagnose._graph.hooks import Handle, remove_all, weakly
from gradscaler.diagnose._graph.site import Site, located_at
from gradscaler.diagnose._record.located import Located

Module = Any


class ModuleHooks:
    """Hooks on every module of a model that find the first whose output is not finite.

    Between ``start()`` and ``stop()``, the hooks read every input and output of every module once,
    which waits for the device. An error in a hook never stops the training.

    Attributes:
        located: the first module that made an Inf or a NaN since ``start()``, or None.
        dtypes: the dtype of the first tensor that each module returned, by the module's name, in
            the order in which the modules returned.
        model: the model.
        see_output: called with each tensor that a module returns, and the module's name and type.
        may_continue: called at each call of a module; returns whether to read that call.

    Args:
        model: the model.
        reads_evaluation: whether to read evaluation too: passes without gradients of a model that
            is not in training mode. A monitor does not, as it may still watch between two steps.

    Raises:
        TypeError: ``model`` is not a module of PyTorch or TensorPlay, or a layer of Paddle.
    """

    def __init__(self, model: Module, reads_evaluation: bool = False) -> None:
        self.located: Located | None = None
        self._framework = framework_of(model)
        self.model = model
        self.see_output: Callable[[Tensor, str, str], None] | None = None
        self.may_continue: Callable[[], bool] | None = None
        self.dtypes: dict[str, str] = {}
        self._reads_evaluation = reads_evaluation
        self._handles: list[Handle] = []
        weakref.finalize(self, remove_all, self._handles).atexit = False
        self._inputs: defaultdict[str, list[float]] = defaultdict(list)  # the largest of each call

    def start(self) -> None:
        """Add all hooks, or none if adding one fails."""
        self.stop()
        self.located = None
        self.dtypes.clear()
        try:
            enter, leave = weakly(self._enter), weakly(self._leave)
            add_hooks(self._handles, self._framework, self.model, leave, enter)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Remove the hooks."""
        remove_all(self._handles)
        self._inputs.clear()

    @property
    def is_evaluating(self) -> bool:
        """Whether the model is being evaluated and ``reads_evaluation`` is False."""
        is_training = self.model.training or self._framework.is_grad_enabled()
        return not (is_training or self._reads_evaluation)

    def _enter(self, name: str, _: Module, *inputs: object) -> None:
        is_seen = self.may_continue() if self.may_continue is not None else not self.is_evaluating
        if is_seen and not self.located:
            # The input is read now, as the module may change it in place.
            self._inputs[name].append(self._largest(inputs))

    def _leave(self, name: str, module: Module, _: object, output: object) -> None:
        outputs = list(floating(self._framework.Tensor, output))
        for tensor in outputs:
            self.dtypes.setdefault(name, dtype_name(tensor))
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


class Hook:
    """A hook that knows its module's name; copies and pickles of the module leave it out.

    They hold a function of the standard library in its place, which takes any arguments and does
    nothing.
    """

    def __init__(self, function: Callable[..., object], name: str) -> None:
        self._function = function
        self._name = name

    def __call__(self, module: Module, *args: object) -> None:
        self._function(self._name, module, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


def add_hooks(
    handles: list[Handle],
    framework: Any,
    model: Module,
    leave: Callable[..., None],
    enter: Callable[..., None] | None = None,
) -> None:
    """Hook the modules of a model, so that entering and leaving one calls a function.

    Args:
        handles: the list to which the handle of each hook is added.
        framework: the framework of the model.
        model: the model. Its scripted modules get no hooks.
        leave: called with the name, the module, its positional arguments, and its output.
        enter: called with the name, the module, and its arguments of both kinds.
    """
    scripted: Any = getattr(getattr(framework, "jit", None), "ScriptModule", ())
    is_compiling = "torch._dynamo" in sys.modules and framework.__name__ == "torch"
    disable = framework.compiler.disable if is_compiling else lambda function: function
    for name, module in modules_of(model):
        if isinstance(module, scripted):
            continue
        handles.append(module.register_forward_hook(Hook(disable(leave), name)))
        if enter is not None:
            hook = Hook(disable(enter), name)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))


def framework_of(model: Module) -> Any:
    """The framework whose module a model is."""
    for name, base in (("torch", "Module"), ("tensorplay", "Module"), ("paddle", "Layer")):
        framework = sys.modules.get(name)
        if framework is not None and isinstance(model, getattr(framework.nn, base)):
            return framework
    what = "a Module of PyTorch or TensorPlay, or a Layer of Paddle"
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
