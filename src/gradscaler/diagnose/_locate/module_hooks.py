"""Hooks on the modules of a PyTorch, TensorPlay or Paddle model that find the first Inf or NaN."""

from __future__ import annotations

import math
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from traceback import walk_stack
from types import SimpleNamespace
from typing import Any

from gradscaler.diagnose._gradients.arrays import dtype_name
from gradscaler.diagnose._gradients.reading import floating, largest, largest_of
from gradscaler.diagnose._locate.call_site import users_line
from gradscaler.diagnose._locate.located import Located, Site, located_at

Module = Any
Tensor = Any


class ModuleHooks:
    """Hooks on every module of a model: :func:`locate` for a training that runs anyway.

    Between ``start()`` and ``stop()``, every input and output of every module is read once, which
    waits for the device. ``backward`` checks backward passes too. Without, an error in a hook never
    ends a training.

    Attributes:
        located: the first module that made an Inf or a NaN since ``start()``, or None.
        dtypes: the dtype of each module's output, by the module's name, in the order in which
            they ended; of its first call, and of the first tensor in it.
        model: the model.
        see_output: is given each tensor that a module returns, and the module's name and type.
        goes_on: is asked at each call of a module whether to see it.

    Raises:
        TypeError: ``model`` is not a module of PyTorch or TensorPlay, or a layer of Paddle.
    """

    def __init__(self, model: Module, backward: bool = False) -> None:
        self.located: Located | None = None
        self._framework = framework_of(model)
        self.model = model
        self.see_output: Callable[[Tensor, str, str], None] | None = None
        self.goes_on: Callable[[], bool] | None = None
        self.dtypes: dict[str, str] = {}
        self._backward = backward
        self._handles: list[Any] = []
        weakref.finalize(self, remove_all, self._handles).atexit = False
        self._calls: defaultdict[str, list[_Call]] = defaultdict(list)  # those that run

    def start(self) -> None:
        """Add the hooks, all or none."""
        self.stop()
        self.located = None
        self.dtypes.clear()
        enter, leave = weakly(self._enter), weakly(self._leave)
        if not self._backward:
            enter, leave = quiet(enter), quiet(leave)
        try:
            add_hooks(self._handles, self._framework, self.model, leave, enter)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Remove the hooks."""
        remove_all(self._handles)
        self._calls.clear()

    @property
    def is_evaluating(self) -> bool:
        """Whether this is no training, which a monitor may meet between two steps."""
        is_training = self.model.training or self._framework.is_grad_enabled()
        return not (is_training or self._backward)

    def _enter(self, name: str, module: Module, *inputs: Any) -> Any:
        if (self.goes_on is not None and not self.goes_on()) or self.located:
            return None
        call = _Call(self._largest(inputs))  # read now: a module may change its input in place
        self._calls[name].append(call)
        if not self._backward:
            return None
        # A tensor's gradient is the sum of what all its uses contribute; an alias has one use.
        aliases: dict[int, Tensor] = {}

        def aliased(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: aliased(item) for key, item in value.items()}
            if isinstance(value, tuple) and not hasattr(value, "_fields"):
                return tuple(map(aliased, value))
            if not isinstance(value, self._framework.Tensor) or not value.requires_grad:
                return value
            if not self._framework.is_grad_enabled() or value.is_sparse:
                return value
            if id(value) not in aliases:
                alias = aliases[id(value)] = value.view_as(value)
                hook = partial(self._input_gradient, name, module, call)
                self._handles.append(alias.register_hook(hook))
            return aliases[id(value)]

        return aliased(inputs)

    def _leave(self, name: str, module: Module, args: Any, *kwargs_and_output: Any) -> None:
        *kwargs, output = kwargs_and_output
        outputs = list(floating(self._framework.Tensor, output))
        for tensor in outputs:
            self.dtypes.setdefault(name, dtype_name(tensor))
            if self.see_output is not None:
                self.see_output(tensor, name, type(module).__name__)
        if self.located or not self._calls[name]:
            return
        call = self._calls[name].pop()
        # Of all modules' hooks, PyTorch gives kwargs only to this one.
        call.input = largest_of([call.input, self._largest(kwargs)])
        own = list(own_parameters_of(module))
        for tensor in outputs if math.isfinite(call.input) else ():
            if not math.isfinite(largest(tensor, masks=not own)):
                bad = (key for key, parameter in own if not math.isfinite(largest(parameter)))
                frames = ((frame.f_code.co_filename, number) for frame, number in walk_stack(None))
                line = users_line(frames, self._framework)
                site = Site(None, line, name, type(module).__name__)
                parameter = next(bad, None)
                self.located = located_at(site, "forward", tensor, call.input, parameter=parameter)
                return
            if self._backward and tensor.requires_grad:
                self._handles.append(tensor.register_hook(call.see_gradient))

    def _largest(self, value: Any) -> float:
        """The largest magnitude in a structure, in which -inf does not count."""
        tensors = floating(self._framework.Tensor, value)
        return largest_of(largest(tensor, masks=True) for tensor in tensors)

    def _input_gradient(self, name: str, module: Module, call: _Call, grad: Tensor) -> None:
        if self.located or call.gradient is None or not math.isfinite(call.gradient):
            return
        if not math.isfinite(largest(grad)):
            site = Site(module=name, type=type(module).__name__)
            self.located = located_at(site, "backward", grad, call.gradient)


@dataclass
class _Call:
    """One call of a module."""

    input: float  # the largest magnitude that went in
    gradient: float | None = None  # the largest of its outputs' gradients, once there are any

    def see_gradient(self, grad: Tensor) -> None:
        self.gradient = largest_of([self.gradient or 0.0, largest(grad)])


class Hook:
    """A hook of modules that have names, which their copies and pickles do not have.

    In its place they have a function of the standard library that takes anything and does nothing.
    """

    def __init__(self, function: Callable[..., Any], names: dict[Module, str]) -> None:
        self._function = function
        self._names = names

    def __call__(self, module: Module, *args: Any) -> Any:
        name = self._names.get(module)
        return None if name is None else self._function(name, module, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


def add_hooks(
    handles: list[Any],
    framework: Any,
    model: Module,
    leave: Callable[..., Any],
    enter: Callable[..., Any] | None = None,
) -> None:
    """Call functions with the name of each module of a model when it is entered and left.

    PyTorch has hooks of all modules that there are. With these, a model has no hook of its own, and
    is saved, copied and scripted as ever. They are not for compiled modules, which warn of them.

    Args:
        handles: gets the handle of each hook.
        framework: the model's.
        model: whose modules, but for scripted ones.
        leave: called with the name, the module, its arguments, and its output last.
        enter: called with the name, the module and its arguments; TensorPlay's it may replace.
    """
    scripted: Any = getattr(getattr(framework, "jit", None), "ScriptModule", ())
    names = {module: name for name, module in modules_of(model) if not isinstance(module, scripted)}
    is_compiling = "torch._dynamo" in sys.modules
    if framework.__name__ != "torch" or is_compiling:
        disable = framework.compiler.disable if is_compiling else lambda hook: hook
        for module in names:
            handles.append(module.register_forward_hook(Hook(disable(leave), names)))
            if enter is not None:
                hook = Hook(disable(enter), names)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return
    every = framework.nn.modules.module
    handle = every.register_module_forward_hook(Hook(leave, names), with_kwargs=True)
    # PyTorch 2.13 notes that the hook takes kwargs, and its handle does not take that back.
    with_kwargs = getattr(every, "_global_forward_hooks_with_kwargs", {})
    handles += handle, SimpleNamespace(remove=partial(with_kwargs.pop, handle.id, None))
    if enter is not None:
        handles.append(every.register_module_forward_pre_hook(Hook(enter, names)))


def quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose errors never end a training."""

    def call(*args: Any) -> Any:
        with suppress(Exception):
            return function(*args)

    return call


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that does not keep its object alive, and does nothing once that is gone."""
    own = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = own()
        return None if bound is None else bound(*args)

    return call


def remove_all(handles: list[Any]) -> None:
    """Remove the hooks of handles, and forget them."""
    for handle in handles:
        handle.remove()
    handles.clear()


def framework_of(model: Module) -> Any:
    """The framework that a model is a module of."""
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
    """A module's own buffers; Paddle makes some, such as a running mean, untrained parameters."""
    yield from module.named_buffers(**_only_own(module))
    if hasattr(module, "named_sublayers"):
        yield from ((name, p) for name, p in own_parameters_of(module) if p.stop_gradient)


def _only_own(module: Module) -> dict[str, bool]:
    return {"include_sublayers" if hasattr(module, "named_sublayers") else "recurse": False}
