import math
from dataclasses import replace

import pytest

from gradscaler import NonfiniteGradient
from gradscaler.diagnose import Located

# Each row of these tables would need a training that ends in just this evidence. The trainings of
# tests/diagnose/test_trainings.py and examples/torch_stuck.py end in one for each kind of verdict.
from gradscaler.diagnose._findings import judge
from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._findings.frameworks import framework_named
from gradscaler.diagnose._findings.over_time import when
from gradscaler.diagnose._record.events import Events
from gradscaler.diagnose._record.finding import Finding
from gradscaler.diagnose._record.lines import (
    Bins,
    ParameterSample,
    Sample,
    Shares,
    Skip,
    VerdictLine,
)
from gradscaler.diagnose._record.step import Step

INF = NonfiniteGradient("fc1.weight", (4, 4), "float32", 3, 0, 65504.0)
NAN = NonfiniteGradient("fc2.weight", (4, 4), "float32", 0, 2, 1.0)
BARE = replace(NAN, name="")  # in JAX, of one array that is all parameters


def streak(*nonfinite, first=2.0**24, factor=0.5, loss=2.5):
    return tuple(Skip(100 + i, first * factor**i, loss, nonfinite) for i in range(20))


def ending(skips, scale, *nonfinite):
    """The skips, the last of them replaced."""
    return *skips[:-1], Skip(119, scale, 2.5, nonfinite)


STUCK = Evidence(
    steps=119, skipped=21, skips_in_a_row=20, skips=streak(INF), min_scale=2.0**-126
)  # of Inf alone, and the scale still above 1
LOCATED = Located("encoder.3", "forward", "Linear", "float16", 12, 1, 4096, 6e4, 51200.0)
NAN_LOSS = streak(INF, NAN, loss=math.nan)
NAN_AT_1 = ending(streak(INF, NAN), 1.0, NAN)
FIXED = {"min_scale": 1024.0, "peaks": ((90, 1.0),)}
LARGE = {"min_scale": 1024.0, "peaks": ((90, 32.0),)}
OF_NAN = streak(NAN, first=2.0**16)
SOME_INSPECTED = tuple(
    skip if i % 3 == 0 else replace(skip, nonfinite=None, loss=None)
    for i, skip in enumerate(OF_NAN)
)


@pytest.mark.parametrize(
    ("kind", "where", "changes"),
    [
        ("normal", "fc1.weight", {}),
        ("loss", None, {"skips": NAN_LOSS}),
        ("loss", None, {"skips": streak(INF, loss=math.inf)}),
        ("loss", None, {"skips": (*streak(INF)[:9], *streak(INF, loss=math.inf)[9:])}),
        ("normal", "fc1.weight", {"skips": ending(streak(INF, loss=math.inf), 32.0, INF)}),
        # A NaN beside an Inf, or at a scale above 1, may come from overflow.
        ("normal", "fc1.weight", {"skips": streak(INF, NAN)}),
        ("floor", "fc1.weight", {"skips": streak(INF, NAN, first=1.0)}),
        ("normal", "fc2.weight", {"skips": streak(NAN)}),
        ("nan", "fc2.weight", {"skips": streak(NAN, first=2.0**19)}),  # down to 1
        ("nan", "fc2.weight", {"skips": NAN_AT_1}),
        # At a fixed scale, other steps show whether it may be an overflow.
        ("nan", "fc2.weight", {**FIXED, "skips": streak(NAN, first=1024.0, factor=1)}),
        ("floor", "fc1.weight", {**FIXED, "skips": streak(INF, first=1024.0, factor=1)}),
        ("floor", "fc2.weight", {**LARGE, "skips": streak(NAN, first=1024.0, factor=1)}),
        ("floor", "fc2.weight", {"min_scale": 8.0, "skips": streak(NAN, first=8.0, factor=1)}),
        ("floor", "fc2.weight", {"skips": streak(NAN, first=1.0, loss=1e6)}),
        ("normal", "fc1.weight", {"skips": ending(streak(INF, NAN), 32.0, INF)}),
        ("nan", "fc2.weight", {"skips": SOME_INSPECTED}),
        # The operation that makes the Inf comes before its effects.
        ("activations", "encoder.3", {"located": LOCATED, "skips": NAN_LOSS}),
        ("parameter", "fc1.bias", {"parameter": "fc1.bias", "located": LOCATED, "skips": NAN_LOSS}),
        ("parameter", "encoder.3.weight", {"located": replace(LOCATED, parameter="weight")}),
    ],
)
def test_too_many_skips_get_the_verdict_that_their_evidence_allows(kind, where, changes):
    found = judge(replace(STUCK, **changes))
    assert (found.kind, found.where) == (kind, where)


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("last 20 steps were skipped while the scale fell from", {}),
        ("the scale fell from 1.67772e+07 to 32. ", {}),
        ("The gradient of fc2.weight is NaN at every loss scale", {"skips": NAN_AT_1}),
        ("The gradient is NaN at every", {"skips": ending(streak(INF, BARE), 1.0, BARE)}),
        ("The gradients overflow, and", {"skips": streak(replace(BARE, num_inf=1))}),
        ("The gradient is NaN, and", {"skips": streak(BARE)}),
        ("makes 12 Inf and 1 NaN in float16 from finite inputs", {"located": LOCATED}),
        ("from finite inputs up to 51200, so", {"located": LOCATED}),
    ],
)
def test_a_text_gives_the_evidence(words, changes):
    assert words in judge(replace(STUCK, **changes)).text


