"""``keras.optimizers.LossScaleOptimizer`` with Keras 2's features, on every backend."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, MutableMapping
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import ops

from gradscaler._keras_like import wrapper
from gradscaler._keras_like.wrapper import (
    OPTIONS,
    Config,
    Loss,
    Tape,
    Tensor,
    Variable,
    Wrapper,
    unconverted,
)
from gradscaler.errors import levels_to_caller
from gradscaler.keras._operations import on_backend
from gradscaler.policies import DynamicScale, Policy, amax_interval

Variables = Variable | Iterable[Variable] | Callable[[], Variable | Iterable[Variable]]

_NEVER_SCALED = (
    "The loss was never scaled, but gradients are divided by the loss scale. Call scale_loss(loss) "
    "or get_scaled_loss(loss) before differentiating; in a step that JAX compiles, "
    "stateless_scale_loss(loss, optimizer_variables)."
)
_NEVER_UNSCALED = (
    "get_unscaled_gradients() was never called, so apply_gradients() divides the gradients by the "
    "loss scale. Call it first, or scale the loss by scale_loss()."
)
# A user's line lies outside of these; Keras calls an optimizer through its backend.
_LIBRARIES = "keras.", "tensorflow.", "jax.", "torch."
# Every wrapper has its own step count and learning rate, the finite steps, and the scale.
_NUM_SHARED = 4


@unconverted
@keras.saving.register_keras_serializable("gradscaler")
class LossScaleOptimizer(Wrapper, keras.optimizers.LossScaleOptimizer):  # type: ignore[misc] # untyped base
    """Loss scaling for Keras 3, with the API of Keras 2: wraps any optimizer, on any backend.

    A drop-in for ``keras.optimizers.LossScaleOptimizer``, also in ``model.compile`` and
    ``model.fit``. In addition it takes a fixed scale (``dynamic=False``), keeps the scale within
    the normal float32 numbers, has Keras 2's methods and properties, and works on JAX outside
    ``stateless_apply``.

    With a loss scale ``s``, ``minimize`` and ``apply_gradients`` compute::

        g = gradients of (s * loss) / s
        finite:      inner_optimizer.apply(g);  after dynamic_growth_steps in a row: s = 2 * s
        non-finite:  nothing is applied;  s = max(s / 2, 2**-126)

    Args:
        inner_optimizer: the optimizer to wrap. Its ``loss_scale_factor`` is set to None.
        dynamic: whether the scale moves. If not, steps with non-finite gradients are still skipped.
        initial_scale: the scale before the first step, by default 2**15. Required if not
            ``dynamic``: it is the scale of all steps.
        dynamic_growth_steps: finite steps in a row before the scale doubles, by default 2000; None
            if not ``dynamic``.
        policy: the rule, in place of the three arguments before: a
            :class:`gradscaler.DynamicScale`, with any factors, bounds and hysteresis, a
            :class:`gradscaler.FixedScale`, a :class:`gradscaler.AmaxScale`, or any other
            :class:`gradscaler.Policy`.
            ``DynamicScale.tf_keras()`` is Keras 2's rule, with its floor of 1.
        name: the optimizer's name.
        kwargs: other optimizers' arguments at their defaults. Keras accepts these to load old
            models.

    Raises:
        TypeError: an argument is of the wrong type, or ``inner_optimizer`` is not an optimizer.
        ValueError: an argument is out of range, or two contradict each other.

    Some attributes are read and set on the inner optimizer: hyperparameters that Keras 2 lets a
    schedule change (``lr``, ``beta_1``, ``momentum``, ...), and arguments of every optimizer
    (``clipnorm``, ``use_ema``, ...). Other attributes, such as ``epsilon``, are not.

    Replicas of ``tf.distribute``, devices of ``keras.distribution`` and processes of PyTorch skip a
    step together. On PyTorch the variables may be those of a ``keras.layers.TorchModuleWrapper``
    around a module that ``torch.distributed.fsdp.fully_shard`` split.

    >>> import keras
    >>> optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.25))
    >>> variable = keras.Variable(1.0)
    >>> optimizer.minimize(lambda: variable * variable, variable)
    >>> float(variable.numpy()), float(optimizer.loss_scale), int(optimizer.dynamic_counter)
    (0.5, 32768.0, 1)
    """

    _preset = DynamicScale.keras
    _saving = keras.saving

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        *,
        policy: Policy | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(inner_optimizer, keras.optimizers.LossScaleOptimizer):
            raise TypeError(
                "LossScaleOptimizer cannot wrap another LossScaleOptimizer, but got: "
                f"{inner_optimizer}"
            )
        if not isinstance(inner_optimizer, keras.optimizers.Optimizer):
            raise TypeError(
                '"inner_optimizer" must be an instance of `keras.optimizers.Optimizer`, '
                f"but got: {inner_optimizer!r}.{wrapper.advice_on(inner_optimizer)}"
            )
        # Bypass setattr, which needs the base class's constructor to have run. That constructor in
        # turn sets fields of the policy.
        self.__dict__["_policy"] = wrapper.policy_from(
            self._preset, dynamic, initial_scale, dynamic_growth_steps, policy
        )
        # The names under which the scale has been read, perhaps to scale the loss by hand.
        self.__dict__["_scale_reads"] = set()
        super().__init__(
            inner_optimizer, self._initial_scale, self.dynamic_growth_steps, name=name, **kwargs
        )
        for option in OPTIONS:
            del self.__dict__[option]  # from now on it is read on the inner optimizer
        self.__dict__["_own_variables"] = {}  # of the policy, by its state's fields; not tracked
        self._create_variables()
        self._calls_are_checked = False  # by the first `apply_gradients`, or a warning of `apply`
        self._loss_has_been_scaled = False
        self._scale_reads.clear()
        # Compiled code sets these only when it is traced, so the first is never reset.
        self._gradients_have_been_unscaled = False
        self._next_step_unscales = False

    def _create_variables(self) -> None:
        """Create the variables that the policy moves, with the names of Keras' own wrapper.

        An optimizer with a fixed scale has them, too, so that it can load the file of one with a
        moving scale, and the other way round.
        """
        self.step_counter = self.add_variable((), dtype="int", name="step_counter")
        self.dynamic_scale = self._float32_variable(self._initial_scale, "dynamic_scale")
        fields = wrapper.own_fields(self._policy, "nonfinite_counter")
        for name, (value, is_float) in fields.items():
            own = self._float32_variable(value, name) if is_float else self._count(value, name)
            self._own_variables[name] = own
            if not hasattr(self, name):
                setattr(self, name, own)

    def _count(self, value: float, name: str) -> Variable:
        variable = self.add_variable((), dtype="int", name=name)
        if value:
            variable.assign(value)
        return variable

    def _float32_variable(self, value: float, name: str) -> Variable:
        with keras.name_scope(self.name, caller=self):
            variable = keras.Variable(
                value,
                dtype="float32",
                trainable=False,
                autocast=False,  # a layer's float16 may not hold it
                name=name,
            )
        self._track_variable(variable)  # by hand, because `Model.compile` tracks no attributes
        return variable

    def _note_read(self, name: str) -> None:
        """Note that the scale is read, unless by Keras' saving, which reads all, or a monitor."""
        reader = sys._getframe(2).f_globals.get("__name__", "")  # the caller of the property
        if not reader.startswith(("keras.src.saving", "gradscaler.diagnose")):
            self._scale_reads.add(name)

    @property
    def dynamic_scale(self) -> Variable:
        """The variable that holds the scale, a float32 scalar."""
        self._note_read("dynamic_scale")
        return self._scale_variable

    @dynamic_scale.setter
    def dynamic_scale(self, variable: Variable) -> None:
        self.__dict__["_scale_variable"] = variable  # a checkpoint has only the public name

    @property
    def initial_scale(self) -> float:
        """The scale before the first step, or the fixed scale."""
        self._note_read("initial_scale")
        return self._initial_scale

    @initial_scale.setter
    def initial_scale(self, initial_scale: float) -> None:
        """Set the initial scale, and the current scale if the optimizer is not built yet."""
        self._policy = wrapper.with_initial_scale(self._policy, initial_scale)
        self._scale_reads.discard("initial_scale")  # the reads were of another one
        if "_scale_variable" in vars(self) and not self.built:
            self._scale_variable.assign(self._initial_scale)

    @Wrapper.dynamic_growth_steps.setter  # type: ignore[attr-defined,untyped-decorator] # inherited
    def dynamic_growth_steps(self, dynamic_growth_steps: int | None) -> None:
        """Set the policy's growth interval."""
        self._policy = wrapper.with_growth_steps(self._policy, dynamic_growth_steps)

    @property
    def dynamic_counter(self) -> Tensor | None:
        """Finite steps since the scale moved or a step was skipped, an integer scalar variable.

        None if the scale is fixed.
        """
        return self.step_counter if self.dynamic else None

    @property
    def loss_scale(self) -> Tensor:
        """A copy of the current scale, a float32 scalar tensor."""
        self._note_read("loss_scale")
        return ops.copy(self._scale)

    @property
    def _scale(self) -> Tensor:
        scale = self._scale_variable if self.dynamic else self._initial_scale
        return ops.convert_to_tensor(scale, "float32")

    lr = keras.optimizers.LossScaleOptimizer.learning_rate
    """The inner optimizer's learning rate, under its name in Keras 2."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the scale, in float32 or wider. ``apply`` then divides the gradients.

        Raises:
            CallOrderError: JAX compiles this call outside of a ``keras.StatelessScope`` that holds
                the scale, so the compiled code would keep the present scale as a constant.
        """
        self._next_step_unscales = True
        return self._scaled(loss)

    def _scaled(self, loss: Tensor) -> Tensor:
        scale = self._scale_now()
        self._loss_has_been_scaled = True
        return on_backend.multiply(loss, scale)

    def _scale_now(self) -> Tensor:
        """The scale; CallOrderError if compiled code would keep its present value."""
        if self.dynamic:
            on_backend.check_compiled(self._scale_variable)
        return self._scale

    def stateless_scale_loss(self, loss: Tensor, optimizer_variables: Iterable[Tensor]) -> Tensor:
        """``scale_loss`` as a pure function, for compiled steps with ``stateless_apply``.

        Args:
            loss: the loss.
            optimizer_variables: the values of ``variables``, which hold the scale.

        Raises:
            ValueError: the number of values is not that of ``variables``.
        """
        values = list(optimizer_variables)
        if len(values) != len(self.variables):
            raise ValueError(
                f"optimizer_variables must hold the values of optimizer.variables, of which there "
                f"are {len(self.variables)}, but holds {len(values)}. Call optimizer.build(...) "
                "first, and pass the optimizer_variables that stateless_apply() takes and returns"
            )
        with keras.StatelessScope(state_mapping=list(zip(self.variables, values, strict=True))):
            return self.scale_loss(loss)

    def get_unscaled_gradients(self, grads: Iterable[Tensor | None]) -> list[Tensor | None]:
        """The gradients divided by the scale, each in its own dtype and kind; None stays None.

        After this call ``apply_gradients`` no longer divides gradients, except in the step after
        ``scale_loss``. ``apply`` always does.

        Raises:
            CallOrderError: JAX compiles this call outside of a ``keras.StatelessScope`` that holds
                the scale.
        """
        scale = self._scale_now()
        self._gradients_have_been_unscaled = True
        self._next_step_unscales = False
        return [
            None if g is None else ops.cast(on_backend.divide(g, scale), g.dtype) for g in grads
        ]

    def check_finite(self, grads: Iterable[Tensor | None]) -> Tensor:
        """Whether no gradient holds an Inf or a NaN, a boolean scalar tensor.

        It checks the gradients of this replica only, and only this process's part of a DTensor.
        """
        return on_backend.all_finite(list(grads))

    def minimize(self, loss: Loss, var_list: Variables, tape: Tape | None = None) -> None:
        """Take one step: scale the loss, differentiate, unscale, apply or skip, move the scale.

        Args:
            loss: a function without arguments that returns the loss. On PyTorch also the loss
                itself; on TensorFlow also the loss, with the tape that recorded it.
            var_list: the variable or variables to step, or a function that returns them.
            tape: a ``tf.GradientTape``, only on TensorFlow.

        Raises:
            TypeError: ``var_list`` holds something that is not a variable.
            ValueError: the backend cannot differentiate such a loss, or has no tapes.
        """
        self.apply(*on_backend.gradients(loss, self.scale_loss, partial(_flat, var_list), tape))

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Tensor | None, Variable]]) -> Tensor:
        """``apply`` for pairs of gradient and variable; returns the inner optimizer's step count.

        After ``get_unscaled_gradients`` has been called, gradients are not divided here, except in
        the step after a later ``scale_loss``. The first call warns if no loss was scaled, or if no
        gradients were unscaled, by this optimizer. An earlier read of ``dynamic_scale`` or
        ``initial_scale`` counts as both, because it may scale the loss by hand.
        """
        if not self._calls_are_checked:
            self._check_calls()
        self._calls_are_checked = True
        pairs = list(grads_and_vars)
        grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
        if self._gradients_have_been_unscaled and not self._next_step_unscales:
            self._step(grads, variables, are_scaled=False)
        else:
            self.apply(grads, variables)
        return self.iterations

    def _check_calls(self) -> None:
        """Warn if the calls before the first ``apply_gradients`` lack one."""
        if not (self._loss_has_been_scaled or self._scale_reads):
            _warn(_NEVER_SCALED)
        # A name of Keras 3 belongs to a loss scaled for a step that divides, as with Keras' own.
        elif not (
            self._gradients_have_been_unscaled
            or self._next_step_unscales
            or self._scale_reads - {"loss_scale"}
        ):
            _warn(_NEVER_UNSCALED)

    def apply(
        self, grads: Iterable[Tensor | None], trainable_variables: Iterable[Variable] | None = None
    ) -> None:
        """Apply all gradients, or none if any is not finite, and move the scale.

        It warns once if it divides a gradient and this optimizer never scaled a loss, unless the
        scale was read, as ``dynamic_scale``, ``initial_scale`` or ``loss_scale``.

        Args:
            grads: gradients of the scaled loss; ``apply`` divides them by the scale.
            trainable_variables: one variable for each gradient; by default those that the
                optimizer was built with.

        Raises:
            ValueError: the numbers of gradients and variables differ, all gradients are None, or
                the optimizer does not know the variables; or the call is in a cross-replica context
                of ``tf.distribute``.
            CallOrderError: JAX compiles this call outside of a ``keras.StatelessScope`` that holds
                the scale.
            ParameterError: PyTorch's ``FullyShardedDataParallel`` has flattened the variables.
            ScaleMismatchError: processes that decide together hold different scales or counters.
        """
        self._step(list(grads), trainable_variables, are_scaled=True)
        self._next_step_unscales = False

    def _step(
        self,
        grads: list[Tensor | None],
        trainable_variables: Iterable[Variable] | None,
        are_scaled: bool,
    ) -> None:
        if trainable_variables is not None:
            variables = list(trainable_variables)
            if not self.built:
                with keras.name_scope(self.name, caller=self):
                    self.build(variables)
        elif self.built:
            variables = self._trainable_variables
        else:
            raise ValueError(
                "apply(grads) needs variables: pass trainable_variables, or call "
                "optimizer.build(trainable_variables) first"
            )
        if not grads:
            return
        if len(grads) != len(variables):
            raise ValueError(f"got {len(grads)} gradients for {len(variables)} trainable variables")

        @unconverted
        def apply(grads: list[Tensor | None], variables: list[Variable]) -> None:
            unscaled = self._unscaled(grads, variables) if are_scaled else grads
            self.inner_optimizer.apply(unscaled, variables)

        amax = None
        if amax_interval(self._policy):
            amax = on_backend.largest(
                [
                    None if self._overwrite_variable_with_gradient(variable) else grad
                    for grad, variable in zip(grads, variables, strict=True)
                ]
            )
            amax = amax / self._scale_now() if are_scaled else amax
        on_backend.apply_if_finite(self, apply, grads, variables, amax)

    def _unscaled(
        self, grads: list[Tensor | None], variables: list[Variable]
    ) -> list[Tensor | None]:
        scale = self._scale_now()
        unscaled = [
            grad
            if grad is None or self._overwrite_variable_with_gradient(variable)
            else on_backend.divide(grad, scale)
            for grad, variable in zip(grads, variables, strict=True)
        ]
        if not (self._calls_are_checked or self._loss_has_been_scaled or self._scale_reads):
            self._warn_if_divided(grads, unscaled)
        return unscaled

    def _warn_if_divided(self, grads: list[Tensor | None], unscaled: list[Tensor | None]) -> None:
        if any(after is not before for before, after in zip(grads, unscaled, strict=True)):
            _warn(_NEVER_SCALED)
            self._calls_are_checked = True

    def _move_scale(self, found_inf: Tensor, amax: Tensor | None) -> None:
        if not self.dynamic:
            return
        values = [ops.copy(variable) for variable in self._moved]
        moved = wrapper.next_values(self._policy, values, found_inf, amax)
        for variable, value in zip(self._moved, moved, strict=False):
            variable.assign(value)

    @property
    def _moved(self) -> list[Variable]:
        """The variables that the policy moves: its state's fields, without counts it ignores."""
        return [self._scale_variable, self.step_counter, *self._counters]

    @property
    def _counters(self) -> list[Variable]:
        """The policy's variables that Keras' own wrapper lacks."""
        return list(self._own_variables.values())

    # Not that of Keras' own wrapper: the base class's calls our `apply`.
    stateless_apply = keras.optimizers.Optimizer.stateless_apply
    """``apply`` as a pure function: new values of trainable and of optimizer variables.

    Raises:
        ValueError: the optimizer is not built, the lists do not match it, or the backend is
            TensorFlow.
    """

    def build(self, var_list: list[Variable]) -> None:
        """Create the inner optimizer's variables for the variables of a model."""
        if self.built:
            return
        self._build_inner_optimizer(var_list)
        off = {"use_ema": False, "gradient_accumulation_steps": None}
        self.__dict__.update(off)  # or the base class would average and accumulate once more
        keras.optimizers.Optimizer.build(self, var_list)
        for option in off:
            del self.__dict__[option]

    def _build_inner_optimizer(self, variables: list[Variable]) -> None:
        """Build the inner optimizer, and note the variables that Keras' own wrapper does not track.

        Keras' wrapper builds it with the tracking of attributes turned off, so it tracks only the
        variables that the inner optimizer adds by name.
        """
        inner = self.inner_optimizer
        added, track = inner.variables, inner._track_variable

        def track_and_note(variable: Variable) -> None:
            added.append(variable)
            track(variable)

        inner.__dict__["_track_variable"] = track_and_note
        try:
            on_backend.build(inner, variables)
        finally:
            del inner.__dict__["_track_variable"]
        untracked = [v for v in inner.variables if not _holds(added, v)]
        self.__dict__["_untracked_by_keras"] = untracked  # __setattr__ would track them

    def _saved_variables(self) -> list[Variable]:
        """The variables in a file: those of Keras' own wrapper, and the policy's.

        Other variables of the inner optimizer are saved only by the inner optimizer.
        """
        untracked = vars(self).get("_untracked_by_keras", ())
        return [v for v in self.variables if not _holds(untracked, v)]

    def save_own_variables(self, store: MutableMapping[str, object]) -> None:
        """Put the variables into a store, in the order of Keras' own wrapper."""
        for index, variable in enumerate(self._saved_variables()):
            store[str(index)] = variable.numpy()

    def load_own_variables(self, store: MutableMapping[str, object]) -> None:
        """Set the variables from a store, also from one that Keras' own wrapper saved.

        Variables of the policy that the store lacks become 0. If the store is of another inner
        optimizer, only the scale and the counter are set, with a warning.
        """
        values = [np.asarray(store[str(index)]) for index in range(len(store.keys()))]
        saved, counters = self._saved_variables(), self._counters
        pairs = _paired(saved, counters, values) or _paired(self.variables, counters, values)
        if not pairs:
            found = f"{len(values)} variables, of other shapes than the {len(saved)} here"
            if _is_of_a_wrapper(values):
                pairs = [(self.step_counter, values[2]), (self._scale_variable, values[3])]
                pairs += [(counter, 0) for counter in counters]
                found += ": loaded the loss scale and its counter, and skipped all others"
            else:
                found += ": skipped all of them"
            warnings.warn(f"optimizer {self.name!r}: the file has {found}", stacklevel=2)
        for variable, value in pairs:
            variable.assign(value)

    def set_weights(self, weights: list[Tensor]) -> None:
        """Set the values of ``variables``, in their order, until either list ends.

        Raises:
            ValueError: the optimizer is not built, or shapes do not match.
        """
        if not self.built:
            raise ValueError("set_weights() needs variables: call optimizer.build(...) first")
        # Keras reads an .h5 file into an optimizer that was built without a model's variables.
        pairs = list(zip(self.variables, weights, strict=False))
        for variable, weight in pairs:
            if tuple(variable.shape) != tuple(weight.shape):
                raise ValueError(
                    f"the variable {variable.path} has the shape {tuple(variable.shape)}, "
                    f"its weight {tuple(weight.shape)}"
                )
        for variable, weight in pairs:
            variable.assign(weight)

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Step one variable by the inner optimizer, given an unscaled gradient."""
        self.inner_optimizer.update_step(gradient, variable, learning_rate)

    def exclude_from_weight_decay(
        self, var_list: list[Variable] | None = None, var_names: list[str] | None = None
    ) -> None:
        """Exclude variables from the inner optimizer's weight decay."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def get_config(self) -> Config:
        """The name, the inner optimizer, and the arguments for the policy.

        Keras' own class accepts the config, too, unless it lacks such a policy.
        """
        config = self._policy_config()
        if config.get("dynamic"):
            del config["dynamic"]
        inner_optimizer = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"name": self.name, "inner_optimizer": inner_optimizer, **config}


