"""The parts of a ``LossScaleOptimizer`` that Keras 3 and Keras 2 share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from inspect import isfunction
from types import ModuleType
from typing import Any, Protocol, TypeVar, get_args

import numpy as np

from gradscaler.policies import (
    DynamicScale,
    FixedScale,
    OwnPolicy,
    Policy,
    State,
    counts_nonfinite_steps,
    first_scale,
    is_fixed,
    leaf_dtypes,
    name_of_first_scale,
)
from gradscaler.policies._spelling import changed, check_alone, check_policy
from gradscaler.policies.state import where_for

Tensor = Any
Variable = Any
Optimizer = Any
Tape = Any  # TensorFlow's, which other backends lack
Loss = Tensor | Callable[[], Tensor]
Config = dict[str, Any]
T = TypeVar("T", bound="Wrapper")
Code = TypeVar("Code", bound=Callable[..., Any])

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
"""Names that Keras 2's optimizers pass to ``_set_hyper`` (tf-keras 2.21), but the learning rate."""

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
"""Arguments of every optimizer's constructor that only the wrapped optimizer acts on."""

DELEGATED = HYPERPARAMETERS | OPTIONS

_RULES: dict[str, Callable[..., OwnPolicy]] = {kind.__name__: kind for kind in get_args(OwnPolicy)}
_WITHOUT_NAME = DynamicScale.__name__, FixedScale.__name__  # a config does not name these


class ScaledOptimizer(Protocol):
    """The parts of Keras 3's ``LossScaleOptimizer`` that operations of backends use."""

    _trainable_variables: list[Variable]

    @property
    def variables(self) -> list[Variable]: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def _scale(self) -> Tensor: ...

    @property
    def _moved(self) -> list[Variable]: ...

    def _move_scale(self, found_inf: Tensor, amax: Tensor | None, /) -> None: ...


def own_fields(policy: Policy, nonfinite: str) -> dict[str, tuple[float, bool]]:
    """The fields of the first state after the count of finite steps: values, and which are floats.

    ``nonfinite`` is the name of the count of non-finite steps, which is left out if it is unused.
    """
    first = policy.init()
    names = *first._fields[:2], nonfinite, *first._fields[3:]
    kinds = (dtype is np.float32 for dtype in leaf_dtypes(first))
    fields = dict(zip(names, zip(first, kinds, strict=True), strict=True))
    left_out = 2 if counts_nonfinite_steps(policy) else 3
    return dict(list(fields.items())[left_out:])


def state_of(policy: Policy, values: list[Tensor]) -> State:
    """A state of the policy's type, given the values of its first fields; the others are 0."""
    kind: type[Any] = type(policy.init())
    state: State = kind(*values, *[values[1] * 0] * (len(kind._fields) - len(values)))
    return state


def next_values(
    policy: Policy, values: list[Tensor], found_inf: Tensor, amax: Tensor | None
) -> State:
    """The state after one step, given the values of a state's first fields; the others are 0."""
    seen = {} if amax is None else {"amax": amax}
    looks: Any = policy  # takes `amax`, too, if it needs it
    state: State = looks.update(state_of(policy, values), found_inf, where_for(values[0]), **seen)
    return state


def unconverted(code: Code) -> Code:
    """Let TensorFlow's AutoGraph call a function, or a class's methods, without converting them.

    Keras does so with its own code. Conversion takes up to a second, and this code does not need
    it: no branch depends on a tensor. TensorFlow's decorator ``do_not_convert`` would also keep the
    functions that they call from conversion, such as a user's loss.
    """
    functions = filter(isfunction, vars(code).values()) if isinstance(code, type) else [code]
    for function in functions:
        if function.__module__ == code.__module__:  # some methods may be Keras' own
            setattr(function, "autograph_info__", {})  # noqa: B010 # mypy knows no such attribute
    return code


