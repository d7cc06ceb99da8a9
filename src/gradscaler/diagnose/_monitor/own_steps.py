"""A ``train_step`` of a Keras model's own, which is run again up to its optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

from gradscaler.diagnose._seams.keras import package_of

Model = Any
Pairs = list[tuple[Any, Any]]  # of variables and their gradients


def is_own(model: Model) -> bool:
    """Whether a model's class has a ``train_step`` that is not Keras'."""
    return not type(model).train_step.__module__.startswith(("keras.", "tf_keras."))


@contextmanager
def up_to_optimizer(model: Model) -> Iterator[Pairs]:
    """Let optimizers only keep what this thread gives them, as variables and gradients.

    No loss is scaled meanwhile, so that what overflows does so at any scale.
    """
    pairs: Pairs = []

    def apply(own: Any, gradients: Iterable[Any], variables: Any = None) -> None:
        variables = own._trainable_variables if variables is None else variables
        pairs.extend(zip(variables, gradients, strict=False))

    def apply_gradients(_: Any, given: Iterable[tuple[Any, Any]], *__: Any, **___: Any) -> None:
        pairs.extend((variable, gradient) for gradient, variable in given)

    def stateless_apply(own: Any, state: Any, gradients: Any, values: Any) -> Any:
        apply(own, gradients)
        return values, state

    instead: dict[str, Callable[..., Any]] = {
        "apply": apply,
        "apply_gradients": apply_gradients,
        "stateless_apply": stateless_apply,
        **dict.fromkeys(("scale_loss", "get_scaled_loss"), lambda _, loss: loss),
        "get_unscaled_gradients": lambda _, gradients: gradients,
    }
    optimizers = sys.modules[package_of(model)].optimizers
    bases = optimizers.Optimizer, getattr(optimizers, "legacy", optimizers).Optimizer
    kinds = {kind for base in (*bases, type(model.optimizer)) for kind in base.__mro__}
    with ExitStack() as undo:
        for kind in kinds:
            for name in instead.keys() & vars(kind).keys():
                undo.callback(setattr, kind, name, vars(kind)[name])
                setattr(kind, name, _in_this_thread(instead[name], vars(kind)[name]))
        yield pairs


def _in_this_thread(instead: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    thread = get_ident()

    def called(*args: Any, **kwargs: Any) -> Any:
        return (instead if get_ident() == thread else method)(*args, **kwargs)

    return called
