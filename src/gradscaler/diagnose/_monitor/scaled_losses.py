"""The graphs of the losses that were scaled in a sampled step of PyTorch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from gradscaler._in_memory import in_memory
from gradscaler.diagnose._gradients.arrays import alone, dtype_name
from gradscaler.diagnose._gradients.reading import Tensor, largest
from gradscaler.diagnose._graph.call_site import Node, behind_forms, differentiated
from gradscaler.diagnose._graph.lines import Line
from gradscaler.diagnose._graph.nodes import (
    MOST_LOSSES,
    MOST_NODES,
    is_leaf,
    is_opaque,
    nodes_from,
    saved,
    shape_of,
)
from gradscaler.diagnose._graph.paired_products import paired_in
from gradscaler.diagnose._graph.summands import adds_a_constant, subtracted_in, summands_of
from gradscaler.diagnose._graph.summed_terms import summed_in
from gradscaler.diagnose._graph.weighted_terms import weighted_in
from gradscaler.diagnose._graph.wrong_axes import wrong_axes_in
from gradscaler.diagnose._graph.zero_losses import ends_of, is_at_floor, is_margin
from gradscaler.diagnose._graph.zero_masks import zero_masked_in
from gradscaler.diagnose._monitor.compared import classes_of, targets_of
from gradscaler.diagnose._monitor.listed import in_lists
from gradscaler.diagnose._operations.operation import Role
from gradscaler.diagnose._operations.rows import names_with
from gradscaler.diagnose._record.events import Counted, Event
from gradscaler.diagnose._record.lines import Targets
from gradscaler.diagnose._record.thresholds import (
    BELOW_0,
    LEAST_OWN_SCALE,
    LEAST_PASSES,
    MANY_IN_A_ROW,
    SAME_DIFFERENCE,
)

_NEVER_NEGATIVE = names_with(Role.NEVER_NEGATIVE)
_PASSED = "div", "mean", "sum", "to"  # between it and the loss; a factor may be negative
# What operations keep for their backward pass, and the value in float16 that shows that they
# divided by an Inf. No finite number of float16 has a reciprocal of 0, nor its root.
_OF_INF = {
    "div": ("other", math.inf),
    "rsqrt": ("result", 0.0),
    "reciprocal": ("result", 0.0),
}
_DIVIDES = "div", "mul"  # a loss of a micro-batch, by or with a number
_FLATTEN = "sigmoid", "tanh"  # whose slope is at most 1 where they are steepest, and else near 0
_OF_LOGITS = names_with(Role.TAKES_LOGITS)
_NORMALISE = names_with(Role.MAKES_PROBABILITIES)
# What comes between a loss and its differences of outputs and targets, and how these are taken.
_ELEMENTWISE = "abs", "div", "mean", "mul", "pow", "sqrt", "sum", "to"
_KEEP_TARGETS = names_with(Role.COMPARES)
_DIFFERENCES = "expand", "sub", "to", *_KEEP_TARGETS
_RESHAPES = "unsqueeze", "index"
_PAIRS = "sub", "cdist", "euclidean_dist", "pdist"  # distances of outputs from one another


@dataclass
class ScaledLosses:
    """What the graphs of scaled losses show: the parameters that they reach, and mistakes."""

    is_whole: bool = True  # whether no part of a graph was hidden
    reached: dict[int, Tensor] = field(default_factory=dict)  # parameters by their ids
    mistakes: dict[Event, str] = field(default_factory=dict)  # their places
    positive: list[tuple[str, Tensor]] = field(default_factory=list)  # operations and losses
    by_hand: set[float] = field(default_factory=set)  # powers of 2 that multiply a loss
    adds_a_constant: bool = False  # whether a loss has a term without a graph
    has_inputs: bool = False  # whether a loss depends on a leaf that is no parameter
    is_at_floor: bool = False  # whether a loss is a constant, as what it floors is below it
    chance: float | None = None  # the loss of a guess, if the latest loss is a cross entropy
    targets: Targets | None = None  # what the latest loss compares
    kinds: list[str] = field(default_factory=list)  # of losses whose gradients add up; "" of others
    classes: list[tuple[int, ...]] = field(default_factory=list)  # of the labels of each loss

    def add(self, loss: Tensor, line_of: Callable[[Tensor, Node], Line]) -> None:
        """Add a loss that is scaled, before its backward pass; waits for the device."""
        adds_up = not self.kinds or any(largest(p.grad) for p in self._with_gradients())
        self.is_whole &= self._add_nodes(loss, line_of)
        if loss.grad_fn is None:
            return
        self.adds_a_constant |= self.is_whole and adds_a_constant(loss.grad_fn)
        if ends := ends_of(loss):
            self._note_ends(ends, loss, line_of)
        root, reader = _at_root(loss.grad_fn, _PASSED)
        self.is_at_floor |= root is not None and is_at_floor(root)
        is_early = len(self.positive) < MOST_LOSSES
        name = "" if root is None else differentiated(root.name())
        self.chance = None if root is None or _is_sum(root, reader) else _chance(root, name)
        compares, _ = _at_root(loss.grad_fn, _ELEMENTWISE)
        is_divided = differentiated(loss.grad_fn.name()) in _DIVIDES
        is_alike = adds_up and not is_divided and compares is not None
        self.kinds.append(differentiated(compares.name()) if is_alike else "")
        self.targets = None if compares is None else targets_of(compares)
        if root is not None and is_margin(root):
            self._note(Event.MARGIN, root, Line())
        if name in _NEVER_NEGATIVE and is_early:
            self.positive.append((name, alone(loss.detach())))
        for summand in summands_of(loss.grad_fn):
            node, reader = _at_root(summand, _ELEMENTWISE)
            if node is not None and (classes := classes_of(node)) is not None:
                self.classes.append(classes)
            sizes = "" if node is None else _broadcast(node, reader)
            if sizes and not _is_of_energy(loss.grad_fn, node):
                self._note(Event.BROADCAST, node, line_of(loss, node), sizes)
        for event, found_in in _IN_LOSSES.items():
            with suppress(Exception):  # a loss may compare what is of any kind
                if (found := found_in(loss.grad_fn)) is not None:
                    self._note(event, found[0], line_of(loss, found[0]), found[1])

    def _note_ends(
        self,
        ends: Sequence[tuple[str, Node]],
        loss: Tensor,
        line_of: Callable[[Tensor, Node], Line],
    ) -> None:
        """Note what ends all gradients of a loss; of one that is not 0, a relu that is off."""
        cause, node = ends[0]
        if not bool(loss.detach().any()):
            self._note(Event.ENDED, node, line_of(loss, node), before=f"{cause} ")
        elif off := next((node for cause, node in ends if cause == "margin"), None):
            gives = "0" if differentiated(off.name()) == "relu" else "its limit"
            rest = f" gives {gives} for all {math.prod(shape_of(off))} inputs"
            self._note(Event.OFF, off, line_of(loss, off), rest)

    def _with_gradients(self) -> list[Tensor]:
        """The first parameter that losses before have reached, if it has a gradient."""
        return [p for p in islice(self.reached.values(), 1) if p.grad is not None]

    def note_scale(self, loss: Tensor) -> None:
        """Note a loss scale of the script's own."""
        if scale := _scale_by_hand(loss):
            self.by_hand.add(scale)

    def _add_nodes(self, loss: Tensor, line_of: Callable[[Tensor, Node], Line]) -> bool:
        """Add the nodes of a loss; False if a part of its graph is hidden."""
        tensor_class: Any = sys.modules["torch"].Tensor
        flattening: list[Node] = []
        nodes: list[Node] = []
        for number, node in enumerate(nodes_from([loss.grad_fn])):
            hidden = is_opaque(node) or hasattr(type(node), "saved_tensors")
            if number == MOST_NODES or hidden:  # a Function of the user's may hide a backward pass
                return False
            nodes.append(node)
            if is_leaf(node):
                self.reached[id(node.variable)] = node.variable
                self.has_inputs |= type(node.variable) is tensor_class
            elif differentiated(node.name()) in _FLATTEN:
                flattening.append(node)
            if Event.ABSORBED not in self.mistakes and _divides_by_inf(node):
                self._note(Event.ABSORBED, node, line_of(loss, node))
            for event, found_in in _OF_INPUTS.items():
                if (inner := found_in(node)) is not None:
                    self._note(event, inner, line_of(loss, inner))
            if Event.LINEAR not in self.mistakes and _may_be_kl_of_probabilities(node):
                self._note_kl(line_of(loss, node))
        if len(flattening) >= MANY_IN_A_ROW:
            self._note_row(loss, nodes, line_of)
        self._note_axes(loss, nodes, line_of)
        return True

    def _note_axes(
        self, loss: Tensor, nodes: list[Node], line_of: Callable[[Tensor, Node], Line]
    ) -> None:
        """Note operations along a wrong axis, among the nodes of a loss."""
        with suppress(Exception):  # what a node keeps may be of any kind
            for kind, node, rest in wrong_axes_in(nodes):
                self._note(_OF_AXES[kind], node, line_of(loss, node), rest)

    def _note_row(
        self, loss: Tensor, nodes: list[Node], line_of: Callable[[Tensor, Node], Line]
    ) -> None:
        """Note the first of many sigmoids and tanhs in a row, among the nodes of a loss."""
        row = _longest_row(nodes)
        if len(row) >= MANY_IN_A_ROW:
            rest = f" and {len(row) - 1} more in a row"
            self._note(Event.FLAT, row[0], line_of(loss, row[0]), rest)

    def _note(self, event: Event, node: Node, line: Line, rest: str = "", before: str = "") -> None:
        at = f" at {line.line}" if line.line else ""
        self.mistakes.setdefault(event, f"{before}{differentiated(node.name())}{at}{rest}")

    def _note_kl(self, line: Line) -> None:
        """Note a node that takes probabilities, if it is of kl_div and not of a user's formula."""
        if line.function == "kl_div":
            at = f" at {line.line}" if line.line else ""
            self.mistakes.setdefault(Event.LINEAR, f"kl_div{at}")

    def unscaled(self, parameters: Mapping[str, Tensor]) -> Iterable[str]:
        """The names of parameters whose gradients come from no scaled loss."""
        for name, parameter in parameters.items() if self.is_whole else ():
            is_reached = id(parameter) in self.reached or parameter.grad is None
            if not is_reached and largest(parameter.grad) != 0:
                yield name

    def unheld(self, known: Collection[int]) -> list[Tensor]:
        """The parameters that are neither the model's nor an optimizer's, by known ids."""
        made: Any = sys.modules["torch"].nn.Parameter
        reached, self.reached = self.reached, {}
        return [p for key, p in reached.items() if key not in known and isinstance(p, made)]

    def note_unheld(self, unheld: Sequence[Tensor], model: Any) -> None:
        """Note parameters that are neither the model's nor an optimizer's."""
        ids = {id(parameter) for parameter in unheld}
        listed = {id(p): name for name, p in in_lists(model) if id(p) in ids}
        if listed:
            first = next(iter(listed.values()))
            self.mistakes[Event.UNREGISTERED] = f"{len(listed)} parameters ({first} first)"
        else:
            more = f" and {len(unheld) - 1} more" if len(unheld) > 1 else ""
            self.mistakes[Event.UNHELD] = f"{_name_of(unheld[0])}{more}"

    def fields(self) -> dict[str, object]:
        """The fields of a :class:`~gradscaler.diagnose._record.lines.Sample` that losses show."""
        return {"chance": self.chance, "targets": self.targets, "classes": self._neighbours()}

    def _neighbours(self) -> tuple[int, ...] | None:
        """The one class of all labels, or two that follow each other, if batches are sorted.

        Batches of pairs of classes, as for embeddings, hold others.
        """
        if not self.classes:
            return None
        classes = sorted({label for each in self.classes for label in each})
        is_sorted = all(self.classes) and classes[-1] - classes[0] <= 1
        return tuple(classes) if is_sorted else ()

    def own_scales(self) -> list[Counted]:
        """The events of the script's own loss scales."""
        each = [Counted(Event.BY_HAND, f"{scale:.0f}") for scale in self.by_hand]
        return [Counted(Event.BY_HAND), *each] if each else []

    def events(self, loss: float | None) -> Iterable[Counted]:
        """The events of an iteration with this loss; waits for the device."""
        if any(float(each.mean()) < BELOW_0 for _, each in self.positive):
            yield Counted(Event.NEGATIVE)
        yield from self.own_scales()
        if len(self.kinds) >= LEAST_PASSES and len({*self.kinds}) == 1 and self.kinds[0]:
            yield from (Counted(Event.ADDED_UP), Counted(Event.ADDED_UP, str(len(self.kinds))))
        if self.is_at_floor:
            yield Counted(Event.FLOORED)
        for event, place in self.mistakes.items():
            if event is not Event.ABSORBED or math.isfinite(loss or 0.0):
                yield Counted(event)
                yield Counted(event, place)


