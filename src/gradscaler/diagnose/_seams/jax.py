"""The primitives of a computation of JAX, which run one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gradscaler.diagnose._gradients.arrays import dtype_name
from gradscaler.diagnose._gradients.reading import read
from gradscaler.diagnose._graph.call_site import is_of_users_file, users_line
from gradscaler.diagnose._graph.site import Site
from gradscaler.diagnose._operations.operation import Role
from gradscaler.diagnose._operations.rows import canonical, names_with, row_of
from gradscaler.diagnose._record.located import BadGradient, Given, Located
from gradscaler.diagnose._record.thresholds import LARGE_FROM_THE_START
from gradscaler.diagnose._seams.judge import MOVES, Judge, JudgedSeam, Owned, Pass

Array = Any
Jaxpr = Any
Equation = Any

# They call code of the user's in Python, which has done its work when the step ran.
CALLBACKS = ("debug_callback", "debug_print", "io_callback")
_EXPONENTIALS = names_with(Role.EXPONENTIATES)
_COMBINING = ("chain", "named_chain", "masked", "partition")  # rules of optax that call others
_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2")


class _Place(NamedTuple):
    """The place of a primitive: the user's line, and the pass.

    Attributes:
        line: the user's line; for a primitive inside a function of JAX's own, the line of the call.
        kind: the pass.
        is_forward: for each result, whether the forward pass uses it. A result that only the
            backward pass uses is a derivative, computed ahead.
        called: the function of JAX that the user called to compute it of several primitives, such
            as a norm; None if there is none whose failures are known.
        of: in the backward pass, the forward primitive whose gradient this is, if it is known.
        layer: the name of the layer that runs it, if it is known.
        optimizer: the rule of an optimizer whose update it belongs to; None if it does to none.
    """

    line: str | None
    kind: Pass
    is_forward: Sequence[bool]
    called: str | None = None
    of: str | None = None
    layer: str | None = None
    optimizer: str | None = None


class JaxSeam(JudgedSeam):
    """Runs a computation primitive by primitive, and lets the judge see each.

    Args:
        layers: the layers of a model of Keras, by their names.
        parameters: its parameters; the tensor of each is its array.
    """

    def __init__(
        self, layers: Mapping[str, Any] | None = None, parameters: Iterable[Owned] = ()
    ) -> None:
        self._layers = layers or {}
        self._judge = Judge(self._layers, parameters)
        self._is_auxiliary = False
        self._exponential: Site | None = None  # the first that makes numbers beyond 1e9

    def run(
        self, closed: Any, arguments: Mapping[str, Array], is_auxiliary: Sequence[bool] = ()
    ) -> list[Array]:
        """Run a computation, and return its results.

        Args:
            closed: the computation.
            arguments: its arguments, by their names in what is located.
            is_auxiliary: for each result, whether it comes after the others if both hold an Inf or
                NaN; if it is empty, none does.
        """
        for name, array in arguments.items():
            origin = self._given(array)
            self._judge.note(array, origin and replace(origin, parameter=name))
        place = _Place(None, "forward", [True] * len(closed.jaxpr.outvars))
        results = self._run(closed, list(arguments.values()), place)
        for array in results:
            self._given(array)
        flags = is_auxiliary or [False] * len(results)
        pairs = [pair for pair in zip(results, flags, strict=True) if _is_number(pair[0])]
        self._judge.end_in(each for each, is_last in pairs if not is_last)
        if self._judge.located is None:
            self._judge.end_in(each for each, is_last in pairs if is_last)
            self._is_auxiliary = True
        return results

    @property
    def located(self) -> Located | None:
        """The first Inf or NaN that reached a result; None if none did."""
        found = self._judge.located
        # No backward pass makes what is beside the loss: those are gradients in a pair, too.
        is_auxiliary = self._is_auxiliary and not isinstance(found, BadGradient)
        return found and replace(
            found, is_auxiliary=is_auxiliary, enlarged_by=self._enlarged_by(found)
        )

    def _enlarged_by(self, found: Located) -> str | None:
        """The exponential that made the numbers large before an Inf or NaN; None if none did."""
        before, own = self._exponential, (found.operation, found.line)
        if before is None or isinstance(found, Given) or before[:2] == own:
            return None
        is_large = isinstance(found, BadGradient) or found.largest_input > LARGE_FROM_THE_START
        at = f" at {before.line}" if before.line else ""
        return f"{before.operation}{at}" if is_large else None

    def _given(self, array: Array) -> Located | None:
        """Where the Inf or NaN in an array began that no primitive made."""
        if not _is_number(array):
            return None
        (value,) = self._judge.before([array], Site())
        return value.origin

    def _run(self, closed: Any, inputs: Sequence[Array], place: _Place) -> list[Array]:
        """Run a computation, and return its results; ``place`` is the place of its call."""
        jaxpr = getattr(closed, "jaxpr", closed)
        constants = getattr(closed, "consts", ())
        for array in constants:
            self._given(array)
        constant = import_module("jax.extend.core").Literal
        values = dict(zip(jaxpr.constvars, constants, strict=True))
        values |= dict(zip(jaxpr.invars, inputs, strict=True))

        def value_of(atom: Any) -> Array:
            return atom.val if isinstance(atom, constant) else values[atom]

        for equation, own_place in zip(jaxpr.eqns, self._places_in(jaxpr, place), strict=True):
            arrays = [value_of(atom) for atom in equation.invars]
            made = self._run_equation(equation, arrays, own_place)
            values |= dict(zip(equation.outvars, made, strict=True))
        return [value_of(atom) for atom in jaxpr.outvars]

    def _places_in(self, jaxpr: Jaxpr, place: _Place) -> list[_Place]:
        """The place of each primitive of a computation."""
        used = {id(atom) for equation in jaxpr.eqns for atom in equation.invars}
        used |= {id(atom) for atom in jaxpr.outvars}
        results = zip(jaxpr.outvars, place.is_forward, strict=True)
        forward = {id(atom) for atom, is_forward in results if is_forward}
        places = []
        for equation in reversed(jaxpr.eqns):
            # A result that is never used may be the loss, which jax.grad drops.
            found = [id(atom) in forward or id(atom) not in used for atom in equation.outvars]
            kind = place.kind
            if "transpose(" in str(equation.source_info.name_stack) or not any(found):
                kind = "backward"
            else:
                forward.update(map(id, equation.invars))
            line, called, optimizer = _call_of(equation)
            if line is None:
                line, called, optimizer = place.line, place.called or called, place.optimizer
            layer = self._layer_of(equation, place)
            places.append(_Place(line, kind, found, called, layer=layer, optimizer=optimizer))
        return _with_forward(jaxpr.eqns, places[::-1])

    def _run_equation(
        self, equation: Equation, inputs: Sequence[Array], place: _Place
    ) -> list[Array]:
        """Run one primitive, or the computation that it holds, and return its outputs."""
        name, params = equation.primitive.name, equation.params
        if name == "scan":
            return self._scan(params, inputs, place)
        if name == "while":
            return self._while(params, inputs, place)
        if name == "cond":
            index, *rest = inputs
            branches = params["branches"]
            return self._run(branches[min(max(int(index), 0), len(branches) - 1)], rest, place)
        if name in _CALLS or name.startswith(("custom_jvp_call", "custom_vjp_call")):
            held = next(
                params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params
            )
            return self._run(held, inputs, place)
        if name in CALLBACKS:
            if equation.outvars:
                raise ValueError(f"what {name} returns is unknown, as it is not called again")
            return []

        def bind() -> list[Array]:
            outputs = equation.primitive.bind(*inputs, **params)
            return list(outputs) if equation.primitive.multiple_results else [outputs]

        exponent = [np.float64(params["y"])] if name == "integer_pow" else []
        return self._see(name, bind, [*inputs, *exponent], place)

    def _see(
        self, name: str, bind: Callable[[], list[Array]], arrays: Sequence[Array], place: _Place
    ) -> list[Array]:
        """Run a primitive, and judge what it makes."""
        owner = "" if place.layer is None else type(self._layers[place.layer]).__name__
        operation = place.of or place.called or name
        site = Site(operation, place.line, place.layer, owner, place.optimizer)
        inputs = list(filter(_is_number, arrays))
        for array in inputs:
            self._note_reader(array, site._replace(operation=name))
        values = self._judge.before(inputs, site)
        outputs = bind()
        self._judge.see(site, place.kind, inputs, values, list(filter(_is_number, outputs)))
        if name in _EXPONENTIALS and place.kind == "forward" and self._exponential is None:
            made = read(outputs[0])
            is_large = not made.bad and made.largest > LARGE_FROM_THE_START
            self._exponential = site if is_large else None
        return outputs

    def _note_reader(self, array: Array, site: Site) -> None:
        """Note the first primitive that reads what was given with an Inf or NaN."""
        origin = self._judge.origin_of(array)
        if origin is None or origin.operation is not None or origin.line is not None:
            return
        read_at = replace(origin, line=site.line)
        if origin.kind == "input":
            operation, _, module, type_, _ = site
            read_at = replace(read_at, operation=operation, module=module, type=type_)
        self._judge.note(array, read_at)

    def _scan(self, params: Any, inputs: Sequence[Array], place: _Place) -> list[Array]:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
        consts, carry = list(inputs[:num_consts]), list(inputs[num_consts : num_consts + num_carry])
        is_carry_forward = [any(place.is_forward)] * num_carry  # the next iteration uses them
        place = place._replace(is_forward=[*is_carry_forward, *place.is_forward[num_carry:]])
        stack = import_module("jax.numpy").stack
        sequences, steps = inputs[num_consts + num_carry :], list[list[Array]]()
        order = slice(None, None, -1 if params["reverse"] else 1)
        for index in range(params["length"])[order]:
            items = [self._part(each[index], [each]) for each in sequences]
            results = self._run(params["jaxpr"], [*consts, *carry, *items], place)
            carry = results[:num_carry]
            steps.append(results[num_carry:])
        stacked = [
            self._part(stack(outputs), outputs) for outputs in zip(*steps[order], strict=True)
        ]
        return [*carry, *stacked]

    def _part(self, array: Array, of: Iterable[Array]) -> Array:
        """An array that is part of another, or stacked from others, with its origin."""
        origins = (self._judge.origin_of(each) for each in of)
        self._judge.note(array, next(filter(None, origins), None))
        return array

    def _while(self, params: Any, inputs: Sequence[Array], place: _Place) -> list[Array]:
        first = params["cond_nconsts"]
        second = first + params["body_nconsts"]
        carry = list(inputs[second:])
        condition = place._replace(is_forward=[True])
        place = place._replace(is_forward=[True] * len(carry))
        while self._run(params["cond_jaxpr"], [*inputs[:first], *carry], condition)[0]:
            carry = self._run(params["body_jaxpr"], [*inputs[first:second], *carry], place)
        return carry

    def _layer_of(self, equation: Equation, place: _Place) -> str | None:
        """The innermost layer of the model that runs a primitive, by the scopes of its name."""
        scopes = re.split(r"[/()]+", str(equation.source_info.name_stack))
        parts = [each for each in scopes if each]
        ends = ((first, last) for last in range(len(parts), 0, -1) for first in range(last))
        names = (".".join(parts[first:last]) for first, last in ends)
        return next((name for name in names if name in self._layers), place.layer)


def _with_forward(equations: Sequence[Equation], places: Sequence[_Place]) -> list[_Place]:
    """The places, those of the backward pass with the primitive whose gradient they compute.

    JAX gives a derivative that is computed ahead the traceback of its primitive. A primitive of the
    backward pass itself reads a number that its primitive has read, on the same line.
    """
    made_at, reads = dict[object, str](), dict[tuple[str | None, int], str]()
    for equation, place in zip(equations, places, strict=True):
        name = place.called or equation.primitive.name
        if place.kind == "forward" and equation.primitive.name not in _CALLS:
            made_at.setdefault(equation.source_info.traceback, name)
            reads |= {(place.line, id(atom)): name for atom in equation.invars}

    found = []
    for equation, place in zip(equations, places, strict=True):
        name = None
        if place.kind == "backward":
            own = (reads.get((place.line, id(atom))) for atom in equation.invars)
            name = made_at.get(equation.source_info.traceback) or next(filter(None, own), None)
        if name is not None and "transpose(" not in str(equation.source_info.name_stack):
            # Such as 1 + x, by which the gradient of log1p divides.
            reads |= {(place.line, id(atom)): name for atom in equation.outvars}
        found.append(place._replace(of=name))
    return found


def _call_of(equation: Equation) -> tuple[str | None, str | None, str | None]:
    """The user's line of a primitive, the function of JAX that was called there, and an optimizer.

    The line is the innermost one that is neither JAX's nor gradscaler's. The function is None if it
    is the primitive itself, or if nothing is known of its failures. The optimizer is None if the
    primitive belongs to no update of one.
    """
    optimizer: str | None = None
    traceback = equation.source_info.traceback
    called = _known(str(equation.params.get("name")))  # of a function that is compiled
    frames = iter(() if traceback is None else traceback.frames)
    for frame in frames:
        if is_of_users_file(frame.file_name):
            line = users_line((each.file_name, each.line_num) for each in (frame, *frames))
            return line, _unless_itself(called, equation), optimizer
        called = _known(frame.function_name) or called
        optimizer = optimizer or _optimizer_in(frame)
    return None, _unless_itself(called, equation), optimizer


def _unless_itself(called: str | None, equation: Equation) -> str | None:
    return None if called == canonical(equation.primitive.name) else called


def _optimizer_in(frame: Any) -> str | None:
    """The rule of optax, or the optimizer of Keras, whose update a frame computes; else None."""
    parts = Path(frame.file_name).parts[:-1]
    rule, *inner = frame.function_name.split(".")
    if "optax" in parts and "update_fn" in inner and rule not in _COMBINING:
        return f"optax.{rule}"
    if parts[-3:] == ("keras", "src", "optimizers") and inner[:1] == ["update_step"]:
        return f"keras.optimizers.{rule}"
    return None


def _known(function: str) -> str | None:
    """The name that users know of a function whose failures are known; else None."""
    name = canonical(function)
    return None if row_of(name) is None or name in MOVES else name


def _is_number(array: Array) -> bool:
    """Whether an array is of a floating-point kind; one of another kind counts as finite."""
    return dtype_name(array).startswith(("float", "bfloat", "complex"))
