"""Loops of JAX: the results of functions that take a gradient, compiled or not."""

from __future__ import annotations

import argparse
import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial, update_wrapper
from threading import local
from types import MethodType
from typing import Any, ClassVar
from weakref import ref

import numpy as np

from gradscaler._run_script.after_import import after_import
from gradscaler._run_script.given_weights import GivenWeights
from gradscaler._run_script.lost_results import stale_in
from gradscaler._run_script.runs import Runs
from gradscaler._run_script.undo import replace
from gradscaler._run_script.voice import voice
from gradscaler._run_script.watched_run import WatchedRun
from gradscaler.diagnose import Located
from gradscaler.diagnose._graph.call_site import is_of_user
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.stand_ins import in_place_of
from gradscaler.diagnose._graph.threads import end_if_in_threads
from gradscaler.diagnose._locate.jaxpr import evaluate
from gradscaler.diagnose._locate.leaf_names import names_in_states, opaque_in, parameters_of
from gradscaler.diagnose._locate.locate import is_locating
from gradscaler.diagnose._locate.unnoticed import unnoticed
from gradscaler.diagnose._monitor.recorded_loop import Unscaled
from gradscaler.diagnose._monitor.replay import MOST_IN_VAIN, located_in
from gradscaler.diagnose._monitor.traced_scalers import at_scale_1, is_of_jax
from gradscaler.diagnose._record.thresholds import FEW_CALLS, LATE

_MANY = 2**20  # numbers; to read as many takes a quarter of a millisecond, ten times a call of JAX

Array = Any
Function = Callable[..., Any]

_ACCUMULATING = "MultiStepsState", "ApplyEveryState"  # of optax


