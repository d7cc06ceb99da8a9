"""Keeps the scaler's code out of the graphs of ``torch.compile``, as PyTorch keeps its own scaler.

A scaler reads flags on the host and sets attributes of optimizers, so traced code would break into
dozens of graphs and recompile whenever the scale moves. ``scale`` itself is traced, as a part of
the loss, and so are models and optimizers.

PyTorch's public way has a cost for those who compile nothing: ``torch.compiler.disable`` imports
the compiler, which takes a second or more. By default it also keeps out whatever the function
calls. So this file uses private names, and is the only one that does:
``torch._C._dynamo.eval_frame`` and the attribute ``_torchdynamo_disable``, tested with PyTorch
2.13. In a release without them the scaler is traced: training gives the same results, but a
compiled step breaks into more graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType

import torch

PACKAGES = tuple(
    f"gradscaler.{name}" for name in ("_eager", "_torch_like", "_on_torch", "torch", "outcome")
)
CALLS = "unscale_", "step", "update", "minimize", "clip_grad_norm_"


def keep_out_of_graphs() -> None:
    """Mark every loaded function of the scaler, so that ``torch.compile`` runs it untraced.

    Functions of others that they call, such as an optimizer's step, are still traced.
    ``torch._dynamo.skip`` does this for one function, but importing it takes a second. A marked
    function costs nothing more to call.
    """
    try:
        from torch._C._dynamo import eval_frame

        action = eval_frame._FrameAction
        skip = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
        skip_all = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP)
        set_strategy = eval_frame.set_code_exec_strategy
    except (ImportError, AttributeError):  # another release of PyTorch: see above
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGES):
            for function in _functions(module, name):
                if function.__name__ in CALLS:
                    function._torchdynamo_disable = True  # type: ignore[attr-defined]
                # Not even the policy that it calls is traced: host numbers would recompile it.
                strategy = skip_all if function.__name__ == "next_state" else skip
                for code in _codes(function.__code__):
                    set_strategy(code, strategy)


def is_compiling() -> bool:
    """Whether the caller runs under ``torch.compile``.

    Without PyTorch's private names, this asks its public function, which returns False in functions
    that are kept out of graphs. Then a compiled step may be traced once more.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        return False
    try:
        from torch._C._dynamo import eval_frame

        callback = eval_frame.get_eval_frame_callback
    except (ImportError, AttributeError):
        return torch.compiler.is_compiling()
    return callable(callback())


def _functions(owner: object, module: str) -> Iterator[FunctionType]:
    """The functions, methods and properties that a module defines."""
    for value in list(vars(owner).values()):
        if isinstance(value, type):
            if value.__module__ == module:
                yield from _functions(value, module)
            continue
        value = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(value, FunctionType) and value.__module__ == module:
            yield value


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
