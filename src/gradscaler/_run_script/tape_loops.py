"""Loops of TensorFlow: gradients of tapes, and steps of Keras' optimizers, compiled or not."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from inspect import unwrap
from itertools import chain
from operator import attrgetter
from traceback import walk_stack
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from gradscaler._run_script.after_init import after_init
from gradscaler._run_script.runs import Runs
from gradscaler._run_script.undo import replace
from gradscaler._run_script.voice import voice
from gradscaler._run_script.watched_run import WatchedRun
from gradscaler.diagnose import Located, locate
from gradscaler.diagnose._gradients.arrays import to_numpy
from gradscaler.diagnose._graph.call_site import is_of_user
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.places import in_memory
from gradscaler.diagnose._graph.stand_ins import in_place_of
from gradscaler.diagnose._locate.locate import locate_in
from gradscaler.diagnose._locate.unnoticed import unnoticed
from gradscaler.diagnose._monitor.recorded_loop import Unscaled
from gradscaler.diagnose._monitor.traced_scalers import number_of, state_of
from gradscaler.diagnose._record.located import BadGradient
from gradscaler.diagnose._seams.judge import Owned
from gradscaler.diagnose._seams.keras import layers_of, parameters_of
from gradscaler.diagnose._seams.tensorflow import TensorFlowSeam

Optimizer = Any
Tensor = Any
Variable = Any
Model = Any
Function = Any  # what tf.function returns

_STEPS = "apply", "apply_gradients"  # the methods of optimizers
_IS_NOTICED = (
    "it calls Python, or reads from an iterator or a dataset, and another run would do so again"
)
_OF_PYTHON = "PyFunc", "EagerPyFunc"  # operations, of tf.py_function and tf.numpy_function


class TapeLoops:
    """Puts a monitor on each optimizer of Keras 3 on TensorFlow, and of tf_keras, that steps.

    An optimizer that steps eagerly shows its gradients. One that steps in a function of
    ``tf.function`` was seen when that was traced. A call of that function is a step: its result has
    the loss, and its variables show afterwards whether the gradients were finite. ``fit`` is
    watched by itself, and several replicas are not watched.

    Args:
        name: the package of the optimizers, ``"keras"`` or ``"tf_keras"``.
        options: those of the command line.
    """

    # Whether a step is run again, for either package. The guard's lock is held then, and threads
    # that the step starts, as those of replicas, must not wait for it.
    _is_looking = False

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self._name, self._options = name, options
        self._keras: Any = sys.modules[name]
        self._runs = Runs("keras on tensorflow" if name == "keras" else name, options)
        self._loops: dict[int, _Loop] = {}  # by the id of the optimizer
        self._is_new = False  # whether optimizers were made since the latest run began
        self._functions = WeakKeyDictionary[Function, _Traced | None]()  # None: not the user's
        self._calling: _Traced | None = None  # the function that is called
        self._latest: _Call | None = None  # that took the gradient for a step outside of it
        self._losses: dict[int, Tensor] = {}  # by the id of the first variable
        self._stepping = 0  # calls of steps that run
        self._scaled: Callable[[], None] | None = None  # records a step that runs

    def start(self) -> None:
        """Watch this process from now on, unless Keras has another backend."""
        if self._keras.backend.backend() != "tensorflow":
            return
        self._see_tensorflow()
        optimizers, adapter = self._keras.optimizers, import_module(f"gradscaler.{self._name}")
        bases = [optimizers.Optimizer]
        if self._name == "tf_keras":
            bases.append(optimizers.legacy.Optimizer)
        for base in bases:
            after_init(base, self._see_optimizer)
        wrappers = [self._keras.mixed_precision.LossScaleOptimizer, adapter.LossScaleOptimizer]
        wrappers += [getattr(adapter, f"LossScaleOptimizerV{n}", wrappers[1]) for n in (2, 3)]
        kinds = {kind: None for each in (*bases, *wrappers) for kind in each.__mro__}
        for kind in kinds:
            for method in set(_STEPS).intersection(vars(kind)):
                self._see_steps_of(kind, method)

    def _see_tensorflow(self) -> None:
        """See the gradients of tapes, and the calls of functions that are compiled."""
        tensorflow: Any = sys.modules["tensorflow"]
        tape, function = tensorflow.GradientTape, type(tensorflow.function(_do_nothing))
        gradient, call = tape.gradient, function.__call__
        see = guarded(self._see_gradient)
        before, after = guarded(self._before_call), guarded(self._after_call)

        @in_place_of(gradient)
        def seen_gradient(own: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            made = gradient(own, target, sources, *args, **kwargs)
            if not self._is_looking:
                see(target, sources)
            return made

        @in_place_of(call)
        def seen_call(own: Function, *args: Any, **kwargs: Any) -> Any:
            if self._calling is not None or self._is_looking:
                return call(own, *args, **kwargs)
            self._calling = before(own, args, kwargs)
            try:
                results = call(own, *args, **kwargs)
            finally:
                called, self._calling = self._calling, None
            if called is not None:
                after(called, _Call(own, args, kwargs, results))
            return results

        replace(tape, "gradient", seen_gradient)
        replace(function, "__call__", seen_call)

    def _see_optimizer(self, _: Optimizer) -> None:
        self._is_new = True

    def _see_steps_of(self, kind: Any, method: str) -> None:
        step = getattr(kind, method)
        before, after = guarded(self._before_step), guarded(self._after_step)

        @in_place_of(step)
        def seen(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._is_looking:
                return step(optimizer, *args, **kwargs)
            args = tuple(map(_kept, args))
            kwargs = {name: _kept(each) for name, each in kwargs.items()}
            before(optimizer, method, args, kwargs)
            try:
                return step(optimizer, *args, **kwargs)
            finally:
                after(optimizer)

        seen.autograph_info__ = {}  # AutoGraph need not convert it
        replace(kind, method, seen)

    def _see_gradient(self, target: Any, sources: Any) -> None:
        first = sources[0] if isinstance(sources, (list, tuple)) and sources else sources
        if not hasattr(first, "assign"):  # of an input, as for a penalty
            return
        if not _is_eager():
            if self._calling is not None:
                self._calling.takes_gradient = True
        elif hasattr(target, "dtype"):
            self._losses[id(first)], self._latest = target, None

    def _before_step(self, optimizer: Optimizer, method: str, args: Any, kwargs: Any) -> None:
        self._stepping += 1
        is_inner = self._stepping > 1 or self._is_looking
        if is_inner or self._runs.is_off or _num_replicas() > 1:
            return
        pairs = _pairs(optimizer, method, args, kwargs)
        trained = [variable for _, variable in pairs]
        if not _is_eager():
            if self._calling is not None:
                self._calling.steps[id(optimizer)] = optimizer, trained
            return
        loop = None
        if pairs and not self._is_in_fit():
            loop = self._loop_of(optimizer, trained, is_compiled=False)
        if loop is None:
            return
        loss, scale = self._losses.pop(id(trained[0]), None), 1.0
        if loop.is_scaled:
            scale = number_of(state_of(optimizer).scale)
            loss = None if loss is None else _Divided(loss, scale)
        if loss is None and self._latest is not None:
            loss = _loss_in(self._latest.results)
        gradients = {loop.name_of(variable): gradient for gradient, variable in pairs}
        if loop.is_scaled:  # it is known after the step whether it was skipped
            scale = scale if _divides(optimizer, method) else 1.0
            divided = {name: _Divided(each, scale) for name, each in gradients.items()}
            given = divided if loop.is_half else None  # else samples compare with the wrong range
            self._scaled = partial(self._record, loop, loss, given, self._latest)
        else:
            self._record(loop, loss, gradients, self._latest)

    def _after_step(self, optimizer: Optimizer) -> None:
        self._stepping -= 1
        if self._stepping or self._is_looking:
            return
        record, self._scaled = self._scaled, None
        if record is not None:
            record()
        loop = self._loops.get(id(optimizer))
        if loop is not None and loop.run is not None and not loop.is_compiled:
            loop.run.step_ended()

    def _is_in_fit(self) -> bool:
        """Whether ``fit`` calls, which runs eagerly if the user asked for it."""
        fit = unwrap(self._keras.Model.fit).__code__
        return any(frame.f_code is fit for frame, _ in walk_stack(sys._getframe()))

    def _before_call(self, function: Function, args: Any, kwargs: Any) -> _Traced | None:
        """What is known of a function of the user's that is called, and runs compiled."""
        is_compiled = _is_eager() and not _tensorflow().config.functions_run_eagerly()
        if not is_compiled or self._runs.is_off:
            return None
        if function not in self._functions:
            is_own = is_of_user(function.python_function)
            self._functions[function] = _Traced() if is_own else None
        called = self._functions[function]
        if called is not None and (called.steps or called.takes_gradient):
            call = _Call(function, args, kwargs, None)
            for key, loop in self._loops.items():
                watch = loop.watch
                if watch is not None and watch.is_on and (key in called.steps or not called.steps):
                    watch.find((args, kwargs), partial(self._locate, loop, call))
        return called

    def _after_call(self, called: _Traced, call: _Call) -> None:
        """Record a step of each optimizer that stepped in a compiled function."""
        if not called.steps:
            self._latest = call if called.takes_gradient else self._latest
        for optimizer, variables in called.steps.values():
            loop = self._loop_of(optimizer, variables, is_compiled=True)
            if loop is None or loop.run is None:
                continue
            loss = _loss_in(call.results) if len(called.steps) == 1 else None
            if loop.is_scaled:
                self._record(loop, loss, None, call)
            else:
                with self._looking():
                    finite = loop.are_finite()
                pairs = zip(loop.variables, finite, strict=True)
                bad = {loop.name_of(variable): variable for variable, is_ok in pairs if not is_ok}
                self._record(loop, loss, bad, None if bad else call)  # its weights are lost
            loop.run.step_ended()

    def _record(
        self, loop: _Loop, loss: Any, gradients: Mapping[str, Any] | None, call: _Call | None
    ) -> None:
        replay = None
        if call is not None and loop.model is not None:
            replay = partial(self._again, loop, call)
        if loop.run is not None:
            loop.run.record(loss, gradients, replay)

    def _again(self, loop: _Loop, call: _Call) -> tuple[Any, ...]:
        """The model, and a closure that calls a function again; it does nothing if it cannot."""
        variables = call.variables
        if variables is None or (loop.is_scaled and loop.scale is None):
            return loop.model, _do_nothing
        return loop.model, partial(self._call_again, loop, call, variables)

    def _call_again(self, loop: _Loop, call: _Call, variables: Sequence[Variable]) -> Any:
        """Call a function again, silently, and leave variables as they were.

        A loss is not scaled in it, so that what overflows does so at any scale.
        """
        before = [(each, each.read_value()) for each in variables]
        try:
            if loop.scale is not None:
                loop.scale.assign(1.0)
            with self._looking(), unnoticed():
                return call.function(*call.args, **call.kwargs)
        finally:
            for variable, value in before:
                variable.assign(value)

    def _locate(self, loop: _Loop, call: _Call) -> Located | None:
        """Locate the first Inf or NaN of a call that comes next."""
        variables = call.variables
        if variables is None:
            raise RuntimeError(_IS_NOTICED)
        closure = partial(self._call_again, loop, call, variables)
        if loop.model is not None:
            return locate(loop.model, closure)
        return locate_in(TensorFlowSeam(*loop.shown), closure)

    @contextmanager
    def _looking(self) -> Iterator[None]:
        TapeLoops._is_looking = True
        try:
            yield
        finally:
            TapeLoops._is_looking = False

    def _loop_of(
        self, optimizer: Optimizer, variables: Sequence[Variable], is_compiled: bool
    ) -> _Loop | None:
        """The loop of an optimizer, which begins with its first step; None if it has no run."""
        key = id(optimizer)
        if key not in self._loops or self._is_new:
            self._begin(optimizer, variables, is_compiled)
        loop = self._loops[key]
        return loop if loop.run is not None else None

    def _begin(
        self, optimizer: Optimizer, variables: Sequence[Variable], is_compiled: bool
    ) -> None:
        """Begin a run; those of optimizers that were made before the latest ones end."""
        if self._is_new:
            self._is_new = False
            self._loops.clear()
            self._runs.end()
        is_scaled = isinstance(optimizer, self._keras.mixed_precision.LossScaleOptimizer)
        model = self._model_of(variables)
        loop = _Loop(optimizer, variables, model, is_scaled, is_compiled)
        if self._options.watch is not None:
            loop.watch = _StepOperations(TensorFlowSeam(*loop.shown, is_step=True))
        scaler = optimizer if is_scaled else Unscaled(self._name, is_before=not is_compiled)
        # After a step that is compiled, the weights are no evidence of how it failed.
        known = model if is_scaled or not is_compiled else None
        self._runs.begin(id(optimizer), scaler, known, loop.watch)
        loop.run = self._runs.open.get(id(optimizer))
        self._loops[id(optimizer)] = loop

    def _model_of(self, variables: Sequence[Variable]) -> Model | None:
        """The smallest model or layer in memory that holds the most of some variables."""
        trained, layers = {id(each) for each in variables}, in_memory(self._keras.layers.Layer)
        held = ((each, {id(one) for one in each.trainable_variables}) for each in layers)
        found = [(len(own & trained), -len(own), each) for each, own in held if own & trained]
        return max(found, key=lambda each: each[:2])[2] if found else None


