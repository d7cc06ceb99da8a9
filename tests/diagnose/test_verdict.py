from dataclasses import replace

import pytest

from gradscaler import NonfiniteGradient
from gradscaler.diagnose.gradients.module_hooks import Located
from gradscaler.diagnose.run.lines import Bins, Sample, Shares, Skip
from gradscaler.diagnose.verdict import Evidence, judge

INF = NonfiniteGradient("fc1.weight", (4, 4), "float32", 3, 0, 65504.0)
NAN = NonfiniteGradient("fc2.weight", (4, 4), "float32", 0, 2, 1.0)


def row(*nonfinite, first=2.0**24, factor=0.5, loss=2.5):
    return tuple(Skip(100 + i, first * factor**i, loss, nonfinite) for i in range(20))


STUCK = Evidence(
    steps=119, skipped=21, skips_in_a_row=20, skips=row(INF), min_scale=2.0**-126
)  # of Inf alone, and the scale still above 1
LOCATED = Located("encoder.3", "forward", "Linear", "float16", 12, 1, 4096, 6e4, 51200.0)


def verdict(**changes):
    return judge(replace(STUCK, **changes))


def test_a_scale_that_still_falls_is_normal():
    found = verdict()
    assert (found.kind, found.where) == ("normal", "fc1.weight")
    assert (
        "last 20 steps in a row were skipped while the loss scale fell from 1.67772e+07 to 32"
        in (found.text)
    )


def test_a_nonfinite_loss_is_to_blame_if_it_is_in_all_the_skips():
    assert verdict(skips=row(INF, NAN, loss=float("nan"))).kind == "loss"
    assert verdict(skips=row(INF, loss=float("inf"))).kind == "loss"
    mixed = (*row(INF, loss=float("inf"))[:-1], Skip(119, 32.0, 2.5, (INF,)))
    assert verdict(skips=mixed).kind == "normal"


def test_a_nan_in_all_the_skips_names_its_gradient():
    found = verdict(skips=(*row(INF, NAN)[:-1], Skip(119, 1.0, 2.5, (NAN,))))
    assert (found.kind, found.where) == ("nan", "fc2.weight")
    assert "The gradient of fc2.weight is NaN at every loss scale" in found.text


def test_a_nan_beside_an_inf_may_come_of_overflow():
    assert verdict(skips=row(INF, NAN)).kind == "normal"
    assert verdict(skips=row(INF, NAN, first=1.0)).kind == "floor"


def test_a_nan_at_a_scale_above_1_may_come_of_overflow():
    assert verdict(skips=row(NAN)).kind == "normal"
    assert verdict(skips=row(NAN, first=2.0**19)).kind == "nan"  # down to 1


def test_a_nan_in_some_of_the_skips_may_go_with_a_lower_scale():
    assert verdict(skips=(*row(INF, NAN)[:-1], Skip(119, 32.0, 2.5, (INF,)))).kind == "normal"


def test_skips_that_were_not_looked_into_do_not_count():
    skips = tuple(
        skip if i % 3 == 0 else replace(skip, nonfinite=(), loss=None)
        for i, skip in enumerate(row(NAN, first=2.0**16))
    )
    assert verdict(skips=skips).kind == "nan"


@pytest.mark.parametrize(
    ("skips", "min_scale", "words"),
    [
        (row(INF, first=256.0), 2.0**-11, "cannot fall further"),
        (row(INF, first=256.0), None, "enlarges no gradient"),
        (row(INF, first=8.0, factor=1), None, "at a loss scale of 8, which cannot fall further"),
        (row(first=8.0, factor=1), None, "The gradients are Inf or NaN at a loss scale of 8"),
    ],
    ids=["at its smallest", "below 1", "fixed", "not looked into"],
)
def test_a_scale_that_can_or_need_not_fall_is_at_its_floor(skips, min_scale, words):
    found = verdict(skips=skips, min_scale=min_scale)
    assert found.kind == "floor"
    assert words in found.text
    assert found.where == ("fc1.weight" if skips[0].nonfinite else None)


def test_a_module_that_makes_an_inf_comes_before_the_loss_it_makes():
    found = verdict(located=LOCATED, skips=row(INF, NAN, loss=float("nan")))
    assert (found.kind, found.where) == ("activations", "encoder.3")
    assert "makes 12 Inf and 1 NaN in float16 from finite inputs of at most 51200" in (found.text)


