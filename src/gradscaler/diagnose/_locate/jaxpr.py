"""Locate the primitive that makes the first Inf or NaN in a function of JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from gradscaler.diagnose._locate.leaf_names import arguments_of, opaque_in
from gradscaler.diagnose._operations.rows import canonical
from gradscaler.diagnose._record.located import Located
from gradscaler.diagnose._seams.jax import CALLBACKS, JaxSeam
from gradscaler.diagnose._seams.judge import Owned

Array = Any


def locate_jax(fn: Callable[..., object], *args: object) -> Located | None:
    """Run a function of JAX primitive by primitive, and locate its first Inf or NaN.

    The primitive that makes it is the first, in the order of the computation, whose output is not
    finite although its inputs are. Its Inf or NaN must also reach a result of the function. -inf
    counts as finite unless it becomes +Inf or NaN, a sum makes it, or it is a scalar. One that
    reaches only what a loss function returns beside the loss (``has_aux=True``) comes last.

    To check the backward pass too, give the function that ``jax.value_and_grad`` makes. A primitive
    of the backward pass has the line and, where it is known, the name of the forward primitive
    whose gradient it computes. A derivative that the forward pass computes for the backward pass,
    such as 0.5 / sqrt(x) for sqrt(x), counts as backward. So does a primitive that
    ``jax.checkpoint`` runs again.

    A primitive in a function of JAX's own, such as ``jnp.linalg.norm``, has the line of the call,
    and the name of the function if its failures are known, such as ``"norm"``. The primitives in
    ``jit``, ``remat``, ``custom_jvp``, ``custom_vjp``, ``scan``, ``while_loop`` and ``cond`` are
    checked one by one. Other primitives that hold a computation, such as ``shard_map`` and Pallas
    kernels, are checked as a whole. The function is traced as under ``jit``, so its control flow
    must not depend on values. Results are rounded after each primitive, even where XLA would fuse
    several. Functions of Python that ``jax.debug.callback`` or ``io_callback`` would call are not
    called.

    Args:
        fn: the function. What it writes into its arguments in place, as NNX's do, is a result.
        args: its arguments: arrays in any pytree. Other leaves, such as the activation functions of
            an Equinox model, are static, as in ``equinox.filter_jit``.

    Returns:
        ``module`` is None, and ``operation`` is the primitive or the function, such as ``"log"``.
        A primitive has JAX's name, such as ``"integer_pow"``, where ``locate`` says ``"pow"``.
        If an argument or a constant is not finite, the ``kind`` is ``"input"``, and ``parameter``
        is the argument's name and path, such as ``"params['w']"``. None if all results are finite.
        JAX before 0.7 does not record which primitives belong to a backward pass, so there all
        other kinds are ``"forward"``.

    Raises:
        ValueError: a result of ``io_callback`` is used.
        Exception: any error that ``jax.make_jaxpr`` or the function raises.

    Example::

        found = locate_jax(jax.value_and_grad(scaled_loss), params, batch)
        print(found)  # forward of a function (float16), exp at train.py:12: 3 inf of 64; ...
    """
    call, given = _by_arrays(fn, args)

    def fn_of_arrays(*arrays: Array) -> list[Array]:
        results, is_auxiliary[:] = _results_of(*call(*arrays))
        return results

    is_auxiliary = list[bool]()
    closed = import_module("jax").make_jaxpr(fn_of_arrays)(*given.values())
    seam = JaxSeam()
    names = arguments_of(fn, args)
    seam.run(closed, {names[at]: array for at, array in given.items()}, is_auxiliary)
    function = getattr(fn, "__name__", None)
    return seam.located and replace(seam.located, function=function)


def evaluate(fn: Callable[..., Sequence[Array]], *args: object) -> tuple[list[Array], bool]:
    """Run a function as one program, which calls nothing of the user's in Python.

    One with such a call is run primitive by primitive, each of which XLA compiles by itself.

    Returns:
        Its results, and whether one of them may depend on an array among the arguments.
    """
    call, given = _by_arrays(fn, args)
    closed = import_module("jax").make_jaxpr(lambda *arrays: call(*arrays)[0])(*given.values())
    depend = set(map(id, closed.jaxpr.invars))
    for equation in closed.jaxpr.eqns:
        if any(id(each) in depend for each in equation.invars):
            depend.update(map(id, equation.outvars))
    is_dependent = any(id(each) in depend for each in closed.jaxpr.outvars)
    if any(name in str(closed) for name in CALLBACKS):
        names = {str(at): array for at, array in given.items()}
        return JaxSeam().run(closed, names), is_dependent
    program = import_module("jax").jit(import_module("jax.extend.core").jaxpr_as_fun(closed))
    return program(*given.values()), is_dependent


def _by_arrays(
    fn: Callable[..., Any], args: tuple[object, ...]
) -> tuple[Callable[..., tuple[Any, list[Any]]], dict[int, Array]]:
    """A function as one of the arrays among its arguments, and these, by their places.

    It returns what the function does, and what that wrote into its arguments.
    """
    tree = import_module("jax").tree_util
    leaves, structure = tree.tree_flatten(args, opaque_in(args))
    given = {at: leaf for at, leaf in enumerate(leaves) if _is_array(leaf)}

    def call(*arrays: Array) -> tuple[Any, list[Any]]:
        traced = dict(zip(given, arrays, strict=True))
        own = [traced.get(at, leaf) for at, leaf in enumerate(leaves)]
        arguments = structure.unflatten(own)
        made = fn(*arguments)
        # NNX's functions change their models in place: what they wrote is a result, too.
        written = tree.tree_leaves(arguments, opaque_in(arguments))
        return made, [leaf for leaf in written if all(leaf is not each for each in own)]

    return call, given


def locate_closure(
    closure: Callable[[], object], layers: Mapping[str, Any], parameters: Sequence[Owned]
) -> Located | None:
    """Like :func:`locate_jax`, for a function without arguments that uses a model of Keras.

    Args:
        closure: the function. An Inf or NaN counts that reaches one of its results.
        layers: the layers of the model, by name.
        parameters: its parameters; the tensor of each is its array.
    """
    jax: Any = import_module("jax")
    is_auxiliary = list[bool]()

    def results_of_closure() -> list[Any]:
        results, is_auxiliary[:] = _results_of(closure())
        return results

    seam = JaxSeam(layers, parameters)
    seam.run(jax.make_jaxpr(results_of_closure)(), {}, is_auxiliary)
    found = seam.located
    if found is None or found.operation is None:
        return found
    return replace(found, operation=canonical(found.operation))


def _results_of(made: object, written: Iterable[object] = ()) -> tuple[list[Any], list[bool]]:
    """The arrays that a function made, with those it wrote, and which are beside the loss."""
    leaves_of = import_module("jax").tree_util.tree_leaves
    num_beside = len(leaves_of(_auxiliary(made)))  # which follow the loss
    leaves = [*leaves_of(made), *written]
    found = [(leaf, 0 < at <= num_beside) for at, leaf in enumerate(leaves) if _is_array(leaf)]
    return [leaf for leaf, _ in found], [is_beside for _, is_beside in found]


def _auxiliary(made: Any) -> Any:
    """What is beside the loss in what ``jax.value_and_grad(..., has_aux=True)`` returns."""
    pair: Any = made[0] if type(made) is tuple and len(made) == 2 else ()
    is_pair = type(pair) is tuple and len(pair) == 2
    return pair[1] if is_pair and getattr(pair[0], "shape", None) == () else ()


def _is_array(leaf: object) -> bool:
    """Whether a leaf is an array; a Python number is not, as it may decide the control flow."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")
