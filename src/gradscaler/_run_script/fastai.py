"""The optimizers that fastai brings: they call none of PyTorch's hooks, so this does."""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

from torch.optim import optimizer as hooks

from gradscaler._run_script.undo import replace


def own_optimizer() -> Any:
    """The class of fastai's optimizers, whose steps call PyTorch's hooks of all optimizers."""
    kind = sys.modules["fastai.optimizer"].Optimizer
    step = kind.step

    @wraps(step)
    def announced(self: Any, *args: Any, **kwargs: Any) -> Any:
        for before in list(hooks._global_optimizer_pre_hooks.values()):
            before(self, args, kwargs)
        result = step(self, *args, **kwargs)
        for after in list(hooks._global_optimizer_post_hooks.values()):
            after(self, args, kwargs)
        return result

    replace(kind, "step", announced)
    return kind
