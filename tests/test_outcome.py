"""The record of a step, which reads the device once and only when asked."""

import pytest

from gradscaler import StepOutcome


class CountedReads:
    """Stands for a value on a device: counts how often it is read."""

    def __init__(self, value):
        self.value = value
        self.reads = 0

    def __call__(self):
        self.reads += 1
        return self.value

    __float__ = __call__


def never():
    raise AssertionError("the device was read")


def test_making_a_record_reads_nothing():
    flag, scale = CountedReads(True), CountedReads(8.0)
    StepOutcome(scale, flag)
    assert (flag.reads, scale.reads) == (0, 0)


@pytest.mark.parametrize("asked", ["applied", "skipped", "reason", "found_inf", "__repr__"])
@pytest.mark.parametrize("found_inf", [True, False])
def test_the_flag_is_read_once_for_all_questions(asked, found_inf):
    flag = CountedReads(found_inf)
    outcome = StepOutcome(8.0, flag)
    for name in (asked, asked, "found_inf", "reason", "applied", "skipped", "__repr__"):
        answer = getattr(outcome, name)
        if callable(answer):
            answer()
        assert flag.reads == 1


def test_a_scale_that_is_a_tensor_is_read_once():
    scale = CountedReads(8.0)
    outcome = StepOutcome(scale, False)
    assert [outcome.scale, outcome.scale] == [8.0, 8.0]
    assert scale.reads == 1


def test_the_flag_keeps_the_value_of_its_first_read():
    flag = CountedReads(True)
    outcome = StepOutcome(8.0, flag)
    assert outcome.found_inf
    flag.value = False
    assert outcome.found_inf


def test_asking_for_the_scale_does_not_read_the_flag():
    assert StepOutcome(8.0, never).scale == 8.0


def test_the_known_reason_reads_nothing():
    assert StepOutcome(8.0, never).known_reason is None
    assert StepOutcome(8.0, never, "no_gradients").known_reason == "no_gradients"


def test_a_failure_to_read_reaches_whoever_asked():
    with pytest.raises(AssertionError, match="the device was read"):
        _ = StepOutcome(8.0, never).applied


@pytest.mark.parametrize(
    ("given", "found_inf", "reason", "applied"),
    [
        (None, False, "finite", True),
        (None, True, "overflow", False),
        ("finite", never, "finite", True),
        ("disabled", never, "disabled", True),
        ("overflow", never, "overflow", False),
        ("retries_exhausted", never, "retries_exhausted", False),
        ("no_gradients", never, "no_gradients", False),
    ],
)
def test_a_given_reason_decides_without_the_flag_and_the_flag_otherwise(
    given, found_inf, reason, applied
):
    outcome = StepOutcome(8.0, found_inf, given)
    assert (outcome.reason, outcome.applied, outcome.skipped) == (reason, applied, not applied)


@pytest.mark.parametrize("found_inf", [True, False])
def test_a_given_reason_leaves_the_flag_as_it_is(found_inf):
    assert StepOutcome(8.0, lambda: found_inf, "retries_exhausted").found_inf is found_inf


def test_the_repr_says_whether_the_step_was_applied_and_why():
    assert repr(StepOutcome(8, False)) == "StepOutcome(applied, reason='finite', scale=8.0)"
    skipped = StepOutcome(CountedReads(0.5), lambda: True)
    assert repr(skipped) == "StepOutcome(skipped, reason='overflow', scale=0.5)"


@pytest.mark.parametrize("name", ["scale", "found_inf", "reason", "applied", "skipped"])
def test_the_record_cannot_be_rewritten(name):
    outcome = StepOutcome(8.0, False)
    with pytest.raises(AttributeError):
        setattr(outcome, name, True)


def test_a_torch_scale_is_given_as_a_python_float():
    torch = pytest.importorskip("torch")
    scale = StepOutcome(torch.tensor(0.5), False).scale
    assert (scale, type(scale)) == (0.5, float)
