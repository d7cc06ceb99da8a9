import math
from dataclasses import fields
from fractions import Fraction
from operator import attrgetter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gradscaler.diagnose import exponents

ml_dtypes = pytest.importorskip("ml_dtypes")

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}

pytestmark = pytest.mark.filterwarnings("ignore:.* of the finite nonzero gradients overflow")
SHARES = attrgetter("zero", "flushed", "subnormal", "normal", "overflow", "nonfinite")
each_format = pytest.mark.parametrize("dtype", DTYPES)


def classes(histogram):
    return {
        name: getattr(histogram, f"num_{name}")
        for name in ("zero", "flushed", "subnormal", "normal", "overflow", "inf", "nan")
    }


def cast(gradients, dtype, scale):
    """Gradients, and their products in the format itself, both in float64.

    Those are left out whose product float32 does not hold: ml_dtypes rounds to that first.
    """
    with np.errstate(all="ignore"):
        wide = gradients.astype(np.float64)
        products = wide * scale
        if dtype != "float16":
            exact = (products.astype(np.float32) == products) | np.isnan(products)
            wide, products = wide[exact], products[exact]
        return wide, products.astype(DTYPES[dtype]).astype(np.float64)


def assert_as_cast(gradients, dtype, scale):
    wide, rounded = cast(gradients, dtype, scale)
    smallest_normal = float(ml_dtypes.finfo(DTYPES[dtype]).smallest_normal)
    finite, zero = np.isfinite(wide), wide == 0
    becomes = {
        "zero": zero,
        "flushed": finite & ~zero & (rounded == 0),
        "subnormal": (rounded != 0) & (abs(rounded) < smallest_normal),
        "normal": np.isfinite(rounded) & (abs(rounded) >= smallest_normal),
        "overflow": finite & ~np.isfinite(rounded),
        "inf": np.isinf(wide),
        "nan": np.isnan(wide),
    }
    with np.errstate(all="ignore"):
        found = exponents(wide.astype(gradients.dtype), dtype, scale).total
    assert classes(found) == {name: np.count_nonzero(mask) for name, mask in becomes.items()}


def bit_patterns(dtype):
    unsigned = np.dtype(f"u{np.dtype(dtype).itemsize}")
    return arrays(unsigned, st.integers(0, 40)).map(lambda bits: bits.view(dtype))


# Exact against casts.


@each_format
@given(
    gradients=st.sampled_from([np.float16, ml_dtypes.bfloat16, np.float32]).flatmap(bit_patterns),
    power=st.integers(-126, 127),
)
def test_any_bits_at_any_power_of_two_become_what_a_cast_makes_of_them(dtype, gradients, power):
    assert_as_cast(gradients, dtype, 2.0**power)


@given(bit_patterns(np.float32), st.floats(2.0**-100, 2.0**100, width=32))
def test_any_float32_at_any_float32_scale_becomes_what_a_cast_makes_of_it(gradients, scale):
    assert_as_cast(gradients, "float16", scale)


@given(bit_patterns(np.float64), st.integers(-126, 127))
def test_any_float64_becomes_what_a_cast_makes_of_it(gradients, power):
    assert_as_cast(gradients, "float16", 2.0**power)


@pytest.mark.parametrize("power", [-7, 0, 16])
def test_all_float16_numbers_become_what_a_cast_makes_of_them(power):
    gradients = np.arange(2**16, dtype=np.uint16).view(np.float16)
    for dtype in DTYPES:
        assert_as_cast(gradients, dtype, 2.0**power)


def boundaries(dtype):
    info = ml_dtypes.finfo(DTYPES[dtype])
    largest, half = float(info.max), float(info.smallest_subnormal) / 2
    last_place = 2.0 ** (math.floor(math.log2(largest)) - info.nmant)
    return half, float(info.smallest_normal) - half, largest + last_place / 2


@each_format
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_ties_and_their_neighbours_become_what_a_cast_makes_of_them(dtype, scale):
    ties = np.float32([boundary / scale for boundary in boundaries(dtype)])
    around = np.concatenate(
        [np.nextafter(ties, np.float32(0)), ties, np.nextafter(ties, np.float32(math.inf))]
    )
    assert_as_cast(np.concatenate([around, -around]), dtype, scale)