@dataclass
class _Traced:
    """What was seen when a function was traced.

    Attributes:
        steps: the optimizers that step in it and their variables, by the optimizers' ids.
        takes_gradient: whether it takes a gradient by variables.
    """

    steps: dict[int, tuple[Optimizer, list[Variable]]] = field(default_factory=dict)
    takes_gradient: bool = False


class _Call(NamedTuple):
    """A call of a function that is compiled."""

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Any

    @property
    def variables(self) -> list[Variable] | None:
        """All variables that the call reads or writes; None if another call would be noticed.

        It would be by an iterator that it reads from, and by functions of Python that it calls.
        """
        data = _tensorflow().data
        leaves = _tensorflow().nest.flatten((self.args, self.kwargs))
        if any(isinstance(each, (data.Iterator, data.Dataset)) for each in leaves):
            return None
        traced = self.function.get_concrete_function(*self.args, **self.kwargs)
        graph = traced.graph.as_graph_def()
        called = attrgetter("library.function")(graph)
        nodes = chain(graph.node, *(each.node_def for each in called))
        if any(node.op in _OF_PYTHON for node in nodes):
            return None
        variables = list(traced.graph.variables)
        known = {id(each.handle) for each in variables}
        kinds = "resource", "variant"
        captured = (each for each in traced.captured_inputs if each.dtype.name in kinds)
        return variables if all(id(each) in known for each in captured) else None


