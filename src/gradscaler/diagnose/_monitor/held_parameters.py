"""The optimizers that a scaler steps, and the parameters that they hold or leave out."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscaler.diagnose._gradients.arrays import dtype_name, local, sample_of
from gradscaler.diagnose._gradients.reading import Tensor, largest
from gradscaler.diagnose._graph.nodes import is_leaf, nodes_from
from gradscaler.diagnose._graph.step_lines import lines_around
from gradscaler.diagnose._monitor import new_optimizers
from gradscaler.diagnose._monitor.looks import Mark, is_unchanged, mark_of
from gradscaler.diagnose._monitor.parameters import (
    OptimizersParameters,
    eps_of,
    held_by,
    is_in_16_bits,
    rates_of,
)
from gradscaler.diagnose._record.lines import UNOWNED, Optimizers
from gradscaler.diagnose._record.thresholds import (
    FEW_CALLS,
    FEW_ELEMENTS,
    FEW_UNITS,
    SAME_UNIT,
    SHORT,
)

_FLOATS = "float16", "bfloat16", "float32", "float64"


class HeldParameters:
    """Notes which optimizers step, which never find a gradient, and what none of them holds.

    Attributes:
        names: the module of each optimizer's parameters, or the optimizer's class, by its id.
    """

    def __init__(self, model: Any, parameters: OptimizersParameters) -> None:
        self._model, self._parameters = model, parameters
        self._held: dict[int, set[int]] = {}  # ids of parameters, by optimizer
        self._trained: dict[int, set[int]] = {}  # those that were not frozen, at its first step
        self._first_own: set[int] = set()  # those of the model, at the first step
        self._is_late = False  # whether one holds, at its first step, some that nothing uses
        self._idle: dict[int, int] = {}  # steps without a gradient, of those that made no other
        self.names: dict[int, str] = {}  # of optimizers, by their modules
        self._stepped: set[int] = set()
        # Those outside, at the sample before: some of their elements, and their gradients.
        self._outer: dict[str, tuple[NDArray[Any], Mark | bytes]] = {}
        self._unheld: list[tuple[int, NDArray[Any]]] = []  # one of nobody's, by its id
        self._versions: list[int] = []  # of the trained parameters of the model
        # By optimizer: the step since which its parameters stand, and those then: how often each
        # was written to, and some of its elements.
        self._standing: dict[int, tuple[int, dict[str, Any], dict[str, bytes] | None] | None] = {}
        # Of the latest loss: whether each is a parameter.
        self._leaves: dict[int, bool] | None = None
        self._lines: dict[str, str] = {}  # see Optimizers
        # Before a sampled step: some elements of each that is frozen, and has a gradient of 0.
        self._frozen: dict[str, bytes] = {}

    def see_calls(self, optimizer: object, frame: FrameType | None) -> None:
        """Note the lines of the calls around an optimizer's first step, which has this frame."""
        made = new_optimizers.lines.get(optimizer, "")
        self._lines = {**lines_around(frame), **self._lines}
        self._lines |= {"optimizer": made} if made else {}

    def note(self, optimizer: object, has_gradients: bool) -> int:
        """Note a step of an optimizer; return how many it made, if none of them had gradients."""
        key = id(optimizer)
        if key not in self.names:
            named = self._parameters.named(optimizer)
            held = named.values()
            self._held[key] = {id(p) for p in held}
            self._trained[key] = {id(p) for p in held if getattr(p, "requires_grad", False)}
            self._first_own |= self._held[key] & self._own()
            # Those that have no gradient in it may be of layers that were replaced before.
            others = (p for p in held if id(p) in self._trained[key] - self._in_modules())
            self._is_late |= any(p.grad is None for p in others)
            self.names[key] = self._name_of(optimizer, named)
        if has_gradients:
            self._stepped.add(key)
            self._idle.pop(key, None)
        elif key not in self._stepped:
            self._idle[key] = self._idle.get(key, 0) + 1
        return self._idle.get(key, 0)

    @property
    def has_idle(self) -> bool:
        """Whether an optimizer has made steps, none of which found a gradient."""
        return bool(self._idle)

    @property
    def is_newly_idle(self) -> bool:
        """Whether an optimizer has made its first few steps without a gradient."""
        return bool(self._idle) and min(self._idle.values()) <= FEW_CALLS

    def see_leaves(self, loss: Tensor) -> None:
        """Note what a loss depends on, before a first step, or the next one without a gradient."""
        leaves = [node.variable for node in nodes_from([loss.grad_fn]) if is_leaf(node)]
        kind: Any = sys.modules["torch"].nn.Parameter
        self._leaves = {id(each): isinstance(each, kind) for each in leaves}

    def what_else(self, optimizer: object) -> str | None:
        """What the latest loss depends on, where an optimizer has no gradient of it.

        It is ``"parameters"`` or ``"tensors"`` that the optimizer does not hold, or ``"others"`` if
        it holds tensors that are no parameters, such as a latent vector, and the line that made the
        optimizer; or ``"held"``, parameters whose gradients are gone.
        """
        held = {id(p): p for p in held_by(optimizer)}
        if self._leaves is None:
            return None
        if not self._leaves.keys().isdisjoint(held):
            return "held"
        line = self._lines.get("optimizer")
        made: Any = sys.modules["torch"].nn.Parameter
        own = "parameters" if any(isinstance(p, made) for p in held.values()) else "others"
        kind = own if any(self._leaves.values()) else "tensors"
        return kind + (f" at {line}" if line else "")

    @property
    def is_of_none(self) -> bool:
        """Whether the latest loss depends on nothing that an optimizer holds, of any model."""
        held = self.by_optimizers() | _held_by_made()
        return self._leaves is not None and self._leaves.keys().isdisjoint(held)

    def why_stopped(self, optimizer: object) -> str | None:
        """Why an optimizer that has made steps finds no gradient any more; None if it made none.

        It is ``"replaced"`` if the model holds none of its parameters any more, ``"frozen"`` if all
        have ``requires_grad=False``, and empty for another reason.
        """
        if id(optimizer) not in self._stepped:
            return None
        held = list(held_by(optimizer))
        if not any(getattr(p, "requires_grad", True) for p in held):
            return "frozen"
        was_own = self._model is not None and self.names[id(optimizer)] != UNOWNED
        return "replaced" if was_own and self._own().isdisjoint(map(id, held)) else ""

    def see_frozen(self, optimizer: object, named: Mapping[str, Tensor]) -> None:
        """Note what an optimizer may move though it was frozen, before a sampled step.

        Where no parameter is trained, or one never was, the code may make gradients of its own.
        """
        trained = self._trained.get(id(optimizer), set())
        any_trained = any(p.requires_grad for p in named.values())
        self._frozen = {
            name: sample_of(p, FEW_ELEMENTS).tobytes()
            for name, p in named.items()
            if any_trained and id(p) in trained and _is_kept(p) and not largest(p.grad)
        }

    def moved_frozen(self, named: Mapping[str, Tensor]) -> str:
        """How many of these the step has moved, and the first; empty if none."""
        before, self._frozen = self._frozen, {}
        now = {name: sample_of(named[name], FEW_ELEMENTS).tobytes() for name in before}
        moved = [name for name, elements in now.items() if elements != before[name]]
        count = f"{len(moved)} parameter{'s' * (len(moved) > 1)}"
        return f"{count} ({moved[0]} first)" if moved else ""

    def has_moved(self) -> bool:
        """Whether PyTorch counted a change of the model since this was asked before."""
        parameters = () if self._model is None else self._model.parameters()
        trained = (p for p in parameters if getattr(p, "requires_grad", False))
        counts = [getattr(p, "_version", 0) for p in trained]
        before, self._versions = self._versions, counts
        return len(before) == len(counts) and before != counts

    def at_sample(self, optimizer: object, named: Mapping[str, Tensor], number: int) -> Optimizers:
        """What is known before a sampled step of an optimizer of named parameters."""
        self._held[id(optimizer)] = {id(p) for p in named.values()}
        idle = {self.names[key]: count for key, count in self._idle.items()}
        rate = max(rates_of(optimizer), default=None)
        weights = self._parameters.matrices_growth(optimizer, list(named.values()))
        blank = tuple(name for name, p in named.items() if _is_blank(p))
        alike = alike_in(named)
        trained = self._trained.get(id(optimizer), set())
        # Two networks that freeze each other in turn keep their gradients meanwhile.
        left = ((n, p) for n, p in named.items() if id(p) in trained and p.grad is None)
        frozen = tuple(name for name, p in left if not p.requires_grad)
        seen = Optimizers(idle, self._outside(number), rate, weights=weights, eps=eps_of(optimizer))
        stood = self._steps_stood(optimizer, named, number)
        seen = replace(seen, blank=blank, alike=alike)
        return replace(seen, frozen=frozen, stood=stood, lines=self._lines)

    def _own(self) -> set[int]:
        """The ids of the model's parameters."""
        return set() if self._model is None else set(map(id, self._model.parameters()))

    def _in_modules(self) -> set[int]:
        """The ids of the parameters that the model's modules have; all of it, if they are unknown.

        The model of a script also has those that its optimizers hold and no module has.
        """
        modules = getattr(self._model, "modules", None)
        if modules is None:
            return self._own()
        return {id(p) for each in modules() for p in vars(each).get("_parameters", {}).values()}

    def known(self) -> set[int]:
        """The ids of the model's parameters, and of those that optimizers hold, if known."""
        return self._own() | self.by_optimizers() | _held_by_made()

    def by_optimizers(self) -> set[int]:
        """The ids of the parameters that optimizers hold."""
        return set[int]().union(*self._held.values())

    def is_held_late(self) -> bool:
        """Whether an optimizer holds by now what none held at the latest sample."""
        return bool(self._unheld) and self._unheld[0][0] in self.known()

    def has_stood(self, unheld: Sequence[Tensor]) -> bool:
        """Whether the first of some parameters has not moved since the sample before."""
        before = self._unheld
        now = [(id(p), np.array(sample_of(p, FEW_ELEMENTS))) for p in unheld[:1]]
        self._unheld = now
        is_same = bool(before and now) and before[0][0] == now[0][0]
        return is_same and np.array_equal(before[0][1], now[0][1])

    def _steps_stood(self, optimizer: object, named: Mapping[str, Tensor], number: int) -> int:
        """For how many steps nothing has written to any parameter of an optimizer.

        PyTorch counts what is written, also at a rate of 0, or if it is lost in rounding. What is
        written to ``.data`` is not counted, and shows in the elements. They are read only once the
        counts stand. In 16 bits, they may be the same all the same.
        """
        known, self._standing[id(optimizer)] = self._standing.get(id(optimizer)), None
        rates, is_narrow = rates_of(optimizer), any(map(is_in_16_bits, named.values()))
        counts = {name: getattr(p, "_version", None) for name, p in named.items()}
        if None in counts.values() or is_narrow or (rates and not any(rates)):
            return 0
        since, before, parts = known or (number, {}, None)
        if counts != before:
            self._standing[id(optimizer)] = number, counts, None
            return 0
        now = {name: sample_of(p, FEW_ELEMENTS).tobytes() for name, p in named.items()}
        if parts != now:
            since = number
        self._standing[id(optimizer)] = since, counts, now
        return number - since

    def holds_any(self, optimizer: object) -> bool:
        """Whether an optimizer holds a parameter of the model, if there is one."""
        if self._model is None:
            return True
        own = self._own()
        return not own.isdisjoint(self._held.get(id(optimizer), own))

    def _outside(self, number: int) -> tuple[str, ...]:
        """The parameters with a new gradient that none holds, of modules that have not moved.

        What moves a module that none holds is an optimizer that is not seen, such as that of
        another scaler. In its steps the gradient of one parameter may be 0. A head of an earlier
        stage keeps its last gradient.
        Those before the first that is held are left out: a backbone may be meant to stay. If none
        is held, a wrong optimizer is stepped; if some were the model's and are no more, layers were
        replaced. One whose optimizer was made may be stepped later, as every tenth time.
        """
        named = {} if self._model is None else dict(self._model.named_parameters())
        held = self.by_optimizers()
        places = [place for place, p in enumerate(named.values()) if id(p) in held]
        is_replaced = self._is_late or not self._first_own <= set(map(id, named.values()))
        first = -1 if is_replaced or not places else places[0]
        rest = {
            name: parameter
            for place, (name, parameter) in enumerate(named.items())
            if place > first and id(parameter) not in held and _is_used(parameter)
        }
        before = self._outer
        parts = {name: np.array(sample_of(p, FEW_ELEMENTS)) for name, p in rest.items()}
        self._outer = {name: (parts[name], _gradient_of(p)) for name, p in rest.items()}
        known = [name for name in rest if name in before]
        still = [n for n in known if np.array_equal(before[n][0], parts[n])]
        moved = {_module_of(name) for name in known if name not in still}
        new = [name for name in still if not _is_as_before(before[name][1], rest[name])]
        soon = _held_by_made() if new and number < SHORT else ()
        of_still = (name for name in new if _module_of(name) not in moved)
        return tuple(name for name in of_still if id(rest[name]) not in soon)

    def _name_of(self, optimizer: object, held: Mapping[str, Tensor]) -> str:
        """The module that an optimizer's parameters have in common, else the optimizer's class."""
        if self._model is None:
            return type(optimizer).__name__
        if self._own().isdisjoint(map(id, held.values())):
            return UNOWNED
        names = ["/" + name.replace(".", "/") for name in held]
        common = os.path.commonpath(names or ["/"])[1:].replace("/", ".")
        return common or type(optimizer).__name__


