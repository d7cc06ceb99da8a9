"""Watch the losses of a training of PyTorch, and locate the first Inf or NaN in their graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial

from gradscaler.diagnose._gradients.arrays import local
from gradscaler.diagnose._gradients.reading import Tensor, read
from gradscaler.diagnose._graph.budget import CREDIT, Budget
from gradscaler.diagnose._graph.call_site import Node
from gradscaler.diagnose._graph.hooks import OneCallHooks, weakly
from gradscaler.diagnose._graph.lines import Line, Tracebacks
from gradscaler.diagnose._graph.nodes import in_order, is_custom
from gradscaler.diagnose._graph.numpy_warnings import numpy_warnings
from gradscaler.diagnose._graph.places import Module, Places
from gradscaler.diagnose._graph.reader import GraphReader
from gradscaler.diagnose._graph.retained import RetainedGraph
from gradscaler.diagnose._graph.slopes import bad_in, is_at_pole, part_of, suspects_in
from gradscaler.diagnose._graph.ungraphed_watch import UngraphedWatch
from gradscaler.diagnose._graph.walks import Walks
from gradscaler.diagnose._record.located import OPAQUE, Located, is_exact

_MOST_TRACED = 20  # steps: a branch that is taken now and then may need as many
_MOST_NEW = 3  # optimizers to trace for: a script may make one for each batch
# A share of the time and seconds, before any failure: some 50 graphs of a transformer of 3 layers,
# so that a failure in a run's first steps is seen whatever they cost.
_LITTLE, _LITTLE_CREDIT = 0.02, 0.02
_AFTER_NAN = 50  # steps: a failure in 2 % of them comes again, and growth makes NaN more rarely


class GraphWatch:
    """Reads the graph of each loss that is not finite, before its backward pass frees it.

    Nothing runs again, and no module is hooked. Lines come from the tracebacks of the first
    forward pass, and of up to 20 more after a failure in a node that the first lacks, or after the
    first step of an optimizer whose loss it lacks. On a device, losses are not read before
    :meth:`step_ended` has seen a failure.

    After a step whose loss was finite and whose gradients were not, a :class:`GradientWatch` looks
    at the graphs of the next steps. All of it together takes at most 5 % of the time, except for a
    second, and for the first loss that is not finite.

    Args:
        model: the model, which names the places; None if there is none.
        sees_operations: whether to watch operations without a graph.

    Attributes:
        located: the origin of the first Inf or NaN in the present step; None if unknown.
        gradients: the watch of backward passes.
        ungraphed: the watch of operations without a graph.
    """

    def __init__(self, model: Module | None, sees_operations: bool = True) -> None:
        self._model = model
        self._lines = Tracebacks()
        self._lines.start()
        self._budget = Budget(CREDIT)
        self._step = 0
        self._traces_left = 0  # steps to trace after a failure in a node that no trace has
        self._has_failed = self._has_read = self._is_told = self._is_traced = False
        self._is_over = False  # whether the present step has ended
        self._was_on = False  # whether tracebacks were kept until the latest step ended
        self._has_lines = False  # whether they are kept of the latest loss
        self._new_left = _MOST_NEW
        self._hides_lines = False  # whether the latest failure was in an operation that hides them
        self.located: Located | None = None
        self._input: Located | None = None  # located in the step before
        self.gradients = GradientWatch()
        self._retaining = Budget(_LITTLE_CREDIT, _LITTLE, of_processor=True)
        self._retained: RetainedGraph | None = None
        self._walks = Walks()
        self._seen = -1  # how many nodes PyTorch had made before the latest loss
        self.ungraphed = UngraphedWatch(model, sees_operations)

    def begin(self, step: int) -> None:
        """Begin a step, before its forward pass."""
        self.ungraphed.begin(step)
        if self._hides_lines and self.ungraphed.is_on:
            self._lines.start()

    def see(self, loss: Tensor, may_hook: bool = True) -> None:
        """Read a loss before its backward pass, and its graph if that may tell more."""
        self._seen = _number_of(loss)
        if self._is_over:
            self._is_over, self.located = False, None
            self.gradients.begin()
        try:  # each step comes here, and `suppress` makes three calls
            self._has_lines = self._lines.is_on or self._was_on  # a forward pass came before it
            self._was_on = False
            if self._has_lines:
                is_new = self._lines.note(in_order(loss))
                if not is_new and not self._traces_left:
                    self._lines.stop()
            if self._is_bad(loss):
                if self.located is None and not self._is_told:
                    is_due, self._has_read = not self._has_read, True
                    self._spend(self._read, loss, is_due)
            elif self.gradients.is_on and may_hook:
                self._spend(self.gradients.watch, loss)
        except Exception:
            pass

    def note_new_optimizer(self) -> None:
        """Keep tracebacks in the next steps if an optimizer that is new has a loss of its own."""
        if not self._has_lines and self._new_left:
            self._new_left -= 1
            self._traces_left = _MOST_TRACED

    def retain(self, loss: Tensor) -> None:
        """Hold what the graph of a finite loss keeps until :meth:`of_backward`, if time is left."""
        self._retained = None
        seconds = None if loss.grad_fn is None else self._retaining.left(self._step)
        if seconds is not None:
            self._retaining.begin(seconds)
            self._retained = RetainedGraph(loss.grad_fn, self._walks.suspects(loss.grad_fn))
            self._retaining.end()

    @property
    def shown(self) -> Mapping[int, int]:
        """What the gradients of vectors show in the graph that is held; see :class:`Walks`."""
        return {} if self._retained is None else self._walks.shown

    def release(self) -> None:
        """Hold nothing more."""
        self._retained = None

    def of_backward(
        self, bad: Collection[int], good: Collection[int], root: Node = None
    ) -> Located | None:
        """Where the first bad gradient of a backward pass that is over began; None if unknown.

        Args:
            bad: the ids of the parameters whose gradient is not finite.
            good: those of the parameters whose gradient is.
            root: the node of the loss, for what its graph alone shows if it was not retained.
        """
        held = self._retained
        with suppress(Exception):
            if held is None and root is not None:
                held = RetainedGraph(root)
            if held is not None:
                return held.located(self._reader_of(held.nodes), bad, good)
        return None

    def has_seen(self, loss: Tensor) -> bool:
        """Whether a loss, or what was made of it, may be the latest that was seen."""
        return loss.grad_fn is not None and _number_of(loss) <= self._seen

    def origin_in(self, loss: Tensor) -> Located | None:
        """Where the Inf or NaN of a loss that was not seen began; None if unknown."""
        with suppress(Exception):
            return self._reader_of(in_order(loss)).forward(loss)
        return None

    def _reader_of(self, nodes: Sequence[Node]) -> GraphReader:
        return GraphReader(nodes, self._lines, Places(self._model), self.ungraphed.seen)

    def _is_bad(self, loss: Tensor) -> bool:
        """Whether a loss is not finite; False if it was not read."""
        own = local(loss).detach()
        if not self._has_failed and own.device.type != "cpu":
            return False
        return not math.isfinite(float(own if own.numel() == 1 else own.sum()))

    def _spend(
        self, read: Callable[[GraphReader, Tensor], None], loss: Tensor, is_due: bool = False
    ) -> None:
        """Read the graph of a loss, if there is time for it."""
        seconds = math.inf if is_due else self._budget.left(self._step)
        if seconds is not None:
            self._budget.begin(seconds)
            if nodes := in_order(loss):
                read(self._reader_of(nodes), loss)
            self._budget.end()

    def _read(self, reader: GraphReader, loss: Tensor) -> None:
        found = reader.forward(loss)
        # After a bad step that was applied, the graph shows no more than weights of NaN.
        is_of_weights = found is not None and None not in (found.parameter, found.module)
        is_lost = is_of_weights and self._input is not None
        self.located = self.ungraphed.seen.first_made or self._input if is_lost else found

    def line_of(self, loss: Tensor, node: Node) -> Line:
        """Where a node in the graph of a loss was called, as far as it is known."""
        return self._lines.line_of(node, in_order(loss))

    def found(self, has_failed: bool) -> Located | None:
        """The origin of the first Inf or NaN in the present step, or the likely one of an earlier.

        What a lower loss scale may fix is left out, unless the step has failed in another way.
        """
        in_backward = self.gradients.located
        if not (self.gradients.is_proven or has_failed):
            in_backward = None
        likely = self.gradients.likely if self._has_failed else None
        return self.located or in_backward or likely

    def step_ended(
        self, step: int, has_failed: bool, is_hopeless: bool, has_nan: bool = False
    ) -> None:
        """Note the end of a step, once.

        Args:
            step: its number.
            has_failed: whether it failed in a way that no loss scale fixes.
            is_hopeless: whether its gradients were bad in such a way, though its loss was finite.
            has_nan: whether its gradients held a NaN. A scale that is too large may have made it,
                or an infinite slope, which the next step then shows.
        """
        if step == self._step:  # an interrupted call was repeated
            return
        numpy_warnings.step_ended(is_first=not self._step)
        if not self._step:
            for budget in (self._budget, self._retaining, self.ungraphed.budget):
                budget.step_ended(step)
        found = self.located or self.gradients.located
        self._hides_lines = found is not None and (found.operation or "").startswith(OPAQUE)
        self._has_failed |= has_failed or is_hopeless
        self._is_told = has_failed and (self._is_told or is_exact(found))  # in this streak
        self.ungraphed.step_ended(self.located)
        self._input = found if found is not None and found.kind == "input" else None
        self._trace(found)
        self.gradients.step_ended(is_hopeless, has_nan)
        self._step, self._is_over = step, True

    def _trace(self, found: Located | None) -> None:
        """Keep tracebacks in the next steps too if what was found has no line."""
        self._was_on = self._lines.stop()
        if self._traces_left:
            self._traces_left *= found is None or found.line is None
            self._traces_left -= self._traces_left > 0
        elif found is not None and found.line is None and not self._is_traced:
            self._traces_left, self._is_traced = _MOST_TRACED, True
        if self._traces_left:
            self._lines.start()

    def stop(self) -> None:
        """Stop watching."""
        self._lines.stop()
        self.gradients.stop()
        self.ungraphed.stop()


def _number_of(loss: Tensor) -> int:
    """The number of nodes that PyTorch made before a loss."""
    return -1 if loss.grad_fn is None else int(loss.grad_fn._sequence_nr())


class GradientWatch:
    """Finds the first node of a backward pass that makes a bad gradient of finite ones.

    After a step with bad gradients, these bound the part of the graph where the first began. In the
    next steps, hooks are put on the nodes of that part alone that keep a number at which their
    slope is Inf or NaN, or an Inf or NaN itself, and on functions written in Python.

    Attributes:
        is_on: whether to look at the next losses.
        located: the first such node in the present step; None if there is none.
        is_proven: whether the numbers that the node keeps show that no loss scale fixes it.
        likely: the only operation in that part whose slope can be Inf; None if there are others.
    """

    def __init__(self) -> None:
        self.is_on = self.is_proven = False
        self._stays_on = False
        self._left = 0  # steps to look at after a NaN that a scale may have made
        self.located: Located | None = None
        self.likely: Located | None = None
        self._bad: Collection[int] = ()
        self._good: Collection[int] = ()
        self._reader: GraphReader | None = None
        self._hooks = OneCallHooks()

    def note(self, bad: Collection[int], good: Collection[int]) -> None:
        """Note the ids of the parameters whose gradients are bad, and of the others."""
        self._bad, self._good = bad, good

    def watch(self, reader: GraphReader, _: Tensor) -> None:
        """Watch the next backward pass through a graph."""
        part = part_of(reader.nodes, self._bad, self._good)
        # A second derivative reaches other parameters too, through what it does not pass; and a
        # relu or a mask may pass no NaN on to those before it.
        wider = part_of(reader.nodes, self._bad, ())
        self.likely, self._reader = reader.only_steep(part) or reader.only_steep(wider), reader
        suspects = list(suspects_in(part)) or suspects_in(wider)
        for node in suspects:
            self._hooks.add(node.register_hook, partial(weakly(self._after), node))

    def _after(self, node: Node, made: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """Check the gradients that a node made from the given ones."""
        if self.located is not None or self._reader is None:
            return
        if any(read(grad).bad for grad in made) and not any(read(grad).bad for grad in given):
            self.is_proven = bad_in(node, may_unpack=True) is not None or is_at_pole(node)
            if is_custom(node):  # an overflow leaves an Inf in what it makes
                self.is_proven |= not any(
                    bool(grad.isinf().any()) for grad in made if grad is not None
                )
            self.located = self._reader.backward(node, made, given)

    def step_ended(self, is_hopeless: bool, has_nan: bool) -> None:
        """Note the end of a step: whether its gradients were bad at any loss scale, or held NaN."""
        if self._reader is not None:
            self.stop()
        self._stays_on |= is_hopeless
        if self.located is not None:
            self._stays_on = not self.is_proven
        self._left = _AFTER_NAN if has_nan else max(self._left - 1, 0)
        self.is_on = self._stays_on or self._left > 0

    def begin(self) -> None:
        """Begin a step."""
        self.located = self.likely = None
        self.is_proven = False

    def stop(self) -> None:
        """Remove the hooks."""
        self._hooks.remove()
        self._reader = None
