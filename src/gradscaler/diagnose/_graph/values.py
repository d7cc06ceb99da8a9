"""The values in the forward pass of a graph, as far as its nodes keep them or show them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from gradscaler.diagnose._gradients.arrays import local
from gradscaler.diagnose._gradients.reading import Reading, Tensor, read
from gradscaler.diagnose._graph.call_origins import CallOrigins
from gradscaler.diagnose._graph.call_site import Node, aten_name, is_form
from gradscaler.diagnose._graph.nodes import is_custom, is_leaf, is_there, kept, saved

_Edge = tuple[Node, int]  # a node, and which of its results
_VIEWS = "view", "unsafe_view"  # their nodes do not keep the shape that they were given


class Values:
    """The results of a graph's nodes.

    Many nodes keep their inputs or their result, which shows the results of the nodes around them.
    Other results are computed again from these, for operations that give the same each time.

    Args:
        nodes: the nodes.
        has_nan: whether the loss is NaN.
        origins: what was seen of operations without a graph.

    Attributes:
        constants: the tensors that a node keeps and no node made, such as the batch, by the node.
        has_nan: whether the loss is NaN.
        ungraphed: by a node and which of its results, an Inf or NaN that no node before it made.
        ungraphed_origin: where the Inf or NaN of such a tensor was made; None if that was not seen.
        unmasked: for a node and one of its inputs, whether a -Inf there is no mask.
    """

    def __init__(self, nodes: Iterable[Node], has_nan: bool, origins: CallOrigins) -> None:
        self.has_nan = has_nan
        self.ungraphed, self.ungraphed_origin = origins.ungraphed, origins.origin_of
        self.constants: dict[Node, dict[str, Tensor]] = {}
        self.unmasked: dict[tuple[Node, _Edge], bool] = {}
        self._tensors: dict[_Edge, Tensor | None] = {}
        for node in nodes:
            self._add(node)
        self._readings = dict(origins.readings)

    def _add(self, node: Node) -> None:
        for name, tensor in kept(node).items():
            maker = tensor.grad_fn
            if maker is not None:
                self._tensors[maker, tensor.output_nr] = tensor
            elif not (tensor.requires_grad or name.startswith("result")):  # or it is a leaf
                self.constants.setdefault(node, {})[name] = tensor

    def reading(self, node: Node, number: int = 0) -> Reading | None:
        """The reading of a node's result; None if it is not known."""
        edge = node, number
        if edge not in self._readings:
            tensor = self.tensor(node, number)
            if tensor is None:
                return None
            self._readings[edge] = read(tensor)
        return self._readings[edge]

    def tensor(self, node: Node, number: int = 0) -> Tensor | None:
        """A node's result; None if it is not known."""
        edge = node, number
        if edge not in self._tensors:
            self._tensors[edge] = None  # for a graph that is too deep for the stack
            self._tensors[edge] = self._computed(node, number)
        return self._tensors[edge]

    def _computed(self, node: Node, number: int) -> Tensor | None:
        if is_leaf(node):
            return node.variable if is_there(node.variable) else None
        again = None
        if not is_custom(node):
            with suppress(Exception):
                again = _again(node, number, self)
        if again is None and is_form(node):  # it shows some of its input's numbers
            return _viewed(self.tensor(*node.next_functions[0]), node)
        return again


def _viewed(tensor: Tensor | None, node: Node) -> Tensor | None:
    """A tensor in the shape of a node's result, if that holds the same numbers in their order."""
    if tensor is not None and aten_name(node.name()) in _VIEWS:
        with suppress(Exception):
            return tensor.detach().reshape(tuple(node._input_metadata[0].shape))
    return tensor


def _again(node: Node, number: int, values: Values) -> Tensor | None:
    """A node's result, computed again by its operation from the arguments that are known.

    Ones stand for those that are not, if a known one is Inf or NaN: the result then shows whether
    the operation passes that on.
    """
    import torch

    made = node._input_metadata[number]
    dtype, shape, device = made.dtype, tuple(made.shape), made.device.type
    words = aten_name(node.name())
    own = kept(node)
    for name in (words, f"_{words}"):
        for call in operations_to_compute(name):
            arguments = _Arguments(node, own, values)
            given = arguments.of(call._schema.arguments, dtype)
            if given is None or not (arguments.are_known or arguments.has_bad):
                continue
            with suppress(Exception), torch.no_grad(), torch.autocast(device, enabled=False):
                results = call(**given)
                result = results[number] if isinstance(results, (tuple, list)) else results
                if result.dtype == dtype and tuple(result.shape) == shape:
                    return result
    return None


