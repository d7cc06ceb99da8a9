"""What Keras has no operation for, on the backend in use; no other backend is imported.

The module of each backend has the same functions:

``all_finite(gradients)``
    A boolean scalar tensor. A gradient of None counts as finite.
``apply_if_finite(optimizer, gradients, variables, unscale, update)``
    ``optimizer.inner_optimizer.apply(unscale(gradients), variables)``, without any effect unless
    all gradients of all replicas are finite; then ``update(found_inf, known)``, ``known`` being
    its value within a branch on it.
``divide(gradient, scale)``
    Computed in float32 at least.
``gradients(loss, scale_loss, var_list, tape)``
    The gradients of the scaled loss, and the variables, both as lists.
``multiply(loss, scale)``
    In float32 at least.
``where(condition, a, b)``
    The backend's own, of tensors and numbers.
"""

import keras

if keras.backend.backend() == "tensorflow":
    from gradscaler.keras.operations.on_tensorflow import (
        all_finite,
        apply_if_finite,
        divide,
        gradients,
        multiply,
        where,
    )
elif keras.backend.backend() == "jax":
    from gradscaler.keras.operations.on_jax import (
        all_finite,
        apply_if_finite,
        divide,
        gradients,
        multiply,
        where,
    )
elif keras.backend.backend() == "torch":
    from gradscaler.keras.operations.on_torch import (
        all_finite,
        apply_if_finite,
        divide,
        gradients,
        multiply,
        where,
    )
else:
    raise NotImplementedError(
        "gradscaler.keras needs Keras on TensorFlow, JAX or PyTorch, not on "
        f"{keras.backend.backend()!r}"
    )

__all__ = ["all_finite", "apply_if_finite", "divide", "gradients", "multiply", "where"]
