"""What keeps every gradient of a tape of TensorFlow from the variables: by the code under it."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from linecache import getlines
from traceback import walk_stack
from types import FunctionType, MethodType, ModuleType
from typing import Any

from gradscaler._run_script.step_shapes import PASS_NONE
from gradscaler.diagnose._graph.autograph import written_at
from gradscaler.diagnose._graph.call_site import is_of_user, is_of_users_file, shown_line

_DEPTH = 4  # calls of the user's functions, one in the other, that are looked into


def told_of_none(variables: Sequence[Any], cut: str) -> str:
    """What says that an optimizer gets no gradient at all.

    Args:
        variables: what it would step.
        cut: a call under the tape that passes no gradient on, and its line; empty if none is known.
    """
    first, *rest = (str(getattr(each, "path", None) or each.name) for each in variables)
    names = first.partition(":")[0] + (f" and {len(rest)} more" if rest else "")
    text = (
        f"No gradient of {names} exists, so the optimizer cannot step: the loss does not depend on "
        "variables by operations that the tape saw."
    )
    if cut:
        return (
            f"{text} {cut} passes no gradient on: compute all that is between the variables and "
            "the loss by operations of TensorFlow that have one, under the tape."
        )
    return f"{text} Compute the loss under the tape, by operations of TensorFlow alone."


def cut_under_tape() -> str:
    """The first call under the latest tape, in the user's code that runs, that passes none on.

    Returns:
        such as ``"np.array at train.py:16"``; empty if there is none.
    """
    with suppress(Exception):  # the code may be anything
        for frame, number in walk_stack(sys._getframe()):
            file, line = written_at(frame.f_code.co_filename, number)
            if is_of_users_file(file):
                names = {**frame.f_globals, **frame.f_locals}
                blocks = [each for each in ast.walk(_tree_of(file)) if isinstance(each, ast.With)]
                before = [each for each in blocks if _is_tape(each) and each.lineno <= line]
                if before:
                    under = max(before, key=lambda each: each.lineno)
                    return next(_cuts_in(under, names, file, set()), "")
    return ""


def _cuts_in(
    code: ast.AST, names: Mapping[str, Any], file: str, seen: set[object]
) -> Iterator[str]:
    """The calls in code that pass no gradient on, in the order in which they run."""
    calls = [each for each in ast.walk(code) if isinstance(each, ast.Call)]
    for call in sorted(calls, key=lambda each: (each.end_lineno or 0, each.end_col_offset or 0)):
        if _passes_none(call, names):
            yield f"{ast.unparse(call.func)} at {shown_line(file, call.lineno)}"
        value = _value_of(call.func, names)
        function = _function_of(value)
        if function is None or function in seen or len(seen) > _DEPTH:
            continue
        seen.add(function)
        own = function.__code__
        if (inner := _definition_of(own.co_filename, own.co_firstlineno)) is not None:
            holder = value
            if value is function and isinstance(call.func, ast.Attribute):
                holder = _value_of(call.func.value, names)
            outer = inspect.getclosurevars(function).nonlocals
            known = {**function.__globals__, **outer, "self": holder}
            yield from _cuts_in(inner, known, own.co_filename, seen)


def _passes_none(call: ast.Call, names: Mapping[str, Any]) -> bool:
    """Whether a call makes numbers of NumPy's, or is of an operation without a gradient."""
    given = [*call.args, *(each.value for each in call.keywords)]
    if isinstance(call.func, ast.Attribute) and call.func.attr == "numpy" and not given:
        return True
    path = ast.unparse(call.func).split(".")
    root = names.get(path[0])
    if not isinstance(root, ModuleType) or all(isinstance(each, ast.Constant) for each in given):
        return False
    package = root.__name__.partition(".")[0]
    if package == "numpy":
        return "random" not in path
    return package == "tensorflow" and path[-1] in {*PASS_NONE.values(), "numpy_function"}


def _value_of(code: ast.expr, names: Mapping[str, Any]) -> Any:
    """What a name, or an attribute of it, stands for; no code of the user's is run for it."""
    if isinstance(code, ast.Name):
        return names.get(code.id)
    if isinstance(code, ast.Attribute):
        return inspect.getattr_static(_value_of(code.value, names), code.attr, None)
    return None


def _function_of(value: Any) -> FunctionType | None:
    """The function of the user's that a call of a value runs; of a layer, its ``call``."""
    value = value.__func__ if isinstance(value, MethodType) else value
    if not isinstance(value, FunctionType):
        kind = type(value)
        value = inspect.getattr_static(kind, "call", None)
        value = value or inspect.getattr_static(kind, "__call__", None)
    is_own = isinstance(value, FunctionType) and is_of_user(value)
    return value if is_own else None


def _definition_of(file: str, line: int) -> ast.AST | None:
    """The function that begins at a line of a file, with its decorators."""
    for each in ast.walk(_tree_of(file)):
        if isinstance(each, (ast.FunctionDef, ast.Lambda)):
            decorators = getattr(each, "decorator_list", [])
            if line == min([each.lineno, *(one.lineno for one in decorators)]):
                return each
    return None


def _is_tape(block: ast.With) -> bool:
    return any("GradientTape" in ast.unparse(each.context_expr) for each in block.items)


@cache
def _tree_of(file: str) -> ast.AST:
    return ast.parse("".join(getlines(file)))
