"""The operations of one step, in a framework that runs them one by one and records a graph."""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from operator import and_
from traceback import walk_stack
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gradscaler.diagnose._gradients.arrays import dtype_name
from gradscaler.diagnose._gradients.reading import Reading, Tensor, floating, largest_of, read
from gradscaler.diagnose._graph.call_site import Frame, called, is_own
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.hooks import Handle, remove_all
from gradscaler.diagnose._graph.masks import Value
from gradscaler.diagnose._graph.site import Site, located_at
from gradscaler.diagnose._operations.operation import Role
from gradscaler.diagnose._operations.rows import names_with
from gradscaler.diagnose._record.formats import FORMATS
from gradscaler.diagnose._record.located import Located
from gradscaler.diagnose._record.thresholds import SMALL_ADDEND
from gradscaler.diagnose._seams.calls import Calls
from gradscaler.diagnose._seams.judge import TAKES_NUMBERS, Judge, JudgedSeam, Owned

Node = Any

# Their gradients are copies, or sums of copies, of what they are given.
_COPIES = {"sum"}.union(*map(names_with, (Role.MOVES, Role.ADDS, Role.STACKS)))
_IN_PLACE = "__i", "__setitem", "_setitem"


class Begun(NamedTuple):
    """A call of an operation that has begun.

    Attributes:
        site: the call site.
        inputs: the floating-point tensors that it is called with, in the order of the formula.
        values: their values, if it may overwrite one of them; else None.
        nodes: the nodes of the inputs, by their addresses.
        is_own: whether gradscaler calls it.
        takes_lists: whether it is called with a list of tensors.
        is_recorded: whether it adds nodes to the graph.
    """

    site: Site
    inputs: list[Tensor]
    values: list[Value[Located]] | None
    nodes: dict[int, Node]
    is_own: bool
    takes_lists: bool
    is_recorded: bool


class _Seen(NamedTuple):
    """A node of the graph that was seen.

    Attributes:
        node: the node. It is kept, so that no other gets its address.
        site: the call site of its operation.
        origin: where an Inf or NaN in the operation's inputs began; None if they held none.
    """

    node: Node
    site: Site
    origin: Located | None


