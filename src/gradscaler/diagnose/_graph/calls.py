"""The calls of PyTorch's functions, which a mode of PyTorch sees."""

from __future__ import annotations

import inspect
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from types import FrameType
from typing import Any

from numpy.typing import NDArray

from gradscaler.diagnose._gradients.reading import (
    Reading,
    Tensor,
    counting,
    floating,
    nonfinite_numbers,
    read,
)
from gradscaler.diagnose._graph.call_site import called, operation_of
from gradscaler.diagnose._graph.nodes import kept
from gradscaler.diagnose._graph.site import exponent_in
from gradscaler.diagnose._graph.stand_ins import calling_for
from gradscaler.diagnose._operations.operation import Role
from gradscaler.diagnose._operations.rows import names_with

_IN_PLACE = re.compile(r"(?<!_)_$|^__i\w+__$|^__setitem__$")
_OVERWRITES = re.compile("^(copy|fill|normal|uniform|zero)_$")  # their first argument

_DIVIDES = names_with(Role.DIVIDES)
_UNSEEN = "__get__", "_foreach_"  # to get an attribute; what optimizers do to all parameters


class Call:
    """A call of a function of PyTorch.

    Attributes:
        name: the function's name in PyTorch.
        operation: the name that users know.
        args: its positional arguments.
        kwargs: its other arguments.
        outputs: the floating-point tensors that it makes or changes.
        counts: the tensors of integers and booleans that it makes.
        before: the readings of ``inputs`` before the call, if it may change one; else None.
        frame: the frame that called it.
    """

    def __init__(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
    ) -> None:
        self.name, self.frame = name, frame
        self.is_in_place = bool(_IN_PLACE.search(name))
        self.changes_inputs = self.is_in_place or "out" in kwargs
        self.args, self.kwargs = args, kwargs
        self.outputs: list[Tensor] = []
        self.counts: list[Tensor] = []
        self.before = list(map(read, self.inputs)) if self.changes_inputs else None

    def end(self, outputs: object) -> None:
        """Note what it returned."""
        from torch import Tensor

        made = self.args[:1] if self.is_in_place else outputs
        self.outputs = list(filter(_tells_its_node, floating(Tensor, made)))
        self.counts = list(counting(Tensor, made))

    @cached_property
    def inputs(self) -> list[Tensor]:
        """The floating-point tensors that it reads; most calls are never asked for them."""
        from torch import Tensor

        args = self.args[bool(_OVERWRITES.match(self.name)) :]
        given = [value for key, value in self.kwargs.items() if key != "out"]
        return list(filter(_tells_its_node, floating(Tensor, (args, given))))

    @cached_property
    def counts_read(self) -> list[Tensor]:
        """The tensors of integers and booleans that it reads."""
        from torch import Tensor

        return list(counting(Tensor, (self.args, list(self.kwargs.values()))))

    @property
    def numbers(self) -> list[NDArray[Any]]:
        """The numbers that it reads and that hold an Inf or NaN, as arrays of NumPy."""
        return nonfinite_numbers(self.args)

    @property
    def operation(self) -> str:
        """The name that users know."""
        return called(self.name)

    @property
    def _is_reversed(self) -> bool:
        """Whether it divides a number by its input, as ``1 / x``."""
        return self.name in ("__rdiv__", "__rtruediv__")

    @property
    def readings(self) -> list[Reading]:
        """The readings of its inputs before the call."""
        if self.before is None:
            self.before = list(map(read, self.inputs))
        return self.before

    @property
    def divisor(self) -> float | None:
        """The smallest magnitude of its divisor; None if it has none, or overwrote it."""
        node, name = self.outputs[0].grad_fn, self.operation
        if name in _DIVIDES:
            found = self.inputs[name == "div" and not self._is_reversed :][:1]
        else:  # a function that divides in the end
            is_div = node is not None and operation_of(node) == "div"
            found = [each for name, each in kept(node).items() if is_div and name == "other"]
        numbers = [each for each in self.args if isinstance(each, (int, float))]
        if name == "div" and not found and numbers:
            return abs(float(numbers[0]))
        if not found or any(found[0] is changed for changed in self.outputs):
            return None
        return float(found[0].detach().abs().min())

    @property
    def exponent(self) -> float | None:
        """The exponent of a power, if it is one number and not the input of ``2 ** x``."""
        operands = [*self.args, *self.kwargs.values()]
        return None if self.name == "__rpow__" else exponent_in(self.operation, operands)


def _tells_its_node(tensor: Tensor) -> bool:
    """Whether PyTorch tells the node that made a tensor.

    It raises an error for a view that was made in ``no_grad()`` and is written to outside of it.
    """
    try:
        tensor.grad_fn  # noqa: B018 # it is the question
    except RuntimeError:
        return False
    return True


