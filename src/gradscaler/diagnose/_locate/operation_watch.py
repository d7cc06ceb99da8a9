"""Which operation of PyTorch made the first Inf or NaN, and at which line of the user's."""

from __future__ import annotations

import inspect
import os
import re
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from gradscaler.diagnose._gradients.reading import Reading, floating, memory_of, read
from gradscaler.diagnose._locate.call_site import called, caller_of
from gradscaler.diagnose._locate.located import Located, Site
from gradscaler.diagnose._locate.module_hooks import ModuleHooks, weakly
from gradscaler.diagnose._locate.value_watch import (
    Module,
    NodeWatch,
    Operation,
    Tensor,
    ValueWatch,
    operation_of,
    source_of,
)

_OVERWRITES = ("copy_", "fill_", "normal_", "uniform_", "zero_")  # whatever was there before
_LEAVES_UNWRITTEN = re.compile("empty|resize")


class OperationWatch:
    """Watches every operation of PyTorch between ``start()`` and ``stop()``.

    Each output of an operation and each gradient is read once, which waits for the device. A
    dispatch mode sees what the thread of ``start()`` calls, below autograd and autocast. Hooks on
    the nodes of the graph see the backward pass. Nothing is changed, and an error in watching never
    reaches the training.

    Compiled code is one block, of which the operations are not seen.

    Args:
        hooks: of the model, if there is one.
        reads_evaluation: whether to read operations without gradients too while the model is not in
            training mode. A monitor does not: it may watch until the next step.
    """

    def __init__(self, hooks: ModuleHooks | None, reads_evaluation: bool = False) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        own = weakref.ref(self)

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
            ) -> Any:
                watch = own()
                if watch is None:
                    return func(*args, **(kwargs or {}))
                return watch.call(func, args, kwargs or {}, inspect.currentframe())

        self.goes_on: Callable[[], bool] | None = None  # asked at each operation
        self.mode: Any = Mode()  # type: ignore[no-untyped-call]
        weakref.finalize(self, _leave, self.mode).atexit = False  # a training may drop its monitor
        self._hooks = hooks
        self._reads_evaluation = reads_evaluation
        self._is_on = False
        self._clear()

    def _clear(self) -> None:
        from torch.jit import ScriptModule
        from torch.utils.weak import WeakIdKeyDictionary

        model = None if self._hooks is None else self._hooks.model
        # In a cycle it would watch until the collector runs.
        self._values = ValueWatch(model, weakly(self._maker_of))
        self._nodes = NodeWatch(self._values)
        self._sites: Any = WeakIdKeyDictionary()  # by an output whose node is not known yet
        self._unread: Any = WeakIdKeyDictionary()  # what made a tensor and was not read
        self._lines: dict[tuple[str | None, str], str | None] = {}  # by module and operation
        named = () if model is None else model.named_modules()
        self._names = {each: name for name, each in named if not isinstance(each, ScriptModule)}
        self._thread, self._process = threading.get_ident(), os.getpid()

    @property
    def located(self) -> Located | None:
        """The first operation since ``start()`` whose Inf or NaN reached a result, or None.

        Where no operation can be seen, as in a compiled module, it is the module, from the hooks.
        """
        events = [event.located for event in self._values.events if event.does_harm]
        # What it was called for before the start has no line.
        found = next((event for event in events if event.line), events[0] if events else None)
        if self._hooks is None or (found is not None and found.kind != "input"):
            return found
        of_module = self._hooks.located
        if of_module is None:
            return found
        inside = f"{of_module.module}." if of_module.module else ""
        seen = (f"{module}." for module, _ in self._lines if module is not None)
        return found if any(module.startswith(inside) for module in seen) else of_module

    def start(self) -> None:
        """Begin to watch, unless another dispatch mode is active."""
        from torch.utils._python_dispatch import is_in_torch_dispatch_mode

        self.stop()
        self._clear()
        if is_in_torch_dispatch_mode():
            return
        if self._hooks is not None:
            self._hooks.see_output = weakly(self._see_node)  # the hooks may outlive the watch
        self._is_on = True
        self.mode.__enter__()

    def stop(self) -> None:
        """Watch no more. A mode under another one stays where it is, and does nothing."""
        was_on, self._is_on = self._is_on, False
        if threading.get_ident() == self._thread:
            _leave(self.mode)
        elif was_on:
            _leave_on(self._thread, self.mode)
        self._nodes.stop()

    def call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
    ) -> Any:
        """Call an operation, and see what it makes of its inputs."""
        from torch import Tensor, is_grad_enabled

        is_fork = os.getpid() != self._process  # it inherits the mode
        if is_fork or not self._is_on or (self.goes_on is not None and not self.goes_on()):
            return func(*args, **kwargs)
        name = func.name().partition("::")[2].partition(".")[0]
        before = None
        inputs = list(floating(Tensor, (args, kwargs)))
        is_training = self._hooks is None or self._hooks.model.training
        is_read = is_training or self._reads_evaluation or is_grad_enabled()
        if is_read and (name.endswith("_") or "out" in kwargs or "batch_norm" in name):
            before = [read(tensor) for tensor in inputs]  # it changes them
        outputs = func(*args, **kwargs)
        with suppress(Exception):
            made = list(floating(Tensor, outputs))
            if is_read:
                self._see(func, name, inputs, before, made, frame)
            else:
                self._unread.update(dict.fromkeys(made, called(name)))
        return outputs

    def _see(
        self,
        func: Any,
        name: str,
        inputs: list[Tensor],
        before: list[Reading] | None,
        outputs: list[Tensor],
        frame: FrameType | None,
    ) -> None:
        found = self._site(name, inputs, outputs, frame)
        site = Site() if found is None else found[0]
        for tensor in inputs:
            self._see_node(tensor, site.module, site.type)
        if found is not None:
            self._sites.update(dict.fromkeys(outputs, site))
        if before is None:
            of_inputs = {memory_of(tensor): tensor for tensor in inputs}
            views = {tensor for tensor in outputs if memory_of(tensor) in of_inputs}
            for tensor in views:
                if (made_by := self._unread.get(of_inputs[memory_of(tensor)])) is not None:
                    self._unread[tensor] = made_by
            outputs = [tensor for tensor in outputs if tensor not in views]
            for tensor in outputs:
                self._values.forget(tensor)
        if found is None or not outputs or _LEAVES_UNWRITTEN.search(name):
            return
        after = [read(tensor) for tensor in outputs]
        if self._values.is_empty and not any(reading.bad for reading in after):
            return
        before = [read(tensor) for tensor in inputs] if before is None else before
        is_elementwise = any(tag.name == "pointwise" for tag in func.tags)
        overwrites = name in _OVERWRITES
        operation = Operation(*found, name, is_elementwise, inputs, before, outputs, overwrites)
        self._values.see(operation, after)

    def _site(
        self, name: str, inputs: list[Tensor], outputs: list[Tensor], frame: FrameType | None
    ) -> tuple[Site, Module | None] | None:
        """Where an operation of a forward pass was called; None if it belongs to none.

        With it, the outermost module that ran if none of the model did.
        """
        from torch import is_grad_enabled

        caller = caller_of(frame and frame.f_back, self._thread)
        if caller is None:
            return None
        if caller.within == "backward" and not caller.line and name == "ones_like":
            self._values.begin_backward(inputs[0])
            return None
        if caller.within and not is_grad_enabled():
            if caller.line and not self._nodes.line and not any(read(t).bad for t in inputs):
                is_bad = any(read(tensor).bad for tensor in outputs)
                self._nodes.line = caller.line if is_bad else None
            return None
        named = [each for each in caller.modules if each in self._names]
        # PyTorch's compiler puts a module of its own around another.
        others = [m for m in caller.modules if not type(m).__module__.startswith("torch._")]
        running = next(iter(named or reversed(others)), None)
        module = self._names.get(running)
        operation, line = caller.function or called(name), caller.line
        if caller.within == "backward":  # a checkpoint runs a forward pass again
            line = line or self._lines.get((module, operation))
        elif caller.within == "grad":
            line = line or caller.outer
        self._lines.setdefault((module, operation), line)
        type_ = "" if running is None else type(running).__name__
        return Site(operation, line, module, type_), running if module is None else None

    def _see_node(self, tensor: Tensor, module: str | None, type_: str) -> None:
        """Watch the node that a tensor comes from, in a module if no operation was seen."""
        node = getattr(tensor, "grad_fn", None)
        if node is not None and node not in self._nodes:
            self._nodes.add(node, self._sites.pop(tensor, Site(module=module, type=type_)))

    def _maker_of(self, tensor: Tensor) -> str | None:
        """The operation that computed a tensor unread, if anything says that one did."""
        node = source_of(tensor.grad_fn)
        if node is None or hasattr(node, "variable"):
            made_by: str | None = self._unread.get(tensor)
            return made_by
        return operation_of(node)


def _leave_on(thread: int, mode: Any) -> None:
    """Leave a mode on the thread that entered it, when that calls a module next.

    Each thread has its own stack of modes, which no other can change. Until then the mode does
    nothing.
    """
    from torch.nn.modules.module import register_module_forward_pre_hook

    def leave(*_: Any) -> None:
        if threading.get_ident() == thread:
            _leave(mode)
            handle.remove()

    if any(other.ident == thread for other in threading.enumerate()):
        handle = register_module_forward_pre_hook(leave)


def _leave(mode: Any) -> None:
    """Leave a dispatch mode if it is the innermost one."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    current: Any = _get_current_dispatch_mode()
    if current is mode:
        mode.__exit__(None, None, None)
