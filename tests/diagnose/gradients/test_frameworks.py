"""The arrays of one framework, named by GRADSCALER_FRAMEWORK; NumPy's where it is not set."""

import importlib
import math
import os

import numpy as np
import pytest

from gradscaler import NonfiniteGradient
from gradscaler.diagnose import exponents, inspect, locate
from gradscaler.diagnose.gradients._arrays import (
    dtype_name,
    named_arrays,
    shape_of,
    strided_sample,
    to_numpy,
)

FRAMEWORK = os.environ.get("GRADSCALER_FRAMEWORK", "numpy")
HALVES = ["float16", "bfloat16"]
VALUES = np.float32([[0.0, 2.0**-26, 3.0, -4.0], [65504.0, math.inf, math.nan, -math.inf]])


def only(*frameworks):
    return pytest.mark.skipif(FRAMEWORK not in frameworks, reason=f"of {', '.join(frameworks)}")


LIBRARY = {"jax": "jax.numpy", "tf_keras": "tensorflow"}.get(FRAMEWORK, FRAMEWORK)
MAKERS = {
    "numpy": lambda np, values, dtype: np.asarray(values).astype(dtype),
    "torch": lambda torch, values, dtype: torch.tensor(values).to(getattr(torch, dtype)),
    "tensorplay": lambda tp, values, dtype: tp.tensor(values).to(getattr(tp, dtype)),
    "paddle": lambda paddle, values, dtype: paddle.to_tensor(values).astype(dtype),
    "mindspore": lambda ms, values, dtype: ms.Tensor(values, dtype=getattr(ms, dtype)),
    "jax": lambda jnp, values, dtype: jnp.asarray(values).astype(dtype),
    "keras": lambda keras, values, dtype: keras.ops.convert_to_tensor(values, dtype),
    "tf_keras": lambda tf, values, dtype: tf.cast(tf.constant(values), dtype),
}


def make(values, dtype):
    """The framework's array of those values."""
    return MAKERS[FRAMEWORK](importlib.import_module(LIBRARY), values, dtype)


DTYPES = ["float16", "float32"] if FRAMEWORK == "numpy" else [*HALVES, "float32"]