class CallWatch:
    """Gives each call of a function of PyTorch to ``see``, between ``start()`` and ``stop()``.

    A mode of PyTorch sees the calls of the thread of ``start()``. What they return is not changed,
    and no error in ``see`` reaches them. Compiled code runs uncompiled meanwhile, by PyTorch's
    ``force_eager`` stance; else PyTorch would compile it again, with the mode in it.

    Modes are on a stack, and leaving one leaves the topmost. The user may enter and leave modes
    meanwhile, so this one is below those of the user, and is taken from there.

    Args:
        see: called with each call that returned.
        may_continue: called before each call; returns whether to see it.

    Attributes:
        mode: the mode.
        is_on: whether calls are seen.
    """

    def __init__(
        self, see: Callable[[Call], object], may_continue: Callable[[], bool] = lambda: True
    ) -> None:
        from torch.compiler import is_compiling
        from torch.overrides import TorchFunctionMode

        own, jit = weakref.ref(self), sys.modules["torch.jit"]

        class Mode(TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
            ) -> Any:
                # PyTorch compiles an operator such as cond, and the mode with it; and the graph of
                # a traced call would hold what we compute.
                watch = None if is_compiling() or jit.is_tracing() else own()
                if watch is None:
                    return func(*args, **(kwargs or {}))
                caller = getattr(inspect.currentframe(), "f_back", None)  # its own would be a cycle
                return watch.call(func, args, kwargs or {}, caller)

        self._see, self._may_continue = see, may_continue
        self.mode: Any = Mode()
        weakref.finalize(self, _leave, self.mode).atexit = False  # self may be dropped early
        self.is_on = False
        self.is_entered = False  # whether the mode was entered, and may not be left yet
        self._thread, self._process = threading.get_ident(), os.getpid()

    def start(self) -> None:
        """Start watching.

        Raises:
            RuntimeError: a compiled function is running, in which PyTorch changes no stance.
        """
        self.stop()
        self._thread, self._process = threading.get_ident(), os.getpid()
        if not _is_entered(self.mode):  # it could not be left yet
            _put(self.mode)  # first, as stop() restores the stance of a mode that is entered
        try:
            _run_uncompiled(self.mode)
        except RuntimeError:
            self.stop()
            raise
        self.is_on = self.is_entered = True

    def stop(self) -> None:
        """Stop watching.

        Where the mode cannot be taken from the stack, it does nothing any more, until it can be: in
        another thread, as each has its own stack, or while the mode handles a call.
        """
        was_on, self.is_on = self.is_on, False
        is_left = threading.get_ident() == self._thread and _leave(self.mode)
        if was_on and not is_left:
            _leave_on(self._thread, self.mode)
        self.is_entered = was_on and not is_left

    def call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
    ) -> Any:
        """Call a function, and see the call."""
        is_fork = os.getpid() != self._process  # a fork inherits the mode
        name = getattr(func, "__name__", "")
        if is_fork or name.startswith(_UNSEEN) or not self.is_on or not self._may_continue():
            return calling_for(frame)(func, args, kwargs)
        call = None
        with suppress(Exception):
            call = Call(name, args, kwargs, frame)
        outputs = calling_for(frame)(func, args, kwargs)
        with suppress(Exception):
            if call is not None:
                call.end(outputs)
                self._see(call)
        return outputs


_running: list[object] = []  # the modes of the watches that run now
_stances: list[Any] = []  # restores the user's stance of PyTorch's compiler, while one of them does


def _run_uncompiled(mode: object) -> None:
    """Have PyTorch run compiled code uncompiled, until the last of several watches stops."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        return
    _running.append(mode)
    if not _stances:
        compiler: Any = sys.modules["torch.compiler"]
        # The "default" stance remembers the user's. It comes first, so that an interrupt before it
        # is kept does not leave "force_eager" on.
        _stances.append(compiler.set_stance("default"))
        compiler.set_stance("force_eager")


def _leave_on(thread: int, mode: object) -> None:
    """Leave a mode on the thread that entered it, at that thread's next call of a module.

    The stack of a thread that has ended is gone, and the stance is that of all threads.
    """
    from torch.nn.modules.module import register_module_forward_pre_hook

    def leave(*_: object) -> None:
        if threading.get_ident() == thread:
            _leave(mode)
            handle.remove()

    if any(other.ident == thread for other in threading.enumerate()):
        handle = register_module_forward_pre_hook(leave)
    else:
        _end(mode)


def _leave(mode: Any) -> bool:
    """Take a mode from the stack of this thread, and restore the user's stance; False if it is not.

    A backward pass that raised an error may have left it there several times.
    """
    was_entered = _is_entered(mode)
    while _is_entered(mode):
        _take(mode)
    if was_entered:
        _end(mode)
    return was_entered


def _end(mode: object) -> None:
    """Restore the user's stance of PyTorch's compiler, if the last watch ends that needs another.

    Watches may end in any order, so none keeps a stance that another one has set.
    """
    _running[:] = [each for each in _running if each is not mode]
    while _stances and not _running:
        _stances.pop().__exit__(None, None, None)


def _is_entered(mode: object) -> bool:
    from torch.overrides import _get_current_function_mode_stack

    return any(each is mode for each in _get_current_function_mode_stack())


def _put(mode: object) -> None:
    """Put a mode on the stack below those of the user, but above that of the default device.

    PyTorch wants that at the bottom, and puts it there itself.
    """
    import torch
    from torch.overrides import _get_current_function_mode, _pop_mode, _push_mode

    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    above = []
    try:
        while (top := _get_current_function_mode()) is not None and top is not default:
            above.append(_pop_mode())
        _push_mode(mode)
    finally:
        while above:
            _push_mode(above.pop())


def _take(mode: object) -> None:
    """Take a mode from the stack, wherever it is."""
    from torch.overrides import _pop_mode, _push_mode

    above = []
    try:
        while (top := _pop_mode()) is not mode:
            above.append(top)
    finally:
        while above:
            _push_mode(above.pop())