class FunctionLoops:
    """Looks at what each function of the user's returns that takes a gradient.

    A call of it is a step. ``jax.jit``, ``jax.grad`` and ``jax.value_and_grad``, and the last two
    of NNX, return functions that pass their calls on; a call in which JAX traces is not looked at.
    What ``nnx.jit`` compiles is seen in the call of ``jax.jit`` that it makes.

    Args:
        options: those of the command line.

    Attributes:
        latest: what looks at the calls of all functions, also of those from a notebook's earlier
            cells, in which another one did.
    """

    latest: ClassVar[FunctionLoops]

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._runs = options, Runs("jax", options)
        self._jax: Any = sys.modules["jax"]
        self._calls = _Calls()  # of the present thread
        self._num_steps: Counter[object] = Counter()  # by the key of a run
        self._loops: dict[object, Unscaled] = {}  # what a run was given as its scaler, by the same
        self._weights: dict[object, GivenWeights] = {}  # by the same
        self._training: dict[object, int] = {}  # how surely it trains, by the same
        jit = self._jax.jit
        self._look = jit(partial(_look, _sum_of_squares))
        self._look_exactly, self._are_same = jit(partial(_look, _itself)), jit(_are_same)

    def start(self) -> None:
        """Watch this process from now on."""
        FunctionLoops.latest = self
        self._runs.before_end = self._set_aside
        self._watch(self._jax, "jit", "grad", "value_and_grad")
        nnx = "flax.nnx"
        after_import(nnx, lambda: self._watch(sys.modules[nnx], "grad", "value_and_grad"))
        after_import("optax", self._see_updates)

    def _see_updates(self) -> None:
        """See where optax makes new weights."""
        optax: Any = sys.modules["optax"]
        apply, see = optax.apply_updates, guarded(self._see_updated)

        @in_place_of(apply)
        def seen(params: Any, updates: Any, *args: Any, **kwargs: Any) -> Any:
            made = apply(params, updates, *args, **kwargs)
            see(params, updates, made)
            return made

        replace(optax, "apply_updates", seen)

    def _see_updated(self, *updated: Any) -> None:
        for each in self._calls.running:
            each.has_update = True
        if self._calls.running or self._runs.is_off:
            return
        leaves = [*map(self._jax.tree_util.tree_leaves, updated)]
        for given in self._weights.values():
            given.see_updated(*leaves)

    def _watch(self, module: Any, *names: str) -> None:
        for name in names:
            replace(module, name, self._in_place_of(getattr(module, name), name))

    def _in_place_of(self, transform: Function, name: str) -> Function:
        """A transformation whose functions are watched if they are the user's."""
        watch = guarded(_watched)

        def transformed(*args: Any, **kwargs: Any) -> Any:
            function = transform(*args, **kwargs)
            of = args[0] if args else kwargs.get("fun") or kwargs.get("f")  # "f" is NNX's
            argnums = kwargs.get("argnums", args[1] if args[1:] else 0)
            if not callable(of):  # it has options alone, and is called with the function next
                return self._in_place_of(function, name) if callable(function) else function
            watched = watch(function, of, None if name == "jit" else argnums)
            return function if watched is None else watched

        return update_wrapper(transformed, transform)

    def call(self, watched: _Watched, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a watched function, and look at its result if it took a gradient."""
        if self._runs.is_off or is_locating.get():  # such as in a step of Keras that is run again
            return watched.function(*args, **kwargs)
        if watched.takes_gradient:
            self._see_gradient(watched, args)
        if self._calls.taken is not None:
            return self._call_again(watched, args, kwargs, self._calls.taken)
        is_outer = not self._calls.running and self._is_given_values(watched, (args, kwargs))
        copies = self._before(watched, args, kwargs) if is_outer else None
        self._calls.running.append(watched)
        try:
            results = watched.function(*args, **kwargs)
        except Exception:
            if is_outer:
                self._see_donated(watched)
            raise
        finally:
            self._calls.running.pop()
        if is_outer and watched.takes_gradient:
            self._after(watched, copies or (args, kwargs), results)
        return results

    @guarded
    def _see_gradient(self, watched: _Watched, args: tuple[Any, ...]) -> None:
        """Note that a gradient is taken, and of what, in each function that is running."""
        if watched.argnums and not watched.by:
            found = (args[at] for at in watched.argnums if -len(args) <= at < len(args))
            watched.by |= {self._shapes(watched, each) for each in found}
        for each in self._calls.running:
            each.takes_gradient = True
            each.by |= watched.by
            each.has_update |= watched.has_update

    def _call_again(
        self, watched: _Watched, args: tuple[Any, ...], kwargs: dict[str, Any], taken: list[Any]
    ) -> Any:
        """Call a watched function in a step that is run again, and keep results with gradients."""
        is_outer = not self._calls.running
        self._calls.running.append(watched)
        try:
            results = watched.function(*args, **kwargs)
        finally:
            self._calls.running.pop()
        if is_outer and watched.takes_gradient:  # those within are traced for it alone
            taken.append(results)
            if len(taken) >= self._calls.most_taken:
                raise _EnoughError
        return results

    @guarded
    def _is_given_values(self, watched: _Watched, arguments: Any) -> bool:
        """Whether a call is run, and not traced."""
        watched.is_leaf = opaque_in(arguments)
        leaves = self._jax.tree_util.tree_leaves(arguments, watched.is_leaf)
        for weights in self._weights.values():
            weights.see_taken(leaves)
        if any(isinstance(each, self._jax.core.Tracer) for each in leaves):
            return False
        watched.is_given_spent = any(getattr(each, "is_deleted", bool)() for each in leaves)
        return True

    @guarded
    def _see_donated(self, watched: _Watched) -> None:
        """Say why a call failed that was given arrays which an earlier call was donated."""
        if watched.is_given_spent:
            voice.note(
                f"{getattr(watched, '__name__', 'the function')}() was given arrays that an "
                "earlier call has used up, as they are donated (donate_argnums). Assign what it "
                "returns to the names that it is given."
            )

    @guarded
    def _before(self, watched: _Watched, args: Any, kwargs: Any) -> Any:
        """Copies of the arguments of the step that is to be watched, as they may be donated."""
        if self._options.watch != self._num_steps[watched.key] + 1:
            return None
        array, apply = self._jax.Array, self._jax.tree_util.tree_map
        return apply(
            lambda x: x + 0 if isinstance(x, array) else x, (args, kwargs), is_leaf=watched.is_leaf
        )

    @guarded
    def _after(self, watched: _Watched, given: Any, results: Any) -> None:
        """Record a step, and look where its first Inf or NaN began."""
        self._num_steps[watched.key] += 1
        end_if_in_threads(is_new=watched.key not in self._runs.open)
        if self._runs.is_off:
            return
        if watched.key not in self._runs.open:
            self._begin(watched)
        if watched.key not in self._runs.open:
            return
        args, kwargs = given
        before, _ = flat = self._jax.tree_util.tree_flatten(given, watched.is_leaf)
        made, _ = flat_results = self._jax.tree_util.tree_flatten(results)
        key = *_kinds(*flat), *_kinds(*flat_results)
        places = watched.places.get(key)
        if places is None:
            places = watched.places[key] = self._places(watched, args, kwargs, results)
            watched.accumulates |= any(name in repr(flat[1]) for name in _ACCUMULATING)
        self._see_training(watched, before, made, places)
        leaves = [(path, made[at]) for path, at in places.floating]
        is_there = not any(getattr(each, "is_deleted", bool)() for each in before)
        pairs = [(before[old], made[new]) for old, new in places.changed if is_there]
        kept = [(before[old], made[new]) for old, new in places.kept if is_there]
        look = self._look_at([leaf for _, leaf in leaves], (pairs, kept), places)
        finite, is_same, is_still, is_zero = look
        # A number is a loss or a metric; only a model of numbers alone has parameters of that kind.
        has_arrays = any(leaf.ndim for _, leaf in leaves)
        all_bad = [pair for pair, is_ok in zip(leaves, finite, strict=True) if not is_ok]
        nonfinite = [leaf for _, leaf in all_bad]
        bad = [(path, leaf) for path, leaf in all_bad if leaf.ndim or not has_arrays]
        again = _unnoticed(watched.of, kwargs, watched.users)
        run = self._runs.open[watched.key]
        is_left_out = is_same and self._is_left_out(watched, run, again, args)
        watched.has_moved |= bool(pairs) and not is_same
        loop = self._loops[watched.key]
        loop.num_unmoved = 1
        loop.unmoved = self._unmoved(watched, before, places) or "zero" * is_zero
        makes_new = watched.has_update and places.kept and not (is_there and is_still)
        self._weights[watched.key].see_returned(made[places.kept[0][1]] if makes_new else None)
        if places.kept and is_there and not (nonfinite or is_left_out):
            self._see_still(watched, loop, again, args, is_still=is_still)
        states = watched.states_in(before, [leaves[at] for at in places.numbers])
        others = [made[at] for path, at in places.others if path not in states]
        named = [leaves[at][1] for at in places.losses]
        loss = _loss_in(named, others, nonfinite, watched.of is watched.function)
        if nonfinite and not bad and is_there and not is_left_out:
            loop.unmoved = self._unmoved_by_loss(watched, again, args) or loop.unmoved
        if nonfinite and not bad and _has_scaler(given) and self._is_of_scale(watched, again, args):
            is_left_out, loss = True, None
        loop.is_unchanged = bool(nonfinite) and is_same
        loop.stale = places.stale
        loop.unmoved = "copied" if places.is_copied else loop.unmoved
        run.record(
            loss,
            self._named(bad, watched, args, results) if bad and not is_left_out else {},
            (lambda: (again, *args)) if is_there and not is_left_out else None,
        )

    def _begin(self, watched: _Watched) -> None:
        """Begin the run of a function, which is not the latest before it is known to train."""
        latest, loop = self._options.latest, Unscaled("jax", is_before=False)
        self._loops[watched.key] = loop
        self._runs.begin(watched.key, loop, None)
        self._options.latest = latest

    def _see_training(
        self, watched: _Watched, before: list[Any], made: list[Any], places: _Places
    ) -> None:
        """See whether a function trains: 2 if it makes weights, 1 if it returns gradients, else 0.

        An evaluation takes gradients, too: by its inputs, as for forces, or for a norm.
        """
        key, new = watched.key, watched.new and watched.new()
        watched.new = ref(made[places.kept[0][1]]) if places.kept else None
        weights = self._weights.get(key)
        makes_new = watched.has_update
        makes_new |= bool(places.gradients) and weights is not None and weights.are_updated
        makes_new |= new is not None and any(before[old] is new for old, _ in places.kept)
        known = self._training.get(key, -1)
        self._training[key] = max(known, 2 if makes_new else bool(places.gradients))
        if self._training[key] > known and self._training[key] == self._most:
            self._options.latest = self._runs.open[key]

    @property
    def _most(self) -> int:
        """How surely one of the functions trains that have an open run."""
        return max((self._training.get(key, 0) for key in self._runs.open), default=0)

    @guarded
    def _set_aside(self) -> None:
        """Let no run have a verdict that nothing is wrong where others alone train."""
        most = self._most
        for key, run in self._runs.open.items():
            run.is_aside = self._training.get(key, 0) < most

    def _look_at(
        self, leaves: list[Array], groups: Sequence[list[tuple[Array, Array]]], places: _Places
    ) -> tuple[list[bool], bool, bool, bool]:
        """Whether each array is finite, all pairs of each group are equal, and gradients are 0.

        It is one program and one answer, as an array of JAX gives its numbers one by one, each by
        a program of its own; or two programs on a CPU, for many numbers, as one runs on one core.
        Where that is in doubt, another one reads more.
        """
        witnesses = [
            each[at] if each else None for each, at in zip(groups, places.witnesses, strict=True)
        ]
        look = self._look if places.are_on_one else self._look_exactly
        parts = [[leaves[at] for at in part] for part in places.parts]
        first, *rest = parts
        looked = [look(first, witnesses), *(look(each, [None, None]) for each in rest)]
        (is_same, is_still), finite, zero = _parts(looked, places.parts)
        is_zero = bool(places.gradients) and all(zero[at] for at in places.gradients)
        if (is_zero or not all(finite)) and places.are_on_one:  # or a sum of squares was Inf, or 0
            every = [self._look_exactly(leaves, [None, None])]
            _, finite, zero = _parts(every, [range(len(leaves))])
            is_zero = is_zero and all(zero[at] for at in places.gradients)
        is_still = is_still and self._are_all_same(groups, places, 1)
        is_same = is_same and self._are_all_same(groups, places, 0)
        return finite, is_same, is_still, is_zero and not is_still  # else they may be weights of 0

    def _are_all_same(
        self, groups: Sequence[list[tuple[Array, Array]]], places: _Places, of: int
    ) -> bool:
        same = np.asarray(self._are_same(groups[of])).tolist()
        places.witnesses[of] = 0 if all(same) else same.index(False)
        return all(same)

    def _see_still(
        self, watched: _Watched, loop: Unscaled, step: Function, args: Any, *, is_still: bool
    ) -> None:
        """See whether a step has returned its weights as they were, to the bit.

        One that several such steps follow is run again once, to see its gradients.
        """
        number = self._num_steps[watched.key]
        loop.stood = ""
        if not is_still:
            watched.still_since, watched.gradients = 0, ""
            watched.has_stepped = True
            return
        watched.still_since = watched.still_since or number
        count = number - watched.still_since + 1
        # Of an accumulation, no such calls are half of all.
        enough = max(LATE, watched.still_since - 1) if watched.has_stepped else FEW_CALLS
        if count == enough and watched.num_looks:
            watched.num_looks -= 1
            watched.gradients = self._gradients_in(watched, step, args)
        is_at_rate_of_0 = watched.gradients == "some" and watched.has_update
        if watched.has_stepped or (is_at_rate_of_0 and not watched.accumulates):
            loop.stood = f"{watched.still_since} {watched.gradients}".rstrip()
        elif watched.gradients in ("apart", "zero") and not loop.unmoved:
            loop.unmoved = watched.gradients
            loop.num_unmoved = count if count == enough else 1

    def _unmoved_by_loss(self, watched: _Watched, step: Function, args: Any) -> str:
        """``"apart"`` if a loss that alone is Inf or NaN depends on no weight, else nothing.

        The first of such steps is run again.
        """
        if watched.is_apart is None:
            watched.is_apart = self._gradients_in(watched, step, args) == "apart"
        return "apart" * watched.is_apart

    def _gradients_in(self, watched: _Watched, step: Function, args: Any) -> str:
        """The gradients of a step that is run again.

        They are ``"apart"`` if they depend on nothing, all ``"zero"``, or not (``"some"``). Empty
        if they are not known.
        """

        def gradients(*args: Any, most: float = math.inf) -> list[Array]:
            taken = self._taken_in(step, args, most)
            leaves = self._jax.tree_util.tree_leaves(taken)
            return [leaves[at] for at in self._weights_in(watched, taken)]

        def unrolled(*args: Any) -> list[Array]:
            with self._jax.disable_jit():
                return gradients(*args, most=FEW_CALLS)

        for each in (gradients, unrolled):
            try:
                found, depend = evaluate(each, *args)
            except (
                Exception
            ):  # such as for gradients in a loop of JAX's, which are traced within it
                continue
            if any(np.asarray(each).any() for each in found):
                return "some"
            if found:  # else JAX has kept what it traced of such a loop
                return "zero" if depend else "apart"
        return ""

    def _is_left_out(self, watched: _Watched, run: WatchedRun, step: Function, args: Any) -> bool:
        """Whether a step that changed no weights left them for an Inf or NaN; the run notes it.

        Others change none, too, as at a learning rate of 0. So the first one is searched.
        """
        located = None
        if watched.has_moved and watched.num_searches and not watched.leaves_out:
            watched.num_searches -= 1
            located = self._located_in(step, args)
            watched.leaves_out = located is not None
        if watched.leaves_out:
            run.leave_unchanged(located)
        return watched.leaves_out

    def _is_of_scale(self, watched: _Watched, step: Function, args: Any) -> bool:
        """Whether the loss of a step is Inf or NaN by its loss scale alone, as in a healthy one.

        A loss in float16 is multiplied in float16 by a scale that is a number of Python, or narrow.
        """
        if not watched.num_searches:
            return False
        try:
            located = located_in(step, *args)
        except Exception:  # the monitor, which runs it again, tells it
            return False
        watched.num_searches -= located is not None
        return located is None

    def _unmoved(self, watched: _Watched, given: list[Array], places: _Places) -> str:
        """Why a step leaves its weights as they were for all times; empty if it does not."""
        weights = self._weights.setdefault(watched.key, GivenWeights())
        again = weights.are_again([given[at] for at in places.weights])
        return "returned" if places.returns_given else again

    def _places(self, watched: _Watched, args: Any, kwargs: Any, results: Any) -> _Places:
        """Where the numbers of a step are, by the structure of its arguments and results.

        A result takes the place of an argument, as a state does, if it has its structure and holds
        an array.
        """
        paths = self._jax.tree_util.tree_leaves_with_path(results)
        floating = [(path, at) for at, (path, leaf) in enumerate(paths) if _is_floating(leaf)]
        given = {key: (at, leaves) for key, at, leaves in self._each(watched, args)}
        given = {key: each for key, each in given.items() if any(map(_is_array, each[1]))}
        changed, states = list[tuple[int, int]](), set[int]()
        for number, (key, at, leaves) in enumerate(self._each(watched, _items(results))):
            if key in given:
                states.add(number)
                places = ((given[key][0] + each, at + each) for each in range(len(leaves)))
                changed += [pair for pair in places if _is_array(leaves[pair[1] - at])]
        others = [each for each in floating if _place(each[0], results)[0] not in states]
        new = self._weights_in(watched, results)
        devices: Iterator[set[Any]] = (getattr(leaf, "devices", set)() for _, leaf in paths)
        program = self._program(watched, args, kwargs) if new or changed else None
        makes_new = program is not None and (watched.has_update or _makes_state(program, changed))
        stale = stale_in(program) if makes_new else []
        return _Places(
            floating,
            others,
            changed,
            all(len(each) < 2 for each in devices),
            weights := self._weights_in(watched, (args, kwargs)),
            makes_new and _computed_in(program).isdisjoint(new) and bool(new),
            [] if len(weights) != len(new) else list(zip(weights, new, strict=True)),
            [number for number, (_, at) in enumerate(floating) if at in new],
            numbers := [n for n, (_, at) in enumerate(floating) if not paths[at][1].ndim],
            [n for n in numbers if "loss" in self._jax.tree_util.keystr(floating[n][0]).lower()],
            _divided([paths[at][1] for _, at in floating]),
            self._listed([each for each in floating if each[1] in stale], watched, args, results),
            self._is_copied(watched, (args, kwargs), results),
        )

    def _is_copied(self, watched: _Watched, given: Any, results: Any) -> bool:
        """Whether a compiled step updates a model of NNX of which it got a copy, and returns none.

        What is given to ``nnx.jit`` is a state by here, of which the new one is among the results.
        """
        nnx: Any = sys.modules.get("flax.nnx")
        if nnx is None or not (watched.has_update and hasattr(watched.function, "trace")):
            return False
        leaves_of = self._jax.tree_util.tree_leaves
        is_leaf = watched.is_leaf or (lambda _: False)
        leaves = leaves_of(given, lambda x: isinstance(x, nnx.Module) or is_leaf(x))
        models = [each for each in leaves if isinstance(each, nnx.Module)]
        trained = [each for each in models if self._shapes(watched, each) in watched.by]
        made = _shapes_in(leaves_of(results))
        return bool(trained) and all(_shapes_in(leaves_of(each)) - made for each in trained)

    def _listed(
        self, places: list[tuple[Any, int]], watched: _Watched, args: Any, made: Any
    ) -> str:
        """The name of the first of some results, and the number of the others."""
        leaves = self._jax.tree_util.tree_leaves(made)
        names = self._named([(path, leaves[at]) for path, at in places], watched, args, made)
        first, *rest = names or [""]
        return f"{first} and {len(rest)} more" if rest else first

    def _weights_in(self, watched: _Watched, values: Any) -> list[int]:
        """The places of the numbers in arguments or results of which a gradient is taken.

        They are those with its structure and its shapes, if one of them is an array. An optimizer's
        moments have them, too, and are deeper in its state.
        """
        tree, at = self._jax.tree_util, 0
        is_leaf = watched.is_leaf or (lambda _: False)
        found = list[tuple[int, list[int]]]()
        if not watched.by:
            return []
        nodes, _ = tree.tree_flatten_with_path(
            values, lambda each: is_leaf(each) or self._shapes(watched, each) in watched.by
        )
        for path, node in nodes:
            leaves = tree.tree_leaves(node, watched.is_leaf)
            if self._shapes(watched, node) in watched.by and any(map(_is_array, leaves)):
                places = range(at, at + len(leaves))
                found.append((len(path), [x for x in places if _is_floating(leaves[x - at])]))
            at += len(leaves)
        top = min((depth for depth, _ in found), default=0)
        return [each for depth, places in found if depth == top for each in places]

    def _shapes(self, watched: _Watched, value: Any) -> tuple[Any, ...]:
        """A structure, and the shape of each leaf; a cast of the weights has the same."""
        leaves, structure = self._jax.tree_util.tree_flatten(value, watched.is_leaf)
        return structure, *(getattr(each, "shape", None) for each in leaves)

    def _program(self, watched: _Watched, args: Any, kwargs: Any) -> Any:
        """The program of a compiled function; None if it is not compiled, or not known."""
        trace = getattr(watched.function, "trace", None)
        if trace is None:
            return None
        try:
            with unnoticed():  # JAX has kept what it traced for the call
                return trace(*args, **kwargs).jaxpr.jaxpr
        except Exception:  # of the user's code, if it is traced again
            return None

    def _each(self, watched: _Watched, values: Any) -> Iterator[tuple[Any, int, list[Any]]]:
        """The structure of each value, the place of its first leaf among all, and its leaves."""
        at = 0
        for value in values:
            leaves, structure = self._jax.tree_util.tree_flatten(value, watched.is_leaf)
            yield _kinds(leaves, structure), at, leaves
            at += len(leaves)

    def _located_in(self, step: Function, args: Any) -> Located | None:
        """Where an Inf or NaN in the gradients of a step began, which left the weights unchanged.

        In float16 it may be an overflow of a loss scale, which the next steps cure.
        """
        try:
            found = located_in(self._with_gradients(step), *args)
        except Exception:  # such as for gradients in a loop of JAX's, which are traced within it
            return None
        return None if found is None or found.dtype == "float16" else found

    def _taken_in(self, step: Function, args: Any, most: float) -> list[Any]:
        """The first of the results with gradients in a step."""
        taken = self._calls.taken = list[Any]()
        self._calls.most_taken = most
        try:
            step(*args)
        except _EnoughError:
            pass
        finally:
            self._calls.taken, self._calls.most_taken = None, math.inf
        return taken

    def _with_gradients(self, step: Function) -> Function:
        """A step that returns, beside its results, those of each gradient that is taken in it."""

        def with_gradients(*args: Any) -> Any:
            self._calls.taken = []
            try:
                return step(*args), self._calls.taken
            finally:
                self._calls.taken = None

        return update_wrapper(with_gradients, step, updated=())

    def _named(
        self, leaves: list[tuple[Any, Array]], watched: _Watched, args: Any, results: Any
    ) -> dict[str, Array]:
        """Results by their names: in a model of NNX, or of an argument with the same structure.

        If there is neither, the name is the path.
        """
        tree, in_states = self._jax.tree_util, names_in_states(results)
        names = zip(args, parameters_of(watched.users), strict=False)
        of = {tree.tree_structure(arg, watched.is_leaf): name for arg, name in names}
        known = [of.get(tree.tree_structure(item)) for item in _items(results)]

        def name(path: Any) -> str:
            at, within = _place(path, results)
            is_known = known[at] and within
            return f"{known[at]}{tree.keystr(within)}" if is_known else f"result{tree.keystr(path)}"

        return {in_states.get(id(leaf)) or name(path): leaf for path, leaf in leaves}


class _Calls(local):
    """What a thread calls.

    Attributes:
        running: the functions that are running, the inner last.
        taken: results with gradients, of a step that is run again; else None.
        most_taken: how many of these there are before it ends.
    """

    def __init__(self) -> None:
        self.running: list[_Watched] = []
        self.taken: list[Any] | None = None
        self.most_taken = math.inf


@dataclass
class _Places:
    """Where numbers are among the leaves of a step's arguments and results.

    Attributes:
        floating: the paths and the places of the results that are floating-point numbers.
        others: those of them that take the place of no argument.
        changed: the places of arrays of arguments, and of the results that take theirs.
        are_on_one: whether each result is on one device, so that its squares add up there.
        weights: the places of the numbers of arguments of which the gradient is taken.
        returns_given: whether it is so by its program that a step returns its own weights, though
            it makes new ones: it applies updates, or computes a state. One that selects the old
            ones, or adds an update of 0, computes what it returns.
        kept: the places of these, and of the results that are weights.
        gradients: which of those in `floating` these are, which may be gradients.
        numbers: which of those in `floating` are single numbers.
        losses: which of these are named a loss.
        parts: those in `floating` by the programs that look at them.
        stale: the results that are arguments as they were, though the step computes new ones, and
            makes another state; empty if none is.
        is_copied: whether it updates a model of NNX that jax.jit has copied.
        witnesses: which pair of those a step has changed, as the next one most likely does; first
            of `changed`, then of `kept`.
    """

    floating: list[tuple[Any, int]]
    others: list[tuple[Any, int]]
    changed: list[tuple[int, int]]
    are_on_one: bool
    weights: list[int]
    returns_given: bool
    kept: list[tuple[int, int]]
    gradients: list[int]
    numbers: list[int]
    losses: list[int]
    parts: list[list[int]]
    stale: str = ""
    is_copied: bool = False
    witnesses: list[int] = field(default_factory=lambda: [0, 0])


def _watched(function: Function, of: Function, argnums: Any) -> _Watched | None:
    return _Watched(function, of, argnums) if is_of_user(of) else None


class _EnoughError(BaseException):
    """Ends a step that is run again for its first gradients."""


class _Watched:
    """A function of JAX's that passes each call on to another, and each attribute.

    Attributes:
        function: the other.
        users: what the user gave to be compiled or differentiated.
        of: what is run to see a step again: that, or what takes its gradient.
        takes_gradient: whether a gradient was taken in a call of it.
        argnums: of which arguments it takes one itself; empty if that is not known.
        by: the structures and shapes of what a gradient was taken of, in a call of it.
        has_update: whether optax applied updates in a call of it.
        key: of its run. A function that is differentiated in each step anew has one run.
        has_moved: whether a call has changed all weights that it got.
        leaves_out: whether a call has left them as they were for an Inf or NaN.
        num_searches: how many more calls that leave them may be searched for one.
        has_stepped: whether a call has returned other weights than it got.
        still_since: the first of the latest calls that have not; 0 if the latest has.
        accumulates: whether it is given a state in which optax adds up gradients.
        num_looks: how many more such calls may be run again.
        gradients: those of such a call, as `_gradients_in` tells them.
        is_apart: whether its loss depends on no weight; None if that was not looked at.
        is_leaf: what tells the leaves of its latest arguments; None if JAX does.
        is_given_spent: whether an earlier call had used up one of these, which was donated.
        places: where numbers are in its arguments and results, by the structure of these.
        new: the first of its latest results that may be new weights, until it is freed.
    """

    def __init__(self, function: Function, of: Function, argnums: Any) -> None:
        grad = argnums is not None
        update_wrapper(self, function)
        self.function, self.users, self.of = function, of, function if grad else of
        self.takes_gradient, self.has_update = grad, False
        numbers = argnums if isinstance(argnums, (tuple, list)) else [argnums]
        self.argnums = [each for each in numbers if isinstance(each, int)]  # NNX has others, too
        self.by = set[tuple[Any, ...]]()
        self.has_moved = self.leaves_out = False
        self.num_searches = MOST_IN_VAIN
        self.has_stepped, self.still_since, self.gradients = False, 0, ""
        self.is_apart: bool | None = None
        self.accumulates = False
        self.num_looks = 2  # one before a call has stepped, and one after
        self.is_leaf: Callable[[object], bool] | None = None
        self.is_given_spent = False
        self.places: dict[Any, _Places] = {}
        self.new: Callable[[], Array | None] | None = None
        self._numbers: dict[Any, Array] | None = None  # of the latest results, by their paths
        self._states: set[Any] = set()
        self.key: object = getattr(inspect.unwrap(of), "__code__", of) if grad else self

    def states_in(self, given: list[Any], numbers: list[tuple[Any, Array]]) -> set[Any]:
        """The paths of numbers in the results that are given to the next call, as a loss scale is.

        Those of the first results are not known yet, so all of them may be, if it was given one.
        """
        before, self._numbers = self._numbers, dict(numbers)
        without_axes = (each for each in given if not getattr(each, "ndim", 1))
        ids = {id(each) for each in without_axes if _is_floating(each)}
        if before is None:
            return set(self._numbers) if ids else set()
        self._states |= {path for path, number in before.items() if id(number) in ids}
        return self._states

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return FunctionLoops.latest.call(self, args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def __copy__(self) -> _Watched:
        return self

    def __deepcopy__(self, _: object) -> _Watched:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the function is pickled, by its name if it is Python's."""
        is_python_s = inspect.isfunction(self.function)
        return self.function.__qualname__ if is_python_s else self.function.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return repr(self.function)


def _unnoticed(step: Function, kwargs: dict[str, Any], users: Function) -> Function:
    """A step that is run again, whose Python code JAX runs to trace it; it scales no loss."""

    def again(*args: Any) -> Any:
        args, own = _at_scale_1((args, kwargs))
        with unnoticed():
            return step(*args, **own)

    return update_wrapper(again, users, updated=())


def _has_scaler(arguments: Any) -> bool:
    """Whether arguments hold a scaler."""
    is_opaque = opaque_in(arguments) or (lambda _: False)
    leaves = sys.modules["jax"].tree_util.tree_leaves(
        arguments, is_leaf=lambda x: is_of_jax(x) or is_opaque(x)
    )
    return any(map(is_of_jax, leaves))


def _at_scale_1(arguments: Any) -> Any:
    """Arguments in which each scaler has a scale of 1."""
    is_opaque = opaque_in(arguments) or (lambda _: False)
    return sys.modules["jax"].tree_util.tree_map(
        lambda x: at_scale_1(x) if is_of_jax(x) else x,
        arguments,
        is_leaf=lambda x: is_of_jax(x) or is_opaque(x),
    )


def _kinds(leaves: list[Any], structure: Any) -> tuple[Any, ...]:
    """A structure, and the shape and dtype of each leaf."""
    kinds = ((getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves)
    return structure, *kinds


def _is_floating(leaf: Any) -> bool:
    return _is_inexact(getattr(leaf, "dtype", None)) and bool(leaf.size)


@cache
def _is_inexact(dtype: Any) -> bool:
    return str(dtype).startswith(("float", "bfloat", "complex"))


def _is_array(leaf: Any) -> bool:
    """Whether it holds floating-point numbers, and not one alone."""
    return _is_floating(leaf) and bool(leaf.ndim)


def _loss_in(
    named: list[Array], others: list[Array], bad: list[Array], is_first: bool
) -> Array | None:
    """The number that is named a loss, else the only one among others; None if none is.

    Of several without such a name, one may be a metric. The first is taken if it is known to be
    the loss, and else one that is not finite.
    """
    numbers = named or [leaf for leaf in others if not leaf.ndim]
    if named or is_first or len(numbers) == 1:
        return next(iter(numbers), None)
    return next((leaf for leaf in numbers if any(leaf is each for each in bad)), None)


def _shapes_in(leaves: list[Any]) -> Counter[Any]:
    """How many arrays have each shape."""
    return Counter(each.shape for each in leaves if _is_array(each))


def _computed_in(program: Any) -> set[int]:
    """The places of the results that a program computes, and was not given."""
    given = set(map(id, program.invars))
    return {at for at, each in enumerate(program.outvars) if id(each) not in given}


def _makes_state(program: Any, changed: list[tuple[int, int]]) -> bool:
    """Whether it computes a result that takes the place of an argument."""
    computed = _computed_in(program)
    return any(new in computed for _, new in changed)


def _items(results: Any) -> Sequence[Any]:
    """The results of a function, which may be one; a named tuple is one."""
    return results if type(results) in (tuple, list) else [results]


def _place(path: Any, results: Any) -> tuple[int, Any]:
    """Which of the results a path leads into, and the path within it."""
    return (0, path) if _items(results) is not results else (path[0].idx, path[1:])


def _look(part: Function, leaves: list[Array], pairs: list[tuple[Array, Array] | None]) -> Any:
    """Whether both of each pair are equal, and a part of each array is finite, and is 0."""
    numpy: Any = sys.modules["jax.numpy"]
    parts = [part(each) for each in leaves]
    same = [numpy.asarray(False) if pair is None else _is_same(*pair) for pair in pairs]
    finite = [numpy.isfinite(each).all() for each in parts]
    return numpy.stack([*same, *finite, *((each == 0).all() for each in parts)])


def _parts(
    looked: list[Array], places: Sequence[Sequence[int]]
) -> tuple[list[bool], list[bool], list[bool]]:
    """What calls of `_look` tell of two pairs, and of arrays at these places, of which each is."""
    told = [np.asarray(each).tolist() for each in looked]
    finite = [True] * sum(map(len, places))
    zero = finite.copy()
    for flags, of in zip(told, places, strict=True):
        for number, at in enumerate(of, 2):
            finite[at], zero[at] = flags[number], flags[number + len(of)]
    return told[0][:2], finite, zero


def _divided(leaves: Sequence[Array]) -> list[list[int]]:
    """The places of arrays in one part, or in two of about as many numbers if there are many.

    Two programs are begun for two parts, which pays if both cores of a CPU have much to read.
    """
    places = list(range(len(leaves)))
    devices = {device for each in leaves for device in getattr(each, "devices", set)()}
    is_on_cpu = len(devices) == 1 and devices.pop().platform == "cpu"
    if not is_on_cpu or sum(each.size for each in leaves) < _MANY:
        return [places]
    parts, sizes = [list[int](), list[int]()], [0, 0]
    for at in sorted(places, key=lambda at: -leaves[at].size):
        less = sizes.index(min(sizes))
        parts[less].append(at)
        sizes[less] += leaves[at].size
    return parts if all(parts) else [places]


def _sum_of_squares(array: Array) -> Any:
    """A number that is finite only if all are. XLA asks each of them in three times its time."""
    numpy: Any = sys.modules["jax.numpy"]
    is_narrow = array.dtype.itemsize < 4
    return numpy.vdot(array, array, preferred_element_type="float32" if is_narrow else None)


def _itself(array: Array) -> Array:
    return array


def _are_same(pairs: list[tuple[Array, Array]]) -> Any:
    return sys.modules["jax.numpy"].stack([_is_same(*each) for each in pairs])


def _is_same(old: Array, new: Array) -> Any:
    return (old == new).all()
