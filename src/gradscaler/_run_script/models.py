"""The models that optimizers train, found in memory, under the names of the user's variables."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from traceback import walk_stack
from typing import Any

import torch
from torch.nn import Module

from gradscaler._in_memory import in_memory
from gradscaler._run_script.variables import variables_of
from gradscaler.diagnose._gradients.arrays import has_numbers, local
from gradscaler.diagnose._monitor.models import one_model
from gradscaler.diagnose._monitor.parameters import held_by
from gradscaler.diagnose._record.thresholds import FEW_ELEMENTS

# A module of these packages with one child and no parameter of its own wraps a model, unless its
# class derives from a user's, as fully_shard makes it.
_WRAPPERS = (
    *("torch.nn.parallel.", "torch._dynamo.", "torch.distributed."),
    *("accelerate.", "deepspeed.runtime.engine", "lightning"),
)
_LIBRARIES = (*_WRAPPERS, "torch.", "builtins", "abc", "typing", "pytorch_lightning")


def models_of(
    optimizers: Sequence[torch.optim.Optimizer], first: Iterable[Iterable[torch.Tensor]] = ()
) -> Module | dict[str, Module]:
    """The model that optimizers train, without its wrappers; several by their variables' names.

    A model is a module in memory that is in no other module and holds one of their parameters. This
    looks at each object that Python's garbage collector knows, once, so it finds copies and loaded
    models, too. Tensors that are trained and in no module belong to the model.

    Args:
        optimizers: the optimizers.
        first: what each was made with. An engine may have put flat copies in its place, which no
            module holds.
    """
    trained = {id(p): p for each in optimizers for p in held_by(each)}
    outermost = _outermost()
    wanted: dict[int, object] = {**trained}
    own = {id(p) for each in outermost for p in each.parameters()}
    for each, made_with in zip(optimizers, first, strict=False):
        if own.isdisjoint(map(id, held_by(each))):
            wanted |= {id(p): p for p in made_with}
    found = [_inner(each) for each in outermost if _holds(each, wanted)]
    found = found or [_inner(each) for each in outermost if _is_copied(each, trained.values())]
    models = list({id(each): each for each in found}.values())
    loose = trained.keys() - {id(p) for each in models for p in each.parameters()}
    model = _named(models) if len(models) > 1 else next(iter(models), None)
    if not loose and model is not None:
        return model
    return Tensors([trained[each] for each in trained if each in loose], one_model(model))


class Tensors(Module):
    """A model with tensors that are in no module, such as a temperature, or of these alone.

    They have the names of the user's variables, else numbers.
    """

    def __init__(self, tensors: list[torch.Tensor], model: Module | None = None) -> None:
        super().__init__()
        own = Module() if model is None else model
        self._own = (own,)  # no child
        self._tensors = _named(tensors, taken=dict(own.named_parameters()))

    training = property(lambda self: self._own[0].training, lambda self, value: None)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Those of the model."""
        yield from self._own[0].named_modules(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Those of the model."""
        yield from self._own[0].named_buffers(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Those of the model, and the tensors."""
        yield from self._own[0].named_parameters(*args, **kwargs)
        yield from self._tensors.items()


def _outermost() -> list[Module]:
    """The modules in memory that are in no other module, except a monitor's own."""
    every = (each for each in in_memory(Module) if "_modules" in vars(each))
    modules = [each for each in every if not type(each).__module__.startswith("gradscaler.")]
    inner = {id(child) for each in modules for child in each.children()}
    return [each for each in modules if id(each) not in inner]


def _holds(module: Module, trained: Mapping[int, object]) -> bool:
    return any(id(parameter) in trained for parameter in module.parameters())


def _is_copied(module: Module, trained: Collection[torch.Tensor]) -> bool:
    """Whether a module in 16 bits holds what is trained, which are its copies in float32.

    Its gradients are seen, as the optimizer that the script gives them to may never step.
    """
    own = [p for p in module.parameters() if p.requires_grad]
    return len(own) == len(trained) > 0 and all(map(_is_rounded, own, trained))


def _is_rounded(own: torch.Tensor, copied: torch.Tensor) -> bool:
    """Whether a tensor in 16 bits is that of another dtype, by some of their elements."""
    is_narrow = own.dtype in (torch.float16, torch.bfloat16) and own.dtype != copied.dtype
    if not is_narrow or own.shape != copied.shape or not (has_numbers(own) and has_numbers(copied)):
        return False
    both = (local(each).detach() for each in (own, copied))
    parts = (each.reshape(-1)[:FEW_ELEMENTS].to(own.dtype) for each in both)
    return torch.equal(*parts)


def _inner(model: Module) -> Module:
    """A model without the wrappers of DDP, FSDP, ``torch.compile`` and trainers."""
    while _is_wrapper(type(model)):
        children = list(model.children())
        if len(children) != 1 or next(model.parameters(recurse=False), None) is not None:
            break
        model = children[0]
    return model


def _is_wrapper(kind: type) -> bool:
    is_own = all(base.__module__.startswith(_LIBRARIES) for base in kind.__mro__)
    return is_own and kind.__module__.startswith(_WRAPPERS)


def _named(found: list[Any], taken: Collection[str] = ()) -> dict[str, Any]:
    """Models or tensors by the names of variables, else of their classes, which are not taken."""
    names: dict[int, str] = {}
    missing = {id(each) for each in found}
    frames = (frame for frame, _ in walk_stack(sys._getframe()))
    for name, value in variables_of(frames):
        inner = _inner(value) if issubclass(type(value), Module) else value
        if id(inner) in missing:
            names.setdefault(id(inner), re.sub(r"\W", "_", name))
        if len(names) == len(missing):
            break
    named: dict[str, Any] = {}
    for number, each in enumerate(found):
        is_tensor = isinstance(each, torch.Tensor)
        name = names.get(id(each), f"tensor_{number}" if is_tensor else type(each).__name__)
        while name in named or name in taken:
            name = f"{name}_"
        named[name] = each
    return dict(sorted(named.items()))  # the collector's order may change from run to run
