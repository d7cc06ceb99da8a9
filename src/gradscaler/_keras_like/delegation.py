"""Hyperparameters of a wrapped optimizer, got and set on its wrapper."""

from __future__ import annotations

from typing import Any

HYPERPARAMETERS = frozenset(
    {
        "beta",
        "beta_1",
        "beta_2",
        "decay",
        "l1_regularization_strength",
        "l2_regularization_strength",
        "learning_rate_power",
        "momentum",
        "rho",
    }
)
"""What the optimizers of Keras 2 call ``_set_hyper`` on (tf-keras 2.21), learning rate aside."""

OPTIONS = frozenset(
    {
        "clipnorm",
        "clipvalue",
        "ema_momentum",
        "ema_overwrite_frequency",
        "global_clipnorm",
        "gradient_accumulation_steps",
        "use_ema",
        "weight_decay",
    }
)
"""What every optimizer's constructor takes, and the wrapped one alone acts on."""


class Delegating:
    """Mixin of a wrapper on which these names are the inner optimizer's, where that has them."""

    _inner_name = "inner_optimizer"

    def _delegates(self, name: str) -> bool:
        return name in HYPERPARAMETERS | OPTIONS and hasattr(vars(self).get(self._inner_name), name)

    def __getattr__(self, name: str) -> Any:  # when the wrapper itself has no such attribute
        if self._delegates(name):
            return getattr(vars(self)[self._inner_name], name)
        raise AttributeError(f"'LossScaleOptimizer' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if self._delegates(name):
            setattr(vars(self)[self._inner_name], name, value)
        else:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        delegated = filter(self._delegates, HYPERPARAMETERS | OPTIONS)
        return sorted({*super().__dir__(), *delegated})
