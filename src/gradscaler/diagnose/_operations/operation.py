"""A row of the table of operations, a repair, and what is seen where an operation failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from gradscaler.diagnose._record.located import Located

At = float | tuple[float, float]
"""A number, or all numbers between two."""

_MARGINS = {"float16": "1e-3", "bfloat16": "1e-2"}  # less may be rounded to 0 beside 1
_WIDE = "bfloat16", "float32", "float64", "complex64", "complex128"  # with at least float32's range


class Role(Enum):
    """What an operation does, as far as a search or a finding asks for it."""

    TAKES_MASKS = auto()  # -Inf in its input is a mask
    FILLS = auto()  # it may write -Inf as a mask
    ADDS_UP = auto()  # -Inf in its result is no mask
    ADDS = auto()  # two numbers, of which one must be Inf or NaN for a NaN
    STACKS = auto()  # its sum or mean adds up what it stacks
    DIVIDES = auto()
    EXPONENTIATES = auto()
    MOVES = auto()  # it reshapes, casts, copies or selects, and makes no new number
    RISKY = auto()  # it makes Inf or NaN of finite numbers more often than those without a pole
    SOLVES = auto()  # its slope depends on a whole matrix: no number that it keeps is a pole
    STEPS = auto()  # its slope is 0 everywhere
    SATURATES = auto()  # its slope may round to 0
    ENDS = auto()  # its slope is 0 at an end
    NEVER_NEGATIVE = auto()  # a loss, of targets and inputs as they should be
    TAKES_LOGITS = auto()
    MAKES_PROBABILITIES = auto()
    COMPARES = auto()  # a loss that takes the differences of outputs and targets


@dataclass(frozen=True)
class Seen:
    """The numbers of a failure, in whatever framework.

    Attributes:
        dtype: the dtype of the result, or of the gradient.
        is_backward: whether a gradient is Inf or NaN, not the result.
        has_inf: whether it holds an Inf.
        has_nan: whether it holds a NaN.
        size: how many elements it has.
        largest: the largest finite magnitude of the inputs.
        divisor: the smallest magnitude of the divisor; None if unknown.
        exponent: the exponent of a power; None if unknown.
        is_in_model: whether a module of the model ran the operation.
        type: the class of the module that ran it; empty if none did.
    """

    dtype: str = "float32"
    is_backward: bool = False
    has_inf: bool = False
    has_nan: bool = False
    size: int = 1
    largest: float = 0.0
    divisor: float | None = None
    exponent: float | None = None
    is_in_model: bool = False
    type: str = ""

    @classmethod
    def at(cls, located: Located, is_backward: bool = False) -> Seen:
        """The numbers of a located failure."""
        return cls(
            located.dtype,
            is_backward,
            located.num_inf > 0,
            located.num_nan > 0,
            located.size,
            located.largest_input,
            located.smallest_divisor,
            located.exponent,
            located.module is not None,
            located.type,
        )

    @property
    def margin(self) -> str:
        """What a number must be beyond 1, or below it, not to be rounded to 1 in the dtype."""
        return _MARGINS.get(self.dtype, "1e-6")

    @property
    def below_1(self) -> str:
        """The largest cosine that an angle is taken of."""
        return "0.99" if self.dtype == "bfloat16" else "0.999"

    @property
    def is_wide(self) -> bool:
        """Whether the dtype has at least the range of float32, so that float32 would not help."""
        return self.dtype in _WIDE

    @property
    def is_in_loss(self) -> bool:
        """Whether no module ran the operation."""
        return not (self.is_in_model or self.type)

    @property
    def is_inf_alone(self) -> bool:
        """Whether it holds an Inf and no NaN."""
        return self.has_inf and not self.has_nan

    @property
    def is_of_few(self) -> bool:
        """Whether NaN without an Inf came of numbers whose squares are finite in float32."""
        return not (self.has_inf or self.largest > 1e18)


def _always(_: Seen) -> bool:
    return True


@dataclass(frozen=True)
class Repair:
    """What to do against a failure.

    Attributes:
        text: the advice, in which ``{margin}`` and ``{below_1}`` stand for those of what is seen.
        when: whether it is the right one.
        clauses: what is appended to the text, each if it is right itself.
    """

    text: str
    when: Callable[[Seen], bool] = _always
    clauses: tuple[Repair, ...] = ()

    def said_of(self, seen: Seen) -> str:
        """The text with its clauses."""
        clauses = (each.text for each in self.clauses if each.when(seen))
        text = "".join((self.text, *clauses))
        return text.replace("{margin}", seen.margin).replace("{below_1}", seen.below_1)


@dataclass(frozen=True)
class Operation:
    """What is known of an operation. Its numbers are those of float64, as the framework gives them.

    Attributes:
        name: its name as users write it.
        also: its other names: functions, nodes, kernels and primitives, in any framework.
        bad_at: where its result is Inf or NaN. Of several inputs, one decides: the divisor, the
            base of a power, what a logarithm is taken of.
        steep_at: where its slope is Inf or NaN, whatever its result is.
        largest: by dtype, the input beyond which its result is Inf.
        roles: what it does.
        of_value: the repairs of an Inf or NaN in its result, in the order in which they are asked.
        of_slope: those of an Inf or NaN in its gradient.
        spoken: how a sentence names it, if not by its name.
    """

    name: str
    also: tuple[str, ...] = ()
    bad_at: tuple[At, ...] = ()
    steep_at: tuple[At, ...] = ()
    largest: Mapping[str, float] = field(default_factory=dict)
    roles: frozenset[Role] = frozenset()
    of_value: tuple[Repair, ...] = ()
    of_slope: tuple[Repair, ...] = ()
    spoken: str = ""

    def repair(self, seen: Seen) -> Repair | None:
        """The first repair that is right; None if there is none."""
        repairs = self.of_slope if seen.is_backward else self.of_value
        return next((each for each in repairs if each.when(seen)), None)
