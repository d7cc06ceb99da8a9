"""Where an Inf or NaN of a step began, judged from the step's operations, in any framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from traceback import walk_stack
from types import FrameType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradscaler.diagnose._gradients.arrays import dtype_name, to_numpy
from gradscaler.diagnose._gradients.reading import (
    Reading,
    Tensor,
    largest_finite,
    largest_of,
    nonfinite_numbers,
    read,
    rows_of,
)
from gradscaler.diagnose._graph.call_site import is_of_users_file, users_line
from gradscaler.diagnose._graph.masks import ADDS_UP, ARITHMETIC, FILLS, TAKES_MASKS, Value, result
from gradscaler.diagnose._graph.site import Site, exponent_in, located_at
from gradscaler.diagnose._operations.operation import Role
from gradscaler.diagnose._operations.rows import canonical, names_with, row_of
from gradscaler.diagnose._record.formats import FORMATS
from gradscaler.diagnose._record.located import BadGradient, Located

DIVIDES = names_with(Role.DIVIDES)
TAKES_NUMBERS = DIVIDES | {"pow"}  # a number in the code decides: a divisor, an exponent
MOVES = names_with(Role.MOVES)
_OF_MAXIMA = "max_pool", "reduce_max", "max"  # how the names begin of what may hide a NaN

Pass = Literal["forward", "backward"]


class Owned(NamedTuple):
    """A parameter of a model.

    Attributes:
        tensor: its value. It is kept, so that no other tensor gets its identity.
        module: the name of the module that owns it.
        type: the class of that module.
        name: its own name in the module.
    """

    tensor: Tensor
    module: str
    type: str
    name: str


class Judge:
    """Follows each Inf and NaN from the operation that made it to a result.

    A seam gives the operations of one step, in the order in which they run: ``before()`` reads the
    inputs of one, and ``see()`` judges what it made. An operation of the backward pass has the site
    of the forward operation whose gradient it computes; the seam knows which it is.

    Args:
        modules: the modules of the model, by name.
        parameters: the parameters of the model.
        identity: tells one tensor from another; views of one memory may share it.
    """

    def __init__(
        self,
        modules: Mapping[str, Any],
        parameters: Iterable[Owned],
        identity: Callable[[Tensor], int] = id,
    ) -> None:
        self._identity = identity
        self._names = {id(module): (name, module) for name, module in modules.items()}
        self._parameters = dict[int, Owned]()
        for each in parameters:
            self.add(each)
        # Only tensors with an Inf, NaN or -inf. They are kept, so that no other has their identity.
        self._origins: dict[int, tuple[Tensor, Located]] = {}
        self._hidden = set[int]()  # those of them that are finite, as what made them hides a NaN
        self._reached: list[Located] = []

    @property
    def located(self) -> Located | None:
        """The first Inf or NaN that reached a result; None if none did.

        A step may return its new parameters before its loss, whose forward pass comes first.
        """
        return min(self._reached, key=lambda each: isinstance(each, BadGradient), default=None)

    def add(self, parameter: Owned) -> None:
        """Add a parameter, or a tensor that was read from one."""
        self._parameters[self._identity(parameter.tensor)] = parameter

    def site_at(self, frame: FrameType | None, name: str) -> Site:
        """The site of an operation that a frame calls, under the name that users know.

        A function of the framework that computes it of simpler operations, such as a norm, is what
        the user called. The module is the innermost one of the model that runs: a frame holds it as
        ``self``.
        """
        operation, line = canonical(name), None
        owner: tuple[str, Any] | None = None
        while frame is not None:
            code = frame.f_code
            if line is None and is_of_users_file(code.co_filename):
                calls = walk_stack(frame)
                line = users_line((each.f_code.co_filename, number) for each, number in calls)
            elif line is None:
                function = canonical(code.co_name)
                is_known = row_of(function) is not None and function not in MOVES
                operation = function if is_known else operation
            if owner is None and "self" in code.co_varnames[:1]:
                owner = self._names.get(id(frame.f_locals.get("self")))
            frame = frame.f_back
        name, module = ("", None) if owner is None else owner
        site = Site(operation if line is not None else canonical(name), line)
        return site if owner is None else site._replace(module=name, type=type(module).__name__)

    def before(self, inputs: Sequence[Tensor], site: Site) -> list[Value[Located]]:
        """The values of an operation's inputs, before it may overwrite them."""
        return [self._value(tensor, site) for tensor in inputs]

    def see(
        self,
        site: Site,
        kind: Pass,
        inputs: Sequence[Tensor],
        values: Sequence[Value[Located]],
        outputs: Sequence[Tensor],
    ) -> None:
        """Judge what an operation made of inputs with these values."""
        for output in outputs:
            value = self._made(site, kind, inputs, values, output)
            key = self._identity(output)
            is_behind = bool(self._hidden) and any(
                self._identity(each) in self._hidden for each in inputs
            )
            self._hidden.discard(key)
            if value.origin is None and _may_hide(site, output, is_behind):
                bad = (each.origin for each in values if each.reading.state == "bad")
                value = Value(Reading("bad"), next(filter(None, bad), None))
                self._hidden |= {key} if value.origin is not None else set()
            if value.origin is not None:
                self._origins[key] = output, value.origin
            elif key in self._origins and not read(self._origins[key][0]).bad:
                del self._origins[key]  # overwritten; a finite view of what is bad says nothing

    def origin_of(self, tensor: Tensor) -> Located | None:
        """Where the Inf or NaN in a tensor began; None if that was not seen."""
        kept = self._origins.get(self._identity(tensor))
        return None if kept is None else kept[1]

    def origin_of_copy(self, tensor: Tensor) -> Located | None:
        """Where the Inf or NaN in a tensor began that an operation copied unseen, such as a slice.

        All its values are in one tensor that an operation made, or that one's are all in it.
        """
        values = _values(tensor)
        for kept, origin in reversed(list(self._origins.values())):
            others = _values(kept)
            if values <= others or others <= values:
                return origin
        return None

    def origin_of_number(self, number: float) -> Located | None:
        """Where an Inf or NaN began that was read from a tensor of one element, by ``float()``."""
        for kept, origin in reversed(list(self._origins.values())):
            if math.prod(kept.shape) == 1 and _values(kept) == _values(np.float64(number)):
                return origin
        return None

    def origin_of_values(self, values: NDArray[Any]) -> Located | None:
        """Where an Inf or NaN began that NumPy has read from a tensor, or ``float()`` from one."""
        if values.size == 1:
            return self.origin_of_number(values.item())
        for kept, origin in reversed(list(self._origins.values())):
            if tuple(kept.shape) == values.shape and to_numpy(kept).tobytes() == values.tobytes():
                return origin
        return None

    def numbers_in(self, operands: Iterable[object], site: Site) -> list[NDArray[Any]]:
        """The numbers among an operation's operands that hold an Inf or NaN, as arrays of NumPy.

        The origin of each is noted: where it was read from a tensor of one element, or, if the
        operation is arithmetic, that it comes from outside of the framework. Others are left out.
        """
        found = nonfinite_numbers(operands)
        for each in found:
            origin = self.origin_of_number(each.item()) if each.size == 1 else None
            if origin is None and site.operation in ARITHMETIC:
                origin = located_at(site, "input", each, largest_finite([each]), is_number=True)
            if site.operation not in FILLS:  # else it may be a mask
                self.note(each, origin)
        return [each for each in found if self.origin_of(each) is not None]

    def note(self, tensor: Tensor, origin: Located | None) -> None:
        """Note where the Inf or NaN in a tensor began, such as one that is a part of another."""
        if origin is not None:
            self._origins[self._identity(tensor)] = tensor, origin

    def end_in(self, results: Iterable[Tensor]) -> None:
        """Note the results of a pass. An Inf or NaN that reaches none of them does no harm."""
        for tensor in results:
            reading = read(tensor)
            origin = self.origin_of(tensor) if reading.bad else None
            if origin is None:
                continue
            is_number = math.prod(tensor.shape) == 1  # a scaled loss of Paddle's has one dimension
            if reading.state == "bad" or is_number or origin.kind == "backward":
                self._reached.append(origin)

    def _value(self, tensor: Tensor, site: Site) -> Value[Located]:
        reading = read(tensor)
        if not reading.bad:
            is_hidden = self._identity(tensor) in self._hidden
            return Value(Reading("bad"), self.origin_of(tensor)) if is_hidden else Value(reading)
        owned = self._parameters.get(self._identity(tensor))
        # Another tensor may have had a parameter's memory before it.
        origin = None if owned and owned.tensor is tensor else self.origin_of(tensor)
        # In JAX it is several primitives, of which one may make the -Inf that the next one reads.
        is_own = origin is not None and (origin.operation, origin.line) == site[:2]
        if reading.state == "mask" and site.operation in TAKES_MASKS and not is_own:
            return Value(reading)  # a NaN in its output is its own
        if reading.state == "bad" and origin is None:
            origin = self._given(tensor, site)
            self.note(tensor, origin)
        return Value(reading, origin)

    def _given(self, tensor: Tensor, site: Site) -> Located:
        """The place of an Inf or NaN that no operation made: a parameter, or what was given."""
        owned = self._parameters.get(self._identity(tensor))
        if owned is None:
            return located_at(site, "input", tensor, largest_finite([tensor]), rows=rows_of(tensor))
        at = Site(None, site.line, owned.module, owned.type)
        return located_at(at, "forward", tensor, math.nan, parameter=owned.name)

    def _made(
        self,
        site: Site,
        kind: Pass,
        inputs: Sequence[Tensor],
        values: Sequence[Value[Located]],
        output: Tensor,
    ) -> Value[Located]:
        reading = read(output)
        operation = canonical(site.operation or "")  # JAX's keep their own names
        # A gradient of -Inf is no mask.
        makes_masks = kind == "forward" and operation not in ADDS_UP
        if (
            (reading.state == "mask" and operation in FILLS)
            and makes_masks
            and not any(v.origin for v in values)
        ):
            return Value(reading)  # it is meant as a mask

        def made() -> Located:
            exponent = exponent_in(operation, inputs) if kind == "forward" else None
            given = values if exponent is None else values[:1]
            largest = largest_of(value.reading.largest for value in given)
            divisor = None
            if kind == "forward" and operation in DIVIDES and len(inputs) > 1:
                divisor = smallest(inputs[1], values[1].reading)
            known = {"smallest_divisor": divisor, "exponent": exponent}
            return located_at(site, kind, output, largest, **known)

        return result(reading, not _dimensions(output), values, makes_masks, made)