def operations_to_compute(name: str) -> list[Any]:
    """The operations of PyTorch under a name that give the same result again, and do no more.

    Others overwrite what a later backward pass needs, or draw from the user's random numbers, which
    PyTorch tags each of them with.
    """
    import torch

    packet: Any = getattr(torch.ops.aten, name, None)
    every = [getattr(packet, each) for each in (() if packet is None else packet.overloads())]
    draws = torch.Tag.nondeterministic_seeded
    return [each for each in every if not (each._schema.is_mutable or draws in each.tags)]


class _Arguments:
    """The arguments of an operation, from what its node keeps and the nodes before it made.

    Attributes:
        are_known: whether nothing stands for a number that is not known.
        has_bad: whether a known tensor among them holds an Inf or a NaN.
    """

    def __init__(self, node: Node, own: dict[str, Tensor], values: Values) -> None:
        self._node, self._own, self._values = node, own, values
        self.are_known, self.has_bad = True, False

    def of(self, schema: Any, dtype: object) -> dict[str, Any] | None:
        """The arguments by name; None if there is nothing to give for one."""
        found: dict[str, Any] = {}
        edges = self._edges(schema)
        for each in schema:
            number = saved(self._node, each.name)
            if each.name in self._own:
                found[each.name] = self._seen(self._own[each.name])
            elif number is not None:  # a factor is a tensor, where a number is asked for, too
                is_tensor = str(each.type) == "number" and hasattr(number, "item")
                found[each.name] = _signed(number.item() if is_tensor else number)
            elif str(each.type) == "List[Tensor]":
                found[each.name] = [self._tensor(edge) for edge in self._node.next_functions]
            elif each.name in edges:
                is_left_out = edges[each.name][0] is None and str(each.type).startswith("Optional")
                found[each.name] = None if is_left_out else self._tensor(edges[each.name])
            elif each.name == "dtype":
                found["dtype"] = dtype
            elif str(each.type) == "number" and not each.has_default_value():
                found[each.name], self.are_known = 1, False
            elif not each.has_default_value() and not str(each.type).startswith("Optional"):
                return None
        return found

    def _edges(self, schema: Any) -> dict[str, _Edge]:
        """The edges of a node by its operation's tensors; a mask or an index has none."""
        edges = self._node.next_functions
        tensors = [each.name for each in schema if "Tensor" in str(each.type)]
        if len(tensors) != len(edges):
            tensors = [name for name in tensors if not hasattr(type(self._node), f"_saved_{name}")]
        return dict(zip(tensors, edges, strict=True)) if len(tensors) == len(edges) else {}

    def _tensor(self, edge: _Edge) -> Tensor:
        import torch

        maker, number = edge
        tensor = None if maker is None else self._values.tensor(maker, number)
        if tensor is not None:
            return self._seen(tensor)
        self.are_known = False
        if maker is None:
            return torch.ones((), dtype=self._node._input_metadata[0].dtype)
        made = maker._input_metadata[number]
        return torch.ones(tuple(made.shape), dtype=made.dtype, device=made.device)

    def _seen(self, tensor: Tensor) -> Tensor:
        self.has_bad |= read(tensor).state == "bad"
        return _plain(tensor)


def _plain(tensor: Tensor) -> Tensor:
    """A tensor of PyTorch's own; an operation on another may be a collective."""
    if hasattr(tensor, "to_local") or tensor.is_sparse:
        raise TypeError("not a dense tensor of this process")
    return local(tensor).detach()


def _signed(saved: object) -> object:
    """A number that a node keeps; it gives a negative one, such as a dimension, as unsigned."""
    if isinstance(saved, tuple):
        return [_signed(each) for each in saved]
    if isinstance(saved, int) and saved >= 2**63:
        return saved - 2**64
    return saved
