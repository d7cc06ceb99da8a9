"""Training loops that Keras' users write themselves, each in the way of its backend."""

import keras
import numpy as np
import pytest

from gradscaler import CallOrderError
from gradscaler.keras import LossScaleOptimizer
from tests.support.keras_like import BACKEND, FINITE, OVERFLOW, numpy, stepper

SGD = keras.optimizers.SGD


def _with_state():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(4, kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dropout(0.5, seed=0),
            layers.Dense(1),
            layers.ActivityRegularization(l2=0.1),
        ]
    )


def test_minimize_updates_all_that_the_loss_changes():
    """Statistics and seeds change, and the losses of layers count, as in Keras' own loop."""
    inputs = np.random.default_rng(0).random((8, 4)).astype("float32")
    ours, expected = _with_state(), _with_state()
    optimizer = LossScaleOptimizer(SGD(0.1), initial_scale=8.0)

    def loss():
        return keras.ops.mean(ours(inputs, training=True) ** 2) + sum(ours.losses)

    for _ in range(2):
        optimizer.minimize(loss, ours.trainable_variables)
    expected.compile(SGD(0.1), loss="mse")
    expected.fit(inputs, np.zeros((8, 1)), batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert len(ours.non_trainable_variables) == 3
    for found, variable in zip(ours.variables, expected.variables, strict=True):
        assert np.allclose(numpy(found), numpy(variable), rtol=1e-5, atol=1e-6), variable.path


def sparse(values, rows, dtype="float32"):
    """A gradient of four rows in the sparse format of the backend; rows may repeat."""
    values = np.array(values, dtype)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.IndexedSlices(tf.constant(values), tf.constant(rows), tf.constant([4, 2]))
    if BACKEND == "jax":
        import jax
        from jax.experimental.sparse import BCOO

        return BCOO(tuple(map(jax.numpy.array, (values, np.array(rows)[:, None]))), shape=(4, 2))
    import torch

    return torch.sparse_coo_tensor([rows], torch.tensor(values), (4, 2), check_invariants=True)


@pytest.mark.parametrize("rows", [[0, 2], [2, 2]], ids=["unique", "duplicates"])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("make", [SGD, keras.optimizers.Adam])
def test_sparse_gradients_step_as_with_the_bare_optimizer(make, compiled, rows):
    if make is not SGD and (BACKEND == "torch" or (BACKEND == "jax" and compiled)):
        pytest.skip("the bare optimizer raises")
    values = np.array([[1.0, 2.0], [3.0, 4.0]])
    ours, bare = (keras.Variable(np.ones((4, 2))) for _ in range(2))
    make(0.5).apply([sparse(values, rows)], [bare])
    optimizer = LossScaleOptimizer(make(0.5), initial_scale=4.0)
    step = stepper(optimizer, [ours], compiled)
    step([sparse(values * 4, rows)])
    assert np.allclose(numpy(ours), numpy(bare))
    assert not np.array_equal(numpy(ours)[2], [1.0, 1.0])
    before = numpy(ours)
    for bad in (np.inf, -np.inf, np.nan):
        step([sparse([[1.0, bad], [1.0, 1.0]], rows)])
    assert np.array_equal(numpy(ours), before)
    assert float(optimizer.loss_scale) == 0.5
    assert int(optimizer.iterations) == 1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sparse_gradients_are_unscaled_in_float32(dtype):
    """2**30 is not a float16, nor is 2**-30."""
    optimizer = LossScaleOptimizer(SGD(), initial_scale=2.0**30)
    (grad,) = optimizer.get_unscaled_gradients([sparse([[2.0**15] * 2] * 2, [1, 3], dtype)])
    assert keras.backend.standardize_dtype(grad.dtype) == dtype
    if BACKEND == "tensorflow":
        values = grad.values
    else:
        values = grad.data if BACKEND == "jax" else grad._values()
    assert (numpy(values) == 2.0**-15).all()


@pytest.mark.skipif(BACKEND != "tensorflow", reason="of TensorFlow")
class TestTensorFlow:
    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_minimize_works_in_a_function(self, jit_compile):
        import tensorflow as tf

        variable = keras.Variable(1.0)
        optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.5), initial_scale=8.0)
        optimizer.build([variable])
        step = tf.function(
            lambda: optimizer.minimize(lambda: variable.value**2, [variable]),
            jit_compile=jit_compile,
        )
        step()
        assert np.isclose(float(variable), 0.5)

    def test_a_compiled_function_may_unscale_gradients_before_and_after_other_steps(self):
        import tensorflow as tf

        variable = tf.Variable(8.0)
        optimizer = LossScaleOptimizer(SGD(0.25))

        @tf.function
        def gradients():
            with tf.GradientTape() as tape:
                scaled = optimizer.get_scaled_loss(variable**2)
            return optimizer.get_unscaled_gradients(tape.gradient(scaled, [variable]))

        optimizer.apply_gradients(zip(gradients(), [variable], strict=True))
        assert float(variable) == 4.0
        optimizer.minimize(lambda: variable**2, [variable])
        assert float(variable) == 2.0
        optimizer.apply_gradients(zip(gradients(), [variable], strict=True))
        assert float(variable) == 1.0

    def test_stateless_steps_are_refused_as_by_keras(self, variables):
        optimizer = LossScaleOptimizer(SGD())
        optimizer.build(variables)
        with pytest.raises(ValueError, match="stateless_apply is not supported"):
            optimizer.stateless_apply([], [], [])