class JudgedSeam:
    """What shows a judge the operations of a step."""

    _judge: Judge

    @property
    def located(self) -> Located | None:
        """The first Inf or NaN that reached a result, or the gradient of a leaf; or None."""
        return self._judge.located


def _may_hide(site: Site, output: Tensor, is_behind: bool) -> bool:
    """Whether an operation may have hidden a NaN, as TensorFlow's max-pool does on a CPU.

    It begins at the most negative number of the dtype, and no NaN is larger. What is still huge
    behind such an operation hides it, too.
    """
    form = FORMATS.get(dtype_name(output))
    if form is None:
        return False
    if (site.operation or "").startswith(_OF_MAXIMA):
        return bool((to_numpy(output) == -form.largest).any())
    return is_behind and read(output).largest > math.sqrt(form.largest)


def smallest(tensor: Tensor, reading: Reading) -> float | None:
    """The smallest magnitude in a tensor; None if it holds an Inf or NaN."""
    if reading.bad:
        return None
    return float(abs(to_numpy(tensor).astype(float)).min(initial=math.inf))  # it may be whole


def _values(tensor: Tensor) -> set[Any]:
    """The different values in a tensor; NaN is None."""
    return {None if math.isnan(each) else each for each in to_numpy(tensor).ravel().tolist()}


def _dimensions(tensor: Tensor) -> int:
    return len(np.shape(tensor))  # a number of JAX has no shape