def _longest_row(nodes: Iterable[Node]) -> list[Node]:
    """The sigmoids and tanhs on that way through a graph which passes most, in forward order."""
    rows: dict[Node, tuple[Node, ...]] = {}
    longest: tuple[Node, ...] = ()
    inner = (node for node in nodes if not is_leaf(node))
    for node in sorted(inner, key=lambda each: each._sequence_nr()):
        row: tuple[Node, ...] = ()
        for each in _before(node):
            row = max(row, rows.get(each, ()), key=len)
        rows[node] = row = (*row, node) if differentiated(node.name()) in _FLATTEN else row
        longest = max(longest, row, key=len)
    return list(longest)


def _chance(node: Node, name: str) -> float | None:
    """The logarithm of the number of classes, if a node is that of a cross entropy."""
    if name == "binary_cross_entropy_with_logits":
        return math.log(2)
    below = _before(node) if name == "nll_loss" else []
    if len(below) != 1 or differentiated(below[0].name()) != "log_softmax":
        return None
    classes = shape_of(below[0])[1:2]
    return math.log(*classes) if classes and classes[0] > 1 else None


def _is_sum(node: Node, reader: Node) -> bool:
    """Whether a loss is the sum of a node's over the batch."""
    is_summed = reader is not None and differentiated(reader.name()) == "sum"
    return saved(node, "reduction") == 2 or is_summed  # as torch.nn._reduction has it


