"""Several models as one, such as a generator and a discriminator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gradscaler.diagnose._graph.call_site import is_of_user, shown_line
from gradscaler.diagnose._locate.module_hooks import framework_of


def one_model(models: Any) -> Any:
    """A model, or one that holds those of a list or a dict; their names come before its own.

    Models of Keras and MindSpore stay a dict.

    >>> import torch
    >>> both = one_model({"G": torch.nn.Linear(2, 1, bias=False), "D": torch.nn.Linear(1, 1)})
    >>> [name for name, _ in both.named_parameters()]
    ['G.weight', 'D.weight', 'D.bias']
    """
    if not isinstance(models, (list, tuple, Mapping)):
        return models
    named = models if isinstance(models, Mapping) else dict(enumerate(models))
    of = {str(name): model for name, model in named.items()}
    if not of:
        return None
    is_module = any(hasattr(model, "named_parameters") for model in of.values())
    return _module_of(of) if is_module else of


def models_in(model: Any) -> list[Any]:
    """The models that :func:`one_model` has put into one; else the model alone, if there is one."""
    if hasattr(model, "holds_gradscaler_models"):
        return list(model.children())
    return [] if model is None else [model]


def uncalled_in(model: Any) -> Iterator[str]:
    """Modules within a model whose class has a backward(), as ``"Reverse at train.py:7"``.

    A whole model may have one that its trainer calls, such as one of Lightning's.
    """
    for each in models_in(model):
        for module in each.modules():
            backward: Any = getattr(type(module), "backward", None)
            code = getattr(backward, "__code__", None)
            if module is each or code is None or code.co_argcount < 2 or not is_of_user(backward):
                continue
            yield f"{type(module).__name__} at {shown_line(code.co_filename, code.co_firstlineno)}"


def _module_of(models: Mapping[str, Any]) -> Any:
    """A module of PyTorch or TensorPlay, or a layer of Paddle, that holds models by their names."""
    nn = framework_of(next(iter(models.values()))).nn
    base = getattr(nn, "ModuleDict", None) or nn.LayerDict
    # It is never in training itself, and never called; hooks ask whether its models are.
    training = property(_is_in_training, lambda module, value: None)
    return type("Models", (base,), {"training": training, "holds_gradscaler_models": True})(models)


def _is_in_training(module: Any) -> bool:
    return any(model.training for model in module.children())