class _StepOperations:
    """The operations of a step that is watched.

    Those of an eager step are seen while it runs. A compiled step is run once more before it.

    Args:
        seam: shows the operations of a step that runs.

    Attributes:
        is_on: whether the present step is watched, and was not found to be compiled.
    """

    def __init__(self, seam: TensorFlowSeam) -> None:
        self._seam = seam
        self._located: Located | None = None
        self.is_on = False

    @property
    def located(self) -> Located | None:
        """The first Inf or NaN that reached a result; None if there is none."""
        return self._located or self._seam.located

    @property
    def may_overflow(self) -> bool:
        """Whether what was located may be an overflow of a scaled loss, which a lower scale cures.

        It was seen at the scale of the step, in float16.
        """
        located = self._seam.located
        return (
            isinstance(located, BadGradient) and located.dtype == "float16" and located.num_inf > 0
        )

    def start(self) -> None:
        """Begin to look."""
        self.is_on = True
        self._seam.start()

    def stop(self) -> None:
        """Look no more."""
        self.is_on = False
        self._seam.stop()

    def end_in(self, results: object) -> None:
        """Note the results of a pass."""
        self._seam.end_in(results)

    def find(self, given: object, locate: Callable[[], Located | None]) -> None:
        """Look at a step that comes next and is compiled, and at what made its arguments."""
        self._seam.end_in(given)
        self.stop()
        try:
            self._located = self._seam.located or locate()
        except Exception as error:
            voice.note(f"the step is not watched: {error}")