@unconverted
class Wrapper:
    """Mixin for a ``LossScaleOptimizer``: its policy, and the inner optimizer's attributes."""

    _inner_name = "inner_optimizer"
    _preset: Callable[..., DynamicScale]
    _policy: Policy
    _saving: ModuleType  # the framework's functions for saving objects
    _scaled: Callable[[Tensor], Tensor]

    @property
    def policy(self) -> Policy:
        """The rule by which the scale moves."""
        return self._policy

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        return not is_fixed(self._policy)

    @property
    def initial_scale(self) -> float:
        """The scale before the first step, or the fixed scale."""
        return self._initial_scale

    @property
    def _initial_scale(self) -> float:
        return first_scale(self._policy)

    @property
    def dynamic_growth_steps(self) -> int | None:
        """Finite steps in a row before the scale grows; None if the policy has no such number.

        In Keras 3 it can be set. A compiled training step keeps the value at its compilation.
        """
        return getattr(self._policy, "growth_interval", None)

    def get_scaled_loss(self, loss: Loss) -> Loss:
        """The loss times the scale, in float32 or wider. For a callable loss, a callable."""
        return (lambda: self._scaled(loss())) if callable(loss) else self._scaled(loss)

    def _policy_config(self) -> Config:
        """The constructor's arguments for the policy, as JSON values.

        A policy of a user's own is saved as any object of theirs: by its ``get_config``.
        """
        if not isinstance(self._policy, OwnPolicy):
            return {"policy": self._saving.serialize_keras_object(self._policy)}
        fields = dataclasses.asdict(self._policy)
        changeable = {name: fields.get(name) for name in ("init_scale", "growth_interval")}
        rule = next(kind.__name__ for kind in type(self._policy).__mro__ if kind in _RULES.values())
        if rule not in _WITHOUT_NAME:
            return {"policy": {"rule": rule, **fields}}
        if self.dynamic and fields != {**dataclasses.asdict(self._preset()), **changeable}:
            return {"policy": fields}
        return {
            "dynamic": self.dynamic,
            "initial_scale": self._initial_scale,
            "dynamic_growth_steps": self.dynamic_growth_steps,
        }

    @classmethod
    def from_config(
        cls: type[T], config: Config, custom_objects: dict[str, object] | None = None
    ) -> T:
        """The optimizer for a config, which may come from the framework's own class."""
        config = dict(config)
        if isinstance(config.get("policy"), dict):
            fields = dict(config["policy"])
            kind = _RULES[fields.pop("rule", DynamicScale.__name__)]
            config["policy"] = (
                cls._saving.deserialize_keras_object(fields, custom_objects)
                if "class_name" in fields
                else kind(**fields)
            )
        optimizer: T = super().from_config(config, custom_objects)  # type: ignore[misc] # Keras'
        return optimizer

    def _delegates(self, name: str) -> bool:
        return name in DELEGATED and hasattr(vars(self).get(self._inner_name), name)

    def __getattr__(self, name: str) -> Any:  # if the wrapper itself has no such attribute
        if self._delegates(name):
            return getattr(vars(self)[self._inner_name], name)
        return super().__getattribute__(name)  # raises again, with a property's own message

    def __setattr__(self, name: str, value: object) -> None:
        if self._delegates(name):
            setattr(vars(self)[self._inner_name], name, value)
        else:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *filter(self._delegates, DELEGATED)})


def advice_on(optimizer: object) -> str:
    """A sentence that names the module for an optimizer of the other Keras; "" for any other."""
    packages = {base.__module__.partition(".")[0] for base in type(optimizer).__mro__}
    package = next(iter(packages & {"keras", "tf_keras"}), None)
    if package is None:
        return ""
    return f" It is an optimizer of {package}: use gradscaler.{package}.LossScaleOptimizer."


def policy_from(
    preset: Callable[..., DynamicScale],
    dynamic: object,
    initial_scale: object,
    dynamic_growth_steps: object,
    policy: Policy | None,
) -> Policy:
    """The policy for a constructor's arguments.

    Args:
        preset: makes the framework's default policy.
        dynamic: the constructor's argument.
        initial_scale: the constructor's argument.
        dynamic_growth_steps: the constructor's argument.
        policy: the constructor's argument.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or two contradict each other.
    """
    if not isinstance(dynamic, bool | np.bool_):
        raise TypeError(
            '"dynamic" argument to LossScaleOptimizer.__init__ must be a bool, '
            f"but got: {dynamic!r}. If it is the scale, write initial_scale={dynamic!r}"
        )
    if policy is not None:
        check_alone(
            policy,
            (True, None, None),
            dynamic=dynamic,
            initial_scale=initial_scale,
            dynamic_growth_steps=dynamic_growth_steps,
        )
        check_policy(policy)
        return policy
    rule: Policy = preset() if dynamic else FixedScale(1.0)
    if initial_scale is not None:
        rule = with_initial_scale(rule, initial_scale)
    elif not dynamic:
        raise ValueError(
            '"initial_scale" must be specified if "dynamic" is False: it is the loss scale of all '
            "steps. (For a constant factor and no skipped steps, do not use LossScaleOptimizer; in "
            "Keras 3, set `loss_scale_factor` on the inner optimizer)"
        )
    if dynamic_growth_steps is not None:
        rule = with_growth_steps(rule, dynamic_growth_steps)
    return rule


def with_initial_scale(policy: Policy, initial_scale: object) -> Policy:
    """The policy with another initial scale; ValueError or TypeError if that is not a scale."""
    initial_scale = _on_host(initial_scale)
    if isinstance(initial_scale, float) and initial_scale == first_scale(policy):
        return policy  # which may have no such field to change
    fields = {"initial_scale": name_of_first_scale(policy)}
    return changed(policy, fields, initial_scale=initial_scale)


def with_growth_steps(policy: Policy, dynamic_growth_steps: object) -> Policy:
    """The policy with another growth interval; ValueError or TypeError if that is not one."""
    kept = getattr(policy, "growth_interval", None)
    if type(dynamic_growth_steps) is type(kept) and dynamic_growth_steps == kept:
        return policy
    if is_fixed(policy):
        raise ValueError(
            '"dynamic_growth_steps" must be None if "dynamic" is False, '
            f"but got: {dynamic_growth_steps!r}"
        )
    dynamic_growth_steps = _on_host(dynamic_growth_steps)
    if isinstance(dynamic_growth_steps, float) and dynamic_growth_steps.is_integer():
        dynamic_growth_steps = int(dynamic_growth_steps)  # Keras accepts 2000.0, too
    fields = {"dynamic_growth_steps": "growth_interval"}
    return changed(policy, fields, dynamic_growth_steps=dynamic_growth_steps)


def _on_host(value: Any) -> Any:
    """The number in a scalar tensor, variable or array; Keras accepts these for numbers."""
    is_scalar = getattr(value, "shape", None) == () and not isinstance(value, np.generic)
    return float(value) if is_scalar else value
