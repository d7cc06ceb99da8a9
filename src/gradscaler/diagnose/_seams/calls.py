"""The calls of a framework's functions, seen while a step is watched."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import update_wrapper
from inspect import currentframe
from types import FrameType, ModuleType
from typing import Any, NamedTuple, Protocol

Function = Callable[..., Any]


class Place(NamedTuple):
    """Where a function is found.

    Attributes:
        owner: a module or a class.
        name: the name of its attribute.
        is_open: whether the calls that the function makes itself are seen, too, as those of a
            user's own gradients in a backward pass.
    """

    owner: Any
    name: str
    is_open: bool = False


class Listener(Protocol):
    """An object that sees calls. An error of its own must not leave it."""

    def begin(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
    ) -> Any:
        """See what a frame calls a function with; returns what ``end`` is to know."""

    def end(self, name: str, begun: Any, outputs: object) -> None:
        """See what a function returned, or None if it raised an error."""


class Calls:
    """The calls of functions, which are replaced while there is a listener.

    A listener sees the calls of its own thread. It sees no call inside a function that is not open,
    and none that a listener makes itself.

    Args:
        places: returns where the functions are.
    """

    def __init__(self, places: Callable[[], Iterable[Place]]) -> None:
        self._places = places
        self._lock = threading.RLock()
        self._known: list[tuple[Place, Function, Function]] = []  # each with ours
        self._num_modules = 0  # that were imported when they were looked for
        self._replaced: list[tuple[Place, Function, Function]] = []
        # By the listener's identity. The dict is replaced, not changed: other threads read it.
        self._listeners: dict[int, tuple[int, Callable[[], Listener | None]]] = {}
        self._thread = threading.local()

    def listen(self, listener: Listener) -> None:
        """Show an object the calls of this thread from now on. It is not kept alive."""
        key = id(listener)
        own = threading.get_ident(), weakref.ref(listener, lambda _: self._drop(key))
        with self._lock:
            self._listeners = {**self._listeners, key: own}
            if not self._replaced:
                self._replace()

    def ignore(self, listener: Listener) -> None:
        """Show an object no more calls."""
        self._drop(id(listener))

    def unseen(self, function: Function, *args: Any) -> Any:
        """Call a function whose calls are not seen."""
        before, self._thread.is_busy = self._is_busy, True
        try:
            return function(*args)
        finally:
            self._thread.is_busy = before

    @property
    def _is_busy(self) -> bool:
        return getattr(self._thread, "is_busy", False)

    def _drop(self, key: int) -> None:
        with self._lock:
            self._listeners = {k: own for k, own in self._listeners.items() if k != key}
            while self._replaced and not self._listeners:
                (owner, name, _), function, ours = self._replaced.pop()
                if vars(owner).get(name) is ours:  # else another tool has replaced it since
                    setattr(owner, name, function)

    def _replace(self) -> None:
        # What another tool, or a watch of ours, had in its place when they were looked for.
        is_stale = any(vars(at.owner).get(at.name) is not own for at, own, _ in self._known)
        if is_stale or len(sys.modules) != self._num_modules:
            places = [(place, vars(place.owner)[place.name]) for place in self._places()]
            self._known = [(each, own, self._announcing(each, own)) for each, own in places]
            self._num_modules = len(sys.modules)
        for place, function, ours in self._known:
            if vars(place.owner).get(place.name) is function:
                self._replaced.append((place, function, ours))  # first, as an interrupt may come
                setattr(place.owner, place.name, ours)

    def _announcing(self, place: Place, function: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            own = [alive for at, alive in self._listeners.values() if at == thread]
            if not own or self._is_busy:
                return function(*args, **kwargs)
            listeners = [each for alive in own if (each := alive()) is not None]
            own_frame = currentframe()
            caller = None if own_frame is None else own_frame.f_back
            what = place.name, args, kwargs, caller
            begun = [self.unseen(each.begin, *what) for each in listeners]
            outputs = None
            try:
                self._thread.is_busy = not place.is_open
                outputs = function(*args, **kwargs)
                return outputs
            finally:
                self._thread.is_busy = False
                for each, known in zip(listeners, begun, strict=True):
                    self.unseen(each.end, place.name, known, outputs)

        # A function of C lacks some of these attributes.
        return update_wrapper(call, function, updated=())


def imported(package: str, functions: Iterable[Function]) -> Iterator[Place]:
    """Where the modules of a package that are written in Python have functions under a name."""
    own = {id(function) for function in functions}
    for called, module in list[Any](sys.modules.items()):
        if called.partition(".")[0] != package or not isinstance(module, ModuleType):
            continue
        if str(getattr(module, "__file__", None)).endswith(".py"):
            names = [name for name, value in vars(module).items() if id(value) in own]
            yield from (Place(module, name) for name in names)
