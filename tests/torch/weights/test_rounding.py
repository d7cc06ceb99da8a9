"""The bits that 16 bits have no room for are kept beside them, or decide by chance."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradscaler.torch._weights.rounding import join, random_bits, round_at_random, split

DTYPES = [torch.float16, torch.bfloat16]
EXACT_FROM = {torch.float16: 2.0**-17, torch.bfloat16: 0.0}
LARGEST = {torch.float16: 65519.996, torch.bfloat16: 3.3961e38}

finite_bits = st.integers(0, 2**32 - 1).filter(lambda bits: (bits >> 23) & 0xFF != 0xFF)

moderate_bits = finite_bits.filter(lambda bits: (bits >> 23) & 0xFF < 127 + 15)


def float_of(bits):
    return struct.unpack("f", struct.pack("I", bits))[0]


def bits_of(tensor):
    return tensor.view(torch.int32).tolist()


def all_of(dtype):
    """Each finite value of a dtype with a float after it, in order, from 0 on."""
    bits = torch.arange(0x7C00 if dtype is torch.float16 else 0x7F80)
    return bits.to(torch.int16).view(dtype)


def around(values):
    """Each value, and the float32 numbers before and after it, with both signs."""
    after = torch.nextafter(values, torch.tensor(math.inf))
    before = torch.nextafter(values, torch.tensor(-math.inf))
    near = torch.cat([before, values, after])
    return torch.cat([near, -near])


def borders(dtype):
    """float32 numbers at each value of 16 bits, and at each tie of two."""
    values = all_of(dtype)
    wide = values.float()
    ties = ((wide[1:].double() + wide[:-1].double()) / 2).float()
    return around(torch.cat([wide, ties]))


@given(st.lists(finite_bits, min_size=1, max_size=50), st.sampled_from(DTYPES))
def test_a_value_comes_back_to_the_bit(bits, dtype):
    values = [float_of(each) for each in bits]
    kept = [v for v in values if EXACT_FROM[dtype] <= abs(v) < LARGEST[dtype] and v]
    wide = torch.tensor(kept)
    assert bits_of(join(*split(wide, dtype))) == bits_of(wide)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_ties_of_16_bits_and_their_neighbours_come_back(dtype):
    wide = borders(dtype)
    wide = wide[(wide.abs() >= EXACT_FROM[dtype]) & (wide.abs() < LARGEST[dtype])]
    assert torch.equal(join(*split(wide, dtype)), wide)


@pytest.mark.parametrize("exponent", range(-18, 16))
def test_float16_holds_each_float32_at_the_border_of_a_binade(exponent):
    border = torch.tensor(2.0**exponent)
    steps = torch.arange(-9000, 9000, dtype=torch.int32)
    wide = (border.view(torch.int32) + steps).view(torch.float32)
    back = join(*split(wide, torch.float16))
    is_exact = wide >= 2.0**-17
    assert torch.equal(back[is_exact], wide[is_exact])
    assert is_exact.any() == (exponent >= -17)


@given(st.floats(-(2.0**-17), 2.0**-17, width=32))
def test_below_2_to_the_minus_17_float16_is_off_by_at_most_2_to_the_minus_41(value):
    (back,) = join(*split(torch.tensor([value]), torch.float16)).tolist()
    assert abs(back - value) <= 2.0**-41


def test_below_it_some_values_are_off():
    wide = torch.tensor([2.0**-17 + 2.0**-40, 2.0**-18 + 2.0**-41, 2.0**-42])
    back = join(*split(wide, torch.float16))
    assert (back != wide).tolist() == [False, True, True]


@given(st.lists(finite_bits, min_size=1, max_size=50), st.sampled_from(DTYPES))
def test_what_comes_back_is_split_as_it_was(bits, dtype):
    wide = torch.tensor([float_of(each) for each in bits])
    narrow, remainder = split(wide, dtype)
    again, remainder_again = split(join(narrow, remainder), dtype)
    is_finite = narrow.isfinite()
    assert torch.equal(narrow[is_finite], again[is_finite])
    assert torch.equal(remainder[is_finite], remainder_again[is_finite])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_16_bits_are_the_nearest_and_mostly_those_of_a_cast(dtype):
    wide = borders(dtype)
    wide = wide[wide.abs() < LARGEST[dtype]]
    narrow, _ = split(wide, dtype)
    cast = wide.to(dtype)
    error, least = ((each.double() - wide.double()).abs() for each in (narrow, cast))
    assert (error - least).max() <= (2.0**-40 if dtype is torch.float16 else 0)
    differs = narrow != cast
    is_a_tie = (wide.view(torch.int32) & 0xFFFF) == 0x8000
    is_tiny = wide.abs() < 2.0**-15
    assert differs.any()
    assert (is_a_tie if dtype is torch.bfloat16 else is_tiny)[differs].all()


def test_a_float16_tie_below_2_to_the_minus_15_is_rounded_up():
    units = torch.arange(2**9 - 1).double()
    ties = torch.cat([units + 0.5, -units - 0.5]) * 2.0**-24
    narrow, _ = split(ties.float(), torch.float16)
    assert torch.equal(narrow.double(), torch.cat([units + 1, -units]) * 2.0**-24)


@pytest.mark.parametrize(
    ("dtype", "begin", "end", "spacings"),
    [
        (torch.float16, 0.0, 2.0**-15, 2.0),
        (torch.float16, 2.0**-15, 2.0**-14, 1.0),
        (torch.float16, 2.0**-14, 65536.0, 0.5),
        (torch.bfloat16, 0.0, math.inf, 0.5),
    ],
)
def test_an_old_remainder_moves_a_value_set_by_hand_by_at_most_so_many_spacings(
    dtype, begin, end, spacings
):
    wide = borders(dtype)
    narrow, remainders = split(wide, dtype)
    is_old = (narrow.float().abs() >= begin) & (narrow.float().abs() < end)
    new, after = all_of(dtype)[:-1], all_of(dtype)[1:]
    spacing = after.double() - new.double()
    moved = [
        (join(value, remainder.expand(len(value)).clone()).double() - value.double()).abs()
        / spacing
        for remainder in (remainders[is_old].min(), remainders[is_old].max())
        for value in (new, -new)
    ]
    assert torch.stack(moved).max() == spacings  # NaN if any is


@pytest.mark.parametrize("dtype", DTYPES)
def test_inf_and_nan_come_back(dtype):
    wide = torch.tensor([math.inf, -math.inf, math.nan, -math.nan])
    narrow, remainder = split(wide, dtype)
    assert narrow.isnan().tolist() == [False, False, True, True]
    assert join(narrow, remainder).tolist()[:2] == [math.inf, -math.inf]
    assert join(narrow, remainder)[2:].isnan().all()


def test_a_nan_with_all_bits_set_stays_one():
    """That is the NaN of CUDA; one more would be -0."""
    wide = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    for dtype in DTYPES:
        narrow, remainder = split(wide, dtype)
        assert narrow.isnan().all()
        assert join(narrow, remainder).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_rounding_is_unbiased(dtype):
    """Each probability is within 5 standard deviations of the distance to the lower value."""
    torch.manual_seed(0)
    wide = torch.cat([torch.randn(40), 2.0**-20 * torch.randn(10)])
    count = 20_000
    generator = torch.Generator().manual_seed(1)
    many = wide.repeat(count)
    rounded = round_at_random(many, dtype, random_bits(len(many), generator))
    rounded = rounded.double().view(count, -1)
    lower, upper = rounded.min(0).values, rounded.max(0).values
    assert (lower <= wide).all()
    assert (upper >= wide).all()
    share = (rounded == upper).double().mean(0)
    expected = ((wide.double() - lower) / (upper - lower)).nan_to_num(1.0)
    deviation = (expected * (1 - expected) / count).sqrt()
    assert ((share - expected).abs() <= 5 * deviation + 2.0**-13).all()
    # To the nearest, the same statistic is far off.
    nearest = (wide.to(dtype).double() == upper).double()
    assert not ((nearest - expected).abs() <= 5 * deviation + 2.0**-13).all()


@given(moderate_bits, st.sampled_from(DTYPES), st.integers(0, 2**32))
def test_random_rounding_gives_one_of_the_two_nearest(bits, dtype, seed):
    value = float_of(bits)
    wide = torch.full((64,), value)
    generator = torch.Generator().manual_seed(seed)
    rounded = round_at_random(wide, dtype, random_bits(64, generator))
    nearest = wide[:1].to(dtype)
    step = 1 if nearest.double() < value else -1
    bits = nearest.view(torch.int16).int()
    negative = value < 0 or (value == 0 and math.copysign(1, value) < 0)
    other = (bits + (step if not negative else -step)).to(torch.int16).view(dtype)
    allowed = {nearest.item(), other.item()} if nearest.double() != value else {nearest.item()}
    assert set(rounded.tolist()) <= allowed


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_rounding_leaves_what_16_bits_hold(dtype):
    values = all_of(dtype)
    values = torch.cat([values, -values])
    for bits in (0, -1, 0x7FFF, -0x8000):
        random = torch.full((len(values),), bits, dtype=torch.int16)
        assert torch.equal(round_at_random(values.float(), dtype, random), values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_rounding_keeps_inf_and_nan(dtype):
    wide = torch.tensor([math.inf, -math.inf, math.nan])
    rounded = round_at_random(wide, dtype, torch.full((3,), -1, dtype=torch.int16))
    assert rounded.tolist()[:2] == [math.inf, -math.inf]
    assert rounded[2].isnan()


def test_random_bits_are_uniform():
    """Chi-squared of the high and of the low byte, with 255 degrees of freedom: below 350."""
    bits = random_bits(200_001, torch.Generator().manual_seed(3)).int() & 0xFFFF
    assert len(bits) == 200_001
    for byte in (bits >> 8, bits & 0xFF):
        counts = torch.bincount(byte, minlength=256).double()
        expected = len(bits) / 256
        assert ((counts - expected) ** 2 / expected).sum() < 350


@pytest.mark.parametrize("count", [8, 9])
def test_each_random_number_gives_four_times_16_bits(count):
    generator, other = (torch.Generator().manual_seed(3) for _ in range(2))
    random_bits(count, generator)
    torch.empty(math.ceil(count / 4), dtype=torch.int64).random_(-(2**63), None, generator=other)
    assert torch.equal(generator.get_state(), other.get_state())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_of_any_bits_stays_nan(dtype):
    """Beside numbers, which its bits do not change."""
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, -(2**23) + 1], dtype=torch.int32)
    wide = torch.cat([bits.view(torch.float32), torch.tensor([1.5, -2.0])])
    for values in (*split(wide, dtype)[:1], join(*split(wide, dtype))):
        assert values.isnan().tolist() == [True] * 4 + [False] * 2
        assert values[4:].tolist() == [1.5, -2.0]
