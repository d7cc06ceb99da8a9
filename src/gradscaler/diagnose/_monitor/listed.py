"""Parameters in lists and dicts of a model's modules, of which the model does not know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._locate.module_hooks import framework_of, modules_of

_MOST_LISTED = 1000  # elements of a list, of which any may be a layer
_OF_FRAMEWORKS = "_modules", "_parameters", "_sub_layers", "_buffers"


def in_lists(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The parameters of modules in the lists and dicts of a model's modules, which hide them."""
    if model is None:
        return
    nn: Any = framework_of(model).nn
    for module_name, module in modules_of(model):
        for name, held in vars(module).items():
            if name not in _OF_FRAMEWORKS and not name.endswith("_hooks"):
                yield from _in_list(held, f"{module_name}.{name}".lstrip("."), nn)


def _in_list(held: Any, name: str, nn: Any, depth: int = 2) -> Iterator[tuple[str, Tensor]]:
    """The parameters in a list, set or dict, of which another one may be an element."""
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(held, dict):
        pairs = held.items()
    elif isinstance(held, (list, tuple, set)):
        pairs = enumerate(held)
    for key, each in islice(pairs, _MOST_LISTED):
        place = f"{name}[{key!r}]"
        if isinstance(each, nn.Parameter):
            yield place, each
        elif isinstance(each, nn.Module):
            yield from each.named_parameters(place)
        elif depth > 1:
            yield from _in_list(each, place, nn, depth - 1)
