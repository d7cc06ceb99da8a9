"""The graphs of the losses that were scaled in a sampled step of PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from gradscaler.diagnose._gradients.arrays import dtype_name
from gradscaler.diagnose._gradients.reading import Tensor, largest
from gradscaler.diagnose._graph.call_site import Node, differentiated
from gradscaler.diagnose._graph.nodes import MOST_NODES, is_opaque, nodes_from, saved

# Losses that are never negative for targets and inputs as they should be.
_NEVER_NEGATIVE = "binary_cross_entropy", "binary_cross_entropy_with_logits", "nll_loss"
_PASSED = "div", "mean", "sum", "to"  # between it and the loss; a factor may be negative
# What operations keep for their backward pass, and the value in float16 that shows that they
# divided by an Inf. No finite number of float16 has a reciprocal of 0, nor its root.
_OF_INF = {
    "div": ("other", math.inf),
    "rsqrt": ("result", 0.0),
    "reciprocal": ("result", 0.0),
}
_BELOW = -1e-3  # rounding makes a loss of 0 a little less


@dataclass
class ScaledLosses:
    """The parameters that scaled losses reach, and the losses that should not be negative."""

    is_whole: bool = True  # whether no part of a graph was hidden
    reached: set[int] = field(default_factory=set)  # ids of parameters
    absorbed: list[str] = field(default_factory=list)  # the places that divide by an Inf of float16
    positive: list[tuple[str, Tensor]] = field(default_factory=list)  # operations and losses

    def add(self, loss: Tensor, line_of: Callable[[Tensor, Node], str | None]) -> None:
        """Add a loss that is scaled, before its backward pass; waits for the device."""
        for number, node in enumerate(nodes_from([loss.grad_fn])):
            hidden = is_opaque(node) or hasattr(type(node), "saved_tensors")
            if number == MOST_NODES or hidden:  # a Function of the user's may hide a backward pass
                self.is_whole = False
                return
            self.reached.add(id(getattr(node, "variable", None)))
            if not self.absorbed and _divides_by_inf(node):
                line = line_of(loss, node)
                self.absorbed.append(
                    f"{differentiated(node.name())}{f' at {line}' if line else ''}"
                )
        operation = _at_root(loss)
        if operation is not None:
            self.positive.append((operation, loss.detach()))

    def unscaled(self, parameters: Mapping[str, Tensor]) -> Iterable[str]:
        """The names of parameters whose gradients come from no scaled loss."""
        for name, parameter in parameters.items() if self.is_whole else ():
            is_reached = id(parameter) in self.reached or parameter.grad is None
            if not is_reached and largest(parameter.grad) != 0:
                yield name

    def negative(self) -> str | None:
        """The operation of a loss that is negative and should not be; waits for the device."""
        return next((by for by, loss in self.positive if float(loss.mean()) < _BELOW), None)


def _divides_by_inf(node: Node) -> bool:
    """Whether a quotient in float16 is 0 because its divisor is Inf."""
    name, value = _OF_INF.get(differentiated(node.name()), ("", 0.0))
    kept = saved(node, name) if name else None
    return kept is not None and dtype_name(kept) == "float16" and bool((kept.abs() == value).any())


def _at_root(loss: Tensor) -> str | None:
    """The operation that makes a loss, past factors and means; None if it is another one."""
    node = loss.grad_fn
    while node is not None:
        operation = differentiated(node.name())
        if operation in _NEVER_NEGATIVE:
            return operation
        following = [each for each, _ in node.next_functions if each is not None]
        if operation not in _PASSED or len(following) != 1:
            return None
        (node,) = following
    return None
