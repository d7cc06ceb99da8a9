"""The place of a node in the model, from the parameters and modules around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import takewhile
from typing import Any

from gradscaler.diagnose._gradients.reading import Tensor, memory_of
from gradscaler.diagnose._graph.lines import Line
from gradscaler.diagnose._graph.nodes import is_leaf
from gradscaler.diagnose._locate.call_site import Frame, Node, operation_of, source_of
from gradscaler.diagnose._locate.site import Site

Module = Any


class Places:
    """The places of nodes in a model, which may be None."""

    def __init__(self, model: Module | None) -> None:
        self._modules: dict[str, Module] = {} if model is None else dict(model.named_modules())
        self._owners: dict[int, tuple[str, str]] = {}  # by the id or the memory of a tensor
        for name, module in self._modules.items():
            for key, tensor in _own_tensors(module):
                self._owners |= {id(tensor): (name, key), memory_of(tensor): (name, key)}

    def owner_of(self, tensor: Tensor) -> tuple[Site, str] | None:
        """The site of the module that owns a parameter or a buffer, and its own name there."""
        found = self._owners.get(id(tensor)) or self._owners.get(memory_of(tensor))
        return None if found is None else (self._site(found[0]), found[1])

    def site_of(self, node: Node, nodes: Sequence[Node], line: Line) -> Site:
        """The call site of a node's operation, among the nodes of its graph in order."""
        read = list(self._read_by(node))
        name = reduce(_common, read) if read else self._called(node, nodes, line.frames)
        site = Site(type=_outermost(line.frames)) if name is None else self._site(name)
        operation = line.function or operation_of(node)
        return site._replace(operation=operation, line=line.line)

    def _site(self, name: str) -> Site:
        return Site(module=name, type=type(self._modules[name]).__name__)

    def _read_by(self, node: Node) -> Iterator[str]:
        """The names of the modules whose parameters a node reads."""
        for before, _ in node.next_functions:
            source = source_of(before)
            if source is not None and is_leaf(source) and (own := self.owner_of(source.variable)):
                yield str(own[0].module)

    def _called(self, node: Node, nodes: Sequence[Node], frames: Sequence[Frame]) -> str | None:
        """The module without parameters that called an operation; None if it was outside of all.

        It is between the modules whose parameters are read before and after the operation.
        """
        names, index = list(self._modules), list(nodes).index(node)
        before = next((n for each in nodes[:index][::-1] for n in self._read_by(each)), None)
        after = next((n for each in nodes[index:] for n in self._read_by(each)), None)
        called = next(filter(None, map(self._with_code, frames)), [])
        first = 0 if before is None else names.index(before)
        last = len(names) if after is None else names.index(after)
        between = [name for name in called if first < names.index(name) < last]
        if len(between) == 1 or len(called) == 1:
            return (between or called)[0]
        is_inside = bool(called) or (not frames and None not in (before, after))
        return _common(before, after) if is_inside else None

    def _with_code(self, frame: Frame) -> list[str]:
        """The modules whose forward pass has the line of a frame."""
        return [
            name
            for name, module in self._modules.items()
            if frame.function == "forward" and _has_line(type(module), frame)
        ]


def _own_tensors(module: Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _outermost(frames: Sequence[Frame]) -> str:
    """The class of the outermost module that was running; empty if none was."""
    import torch

    kinds: list[type] = list(_below(torch.nn.Module))
    for frame in reversed(frames):
        if frame.function == "forward":
            for kind in kinds:
                if _has_line(kind, frame):
                    return kind.__name__
    return ""


def _below(kind: type) -> Iterator[type]:
    each: type
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)


def _has_line(kind: type, frame: Frame) -> bool:
    code = getattr(getattr(kind, "forward", None), "__code__", None)
    if code is None or code.co_filename != frame.file:
        return False
    return frame.number in {number for *_, number in code.co_lines()}


def _common(before: str | None, after: str | None) -> str:
    """The innermost module that holds both of two modules; the model if one is unknown."""
    if before is None or after is None:
        return ""
    same = takewhile(
        lambda pair: pair[0] == pair[1], zip(before.split("."), after.split("."), strict=False)
    )
    return ".".join(part for part, _ in same)
