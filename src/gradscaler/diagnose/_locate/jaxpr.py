"""Locate the primitive that makes the first Inf or NaN in a function of JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, Literal, NamedTuple

from gradscaler.diagnose._gradients.arrays import dtype_name
from gradscaler.diagnose._gradients.reading import Reading, largest_finite, largest_of, read
from gradscaler.diagnose._graph.call_site import users_line
from gradscaler.diagnose._graph.masks import Value, result
from gradscaler.diagnose._graph.site import Site, located_at
from gradscaler.diagnose._record.located import Located

Array = Any
Jaxpr = Any
Equation = Any

_ADDS_UP = ("dot_general", "conv_general_dilated", "reduce_sum", "cumsum", "reduce_window_sum")
_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2")


class _Value(NamedTuple):
    """An array in a computation, with its reading and the source of its Inf or NaN."""

    array: Array
    value: Value[Located]


class _Place(NamedTuple):
    """The place of a primitive: the user's line, and the pass.

    Attributes:
        line: the user's line; for a primitive inside a function of JAX's own, the line of the call.
        kind: the pass.
        is_forward: for each result, whether the forward pass uses it. A result that only the
            backward pass uses is a derivative, computed ahead.
        of: in the backward pass, the forward primitive whose gradient this is, if it is known.
    """

    line: str | None
    kind: Literal["forward", "backward"]
    is_forward: Sequence[bool]
    of: str | None = None


def locate_jax(fn: Callable[..., object], *args: object) -> Located | None:
    """Run a function of JAX primitive by primitive, and locate its first Inf or NaN.

    The primitive that makes it is the first, in the order of the computation, whose output is not
    finite although its inputs are. Its Inf or NaN must also reach a result of the function. -inf
    counts as finite unless it becomes +Inf or NaN, a sum makes it, or it is a scalar.

    To check the backward pass too, give the function that ``jax.value_and_grad`` makes. A primitive
    of the backward pass has the line and, where it is known, the name of the forward primitive
    whose gradient it computes. A
    derivative that the forward pass computes for the backward pass, such as 0.5 / sqrt(x) for
    sqrt(x), counts as backward. So does a primitive that ``jax.checkpoint`` runs again.

    A primitive in a function of JAX's own, such as ``jnp.linalg.norm``, has the line of the call.
    The primitives in ``jit``, ``remat``, ``custom_jvp``, ``custom_vjp``, ``scan``, ``while_loop``
    and ``cond`` are checked one by one. Other primitives that hold a computation, such as
    ``shard_map`` and Pallas kernels, are checked as a whole. The function is traced as under
    ``jit``, so its control flow must not depend on values. Results are rounded after each
    primitive, even where XLA would fuse several.

    Args:
        fn: the function.
        args: its arguments: arrays in any pytree.

    Returns:
        ``module`` is None, and ``operation`` is the primitive, such as ``"log"``. If an argument or
        a constant is not finite, the ``kind`` is ``"input"``, and ``parameter`` is the argument's
        path. None if all results are finite. JAX before 0.7 does not record which primitives
        belong to a backward pass, so there all other kinds are ``"forward"``.

    Raises:
        Any error that ``jax.make_jaxpr`` or the function raises.

    Example::

        found = locate_jax(jax.value_and_grad(scaled_loss), params, batch)
        print(found)  # forward of a function (float16), exp at train.py:12: 3 inf of 64; ...
    """
    jax: Any = import_module("jax")
    closed = jax.make_jaxpr(fn)(*args)
    leaves = jax.tree_util.tree_leaves_with_path(args)
    inputs = [_given(array, f"args{jax.tree_util.keystr(path)}") for path, array in leaves]
    place = _Place(None, "forward", [True] * len(closed.jaxpr.outvars))
    outputs = _run(closed, inputs, place)
    bad = (each.value for each in outputs if not each.array.ndim or each.value.found.state == "bad")
    return next((value.source for value in bad if value.found.bad), None)


def _run(closed: Any, inputs: Sequence[_Value], place: _Place) -> list[_Value]:
    """Run a computation, and return its results; ``place`` is the place of its call."""
    jaxpr = getattr(closed, "jaxpr", closed)
    consts = map(_given, getattr(closed, "consts", ()))
    constant = import_module("jax.extend.core").Literal
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= dict(zip(jaxpr.invars, inputs, strict=True))

    def value_of(atom: object) -> _Value:
        return _given(atom.val) if isinstance(atom, constant) else values[atom]

    for equation, own_place in zip(jaxpr.eqns, _places_in(jaxpr, place), strict=True):
        inputs = [value_of(atom) for atom in equation.invars]
        values |= dict(
            zip(equation.outvars, _run_equation(equation, inputs, own_place), strict=True)
        )
    return [value_of(atom) for atom in jaxpr.outvars]


def _places_in(jaxpr: Jaxpr, place: _Place) -> list[_Place]:
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
        places.append(_Place(_line_of(equation) or place.line, kind, found))
    return _with_forward(jaxpr.eqns, places[::-1])


def _with_forward(equations: Sequence[Equation], places: Sequence[_Place]) -> list[_Place]:
    """The places, those of the backward pass with the primitive whose gradient they compute.

    JAX gives a derivative that is computed ahead the traceback of its primitive. A primitive of the
    backward pass itself reads a number that its primitive has read, on the same line.
    """
    made_at, reads = dict[object, str](), dict[tuple[str | None, int], str]()
    for equation, place in zip(equations, places, strict=True):
        name = equation.primitive.name
        if place.kind == "forward" and name not in _CALLS:
            made_at.setdefault(equation.source_info.traceback, name)
            reads |= {(place.line, id(atom)): name for atom in equation.invars}

    def of(equation: Equation, place: _Place) -> str | None:
        read = (reads.get((place.line, id(atom))) for atom in equation.invars)
        return made_at.get(equation.source_info.traceback) or next(filter(None, read), None)

    pairs = zip(equations, places, strict=True)
    return [p if p.kind == "forward" else p._replace(of=of(e, p)) for e, p in pairs]


def _run_equation(equation: Equation, inputs: Sequence[_Value], place: _Place) -> list[_Value]:
    """Run one primitive, or the computation that it holds, and return its outputs."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return _scan(params, inputs, place)
    if name == "while":
        return _while(params, inputs, place)
    if name == "cond":
        index, *rest = inputs
        branches = params["branches"]
        return _run(branches[min(max(int(index.array), 0), len(branches) - 1)], rest, place)
    if name in _CALLS or name.startswith(("custom_jvp_call", "custom_vjp_call")):
        held = next(params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params)
        return _run(held, inputs, place)
    outputs = equation.primitive.bind(*(value.array for value in inputs), **params)
    if not equation.primitive.multiple_results:
        outputs = [outputs]
    return [_made(name, output, inputs, place) for output in outputs]