@dataclass
class _Loop:
    """The steps of an optimizer.

    Attributes:
        optimizer: the optimizer, which is kept, so that no other has its id.
        variables: those that it steps.
        model: what holds them; None if they are in no layer.
        is_scaled: whether it scales losses.
        is_compiled: whether it steps in a function that is compiled.
        run: its run; None if there were too many.
        watch: the operations of a step that is watched; None if the user asked for none.
    """

    optimizer: Optimizer
    variables: Sequence[Variable]
    model: Model | None
    is_scaled: bool
    is_compiled: bool
    run: WatchedRun | None = None
    watch: _StepOperations | None = None
    _are_finite: Function | None = None

    @property
    def shown(self) -> tuple[dict[str, Any], list[Owned]]:
        """The layers and the parameters to name."""
        if self.model is not None:
            return layers_of(self.model), parameters_of(self.model)
        return {}, [Owned(each, "", "", self.name_of(each)) for each in self.variables]

    @property
    def scale(self) -> Variable | None:
        """The variable that holds the loss scale; None if none does, as for a fixed scale."""
        if not self.is_scaled or not getattr(self.optimizer, "dynamic", True):
            return None
        kept = getattr(self.optimizer, "_loss_scale", None)  # in tf_keras
        return getattr(kept, "current_loss_scale", None) or self.optimizer.dynamic_scale

    @cached_property
    def is_half(self) -> bool:
        """Whether a layer computes in float16."""
        layers = self.shown[0].values()
        return any(str(getattr(each, "compute_dtype", "")) == "float16" for each in layers)

    def name_of(self, variable: Variable) -> str:
        """The name of a variable: its path in Keras 3."""
        return str(getattr(variable, "path", None) or variable.name.partition(":")[0])

    def are_finite(self) -> list[bool]:
        """Whether each variable is finite, by one call that is compiled."""
        if self._are_finite is None:
            flags = partial(_flags, self.variables)
            self._are_finite = _tensorflow().function(flags, autograph=False)
        return list(self._are_finite().numpy())