def as_in(dtype, values=VALUES):
    """What is left of float32 values in a dtype, in float32."""
    if dtype != "bfloat16":
        return values.astype(dtype).astype(np.float32)
    kept = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert np.array_equal(kept, np.where(values == 65504, 65280, values), equal_nan=True)
    return np.where(values == 65504, np.float32(65536), values)  # rounded, not cut off


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_comes_to_the_host_with_its_values_and_its_name(dtype):
    array = make(VALUES, dtype)
    host = to_numpy(array)
    assert host.dtype == (np.float16 if dtype == "float16" else np.float32)
    np.testing.assert_array_equal(host, as_in(dtype))
    assert (dtype_name(array), shape_of(array)) == (dtype, (2, 4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_exponents_are_those_of_the_same_numbers_in_numpy(dtype):
    found = exponents({"layer": [make(VALUES, dtype)]}, scale=2.0)
    expected = exponents(as_in(dtype), scale=2.0)
    assert str(found).splitlines()[1:] != []
    assert list(found.parameters) == ["layer.0"]
    for name in ("zero", "flushed", "subnormal", "normal", "overflow", "inf", "nan"):
        assert getattr(found.total, f"num_{name}") == getattr(expected.total, f"num_{name}")
    assert found.total.counts.tolist() == expected.total.counts.tolist()
    assert found.total.largest == expected.total.largest == as_in(dtype)[1, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_inspect_names_the_arrays_that_are_not_finite(dtype):
    gradients = {"fine": make(VALUES[:1], dtype), "bad": make(VALUES, dtype)}
    largest = float(as_in(dtype)[1, 0])
    assert inspect(gradients) == (NonfiniteGradient("bad", (2, 4), dtype, 2, 1, largest),)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_is_picked_in_the_framework_as_numpy_picks_it(dtype):
    values = np.arange(120, dtype=np.float32).reshape(4, 30)
    sample = strided_sample(make(values, dtype), 16)
    assert FRAMEWORK == "numpy" or not isinstance(sample, np.ndarray)
    assert dtype_name(sample) == dtype
    np.testing.assert_array_equal(to_numpy(sample), strided_sample(values, 16))


def test_scalars_and_empty_arrays_have_exponents():
    found = exponents([make(np.float32(4.0), "float32"), make(np.zeros((0, 3), "f4"), "float32")])
    assert (found.total.size, found.total.first, found.total.counts.tolist()) == (1, 2, [1])


@only("torch", "tensorplay", "paddle")
def test_a_module_stands_for_its_parameters_gradients():
    library = importlib.import_module(FRAMEWORK)
    model = library.nn.Sequential(library.nn.Linear(2, 1), library.nn.Linear(1, 1))
    model[0](make(np.float32([[math.inf, math.inf]]), "float32")).sum().backward()
    assert list(named_arrays(model)) == ["0.weight", "0.bias"]
    (found,) = inspect(model)
    assert (found.name, math.prod(found.shape), found.dtype) == ("0.weight", 2, "float32")
    assert (found.num_inf, found.num_nan) == (2, 0)
    assert math.isnan(found.largest_finite)


@only("tensorplay")
def test_locate_finds_a_module_of_tensorplay_s_and_leaves_the_model_as_it_was():
    import tensorplay
    from tensorplay import nn

    class Root(nn.Module):
        def forward(self, inputs):
            return tensorplay.sqrt(inputs * 0 + self.square)

    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(inplace=True), Root()
    )
    inputs = tensorplay.ones((3, 4))

    def everything():
        values = {name: value.numpy().tolist() for name, value in model.state_dict().items()}
        return values, tensorplay.get_rng_state().numpy().tolist()

    before = everything()
    for square, found in (
        (1.0, None),
        (0.0, "backward of 4 (Root, float32): 12 nan of 12; largest gradient 1"),
        (math.nan, "forward of 4 (Root, float32): 12 nan of 12; largest input"),
    ):
        model[4].square = square
        located = locate(model, lambda: model(inputs).sum().backward())
        assert located is None if found is None else str(located).startswith(found)
        assert everything() == before
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not any(module._forward_hooks for module in model.modules())


@only("torch", "tensorplay", "paddle")
def test_a_parameter_itself_is_an_array_too():
    layer = importlib.import_module(FRAMEWORK).nn.Linear(2, 3)
    assert exponents(layer.weight).total.size == 6
    assert strided_sample(layer.weight, 2).shape[0] == 2


@only("torch")
def test_torch_tensors_on_the_host_are_not_copied():
    import torch

    tensor = torch.ones(3, requires_grad=True)
    assert np.shares_memory(to_numpy(tensor), tensor.detach().numpy())


@only("torch", "jax")
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_read(dtype):
    array = make(np.float32([1.5, -0.0, 2.0**-6, 448.0]), dtype)
    assert dtype_name(array) == dtype
    assert exponents(array).total.size == 4
    assert to_numpy(strided_sample(array, 2)).tolist() == [1.5, 448.0]
    assert inspect([make(np.float32([1.5, math.nan]), dtype)])[0].dtype == dtype


@only("torch")
def test_torch_s_integers_stay_exact():
    import torch

    assert to_numpy(torch.tensor([2**40 + 1])).tolist() == [2**40 + 1]


@only("torch")
def test_torch_s_lazy_conjugates_and_negatives_are_read():
    import torch

    numbers = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert to_numpy(numbers).tolist() == [[1, -2], [3, 4]]
    assert to_numpy(numbers.imag).tolist() == [-2, 4]


def sparse_gradient():
    """The gradient of a table of 5 rows, where row 1 is used twice and row 3 once."""
    if FRAMEWORK == "mindspore":
        from mindspore import Tensor
        from mindspore.common.sparse_tensor import RowTensorInner

        return RowTensorInner(Tensor([1, 1, 3]), Tensor(np.ones((3, 2), np.float32)), (5, 2))
    library = importlib.import_module(LIBRARY)
    if FRAMEWORK == "tf_keras":
        table = library.Variable(library.ones((5, 2)))
        with library.GradientTape() as tape:
            loss = library.reduce_sum(library.gather(table, [1, 1, 3]))
        return tape.gradient(loss, table)
    embedding = library.nn.Embedding(5, 2, sparse=True)
    embedding(make([1, 1, 3], "int64")).sum().backward()
    return embedding.weight.grad


@only("torch", "paddle", "mindspore", "tf_keras")
def test_a_sparse_gradient_is_its_values_those_of_one_index_summed():
    grad = sparse_gradient()
    assert list(named_arrays([grad])) == ["0"]
    assert to_numpy(grad).tolist() == [[2, 2], [1, 1]]
    assert exponents({"table": grad}).total.counts.tolist() == [2, 2]
    assert to_numpy(strided_sample(grad, 1)).tolist() == [2]
    if FRAMEWORK != "paddle":  # whose rows know nothing of their table
        assert (dtype_name(grad), shape_of(grad)) == ("float32", (5, 2))


@only("tf_keras")
def test_rows_of_a_table_of_unknown_size_have_their_own_shape():
    grad = sparse_gradient()
    assert shape_of(type(grad)(grad.values, grad.indices)) == (3, 2)


# PyTorch says of every such tensor that its support is new.
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@only("torch", "tensorplay", "paddle")
def test_an_array_of_compressed_rows_becomes_its_values():
    rows = make(VALUES, "float32").to_sparse_csr()
    (found,) = inspect({"w": rows})
    assert (found.shape, found.num_inf, found.num_nan) == ((2, 4), 2, 1)
    assert exponents(rows).total.size == 7  # of 8 one is zero


@only("torch")
def test_a_torch_tensor_without_elements_is_refused():
    import torch

    for look in (exponents, inspect):
        with pytest.raises(TypeError, match="meta device holds no elements"):
            look({"w": torch.ones(3, device="meta")})


@only("torch")
def test_a_distributed_torch_tensor_is_this_process_s_part_of_it(tmp_path):
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        tensor = distribute_tensor(torch.ones(3), init_device_mesh("cpu", (1,)))
        assert inspect({"w": tensor * math.inf})[0].num_inf == 3
    finally:
        dist.destroy_process_group()


@only("mindspore")
def test_a_mindspore_parameter_is_an_array():
    from mindspore import Parameter, Tensor

    assert exponents([Parameter(Tensor([1.0, 2.0]), name="w")]).total.counts.tolist() == [1, 1]


@only("tf_keras")
def test_tf_keras_variables_are_arrays():
    import tf_keras

    layer = tf_keras.layers.Dense(3)
    layer.build((None, 2))
    found = exponents({variable.name: variable for variable in layer.trainable_variables})
    assert [histogram.size for histogram in found.parameters.values()] == [6, 3]
    assert to_numpy(strided_sample(layer.kernel, 2)).shape == (2,)


@only("keras")
@pytest.mark.parametrize("dtype", HALVES)
def test_keras_variables_are_arrays(dtype):
    import keras

    layer = keras.layers.Dense(3, dtype=dtype, kernel_initializer="ones")
    layer.build((None, 2))
    assert dtype_name(layer.kernel) == dtype
    assert to_numpy(layer.kernel).tolist() == [[1, 1, 1], [1, 1, 1]]
    assert to_numpy(strided_sample(layer.kernel, 2)).tolist() == [1, 1]
    found = exponents({variable.path: variable for variable in layer.trainable_variables})
    assert [histogram.size for histogram in found.parameters.values()] == [6, 3]


@only("jax")
def test_pytrees_of_other_kinds_have_their_paths_for_names():
    import flax.struct
    import jax
    import jax.numpy as jnp
    from flax import nnx

    @flax.struct.dataclass
    class Layer:
        w: jax.Array
        b: jax.Array | None

    layer = Layer(jnp.ones(2), None)
    assert list(named_arrays(layer)) == ["w"]
    assert list(named_arrays({"a": [layer], "b": layer})) == ["a.0.w", "b.w"]
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    grads = nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(model)
    assert {name: h.size for name, h in exponents(grads).parameters.items()} == {
        "bias": 3,
        "kernel": 6,
    }
    with pytest.raises(TypeError, match="layer is <object"):
        named_arrays({"layer": object()})


@only("jax")
def test_the_gradient_of_an_integer_is_left_out():
    import jax

    def function(arguments):
        return arguments["x"] * 2.0

    grads = jax.grad(function, allow_int=True)({"x": 1.0, "n": 3})
    assert list(named_arrays(grads)) == ["x"]
    assert exponents(grads).total.size == 1
