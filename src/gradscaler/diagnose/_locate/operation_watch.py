"""Which operation of PyTorch made the first Inf or NaN, and at which line of the user's."""

from __future__ import annotations

import inspect
import os
import re
import threading
import weakref
from contextlib import suppress
from types import FrameType
from typing import Any

from gradscaler.diagnose._gradients.reading import Reading, floating, memory_of, read
from gradscaler.diagnose._locate.call_site import Site, called, caller_of
from gradscaler.diagnose._locate.module_hooks import Located, ModuleHooks
from gradscaler.diagnose._locate.node_watch import NodeWatch
from gradscaler.diagnose._locate.value_watch import Operation, ValueWatch

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
        hooks: of the model, if there is one. They say which module runs.
    """

    def __init__(self, hooks: ModuleHooks | None) -> None:
        from torch import Tensor
        from torch.utils._python_dispatch import TorchDispatchMode

        self._tensor = Tensor

        own = weakref.ref(self)

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
            ) -> Any:
                watch = own()
                if watch is None:
                    return func(*args, **(kwargs or {}))
                return watch.call(func, args, kwargs or {}, inspect.currentframe())

        self._mode: Any = Mode()  # type: ignore[no-untyped-call]
        weakref.finalize(self, _leave, self._mode).atexit = False  # a training may drop its monitor
        self._hooks = hooks
        self._is_on = False
        self._clear()

    def _clear(self) -> None:
        from torch.utils.weak import WeakIdKeyDictionary

        self._values = ValueWatch(None if self._hooks is None else self._hooks.model)
        own = weakref.ref(self)  # in a cycle it would watch until the collector runs
        self._nodes = NodeWatch(self._values, lambda: bool((watch := own()) and watch._is_watching))
        self._sites: Any = WeakIdKeyDictionary()  # by an output whose node is not known yet
        self._lines: dict[tuple[str | None, str], str | None] = {}  # by module and operation
        self._thread, self._process = threading.get_ident(), os.getpid()

    @property
    def located(self) -> Located | None:
        """The first operation since ``start()`` whose Inf or NaN reached a result, or None.

        Where no operation can be seen, it is the module, from the hooks.
        """
        events = [event.located for event in self._values.events if event.does_harm]
        # What it was called for before the start has no line.
        found = next((event for event in events if event.line), events[0] if events else None)
        if found is None and self._hooks is not None:
            found = self._hooks.located
            return None if found is None or self._has_seen(found.module) else found
        return found

    def _has_seen(self, module: str | None) -> bool:
        """Whether an operation of a module was seen; none is if it is compiled."""
        inside = f"{module}." if module else ""
        seen = {seen for seen, _ in self._lines if seen is not None}
        return module in seen or any(name.startswith(inside) for name in seen)

    def start(self) -> None:
        """Begin to watch, unless another dispatch mode is active."""
        from torch.utils._python_dispatch import is_in_torch_dispatch_mode

        self.stop()
        self._clear()
        if is_in_torch_dispatch_mode():
            return
        if self._hooks is not None:
            see_node = weakref.WeakMethod(self._see_node)  # the hooks may outlive the watch
            self._hooks.see_output = lambda tensor: (see := see_node()) and see(tensor)
        self._is_on = True
        self._mode.__enter__()

    def stop(self) -> None:
        """Watch no more. A mode under another one stays where it is, and does nothing."""
        was_on, self._is_on = self._is_on, False
        if threading.get_ident() == self._thread:
            _leave(self._mode)
        elif was_on:
            _leave_on(self._thread, self._mode)
        self._nodes.stop()

    @property
    def _is_evaluating(self) -> bool:
        """Whether this is no training: a monitor may watch until the next step."""
        from torch import is_grad_enabled

        is_training = self._hooks is None or self._hooks.model.training
        return not is_training and not is_grad_enabled()

    @property
    def _is_watching(self) -> bool:
        return self._is_on and os.getpid() == self._process  # a fork inherits the mode

    def call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
    ) -> Any:
        """Call an operation, and see what it makes of its inputs."""
        if not self._is_watching or self._is_evaluating:
            return func(*args, **kwargs)
        before = None
        name = func.name().partition("::")[2].partition(".")[0]
        inputs = list(floating(self._tensor, (args, kwargs)))
        if name.endswith("_") or "out" in kwargs or "batch_norm" in name:  # it changes them
            before = [read(tensor) for tensor in inputs]
        outputs = func(*args, **kwargs)
        with suppress(Exception):
            self._see(func, name, inputs, before, list(floating(self._tensor, outputs)), frame)
        return outputs

    def _see(
        self,
        func: Any,
        name: str,
        inputs: list[Any],
        before: list[Reading] | None,
        outputs: list[Any],
        frame: FrameType | None,
    ) -> None:
        for tensor in inputs:
            self._see_node(tensor)
        site = self._site(name, inputs, outputs, frame)
        if site is not None:
            for tensor in outputs:
                self._sites[tensor] = site
        if before is None:
            views = {memory_of(tensor) for tensor in inputs}
            outputs = [tensor for tensor in outputs if memory_of(tensor) not in views]
            for tensor in outputs:
                self._values.forget(tensor)
        if site is None:
            return
        if not outputs or _LEAVES_UNWRITTEN.search(name):
            return
        after = [read(tensor) for tensor in outputs]
        if self._values.is_empty and not any(found.bad for found in after):
            return
        before = [read(tensor) for tensor in inputs] if before is None else before
        is_elementwise = any(tag.name == "pointwise" for tag in func.tags)
        overwrites = name in _OVERWRITES
        operation = Operation(site, name, is_elementwise, inputs, before, outputs, overwrites)
        self._values.see(operation, after)

    def _site(
        self, name: str, inputs: list[Any], outputs: list[Any], frame: FrameType | None
    ) -> Site | None:
        """Where an operation of a forward pass was called; None if it belongs to none."""
        from torch import is_grad_enabled

        caller = caller_of(frame and frame.f_back, self._thread)
        if caller.is_own:
            return None
        if caller.within == "backward" and not caller.line and name == "ones_like":
            self._values.begin_backward(inputs[0])
            return None
        if caller.within and not is_grad_enabled():
            if caller.line and not self._nodes.line and not any(read(t).bad for t in inputs):
                is_bad = any(read(tensor).bad for tensor in outputs)
                self._nodes.line = caller.line if is_bad else None
            return None
        operation = caller.function or called(name)
        module, type_ = self._module
        line = caller.line
        if caller.within == "backward":  # a checkpoint runs a forward pass again
            line = line or self._lines.get((module, operation))
        elif caller.within == "grad":
            line = line or caller.outer
        self._lines.setdefault((module, operation), line)
        return Site(operation, line, module, type_)

    def _see_node(self, tensor: Any) -> None:
        """Watch the node that a tensor comes from."""
        node = getattr(tensor, "grad_fn", None)
        if node is not None and node not in self._nodes:
            self._nodes.add(node, self._sites.pop(tensor, Site(None, None, *self._module)))

    @property
    def _module(self) -> tuple[str | None, str]:
        """The name and the type of the module that runs."""
        return (None, "") if self._hooks is None else self._hooks.current


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
