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
def test_the_flag_is_read_once_however_often_it_is_asked_for(asked, found_inf):
    flag = CountedReads(found_inf)
    outcome = StepOutcome(8.0, flag)
    for _ in range(3):
        answer = getattr(outcome, asked)
        if callable(answer):
            answer()
    assert flag.reads == 1


def test_all_answers_together_take_one_read():
    flag = CountedReads(False)
    outcome = StepOutcome(8.0, flag)
    answers = outcome.applied, outcome.skipped, outcome.reason, outcome.found_inf, repr(outcome)
    assert (flag.reads, len(answers)) == (1, 5)


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


@pytest.mark.parametrize("asked", ["applied", "skipped", "reason"])
def test_a_reason_that_is_known_already_needs_no_reading(asked):
    assert getattr(StepOutcome(8.0, never, "no_gradients"), asked) is not None


def test_the_known_reason_reads_nothing():
    assert StepOutcome(8.0, never).known_reason is None
    assert StepOutcome(8.0, never, "no_gradients").known_reason == "no_gradients"


def test_a_failure_to_read_reaches_whoever_asked():
    with pytest.raises(AssertionError, match="the device was read"):
        _ = StepOutcome(8.0, never).applied


def test_finite_gradients_were_applied():
    outcome = StepOutcome(8.0, False)
    assert (outcome.reason, outcome.applied, outcome.skipped) == ("finite", True, False)


def test_an_overflow_was_skipped():
    outcome = StepOutcome(8.0, True)
    assert (outcome.reason, outcome.applied, outcome.skipped) == ("overflow", False, True)


@pytest.mark.parametrize(
    ("reason", "applied"),
    [
        ("finite", True),
        ("disabled", True),
        ("overflow", False),
        ("retries_exhausted", False),
        ("no_gradients", False),
    ],
)
@pytest.mark.parametrize("found_inf", [True, False])
def test_a_given_reason_decides_whether_the_step_was_applied(reason, applied, found_inf):
    outcome = StepOutcome(8.0, found_inf, reason)
    assert (outcome.reason, outcome.applied, outcome.skipped) == (reason, applied, not applied)


@pytest.mark.parametrize("found_inf", [True, False])
def test_a_given_reason_leaves_the_flag_as_it_is(found_inf):
    assert StepOutcome(8.0, lambda: found_inf, "retries_exhausted").found_inf is found_inf


def test_the_repr_of_an_applied_step_says_so():
    assert repr(StepOutcome(8, False)) == "StepOutcome(applied, reason='finite', scale=8.0)"


def test_the_repr_of_a_skipped_step_says_why():
    outcome = StepOutcome(CountedReads(0.5), lambda: True)
    assert repr(outcome) == "StepOutcome(skipped, reason='overflow', scale=0.5)"


@pytest.mark.parametrize("name", ["scale", "found_inf", "reason", "applied", "skipped"])
def test_the_record_cannot_be_rewritten(name):
    outcome = StepOutcome(8.0, False)
    with pytest.raises(AttributeError):
        setattr(outcome, name, True)


def test_a_torch_scale_is_given_as_a_python_float():
    torch = pytest.importorskip("torch")
    scale = StepOutcome(torch.tensor(0.5), False).scale
    assert (scale, type(scale)) == (0.5, float)