def _name_of(parameter: Tensor) -> str:
    """A parameter as the script names it, or a module that has it, such as ``"head.weight"``.

    Else it is named by the class of the largest module that has it, or by its shape.
    """
    variables = vars(sys.modules["__main__"])
    # The first name counts: a later one may be that of a loop.
    named = [(id(each), name) for name, each in variables.items() if not name.startswith("_")]
    script = dict(reversed(named))
    if id(parameter) in script:
        return script[id(parameter)]
    found = [
        (id(module) not in script, -name.count("."), module, name)
        for module in in_memory(sys.modules["torch"].nn.Module)
        for name, own in module.named_parameters()
        if own is parameter
    ]
    if not found:
        return f"one of shape {list(parameter.shape)}"
    *_, module, name = min(found, key=lambda each: each[:2])
    return f"{script.get(id(module), type(module).__name__)}.{name}"


def _scale_by_hand(loss: Tensor) -> float:
    """The large power of 2 by which the code multiplies a loss, on the host; 0 if it does not."""
    node, scale = loss.grad_fn, 1.0
    while node is not None:
        factor = _power_of_2(node) if "Mul" in node.name() else None
        is_quotient = node.name().startswith("Div")  # by the number of micro-batches
        if not (factor or is_quotient) or len(_before(node)) != 1:
            break
        scale *= factor or 1.0
        (node,) = _before(node)
    return scale if scale >= LEAST_OWN_SCALE else 0.0


