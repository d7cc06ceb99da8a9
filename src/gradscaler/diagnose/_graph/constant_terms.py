"""Values that are added to a loss, though no gradient passes them."""

from __future__ import annotations

import re
from typing import NamedTuple

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.call_site import Node, called_from, stack_from
from gradscaler.diagnose._graph.calls import Call
from gradscaler.diagnose._graph.summands import adders_of

_LOSSES = re.compile("_loss$|^kl_div$|cross_entropy")
_MAKES_NEW = re.compile("_like$|^new_|^empty")  # of a tensor's shape alone


class Term(NamedTuple):
    """Where a value comes from: the call, as ``"mse_loss at train.py:7"``, and what it is.

    ``is_counted`` says that the call made integers or booleans of what has a graph, as a comparison
    does; else it is a loss function whose inputs have none.
    """

    place: str
    is_counted: bool


class ConstantTerms:
    """Follows what loss functions make of inputs without a graph, up to the graph that adds it.

    Integers and booleans that are made of a tensor with a graph are followed likewise, up to one
    number: elementwise, a script may add the gradient of another function (straight-through).

    Attributes:
        added: for each node that reads such a value, the value.
    """

    def __init__(self) -> None:
        # By ids of tensors. One that is kept here keeps its id from being used again.
        self._values: dict[int, tuple[Tensor, Term]] = {}
        self._detached: dict[int, Tensor] = {}
        self.added: dict[Node, Term] = {}

    def see(self, call: Call) -> None:
        """Note the value that a call makes, or where in a graph one is read."""
        from torch import is_grad_enabled

        if call.operation == "detach":
            self._detached |= {id(each): each for each in call.outputs}
        read = [each for each in (*call.inputs, *call.counts_read) if id(each) in self._values]
        term = self._values[id(read[0])][1] if read else None
        made = [each for each in call.outputs if each.grad_fn is not None]
        if made and term and (not term.is_counted or any(each.numel() == 1 for each in read)):
            self.added |= {each.grad_fn: term for each in made}
        if term and term.is_counted and self._is_meant(call):
            return
        new = [] if made else call.outputs
        if not (made or term) and _LOSSES.search(call.name) and is_grad_enabled():
            term = Term(_place_of(call), is_counted=False)
        if term is None and _counts(call):
            term = Term(_place_of(call), is_counted=True)
            new = []
        if term:
            self._values |= {id(each): (each, term) for each in (*new, *call.counts)}

    def _is_meant(self, call: Call) -> bool:
        """Whether a call detaches a value, or adds it to what another one has detached."""
        if call.operation == "detach":
            return True
        return any(id(each) in self._detached for each in call.inputs)

    def found_in(self, loss: Tensor) -> Term | None:
        """The value that a loss adds; None if it adds no such one."""
        nodes = adders_of(loss.grad_fn)
        return next((self.added[node] for node in nodes if node in self.added), None)


def _counts(call: Call) -> bool:
    """Whether a call makes integers or booleans of the numbers of a tensor that has a graph."""
    from torch import is_grad_enabled

    if not (call.counts and is_grad_enabled()) or _MAKES_NEW.search(call.name):
        return False
    return any(each.grad_fn is not None for each in call.inputs)


def _place_of(call: Call) -> str:
    _, line = called_from(stack_from(call.frame)[0])
    return call.operation + (f" at {line}" if line else "")
