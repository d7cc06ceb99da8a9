"""Each of TensorFlow's strategies trains as one device does, whichever replica overflows."""

import functools
import itertools

import numpy as np
import pytest

from tests.support.keras_like import BACKEND, KERAS_3, LossScaleOptimizer, Variable, keras, mirrored
from tests.support.ranks import free_ports

if BACKEND != "tensorflow":
    pytest.skip("of TensorFlow", allow_module_level=True)

import tensorflow as tf

WORLD = 2
STEPS = 6
BAD_STEPS = (1, 3)
INPUTS = np.random.default_rng(0).standard_normal((STEPS, 2 * WORLD, 2)).astype("float32")
NAMES = ["new"] if KERAS_3 else ["new", "legacy"]
OPTIMIZERS = {
    "SGD": {"learning_rate": 0.1, "momentum": 0.9},
    "Adam": {"learning_rate": 0.1},
}
each_case = pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in NAMES for name in OPTIMIZERS]
)
each_replica = pytest.mark.parametrize("bad", range(WORLD))


def steps(strategy, family, name, bad, call=lambda run, *args: run(*args)):
    """The scale, the counters and the weights after each step; all replicas agree on them."""
    family = keras.optimizers if family == "new" else keras.optimizers.legacy
    with strategy.scope():
        weights = Variable(np.ones((2, 1), "float32"))
        inner = getattr(family, name)(**OPTIMIZERS[name])
        optimizer = LossScaleOptimizer(inner, initial_scale=8.0, dynamic_growth_steps=2)
        if KERAS_3:
            optimizer.build([weights])

    def step(inputs, is_bad_step):
        context = tf.distribute.get_replica_context()
        replica, count = context.replica_id_in_sync_group, context.num_replicas_in_sync
        share = tf.reshape(inputs, (count, -1, 2))[replica]
        overflows = is_bad_step & ((replica == bad) | (count == 1))

        def loss():
            outputs = share @ tf.convert_to_tensor(weights)
            return tf.reduce_sum(outputs**2) * tf.where(overflows, np.inf, 1.0)

        optimizer.minimize(loss, [weights])

    @tf.function
    def run(inputs, is_bad_step):
        strategy.run(step, args=(inputs, is_bad_step))

    seen = []
    for index, inputs in enumerate(INPUTS):
        call(run, tf.constant(inputs), tf.constant(index in BAD_STEPS))
        variables = [optimizer.dynamic_counter, optimizer.iterations, weights]
        if KERAS_3:
            variables = [each.value for each in (*variables, optimizer.dynamic_scale)]
        per_variable = [
            [each.numpy() for each in strategy.experimental_local_results(variable)]
            for variable in variables
        ]
        assert all(np.array_equal(each, first) for first, *rest in per_variable for each in rest)
        counter, iterations, values = (first for first, *_ in per_variable[:3])
        seen.append((float(optimizer.loss_scale), int(counter), int(iterations), values))
    return seen


@functools.cache
def on_one_device(family, name):
    seen = steps(tf.distribute.get_strategy(), family, name, None)
    assert [scale for scale, *_ in seen] == [8.0, 4.0, 4.0, 2.0, 2.0, 4.0]
    assert [counter for _, counter, *_ in seen] == [1, 0, 1, 0, 1, 0]
    values = [value for *_, value in seen]
    moved = [not np.array_equal(*pair) for pair in itertools.pairwise(values)]
    assert moved == [False, True, False, True, True]
    return seen


def assert_the_same(seen, family, name):
    for found, expected in zip(seen, on_one_device(family, name), strict=True):
        assert found[:3] == expected[:3]
        assert np.allclose(found[3], expected[3], rtol=1e-5)


def in_replicas(family, name, bad):
    return steps(mirrored(), family, name, bad)


@each_case
@each_replica
def test_mirrored(ranks, family, name, bad):
    (seen,) = ranks(1, strategy="mirrored").run(in_replicas, family, name, bad)
    assert_the_same(seen, family, name)


@functools.cache
def workers():
    return tf.distribute.MultiWorkerMirroredStrategy()


def in_a_worker(family, name, bad):
    assert workers().num_replicas_in_sync == WORLD
    return steps(workers(), family, name, bad)


@each_case
@each_replica
def test_multi_worker_mirrored(ranks, family, name, bad):
    first, second = ranks(WORLD).run(in_a_worker, family, name, bad)
    assert_the_same(first, family, name)
    assert str(first) == str(second)


@functools.cache
def parameter_server():
    def server(job, index):
        return tf.distribute.Server(cluster, job_name=job, task_index=index, protocol="grpc")

    *workers, ps = (f"127.0.0.1:{port}" for port in free_ports(3))
    cluster = tf.train.ClusterSpec({"worker": workers, "ps": [ps]})
    servers = [server("worker", 0), server("worker", 1), server("ps", 0)]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    return strategy, tf.distribute.coordinator.ClusterCoordinator(strategy), servers


def in_a_coordinator(family, name):
    strategy, coordinator, _ = parameter_server()

    def call(run, *args):
        coordinator.schedule(run, args)
        coordinator.join()

    return steps(strategy, family, name, None, call)


@pytest.mark.skipif(not KERAS_3, reason="refused with Keras 2, which keeps one scale for many")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameter_server(ranks, name):
    (seen,) = ranks(1).run(in_a_coordinator, "new", name)
    assert_the_same(seen, "new", name)


def refused():
    for family in NAMES:
        with pytest.raises(ValueError, match=r"not supported with .*ParameterServerStrategy"):
            in_a_coordinator(family, "SGD")


@pytest.mark.skipif(KERAS_3, reason="of Keras 2")
def test_keras_2_refuses_a_parameter_server(ranks):
    ranks(1).run(refused)