def _holds(variables: Iterable[Variable], variable: Variable) -> bool:
    """Whether a variable is one of some variables, by identity; ``in`` would compare values."""
    return any(variable is each for each in variables)


def _flat(var_list: Variables) -> list[Variable]:
    """A flat list of variables, from one, several, or a function that returns them."""
    variables: list[Variable] = keras.tree.flatten(var_list() if callable(var_list) else var_list)
    for variable in variables:
        if not hasattr(variable, "assign"):
            raise TypeError(
                "var_list must be a variable, variables or a function that returns them, "
                f"but holds: {variable!r}"
            )
    return variables


def _warn(text: str) -> None:
    """Warn at the caller's line: the first frame outside gradscaler, Keras and its backend."""
    warnings.warn(text, stacklevel=levels_to_caller(*_LIBRARIES))


def _paired(
    variables: list[Variable], counters: list[Variable], values: list[Any]
) -> list[tuple[Variable, Any]]:
    """Pairs of variable and value, from a file of any policy. Counters that it lacks become 0.

    A file has no names. First come the variables that every wrapper has, Keras' own included. Then
    come the counters of the policy, if it has any: non-finite steps, and the fields that are its
    own. Last come all others, such as the inner optimizer's.

    If the file has another number of counters, it is another policy's: only the first is the same.

    Args:
        variables: the wrapper's, in order.
        counters: those of its policy, which are some of these variables.
        values: the arrays in the file.

    Returns:
        The pairs; none if the file is of another inner optimizer.
    """
    others = variables[_NUM_SHARED + len(counters) :]
    end = len(values) - len(others)
    if end < _NUM_SHARED:
        return []
    shared, stored = variables[:_NUM_SHARED], values[_NUM_SHARED:end]
    known = list(zip([*shared, *others], [*values[:_NUM_SHARED], *values[end:]], strict=True))
    if any(value.shape for value in stored) or not all(_fits(*pair) for pair in known):
        return []
    same = stored if len(stored) == len(counters) else stored[:1]
    absent = [(counter, 0) for counter in counters[len(same) :]]
    return [*known, *absent, *zip(counters, same, strict=False)]


def _is_of_a_wrapper(values: list[Any]) -> bool:
    """Whether values may come from a wrapper: its own learning rate is 0."""
    shared = values[:_NUM_SHARED]
    return len(shared) == _NUM_SHARED and not any(v.shape for v in shared) and bool(shared[1] == 0)


def _fits(variable: Variable, value: Any) -> bool:
    """Whether a value has a variable's shape, and is an integer if the variable is."""
    is_integer = np.issubdtype(value.dtype, np.integer)
    return tuple(variable.shape) == value.shape and is_integer == ("int" in variable.dtype)
