"""The nodes of PyTorch's graph of a loss, and the tensors that they keep."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from operator import methodcaller
from typing import Any

from gradscaler.diagnose._gradients.reading import Tensor, floating
from gradscaler.diagnose._graph.call_site import Node
from gradscaler.diagnose._record.located import OPAQUE

MOST_NODES = 10_000  # of one graph
MOST_LOSSES = 100  # of one step: few accumulate more micro-batches, and what is kept takes memory
_FACTORS = "self", "other"
_RAW = "_raw_saved_"
_number_of = methodcaller("_sequence_nr")  # the order in which PyTorch made the nodes
_PARTLY_WRITTEN = {"CtcLossBackward": "result1"}  # the rest of that memory may hold any number


def nodes_from(waiting: list[Node], seen: set[Node] | None = None) -> Iterator[Node]:
    """The given nodes of PyTorch's graph, and all nodes that they lead to, without those seen."""
    seen = set() if seen is None else seen
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or not hasattr(node, "register_prehook"):
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]


def in_order(loss: Tensor | Node) -> list[Node]:
    """The nodes below a loss, or a node, in the order of the forward pass, without the leaves.

    The list is empty if the graph is larger than ``MOST_NODES``.
    """
    root = loss if hasattr(loss, "next_functions") else getattr(loss, "grad_fn", None)
    found = [] if root is None else [root]
    seen = {None, root}
    for node in found:  # grows meanwhile
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                found.append(following)
        if len(found) > MOST_NODES:
            return []
    return sorted((node for node in found if not is_leaf(node)), key=_number_of)


def shape_of(node: Node) -> tuple[int, ...]:
    """The shape of the tensor that a node makes; empty if it makes several."""
    shapes = [tuple(made.shape) for made in getattr(node, "_input_metadata", ())]
    return shapes[0] if len(shapes) == 1 else ()


def is_leaf(node: Node) -> bool:
    """Whether a node gives its gradient to a leaf, such as a parameter."""
    return type(node).__name__ == "AccumulateGrad"


def is_custom(node: Node) -> bool:
    """Whether a node is that of a function written in Python, or of compiled code."""
    return not node.name()[-1:].isdigit()


def is_opaque(node: Node) -> bool:
    """Whether a node hides a graph of its own, as compiled code does."""
    return bool(node.name().startswith(OPAQUE))


def reads_unknown(node: Node) -> bool:
    """Whether a node reads something that no node made, such as the batch, or a number."""
    return any(before is None for before, _ in node.next_functions)


def kept(node: Node, may_unpack: bool = False) -> dict[str, Tensor]:
    """The floating-point tensors that a node keeps, by the name of the argument or result.

    A tensor that is packed by a hook, as in a checkpoint, is computed again when it is unpacked. So
    it is left out, unless ``may_unpack``.
    """
    return tensors_in(held_by(node, may_unpack))


def held_by(node: Node, may_unpack: bool = False) -> dict[str, object]:
    """What a node keeps, as :func:`kept`, but of any kind, and maybe without its memory."""
    found: dict[str, object] = {}
    for name, raw, public in _names_of(node.__class__):
        try:
            packed = getattr(node, raw)
            is_plain = getattr(packed, "unpack_hook", packed) is None  # spares most of them a call
            if may_unpack or is_plain or not is_packed(packed):
                found[name] = getattr(node, public)
        except Exception:  # noqa: PERF203 # it was freed, or changed in place
            continue
    return found


def tensors_in(held: Mapping[str, object]) -> dict[str, Tensor]:
    """The floating-point tensors in what a node keeps that have their memory."""
    tensor_class: Any = sys.modules["torch"].Tensor
    found: dict[str, Tensor] = {}
    for name, value in held.items():
        with suppress(Exception):
            tensors = enumerate(floating(tensor_class, value))
            found |= {f"{name}{n or ''}": tensor for n, tensor in tensors if is_there(tensor)}
    return found


def saved(node: Node, name: str) -> Any:
    """What a node keeps under a name; None if there is nothing, or it was freed or packed.

    To read what a hook has packed would unpack it, which a checkpoint allows once in a pass. A
    factor is a tensor, though PyTorch's own code, as of a label smoothing, keeps a number.
    """
    try:  # each step comes here, and `suppress` makes three calls
        raw = getattr(node, _RAW + name, None)
        kept = None if raw is not None and is_packed(raw) else getattr(node, f"_saved_{name}")
        is_number = name in _FACTORS and isinstance(kept, (int, float, complex))
        return sys.modules["torch"].tensor(kept, device="cpu") if is_number else kept
    except Exception:
        return None


def has_packed(node: Node) -> bool:
    """Whether a node keeps a tensor that a hook has packed."""
    with suppress(Exception):
        return any(is_packed(getattr(node, raw)) for _, raw, _ in _names_of(node.__class__))
    return False


def is_packed(raw: Any) -> bool:
    """Whether a hook has packed one of the tensors that a node keeps under one name."""
    each = raw if isinstance(raw, (list, tuple)) else [raw]
    return any(getattr(one, "unpack_hook", None) is not None for one in each)


@lru_cache(maxsize=1000)  # a class per operation
def _names_of(kind: type) -> tuple[tuple[str, str, str], ...]:
    """The names of what a class of nodes keeps, and the attributes for it packed and unpacked."""
    left_out = _PARTLY_WRITTEN.get(kind.__name__.rstrip("0123456789"))
    public = {"tensors": "saved_tensors"} if kind.__name__[-1:].isalpha() else {}  # see is_custom
    names = [name.removeprefix(_RAW) for name in dir(kind) if name.startswith(_RAW)]
    rest = [name for name in names if name != left_out]
    return tuple((name, _RAW + name, public.get(name, f"_saved_{name}")) for name in rest)


def is_there(tensor: Tensor) -> bool:
    """Whether a tensor has its memory. FSDP frees that of a parameter after the forward pass."""
    if tensor.layout is not _strided() or hasattr(tensor, "to_local"):
        return True
    return not tensor.numel() or tensor.untyped_storage().nbytes() > 0


@lru_cache(maxsize=1)
def _strided() -> object:
    import torch

    return torch.strided
