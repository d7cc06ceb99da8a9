"""What one early step of TensorFlow shows of its operations: targets that are broadcast."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from inspect import currentframe
from itertools import takewhile
from traceback import walk_stack
from typing import Any

from gradscaler._run_script.tape_steps import tensorflow
from gradscaler._run_script.undo import on_stop
from gradscaler.diagnose._graph.call_site import is_of_users_file, users_line
from gradscaler.diagnose._monitor.by_identity import ByIdentity

Tensor = Any
Operation = Any

_DIFFERENCES = {"Sub": "sub", "SquaredDifference": "squared_difference"}
_RESHAPES = {"Reshape", "ExpandDims", "StridedSlice"}  # the code means a column by them
# Operations that pass no gradient on; the first ones are the likelier to be meant.
PASS_NONE = {"StopGradient": "stop_gradient", "Round": "round", "Rint": "rint", "Sign": "sign"}
PASS_NONE |= {"Floor": "floor", "Ceil": "ceil", "ArgMax": "argmax"}
_MOST = 2_000  # operations of a loss, or of a step, that are looked at
# Where a loss in a graph of `fit` compares each output with each target, by a variable that it
# takes the gradient of.
in_fit = ByIdentity[str]()


def broadcast_in(loss: Tensor) -> str:
    """Where a loss in a graph compares each output with each target; empty if nowhere.

    Returns:
        such as ``"sub at train.py:20 makes [n, n] of [n, 1]"``.
    """
    waiting, seen = [loss.op], set[int]()
    while waiting and len(seen) < _MOST:
        operation = waiting.pop()
        if id(operation) in seen:
            continue
        seen.add(id(operation))
        inputs = list(operation.inputs)
        name = _DIFFERENCES.get(operation.type)
        if name is not None and len(inputs) == 2:
            given = [(list(each.shape or ()), each.op.type in _RESHAPES) for each in inputs]
            are_known = all(each.shape.rank is not None for each in inputs)
            sizes = _sizes(given) if are_known else ""
            if sizes and (line := _line_of(operation)):
                return f"{name} at {line}{sizes}"
        waiting += [each.op for each in inputs]
    return ""


def _line_of(operation: Operation) -> str | None:
    """The user's line of an operation; None for one of Keras' own, which ``fit`` has called."""
    frames = ((each.filename, each.lineno) for each in reversed(operation.traceback))
    return users_line(takewhile(lambda each: not _is_trainer(each[0]), frames))


def _is_trainer(file: str) -> bool:
    return file.endswith(("trainer.py", "training.py")) and not is_of_users_file(file)


def _sizes(given: Iterable[tuple[Sequence[int | None], bool]]) -> str:
    """The sizes, if of two inputs one has n rows, and the other is a column of n that no code made.

    ``given`` has the shape of each, in which None is a number that is not known yet, and whether it
    was reshaped.
    """
    row, column = sorted(given, key=lambda each: len(each[0]))
    is_pair = len(row[0]) == 1 and len(column[0]) == 2 and column[0][1] == 1
    if not is_pair or column[1] or row[0][0] != column[0][0] or row[0][0] == 1:
        return ""
    n = "n" if row[0][0] is None else row[0][0]
    return f" makes [{n}, {n}] of [{n}, 1]"


class EarlyStep:
    """The operations of an eager step between its first two calls of ``see_gradient()``.

    Attributes:
        broadcast: where it compares each output with each target; empty if nowhere.
    """

    def __init__(self) -> None:
        self.broadcast = ""
        self._passes_none: dict[str, str] = {}  # lines by the operation
        self._reshaped = set[int]()
        self._num_gradients = self._num_seen = 0

    @property
    def passes_none(self) -> str:
        """An operation that passes no gradient on, and its line; empty if none ran."""
        found = [each for each in PASS_NONE if each in self._passes_none]
        return f"{PASS_NONE[found[0]]} at {self._passes_none[found[0]]}" if found else ""

    def see_gradient(self) -> None:
        """See that a gradient is taken, which ends a forward pass."""
        self._num_gradients += 1
        callbacks = import_module("tensorflow.python.framework.op_callbacks")
        if self._num_gradients == 1:
            callbacks.add_op_callback(self._see)
            on_stop.callback(self.stop)  # the next gradient may never be taken
        elif self._num_gradients == 2:
            self.stop()

    def stop(self) -> None:
        """Look no more."""
        self._num_gradients = 2
        callbacks = import_module("tensorflow.python.framework.op_callbacks")
        # In a graph, TensorFlow would keep its functions for operations that are seen.
        with suppress(KeyError), tensorflow().init_scope():  # KeyError: another thread began
            callbacks.remove_op_callback(self._see)

    def _see(
        self,
        name: str | bytes,
        inputs: Sequence[Any],
        _: Any,
        outputs: Sequence[Any],
        op_name: str | None = None,
        graph: Any = None,
    ) -> None:
        self._num_seen += 1
        if self._num_seen > _MOST:
            self.stop()
        if graph is not None:
            return
        with suppress(Exception):  # it would look like an error of the user's operation
            self._look(name if isinstance(name, str) else name.decode(), inputs, outputs)

    def _look(self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        if name in _RESHAPES:
            self._reshaped |= {each._id for each in outputs}
        elif name in PASS_NONE:
            self._passes_none.setdefault(name, str(_line()))
        elif name in _DIFFERENCES and not self.broadcast:
            sizes = _sizes([(list(each.shape), each._id in self._reshaped) for each in inputs])
            if sizes:
                self.broadcast = f"{_DIFFERENCES[name]} at {_line()}{sizes}"


def _line() -> str | None:
    calls = walk_stack(currentframe())
    return users_line((each.f_code.co_filename, number) for each, number in calls)