class EagerSeam(JudgedSeam, ABC):
    """Shows a judge the operations between ``start()`` and ``stop()``, forward and backward.

    What each call of a function of the framework makes is read. Each node that the call adds to the
    graph gets a hook, which reads the gradients that the node gets and makes. A node that can have
    no hook passes an Inf or NaN on to the nodes before it. It has made one that a node or a leaf
    before it gets though all that is seen to reach that is finite.

    Attributes:
        may_continue: called at each operation; returns whether to see it.

    Args:
        modules: the modules of the model, by name.
        parameters: the parameters of the model.
    """

    package: ClassVar[str]  # the framework's
    calls: ClassVar[Calls]
    backward_passes: ClassVar[frozenset[str]]  # the functions that run one
    hooks_any: ClassVar[bool]  # whether a node can be hooked whose operation was not seen

    def __init__(self, modules: Mapping[str, Any], parameters: Iterable[Owned]) -> None:
        self._judge = Judge(modules, parameters, _memory_of)
        self._nodes: dict[int, _Seen] = {}  # by their addresses
        self._hooked: set[int] = set()  # the addresses of those that have a hook
        # By the address of the node that gets a gradient.
        self._given = defaultdict[int, list[Reading]](list)
        # The nodes without a hook that give one of them, and may have made an Inf or NaN in it.
        self._unseen = defaultdict[int, list[_Seen]](list)
        self._others = defaultdict[int, float](float)  # the sum of those that others give, at most
        self._leaves: dict[int, Tensor] = {}  # that such a node may give a gradient
        self._reached: dict[int, Located] = {}
        self._latest: Located | None = None  # that the user's own code made in the backward pass
        self._depth = 0  # of backward passes
        self.may_continue: Callable[[], bool] | None = None
        self._handles: list[Handle] = []
        weakref.finalize(self, remove_all, self._handles).atexit = False

    def start(self) -> None:
        """Begin to see the operations of this thread."""
        self.calls.listen(self)

    def stop(self) -> None:
        """See no more."""
        self.calls.ignore(self)
        remove_all(self._handles)

    @guarded
    def end_in(self, results: object) -> None:
        """Note the results of a pass. An Inf or NaN that reaches none of them does no harm."""
        self.calls.unseen(self._judge.end_in, self._numbers_in(results))

    @property
    def tensor(self) -> type[Any]:
        """The framework's class of tensors."""
        kind: type[Any] = sys.modules[self.package].Tensor
        return kind

    @property
    def is_recording(self) -> bool:
        """Whether operations are added to the graph."""
        return bool(sys.modules[self.package].is_grad_enabled())

    # What a framework supplies.

    @abstractmethod
    def address(self, node: Node) -> int:
        """What tells one node from another."""

    @abstractmethod
    def name(self, node: Node) -> str:
        """The name of a node's operation."""

    @abstractmethod
    def before(self, node: Node) -> list[Node]:
        """The nodes that get the gradients that a node makes."""

    @abstractmethod
    def is_leaf(self, node: Node) -> bool:
        """Whether a node takes the gradient of a leaf."""

    @abstractmethod
    def hook(self, node: Node, is_plain: bool) -> bool:
        """Have :meth:`see_gradients` called when a node has run.

        Args:
            node: the node.
            is_plain: whether the operation was called with no list of tensors.

        Returns:
            Whether it will be called.
        """

    # The forward pass.

    @guarded
    def begin(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
    ) -> Begun | None:
        """See what a frame calls a function with."""
        if self.may_continue is not None and not self.may_continue():
            return None
        if name in self.backward_passes:
            self._depth += 1
            results = self._numbers_in(args[:1])
            self._judge.end_in(results)
            for node in (each.grad_fn for each in results):
                if self.hooks_any:
                    self._see_nodes(node, None, None)
                self._note_given(node, Reading("finite", 1.0))
            return None
        operands = [*(args[::-1] if name.startswith("__r") else args), *kwargs.values()]
        in_lists = [isinstance(each, (list, tuple)) for each in operands]
        has_tensors = [self._has_tensors(each) for each in operands]
        if not any(has_tensors):
            return None  # it makes a constant
        site = self._judge.site_at(frame, called(name.strip("_")))
        inputs = list(self._inputs(operands, site))
        nodes = [each.grad_fn for each in inputs if isinstance(each, self.tensor)]
        begun = Begun(
            site,
            inputs,
            None,
            {self.address(node): node for node in nodes if node is not None},
            is_own(_frames_from(frame)),
            any(map(and_, in_lists, has_tensors)),
            self.is_recording and any(getattr(each, "requires_grad", False) for each in inputs),
        )
        overwrites = name.endswith("_") or name.startswith(_IN_PLACE) or "out" in kwargs
        return begun._replace(values=self._values(begun)) if overwrites else begun

    @guarded
    def end(self, name: str, begun: Begun | None, outputs: object) -> None:
        """See what a function returned, or None if it raised an error."""
        if name in self.backward_passes:
            self._depth -= self._depth > 0
            self._see_leaves(outputs)
        if begun is None:
            return
        made = self._numbers_in(outputs)
        if outputs is None and begun.values is not None:  # it overwrote its first input
            made = begun.inputs[:1]
        if not made:
            return
        values = self._values(begun) if begun.values is None else begun.values
        is_given = any(value.reading.bad for value in values)
        if begun.is_own and not is_given:
            return  # an overflow of the loss scale
        if self._depth > 0 and self._latest is None and not is_given:
            readings = [value.reading for value in values]
            made_bad = (_made(begun.site, readings, each) for each in made if read(each).bad)
            self._latest = next(made_bad, None)
        if self._depth > 0 and not begun.is_recorded:
            return  # it is no part of a forward pass that is run again
        self._judge.see(begun.site, "forward", begun.inputs, values, made)
        origin = next((value.origin for value in values if value.origin is not None), None)
        for each in made:
            self._see_nodes(each.grad_fn, begun, origin)
        if begun.takes_lists and begun.is_recorded and not self.hooks_any:
            self._keep_leaves(begun.inputs)

    def _keep_leaves(self, tensors: Iterable[Tensor]) -> None:
        """Keep the leaves among tensors, but those that an earlier pass gave an Inf or NaN."""
        for each in tensors:
            node = each.grad_fn if isinstance(each, self.tensor) else None
            if node is not None and self.is_leaf(node) and not read(each.grad).bad:
                self._leaves[self.address(node)] = each

    def _values(self, begun: Begun) -> list[Value[Located]]:
        if self._depth > 0 and not begun.is_recorded:
            return [Value(read(each)) for each in begun.inputs]
        return self._judge.before(begun.inputs, begun.site)

    def _inputs(self, operands: Iterable[Any], site: Site) -> Iterator[Tensor]:
        """The floating-point tensors in operands, and some of the numbers.

        Those are the finite ones of a quotient or a power, and in the forward pass an Inf or NaN
        whose origin is known. In the backward pass, the user's own code makes gradients of them.
        """
        for each in operands:
            bad = [] if self._depth > 0 else self._judge.numbers_in([each], site)
            yield from bad
            if not bad and type(each) in (int, float) and site.operation in TAKES_NUMBERS:
                yield np.float64(each)
            yield from self._numbers_in(each)

    def _numbers_in(self, value: object) -> list[Tensor]:
        """The floating-point tensors in a structure, without those that are spread."""
        return [each for each in floating(self.tensor, value) if not _is_spread(each)]

    def _has_tensors(self, value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(self._has_tensors, value))
        return isinstance(value, self.tensor) and not _is_spread(value)

    def _see_nodes(self, node: Node | None, begun: Begun | None, origin: Located | None) -> None:
        """Note and hook the node of a result, and those before it that were not seen.

        The others are those of casts in the operation; if no operation is known, of all.
        """
        site, known = (Site(), {}) if begun is None else (begun.site, begun.nodes)
        is_plain = begun is not None and not begun.takes_lists
        waiting, is_first = [node], begun is not None
        while waiting:
            node = waiting.pop()
            if node is None or self.is_leaf(node):
                continue
            address = self.address(node)
            if address in self._nodes or address in known:
                continue
            own = site if is_first else site._replace(operation=self.name(node))
            self._nodes[address] = _Seen(node, own, origin)
            if self.hook(node, is_plain):
                self._hooked.add(address)
            waiting, is_first = [*waiting, *self.before(node)], False

    # The backward pass.

    def see_gradients(
        self, address: int, given: list[Tensor | None], made: list[Tensor | None]
    ) -> None:
        """Check the gradients that a node made from those that it was given."""
        self.calls.unseen(self._see_gradients, self._nodes[address], given, made)

    def _see_gradients(
        self, seen: _Seen, given: list[Tensor | None], made: list[Tensor | None]
    ) -> None:
        latest, self._latest = self._latest, None
        before = self.before(seen.node)
        is_known = len(before) == len(made)
        readings = [read(gradient) for gradient in made]
        for number, after in enumerate(before if is_known else ()):
            self._note_given(after, readings[number])
        bad = [number for number, reading in enumerate(readings) if reading.bad]
        if not bad:
            return
        address = self.address(seen.node)
        found = self._reached.get(address) or latest
        if not given and seen.site.operation in _COPIES:
            given = [made[number] for number in bad]  # it was overwritten
        values = [*self._given[address], *map(read, given)]
        if found is None and not any(value.bad for value in self._given[address]):
            found = next(filter(None, (self._made_unseen(address, each) for each in given)), None)
        if found is None and (not values or any(value.bad for value in values)):
            return  # a sum of finite gradients made it, or what is not seen
        if found is None:
            found = seen.origin or _made(seen.site, values, made[bad[0]])
        for number in bad:
            nodes = before[number : number + 1] if is_known else before
            self._pass_on(nodes, made[number], found)

    def _see_leaves(self, gradients: object) -> None:
        """Check the gradients of leaves that nodes without a hook gave, after a backward pass.

        Args:
            gradients: what the pass returned; None if the leaves have them.
        """
        returned = next((each for each in self._numbers_in(gradients) if read(each).bad), None)
        for address, leaf in self._leaves.items():
            gradient = leaf.grad if gradients is None else returned
            if read(gradient).bad:
                found = self._reached.get(address) or self._made_unseen(address, gradient)
                self._judge.note(gradient, found)
                self._judge.end_in([gradient])

    def _made_unseen(self, address: int, given: Tensor | None) -> Located | None:
        """The Inf or NaN that a node or a leaf is given, if a node without a hook has made it."""
        every, readings = self._unseen[address], self._given[address]
        if not every or not read(given).bad or any(each.bad for each in readings):
            return None
        unseen = every[-1]
        made = unseen.origin or _made(unseen.site, self._given[self.address(unseen.node)], given)
        if len(readings) == 1 or made.num_nan:
            return made
        # Else a sum of finite gradients has overflowed, unless the others are far too small.
        is_only = all(each is unseen for each in every)
        is_small = self._others[address] < SMALL_ADDEND * _largest_in(given)
        return made if is_only and is_small else None

    def _note_given(self, node: Node | None, reading: Reading) -> None:
        """Note what a node is given; one that has no hook is taken to pass it on."""
        waiting: list[tuple[Node | None, _Seen | None]] = [(node, None)]
        while waiting:
            node, unseen = waiting.pop()
            if node is None:
                continue
            address = self.address(node)
            if unseen is None:
                self._others[address] += reading.largest
            else:
                self._unseen[address].append(unseen)
            self._given[address].append(reading)
            if not self.is_leaf(node) and address in self._nodes and address not in self._hooked:
                own = self._nodes[address]
                maker = unseen if own.site.operation in _COPIES else own
                waiting += [(each, maker) for each in self.before(node)]

    def _pass_on(self, nodes: list[Node], gradient: Tensor, found: Located) -> None:
        """Note the origin of a gradient in the nodes that get it."""
        waiting = [(node, False) for node in nodes]
        while waiting:
            node, is_unseen = waiting.pop()
            if node is None:
                continue
            address = self.address(node)
            if self.is_leaf(node) and not (is_unseen and address in self._leaves):
                self._judge.note(gradient, found)
                self._judge.end_in([gradient])
            elif self._reached.setdefault(address, found) is found and address not in self._hooked:
                waiting += [(each, True) for each in self.before(node)]


def _largest_in(tensor: Tensor | None) -> float:
    """The largest number of a tensor's dtype; 0 if it is not known."""
    known = FORMATS.get("" if tensor is None else dtype_name(tensor))
    return 0.0 if known is None else known.largest


def _made(site: Site, given: Iterable[Reading], gradient: Tensor) -> Located:
    return located_at(site, "backward", gradient, largest_of(each.largest for each in given))


def _is_spread(tensor: Tensor) -> bool:
    """Whether a tensor of Paddle is spread over processes. Reading it may be a collective."""
    return hasattr(tensor, "is_dist") and bool(tensor.is_dist())


def _memory_of(tensor: Tensor) -> int:
    """What tells one tensor from another: each look at a tensor may be another object."""
    with suppress(Exception):
        if address := tensor.data_ptr():
            return hash((address, tuple(tensor.shape)))
    return id(tensor)


def _frames_from(frame: FrameType | None) -> Iterator[Frame]:
    for each, line in walk_stack(frame):
        yield Frame(each.f_code.co_filename, line, each.f_code.co_name)
