"""The operations of one step of MindSpore, which runs in PyNative mode meanwhile.

``MsDispatchMode`` gives the operations of the forward pass. It leaves out ``cat``, and a function
whose inputs were all made by ``cat`` or before the mode began, so functions are wrapped, too. Not
all operations of the backward pass go through it, so each node of the graph has a hook, which gets
the gradients.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from importlib import import_module
from inspect import currentframe
from typing import Any, NamedTuple

import numpy as np

from gradscaler.diagnose._gradients.reading import Tensor, nonfinite_numbers, read
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.hooks import weakly
from gradscaler.diagnose._graph.masks import Value
from gradscaler.diagnose._graph.site import Site
from gradscaler.diagnose._operations.rows import canonical
from gradscaler.diagnose._record.located import Located
from gradscaler.diagnose._seams.judge import TAKES_NUMBERS, Judge, JudgedSeam, Owned, Pass

Cell = Any
Node = Any

_SEEDS = 20240, 1117  # that nobody else takes
_NO_JIT = "MS_JIT"  # MindSpore runs jit functions as they are written if this variable is "0"


class _Call(NamedTuple):
    """An operation of the forward pass: its inputs, and their values before it ran.

    Of a call that is over, only the values with an Inf or NaN are kept, which its gradient may
    read.
    """

    name: str
    site: Site
    inputs: list[Tensor]
    values: list[Value[Located]]


class Seam(JudgedSeam):
    """Judges the operations of a thread between ``start()`` and ``stop()``.

    Cells and functions that are compiled run operation by operation meanwhile, in all threads.

    Args:
        model: the model, a Cell.
    """

    def __init__(self, model: Cell) -> None:
        self._mindspore: Any = sys.modules["mindspore"]
        self._judge = Judge(dict(model.cells_and_names()), _parameters_of(model), _memory_of)
        self._thread = 0
        self._passes: list[Pass] = []  # that run, one inside the other
        self._num_dispatched = 0  # operations that the mode gave
        self._calls: list[_Call] = []
        self._maker: dict[int, int] = {}  # by memory, the number of the call that wrote it
        # By their ids, nodes and the numbers of the calls that wrote their results, and whether the
        # call is the node's own. A node that is kept keeps its id.
        self._nodes: dict[int, tuple[Node, int, bool]] = {}
        self._hooked: dict[int, Node] = {}
        self._given: dict[
            tuple[int, int], Located
        ] = {}  # to which result of a node, a bad gradient
        self._undo = ExitStack()

    def start(self) -> None:
        """Begin to see operations."""
        self._thread = threading.get_ident()
        self._undo.enter_context(_pynative(self._mindspore))
        executor = import_module("mindspore.graph.api")._pynative_executor
        self._undo.enter_context(_wrapped(executor, "new_graph", self._around_start))
        self._undo.enter_context(_wrapped(executor, "end_graph", self._around_end))
        self._undo.enter_context(_wrapped(executor, "grad", self._around_backward))
        for owner, name in _functions():
            self._undo.enter_context(_wrapped(owner, name, partial(self._around_function, name)))
        self._undo.enter_context(self._mode())

    def stop(self) -> None:
        """See no more, and leave MindSpore as it was."""
        self._undo.close()

    def end_in(self, results: object) -> None:
        """Note the results of a pass. An Inf or NaN that reaches none of them does no harm."""
        self._judge.end_in(self._tensors(results))

    def _mode(self) -> Any:
        see = self._see

        class Mode(self._mindspore.MsDispatchMode):  # type: ignore[misc, name-defined]
            def __ms_dispatch__(self, func: Any, args: Any, kwargs: Any = None) -> Any:
                return see(func, args, kwargs or {})

        return Mode()

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._before(func.name, args) if self._is_seen else None
        self._num_dispatched += self._is_own
        made = func(*args, **kwargs)
        if call is not None:
            self._after(call, made)
        return made

    def _around_function(
        self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call a function of MindSpore, and see it if the mode gave no operation of it."""
        before = self._num_dispatched
        made = function(*args, **kwargs)
        if self._is_seen and self._num_dispatched == before:
            is_primitive = args and isinstance(args[0], self._mindspore.ops.Primitive)
            name = args[0].name if is_primitive else name.strip("_").removesuffix("_instance")
            call = self._before(name, [*args, *kwargs.values()])
            if call is not None:
                self._after(call, made)
        return made

    @property
    def _is_own(self) -> bool:
        return self._thread == threading.get_ident()

    @property
    def _is_seen(self) -> bool:
        """Whether an operation that runs now is one of the forward pass."""
        return self._is_own and self._passes[-1:] != ["backward"]

    @guarded
    def _before(self, name: str, args: Sequence[Any]) -> _Call:
        site = self._judge.site_at(currentframe(), name)
        inputs = self._tensors(args)
        self._name_nodes(inputs)
        for tensor in inputs:  # slices, and copies that make a tensor contiguous, are not seen
            if read(tensor).bad and self._judge.origin_of(tensor) is None:
                self._judge.note(tensor, self._judge.origin_of_copy(tensor))
        if site.operation in TAKES_NUMBERS:  # the divisor may be a number, or whole numbers
            inputs = [each for each in self._operands(args) if not nonfinite_numbers([each])]
        inputs = [*inputs, *self._judge.numbers_in(args, site)]
        return _Call(name, site, inputs, self._judge.before(inputs, site))

    @guarded
    def _after(self, call: _Call, made: object) -> None:
        outputs = self._tensors(made)
        if call.name.startswith("BatchNorm"):
            outputs = outputs[:1]  # on a CPU, the second and third hold what was in their memory
        self._judge.see(call.site, "forward", call.inputs, call.values, outputs)
        self._maker |= dict.fromkeys(map(_memory_of, outputs), len(self._calls))
        # What the backward pass may read. No tensor of a call is kept.
        bad = [value for value in call.values if value.origin is not None]
        self._calls.append(call._replace(inputs=[], values=bad))

    def _around_start(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_own:
            self._passes.append("forward")
        return call(*args, **kwargs)

    def _around_end(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        if self._is_own:
            del self._passes[-1:]
            self._end_forward(args[1])
        return result

    def _around_backward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._is_own:
            return call(*args, **kwargs)
        outer = len(self._passes)
        self._passes.append("backward")
        try:
            return call(*args, **kwargs)
        finally:
            del self._passes[outer:]

    @guarded
    def _end_forward(self, outputs: object) -> None:
        results = self._tensors(outputs)
        self._name_nodes(results)
        self._judge.end_in(results)
        nodes = _nodes_from([tensor._grad_node for tensor in results], self._hooked)
        calls = self._calls_of(nodes)
        for node in nodes:
            hook = partial(weakly(self._see_gradients), node, calls[node._unique_id()])
            self._undo.callback(node.register_hook(hook).remove)

    def _name_nodes(self, tensors: Iterable[Tensor]) -> None:
        """Note the calls that made the nodes of tensors."""
        for tensor in tensors:
            node = tensor._grad_node
            if node is None or node._unique_id() in self._nodes:
                continue
            number = self._maker.get(_memory_of(tensor))
            if number is not None:
                is_own = self._calls[number].name == node.name()
                self._nodes[node._unique_id()] = node, number, is_own

    def _calls_of(self, nodes: Iterable[Node]) -> dict[int, _Call]:
        """The calls of nodes, by their ids.

        A node whose result only a slice reads is that of the next call of its name. A node that is
        no call, such as a backward pass of the user's own, is where its result was computed.
        """
        found, after = dict[int, _Call](), 0
        for node in sorted(nodes, key=lambda node: node._sequence_nr()):
            key, name = node._unique_id(), node.name()
            _, number, is_own = self._nodes.get(key, (node, -1, False))
            later = range(after, len(self._calls))
            if not is_own:
                number = next((n for n in later if self._calls[n].name == name), number)
            call = self._calls[number] if number >= 0 else _Call(name, Site(), [], [])
            if call.name == name and number >= 0:
                found[key], after = call, number + 1
            else:
                found[key] = _Call(name, call.site._replace(operation=canonical(name)), [], [])
        return found

    @guarded
    def _see_gradients(
        self, node: Node, call: _Call, made: Iterable[Tensor | None], given: Iterable[Tensor | None]
    ) -> None:
        """Judge the gradients that a node made of the given ones, and of its call's inputs."""
        key, inputs = node._unique_id(), list[Tensor]()
        for number, gradient in enumerate(given):
            if gradient is None:
                continue
            inputs.append(gradient)
            if read(gradient).bad:
                origin = self._given.get((key, number))
                if origin is None:
                    return  # a sum of finite gradients made it, or a hook of the user's
                self._judge.note(gradient, origin)
        values = [*self._judge.before(inputs, call.site), *call.values]
        every = zip(node.next_functions, made, strict=False)
        pairs = [pair for pair in every if pair[1] is not None]
        outputs = [gradient for _, gradient in pairs]
        self._judge.see(call.site, "backward", inputs, values, outputs)
        for (before, number), gradient in pairs:
            if before is None or not read(gradient).bad:
                continue
            if before.is_leaf():
                self._judge.end_in([gradient])
            elif (origin := self._judge.origin_of(gradient)) is not None:
                self._given.setdefault((before._unique_id(), number), origin)

    def _operands(self, args: Sequence[Any]) -> Iterator[Tensor]:
        """The tensors and the numbers among arguments, in their order."""
        for each in args:
            is_number = isinstance(each, (int, float))
            yield from [np.asarray(each)] if is_number else self._tensors(each, of_all=True)

    def _tensors(self, tree: object, of_all: bool = False) -> list[Tensor]:
        """The tensors in a structure: those of floating-point and complex numbers, or all."""
        if isinstance(tree, self._mindspore.Tensor):
            is_number = of_all or tree.is_floating_point() or tree.is_complex()
            return [tree] * is_number
        if isinstance(tree, Mapping):
            tree = list(tree.values())
        if isinstance(tree, (list, tuple)):
            return [tensor for each in tree for tensor in self._tensors(each, of_all)]
        return []


@contextmanager
def left_as_it_was(model: Cell) -> Iterator[None]:
    """Restore parameters that are not trained, such as a moving mean, and the random states.

    The state of a Dropout is that of its kernel, which cannot be read: other seeds get another.
    """
    mindspore: Any = sys.modules["mindspore"]
    untrained = [each for each in model.get_parameters() if not each.requires_grad]
    values = [each.asnumpy().copy() for each in untrained]
    state, seeds = mindspore.get_rng_state(), sys.modules["mindspore.common.seed"]._KERNEL_SEED
    kept = dict(seeds)
    cells = [cell for _, cell in model.cells_and_names()]
    drops = [(cell, cell.dropout) for cell in cells if isinstance(cell, mindspore.nn.Dropout)]
    for cell, own in drops:
        cell.dropout = mindspore.ops.Dropout(own.keep_prob, *_SEEDS)
    try:
        yield
    finally:
        for cell, own in drops:
            cell.dropout = own
        for parameter, value in zip(untrained, values, strict=True):
            if parameter.asnumpy().tobytes() != value.tobytes():
                parameter.copy_(mindspore.Tensor(value))  # set_data() cuts it off from jit
        mindspore.set_rng_state(state)
        seeds.clear()
        seeds.update(kept)


@contextmanager
def _pynative(mindspore: Any) -> Iterator[None]:
    """Run Cells and jit functions operation by operation."""
    graphs: Any = import_module("mindspore._c_expression").MSContext
    mode, variable = mindspore.get_context("mode"), os.environ.get(_NO_JIT)
    os.environ[_NO_JIT] = "0"
    try:
        if mode != mindspore.PYNATIVE_MODE:
            mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
        # A gradient in PyNative mode has set a flag for graphs that are compiled later.
        with _wrapped(graphs, "_set_not_convert_jit", lambda *_: None):
            yield
    finally:
        if variable is None:
            os.environ.pop(_NO_JIT, None)
        else:
            os.environ[_NO_JIT] = variable
        if mode != mindspore.PYNATIVE_MODE:
            mindspore.set_context(mode=mode)


def _functions() -> Iterator[tuple[Any, str]]:
    """Where MindSpore's functions are called that overwrite no input, and their names there."""
    primitives = import_module("mindspore.ops.auto_generate.gen_ops_prim")
    overwrites = re.compile("inplace|assign|_$")
    names = (name for name in vars(primitives) if not overwrites.search(name))
    yield from ((primitives, name) for name in names if name.startswith("pyboost_"))
    overloads = import_module("mindspore.ops.functional_overload")
    yield from (
        (overloads, name) for name in vars(overloads) if re.search("[a-z0-9]_instance$", name)
    )
    inner = import_module("mindspore.ops.auto_generate.pyboost_inner_prim")
    yield from (
        (kind, "__call__") for name, kind in vars(inner).items() if name.startswith("_Pyboost")
    )


@contextmanager
def _wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Call ``around`` in place of a method, with the method and its arguments."""
    method, own = getattr(owner, name), vars(owner).get(name)

    @wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(method, *args, **kwargs)

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _nodes_from(nodes: list[Node], seen: dict[int, Node]) -> list[Node]:
    """The nodes of a graph that make gradients, without those seen before, which are added."""
    found, waiting = list[Node](), nodes
    while waiting:
        node = waiting.pop()
        if node is None or node.is_leaf() or node._unique_id() in seen:
            continue
        seen[node._unique_id()] = node
        found.append(node)
        waiting += [before for before, _ in node.next_functions]
    return found


def _parameters_of(model: Cell) -> Iterator[Owned]:
    for name, cell in model.cells_and_names():
        for own, parameter in cell.parameters_and_names(expand=False):
            yield Owned(parameter, name, type(cell).__name__, own)


def _memory_of(tensor: Tensor) -> int:
    """The address of a tensor's memory, which all views of one tensor share."""
    if not hasattr(tensor, "data_ptr"):
        return id(tensor)
    start: int = tensor.data_ptr()
    if not start:  # it has none yet
        return id(tensor)
    return start - int(tensor.storage_offset() * tensor.itemsize)
