"""What Keras has no operation for, on the backend in use; no other backend is imported.

:data:`on_backend` is the module of that backend. Each has the same functions:

``all_finite(gradients)``
    A boolean scalar tensor. A gradient of None counts as finite.
``apply_if_finite(optimizer, apply, gradients, variables, amax)``
    ``apply(gradients, variables)``, without any effect unless all gradients of all replicas are
    finite; then ``optimizer._move_scale(found_inf, amax)``. ``amax`` is None for most policies;
    otherwise that of this replica, and the scale moves by the largest of all replicas.
``build(optimizer, variables)``
    ``optimizer.build(variables)``, of the inner optimizer.
``check_compiled(scale)``
    An error if the code that is being compiled would keep the value that this variable has now.
``divide(gradient, scale)``
    Computed in float32 at least.
``gradients(loss, scale_loss, variables, tape)``
    The gradients of the scaled loss, and the variables, both as lists. ``variables`` is called
    after ``loss``, which may create them, where the backend can compute the loss without them.
``largest(gradients)``
    The largest magnitude, a float32 scalar tensor; 0 without gradients.
``multiply(loss, scale)``
    In float32 at least.
"""

from importlib import import_module

import keras

BACKEND = keras.backend.backend()

if BACKEND not in ("tensorflow", "jax", "torch"):
    raise NotImplementedError(
        f"gradscaler.keras needs Keras on TensorFlow, JAX or PyTorch, not on {BACKEND!r}"
    )

on_backend = import_module(f"gradscaler.keras._operations.on_{BACKEND}")