def _power_of_2(node: Node) -> float | None:
    """The power of 2 on the host, above 1, that a product has as a factor; None if it has none."""
    factor = saved(node, "other")
    if factor is None or factor.numel() != 1 or factor.requires_grad:
        return None
    value = float(factor) if factor.device.type == "cpu" else 0.0
    return value if value > 1 and math.frexp(value)[0] == 0.5 else None


def _divides_by_inf(node: Node) -> bool:
    """Whether a quotient in float16 is 0 because its divisor is Inf."""
    name, value = _OF_INF.get(differentiated(node.name()), ("", 0.0))
    kept = saved(node, name) if name else None
    return kept is not None and dtype_name(kept) == "float16" and bool((kept.abs() == value).any())


def _normalised(node: Node) -> Node | None:
    """The softmax or sigmoid whose output a loss takes for logits; None if it takes another."""
    if differentiated(node.name()) not in _OF_LOGITS:
        return None
    inner = behind_forms(node.next_functions[0][0])  # not that of a target, which is the second
    return inner if inner is not None and differentiated(inner.name()) in _NORMALISE else None


def _cut(node: Node) -> Node | None:
    """The ReLU whose output a cross entropy takes for logits; None if it takes another."""
    name, below = differentiated(node.name()), _before(node)
    if name == "nll_loss" and below and differentiated(below[0].name()) == "log_softmax":
        (node,) = below
    elif name != "binary_cross_entropy_with_logits":
        return None
    inner = behind_forms(node.next_functions[0][0])
    return inner if inner is not None and differentiated(inner.name()) == "relu" else None


def _may_be_kl_of_probabilities(node: Node) -> bool:
    """Whether a node may be the last of kl_div, whose input are probabilities.

    PyTorch computes it as xlogy(target, target) - target * input, and as exp(target) * (target -
    input) with log_target=True.
    """
    parts = "sub", "mul"
    names = [differentiated(node.name())]
    for _ in parts:
        if names[-1] not in parts or len(node.next_functions) != 2:
            return False
        node = node.next_functions[1][0]
        names.append("" if node is None else differentiated(node.name()))
    node = behind_forms(node)
    return sorted(names[:2]) == sorted(parts) and node is not None and _are_probabilities(node)