def test_a_nonfinite_parameter_comes_before_all():
    found = verdict(parameter="fc1.bias", located=LOCATED, skips=row(NAN, loss=float("nan")))
    assert (found.kind, found.where) == ("parameter", "fc1.bias")


def test_a_module_whose_parameter_is_not_finite_names_that():
    found = verdict(located=replace(LOCATED, parameter="weight"))
    assert (found.kind, found.where) == ("parameter", "encoder.3.weight")


@pytest.mark.parametrize(
    "evidence",
    [
        STUCK,
        replace(STUCK, skips=row(NAN, first=1.0)),
        replace(STUCK, skips=row(NAN, loss=float("nan"))),
        replace(STUCK, skips=row(INF, first=1.0)),
        replace(STUCK, parameter="w"),
        replace(STUCK, located=LOCATED),
        Evidence(100, 3),
        Evidence(100, 0),
    ],
)
def test_a_text_is_two_sentences(evidence):
    assert judge(evidence).text.count(". ") == 1
    assert judge(evidence).text.endswith(".")


def test_without_too_many_skips_it_says_how_many_there_were():
    assert judge(Evidence(1000, 3)).text.startswith("3 of 1000 steps were skipped")
    assert judge(Evidence(1000, 0)).text.startswith("None of 1000 steps was skipped")


@pytest.mark.parametrize("evidence", [Evidence(80, 40), Evidence(1000, 3, scale=0.5)])
def test_many_skips_or_a_scale_below_1_are_not_called_cured(evidence):
    found = judge(evidence)
    assert found.kind == "normal"
    assert "cured" not in found.text


def sampled(shares, largest_exponent, scale=1024.0, dtype="float16", skipped=0):
    bins = Bins(largest_exponent - 2, (1, 1, 1))
    sample = Sample(100, scale, (), 100, (), shares=shares, histogram=bins, worst=("w", "v"))
    return judge(Evidence(100, skipped, dtype, sample=sample))


TAIL = Shares(zero=0.3, flushed=0.0, subnormal=0.4, normal=0.3, overflow=0.0, nonfinite=0.0)
FLUSHED = Shares(zero=0.0, flushed=0.3, subnormal=0.1, normal=0.6, overflow=0.0, nonfinite=0.0)
RELU = Shares(zero=0.6, flushed=0.0, subnormal=0.01, normal=0.39, overflow=0.0, nonfinite=0.0)


@pytest.mark.parametrize("shares", [TAIL, FLUSHED])
def test_gradients_lost_below_a_scale_that_could_be_larger_are_an_underflow(shares):
    found = sampled(shares, largest_exponent=-20)  # below 2**-19, and 2**-9 when scaled
    assert (found.kind, found.where) == ("underflow", "w")
    assert "30% of the gradients are zero in float16" in found.text
    assert "raise it by a factor of up to 2**23" in found.text  # to 2**14, with 2**2 to spare


def test_a_scale_that_skips_keep_low_is_not_to_be_raised():
    found = sampled(FLUSHED, largest_exponent=-20, scale=2.0**-40, skipped=33)
    assert (found.kind, found.where) == ("underflow", "w")
    assert "because 33 of 100 steps were skipped" in found.text
    assert "raise" not in found.text
    assert found.text.count(". ") == 1


@pytest.mark.parametrize(("exponent", "scale"), [(1100, 1.0), (-20, 0.0), (-20, float("inf"))])
def test_a_run_file_may_say_anything(exponent, scale):
    assert sampled(FLUSHED, exponent, scale).kind == "normal"


def test_one_skip_is_told_of_in_the_singular():
    assert judge(Evidence(800, 1)).text.startswith("1 of 800 steps was skipped")


def test_zeros_alone_are_no_underflow():
    assert sampled(RELU, largest_exponent=-20).kind == "normal"


def test_a_scale_that_cannot_be_larger_is_not_too_small():
    assert sampled(TAIL, largest_exponent=4).kind == "normal"


def test_bfloat16_has_more_room():
    assert sampled(TAIL, largest_exponent=4, dtype="bfloat16").kind == "underflow"


def test_gradients_that_are_all_zero_are_an_underflow():
    shares = Shares(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    sample = Sample(100, 1.0, (), 100, (), shares=shares, histogram=Bins(0, ()))
    found = judge(Evidence(100, 0, sample=sample))
    assert (found.kind, found.where) == ("underflow", None)