class _Divided:
    """A scaled loss or a gradient of it, which is divided by the scale when it is read."""

    def __init__(self, array: Any, scale: float) -> None:
        self._array, self._scale = array, scale
        self.dtype, self.shape = array.dtype, array.shape

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(to_numpy(self._array).astype(np.float32) / self._scale)

    def reshape(self, shape: Any) -> Any:
        """Its values in another shape."""
        return np.asarray(self).reshape(shape)


def _kept(given: Any) -> Any:
    """An argument that can be read twice: zip() gives its pairs once."""
    return list(given) if hasattr(given, "__next__") else given


def _pairs(optimizer: Optimizer, method: str, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    """The gradients that are given to an optimizer, each with its variable."""
    given = args[0] if args else next(iter(kwargs.values()))
    if method == "apply":
        variables = args[1] if len(args) > 1 else kwargs.get("trainable_variables")
        given = zip(given, variables or optimizer._trainable_variables, strict=False)
    return [(gradient, variable) for gradient, variable in given if gradient is not None]


def _flags(variables: Sequence[Variable]) -> Tensor:
    tensorflow = _tensorflow()
    finite = (tensorflow.math.is_finite(tensorflow.convert_to_tensor(each)) for each in variables)
    return tensorflow.stack([tensorflow.reduce_all(each) for each in finite])


def _loss_in(results: Any) -> Tensor | None:
    """The loss among the results of a function: by its name, else the only number.

    Of several without such a name, one may be a metric. One that is not finite is taken.
    """
    named: list[Any] = []
    if isinstance(results, Mapping):
        named = [results[name] for name in results if "loss" in name]
    leaves = _tensorflow().nest.flatten(named or results)
    numbers = [each for each in leaves if hasattr(each, "dtype") and not each.shape.rank]
    numbers = [each for each in numbers if each.dtype.is_floating]
    if named or len(numbers) == 1:
        return next(iter(numbers), None)
    return next((each for each in numbers if not math.isfinite(each)), None)


def _divides(optimizer: Optimizer, method: str) -> bool:
    """Whether a step of a loss scaler divides the gradients by the scale, as in Keras 3."""
    if not hasattr(optimizer, "apply"):
        return False
    is_done = getattr(optimizer, "_gradients_have_been_unscaled", False)
    return method == "apply" or not is_done or optimizer._next_step_unscales


def _is_eager() -> bool:
    return bool(_tensorflow().executing_eagerly())


def _num_replicas() -> int:
    return int(_tensorflow().distribute.get_strategy().num_replicas_in_sync)


def _do_nothing() -> None:
    """Do nothing."""


def _tensorflow() -> Any:
    return sys.modules["tensorflow"]
