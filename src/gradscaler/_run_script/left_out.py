"""The loss for which a script ended before the backward pass."""

from __future__ import annotations

import sys
from contextlib import suppress
from types import TracebackType

import torch

from gradscaler._run_script.variables import frames_of, variables_of, within


def loss_left_out(trace: TracebackType | None) -> torch.Tensor | None:
    """The latest loss in the user's variables that is Inf or NaN; None if there is none.

    A loss is a scalar with a graph. The variables are those of the functions in a traceback, and of
    the script's module.
    """
    every = (*variables_of(frames_of(trace)), *within(vars(sys.modules["__main__"])))
    bad = [value for _, value in every if issubclass(type(value), torch.Tensor) and _is_bad(value)]
    return max(bad, key=lambda loss: int(loss.grad_fn._sequence_nr()), default=None)


def _is_bad(value: torch.Tensor) -> bool:
    """Whether a tensor is a loss that is Inf or NaN."""
    with suppress(Exception):  # it may have no data
        is_loss = value.grad_fn is not None and value.numel() == 1
        return is_loss and not bool(value.detach().isfinite())
    return False
