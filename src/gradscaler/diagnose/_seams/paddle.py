"""The operations of one step of Paddle."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from weakref import ref

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.call_site import differentiated
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._operations.rows import canonical
from gradscaler.diagnose._record.located import Located
from gradscaler.diagnose._seams.calls import Calls, Place, imported
from gradscaler.diagnose._seams.eager import EagerSeam, Node

_BACKWARD = frozenset({"run_backward", "run_partial_grad"})
_OPERATORS = "add sub mul div truediv floordiv mod pow matmul"
# Methods of tensors that are no function of _C_ops.
_METHODS = (
    *(f"__{side}{name}__" for name in _OPERATORS.split() for side in ("", "r")),
    *("_getitem_dygraph", "_setitem_dygraph", "clone", "contiguous", "copy_"),
)


def _places() -> Iterator[Place]:
    """Where the functions of Paddle are."""
    paddle: Any = sys.modules["paddle"]
    functions = [f for name, f in vars(paddle._C_ops).items() if not name.startswith("_")]
    yield from imported("paddle", filter(callable, functions))
    yield from (Place(paddle.Tensor, name) for name in _METHODS if name in vars(paddle.Tensor))
    yield from (Place(paddle.base.core.eager, name, is_open=True) for name in _BACKWARD)


class PaddleSeam(EagerSeam):
    """Shows a judge the operations of Paddle.

    A node of Paddle that gets a hook, and makes a list of gradients, such as that of ``concat``,
    ends the process. So it has none.
    """

    package = "paddle"
    calls = Calls(_places)
    backward_passes = _BACKWARD
    hooks_any = False
    _is_in_hook = False

    @property
    def located(self) -> Located | None:
        """The first Inf or NaN that reached a result; a cast has the name of Paddle's method."""
        found = super().located
        is_cast = found is not None and found.operation == canonical("astype")
        return replace(found, operation="astype") if found and is_cast else found

    def stop(self) -> None:
        """See no more. What is called in a hook leaves the hooks until the seam is collected.

        Paddle drops a hook that is removed while it runs without Python's lock, which ends the
        process.
        """
        if self._is_in_hook:
            self.calls.ignore(self)
        else:
            super().stop()

    def address(self, node: Node) -> int:
        """The address of a node."""
        address: int = node.node_ptr()
        return address

    def name(self, node: Node) -> str:
        """The operation of a node, such as that of ``CastGradNode``."""
        return differentiated(node.name().replace("GradNode", "Backward"))

    def before(self, node: Node) -> list[Node]:
        """The nodes that get the gradients that a node makes."""
        return list(node.next_functions)

    def is_leaf(self, node: Node) -> bool:
        """Whether a node takes the gradient of a leaf."""
        return bool(node.name() == "GradNodeAccumulation")

    def hook(self, node: Node, is_plain: bool) -> bool:
        """Hook a node that makes no list of gradients."""
        if not is_plain and node.name() != "CastGradNode":
            return False
        # A hook that holds its node, or the seam, would keep it alive.
        address, alive = self.address(node), ref(self)

        def see_and_return(slots: Sequence[Any], gradients: Sequence[Any]) -> Sequence[Any]:
            if (seam := alive()) is not None:
                seam._is_in_hook = True
                try:
                    seam._after(address, slots, gradients)
                finally:
                    seam._is_in_hook = False
            return slots

        self._handles.append(node._register_post_hook(see_and_return))
        return True

    @guarded
    def _after(self, address: int, slots: Sequence[Any], gradients: Sequence[Any]) -> None:
        """See what a node made of gradients. It may overwrite one that nobody else needs."""
        made, given = _flat(slots), _flat(gradients)
        overwritten = {each.data_ptr() for each in made if each is not None}
        left = [each for each in given if each is not None and each.data_ptr() not in overwritten]
        self.see_gradients(address, left, made)


def _flat(gradients: Sequence[Any]) -> list[Tensor | None]:
    """The gradients of all slots; None for one that was not computed."""
    lists = (each if isinstance(each, (list, tuple)) else [each] for each in gradients)
    every = [each for slot in lists for each in slot]
    return [each if each is not None and each._is_initialized() else None for each in every]
