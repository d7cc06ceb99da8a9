"""The arrays of one framework, named by GRADSCALER_FRAMEWORK; NumPy's where it is not set."""

import importlib
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest

from gradscaler import NonfiniteGradient
from gradscaler.diagnose import exponents, inspect, locate

# Users see counts only, and not the elements that are counted.
from gradscaler.diagnose._gradients.arrays import sample_of, to_numpy
from gradscaler.diagnose._gradients.reading import are_finite

FRAMEWORK = os.environ.get("GRADSCALER_FRAMEWORK", "numpy")
TORCH_LIKE = ("torch", "tensorplay")
HALVES = ["float16", "bfloat16"]
VALUES = np.float32([[0.0, 2.0**-26, 3.0, -4.0], [65504.0, math.inf, math.nan, -math.inf]])


def only(*frameworks):
    return pytest.mark.skipif(FRAMEWORK not in frameworks, reason=f"of {', '.join(frameworks)}")


LIBRARY = importlib.import_module(
    {"jax": "jax.numpy", "tf_keras": "tensorflow"}.get(FRAMEWORK, FRAMEWORK)
)
MAKERS = {
    ("numpy", "jax"): lambda values, dtype: LIBRARY.asarray(values).astype(dtype),
    TORCH_LIKE: lambda values, dtype: LIBRARY.tensor(values).to(getattr(LIBRARY, dtype)),
    ("paddle",): lambda values, dtype: LIBRARY.to_tensor(values).astype(dtype),
    ("mindspore",): lambda values, dtype: LIBRARY.Tensor(values, dtype=getattr(LIBRARY, dtype)),
    ("keras",): lambda values, dtype: LIBRARY.ops.convert_to_tensor(values, dtype),
    ("tf_keras",): lambda values, dtype: LIBRARY.cast(LIBRARY.constant(values), dtype),
}
(make,) = (maker for frameworks, maker in MAKERS.items() if FRAMEWORK in frameworks)
DTYPES = ["float16", "float32"] if FRAMEWORK == "numpy" else [*HALVES, "float32"]


def as_in(dtype, values=VALUES):
    """The values in float32 after a cast to a dtype."""
    if dtype != "bfloat16":
        return values.astype(dtype).astype(np.float32)
    kept = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert np.array_equal(kept, np.where(values == 65504, 65280, values), equal_nan=True)
    return np.where(values == 65504, np.float32(65536), values)  # rounded, not cut off


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_comes_to_the_host_with_its_values(dtype):
    array = make(VALUES, dtype)
    host = to_numpy(array)
    assert host.dtype == (np.float16 if dtype == "float16" else np.float32)
    np.testing.assert_array_equal(host, as_in(dtype))


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
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_sum_of_squares_is_finite_only_if_each_number_is(dtype, bad):
    fine = make(VALUES[:1], dtype)
    assert are_finite([fine, None, fine])
    assert not are_finite([fine, make(np.float32([3, bad, 0]), dtype)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 17, 1_000, 70_001])
