"""Values of loss functions that are added to a loss, though no gradient passes them."""

from __future__ import annotations

import re

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.call_site import Node, called_from, stack_from
from gradscaler.diagnose._graph.calls import Call
from gradscaler.diagnose._graph.summands import adders_of

_LOSSES = re.compile("_loss$|^kl_div$|cross_entropy")


class ConstantTerms:
    """Follows what loss functions make of inputs without a graph, up to the graph that adds it.

    Attributes:
        added: for each node that reads such a value, the loss function.
    """

    def __init__(self) -> None:
        # By ids of tensors. One that is kept here keeps its id from being used again.
        self._values: dict[int, tuple[Tensor, str]] = {}
        self.added: dict[Node, str] = {}

    def see(self, call: Call) -> None:
        """Note the value that a call makes, or where in a graph one is read."""
        from torch import is_grad_enabled

        made = [each for each in call.outputs if each.grad_fn is not None]
        place = next((self._values[id(each)][1] for each in call.inputs if self._has(each)), "")
        if made and place:
            self.added |= {each.grad_fn: place for each in made}
        elif not made:
            if _LOSSES.search(call.name) and is_grad_enabled():
                _, line = called_from(stack_from(call.frame)[0])
                place = call.operation + (f" at {line}" if line else "")
            if place:
                self._values |= {id(each): (each, place) for each in call.outputs}

    def _has(self, tensor: Tensor) -> bool:
        return id(tensor) in self._values

    def found_in(self, loss: Tensor) -> str | None:
        """The loss function whose value a loss adds, as ``"mse_loss at train.py:7"``, or None."""
        nodes = adders_of(loss.grad_fn)
        return next((self.added[node] for node in nodes if node in self.added), None)
