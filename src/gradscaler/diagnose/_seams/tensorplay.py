"""The operations of one step of TensorPlay."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType
from typing import Any

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.call_site import differentiated
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.hooks import weakly
from gradscaler.diagnose._seams.calls import Calls, Place, imported
from gradscaler.diagnose._seams.eager import EagerSeam, Node

_BACKWARD = "backward", "grad", "_backward", "_grad"
_OPERATORS = "add sub mul truediv floordiv mod pow matmul"
_DUNDERS = frozenset(
    (
        *(f"__{side}{name}__" for name in _OPERATORS.split() for side in ("", "r", "i")),
        *("__neg__", "__abs__", "__getitem__", "__setitem__"),
    )
)
_METHODS = "method_descriptor", "instancemethod"
_OVERLOAD = re.compile("(Tensor|Scalar|Self|Int|Dim)+(?=Backward)")


def _places() -> Iterator[Place]:
    """Where the functions of TensorPlay are. Its function mode sees no operators."""
    tensorplay: Any = sys.modules["tensorplay"]
    own, autograd = tensorplay._C, tensorplay.autograd
    names = [name for name in vars(own) if not name.startswith("_")]
    functions = {n: vars(own)[n] for n in names if isinstance(vars(own)[n], BuiltinFunctionType)}
    yield from (Place(own, name) for name in functions)
    yield from imported("tensorplay", functions.values())
    for name, method in list(vars(tensorplay.Tensor).items()):
        is_operation = name in _DUNDERS or not name.startswith("_")
        if is_operation and type(method).__name__ in _METHODS and name not in _BACKWARD:
            yield Place(tensorplay.Tensor, name)
    yield Place(tensorplay.Tensor, "backward", is_open=True)
    yield from (Place(own._autograd, name, is_open=True) for name in ("backward", "grad"))
    yield from (Place(autograd, name, is_open=True) for name in ("_backward", "_grad"))


class TensorPlaySeam(EagerSeam):
    """Shows a judge the operations of TensorPlay.

    A hook cannot be removed from a node of TensorPlay. It does nothing after ``stop()``.
    """

    package = "tensorplay"
    calls = Calls(_places)
    backward_passes = frozenset(_BACKWARD)
    hooks_any = True

    def address(self, node: Node) -> int:
        """The address of a node."""
        address: int = node._raw_ptr
        return address

    def name(self, node: Node) -> str:
        """The operation of a node, such as that of ``DivTensorBackward``."""
        return differentiated(_OVERLOAD.sub("", node.name))

    def before(self, node: Node) -> list[Node]:
        """The nodes that get the gradients that a node makes."""
        return [before for before, _ in node.next_functions]

    def is_leaf(self, node: Node) -> bool:
        """Whether a node takes the gradient of a leaf."""
        return bool(node.name == "AccumulateGrad")

    def hook(self, node: Node, is_plain: bool) -> bool:
        """Hook a node."""
        address = self.address(node)  # a hook that holds its node would keep it alive
        waiting: list[list[Tensor | None]] = []  # the gradients that the node is given
        see = partial(weakly(self.see_gradients), address)

        @guarded
        def note_given(given: list[Tensor]) -> None:
            waiting.append(_defined(given))

        @guarded
        def note_made(made: list[Tensor]) -> None:
            see(waiting.pop(), _defined(made))

        def keep(given: list[Tensor]) -> list[Tensor]:
            note_given(given)
            return given

        def see_and_return(_: list[Tensor], made: list[Tensor]) -> list[Tensor]:
            note_made(made)
            return made

        node.add_pre_hook(keep)
        node.add_post_hook(see_and_return)
        return True


def _defined(gradients: list[Tensor]) -> list[Tensor | None]:
    """The gradients; None for one that was not computed."""
    return [each if each.defined() else None for each in gradients]