def test_a_sum_of_squares_shows_one_bad_number_wherever_it_is(dtype, size):
    assert are_finite([make(np.zeros(size, np.float32), dtype)])
    for place in {0, size // 2, size - 1}:
        for bad in (math.inf, -math.inf, math.nan):
            values = np.zeros(size, np.float32)
            values[place] = bad
            assert not are_finite([make(values, dtype)])


def test_numbers_whose_squares_overflow_are_not_told_apart_from_an_inf():
    assert not are_finite([make(np.float32([1e30]), "float32")])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_is_picked_in_the_framework_as_numpy_picks_it(dtype):
    values = np.arange(120, dtype=np.float32).reshape(4, 30)
    sample = sample_of(make(values, dtype), 16)
    np.testing.assert_array_equal(sample, sample_of(values, 16))


def test_scalars_and_empty_arrays_have_exponents():
    found = exponents([make(np.float32(4.0), "float32"), make(np.zeros((0, 3), "f4"), "float32")])
    assert (found.total.size, found.total.first, found.total.counts.tolist()) == (1, 2, [1])


@only(*TORCH_LIKE, "paddle")
def test_a_module_stands_for_the_gradients_of_its_parameters():
    nn = LIBRARY.nn
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    model[0](make(np.float32([[math.inf, math.inf]]), "float32")).sum().backward()
    assert list(exponents(model).parameters) == ["0.weight", "0.bias"]
    (found,) = inspect(model)
    assert (found.name, math.prod(found.shape), found.dtype) == ("0.weight", 2, "float32")
    assert (found.num_inf, found.num_nan) == (2, 0)
    assert math.isnan(found.largest_finite)


def line_marked(mark):
    """The line of this file that ends with a mark, as a location names it."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))
    return f"{Path(__file__).relative_to(Path.cwd())}:{number}"


@only("tensorplay")
def test_locate_finds_a_tensorplay_module_and_leaves_the_model_as_it_was():
    nn = LIBRARY.nn

    class Root(nn.Module):
        def forward(self, inputs):
            return LIBRARY.sqrt(inputs * 0 + self.square)  # A

    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(inplace=True), Root()
    )
    inputs = LIBRARY.ones((3, 4))

    def everything():
        values = {name: value.numpy().tolist() for name, value in model.state_dict().items()}
        return values, LIBRARY.get_rng_state().numpy().tolist()

    before = everything()
    for square, found in (
        (1.0, None),
        (-1.0, f"forward of 4 (Root, float32), sqrt at {line_marked('A')}: 12 nan of 12; "),
    ):
        model[4].square = square
        located = locate(model, lambda: model(inputs).sum().backward())
        assert located is None if found is None else str(located).startswith(found)
        assert everything() == before
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not any(module._forward_hooks for module in model.modules())


@only("paddle")
@pytest.mark.filterwarnings("ignore:When training, we now always track:UserWarning")
def test_locate_finds_a_paddle_layer_and_leaves_the_model_as_it_was():
    nn = LIBRARY.nn

    class Powers(nn.Layer):
        def forward(self, inputs):
            return self.last(inputs * 1e30)

    class Times(nn.Layer):
        def forward(self, inputs):
            return inputs * self.factor  # B

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1D(4), nn.Dropout(0.5), Powers())
    model[3].last = Times()
    inputs = LIBRARY.rand([3, 4])

    def everything():
        values = {name: value.numpy().tolist() for name, value in model.state_dict().items()}
        states = map(str, LIBRARY.get_rng_state())
        return values, [re.sub("0x[0-9a-f]+", "", state) for state in states]  # not the address

    before = everything()
    for factor, found in (
        (1.0, None),
        (1e30, f"forward of 3.last (Times, float32), mul at {line_marked('B')}: "),
    ):
        model[3].last.factor = factor
        located = locate(model, lambda: model(inputs).sum().backward())
        assert located is None if found is None else str(located).startswith(found)
        assert everything() == before
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not any(layer._forward_post_hooks for layer in model.sublayers(include_self=True))


@only(*TORCH_LIKE, "paddle")
def test_a_parameter_itself_is_an_array_too():
    layer = LIBRARY.nn.Linear(2, 3)
    assert exponents(layer.weight).total.size == 6
    assert sample_of(layer.weight, 2).shape[0] == 2


@only("torch")
def test_torch_tensors_on_the_host_are_not_copied():
    tensor = LIBRARY.ones(3, requires_grad=True)
    assert np.shares_memory(to_numpy(tensor), tensor.detach().numpy())


@only("torch", "jax")
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_read(dtype):
    array = make(np.float32([1.5, -0.0, 2.0**-6, 448.0]), dtype)
    assert exponents(array).total.size == 4
    assert sample_of(array, 2).tolist() == [1.5, 448.0]
    assert inspect([make(np.float32([1.5, math.nan]), dtype)])[0].dtype == dtype


@only("torch")
def test_torch_integers_stay_exact():
    assert to_numpy(LIBRARY.tensor([2**40 + 1])).tolist() == [2**40 + 1]


@only("torch")
def test_torch_lazy_conjugates_and_negatives_are_read():
    numbers = LIBRARY.tensor([1 + 2j, 3 - 4j]).conj()
    assert to_numpy(numbers).tolist() == [[1, -2], [3, 4]]
    assert to_numpy(numbers.imag).tolist() == [-2, 4]


def sparse_gradient(slope=1.0):
    """The gradient of a table of 5 rows, where row 1 is used twice and row 3 once."""
    if FRAMEWORK == "mindspore":
        from mindspore.common.sparse_tensor import RowTensorInner

        return RowTensorInner(
            make([1, 1, 3], "int64"), make(np.full((3, 2), slope), "float32"), (5, 2)
        )
    if FRAMEWORK == "tf_keras":
        table = LIBRARY.Variable(LIBRARY.ones((5, 2)))
        with LIBRARY.GradientTape() as tape:
            loss = slope * LIBRARY.reduce_sum(LIBRARY.gather(table, [1, 1, 3]))
        return tape.gradient(loss, table)
    embedding = LIBRARY.nn.Embedding(5, 2, sparse=True)
    (slope * embedding(make([1, 1, 3], "int64")).sum()).backward()
    return embedding.weight.grad


@only("torch", "paddle", "mindspore", "tf_keras")
def test_a_sparse_gradient_is_its_values_with_the_rows_of_one_index_summed():
    grad = sparse_gradient()
    assert list(exponents([grad]).parameters) == ["0"]
    assert to_numpy(grad).tolist() == [[2, 2], [1, 1]]
    assert exponents({"table": grad}).total.counts.tolist() == [2, 2]
    assert sample_of(grad, 1).tolist() == [2]
    if FRAMEWORK != "paddle":  # whose rows know nothing of their table
        (found,) = inspect([sparse_gradient(math.inf)])
        assert (found.dtype, found.shape, found.num_inf) == ("float32", (5, 2), 4)


@only("tf_keras")
def test_rows_of_a_table_of_unknown_size_have_their_own_shape():
    grad = sparse_gradient(math.inf)
    (found,) = inspect([type(grad)(grad.values, grad.indices)])
    assert found.shape == (3, 2)


# PyTorch says of every such tensor that its support is new.
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@only(*TORCH_LIKE, "paddle")
def test_an_array_of_compressed_rows_becomes_its_values():
    rows = make(VALUES, "float32").to_sparse_csr()
    (found,) = inspect({"w": rows})
    assert (found.shape, found.num_inf, found.num_nan) == ((2, 4), 2, 1)
    assert exponents(rows).total.size == 7  # of 8 one is zero


@only("torch")
def test_a_torch_tensor_without_elements_is_refused():
    for look in (exponents, inspect):
        with pytest.raises(TypeError, match="meta device holds no elements"):
            look({"w": LIBRARY.ones(3, device="meta")})


@only("torch")
def test_a_distributed_torch_tensor_is_the_part_that_this_process_holds(tmp_path):
    import torch.distributed as dist
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        tensor = distribute_tensor(LIBRARY.ones(3), init_device_mesh("cpu", (1,)))
        assert inspect({"w": tensor * math.inf})[0].num_inf == 3
    finally:
        dist.destroy_process_group()


@only("mindspore")
def test_a_mindspore_parameter_is_an_array():
    parameter = LIBRARY.Parameter(make([1.0, 2.0], "float32"), name="w")
    assert exponents([parameter]).total.counts.tolist() == [1, 1]


@only("keras", "tf_keras")
@pytest.mark.parametrize("dtype", DTYPES)
def test_keras_variables_are_arrays(dtype):
    layers = importlib.import_module(FRAMEWORK).layers
    layer = layers.Dense(3, dtype=dtype, kernel_initializer="ones")
    layer.build((None, 2))
    assert to_numpy(layer.kernel).tolist() == [[1, 1, 1], [1, 1, 1]]
    assert sample_of(layer.kernel, 2).tolist() == [1, 1]
    found = exponents({variable.name: variable for variable in layer.trainable_variables})
    assert [histogram.size for histogram in found.parameters.values()] == [6, 3]
    layer.kernel.assign(np.full((2, 3), np.inf))
    (found,) = inspect([layer.kernel])
    assert (found.shape, found.dtype, found.num_inf) == ((2, 3), dtype, 6)


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
    assert list(exponents(layer).parameters) == ["w"]
    assert list(exponents(Layer(layer, None)).parameters) == ["w.w"]
    assert list(exponents({"a": [layer], "b": layer}).parameters) == ["a.0.w", "b.w"]
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    grads = nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(model)
    sizes = {name: histogram.size for name, histogram in exponents(grads).parameters.items()}
    assert sizes == {"bias": 3, "kernel": 6}
    with pytest.raises(TypeError, match="layer is <object"):
        exponents({"layer": object()})


@only("jax")
def test_the_gradient_of_an_integer_is_left_out():
    import jax

    function = jax.grad(lambda arguments: arguments["x"] * 2.0, allow_int=True)
    grads = function({"x": 1.0, "n": 3})
    assert list(exponents(grads).parameters) == ["x"]
    assert exponents(grads).total.size == 1