def in_loss(operation, num_inf=3, largest=6e4, dtype="float16", size=64):
    return Located(
        None,
        "forward",
        "",
        dtype,
        num_inf,
        1,
        size,
        1.0,
        largest,
        operation=operation,
        line="train.py:7",
    )


@pytest.mark.parametrize(
    ("located", "words"),
    [
        (
            replace(in_loss("pow"), exponent=2.0),
            "255 is too large for float16, and higher powers sooner: compute the loss",
        ),
        (in_loss("square"), "compute the loss in float32 (outputs.float()), or bring outputs"),
        (
            replace(in_loss("mul"), num_nan=0),
            "this: compute the loss in float32 (outputs.float()), or bring outputs",
        ),
        (
            replace(in_loss("pow", largest=400.0, dtype="float32"), exponent=-0.5),
            "a negative power of 0 is Inf: clamp the base.",
        ),
        (
            replace(in_loss("pow", largest=100.0, dtype="float32"), exponent=20.0),
            "a high power of a large number leaves the dtype: clamp the base",
        ),
        (in_loss("pow", largest=0.5), "of 0 is Inf, and a high one of a large number: clamp the"),
        (in_loss("pow", num_inf=0), "a fractional power of a negative number is NaN"),
        (in_loss("square", largest=1e30, dtype="float32"), "leave the range of float32"),
        (in_loss("exp2"), "an exp2 of more than 16 leaves float16"),
        (in_loss("exp2", dtype="float32"), "an exp2 of more than 128 leaves float32"),
        (
            replace(in_loss("matmul", largest=1e30, dtype="float32"), module="rnn", type="RNN"),
            "from one time step to the next: clip gradients before optimizer.step()",
        ),
        (in_loss("to"), "in float16, by casting at train.py:7, from finite inputs"),
        (
            replace(LOCATED, operation="pow", exponent=2.0),
            "sooner: run this module in bfloat16 or float32",
        ),
        (replace(LOCATED, operation="to"), "becomes Inf when it is cast to float16"),
        (replace(LOCATED, operation="topk"), "run this module in bfloat16 or float32"),
        (in_loss("square", largest=1e30, dtype="bfloat16"), "leave the range of float32"),
        (in_loss("exp"), "exponential of more than 11 leaves float16"),
        (in_loss("exp", dtype="float32"), "exponential of more than 88 leaves float32"),
        (in_loss("log"), "logsigmoid); an eps/min below 3e-8 is 0: take"),
        (in_loss("log", dtype="float32"), "log_softmax, logsigmoid)."),
        (in_loss("log", num_inf=0), "the input of the logarithm is negative"),
        (in_loss("log2", num_inf=0, dtype="float32"), "a clamp would only hide"),
        (replace(in_loss("log"), num_nan=0), "is 0: clamp it to a small number, or take logits"),
        (replace(in_loss("log"), num_nan=0), "an eps/min below 3e-8 is 0: take"),
        (
            replace(in_loss("log", largest=0.0, dtype="float32"), num_nan=0),
            "logsigmoid); all of it is 0: look first at what makes it so",
        ),
        (in_loss("sqrt", num_inf=0), "the root of a negative number is NaN"),
        (in_loss("rsqrt", num_inf=0), "the root of a negative number is NaN"),
        (
            replace(in_loss("div", num_inf=0), smallest_divisor=0.0),
            "0 / 0 is NaN: clamp the divisor (an empty mask",
        ),
        (
            in_loss("div"),
            "norm of 0); an eps/min below 3e-8 is 0: take 1e-2.",
        ),
        (in_loss("div", dtype="bfloat16"), "it in float32, as 1 - 1e-3 is 1 in bfloat16"),
        (in_loss("xlogy", dtype="float32"), "clamp what it is taken of"),
        (in_loss("logdet", dtype="float32"), "not positive definite"),
        (in_loss("log1p", dtype="float32"), "log1p of -1 is -Inf"),
        (in_loss("log", largest=1.0, dtype="bfloat16"), "rounds 1 - 1e-6 to 1: take 1 - 2**-8"),
        (in_loss("log1p", dtype="bfloat16"), "-1 + 1e-2; 16 bits round -1 + 1e-6 to -1"),
        (in_loss("div", dtype="complex64"), "clamp the divisor (an empty mask, a deviation or"),
        (replace(in_loss("div"), smallest_divisor=0.01), "divide by a larger number, or"),
        (
            replace(in_loss("div", dtype="float32"), smallest_divisor=0.01),
            "divide by a larger number.",
        ),
        (in_loss("matmul"), "queries by the root of their width"),
        (in_loss("matmul", dtype="float32"), "leave the range of float32"),
        (replace(LOCATED, operation="matmul", type="Linear"), "run this module in bfloat16"),
        (in_loss("norm"), "its squares leave the range of float16 beyond 255"),
        (in_loss("norm", largest=1e30, dtype="float32"), "leave the range of float32"),
        (in_loss("std", num_inf=0), "the deviation of one element is 0 / 0"),
        (in_loss("std"), "compute the loss in float32"),
        (in_loss("cross_entropy", num_inf=0, size=1), "the mean of no elements is 0 / 0"),
        (in_loss("cross_entropy"), "logits that far apart have a difference beyond the 65504"),
        (in_loss("log_softmax"), "compute the loss in float32 (outputs.float())"),
        (in_loss("cross_entropy", largest=5.0), "number; a sum of many costs may, too"),
        (in_loss("cross_entropy", dtype="float32"), "with -inf costs Inf: mask with a large"),
        (in_loss("cross_entropy", largest=1e36, dtype="float32"), "near the end of float32's"),
        (in_loss("ctc_loss"), "zero_infinity=True"),
        (in_loss("atanh"), "it is Inf at 1 and -1"),
        (in_loss("acosh", num_inf=0, dtype="float32"), "clamp its input to at least 1 + 1e-6"),
        (in_loss("lgamma", dtype="float32"), "clamp its input (a concentration) to more than 0"),
        (in_loss("special_ndtri", dtype="float32"), "clamp its input to within 1e-6 and 1 - 1e-6"),
        (in_loss("logit", dtype="float32"), "it is Inf at 0 and 1, and NaN beyond"),
        (in_loss("mul", num_inf=0), "a factor is a constant Inf or NaN"),
        (in_loss("index_put"), "the code writes Inf or NaN there"),
        (in_loss("copy", largest=0.0), "the code writes Inf or NaN there"),
        (in_loss("copy", largest=7e4), "becomes Inf when it is cast to float16"),
        (in_loss("batch_norm", num_inf=0, dtype="float32"), "a variance below 0"),
        (in_loss("layer_norm", num_inf=0, dtype="float32"), "give it an eps, such as 1e-5"),
    ],
)
def test_advice_fits_the_operation_and_the_place(located, words):
    found = judge(replace(STUCK, located=located, skips=NAN_LOSS))
    assert found.kind == ("loss" if located.module is None else "activations")
    assert words in found.text
    assert found.text.count(". ") == 1