@pytest.mark.skipif(BACKEND != "jax", reason="of JAX")
class TestJax:
    def test_a_stateless_step_is_traced_once_though_the_scale_moves(self):
        import jax

        variable = keras.Variable([1.0, 2.0])
        optimizer = LossScaleOptimizer(SGD(0.25), initial_scale=8.0, dynamic_growth_steps=1)
        optimizer.build([variable])
        traces = []

        @jax.jit
        def step(values, state):
            traces.append(0)

            def loss(values):
                with keras.StatelessScope(zip(optimizer.variables, state, strict=True)):
                    return optimizer.scale_loss((values[0] ** 2).sum())

            scaled, grads = jax.value_and_grad(loss)(values)
            return scaled, *optimizer.stateless_apply(state, grads, values)

        values, state = [variable.value], [v.value for v in optimizer.variables]
        scaled = []
        for _ in range(3):
            loss, values, state = step(values, state)
            scaled.append(float(loss))
        assert len(traces) == 1
        assert scaled == [8 * 5, 16 * 1.25, 32 * 0.3125]
        assert float(optimizer.loss_scale) == 8.0  # nothing leaked into the object

    @pytest.mark.parametrize("arguments", [{}, {"dynamic": False}], ids=str)
    def test_a_step_of_pure_functions_follows_the_scale(self, arguments):
        import jax

        variable = keras.Variable([1.0, 2.0])
        growth = {} if arguments else {"dynamic_growth_steps": 1}
        optimizer = LossScaleOptimizer(SGD(0.25), initial_scale=8.0, **growth, **arguments)
        optimizer.build([variable])

        @jax.jit
        def step(values, state):
            def loss(values):
                return optimizer.stateless_scale_loss((values[0] ** 2).sum(), state)

            scaled, grads = jax.value_and_grad(loss)(values)
            return scaled, *optimizer.stateless_apply(state, grads, values)

        values, state = [variable.value], [v.value for v in optimizer.variables]
        scaled = []
        for _ in range(3):
            loss, values, state = step(values, state)
            scaled.append(float(loss))
        assert scaled == [8 * 5, (8 if arguments else 16) * 1.25, (8 if arguments else 32) * 0.3125]
        assert values[0].tolist() == [0.125, 0.25]
        with pytest.raises(ValueError, match=r"of which there are 6, but holds 5"):
            optimizer.stateless_scale_loss(1.0, state[1:])

    @pytest.mark.parametrize("scaled_by", ["scale_loss", "get_scaled_loss"])
    def test_a_scale_that_a_compiled_loss_would_keep_is_refused(self, scaled_by):
        """Keras' own wrapper trains with gradients of 1, 0.5, 0.25, ... of their size."""
        import jax

        optimizer = LossScaleOptimizer(SGD(0.25))
        scale = getattr(optimizer, scaled_by)

        def loss(value):
            return scale((value**2).sum())

        value = jax.numpy.ones(2)
        for traced in (jax.jit(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
            with pytest.raises(CallOrderError, match=r"optimizer\.stateless_scale_loss"):
                traced(value)
        assert not optimizer._loss_has_been_scaled
        assert jax.grad(loss)(value).tolist() == [2.0**16] * 2
        assert jax.vmap(loss)(value).tolist() == [2.0**15] * 2

    @pytest.mark.parametrize("divided_by", ["get_unscaled_gradients", "apply"])
    def test_a_scale_that_compiled_gradients_would_be_divided_by_is_refused(self, divided_by):
        """A loss scaled by ``stateless_scale_loss`` would make them 1, 2, 4, ... times as large."""
        import jax

        variable = keras.Variable([1.0, 2.0])
        optimizer = LossScaleOptimizer(SGD(0.25))
        optimizer.build([variable])
        gradients = [jax.numpy.ones(2)]
        with pytest.raises(CallOrderError, match=r"stateless_apply"):
            jax.jit(getattr(optimizer, divided_by))(gradients)
        assert numpy(variable).tolist() == [1.0, 2.0]
        assert not optimizer._gradients_have_been_unscaled

    def test_a_scale_that_does_not_move_may_be_compiled(self):
        import jax

        optimizer = LossScaleOptimizer(SGD(), dynamic=False, initial_scale=8.0)
        assert float(jax.jit(optimizer.scale_loss)(2.0)) == 16.0

    def test_it_steps_outside_a_scope(self, variables):
        """Keras' wrapper leaks tracers there."""
        optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=4.0)
        before = numpy(variables[1])
        optimizer.scale_loss(1.0)
        optimizer.apply(FINITE, variables)
        assert np.array_equal(numpy(variables[1]), before - np.float32(0.25))
        optimizer.apply(OVERFLOW, variables)
        assert np.array_equal(numpy(variables[1]), before - np.float32(0.25))
        assert float(optimizer.loss_scale) == 2.0

    def test_minimize_works_in_a_stateless_scope(self):
        """There, the variables that it does not step have values of their own."""
        import jax

        model = _with_state()
        inputs = np.ones((8, 4), "float32")
        optimizer = LossScaleOptimizer(SGD(0.1))
        stepped = model.layers[-2].trainable_variables
        optimizer.build(stepped)
        variables = [*model.variables, *optimizer.variables]

        def step(values):
            pairs = zip(variables, values, strict=True)
            with keras.StatelessScope(state_mapping=pairs) as scope:
                optimizer.minimize(
                    lambda: keras.ops.mean(model(inputs, training=True)) + sum(model.losses),
                    stepped,
                )
            return [scope.get_current_value(variable) for variable in variables]

        before = [jax.numpy.array(variable.value) for variable in variables]
        doubled = [value * 2 for value in before]
        found = jax.jit(step)(doubled)
        assert all(map(np.array_equal, map(numpy, variables), map(numpy, before)))
        for variable, value in zip(variables, doubled, strict=True):
            variable.assign(value)
        for value, expected in zip(found, step(doubled), strict=True):
            assert np.allclose(numpy(value), numpy(expected), rtol=1e-5, atol=1e-6)

    def test_minimize_takes_only_functions(self):
        optimizer = LossScaleOptimizer(SGD())
        with pytest.raises(ValueError, match="JAX differentiates functions"):
            optimizer.minimize(keras.ops.ones(()), [keras.Variable(1.0)])


@pytest.mark.skipif(BACKEND != "torch", reason="of PyTorch")
class TestTorch:
    def test_a_loop_with_backward(self):
        variable = keras.Variable([1.0, 2.0])
        optimizer = LossScaleOptimizer(SGD(0.25), initial_scale=8.0, dynamic_growth_steps=1)
        for _ in range(3):
            variable.value.grad = None
            optimizer.scale_loss((variable.value**2).sum()).backward()
            optimizer.apply([variable.value.grad], [variable])
        assert numpy(variable).tolist() == [0.125, 0.25]
        assert float(optimizer.loss_scale) == 64.0

    def test_gradients_are_not_changed_in_place(self):
        import torch

        variable = keras.Variable([1.0, 2.0])
        grad = torch.tensor([8.0, 8.0])
        optimizer = LossScaleOptimizer(SGD(), initial_scale=8.0)
        optimizer.scale_loss(1.0)
        optimizer.apply([grad], [variable])
        assert grad.tolist() == [8.0, 8.0]

    def test_minimize_takes_a_loss_without_a_tape(self):
        variable = keras.Variable(1.0)
        optimizer = LossScaleOptimizer(SGD(0.25))
        optimizer.minimize(variable.value**2, lambda: [variable])
        assert numpy(variable) == 0.5
        with pytest.raises(ValueError, match="without a tape"):
            optimizer.minimize(lambda: variable.value**2, [variable], tape=object())

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
    @pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
    def test_extremes_find_what_is_not_finite(self, dtype, bad):
        import torch

        optimizer = LossScaleOptimizer(SGD())
        grad = torch.randn(1000).to(getattr(torch, dtype))
        assert optimizer.check_finite([grad, torch.zeros(0), None])
        for place in (0, 517, 999):
            overflowed = grad.clone()
            overflowed[place] = bad
            assert not optimizer.check_finite([grad, overflowed])
        assert optimizer.check_finite([])