@each_format
def test_ties_go_to_even_and_float64_neighbours_to_either_side(dtype):
    above = "normal" if dtype == "float8_e4m3" else "overflow"  # at 464, as 448 is even
    sides = [
        ("flushed", "flushed", "subnormal"),
        ("subnormal", "normal", "normal"),
        ("normal", above, "overflow"),
    ]
    for boundary, expected in zip(boundaries(dtype), sides, strict=True):
        gradients = np.nextafter(boundary, 0), boundary, np.nextafter(boundary, math.inf)
        for gradient, name in zip(gradients, expected, strict=True):
            assert classes(exponents(np.float64([gradient]), dtype).total)[name] == 1


@each_format
@given(scale=st.floats(1.0, 2.0**20), which=st.sampled_from([0, 1, 2]))
@example(scale=3.0, which=0)
def test_products_are_not_rounded_before_they_are_rounded_to_the_format(dtype, scale, which):
    about = boundaries(dtype)[which] / scale
    flushed, normal, overflow = map(Fraction, boundaries(dtype))
    for gradient in (np.nextafter(about, 0), np.float64(about), np.nextafter(about, math.inf)):
        found = classes(exponents(np.float64([gradient]), dtype, scale).total)
        product = Fraction(float(gradient)) * Fraction(scale)
        overflows = product > overflow or (product == overflow and dtype != "float8_e4m3")
        assert found == {
            **dict.fromkeys(found, 0),
            "flushed": product <= flushed,
            "subnormal": flushed < product < normal,
            "normal": normal <= product and not overflows,
            "overflow": overflows,
        }


# The exponents themselves.


@given(
    st.sampled_from([np.float16, ml_dtypes.bfloat16, np.float32, np.float64]).flatmap(bit_patterns)
)
@example(np.float64([5e-324, 2.0**-1022, 1.5, 0.0, -2.0]))
def test_gradients_are_counted_by_the_floor_of_their_logarithm(gradients):
    found = exponents(gradients, scale=2.0**5).total
    with np.errstate(invalid="ignore"):
        wide = np.abs(gradients.astype(np.float64))
    magnitudes = wide[np.isfinite(wide) & (wide != 0)].tolist()
    powers = [math.frexp(magnitude)[1] - 1 for magnitude in magnitudes]
    expected = {power: powers.count(power) for power in powers}
    counts = {found.first + i: count for i, count in enumerate(found.counts.tolist()) if count}
    assert counts == expected
    assert found.counts.dtype == np.int64
    assert found.counts.size == (max(powers) - min(powers) + 1 if powers else 0)
    assert found.size == gradients.size
    assert found.largest == max(magnitudes, default=0.0)
    assert found.smallest == min(magnitudes, default=math.inf)


def test_several_chunks_are_counted_as_one():
    gradients = np.random.default_rng(0).standard_normal((3, 2**17)).astype(np.float32) * 1e-6
    gradients[1, 7], gradients[2, :3], gradients[0, 0] = math.nan, 0.0, 1e-40
    found = exponents(gradients, scale=8.0).total
    assert_as_cast(gradients, "float16", 8.0)
    assert found.first == math.frexp(np.float32(1e-40))[1] - 1
    assert found.counts.sum() == gradients.size - 4


def test_integers_count_as_the_numbers_that_they_are():
    found = exponents(np.array([0, 1, -3, 2**17])).total
    assert (found.num_zero, found.num_normal, found.num_overflow) == (1, 2, 1)
    assert (found.first, found.counts[[0, 1, 17]].tolist()) == (0, [1, 1, 1])


BASE = np.arange(1.0, 13.0, dtype=np.float32).reshape(3, 4)
BASE.flags.writeable = False
LAYOUTS = {"transposed": BASE.T, "strided": BASE[::2, ::3], "scalar": BASE[0, 0], "read-only": BASE}


@pytest.mark.parametrize("array", LAYOUTS.values(), ids=LAYOUTS)
def test_arrays_of_any_layout_are_read(array):
    assert exponents(array).total.num_normal == array.size


# Shares and sums.


def test_shares_are_of_all_gradients():
    gradients = np.float32([0.0, 1e-9, 1e-6, 1e-6, 1.0, 1e6, math.inf, math.nan])
    found = SHARES(exponents(gradients).total)
    assert found == (0.125, 0.125, 0.25, 0.125, 0.125, 0.25)