def slope_of(operation, dtype="float16"):
    return replace(in_loss(operation, dtype=dtype), kind="backward")


@pytest.mark.parametrize(
    ("located", "words"),
    [
        (slope_of("matmul"), "this gradient leaves float16, which ends at 65504: normalize"),
        (slope_of("sqrt"), "Inf, also in where()'s other branch; an eps/min below 3e-8 is 0"),
        (slope_of("sqrt", "float32"), "its slope at 0 is Inf, also in where()'s other branch."),
        (slope_of("log1p"), "clamp its input to at least -1 + 1e-3, as its slope at -1"),
        (slope_of("log1p", "bfloat16"), "branch; 16 bits round -1 + 1e-6 to -1"),
        (slope_of("log1p", "float32"), "clamp its input to at least -1 + 1e-6, as its slope at -1"),
        (slope_of("acosh", "float32"), "its slope at 1 is Inf: clamp its input to at least 1 + 1"),
        (slope_of("log_softmax", "float32"), "a row of the softmax is masked entirely"),
        (slope_of("linalg_svd"), "values are equal or 0: take the values alone"),
        (slope_of("hook"), "by the gradient of what a hook changed at train.py:7"),
    ],
)
def test_advice_on_a_gradient_fits_the_operation(located, words):
    assert words in judge(replace(STUCK, located=located, skips=NAN_AT_1)).text


def test_gradients_that_overflow_at_the_smallest_scale_name_the_operation():
    found = judge(replace(STUCK, located=slope_of("Clip"), skips=streak(INF, NAN, first=1.0)))
    assert found.kind == "floor"
    assert "in fc1.weight, first in the gradient of Clip at train.py:7, at a loss" in found.text
    assert "look there for a division by 0" in found.text


@pytest.mark.parametrize("scale", [1.0, 2.0**19])
@pytest.mark.parametrize(
    ("name", "operation", "num_nan", "is_nan"),
    [
        ("tf_keras", "log", 0, True),  # its slope has a pole
        ("tf_keras", "log_softmax", 3, True),
        ("tf_keras", "matmul", 3, False),  # which a lower scale may cure
        ("torch", "log", 3, False),
    ],
)
def test_what_a_replay_without_a_scale_shows_is_no_overflow(
    name, operation, num_nan, is_nan, scale
):
    """A replay is of the unscaled loss, where others see a step at its scale."""
    located = replace(slope_of(operation), num_nan=num_nan)
    skips = tuple(replace(skip, nonfinite=None) for skip in streak(first=scale))
    stuck = replace(STUCK, framework=framework_named(name, {}), located=located, skips=skips)
    found = judge(stuck)
    assert (found.kind == "nan") is is_nan
    assert ("Divide the loss" in found.text) is not is_nan


@pytest.mark.parametrize(
    ("operation", "words"),
    [("matmul", "A sum of products leaves float16"), ("gelu", "Compute the loss in float32 (out")],
)
def test_a_loss_that_no_step_is_skipped_for_has_its_operation_s_advice(operation, words):
    past = tuple(Step(n, 8.0, False, math.inf) for n in range(1, 9))
    evidence = Evidence(8, 0, past=past, bad_and_applied=8, watched=in_loss(operation))
    found = judge(evidence)
    assert found.kind == "silent"
    assert words in found.text


