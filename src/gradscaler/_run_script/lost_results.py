"""What a compiled step of JAX computes and loses, by its program, such as running statistics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

Program = Any
Variable = Any
_Ends = list[tuple[Variable, int]]


def stale_in(program: Program) -> list[int]:
    """The places of results that are arguments as they were, though new ones are computed of them.

    The new one has an argument's shape, and nothing uses it; and nothing else that is returned
    depends on the argument. So frozen weights are none, as the loss does, or the gradients do.
    """
    given = set(map(id, program.invars))
    results = {id(each): each for each in program.outvars if id(each) in given}
    arguments = [each for each in results.values() if getattr(each.aval, "shape", ())]
    bits = {id(each): 1 << at for at, each in enumerate(arguments)}
    ends: _Ends = []
    made = _follow(program, [bits.get(id(each), 0) for each in program.invars], ends)
    used = _any(
        mask & ~bits.get(id(each), 0) for each, mask in zip(program.outvars, made, strict=True)
    )
    is_new = {
        id(each)
        for each in arguments
        if not bits[id(each)] & used
        and any(bits[id(each)] & mask and _kind(end) == _kind(each) for end, mask in ends)
    }
    return [at for at, each in enumerate(program.outvars) if id(each) in is_new]


def _any(masks: Any) -> int:
    return reduce(or_, masks, 0)


def _kind(variable: Variable) -> tuple[Any, Any]:
    return variable.aval.shape, variable.aval.dtype


def _follow(program: Program, masks: Sequence[int], ends: _Ends) -> list[int]:
    """On which arguments each result depends, as bits.

    What is computed of them, and used nowhere, goes to ends.
    """
    of = {id(each): mask for each, mask in zip(program.invars, masks, strict=True)}
    used = {id(each) for equation in program.eqns for each in equation.invars}
    used |= set(map(id, program.outvars))
    seen = 0  # by what has an effect, such as a callback
    for equation in program.eqns:
        own = [of.get(id(each), 0) for each in equation.invars]
        if not any(own):
            continue
        seen |= _any(own) * bool(equation.effects)
        made = _follow_within(equation, own, ends)
        of |= {id(each): mask for each, mask in zip(equation.outvars, made, strict=True)}
        pairs = zip(equation.outvars, made, strict=True)
        ends += [(each, mask) for each, mask in pairs if id(each) not in used]
    return [of.get(id(each), 0) | seen for each in program.outvars]


def _follow_within(equation: Any, own: list[int], ends: _Ends) -> list[int]:
    """On which arguments each result of an equation depends, by the program that it holds."""
    params = equation.params
    names = (name for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in params)
    held = params.get(next(names, ""))
    held = getattr(held, "jaxpr", held)
    if held is None or len(held.invars) != len(own):
        return [_any(own)] * len(equation.outvars)
    made = _follow(held, own, ends)
    if equation.primitive.name == "scan":
        first, count = params["num_consts"], params["num_carry"]
        while any(new & ~old for old, new in zip(own[first : first + count], made, strict=False)):
            for at in range(count):
                own[first + at] |= made[at]
            made = _follow(held, own, ends)
    return made
