"""Hooks on the modules of a PyTorch or TensorPlay model that find the first Inf or NaN."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from gradscaler.diagnose._gradients.arrays import dtype_name, local, to_numpy
from gradscaler.diagnose._gradients.nonfinite import count_nonfinite

Module = Any
Tensor = Any


@dataclass(frozen=True)
class Located:
    """Where the first Inf or NaN was made out of finite numbers.

    Attributes:
        module: the module's name in the model; empty if that is the model itself, None if it
            happened outside of all modules, as in a loss function.
        kind: ``"forward"`` if an output is not finite; ``"backward"`` if the gradient of an input
            or of a parameter is not; ``"input"`` if nothing made it: a batch, or another tensor
            that is not a parameter of the model, held it before.
        type: the name of the module's class; empty outside of all modules.
        dtype: of the output, the gradient or the tensor, such as ``"float16"``.
        num_inf: how many of its elements are Inf, of either sign.
        num_nan: how many are NaN.
        size: how many elements there are.
        largest_finite: the largest magnitude of the rest; NaN if there is no rest.
        largest_input: the largest finite magnitude that went in: in a forward pass, of its inputs;
            in a backward pass, of its outputs' gradients.
        parameter: in a forward pass, the name within the module of a parameter that is itself not
            finite; in a backward pass, of the parameter whose gradient this is; else None.
        operation: the operation that made it, such as ``"exp"``; in a backward pass, the operation
            of the forward pass whose gradient this is; for an ``"input"``, the first that read it.
            None if it is not known, or if a parameter is itself not finite.
        line: the line that called the operation in the forward pass, such as ``"train.py:12"``:
            the innermost that is neither the framework's nor gradscaler's. None if it is not known.
    """

    module: str | None
    kind: Literal["forward", "backward", "input"]
    type: str
    dtype: str
    num_inf: int
    num_nan: int
    size: int
    largest_finite: float
    largest_input: float
    parameter: str | None = None
    operation: str | None = None
    line: str | None = None

    def __str__(self) -> str:
        counts = {"inf": self.num_inf, "nan": self.num_nan}
        found = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        backward = self.kind == "backward"
        of = f", gradient of {self.parameter}" if backward and self.parameter else ""
        bad = f"; its {self.parameter} is not finite" if not backward and self.parameter else ""
        in_ = f", {self.operation}" if self.operation else ""
        at = f" at {self.line}" if self.line else ""
        where = f"{self.module or 'the model'} ({self.type}, {self.dtype})"
        if self.module is None:
            where = f"a function ({self.dtype})"
        return (
            f"{self.kind} of {where}{of}{in_}{at}: {found} "
            f"of {self.size}; largest {'gradient' if backward else 'input'} "
            f"{self.largest_input:g}{bad}"
        )


class ModuleHooks:
    """Hooks on every module of a model: :func:`locate` for a training that runs anyway.

    Between ``start()`` and ``stop()``, every input and output of every module is read once, which
    waits for the device. ``backward`` checks backward passes too. Without, an error in a hook never
    ends a training.

    Attributes:
        located: the first module that made an Inf or a NaN since ``start()``, or None.

    Raises:
        TypeError: ``model`` is not a module of PyTorch or TensorPlay.
    """

    def __init__(self, model: Module, backward: bool = False) -> None:
        self.located: Located | None = None
        self._framework = framework_of(model)
        self._model = model
        self._backward = backward
        self._handles: list[Any] = []
        self._entered: defaultdict[str, list[_Call]] = defaultdict(list)
        self._calls: defaultdict[str, list[_Call]] = defaultdict(list)

    def start(self) -> None:
        """Add the hooks, all or none."""
        self.stop()
        self.located = None
        jit = getattr(self._framework, "jit", None)
        compiled: Any = getattr(jit, "ScriptModule", ())  # these take no such hooks
        try:
            for name, module in self._model.named_modules():
                if isinstance(module, compiled):
                    continue
                enter = self._hook(partial(self._enter, name))
                leave = self._hook(partial(self._leave, name))
                self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                self._handles.append(module.register_forward_hook(leave))
            for parameter in self._model.parameters() if self._backward else ():
                if parameter.requires_grad:
                    hook = partial(self._parameter_gradient, parameter)
                    self._handles.append(parameter.register_hook(hook))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._entered.clear()
        self._calls.clear()

    def _hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The same hook, not compiled, with its errors suppressed unless backward is checked."""

        def quiet(*args: Any) -> Any:
            with suppress(Exception):
                return hook(*args)

        safe = hook if self._backward else quiet
        if "torch._dynamo" in sys.modules:  # else nothing is compiled
            safe = self._framework.compiler.disable(safe)
        return safe

    def _enter(
        self, name: str, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.located:
            return None
        # Read now: a module may change its input in place.
        inputs = [_largest(tensor, masks=True) for tensor in self._tensors((args, kwargs))]
        call = _Call(_largest_of(inputs))
        self._entered[name].append(call)
        if not self._backward:
            return None
        self._calls[name].append(call)
        # A tensor's gradient is the sum of what all its uses contribute; an alias has one use.
        aliases: dict[int, Tensor] = {}

        def aliased(value: Any) -> Any:
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
                call.nodes.append(alias.grad_fn)
            return aliases[id(value)]

        return aliased(args), {key: aliased(value) for key, value in kwargs.items()}

    def _leave(self, name: str, module: Module, args: tuple[Any, ...], output: Any) -> None:
        if self.located or not self._entered[name]:
            return
        call = self._entered[name].pop()
        masks = next(module.parameters(recurse=False), None) is None
        for tensor in self._tensors(output):
            if math.isfinite(call.input) and not math.isfinite(_largest(tensor, masks)):
                self._found("forward", name, module, tensor, call.input, _nonfinite_of(module))
                return
            if self._backward and tensor.requires_grad:
                if any(tensor.grad_fn is node for node in call.nodes):
                    call.gradient = math.nan  # the output is an input: their gradients are one
                else:
                    self._handles.append(tensor.register_hook(call.see_gradient))
        call.nodes.clear()

    def _input_gradient(self, name: str, module: Module, call: _Call, grad: Tensor) -> None:
        if self.located or call.gradient is None or not math.isfinite(call.gradient):
            return
        if not math.isfinite(_largest(grad)):
            self._found("backward", name, module, grad, call.gradient)

    def _parameter_gradient(self, parameter: Tensor, grad: Tensor) -> None:
        if self.located or math.isfinite(_largest(grad)):
            return
        users = [  # several modules may share it
            (name, module, key)
            for name, module in self._model.named_modules()
            for key, own in module.named_parameters(recurse=False)
            if own is parameter and self._calls[name]
        ]
        calls = [call for name, _, _ in users for call in self._calls[name]]
        gradients = [call.gradient for call in calls if call.gradient is not None]
        if gradients and all(map(math.isfinite, gradients)):
            name, module, key = users[0]
            self._found("backward", name, module, grad, max(gradients), key)

    def _found(
        self,
        kind: Literal["forward", "backward"],
        name: str,
        module: Module,
        tensor: Tensor,
        largest_input: float,
        parameter: str | None = None,
    ) -> None:
        values = to_numpy(tensor)
        num_inf, num_nan, largest = count_nonfinite(values)
        self.located = Located(
            name,
            kind,
            type(module).__name__,
            dtype_name(tensor),
            num_inf,
            num_nan,
            values.size,
            largest,
            largest_input,
            parameter,
        )

    def _tensors(self, value: Any) -> Iterator[Tensor]:
        """The floating-point tensors in a structure."""
        if isinstance(value, self._framework.Tensor):
            if value.is_floating_point() or value.is_complex():
                yield value
            return
        if isinstance(value, Mapping):
            value = value.values()
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = vars(value).values()
        elif not isinstance(value, (list, tuple)):
            return
        for item in value:
            yield from self._tensors(item)


@dataclass
class _Call:
    """One call of a module."""

    input: float  # the largest magnitude that went in
    gradient: float | None = None  # the largest of its outputs' gradients, once there are any
    nodes: list[Any] = dataclasses.field(default_factory=list)  # of the graph of its inputs

    def see_gradient(self, grad: Tensor) -> None:
        self.gradient = _largest_of([self.gradient or 0.0, _largest(grad)])


def _largest(tensor: Tensor, masks: bool = False) -> float:
    """The largest magnitude; Inf or NaN if there is one. In masks -inf does not count."""
    tensor = local(tensor).detach()
    if not tensor.numel():
        return 0.0
    if dtype_name(tensor).startswith(("float8", "complex")) or tensor.is_sparse:
        largest = float(np.abs(to_numpy(tensor)).max(initial=0.0))
    else:
        largest = float(tensor.abs().max())
    if masks and largest == math.inf:
        values = to_numpy(tensor)
        return float(np.abs(values[values != -math.inf]).max(initial=0.0))
    return largest


def _largest_of(values: list[float]) -> float:
    """The largest value, 0 at least; NaN if there is one."""
    return float(np.max(values, initial=0.0))


def _nonfinite_of(module: Module) -> str | None:
    """The name of one of the module's own parameters that is not finite, or None."""
    own = module.named_parameters(recurse=False)
    return next((name for name, p in own if not math.isfinite(_largest(p))), None)


def framework_of(model: Module) -> Any:
    """The framework that a model is a module of."""
    for name in ("torch", "tensorplay"):
        framework = sys.modules.get(name)
        if framework is not None and isinstance(model, framework.nn.Module):
            return framework
    raise TypeError(f"model must be a Module of PyTorch or TensorPlay, got {type(model).__name__}")