@pytest.mark.parametrize("gradients", [{}, [], np.zeros((0, 3), np.float32), [None]])
def test_without_gradients_all_shares_are_zero(gradients):
    found = exponents(gradients)
    assert {*SHARES(found.total), found.total.size} == {0}


@given(bit_patterns(np.float32), bit_patterns(np.float32))
def test_a_sum_is_the_histogram_of_both(one, other):
    both = exponents({"one": one, "other": other})
    assert list(both.parameters) == ["one", "other"]
    assert_same(both.total, exponents(np.concatenate([one, other])).total)
    assert_same(both.total, both.parameters["one"] + both.parameters["other"])


def assert_same(one, other):
    for field in fields(one):
        assert np.array_equal(getattr(one, field.name), getattr(other, field.name)), field.name


def test_the_table_has_a_line_for_each_array():
    text = str(exponents({"a": np.float32([0.0, 1.0]), "layer.b": np.float32([1e-9])}, scale=0.5))
    assert text.splitlines() == [
        "3 gradients in float16, scaled by 0.5",
        "             zero   flushed subnormal    normal  overflow nonfinite",
        "all        33.33%    33.33%     0.00%    33.33%     0.00%     0.00%",
        "a          50.00%     0.00%     0.00%    50.00%     0.00%     0.00%",
        "layer.b     0.00%   100.00%     0.00%     0.00%     0.00%     0.00%",
    ]


# Gradients that are multiplied by the scale twice.


def trained(factor=1.0):
    """A model after a scaled backward pass that gives ``factor`` as gradients, and the rest."""
    torch = pytest.importorskip("torch")
    from gradscaler.torch import GradScaler

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = GradScaler(init_scale=2.0**16)
    scaler.scale(factor * model(torch.ones(3)).sum()).backward()
    return model, optimizer, scaler


def test_gradients_of_a_scaled_loss_are_noticed():
    model, _, scaler = trained()
    with pytest.warns(UserWarning, match="100% .* overflow float16 at scale 65536") as caught:
        found = exponents(model, scale=scaler.get_scale())
    assert caught[0].filename == __file__
    message = str(caught[0].message)
    assert "pass scale=1.0" in message
    assert str(found).splitlines()[-1] == message


@pytest.mark.parametrize("advice", ["scale=1.0", "unscale_"])
def test_what_the_warning_advises_ends_it(advice, recwarn):
    model, optimizer, scaler = trained(factor=0.01)
    if advice == "unscale_":
        scaler.unscale_(optimizer)
    found = exponents(model, scale=1.0 if advice == "scale=1.0" else scaler.get_scale())
    assert found.total.normal == 1.0
    assert "overflow float16" not in str(found)
    assert not recwarn.list


def test_the_warning_also_names_a_scale_that_is_too_large():
    model, optimizer, scaler = trained(factor=8.0)
    scaler.unscale_(optimizer)
    with pytest.warns(UserWarning, match="If they are not, this scale is too large for them"):
        exponents(model, scale=scaler.get_scale())


@pytest.mark.parametrize(
    ("gradients", "scale"),
    [
        ([1.0, 2.0, 1e-3, 1e-3], 65536.0),  # half of them overflow, and no more
        ([1e6, 1e6], 1.0),  # not multiplied by anything
        ([math.inf, math.nan, 1e-3], 65536.0),
        ([0.0, 0.0], 65536.0),
        ([], 65536.0),
    ],
)
def test_other_calls_are_not_doubted(gradients, scale, recwarn):
    assert "If they are already" not in str(exponents(np.float32(gradients), scale=scale))
    assert not recwarn.list


# Its arguments.


def test_float8_e4m3fn_is_another_name_and_another_format_is_refused():
    assert exponents([], "float8_e4m3fn").dtype == "float8_e4m3"
    message = "one of float16, bfloat16, float32, float8_e4m3, float8_e5m2, got 'float64'"
    with pytest.raises(ValueError, match=message):
        exponents([], "float64")


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, 1e-39, "8"])
def test_what_cannot_be_a_loss_scale_is_refused(scale):
    is_text = isinstance(scale, str)
    message = "scale must be a number, got '8'" if is_text else "scale must"
    with pytest.raises(TypeError if is_text else ValueError, match=message):
        exponents([], scale=scale)
