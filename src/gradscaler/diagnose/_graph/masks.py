"""When -inf is a mask, and where an Inf or NaN in the result of an operation came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from gradscaler.diagnose._gradients.reading import Reading
from gradscaler.diagnose._operations.operation import Role
from gradscaler.diagnose._operations.rows import names_with

_Origin = TypeVar("_Origin")

TAKES_MASKS = names_with(Role.TAKES_MASKS)
FILLS = names_with(Role.FILLS)
ADDS_UP = names_with(Role.ADDS_UP)
# Elsewhere a number may be an option, such as the order of a norm, or fill a mask.
ARITHMETIC = names_with(Role.ADDS) | {"mul", "div"}


@dataclass(frozen=True)
class Value(Generic[_Origin]):
    """An array's reading, and the origin of its Inf, NaN or -inf; None for a given mask."""

    reading: Reading
    origin: _Origin | None = None


def result(
    reading: Reading,
    is_scalar: bool,
    inputs: Sequence[Value[_Origin]],
    makes_masks: bool,
    made: Callable[[], _Origin],
) -> Value[_Origin]:
    """The value that an operation returns, from its reading and the operation's inputs.

    An Inf or NaN comes from the first input that holds one. If none does, the operation made it.
    -inf may be a mask, so it does no harm until an operation turns it into +Inf or NaN. The origin
    is then that of the -inf, or the operation itself if the mask was given. -inf is not a mask if
    it is a scalar, or if an operation that makes no masks makes it from finite numbers.

    Args:
        reading: the reading of the result.
        is_scalar: whether the result is a single number.
        inputs: the values of the operation's inputs.
        makes_masks: whether -inf in the result may be meant as a mask.
        made: returns the origin that stands for the operation.
    """
    if not reading.bad:
        return Value(reading)
    bad = [value for value in inputs if value.reading.state == "bad"]
    masks = [value for value in inputs if value.reading.state == "mask"]
    origin = next((value.origin for value in bad or masks if value.origin is not None), None)
    if reading.state == "mask" and not bad:
        if origin is None and (masks or not inputs):  # the mask was given
            return Value(reading)
        if is_scalar or not (masks or makes_masks):
            reading = Reading("bad")
    return Value(reading, made() if origin is None else origin)
