"""Locate the operation of PyTorch that made the first Inf or NaN, and the user's line."""

from __future__ import annotations

import inspect
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

from gradscaler.diagnose._gradients.reading import Tensor, floating, read
from gradscaler.diagnose._locate.call_site import Caller, called, caller_of
from gradscaler.diagnose._locate.module_hooks import ModuleHooks
from gradscaler.diagnose._locate.node_watch import NodeWatch
from gradscaler.diagnose._locate.site import Site
from gradscaler.diagnose._locate.value_watch import Operation, ValueWatch
from gradscaler.diagnose._record.located import Located

_LEAVES_UNWRITTEN = re.compile("empty|resize")


class OperationWatch:
    """Watches every operation of PyTorch between ``start()`` and ``stop()``.

    Each output of an operation and each gradient is read once, which waits for the device. A
    dispatch mode sees the operations that the thread of ``start()`` calls, below autograd and
    autocast. ``values`` follows each Inf and NaN from the operation that made it to the loss. Hooks
    on the nodes of the graph see the backward pass. Watching changes nothing, and its errors never
    reach the training.

    Compiled code runs eagerly, by PyTorch's ``force_eager`` stance. Under the dispatch mode without
    that stance, PyTorch would never run the code compiled again.

    Args:
        hooks: the hooks of the model; None if there is no model.

    Attributes:
        mode: the dispatch mode.
        values: follows each Inf and NaN.
    """

    def __init__(self, hooks: ModuleHooks | None) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        own = weakref.ref(self)

        class Mode(TorchDispatchMode):
            supports_higher_order_operators = True  # without it, flex_attention and such raise

            def __torch_dispatch__(
                self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: Any = None
            ) -> Any:
                watch = own()
                if watch is None:
                    return func(*args, **(kwargs or {}))
                return watch.call(func, args, kwargs or {}, inspect.currentframe())

        self.may_continue: Callable[[], bool] | None = None  # called at each operation
        self.mode: Any = Mode()  # type: ignore[no-untyped-call]
        self._stances: list[Any] = []  # restore the user's stance of PyTorch's compiler
        self._entered = self.mode, self._stances
        weakref.finalize(self, _leave, *self._entered).atexit = False  # self may be dropped early
        self._hooks = hooks
        self._is_on = self._was_on = False
        self._clear()

    def _clear(self) -> None:
        from torch.jit import ScriptModule
        from torch.utils.weak import WeakIdKeyDictionary

        model = None if self._hooks is None else self._hooks.model
        named = {} if model is None else dict(model.named_modules())
        self._names = {each: n for n, each in named.items() if not isinstance(each, ScriptModule)}
        self.values = ValueWatch(model)
        self._nodes = NodeWatch(self.values)
        self._sites: Any = WeakIdKeyDictionary()  # by output, until its node is watched
        self._lines: dict[tuple[str | None, str], str | None] = {}  # by module and operation
        self._thread, self._process = threading.get_ident(), os.getpid()

    @property
    def located(self) -> Located | None:
        """The first operation since ``start()`` whose Inf or NaN reached a result, or None.

        If another dispatch mode was active at ``start()``, it is the module that the hooks found.
        """
        if not self._was_on:
            return None if self._hooks is None else self._hooks.located
        harmful = self.values.harmful
        # An operation that was called before start() has no line.
        return next((each for each in harmful if each.line), next(iter(harmful), None))

    def start(self) -> None:
        """Start watching, unless another dispatch mode is active."""
        from torch.utils._python_dispatch import is_in_torch_dispatch_mode

        self.stop()
        self._clear()
        self._was_on = not is_in_torch_dispatch_mode()
        if self._was_on:
            self._is_on = True
            self.mode.__enter__()
            if "torch._dynamo" in sys.modules:  # without it, nothing is compiled
                compiler: Any = sys.modules["torch.compiler"]
                # The "default" stance remembers the user's. It comes first, so that an interrupt
                # before it is kept does not leave "force_eager" on.
                self._stances.append(compiler.set_stance("default"))
                compiler.set_stance("force_eager")

    def stop(self) -> None:
        """Stop watching. If another mode lies above this one, this one stays, but does nothing."""
        was_on, self._is_on = self._is_on, False
        if threading.get_ident() == self._thread:
            _leave(*self._entered)
        elif was_on:
            _leave_on(self._thread, *self._entered)
        self._nodes.stop()

    def call(
        self,
        func: Any,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        frame: FrameType | None,
    ) -> Any:
        """Call an operation, and check its outputs for Inf and NaN."""
        from torch import Tensor

        is_fork = os.getpid() != self._process  # a fork inherits the mode
        if (
            is_fork
            or not self._is_on
            or (self.may_continue is not None and not self.may_continue())
        ):
            return func(*args, **kwargs)
        is_read = self._hooks is None or not self._hooks.is_evaluating
        operation = None
        with suppress(Exception):
            operation = Operation(func, args, kwargs)
            if is_read and operation.changes_inputs:
                operation.before = list(map(read, operation.inputs))
        outputs = func(*args, **kwargs)
        with suppress(Exception):
            if operation is not None:
                operation.outputs = list(floating(Tensor, outputs))
                if is_read:
                    self._see(operation, frame)
                else:
                    self.values.note_unread(operation)
        return outputs

    def _see(self, operation: Operation, frame: FrameType | None) -> None:
        caller = caller_of(frame and frame.f_back, self._thread)
        is_located = caller is not None and self._locate(operation, caller)
        for tensor in operation.inputs:
            self._see_node(tensor, operation.site if is_located else None)
        if is_located:
            self._sites.update(dict.fromkeys(operation.outputs, operation.site))
        if operation.before is None:
            self.values.leave_views_out(operation)
        if caller is None:  # gradscaler called it
            self.values.pass_on(operation)
        if not is_located or _LEAVES_UNWRITTEN.search(operation.name):
            return
        operation.after = list(map(read, operation.outputs))
        if any(found.bad for found in operation.after):
            operation.before = operation.before or list(map(read, operation.inputs))
            self.values.follow(operation)

    def _locate(self, operation: Operation, caller: Caller) -> bool:
        """Note where an operation was called; return whether a forward pass called it."""
        from torch import is_grad_enabled

        if caller.within and not caller.line and operation.name == "ones_like":
            self.values.end_in(operation.inputs)
            return False
        runs_again = caller.within == "backward" and caller.modules  # in a checkpoint
        if caller.within and not is_grad_enabled() and not runs_again:
            if caller.line and not self._nodes.line and not _any_bad(operation.inputs):
                self._nodes.line = caller.line if _any_bad(operation.outputs) else None
            return False
        named = [each for each in caller.modules if each in self._names]
        # PyTorch's compiler wraps a module in one of its own.
        others = [m for m in caller.modules if not type(m).__module__.startswith("torch._")]
        running = next(iter(named or reversed(others)), None)
        module = self._names.get(running)
        name, line = caller.function or called(operation.name), caller.line
        if caller.within == "backward":  # of a checkpoint
            line = line or self._lines.get((module, name))
        elif caller.within == "grad":
            line = line or caller.outer
        self._lines.setdefault((module, name), line)
        type_ = "" if running is None else type(running).__name__
        operation.site = Site(name, line, module, type_)
        operation.outer = running if module is None else None
        return True

    def _see_node(self, tensor: Tensor, reader: Site | None) -> None:
        """Watch the node that made a tensor. If it was not seen, use the module of its reader."""
        node = getattr(tensor, "grad_fn", None)
        if node is None or node in self._nodes:
            return
        unseen = reader and Site(module=reader.module, type=reader.type)
        if (site := self._sites.pop(tensor, unseen)) is not None:
            self._nodes.add(node, site)


def _any_bad(tensors: Iterable[Tensor]) -> bool:
    return any(read(tensor).bad for tensor in tensors)


def _leave_on(thread: int, mode: object, stances: list[object]) -> None:
    """Leave a mode on the thread that entered it, at that thread's next call of a module.

    Each thread has its own stack of modes, which no other thread can change. Until that call, the
    mode does nothing.
    """
    from torch.nn.modules.module import register_module_forward_pre_hook

    def leave(*_: object) -> None:
        if threading.get_ident() == thread:
            _leave(mode, stances)
            handle.remove()

    if any(other.ident == thread for other in threading.enumerate()):
        handle = register_module_forward_pre_hook(leave)


def _leave(mode: object, stances: list[Any]) -> None:
    """Leave a dispatch mode and restore the user's stance, if the mode is the innermost one."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    current: Any = _get_current_dispatch_mode()
    if current is mode:
        mode.__exit__(None, None, None)
        while stances:
            stances.pop().__exit__(None, None, None)
