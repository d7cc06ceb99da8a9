"""Operations that Keras lacks, for the backend in use; no other backend is imported.

:data:`on_backend` is the module of that backend. Each such module has these functions:

``all_finite(gradients)``
    Whether no gradient holds an Inf or a NaN, a boolean scalar tensor. A gradient of None counts
    as finite.
``apply_if_finite(optimizer, apply, gradients, variables, amax)``
    Call ``apply(gradients, variables)`` if all gradients of all replicas are finite; in either case
    then call ``optimizer._move_scale(found_inf, amax)``. ``amax`` is the largest gradient of this
    replica, which is replaced by the largest of all replicas; for most policies it is None.
``build(optimizer, variables)``
    Build the inner optimizer for the variables.
``check_compiled(scale)``
    Raise CallOrderError if the code that is being compiled would treat this variable as a constant.
``divide(gradient, scale)``
    The quotient, computed in float32 or wider.
``gradients(loss, scale_loss, variables, tape)``
    The gradients of the scaled loss, and the variables, both as lists. If the backend can compute
    the loss without knowing the variables, it calls ``variables`` after ``loss``, because ``loss``
    may create them.
``largest(gradients)``
    The largest magnitude, a float32 scalar tensor; 0 without gradients.
``multiply(loss, scale)``
    The product, computed in float32 or wider.
"""

from importlib import import_module

import keras

BACKEND = keras.backend.backend()

if BACKEND not in ("tensorflow", "jax", "torch"):
    raise NotImplementedError(
        f"gradscaler.keras needs Keras on TensorFlow, JAX or PyTorch, not on {BACKEND!r}"
    )

on_backend = import_module(f"gradscaler.keras._operations.on_{BACKEND}")