def test_a_divergence_speaks_of_a_cast():
    past = tuple(Step(n, 8.0, n > 99, 10.0 ** (n // 20)) for n in range(1, 119))
    located = replace(LOCATED, operation="to", line="model.py:3")
    found = judge(replace(STUCK, past=past, located=located))
    assert found.kind == "divergence"
    assert "(first in encoder.3 (Linear), by casting at model.py:3)" in found.text


@pytest.mark.parametrize(
    ("skips", "min_scale", "words"),
    [
        (streak(INF, first=256.0), 2.0**-11, "cannot fall further"),
        (streak(INF, first=256.0), None, "no longer enlarges gradients"),
        (streak(INF, first=8.0, factor=1), None, "at a loss scale of 8, which cannot fall further"),
        (
            tuple(replace(skip, nonfinite=None) for skip in streak(first=8.0, factor=1)),
            None,
            "The gradients are Inf or NaN at a loss scale of 8",
        ),
    ],
    ids=["at its smallest", "below 1", "fixed", "not inspected"],
)
def test_a_scale_that_can_or_need_not_fall_is_at_its_floor(skips, min_scale, words):
    found = judge(replace(STUCK, skips=skips, min_scale=min_scale))
    assert found.kind == "floor"
    assert words in found.text
    assert found.where == ("fc1.weight" if skips[0].nonfinite else None)


ALONG = {"world_size": 4, "is_finite_here": True}  # this rank's gradients are finite


@pytest.mark.parametrize(
    ("kind", "words", "changes"),
    [
        ("normal", "Another rank's gradients, but not this one's, are Inf or NaN, and", {}),
        (
            "elsewhere",
            "at a loss scale of 1, which no longer enlarges",
            {"skips": streak(first=2.0**19)},
        ),
        ("elsewhere", "which cannot fall further", {"min_scale": 32.0}),
        # The latest inspected skip decides, not an earlier overflow.
        ("elsewhere", "Another rank's", {"skips": (*NAN_AT_1, Skip(120, 1.0, 2.5, ()))}),
        ("elsewhere", "Another rank's", {"skips": (*streak(first=1.0), Skip(120, 0.5))}),
        ("nan", "The gradient of fc2.weight is NaN", {"skips": (*streak(), *NAN_AT_1)}),
        ("loss", "The unscaled loss is itself nan", {"skips": streak(loss=math.nan)}),
        ("parameter", "The model's w is itself", {"parameter": "w"}),
        ("activations", "The forward pass of encoder.3 (Linear) makes", {"located": LOCATED}),
    ],
)
def test_a_rank_with_finite_gradients_blames_another_unless_it_has_evidence(kind, words, changes):
    found = judge(replace(STUCK, **{"skips": streak(), "min_scale": None, **ALONG, **changes}))
    assert found.kind == kind
    assert words in found.text
    assert (found.where is None) == (kind in ("normal", "elsewhere", "loss"))
    assert found.text.count(". ") == 1


@pytest.mark.parametrize(
    ("kind", "evidence", "words"),
    [
        (
            "normal",
            Evidence(1000, 3, **ALONG),
            "while this one's were finite. No gradients were read; skips and losses show nothing",
        ),
        ("elsewhere", Evidence(80, 40, **ALONG), "explain the files of all ranks together"),
        (
            "elsewhere",
            Evidence(1000, 3, scale=0.5, **ALONG),
            "explain the files of all ranks together",
        ),
    ],
)
def test_skips_for_another_rank_are_said_to_be(kind, evidence, words):
    found = judge(evidence)
    assert (found.kind, found.where) == (kind, None)
    assert "because another rank's gradients overflowed" in found.text
    assert words in found.text


@pytest.mark.parametrize(
    "evidence",
    [
        STUCK,
        replace(STUCK, skips=streak(NAN, first=1.0)),
        replace(STUCK, skips=streak(NAN, loss=math.nan)),
        replace(STUCK, skips=streak(INF, first=1.0)),
        replace(STUCK, parameter="w"),
        replace(STUCK, located=LOCATED),
        Evidence(100, 3),
        Evidence(100, 0),
    ],
)
def test_a_text_is_two_sentences(evidence):
    assert judge(evidence).text.count(". ") == 1
    assert judge(evidence).text.endswith(".")


@pytest.mark.parametrize(
    ("steps", "skipped", "words"),
    [
        (1000, 3, "3 of 1000 steps were"),
        (1000, 0, "None of 1000 steps was"),
        (8, 1, "1 of 8 steps was"),
    ],
)
def test_without_too_many_skips_it_says_how_many_there_were(steps, skipped, words):
    assert judge(Evidence(steps, skipped)).text.startswith(f"{words} skipped")


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (1, "Too short to judge: 1 steps, no gradient read."),
        (50, "Too short to judge: 50 steps, no gradient read."),
        (51, "No gradients were read; skips and losses show nothing wrong."),
    ],
)
def test_a_run_of_which_no_gradient_was_read_is_not_told_that_it_is_fine(steps, words):
    found = judge(Evidence(steps, 0))
    assert (found.kind, found.findings[0].action) == ("normal", words)


def test_without_a_scaler_the_losses_are_told_though_no_gradient_was_read():
    """As of a function of JAX, of whose results those are read that are not finite."""
    past = tuple(Step(n, 1.0, skipped=False, loss=1 / n) for n in range(1, 9))
    found = judge(Evidence(8, 0, first=past[0], past=past, has_scaler=False))
    assert found.findings[0].action == (
        "Nothing wrong was seen in numbers and calls: the loss went from 1 to 0.125, and what it "
        "means was not judged."
    )


@pytest.mark.parametrize(
    ("kind", "evidence"),
    [("data", Evidence(80, 40)), ("floor", Evidence(1000, 3, scale=0.5))],
)
def test_many_skips_or_a_scale_below_1_are_not_normal(kind, evidence):
    assert judge(evidence).kind == kind


def skipping(nonfinite, scale, every=10, steps=300):
    """A run at a scale that is its policy's lowest, of which every n-th step was skipped."""
    past = tuple(Step(n, scale, n % every == 0, 2.5) for n in range(1, steps + 1))
    skips = tuple(Skip(s.step, scale, 2.5, (nonfinite,)) for s in past if s.skipped)
    count = len(skips)
    rest = {"past": past, "inspected": skips, "peaks": ((90, 1.0),)}
    return Evidence(steps, count, scale=scale, min_scale=scale, **rest)


@pytest.mark.parametrize(
    ("skipped", "said"),
    [
        ((7, 13, 19), ", every 6 steps (such as 7, 13, 19)"),
        ((7, 13, 25, 31), ", every 6 steps (such as 13, 25, 31)"),
        ((7, 8, 13, 14, 19, 20), ", in bursts every 6 steps (such as 7, 13, 19)"),
        ((7, 13, 16, 19, 25), ", every 6 steps (such as 16, 19, 25)"),  # and one beside
        ((7, 11, 13, 17, 18, 21), ", at irregular steps (such as 13, 17, 21)"),
        ((7, 11, 20), ", at irregular steps (such as 7, 11, 20)"),
    ],
)
def test_steps_have_a_period_if_most_of_them_fit(skipped, said):
    steps = [Step(n, 1.0, skipped=True) for n in skipped]
    assert when(steps, Evidence(60, len(steps))) == said


@pytest.mark.parametrize("scale", [1.0, 2.0**-4, 1024.0])
@pytest.mark.parametrize(("gradient", "kind"), [(NAN, "data"), (INF, "floor")])
def test_nan_without_inf_at_the_lowest_scale_is_no_overflow(gradient, kind, scale):
    found = judge(skipping(gradient, scale))
    assert found.kind == kind
    assert ("lower" in found.text) == (kind == "floor")
    assert ("with NaN and no Inf in the gradient of fc2.weight" in found.text) == (kind == "data")


@pytest.mark.parametrize(
    ("peak", "rest", "framework", "is_cured"),
    [
        (30.0, 0.0, "torch", True),
        (30.0, 2.0, "torch", False),  # clipping by a norm of Inf leaves 0
        (30.0, math.nan, "torch", False),  # and that by a norm of NaN leaves nothing else
        (1e-3, 0.0, "torch", False),  # far from overflow
        (30.0, 0.0, "jax", False),
    ],
)
def test_an_inf_that_clipping_made_nan_is_an_overflow(peak, rest, framework, is_cured):
    past = tuple(Step(n, 1024.0, n == 16, 2.5) for n in range(1, 41))
    found = NonfiniteGradient("weight", (16,), "float32", 0, 1, rest)
    evidence = Evidence(40, 1, past=past, inspected=(Skip(16, 1024.0, 2.5, (found,)),))
    of = framework_named(framework, {})
    text = judge(replace(evidence, peaks=((1, peak),), framework=of)).text
    assert ("cured each overflow" in text) == is_cured
    assert ("with NaN and no Inf in the gradient of weight" in text) != is_cured


def test_a_few_skips_at_a_fixed_scale_are_not_cured_by_a_lower_one():
    found = judge(skipping(INF, 1.0, every=200))
    assert found.kind == "normal"
    assert found.findings[0].steps == (200,)
    assert "cured" not in found.text


@pytest.mark.parametrize(("scale", "kind"), [(1.0, "nan"), (2.0**-4, "data"), (1024.0, "normal")])
def test_one_nan_behind_a_finite_loss_is_no_bad_batch_where_no_scale_can_make_it(scale, kind):
    found = judge(skipping(NAN, scale, every=200))
    assert found.kind == kind
    assert "fc2.weight" in found.text


@pytest.mark.parametrize(
    ("later", "line"), [("floor", "a.py:7"), ("nan", "a.py:7"), ("divergence", None)]
)
def test_a_later_streak_does_not_lose_the_place_of_an_earlier_one(later, line):
    placed = VerdictLine(50, "nan", "x", "w", (Finding("nan", "x", "y", "w", "a.py:7"),))
    other = VerdictLine(90, later, "z", None, (Finding(later, "z", "y"),))
    earlier = Evidence(100, 40).after(placed).after(other).earlier
    assert (earlier.findings[0].line, earlier.step) == (line, 50 if line else 90)


@pytest.mark.parametrize(("loss", "line"), [(2.5, "train.py:7"), (math.nan, None)])
def test_a_streak_has_the_place_found_before_it_if_that_fits_its_loss(loss, line):
    found = Evidence(100, 40, watched=slope_of("sqrt")).found_before(Skip(100, 1.0, loss, (NAN,)))
    assert (found and found.line) == line


def sampled(shares, largest_exponent, scale=1024.0, dtype="float16", skipped=0, past=()):
    bins = Bins(largest_exponent - 2, (1, 1, 1))
    sample = Sample(100, scale, (), 100, (), shares=shares, histogram=bins, worst=("w", "v"))
    return judge(Evidence(100, skipped, dtype, sample=sample, past=past))


TAIL = Shares(zero=0.3, flushed=0.0, subnormal=0.4, normal=0.3, overflow=0.0, nonfinite=0.0)
FLUSHED = Shares(zero=0.0, flushed=0.3, subnormal=0.1, normal=0.6, overflow=0.0, nonfinite=0.0)
RELU = Shares(zero=0.6, flushed=0.0, subnormal=0.01, normal=0.39, overflow=0.0, nonfinite=0.0)


@pytest.mark.parametrize("shares", [TAIL, FLUSHED])
def test_gradients_lost_below_a_scale_that_could_be_larger_are_an_underflow(shares):
    found = sampled(shares, largest_exponent=-20)  # below 2**-19, and 2**-9 when scaled
    assert (found.kind, found.where) == ("underflow", "w")
    assert "30% of the gradients are zero in float16" in found.text
    assert "raise it by a factor of up to 2**23" in found.text  # to 2**14, with 2**2 to spare


def test_a_scale_that_skips_keep_low_should_not_be_raised():
    past = tuple(Step(step, 2.0**-40, skipped=step <= 33) for step in range(1, 101))
    found = sampled(FLUSHED, largest_exponent=-20, scale=2.0**-40, skipped=33, past=past)
    assert (found.kind, found.where) == ("underflow", "w")
    assert "because 33 of 100 steps were skipped" in found.text
    assert "raise" not in found.text
    assert found.text.count(". ") == 1


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("normal", (RELU, -20)),  # zeros alone prove nothing
        ("normal", (TAIL, 4)),  # no larger scale fits
        ("underflow", (TAIL, 4, 1024.0, "bfloat16")),  # which has more room
        ("normal", (FLUSHED, 1100, 1.0)),  # a run file may say anything
        ("normal", (FLUSHED, -20, 0.0)),
        ("normal", (FLUSHED, -20, math.inf)),
    ],
)
def test_an_underflow_needs_lost_gradients_and_a_larger_scale_that_fits(kind, arguments):
    assert sampled(*arguments).kind == kind