def _scan(params: Any, inputs: Sequence[_Value], place: _Place) -> list[_Value]:
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, carry = list(inputs[:num_consts]), list(inputs[num_consts : num_consts + num_carry])
    is_carry_forward = [any(place.is_forward)] * num_carry  # the next iteration uses them
    place = place._replace(is_forward=[*is_carry_forward, *place.is_forward[num_carry:]])
    stack = import_module("jax.numpy").stack
    sequences, steps = inputs[num_consts + num_carry :], list[list[_Value]]()
    order = slice(None, None, -1 if params["reverse"] else 1)
    for index in range(params["length"])[order]:
        items = [_with_source(each.array[index], each.value.source) for each in sequences]
        results = _run(params["jaxpr"], [*consts, *carry, *items], place)
        carry = results[:num_carry]
        steps.append(results[num_carry:])
    stacked = []
    for outputs in zip(*steps[order], strict=True):
        array = stack([output.array for output in outputs])
        sources = (output.value.source for output in outputs if output.value.found.bad)
        stacked.append(_with_source(array, next(sources, None)))
    return [*carry, *stacked]


def _while(params: Any, inputs: Sequence[_Value], place: _Place) -> list[_Value]:
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    carry = list(inputs[second:])
    condition = place._replace(is_forward=[True])
    place = place._replace(is_forward=[True] * len(carry))
    while _run(params["cond_jaxpr"], [*inputs[:first], *carry], condition)[0].array:
        carry = _run(params["body_jaxpr"], [*inputs[first:second], *carry], place)
    return carry


def _given(array: Array, name: str | None = None) -> _Value:
    """The value of an argument or a constant, which no primitive made."""
    found, source = _read(array), None
    if found.state == "bad":
        source = located_at(Site(), "input", array, largest_finite([array]), parameter=name)
    return _Value(array, Value(found, source))


def _made(name: str, array: Array, inputs: Sequence[_Value], place: _Place) -> _Value:
    """The value that the primitive ``name`` made."""
    values = [each.value for each in inputs]
    largest = largest_of(value.found.largest for value in values)
    made = partial(located_at, Site(place.of or name, place.line), place.kind, array, largest)
    value = result(_read(array), not array.ndim, values, name not in _ADDS_UP, made)
    source = value.source
    if source is not None and source.kind == "input" and source.operation is None:
        value = Value(value.found, replace(source, operation=name, line=place.line))
    return _Value(array, value)


def _with_source(array: Array, source: Located | None) -> _Value:
    """A value that is part of another, or stacked from others, with its source."""
    return _Value(array, Value(_read(array), source))


def _read(array: Array) -> Reading:
    """The reading of an array; an array of another kind than floating-point counts as finite."""
    is_number = dtype_name(array).startswith(("float", "bfloat", "complex"))
    return read(array) if is_number else Reading("finite")


def _line_of(equation: Equation) -> str | None:
    """The innermost line that is neither JAX's nor gradscaler's."""
    traceback = equation.source_info.traceback
    frames = () if traceback is None else traceback.frames
    return users_line((each.file_name, each.line_num) for each in frames)
