"""The place of a node in the model, from the parameters and modules around it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import takewhile
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

from gradscaler._in_memory import in_memory
from gradscaler.diagnose._gradients.arrays import local
from gradscaler.diagnose._gradients.reading import Tensor, largest_finite, memory_of, rows_of
from gradscaler.diagnose._graph.call_site import (
    Frame,
    Node,
    behind_forms,
    called_from,
    operation_of,
    stack_from,
)
from gradscaler.diagnose._graph.lines import Line
from gradscaler.diagnose._graph.nodes import is_leaf
from gradscaler.diagnose._graph.numpy_warnings import numpy_warnings
from gradscaler.diagnose._graph.site import Site, located_at
from gradscaler.diagnose._record.located import Located

Module = Any

# Parameters of no module, by their ids: to look through all that is in memory takes long.
_ownerless: WeakValueDictionary[int, Any] = WeakValueDictionary()


class Places:
    """The places of nodes in a model, which may be None.

    Args:
        model: the model.
        modules: its modules by name, if other names than PyTorch's are shown.
        owned: parameters that are not the modules' own for PyTorch: each with the name of its
            module, and its own name there.

    Attributes:
        running: the modules in which a node was made, innermost first, as far as that was seen.
    """

    def __init__(
        self,
        model: Module | None,
        modules: Mapping[str, Module] | None = None,
        owned: Iterable[tuple[Tensor, str, str]] = (),
    ) -> None:
        self._modules = dict(modules or ([] if model is None else model.named_modules()))
        self.running: dict[Node, Sequence[Module]] = {}
        self._names = {module: name for name, module in self._modules.items()}
        self._owners: dict[int, tuple[str, str]] = {}  # by the id or the memory of a tensor
        for name, module in self._modules.items():
            for key, tensor in _own_tensors(module):
                self._owners |= {id(tensor): (name, key), memory_of(tensor): (name, key)}
        for tensor, name, key in owned:
            self._owners |= {id(tensor): (name, key), memory_of(tensor): (name, key)}
        named = () if model is None else model.named_parameters()
        self._loose = {id(p): ("", name) for name, p in named if id(p) not in self._owners}

    @property
    def modules(self) -> list[Module]:
        """The modules that are not scripted."""
        from torch.jit import ScriptModule

        return [each for each in self._modules.values() if not isinstance(each, ScriptModule)]

    def owner_of(self, tensor: Tensor) -> tuple[Site, str] | None:
        """The site of the module that owns a parameter or a buffer, and its own name there."""
        found = self._owned(tensor) or self._loose.get(id(tensor))
        return None if found is None else (self._site(found[0]), found[1])

    def _owned(self, tensor: Tensor) -> tuple[str, str] | None:
        return self._owners.get(id(tensor)) or self._owners.get(memory_of(tensor))

    def site_of(self, node: Node, nodes: Sequence[Node], line: Line) -> Site:
        """The call site of a node's operation, among the nodes of its graph in order."""
        operation = line.function or operation_of(node)
        if node in self.running:
            return self._site_in(self.running[node], operation, line.line)
        read = list(self._read_by(node))
        name = reduce(_common, read) if read else self._called(node, nodes, line.frames)
        site = Site(type=_outermost(line.frames)) if name is None else self._site(name)
        return site._replace(operation=operation, line=line.line)

    def site_at(self, frame: FrameType | None, operation: str) -> Site:
        """The call site of an operation that a frame calls."""
        frames, running = stack_from(frame)
        function, line = called_from(frames)
        return self._site_in(running, function or operation, line)

    def _site_in(self, running: Sequence[Module], operation: str, line: str | None) -> Site:
        """The call site of an operation in the innermost module of the model that is running."""
        own = next((each for each in running if each in self._names), None)
        shown = next(filter(_has_tensors, reversed(running)), None) if own is None else own
        type_ = "" if shown is None else type(shown).__name__
        return Site(operation, line, self._names.get(own), type_)

    def given_to(self, tensor: Tensor, site: Site) -> Located:
        """The place of an Inf or NaN that a tensor held before the operation at a site read it."""
        held, owned = local(tensor).detach(), self.owner_of(tensor) or _owner_elsewhere(tensor)
        if owned is None:
            found = located_at(site, "input", held, largest_finite([held]), rows=rows_of(held))
            return replace(found, warned=numpy_warnings.of(found.num_inf, found.num_nan))
        place, name = owned
        return located_at(place._replace(line=site.line), "forward", held, math.nan, parameter=name)

    def bad_buffer(self) -> Tensor | None:
        """A buffer that holds NaN, other than statistics that the forward pass itself writes."""
        for module in self._modules.values():
            for name, buffer in module.named_buffers(recurse=False):
                is_written = module.training and name.startswith("running_")
                if not is_written and buffer.is_floating_point() and bool(buffer.isnan().any()):
                    return buffer
        return None

    def _site(self, name: str) -> Site:
        return Site(module=name, type=type(self._modules[name]).__name__)

    def _read_by(self, node: Node) -> Iterator[str]:
        """The names of the modules whose parameters a node reads."""
        for before, _ in node.next_functions:
            maker = behind_forms(before)
            if maker is not None and is_leaf(maker) and (own := self._owned(maker.variable)):
                yield own[0]

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


def _has_tensors(module: Module) -> bool:
    """Whether a module holds parameters or buffers, as a criterion seldom does."""
    return any(True for each in module.modules() for _ in _own_tensors(each))


def _owner_elsewhere(tensor: Tensor) -> tuple[Site, str] | None:
    """The outermost module of another model that owns a parameter, and its name there."""
    import torch

    if not isinstance(tensor, torch.nn.Parameter) or id(tensor) in _ownerless:
        return None
    every = in_memory(torch.nn.Module)
    found = [(each, n) for each in every for n, p in each.named_parameters() if p is tensor]
    if not found:
        _ownerless[id(tensor)] = tensor
        return None
    owner, name = max(found, key=lambda each: len(each[1]))
    return Site(type=type(owner).__name__), name


def _outermost(frames: Sequence[Frame]) -> str:
    """The class of the outermost module with tensors that was running; empty if none was."""
    import torch

    passes = [frame for frame in reversed(frames) if frame.function == "forward"]
    kinds: list[type] = list(_below(torch.nn.Module)) if passes else []
    for frame in passes:
        for kind in kinds:
            if _has_line(kind, frame) and any(map(_has_tensors, in_memory(kind))):
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