def _held_by_made() -> set[int]:
    """The ids of what optimizers hold that a script has made, whether they step or not."""
    return {id(p) for each in new_optimizers.lines for p in held_by(each)}


def _gradient_of(parameter: Tensor) -> Mark | bytes:
    """The mark of a gradient; some of its numbers where no changes are counted, or none is kept."""
    gradient = parameter.grad
    mark = mark_of(gradient) if parameter.grad is gradient else None
    return sample_of(gradient, FEW_ELEMENTS).tobytes() if mark is None else mark


def _is_as_before(before: Mark | bytes, parameter: Tensor) -> bool:
    """Whether a parameter has the gradient that it had."""
    if isinstance(before, bytes):
        return before == _gradient_of(parameter)
    return is_unchanged(before, parameter.grad)


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _is_blank(parameter: Tensor) -> bool:
    """Whether a matrix is all 0, and its gradient, too."""
    gradient = getattr(parameter, "grad", None)
    if gradient is None or parameter.ndim < 2 or np.any(sample_of(parameter, FEW_ELEMENTS)):
        return False
    return not largest(parameter) and not largest(gradient)


def alike_in(named: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The matrices all of whose units have the same weights, and the same gradients, not all 0.

    Units are a matrix's rows, or its columns where the code multiplies by it from the right. Those
    that stay one unit give the next matrix the same gradient for each of them. Equal inputs or
    equal targets alone make one matrix alike.
    """
    each = list(named.items())
    return tuple(
        name
        for place, (name, parameter) in enumerate(each)
        for along in (0, 1)
        if _is_alike(parameter, along)
        and any(
            other.ndim > 1
            and other.shape[1 - along] == parameter.shape[along]
            and _is_alike(other, 1 - along, by_gradient=True)
            for _, other in each[place + 1 :]
        )
    )


def _is_alike(parameter: Tensor, along: int, by_gradient: bool = False) -> bool:
    """Whether a matrix is the same at each place along an axis, and its gradient is."""
    gradient = getattr(parameter, "grad", None)
    both = [local(each) for each in (parameter, gradient) if each is not None]
    if len(both) < 2 or any(map(_is_no_matrix, both)):
        return False
    return all(_are_same(each.detach(), along) for each in both[by_gradient:])


def _is_no_matrix(array: Tensor) -> bool:
    """Whether an array has no rows of floats in PyTorch, such as one that is sparse."""
    is_strided = str(getattr(array, "layout", None)) == "torch.strided"
    return array.ndim < 2 or not is_strided or dtype_name(array) not in _FLOATS


def _are_same(values: Tensor, along: int) -> bool:
    """Whether all parts of a tensor along a dimension are the same one, which is not all 0."""
    units = values.movedim(along, 0).flatten(1)
    if len(units) < FEW_UNITS:
        return False
    first, second = (unit[:FEW_ELEMENTS] for unit in units[:2])
    if largest(first - second) > SAME_UNIT * largest(first):  # as random numbers show at once
        return False
    size = largest(units[0])
    return 0 < size < math.inf and largest(units - units[0]) <= SAME_UNIT * size


def _is_kept(parameter: Tensor) -> bool:
    """Whether a parameter is frozen, and keeps a gradient."""
    return not parameter.requires_grad and parameter.grad is not None


def _is_used(parameter: Tensor) -> bool:
    """Whether a parameter is trained, and has a gradient; one that was frozen may keep its last."""
    gradient = getattr(parameter, "grad", None)
    is_kept = gradient is None or not getattr(parameter, "requires_grad", True)
    return not is_kept and bool(largest(gradient) != 0)
