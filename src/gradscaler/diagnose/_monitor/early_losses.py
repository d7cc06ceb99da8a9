"""What the losses of a loop's first steps show, in a framework whose nodes keep no shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from traceback import walk_stack
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscaler.diagnose._gradients.arrays import shape_of, to_numpy
from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.call_site import users_line
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.nodes import MOST_LOSSES
from gradscaler.diagnose._monitor.listed import in_lists
from gradscaler.diagnose._operations.operation import Role
from gradscaler.diagnose._operations.rows import names_with
from gradscaler.diagnose._record.events import Counted, Event
from gradscaler.diagnose._seams.eager import EagerSeam, Node

_LOOKED_AT, _LAST = 2, 4  # steps whose graphs are read alone; the steps after them are watched
_MOST_NODES = 50  # between a loss and what it compares
# TensorPlay makes a cross entropy of logarithms; Paddle's has the softmax in it.
_OF_LOGITS = {*names_with(Role.TAKES_LOGITS), "cross_entropy", "log_sigmoid"}
_NORMALISE, _FORMS = names_with(Role.MAKES_PROBABILITIES), names_with(Role.MOVES)
_DIFFERENCES = {*names_with(Role.COMPARES), "sub", "l1_loss", "tp_l1_loss"}
_NOTED = {*_NORMALISE, *_DIFFERENCES, *_OF_LOGITS, "mul"}
_PASSED = {"abs", "add", "div", "mean", "mul", "nll_loss", "pow", "sqrt", "square", "sum", "to"}
_PAIRED = {"unsqueeze", "reshape"}  # x[:, None], which is a reshape in TensorPlay
_USE_SOFTMAX = 3  # the place of that argument of Paddle's cross entropy


class EarlyLosses:
    """Looks for mistakes in the losses of the first steps, by their graphs.

    The graphs of steps 1 and 2 show what may be a mistake. Only then are the calls of steps 3 and 4
    seen, which have the shapes and the lines. Each of these two steps counts a mistake once.

    Args:
        seam: shows the calls and the nodes of the framework.
        model: the model that is trained, or None.
    """

    def __init__(self, seam: EagerSeam, model: Any) -> None:
        self._seam, self._model = seam, model
        self._step, self._num_losses = 1, 0
        self._is_suspect = False
        self._is_listening = False
        self._lines: dict[int, str | None] = {}  # of the calls that made nodes, by their addresses
        self._tables: dict[int, str] = {}  # differences of all pairs, and their shapes
        self._excused: set[int] = set()  # cross entropies of probabilities, and weighted products
        self._mistakes: dict[Event, str] = {}
        # The values and gradients in step 3 of parameters in lists.
        self._listed: dict[int, tuple[NDArray[Any], NDArray[Any]]] = {}

    def see(self, loss: Tensor) -> None:
        """Look at a loss before its backward pass."""
        self._num_losses += 1
        if self._step > _LAST or self._num_losses > MOST_LOSSES:
            return
        for node in self._near(loss.grad_fn):
            if self._step <= _LOOKED_AT:
                self._is_suspect |= self._may_be_mistaken(node)
            elif self._is_listening:
                self._judge(node)

    def take(self, held: Callable[[], Collection[int]]) -> list[Counted]:
        """The mistakes that the step which begins shows, once.

        Args:
            held: the ids of the parameters of all optimizers.
        """
        if not _LOOKED_AT < self._step <= _LAST:
            return []
        mistakes, self._mistakes = self._mistakes, {}
        if place := self._unregistered(held()):
            mistakes[Event.UNREGISTERED] = place
        return [Counted(each, at) for each, place in mistakes.items() for at in ("", place)]

    def step_ended(self) -> None:
        """Begin to see calls if the next step is to be watched, or see no more."""
        if self._step > _LAST:
            return
        self._step, self._num_losses = self._step + 1, 0
        if self._step == _LOOKED_AT + 1 and self._is_suspect:
            self._is_listening = True
            self._seam.calls.listen(self)
        elif self._step > _LAST:
            self.stop()

    def stop(self) -> None:
        """Look no more."""
        self._step, self._model = _LAST + 1, None
        self._listed.clear()
        self._forget()
        if self._is_listening:
            self._is_listening = False
            self._seam.calls.ignore(self)

    def _forget(self) -> None:
        self._lines.clear()
        self._tables.clear()
        self._excused.clear()

    # The graph.

    def _near(self, node: Node | None) -> Iterator[Node]:
        """The nodes that compare outputs and targets, past those that add up and average."""
        waiting = [node]
        for _ in range(_MOST_NODES):
            if not waiting:
                return
            node = waiting.pop()
            if node is None or self._seam.is_leaf(node):
                continue
            yield node
            name, below = self._seam.name(node), self._seam.before(node)
            if name in _PASSED and self._seam.address(node) not in self._excused:
                waiting += below
            elif name == "sub":  # as in TensorPlay's binary cross entropy
                named = (each for each in below if each is not None)
                waiting += [each for each in named if self._seam.name(each) == "log_sigmoid"]

    def _may_be_mistaken(self, node: Node) -> bool:
        compares = self._seam.name(node) in _DIFFERENCES
        return compares or self._normalised(node) is not None

    def _normalised(self, node: Node) -> Node | None:
        """The softmax or sigmoid whose output a loss takes for logits; None if it has another."""
        if self._seam.name(node) not in _OF_LOGITS:
            return None
        inner = self._input_of(node)
        while inner is not None and not self._seam.is_leaf(inner):
            name = self._seam.name(inner)
            if name not in _FORMS:
                return inner if name in _NORMALISE else None
            inner = self._input_of(inner)
        return None

    def _input_of(self, node: Node) -> Node | None:
        """The node that made the first input of a node; None if it has none."""
        return next(iter(self._seam.before(node)), None)

    def _judge(self, node: Node) -> None:
        """Note a mistake of a node whose call was seen."""
        address, name = self._seam.address(node), self._seam.name(node)
        inner = self._normalised(node)
        if inner is not None and address not in self._excused:
            self._note(Event.TWICE, inner)
        if name in _DIFFERENCES and (shapes := self._tables.get(address)):
            self._note(Event.BROADCAST, node, shapes)

    def _note(self, event: Event, node: Node, rest: str = "") -> None:
        line = self._lines.get(self._seam.address(node))
        place = f"{self._seam.name(node)}{f' at {line}' if line else ''}{rest}"
        self._mistakes.setdefault(event, place)

    # Calls.

    @guarded
    def begin(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
    ) -> Any:
        """Keep what a frame calls a function with."""
        return args, kwargs, frame

    @guarded
    def end(self, name: str, begun: Any, outputs: object) -> None:
        """Note a call whose node a loss may be near to."""
        tensors = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        made = [each for each in tensors if isinstance(each, self._seam.tensor)]
        if begun is None or not made or not made[-1].requires_grad:
            return
        node = made[-1].grad_fn
        if node is None or self._seam.is_leaf(node):
            return
        address, operation = self._seam.address(node), self._seam.name(node)
        if operation not in _NOTED:
            return
        args, kwargs, frame = begun
        given = [each for each in args if isinstance(each, self._seam.tensor)][:2]
        for known in (self._lines, self._tables):
            known.pop(address, None)  # of a node that is gone
        self._excused.discard(address)
        if operation in _DIFFERENCES and (shapes := self._table(given)):
            self._tables[address] = shapes
        if operation == "mul" and all(math.prod(shape_of(each)) > 1 for each in given):
            self._excused |= {address} if len(given) > 1 else set()
        if operation == "cross_entropy":
            uses = kwargs.get("use_softmax", [*args, *[True] * _USE_SOFTMAX][_USE_SOFTMAX])
            self._excused |= set() if uses else {address}
        stack = ((each.f_code.co_filename, line) for each, line in walk_stack(frame))
        self._lines[address] = users_line(stack)

    def _table(self, given: list[Tensor]) -> str:
        """The shapes, if n outputs are compared with n targets each; else empty.

        One of them has the shape [n, 1], the other [n], and one depends on what is trained. Pairs
        may be meant if the code itself has made its shape [n, 1].
        """
        shapes = [tuple(shape_of(each)) for each in given]
        size = shapes[0][0] if shapes and shapes[0] else 0
        if size < 2 or sorted(shapes) != [(size,), (size, 1)]:
            return ""
        outputs = [each for each in given if each.requires_grad]
        if len(outputs) != 1 or self._seam.is_leaf(outputs[0].grad_fn):
            return ""
        shape = list(shape_of(outputs[0]))
        if len(shape) == 2 and self._seam.name(outputs[0].grad_fn) in _PAIRED:
            return ""
        return f" makes {[size, size]} of {shape}"

    # Parameters.

    def _unregistered(self, held: Collection[int]) -> str:
        """The parameters in a list of the model's that get gradients, and that nothing moves.

        In step 3, nobody knows yet whether something does.
        """
        if self._model is None:
            return ""
        known = {*held, *map(id, self._model.parameters())}
        listed = [
            (name, each)
            for name, each in in_lists(self._model)
            if id(each) not in known and each.requires_grad and each.grad is not None
        ]
        known_before, self._listed = (
            self._listed,
            {id(each): _numbers_of(each) for _, each in listed},
        )
        if self._step == _LAST:  # a gradient of an earlier model's stays as it is
            listed = [
                (name, each)
                for name, each in listed
                if (before := known_before.get(id(each))) is not None
                for after in [self._listed[id(each)]]
                if np.array_equal(before[0], after[0]) and not np.array_equal(before[1], after[1])
            ]
        return f"{len(listed)} parameters ({listed[0][0]} first)" if listed else ""


def _numbers_of(parameter: Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
    """Copies of a parameter's values, and of its gradient."""
    return np.array(to_numpy(parameter)), np.array(to_numpy(parameter.grad))
