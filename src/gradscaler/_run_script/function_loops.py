"""Loops of JAX: the results of functions that take a gradient, compiled or not."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial, update_wrapper
from types import MethodType
from typing import Any

from gradscaler._run_script.after_import import after_import
from gradscaler._run_script.runs import Runs
from gradscaler._run_script.undo import replace
from gradscaler.diagnose._graph.call_site import is_of_user
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._locate.leaf_names import names_in_states, parameters_of
from gradscaler.diagnose._monitor.recorded_loop import Unscaled

Array = Any
Function = Callable[..., Any]


class FunctionLoops:
    """Looks at what each function of the user's returns that takes a gradient.

    A call of it is a step. ``jax.jit``, ``jax.grad`` and ``jax.value_and_grad``, and the last two
    of NNX, return functions that pass their calls on; a call in which JAX traces is not looked at.
    What ``nnx.jit`` compiles is seen in the call of ``jax.jit`` that it makes.

    Args:
        options: those of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._runs = options, Runs("jax", options)
        self._jax: Any = sys.modules["jax"]
        self._calling: list[_Watched] = []  # the functions that are running, the inner last
        self._num_steps: Counter[object] = Counter()  # by the key of a run
        self.are_finite: Function = self._jax.jit(_are_finite)

    def start(self) -> None:
        """Watch this process from now on."""
        self._watch(self._jax, "jit", "grad", "value_and_grad")
        nnx = "flax.nnx"
        after_import(nnx, lambda: self._watch(sys.modules[nnx], "grad", "value_and_grad"))

    def _watch(self, module: Any, *names: str) -> None:
        for name in names:
            replace(module, name, self._in_place_of(getattr(module, name), name))

    def _in_place_of(self, transform: Function, name: str) -> Function:
        """A transformation whose functions are watched if they are the user's."""

        def transformed(*args: Any, **kwargs: Any) -> Any:
            function = transform(*args, **kwargs)
            of = args[0] if args else kwargs.get("fun") or kwargs.get("f")  # "f" is NNX's
            if not callable(of):  # it has options alone, and is called with the function next
                return self._in_place_of(function, name) if callable(function) else function
            is_own = is_of_user(of)
            return _Watched(function, of, self, name != "jit") if is_own else function

        return update_wrapper(transformed, transform)

    def call(self, watched: _Watched, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a watched function, and look at its result if it took a gradient."""
        if self._runs.is_off:
            return watched.function(*args, **kwargs)
        if watched.takes_gradient:
            for each in self._calling:
                each.takes_gradient = True
        is_outer = not self._calling and not self._is_traced((args, kwargs))
        if not is_outer and not watched.takes_gradient:
            return watched.function(*args, **kwargs)
        copies = self._before(watched, args, kwargs) if is_outer else None
        self._calling.append(watched)
        try:
            results = watched.function(*args, **kwargs)
        finally:
            self._calling.pop()
        if is_outer and watched.takes_gradient:
            self._after(watched, copies or (args, kwargs), results)
        return results

    def _is_traced(self, values: Any) -> bool:
        leaves = self._jax.tree_util.tree_leaves(values)
        return any(isinstance(each, self._jax.core.Tracer) for each in leaves)

    @guarded
    def _before(self, watched: _Watched, args: Any, kwargs: Any) -> Any:
        """Copies of the arguments of the step that is to be watched, as they may be donated."""
        if self._options.watch != self._num_steps[watched.key] + 1:
            return None
        array = self._jax.Array
        copy = partial(self._jax.tree_util.tree_map, lambda x: x + 0 if isinstance(x, array) else x)
        return copy(args), copy(kwargs)

    @guarded
    def _after(self, watched: _Watched, given: Any, results: Any) -> None:
        """Record a step, and look where its first Inf or NaN began."""
        self._num_steps[watched.key] += 1
        if self._runs.is_off:
            return
        if watched.key not in self._runs.open:
            self._runs.begin(watched.key, Unscaled("jax", is_before=False), None)
        if watched.key not in self._runs.open:
            return
        args, kwargs = given
        paths = self._jax.tree_util.tree_leaves_with_path(results)
        leaves = [(path, leaf) for path, leaf in paths if _is_floating(leaf)]
        finite = self.are_finite([leaf for _, leaf in leaves])
        # A number is a loss or a metric; only a model of numbers alone has parameters of that kind.
        has_arrays = any(leaf.ndim for _, leaf in leaves)
        bad = [
            (path, leaf)
            for (path, leaf), is_finite in zip(leaves, finite, strict=True)
            if not is_finite and (leaf.ndim or not has_arrays)
        ]
        is_there = not any(
            getattr(each, "is_deleted", bool)() for each in self._jax.tree_util.tree_leaves(given)
        )
        again = update_wrapper(partial(watched.of, **kwargs), watched.users, updated=())
        self._runs.open[watched.key].record(
            self._loss_in(leaves),
            self._named(bad, watched, args, results) if bad else {},
            (lambda: (again, *args)) if is_there else None,
        )

    def _loss_in(self, leaves: list[tuple[Any, Array]]) -> Array | None:
        """The loss among the results, by its name, else the first number; None if there is none."""
        numbers = [
            (self._jax.tree_util.keystr(path), leaf) for path, leaf in leaves if not leaf.ndim
        ]
        named = [leaf for name, leaf in numbers if "loss" in name.lower()]
        return next(iter([*named, *(leaf for _, leaf in numbers)]), None)

    def _named(
        self, leaves: list[tuple[Any, Array]], watched: _Watched, args: Any, results: Any
    ) -> dict[str, Array]:
        """Results by their names: in a model of NNX, or of an argument with the same structure.

        If there is neither, the name is the path.
        """
        tree, in_states = self._jax.tree_util, names_in_states(results)
        names = zip(args, parameters_of(watched.users), strict=False)
        of = {tree.tree_structure(arg): name for arg, name in names}
        items = results if isinstance(results, (tuple, list)) else [results]
        known = [of.get(tree.tree_structure(item)) for item in items]

        def name(path: Any) -> str:
            if isinstance(results, (tuple, list)) and known[path[0].idx] and len(path) > 1:
                return f"{known[path[0].idx]}{tree.keystr(path[1:])}"
            return f"result{tree.keystr(path)}"

        return {in_states.get(id(leaf)) or name(path): leaf for path, leaf in leaves}


class _Watched:
    """A function of JAX's that passes each call on to another, and each attribute.

    Attributes:
        function: the other.
        users: what the user gave to be compiled or differentiated.
        of: what is run to see a step again: that, or what takes its gradient.
        takes_gradient: whether a gradient was taken in a call of it.
        key: of its run. A function that is differentiated in each step anew has one run.
    """

    def __init__(self, function: Function, of: Function, loops: FunctionLoops, grad: bool) -> None:
        update_wrapper(self, function)
        self.function, self.users, self.of = function, of, function if grad else of
        self.takes_gradient, self._loops = grad, loops
        self.key: object = getattr(inspect.unwrap(of), "__code__", of) if grad else self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._loops.call(self, args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def __repr__(self) -> str:
        return repr(self.function)


def _is_floating(leaf: Any) -> bool:
    dtype = str(getattr(leaf, "dtype", ""))
    return dtype.startswith(("float", "bfloat", "complex")) and bool(leaf.size)


def _are_finite(leaves: list[Array]) -> Any:
    """Whether each array is finite, as one array."""
    numpy: Any = sys.modules["jax.numpy"]
    return numpy.stack([numpy.isfinite(each).all() for each in leaves]) if leaves else []