def test_gradients_that_are_all_zero_are_an_underflow():
    shares = Shares(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    sample = Sample(100, 1.0, (), 100, (), shares=shares, histogram=Bins(0, ()))
    found = judge(Evidence(100, 0, sample=sample))
    assert (found.kind, found.where) == ("underflow", None)


@pytest.mark.parametrize(
    ("kind", "loss", "scale", "others"),
    [
        ("normal", -0.0, 65536.0, ()),
        ("normal", 0.0, 64.0, (-9,)),
        ("underflow", 0.0, 64.0, (-40,)),  # the loss may have been flushed too
        ("underflow", 0.0, 64.0, ()),
        ("underflow", 1e-3, 64.0, (-9,)),
    ],
)
def test_gradients_of_a_loss_of_zero_are_no_underflow_where_the_scale_fits_others(
    kind, loss, scale, others
):
    """Such as that of a policy gradient in a batch whose rewards are all equal."""
    nothing = Shares(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    zero = Sample(200, scale, (), 100, (), loss=loss, shares=nothing, histogram=Bins(0, ()))
    sizes = tuple(replace(zero, step=100, histogram=Bins(first, (1,))) for first in others)
    assert judge(Evidence(200, 0, sample=zero, sizes=sizes)).kind == kind


def having_cut(cut, zero=(), missing=(), alive=("c.weight",), later=None, loss=None):
    """The verdict on gradients that are 0, missing or alive; ``later``: in one more sample."""
    evidence = Evidence(400, 0, first=loss and Step(1, 1024.0, skipped=False, loss=loss))
    for gone, missed, looked in ((zero, missing, cut), *([(*later, None)[:3]] if later else ())):
        found = {name: ParameterSample(1.0, 0, 0, 0, Bins(0, ())) for name in gone}
        rest = [name for name in (*alive, *zero) if name not in gone]
        found |= {name: ParameterSample(0.0, 0, 0, 0, Bins(-9, (1,))) for name in rest}
        step = len(evidence.past) + 100
        sample = Sample(step, 1024.0, (), 100, (), shares=RELU, histogram=Bins(-9, (1,)))
        sample = replace(sample, parameters=found, missing=missed, cut=looked)
        sample = replace(sample, norm=1.0, loss=loss)
        evidence = evidence.after(sample)
    return judge(evidence)


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        ("sign", "because they pass sign, whose slope is 0 everywhere. A larger scale would not"),
        ("round", "x + (x.round() - x).detach()"),
        ("tanh", "pass tanh, whose slope is 0 for all of its inputs"),
        ("relu", "leaky_relu"),
    ],
)
def test_what_lets_no_gradient_through_is_named(operation, words):
    names = "a.weight", "b.weight"
    found = having_cut(dict.fromkeys(names, operation), zero=names)
    assert (found.kind, found.where) == ("dead", "b")
    assert "2 of 3 parameters, a.weight first, are exactly 0" in found.text
    assert words in found.text
    assert found.text.count(". ") == 1


