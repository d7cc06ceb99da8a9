"""The names, dtypes and elements (as NumPy arrays) of gradients of any framework.

Each framework is recognized by the methods of its arrays. No framework is imported.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import count
from numbers import Number
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = Any

MOST_SAMPLED = 2**12  # elements of one array; they show a share of 1 % to within 0.3 %
_UNKNOWN_TO_NUMPY = ("bfloat16", "float8")
_OVERWRITTEN = "_overwrite_with_gradient"  # flax's collection, or its NNX type of variable


def named_arrays(gradients: object) -> dict[str, Array]:
    """The arrays in a structure of gradients, by name.

    The structure is any that :func:`~gradscaler.diagnose.exponents` takes. A name is the path to
    the array, joined with dots. If several arrays share a name, the second becomes ``"name (2)"``,
    and so on. Three kinds of leaves are left out: ``None``; the placeholder that JAX gives as the
    gradient of an integer; and the values that flax's fp8 layers mark to be overwritten, which are
    not gradients.

    Raises:
        TypeError: the structure holds something that is not an array.

    >>> list(named_arrays({"layer": {"weight": np.ones(3), "bias": None}, "rest": [np.ones(1)]}))
    ['layer.weight', 'rest.0']
    """
    found: dict[str, Array] = {}
    for name, array in _leaves("", gradients):
        if name in found:
            name = next(n for n in (f"{name} ({number})" for number in count(2)) if n not in found)
        found[name] = array
    return found


def dtype_name(array: Array) -> str:
    """An array's dtype by the name that all frameworks know, such as ``"bfloat16"``.

    >>> dtype_name(np.float16(1))
    'float16'
    """
    array = array.values if _is_rows(array) else array
    return _name_of(array.dtype if hasattr(array, "dtype") else np.asarray(array).dtype)


@lru_cache(maxsize=None, typed=True)  # a dtype of another framework may be equal
def _name_of(dtype: Any) -> str:
    # "float16", "torch.float16", "Float16" or "<dtype: 'float16'>"
    words: list[str] = re.findall(r"\w+", str(dtype))
    return words[-1].lower()


def shape_of(array: Array) -> tuple[int, ...]:
    """An array's shape.

    For rows of a table of unknown size, it is the shape of the rows. For a distributed array, it is
    the shape of this process' part.
    """
    array = local(array)
    shape = getattr(array, "dense_shape", None)
    if shape is None:
        shape = array.values.shape if _is_rows(array) else np.shape(array)
    return tuple(int(length) for length in shape)


def to_numpy(array: Array) -> NDArray[Any]:
    """An array's elements on the host, without a copy where possible.

    A sparse array becomes its values, after rows of the same index are summed. A complex array gets
    one more dimension, for real and imaginary parts. A dtype that NumPy lacks becomes float32.

    Raises:
        TypeError: the array is on the meta device, or its elements are not numbers.

    >>> to_numpy(np.array([1 + 2j]))
    array([[1., 2.]])
    """
    array = dense(array)
    if getattr(array, "is_meta", False):
        raise TypeError("a tensor on the meta device holds no elements")
    if hasattr(array, "detach"):  # PyTorch, TensorPlay and Paddle
        if dtype_name(array).startswith(_UNKNOWN_TO_NUMPY):
            array = array.float()
        if hasattr(array, "resolve_conj"):
            array = array.resolve_conj().resolve_neg()
        array = array.cpu().numpy()
    elif hasattr(array, "asnumpy"):
        array = array.asnumpy()
    host = np.asarray(array)
    if host.dtype.kind in "MOSTUm":  # dates, objects and texts
        raise TypeError(f"an array of {host.dtype} holds no numbers")
    if host.dtype.kind == "c":
        return np.stack([host.real, host.imag], axis=-1)
    if dtype_name(host).startswith(_UNKNOWN_TO_NUMPY):
        with np.errstate(invalid="ignore"):  # a NaN is a valid value here
            return host.astype(np.float32)
    return host


def local(array: Array) -> Array:
    """The local part of a distributed tensor of PyTorch; any other array as it is.

    An operation on a distributed tensor may be a collective, which the other processes do not join.
    """
    return array.to_local() if hasattr(array, "to_local") else array


def has_numbers(array: Array) -> bool:
    """Whether an array holds numbers.

    In PyTorch, one on the meta device does not, nor one of ``FakeTensorMode``, nor a parameter of a
    lazy module that was not called yet.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        return True
    if array.is_meta or isinstance(array, torch.nn.parameter.UninitializedTensorMixin):
        return False
    fake: Any = sys.modules.get("torch._subclasses.fake_tensor")
    is_plain = type(array) is torch.Tensor  # most are, and need no call
    return fake is None or is_plain or not isinstance(local(array), fake.FakeTensor)