def _are_probabilities(node: Node) -> bool:
    """Whether a node makes numbers from 0 to 1, by a softmax or sigmoid, an exp or a quotient."""
    name = differentiated(node.name())
    if name == "exp":
        result = saved(node, "result")
        return result is not None and bool((result <= 1).all())
    given, divisor = saved(node, "self"), saved(node, "other")
    if name != "div" or given is None or divisor is None:
        return name in _NORMALISE
    quotient = given / divisor
    sums = (quotient.sum(dim) for dim in range(quotient.ndim))
    is_one = any(bool(((each - 1).abs() < SAME_DIFFERENCE).all()) for each in sums)
    return is_one and bool((quotient >= 0).all())


# What a loss holds that may be a mistake, and what finds its node, with what it makes.
_IN_LOSSES = {
    Event.WEIGHTED: weighted_in,
    Event.SUMMED_TERM: summed_in,
    Event.PAIRED: paired_in,
    Event.ZERO_MASKED: zero_masked_in,
}
# What is wrong with the input of a loss, and what finds the node that makes it.
_OF_INPUTS = {Event.TWICE: _normalised, Event.CUT: _cut}
_OF_AXES = {
    "across": Event.ACROSS,
    "over queries": Event.OVER_QUERIES,
    "pooled batch": Event.POOLED_BATCH,
    "whole norm": Event.WHOLE_NORM,
}


def _broadcast(node: Node, reader: Node) -> str:
    """The sizes, if a loss compares each of n outputs with each of n targets.

    One of them has the shape [n, 1], the other [n]. A parameter of shape [n] may be meant so, and
    so may outputs whose shape the code made [n, 1], and a table of n times n targets.

    Args:
        node: the node that may take the differences.
        reader: the node that reads them, and keeps them then.
    """
    if differentiated(node.name()) in _KEEP_TARGETS:
        reader = node
    while differentiated(node.name()) in _DIFFERENCES:
        below = _before(node)
        if len(below) != 1 or is_leaf(below[0]):
            return ""
        before, after = shape_of(below[0]), shape_of(node)
        is_table = len(after) == 2 and after[0] == after[1] > 1
        if is_table and before in (after[:1], (after[0], 1)):
            is_meant = differentiated(below[0].name()) in _RESHAPES or not _repeats(reader, before)
            return "" if is_meant else f" makes {list(after)} of {list(before)}"
        (node,) = below
    return ""


def _is_of_energy(loss: Node, node: Node) -> bool:
    """Whether a loss also takes the distances of a node's outputs from one another, as a minus.

    So do an energy distance and a CRPS, which mean all pairs of outputs and targets.
    """
    outputs = _behind_forms_of(_before(node)[0])
    for summand in subtracted_in(loss):
        root, _ = _at_root(summand, _ELEMENTWISE)
        pairs = None if root is None else _behind_forms_of(root)  # a large cdist ends in a view
        is_of_pairs = pairs is not None and differentiated(pairs.name()) in _PAIRS
        if is_of_pairs and {_behind_forms_of(each) for each in _before(pairs)} == {outputs}:
            return True
    return False


def _behind_forms_of(node: Node) -> Node:
    """The node that computes what a node shows in another shape; a leaf if none does."""
    return node if is_leaf(node) else behind_forms(node)


def _repeats(node: Node, outputs: tuple[int, ...]) -> bool:
    """Whether a node keeps n targets that were repeated for n outputs, or differences from them."""
    targets, differences = saved(node, "target"), saved(node, "self")
    along = 0 if len(outputs) == 2 else 1  # the dimension that repeats the targets
    if targets is not None:
        rest = targets - targets.narrow(along, 0, 1)
    elif differences is not None:  # in each, a row less another is the same number
        rest = differences - differences.narrow(along, 0, 1)
        rest = rest - rest.narrow(1 - along, 0, 1)
    else:
        return False
    kept = differences if targets is None else targets
    return float(rest.detach().abs().max()) <= SAME_DIFFERENCE * float(kept.detach().abs().max())


def _is_weighted(node: Node) -> bool:
    """Whether a node multiplies its input by several numbers, such as those of a mask."""
    factors = (saved(node, name) for name in ("self", "other"))
    is_product = differentiated(node.name()) == "mul"
    return is_product and any(each is not None and each.numel() > 1 for each in factors)


def _before(node: Node) -> list[Node]:
    """The nodes that made a node's inputs."""
    return [each for each, _ in node.next_functions if each is not None]


def _at_root(node: Node, passed: tuple[str, ...]) -> tuple[Node, Node]:
    """The node that makes a loss, past other operations that take one input, and what reads it."""
    reader = None
    while node is not None:
        operation, below = differentiated(node.name()), _before(node)
        if operation not in passed or len(below) != 1 or _is_weighted(node):
            return node, reader
        reader, (node,) = node, below
    return None, reader
