"""What the nodes of one graph keep, held until its backward pass is over."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from gradscaler.diagnose._gradients.arrays import to_numpy
from gradscaler.diagnose._gradients.reading import Tensor, count_nonfinite, read
from gradscaler.diagnose._graph.call_site import Node
from gradscaler.diagnose._graph.nodes import held_by, in_order, tensors_in
from gradscaler.diagnose._graph.reader import GraphReader
from gradscaler.diagnose._graph.slopes import is_at_pole, part_of
from gradscaler.diagnose._record.located import Located


class RetainedGraph:
    """The nodes of a graph, and the tensors that the suspicious ones of them keep.

    A backward pass frees what the nodes keep. Only references are held, so nothing is computed or
    copied. The nodes themselves can be read after the pass, too.

    Args:
        root: the node of the loss.
        suspects: the suspicious nodes; none if the backward pass is over.
    """

    def __init__(self, root: Node, suspects: Sequence[Node] = ()) -> None:
        self._root = root
        self._held = {node: held_by(node) for node in suspects}

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes, in the order of the forward pass."""
        return in_order(self._root)

    @cached_property
    def _kept(self) -> Mapping[Node, Mapping[str, Tensor]]:
        return {node: tensors_in(held) for node, held in self._held.items()}

    def located(
        self, reader: GraphReader, bad: Collection[int], good: Collection[int]
    ) -> Located | None:
        """Where the first bad gradient began; it is only likely if no held tensor shows it.

        Args:
            reader: reads the nodes' places.
            bad: the ids of the parameters whose gradient is not finite.
            good: those of the parameters whose gradient is.
        """
        # A relu or a mask may pass no NaN on to parameters before it, so they bound nothing then.
        parts = (part_of(self.nodes, bad, bounds) for bounds in (good, ()))
        return next(filter(None, (self._located_in(part, reader) for part in parts)), None)

    def _located_in(self, part: Sequence[Node], reader: GraphReader) -> Located | None:
        for node in part:  # the first that made an Inf or NaN, which the loss left out
            for tensor in self._kept.get(node, {}).values():
                if read(tensor).state == "bad":
                    is_given = tensor.grad_fn is None and not tensor.requires_grad
                    likely = reader.likely(node)
                    return reader.given(node, tensor) if is_given else _seen(likely, tensor)
        for node in reversed(part):  # the first of the backward pass
            if node in self._kept and is_at_pole(node, self._kept[node]):
                return _seen(reader.likely(node), None)
        return reader.only_steep(part)


def _seen(likely: Located, tensor: Tensor | None) -> Located:
    """A place that is no conclusion any more, with the numbers of the tensor that shows it."""
    found = replace(likely, is_likely=False)
    if tensor is None:
        return found
    values = to_numpy(tensor.detach())
    num_inf, num_nan, largest = count_nonfinite(values)
    size = values.size
    return replace(found, num_inf=num_inf, num_nan=num_nan, size=size, largest_finite=largest)
