"""Which operation of PyTorch made the first Inf or NaN, and at which line of the user's."""

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

from gradscaler.diagnose._gradients.reading import floating, read
from gradscaler.diagnose._locate.call_site import Caller, called, caller_of
from gradscaler.diagnose._locate.located import Located, Site
from gradscaler.diagnose._locate.module_hooks import ModuleHooks, Tensor
from gradscaler.diagnose._locate.node_watch import NodeWatch
from gradscaler.diagnose._locate.value_watch import Operation, ValueWatch

_LEAVES_UNWRITTEN = re.compile("empty|resize")


class OperationWatch:
    """Watches every operation of PyTorch between ``start()`` and ``stop()``.

    Each output of an operation and each gradient is read once, which waits for the device. A
    dispatch mode sees what the thread of ``start()`` calls, below autograd and autocast. Each Inf
    and NaN is followed from the operation that made it to the loss. Hooks on the nodes of the graph
    see the backward pass. Nothing is changed, and an error in watching never reaches the training.

    Compiled code is run as it was written. Under a mode alone, PyTorch would never run it compiled
    again.

    Args:
        hooks: of the model, if there is one.

    Attributes:
        mode: the dispatch mode.
        values: follows what the operations make.
    """

    def __init__(self, hooks: ModuleHooks | None) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        own = weakref.ref(self)

        class Mode(TorchDispatchMode):
            supports_higher_order_operators = True  # such as flex_attention; else they raise

            def __torch_dispatch__(
                self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
            ) -> Any:
                watch = own()
                if watch is None:
                    return func(*args, **(kwargs or {}))
                return watch.call(func, args, kwargs or {}, inspect.currentframe())

        self.goes_on: Callable[[], bool] | None = None  # asked at each operation
        self.mode: Any = Mode()  # type: ignore[no-untyped-call]
        self._stances: list[Any] = []  # the user's, of PyTorch's compiler, to put back
        self._entered = self.mode, self._stances
        weakref.finalize(self, _leave, *self._entered).atexit = False  # a training may drop this
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
        self._sites: Any = WeakIdKeyDictionary()  # by an output whose node is not known yet
        self._lines: dict[tuple[str | None, str], str | None] = {}  # by module and operation
        self._thread, self._process = threading.get_ident(), os.getpid()

    @property
    def located(self) -> Located | None:
        """The first operation since ``start()`` whose Inf or NaN reached a result, or None.

        Where another dispatch mode kept this from watching, it is the module, from the hooks.
        """
        if not self._was_on:
            return None if self._hooks is None else self._hooks.located
        harmful = self.values.harmful
        # What it was called for before the start has no line.
        return next((each for each in harmful if each.line), next(iter(harmful), None))

    def start(self) -> None:
        """Begin to watch, unless another dispatch mode is active."""
        from torch.utils._python_dispatch import is_in_torch_dispatch_mode

        self.stop()
        self._clear()
        self._was_on = not is_in_torch_dispatch_mode()
        if self._was_on:
            self._is_on = True
            self.mode.__enter__()
            if "torch._dynamo" in sys.modules:  # else nothing is compiled
                compiler: Any = sys.modules["torch.compiler"]
                # It remembers the user's stance, and an interrupt before the next line leaves none.
                self._stances.append(compiler.set_stance("default"))
                compiler.set_stance("force_eager")

    def stop(self) -> None:
        """Watch no more. A mode under another one stays where it is, and does nothing."""
        was_on, self._is_on = self._is_on, False
        if threading.get_ident() == self._thread:
            _leave(*self._entered)
        elif was_on:
            _leave_on(self._thread, *self._entered)
        self._nodes.stop()

    def call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
    ) -> Any:
        """Call an operation, and see what it makes of its inputs."""
        from torch import Tensor

        is_fork = os.getpid() != self._process  # it inherits the mode
        if is_fork or not self._is_on or (self.goes_on is not None and not self.goes_on()):
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
        if caller is None:  # gradscaler's
            self.values.pass_on(operation)
        if not is_located or _LEAVES_UNWRITTEN.search(operation.name):
            return
        operation.after = list(map(read, operation.outputs))
        if any(found.bad for found in operation.after):
            operation.before = operation.before or list(map(read, operation.inputs))
            self.values.follow(operation)

    def _locate(self, operation: Operation, caller: Caller) -> bool:
        """Note where an operation of a forward pass was called; whether it belongs to one."""
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
        # PyTorch's compiler puts a module of its own around another.
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
        """Watch the node that a tensor comes from, in its reader's module if it was not seen."""
        node = getattr(tensor, "grad_fn", None)
        if node is None or node in self._nodes:
            return
        unseen = reader and Site(module=reader.module, type=reader.type)
        if (site := self._sites.pop(tensor, unseen)) is not None:
            self._nodes.add(node, site)


def _any_bad(tensors: Iterable[Tensor]) -> bool:
    return any(read(tensor).bad for tensor in tensors)


def _leave_on(thread: int, mode: Any, stances: list[Any]) -> None:
    """Leave a mode on the thread that entered it, when that calls a module next.

    Each thread has its own stack of modes, which no other can change. Until then the mode does
    nothing.
    """
    from torch.nn.modules.module import register_module_forward_pre_hook

    def leave(*_: Any) -> None:
        if threading.get_ident() == thread:
            _leave(mode, stances)
            handle.remove()

    if any(other.ident == thread for other in threading.enumerate()):
        handle = register_module_forward_pre_hook(leave)


def _leave(mode: Any, stances: list[Any]) -> None:
    """Leave a dispatch mode if it is the innermost one, and put the user's stance back."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    current: Any = _get_current_dispatch_mode()
    if current is mode:
        mode.__exit__(None, None, None)
        while stances:
            stances.pop().__exit__(None, None, None)
