"""A search for the first Inf or NaN of the passes that run while it is on, call by call."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Any

from gradscaler.diagnose._gradients.reading import Tensor, floating, read
from gradscaler.diagnose._graph import module_calls
from gradscaler.diagnose._graph.call_origins import CallOrigins
from gradscaler.diagnose._graph.call_site import Node, called_from, stack_from
from gradscaler.diagnose._graph.calls import Call, CallWatch
from gradscaler.diagnose._graph.hooks import Handle, remove_all, weakly
from gradscaler.diagnose._graph.lines import Tracebacks
from gradscaler.diagnose._graph.nodes import is_custom, is_leaf, nodes_from
from gradscaler.diagnose._graph.places import Module, Places
from gradscaler.diagnose._graph.reader import GraphReader
from gradscaler.diagnose._graph.stand_ins import calling_for
from gradscaler.diagnose._record.located import Located


class Search(module_calls.CallListener):
    """Searches the forward and backward passes between ``start()`` and ``stop()``.

    What each call of a function of PyTorch makes is read, and each node of a graph has a hook. A
    training could not afford that.

    Args:
        model: the model, which names the places.
        names: other names than PyTorch's, as ``Places`` takes them.
    """

    def __init__(self, model: Module, **names: Any) -> None:
        self._places = Places(model, **names)
        self._lines = Tracebacks()
        self._origins = CallOrigins(self._places, of_all=True)
        self._calls = _Calls(weakly(self._see))
        self._calls.at_backward = weakly(self.end_in)
        self._nodes: set[Node] = set()
        self._reached: dict[Node, Located] = {}  # by the node that gets a bad gradient
        self._line: str | None = None  # that made an Inf or NaN since the last node ran
        self._handles: list[Handle] = []
        weakref.finalize(self, remove_all, self._handles).atexit = False
        self._in_forward: list[Located] = []
        self._in_backward: list[Located] = []

    @property
    def is_on(self) -> bool:
        """Whether calls are seen."""
        return self._calls.is_on

    @property
    def located(self) -> Located | None:
        """The first Inf or NaN that reached a result, or else the gradient of a leaf; or None."""
        return next(iter([*self._in_forward, *self._in_backward]), None)

    @property
    def latest(self) -> Located | None:
        """Where the latest Inf or NaN was made, which may have reached no result yet."""
        return self._origins.latest

    def start(self) -> None:
        """Start searching."""
        self._calls.start()
        self._lines.start()
        module_calls.listen(self)

    def stop(self) -> None:
        """Stop searching."""
        module_calls.ignore(self)
        self._calls.stop()
        self._lines.stop()
        remove_all(self._handles)

    def end_in(self, results: object) -> None:
        """Note the results of a pass. An Inf or NaN that reaches none of them does no harm."""
        from torch import Tensor

        for tensor in floating(Tensor, results):
            origin = self._origins.origin_of(tensor) if read(tensor).bad else None
            if origin is not None and origin.kind == "input" and tensor.grad_fn is not None:
                self._hook(tensor)
                origin = self._reader().forward(tensor)  # another thread may have made it
            self._in_forward += [] if origin is None else [origin]

    def _reader(self) -> GraphReader:
        nodes = sorted(self._nodes, key=lambda node: node._sequence_nr())
        return GraphReader(nodes, self._lines, self._places, self._origins)

    def _see(self, call: Call) -> None:
        """Read what a call made, and hook the nodes that it added to the graph."""
        if self._calls.is_in_backward:
            self._see_in_backward(call)
        else:
            self._origins.see(call)
        _, running = stack_from(call.frame)
        own = [node for tensor in call.inputs for node in self._hook(tensor) if is_custom(node)]
        made = [node for tensor in call.outputs for node in self._hook(tensor)]
        self._places.running |= dict.fromkeys(own + made, running)

    def enter_module(self, module: Module, *_: object) -> bool:
        """Tell the end of the call of a module of the model."""
        return any(module is each for each in self._places.modules)

    def leave_module(self, module: Module, outputs: object) -> None:
        """Note the module of the nodes that no call made, but a function of the user's own."""
        from torch import Tensor

        made = [node for tensor in floating(Tensor, outputs) for node in self._hook(tensor)]
        self._places.running |= {node: [module] for node in made}

    def _hook(self, tensor: Tensor) -> list[Node]:
        """Hook the nodes of a tensor's graph that have no hook yet, and return them."""
        every: list[Any] = list(nodes_from([tensor.grad_fn], self._nodes))
        nodes = [node for node in every if not is_leaf(node)]
        for node in nodes:
            if is_custom(node):  # its backward pass is the user's code, and is seen, too
                self._handles.append(node.register_prehook(weakly(self._calls.enter)))
                self._handles.append(node.register_hook(weakly(self._calls.leave)))
            self._handles.append(node.register_hook(partial(weakly(self._after), node)))
        return nodes

    def _see_in_backward(self, call: Call) -> None:
        """Note the line of a hook, or of an own backward pass, that makes a bad number."""
        is_bad = any(read(tensor).bad for tensor in call.outputs)
        if self._line is None and is_bad and not any(found.bad for found in call.readings):
            self._line = called_from(stack_from(call.frame)[0])[1]

    def _after(self, node: Node, made: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """Check the gradients that a node made from the given ones."""
        line, self._line = self._line, None
        bad = [number for number, gradient in enumerate(made) if read(gradient).bad]
        if not bad:
            return
        is_given = any(read(gradient).bad for gradient in given)
        found = self._reached.get(node)
        if found is None and is_given and line is None:
            return  # a sum of finite gradients made it, or what is not seen
        if found is None:
            found = self._reader().backward(node, made, given, line, is_given)
        for number in bad:
            before = node.next_functions[number][0]
            self._in_backward += [found] * is_leaf(before)
            self._reached.setdefault(before, found)


class _Calls(CallWatch):
    """Sees the start of a backward pass, and the calls of hooks in it, too."""

    at_backward: Any
    _depth = 0  # of backward passes of the user's own

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward pass runs that is not just computing a forward pass again."""
        from torch import is_grad_enabled

        return self._depth > 0 and not is_grad_enabled()

    def call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
    ) -> Any:
        torch: Any = sys.modules["torch"]
        if func is torch.Tensor.register_hook:
            return func(args[0], partial(self._run, args[1]))
        starts = func in (torch.Tensor.backward, torch.autograd.grad)
        if starts or (func is torch.ones_like and frame is not None and _is_of_autograd(frame)):
            self.at_backward(args[:1])
        if starts:  # what it returns has a graph of its own
            return calling_for(frame)(func, args, kwargs)
        return super().call(func, args, kwargs, frame)

    def enter(self, *_: object) -> None:
        """See the calls of a node's backward pass; PyTorch's engine leaves every mode."""
        self._depth += 1
        self.mode.__enter__()

    def leave(self, *_: object) -> None:
        """Stop seeing them."""
        self.mode.__exit__(None, None, None)
        self._depth -= 1

    def _run(self, hook: Any, gradient: Tensor) -> Any:
        """Run a hook of a tensor, and see its calls."""
        if not self.is_on:
            return hook(gradient)
        self.enter()
        try:
            return hook(gradient)
        finally:
            self.leave()


def _is_of_autograd(frame: FrameType) -> bool:
    """Whether torch.autograd calls a function, as it does at the start of a backward pass."""
    calls, _ = stack_from(frame)
    return any(call.function == "_make_grads" for call in calls[:2])
