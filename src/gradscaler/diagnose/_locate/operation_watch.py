"""Which operation of PyTorch made the first Inf or NaN, and at which line of the user's."""

from __future__ import annotations

import inspect
import os
import re
import sys
import threading
import weakref
from contextlib import suppress
from types import FrameType
from typing import Any

from gradscaler.diagnose._gradients.reading import Reading, floating, read
from gradscaler.diagnose._locate.call_site import Caller, called, caller_of
from gradscaler.diagnose._locate.located import Located, Site
from gradscaler.diagnose._locate.module_hooks import Module, ModuleHooks, Tensor
from gradscaler.diagnose._locate.node_watch import NodeWatch
from gradscaler.diagnose._locate.value_watch import Operation, ValueWatch

_OVERWRITES = ("copy_", "fill_", "normal_", "uniform_", "zero_")  # whatever was there before
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
            def __torch_dispatch__(
                self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
            ) -> Any:
                watch = own()
                if watch is None:
                    return func(*args, **(kwargs or {}))
                return watch.call(func, args, kwargs or {}, inspect.currentframe())

        self.mode: Any = Mode()  # type: ignore[no-untyped-call]
        self._stances: list[Any] = []  # the user's, of PyTorch's compiler, to put back
        # A training may drop its monitor.
        weakref.finalize(self, _leave, self.mode).atexit = False
        weakref.finalize(self, _put_back, self._stances).atexit = False
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
            if "torch._dynamo" in sys.modules:  # else nothing is compiled
                compiler: Any = sys.modules["torch.compiler"]
                # Which remembers the user's: an interrupt before the next line leaves no stance.
                self._stances.append(compiler.set_stance("default"))
                compiler.set_stance("force_eager")
            self.mode.__enter__()

    def stop(self) -> None:
        """Watch no more. A mode under another one stays where it is, and does nothing."""
        was_on, self._is_on = self._is_on, False
        if threading.get_ident() == self._thread:
            _leave(self.mode)
        elif was_on:
            _leave_on(self._thread, self.mode)
        _put_back(self._stances)
        self._nodes.stop()

    def call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
    ) -> Any:
        """Call an operation, and see what it makes of its inputs."""
        from torch import Tensor

        if not self._is_on or os.getpid() != self._process:  # a fork inherits the mode
            return func(*args, **kwargs)
        name = func.name().partition("::")[2].partition(".")[0]
        is_read = self._hooks is None or not self._hooks.is_evaluating
        given = [value for key, value in kwargs.items() if key != "out"]
        inputs = list(floating(Tensor, (args[name in _OVERWRITES :], given)))
        before = None
        if is_read and (func._schema.is_mutable or "batch_norm" in name):
            before = [read(tensor) for tensor in inputs]  # it changes them
        outputs = func(*args, **kwargs)
        with suppress(Exception):
            made = list(floating(Tensor, outputs))
            if is_read:
                self._see(func, name, inputs, before, made, frame)
            else:
                self.values.note_unread(made, called(name))
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
        caller = caller_of(frame and frame.f_back, self._thread)
        found = None if caller is None else self._site(caller, name, inputs, outputs)
        site = None if found is None else found[0]
        for tensor in inputs:
            self._see_node(tensor, site)
        if site is not None:
            self._sites.update(dict.fromkeys(outputs, site))
        if before is None:
            outputs = self.values.new_among(outputs, inputs)
        if caller is None:  # gradscaler's
            self.values.pass_on(inputs, outputs)
        if found is None or _LEAVES_UNWRITTEN.search(name):
            return
        after = [read(tensor) for tensor in outputs]
        if any(reading.bad for reading in after):
            before = [read(tensor) for tensor in inputs] if before is None else before
            is_elementwise = any(tag.name == "pointwise" for tag in func.tags)
            tensors = inputs, before, outputs, after
            self.values.follow(Operation(name, is_elementwise, *found, *tensors))

    def _site(
        self, caller: Caller, name: str, inputs: list[Tensor], outputs: list[Tensor]
    ) -> tuple[Site, Module | None] | None:
        """Where an operation of a forward pass was called; None if it belongs to none.

        With it, the outermost module that ran if none of the model did.
        """
        from torch import is_grad_enabled

        if caller.within and not caller.line and name == "ones_like":
            self.values.end_in(inputs)
            return None
        runs_again = caller.within == "backward" and caller.modules  # in a checkpoint
        if caller.within and not is_grad_enabled() and not runs_again:
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
        if caller.within == "backward":  # of a checkpoint
            line = line or self._lines.get((module, operation))
        elif caller.within == "grad":
            line = line or caller.outer
        self._lines.setdefault((module, operation), line)
        type_ = "" if running is None else type(running).__name__
        return Site(operation, line, module, type_), running if module is None else None

    def _see_node(self, tensor: Tensor, reader: Site | None) -> None:
        """Watch the node that a tensor comes from, in its reader's module if it was not seen."""
        node = getattr(tensor, "grad_fn", None)
        if node is None or node in self._nodes:
            return
        unseen = reader and Site(module=reader.module, type=reader.type)
        if (site := self._sites.pop(tensor, unseen)) is not None:
            self._nodes.add(node, site)


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


def _put_back(stances: list[Any]) -> None:
    while stances:
        stances.pop().__exit__(None, None, None)


def _leave(mode: Any) -> None:
    """Leave a dispatch mode if it is the innermost one."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    current: Any = _get_current_dispatch_mode()
    if current is mode:
        mode.__exit__(None, None, None)