def alone(array: Array) -> Array:
    """An array that keeps no other memory: a copy of an element of a large tensor of PyTorch."""
    if not hasattr(array, "untyped_storage"):
        return array
    is_whole = array.untyped_storage().nbytes() <= array.numel() * array.element_size()
    return array if is_whole else array.clone()


def dense(array: Array) -> Array:
    """A dense, detached array of an array's elements.

    Rows of a table become a NumPy array. Any other array stays in its framework.
    """
    keras: Any = sys.modules.get("keras")
    variable: Any = getattr(keras, "Variable", ())
    if isinstance(array, variable):
        array = array.value
    array = local(array)
    if _is_rows(array):
        return _summed(to_numpy(array.indices), to_numpy(array.values))
    if not hasattr(array, "detach"):
        return array
    array = array.detach()
    if hasattr(array, "is_selected_rows") and array.is_selected_rows():  # Paddle's
        return _summed(array.rows(), to_numpy(array._get_tensor_from_selected_rows()))
    flags = array.is_sparse_csr, array.is_sparse  # attributes in PyTorch, methods in Paddle
    is_csr, is_sparse = (flag() if callable(flag) else flag for flag in flags)
    if is_csr:
        return array.values()
    return array.coalesce().values() if is_sparse else array


def sample_of(array: Array, limit: int = MOST_SAMPLED) -> NDArray[Any]:
    """At most ``limit`` of an array's elements, evenly strided, on the host.

    The array's own framework picks the elements, so that no others are copied.
    """
    array = dense(array)
    size = math.prod(shape_of(array))
    if size <= limit:
        return to_numpy(array)
    if hasattr(array, "reshape"):
        flat = array.reshape(-1)
    else:
        flat = sys.modules["tensorflow"].reshape(array, [-1])
    stride = -(-size // limit) | 1  # odd: a stride that divides the row length sees few columns
    return to_numpy(flat[::stride])


def _is_rows(array: Array) -> bool:
    """Whether an array is TensorFlow's ``IndexedSlices`` or MindSpore's ``RowTensor``."""
    return hasattr(array, "indices") and not callable(getattr(array, "values", callable))


def _summed(indices: Any, rows: NDArray[Any]) -> NDArray[Any]:
    """The rows, after those of the same index are summed."""
    unique, places = np.unique(indices, return_inverse=True)
    if len(unique) == len(rows):
        return rows
    total = np.zeros((len(unique), *rows.shape[1:]), rows.dtype)
    np.add.at(total, places, rows)
    return total


def _leaves(name: str, value: object) -> Iterator[tuple[str, Array]]:
    if value is None:
        return
    if hasattr(value, "named_parameters"):
        value = {key: parameter.grad for key, parameter in value.named_parameters()}
    if hasattr(value, "dtype") or isinstance(value, Number) or _is_rows(value):
        if not _is_placeholder(getattr(value, "dtype", "")):
            yield name, value
        return
    for key, item in _items(name, value):
        if _OVERWRITTEN in (key, type(item).__name__):
            continue
        yield from _leaves(f"{name}.{key}" if name else str(key), item)


@lru_cache(maxsize=None, typed=True)
def _is_placeholder(dtype: Any) -> bool:
    """Whether it is JAX's dtype of the gradient of an integer."""
    return "float0" in str(dtype)


def _items(name: str, value: Any) -> Iterable[tuple[Any, Any]]:
    """The items of a container, each with its key or index."""
    if isinstance(value, Mapping):
        return value.items()
    if hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        items = list(value)
        are_pairs = all(
            isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
            for item in items
        )
        return items if are_pairs else enumerate(items)
    jax: Any = sys.modules.get("jax")
    if jax is not None:
        leaves = jax.tree_util.tree_leaves_with_path(value)
        if all(path for path, _ in leaves):  # a leaf by itself has an empty path
            keystr = partial(jax.tree_util.keystr, simple=True, separator=".")
            return [(keystr(path), leaf) for path, leaf in leaves]
    raise TypeError(
        f"expected arrays, or mappings, sequences or modules that hold them, but "
        f"{name or 'what was given'} is {value!r} ({type(value).__name__})"
    )