@pytest.mark.parametrize("operation", ["relu", "round"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_units_that_end_in_the_course_of_a_run_are_told_with_the_learning_rate(operation, is_whole):
    names, rest = ["a.weight", "b.weight"], [] if is_whole else ["c.weight"]
    later = dict.fromkeys(names, operation)
    text = having_cut({}, zero=[], alive=[*names, *rest], later=(names, [], later), loss=1.0).text
    has_ended = operation == "relu"
    assert ("; in step 100 they were not" in text) == has_ended
    assert ("ower the learning rate or warm it up" in text) == has_ended
    assert ("f relu makes the outputs, leave it out" in text) == (has_ended and is_whole)


@pytest.mark.parametrize(("before", "kind"), [(2.0**-3, "dead"), (2.0**-20, "underflow")])
def test_all_gradients_are_lost_at_a_small_scale_only_after_small_ones(before, kind):
    """Zeros beside gradients in the middle of float16's range are no underflow."""
    some = Sample(100, 8.0, (), 100, (), norm=1.234 * before, largest=before, shares=RELU)
    none = Shares(zero=1.0, flushed=0.0, subnormal=0.0, normal=0.0, overflow=0.0, nonfinite=0.0)
    last = Sample(200, 8.0, (), 100, (), norm=0.0, shares=none, histogram=Bins(0, ()))
    assert judge(Evidence(200, 0).after(some).after(last)).kind == kind


def test_what_cuts_the_graph_is_looked_for_behind_the_last_module_without_a_gradient():
    names = "a.weight", "b.weight"
    found = having_cut(dict.fromkeys(names, ""), missing=names)
    assert (found.kind, found.where) == ("dead", "b")
    assert "2 of 3 parameters, a.weight first, have no gradient" in found.text
    assert "look behind b for what cuts the graph, such as detach()" in found.text


def test_a_later_gradient_disproves_a_cut():
    zero = ("a.weight",)
    still, again = (zero, ()), ((), ())
    assert having_cut({"a.weight": "relu"}, zero=zero, later=still).kind == "dead"
    assert having_cut({"a.weight": "relu"}, zero=zero, later=again).kind == "normal"


def test_where_nothing_has_a_gradient_no_part_is_blamed():
    names = "a.weight", "b.weight"
    assert having_cut(dict.fromkeys(names, "relu"), zero=names, alive=()).kind == "normal"


@pytest.mark.parametrize(("missing", "those"), [(("v",), "v"), (("v", "w", "x"), "v and 2 more")])
def test_parameters_that_are_not_used_are_information(missing, those):
    found = having_cut(None, missing=missing)
    assert found.kind == "normal"
    assert f"If {those} should be trained, look for what keeps the loss from" in found.text
    later = having_cut(None, missing=missing, later=((), missing[1:]))
    assert those not in later.text


@pytest.mark.parametrize(
    ("calls", "kind", "words"),
    [
        ({}, "normal", "Call step(optimizer) of the scaler that is watched"),
        ({"raised": 1}, "normal", "do what its message says"),
        ({"idle": 12}, "misuse", "found no gradient in 12 calls"),
    ],
)
def test_a_run_without_a_step_is_told_what_its_calls_say(calls, kind, words):
    found = judge(Evidence(0, 0, events=Events().after(calls)))
    assert found.kind == kind
    assert words in found.text


def test_a_rank_whose_loss_is_anothers_does_not_miss_it():
    """As in a pipeline, where only the last stage has the loss."""
    lossless = Evidence(100, 0, events=Events().after({"lossless": 100}))
    assert judge(lossless).kind == "misuse"
    assert judge(replace(lossless, world_size=2)).kind == "normal"


@pytest.mark.parametrize(("kind", "backoff"), [("normal", 0.5), ("data", 1.0)])
def test_skips_that_do_not_lower_the_scale_are_not_explained_by_large_gradients(kind, backoff):
    """Such as a NaN in each tenth batch, if the hysteresis needs two skips in a row."""
    past, scale = [], 2.0**15
    for step in range(1, 101):
        past.append(Step(step, scale, step % 10 == 5))
        scale *= backoff if past[-1].skipped else 1.0
    scale = past[-1].scale
    peaks = ((1, 2.0**18 / scale),)
    assert judge(Evidence(100, 10, past=tuple(past), peaks=peaks)).kind == kind


@pytest.mark.parametrize(("num_seen", "kind"), [(0, "data"), (1, "normal")])
def test_skips_before_the_first_sample_are_not_unexplained(num_seen, kind):
    skipped = (16, 18, 21, 24)
    scales = {n: 2.0 ** (9 - sum(n > s for s in skipped)) for n in range(1, 31)}
    past = tuple(Step(n, scale, n in skipped) for n, scale in scales.items())
    peaks = ((28, 2.0**-9),)[:num_seen]
    assert judge(Evidence(30, 4, past=past, peaks=peaks)).kind == kind


@pytest.mark.parametrize(
    ("backward", "words"),
    [
        ({"float16", "float32"}, "until numbers left float16"),
        ({"bfloat16", "float32"}, "until numbers left bfloat16"),
        ({"float32"}, "until numbers left float32"),
        ((), "until numbers became Inf or NaN"),
        ({"unknown", "float32"}, "until numbers became Inf or NaN"),
    ],
)
def test_a_divergence_names_the_range_that_was_seen(backward, words):
    past = tuple(Step(n, 1.0, n > 99, 10.0 ** (n // 20)) for n in range(1, 119))
    assert words in judge(replace(STUCK, past=past, backward=frozenset(backward))).text


@pytest.mark.parametrize(
    ("backward", "kind"),
    [({"bfloat16", "float32"}, "normal"), ({"float16"}, "underflow"), ((), "underflow")],
)
def test_only_what_is_in_float16_underflows_there(backward, kind):
    sample = Sample(100, 1.0, (), 100, (), shares=TAIL, histogram=Bins(-30, (1,)))
    evidence = Evidence(100, 0, sample=sample, scale=1.0, min_scale=1.0)
    assert judge(replace(evidence, backward=frozenset(backward))).kind == kind


def test_a_parameter_that_is_nan_is_told_with_the_losses_that_were_seen():
    past = tuple(Step(n, 8.0, False, math.nan if n > 7 else 1.0) for n in range(1, 11))
    found = judge(Evidence(10, 0, past=past, parameter="w", bad_and_applied=3))
    assert "is itself Inf or NaN, and the loss was NaN or Inf in 3 of 10 steps." in found.text


@pytest.mark.parametrize("loss", [0.0, 0.5])
def test_a_loss_that_was_0_is_no_divergence(loss):
    past = tuple(Step(n, 8.0, n > 20 and n % 4 < 2, loss if n > 20 else 0.0) for n in range(1, 41))
    assert judge(Evidence(40, 20, past=past)).kind != "divergence"


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        ("mean", "the mean of no elements is 0 / 0"),
        ("cross_entropy", "labels all ignored"),
        ("std", "correction=0"),
        ("mul", "a factor is a constant Inf or NaN"),
    ],
)
def test_a_nan_that_no_overflow_makes_is_no_overflow(operation, words):
    located = in_loss(operation, num_inf=0, dtype="float32", size=1)
    assert words in judge(replace(STUCK, located=located, skips=NAN_LOSS)).text


def test_beside_a_finding_in_a_streak_of_skips_nothing_says_that_nothing_is_unusual():
    falling = replace(STUCK, events=Events())
    assert judge(falling).kind == "normal"  # a lower scale may be the cure
    verdict = judge(replace(STUCK, events=Events().after({"unzeroed": 119})))
    assert [each.kind for each in verdict.findings] == ["misuse"]
    assert "Nothing unusual" not in verdict.text


@pytest.mark.parametrize(("number", "kind"), [(4, "normal"), (5, "data")])
def test_losses_that_are_bad_in_a_row_are_told_before_the_streak_is_long(number, kind):
    steps = tuple(
        Step(n, 1024.0, n > 20, math.inf if n > 20 else 1.0) for n in range(1, 21 + number)
    )
    counts = {"skipped": number, "bad_and_skipped": number, "scale": 1024.0}
    assert judge(Evidence(20 + number, past=steps, **counts)).kind == kind


def test_one_loss_that_is_bad_by_an_ordinary_number_is_told_without_its_gradients():
    steps = tuple(Step(n, 1024.0, n == 9, math.inf if n == 9 else 1.0) for n in range(1, 10))
    found = in_loss("log", num_inf=1, dtype="float32", size=1, largest=0.0)
    counts = {"skipped": 1, "bad_and_skipped": 1, "scale": 1024.0}
    assert judge(Evidence(9, past=steps, watched=found, **counts)).kind == "loss"


# What names a gradient's operation was tried in each: see the pages on what is named.
FINDERS = {
    ("torch", ""): "locate() ",
    ("jax", ""): "locate_jax() ",
    ("keras", "jax"): "locate() ",
    ("keras", "torch"): "locate() ",
    ("keras", "tensorflow"): "locate() ",
    ("tf_keras", ""): "locate() ",
    ("paddle", ""): "locate() ",
    ("tensorplay", ""): "locate() ",
    ("mindspore", ""): "locate() ",
    ("keras", "a later backend"): None,
}


@pytest.mark.parametrize(("name", "backend"), FINDERS)
def test_only_what_names_an_operation_in_the_framework_at_hand_is_advised(name, backend):
    finder, framework = FINDERS[name, backend], framework_named(name, {backend: "1.0"})
    steps = tuple(Step(n, 1024.0, skipped=n % 6 == 0, loss=1.0) for n in range(1, 61))
    at_times = judge(Evidence(60, 10, past=steps, scale=1.0, framework=framework)).text
    in_all = judge(replace(STUCK, skips=NAN_AT_1, framework=framework)).text
    if finder is None:
        assert "names" not in at_times + in_all
    else:
        assert f": {finder}on one names it" in at_times
        assert f"; {finder}names the operation" in in_all
