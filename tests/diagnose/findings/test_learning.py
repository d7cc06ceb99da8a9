"""What is said of a loss in a run without a finding: a fall that did not last is no fall."""

import math
from dataclasses import replace

import pytest

from gradscaler import NonfiniteGradient
from gradscaler.diagnose._findings import judge
from gradscaler.diagnose._findings.evidence import Evidence, Way
from gradscaler.diagnose._record.events import Events
from gradscaler.diagnose._record.lines import Optimizers, Sample, Skip, Targets
from gradscaler.diagnose._record.step import Step
from gradscaler.diagnose._record.thresholds import LONG

FELL = [2.0 * 0.95**n for n in range(100)]
STOOD = [2.0] * 120
SAMPLE = Sample(1, 1.0, ((1, 1.0),), 1, ())


def told(losses, **more):
    """The text on a loop without a scaler that had these losses."""
    past = tuple(Step(n, 1.0, skipped=False, loss=loss) for n, loss in enumerate(losses, 1))
    way = Way().after(losses)
    evidence = Evidence(len(past), 0, past=past, way=way, first=past[0], has_scaler=False)
    return judge(replace(evidence, **{"sample": SAMPLE, "missing": (), **more})).text


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ([1.5] * 60, "up to step 100, and rose at step 101. If it should have stayed there, look"),
        ([0.6] * 60, "up to step 100, and rose at step 101. If it should have stayed there, look"),
        (
            [0.02 * n for n in range(80)],
            "up to step 102. If it should have stayed there, lower the learning",
        ),
    ],
)
def test_a_loss_that_rises_again_is_told_with_the_step(then, said):
    assert said in told(FELL + then)


def test_a_quarter_of_what_a_loss_had_won_is_much():
    fell = [10.0] * 10 + [2.0] * 60
    assert "If it should have stayed there" in told([*fell, *[4.2] * 60])
    assert "Nothing wrong was seen" in told([*fell, *[3.8] * 60])


def test_a_jump_before_the_loss_was_lowest_is_not_when_it_rose():
    jump, slowly = [2.0] * 20 + [8.0] * 5, [0.02 * n for n in range(80)]
    assert "If it should have stayed there, lower the learning" in told([*jump, *FELL, *slowly])


@pytest.mark.parametrize(
    "then",
    [
        [],
        [0.02] * 60,
        [0.1] * 60,  # of the 2 that were won, little is lost
        [1.5] * 30 + FELL,  # it falls once more
        [0.0, 0.3] * 30,  # batches that differ
    ],
)
def test_a_loss_that_stays_down_needs_nothing(then):
    said = told(FELL + then)
    assert "Nothing wrong was seen in numbers and calls: the loss went from 2 to" in said


@pytest.mark.parametrize("value", [-0.0, 1e-9])
def test_a_loss_of_0_from_centred_advantages_is_not_told_to_stand(value):
    said = told([-3.7e-9] + [3e-9] * 9 + [value] * 110)
    assert (f"it was {value:g} in 100 of the latest 100 steps" in said) is (value > 0)


def test_of_a_loss_whose_latest_is_a_high_one_the_mean_is_told():
    text = told([1.8, *[4.0] * 9, *[0.9, 1.1] * 54, 1.1, 2.0])
    assert "Nothing wrong was seen" in text
    assert "the loss went from 1.8 to 2, its mean from 3.78 to 1.05" in text


def test_a_short_run_is_not_praised_for_a_loss_that_rises():
    rises = [0.66 + 0.003 * n + 0.05 * (n % 2) for n in range(24)]
    end = "Nothing else was judged: the loss went from 0.66 to 0.779, in 24 steps, too few to say"
    assert end in told(rises)
    assert "Nothing wrong was seen in numbers and calls: the loss went from 0.779 to 0.66" in told(
        rises[::-1]
    )


@pytest.mark.parametrize(("latest", "is_praised"), [(1.57, False), (1.51, False), (1.49, True)])
def test_a_short_run_is_not_praised_for_two_losses_that_are_alike(latest, is_praised):
    """Those in between may have fallen."""
    text = told([1.58, 1.7, 1.6, 1.55, 1.5, latest])
    assert ("Nothing wrong was seen" in text) is is_praised
    assert ("in 6 steps, too few to say whether it falls" in text) is not is_praised
    assert "in 1 step, too few" in told([1.58])


@pytest.mark.parametrize(("count", "is_told"), [(1, False), (2, True)])
def test_a_cross_entropy_is_negative_in_two_samples_before_it_is_told(count, is_told):
    text = told(FELL, events=Events().after({"negative": count}))
    assert ("A cross entropy is negative" in text) == is_told


@pytest.mark.parametrize(("classes", "is_told"), [(2, False), (10, True)])
def test_a_guess_among_two_classes_is_left_to_gans(classes, is_told):
    chance = math.log(classes)
    text = told([chance] * 120, sample=replace(SAMPLE, chance=chance))
    assert (f"a guess among {classes} classes" in text) == is_told


@pytest.mark.parametrize("count", [1, 2])
def test_what_a_loss_depends_on_and_nobody_holds_is_named_with_the_praise(count):
    unheld = Events().after({"unheld": count, "unheld ArcFace.weight": count})
    said = "If ArcFace.weight should be trained, give that to an optimizer: neither the model nor"
    assert (said in told(FELL, events=unheld)) == (count > 1)


@pytest.mark.parametrize(
    ("losses", "norm", "is_tiny"),
    [(STOOD, 1e-9, True), (STOOD, 1e-3, False), ([2.0, 2.01] * 60, 1e-9, False)],
)
def test_gradients_that_leave_the_loss_as_it_is_are_told(losses, norm, is_tiny):
    said = told(losses, measured=(replace(SAMPLE, norm=norm),) * 3)
    assert ("a norm of at most 1e-09, that the loss stays the same" in said) == is_tiny


@pytest.mark.parametrize("has_scaler", [False, True])
@pytest.mark.parametrize("losses", [FELL, STOOD])
def test_an_evaluation_that_left_a_nan_takes_the_place_of_an_all_clear_alone(losses, has_scaler):
    events = Events().after({"nan_left val_loss": 1})
    said = told(losses, events=events, has_scaler=has_scaler)
    assert ("The script's val_loss is NaN in the end" in said) == (losses is FELL)
    assert ("Nothing else was judged" in said) == (losses is STOOD)
    assert "Nothing wrong was seen" not in said


def test_a_loss_that_does_not_fall_is_told_with_a_scaler_too():
    assert "None of 120 steps was skipped. Nothing else was judged" in told(STOOD, has_scaler=True)
    assert (
        told(FELL, has_scaler=True)
        == "None of 100 steps was skipped. Nothing wrong was seen in numbers and calls."
    )


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        (
            FELL,
            "If head.bias and 1 more should be trained, look at what froze them on the way",
        ),
        (STOOD, "If it should have fallen, look at head.bias and 1 more, which were frozen on"),
    ],
)
def test_parameters_that_were_frozen_on_the_way_are_named(losses, said):
    seen = Optimizers(frozen=("body.bias", "head.bias"))
    assert said in told(losses, optimizers=seen)


ENDS = [0.5] * 110  # at one number


@pytest.mark.parametrize(
    ("before", "is_told"),
    [
        ([2.0 - 0.01 * n + 0.1 * (n % 2) for n in range(100)], True),  # batches that differ
        ([2.0 - 0.01 * n for n in range(100)], False),  # one batch
        ([0.5 + 1.5 * 0.95**n * math.cos(n / 4) for n in range(100)], False),  # with a momentum
        ([2.0 - 0.05 * n for n in range(19)], True),  # 19 moves may be smooth by chance
        ([2.0 - 0.05 * n for n in range(20)], False),
    ],
)
def test_a_loss_that_ends_at_one_number_is_told_unless_its_batch_is_always_the_same(
    before, is_told
):
    text = told(before + ENDS)
    assert (f"it was 0.5 in {LONG} of the latest {LONG} steps" in text) == is_told
    assert ("Nothing wrong was seen" in text) != is_told


def test_what_a_rounding_moves_is_no_turn():
    rounded = [0.5, 0.5 + 2e-7] * 500
    assert Way().after([2.0 - 0.05 * n for n in range(31)] + rounded).is_smooth
    assert not Way().after([2.0, *rounded]).is_smooth


RISES = [2.0 * 1.05**n for n in range(100)]
HEADS = "head.weight", "head.bias"


@pytest.mark.parametrize(
    ("losses", "cut", "said"),
    [
        (
            FELL,
            {},
            "from them: no sample holds a gradient of them. Nothing else wrong was seen",
        ),
        (RISES, {}, "2 to 250.479. If head.weight and 1 more should be trained, look for what"),
        (RISES, {}, "of them. If the loss should have fallen, lower the learning rate."),
        (STOOD, {}, "of them. If the loss should have fallen, look at the learning rate"),
        (
            FELL,
            {"head.weight": "left out"},
            "head is called, and the loss leaves out what it makes",
        ),
        (
            RISES,
            {"head.weight": "left out", "other.bias": "left out"},
            "2 to 250.479. head is called, and the loss leaves out what it makes: if head.weight "
            "and 1 more should be trained, add that to the loss; what is only logged may stay. If "
            "the loss",
        ),
    ],
)
def test_parameters_without_a_gradient_are_named_before_the_learning_rate(losses, cut, said):
    text = told(losses, missing=HEADS, cut=cut)
    assert said in text
    assert ("Nothing else wrong was seen" in text) == (losses is FELL and not cut)


def test_what_passes_no_gradient_on_is_named_with_the_parameters_that_lack_one():
    place = "stop_gradient at train.py:22"
    seen = Events().after({"passes_none": 2, f"passes_none {place}": 2})
    text = told(FELL, missing=HEADS, events=seen)
    assert f"no sample holds a gradient of them, and {place} passes none on" in text
    assert place not in told(FELL, events=seen)


def test_optimizers_that_take_turns_have_no_gradients_meanwhile():
    turns = Events().after({"switched": 60})
    assert "head.weight" not in told(STOOD, missing=HEADS, events=turns)
    assert "of its own. head is" in told(
        STOOD, missing=HEADS, events=turns, cut={"head.weight": "left out"}
    )


@pytest.mark.parametrize(
    ("of_scale", "dtype", "said"),
    [
        (0, "float32", "Look at these batches"),
        (1, "float16", "The script's own loss scale may settle so; look at their batches if more"),
    ],
)
def test_steps_that_an_own_loss_scale_leaves_out_are_no_bad_batches(of_scale, dtype, said):
    known = {"events": Events().after({"by_hand": of_scale}), "backward": frozenset({dtype})}
    assert said in told(FELL, skipped=8, **known)


@pytest.mark.parametrize(
    ("latest", "scales", "said"),
    [
        (
            1.0,
            (1024, 4096),
            "the loss went from 2 to 1, each divided by the script's own",
        ),
        (1.95, (1024, 4096), "of its step. If it should have fallen, lower the learning rate."),
        (1.85, (1024, 4096), "the loss went from 2 to 1.85, each divided by"),
        (1.0, (1024,), "went from 2048 to 1024, multiplied by the script's own loss scale."),
    ],
)
def test_losses_are_told_without_an_own_loss_scale_that_changes(latest, scales, said):
    """A later sample may have counted more of its scale."""
    events, measured = Events(), ()
    for count, scale in enumerate(scales, 1):
        calls = {"by_hand": count, f"by_hand {scale}": count}
        events = events.after(calls)
        measured += (replace(SAMPLE, loss=latest * scale, calls=calls),)
    losses = [2.0 * scales[0], *[latest * scales[-1]] * 119]
    known = {"events": events, "measured": measured, "backward": frozenset({"float16"})}
    text = told(losses, **known)
    assert said in text
    assert ("If it should have fallen" in text) == (latest > 1.9)


def test_steps_without_a_gradient_that_was_read_are_not_said_to_have_had_a_finite_one():
    blind = {"sample": None, "first": None}
    assert "No Inf or NaN was seen in 100 steps. No gradients were read" in told(FELL, **blind)


RISES = [0.01 * n for n in range(1, 121)]
WEIGHTED = Events().after({"weighted": 2, "weighted mul at a.py:7": 2})
NO_MEASURE = "numbers without a gradient, in mul at a.py:7. As rewards or advantages, they make"


@pytest.mark.parametrize("losses", [RISES, FELL + [1.5] * 60, [2.0, 2.01] * 60])
def test_a_loss_that_weighs_log_probabilities_by_rewards_is_no_measure(losses):
    assert NO_MEASURE in told(losses, events=WEIGHTED)
    once = Events().after({"weighted": 1, "weighted mul at a.py:7": 1})
    for events in (once, Events()):
        assert "no measure" not in told(losses, events=events)
        assert "If it should have" in told(losses, events=events)


def test_a_weighted_loss_that_falls_is_as_fine_as_another_one():
    assert told(FELL, events=WEIGHTED) == told(FELL)


def test_a_loss_of_rewards_that_are_0_at_first_has_nothing_to_be_compared_with():
    assert "lower the learning rate" not in told([-0.0] * 12 + [0.0, 4e-4] * 50)
    assert "lower the learning rate" in told([1e-4] * 12 + [3e-4, 4e-4] * 50)


@pytest.mark.parametrize(
    ("losses", "is_told"),
    [
        ([0.01, *[0.3, -0.2] * 50, 0.4], True),
        ([0.01, *[0.3, -0.2, 0.2, 0.1] * 25, 0.4], True),
        ([-2.0 + 0.06 * n for n in range(121)], False),  # a likelihood that gets worse
        ([0.01, *[0.3] * 50, *[-0.2] * 2, *[0.3] * 50, 0.4], False),
    ],
)
def test_a_loss_whose_sign_changes_often_is_no_measure(losses, is_told):
    text = told(losses)
    assert ("times, as a loss of advantages or of a critic" in text) == is_told
    assert ("lower the learning rate" in text) != is_told


@pytest.mark.parametrize(("last", "is_told"), [(2.1, True), (1.9, False)])
def test_a_loss_that_rises_with_its_targets_is_told_so(last, is_told):
    targets = (Targets(1.0, 1.0, size, 1.0) for size in (1.0, last))
    text = told(RISES, measured=tuple(replace(SAMPLE, targets=each) for each in targets))
    assert ("as its targets went from some 1 to 2. If these should not" in text) == is_told
    assert "lower the learning rate" in text


@pytest.mark.parametrize(
    ("losses", "norm", "weights", "is_told"),
    [
        ([1.0, 1.0 + 1e-7] * 60, 0.1, (1.0, 1.1), True),  # loss / loss.detach()
        ([0.0] * 120, 0.1, (1.0, 1.1), True),  # loss - loss.detach()
        ([1.0, 1.001] * 60, 0.1, (1.0, 1.1), False),
        ([1.0] * 120, 1e-5, (1.0, 1.1), False),
        ([1.0] * 120, 0.1, (1.0, 1.00001), False),
        ([1.0] * 120, 0.1, None, False),
    ],
)
def test_a_loss_that_is_constant_by_construction_is_told_as_that(losses, norm, weights, is_told):
    measured = (replace(SAMPLE, norm=norm),) * 2
    text = told(losses, measured=measured, optimizers=Optimizers(weights=weights))
    assert ("constant by construction, as loss / loss.detach() is" in text) == is_told


def changed(*steps, more=0):
    """The events of a loss that became another one at these steps."""
    of_steps = {f"changed {step}": 1 for step in steps}
    return Events().after({"changed": len(steps) + more, **of_steps})


def test_the_ends_of_a_loss_are_those_of_the_latest_one():
    losses = [0.1] * 50 + [1.6] + [1.6 * 0.97**n for n in range(1, 70)]
    text = told(losses, events=changed(51))
    said = "Nothing wrong was seen in numbers and calls: since step 51, where it became another one"
    assert f"{said}, the loss went from 1.6 to 0.1956" in text
    assert "the loss went from 0.1 to 0.1956" in told(losses)


@pytest.mark.parametrize(
    "events", [changed(102), changed(*range(2, 22), more=1), changed(*range(10, 110, 5))]
)
def test_no_ends_are_told_of_losses_that_follow_one_another(events):
    text = told([1.0, 100.0] * 60, events=events)
    assert text.endswith("as losses of several kinds, or several optimizers, follow one another.")


def test_what_an_optimizer_holds_later_is_not_said_to_be_held_by_none():
    unheld = {"unheld": 2, "unheld Linear.weight": 2}
    assert "neither the model" in told(FELL, events=Events().after(unheld))
    assert told(FELL, events=Events().after({**unheld, "held_late": 1})) == told(FELL)


@pytest.mark.parametrize(
    ("scales", "falls", "nan", "every", "is_told"),
    [
        (2, True, 0, 12, False),
        (2, True, 2, 12, True),  # the NaN of a batch, which no scale cures
        (2, False, 0, 12, True),
        (1, True, 0, 12, True),
        (2, True, 0, 4, True),
    ],
    ids=["backs off", "is NaN", "stays", "is fixed", "fails often"],
)
def test_steps_after_which_an_own_loss_scale_falls_are_no_bad_batches(
    scales, falls, nan, every, is_told
):
    loss, past, skips = 2.0**14, [], []
    for number in range(1, 121):
        is_skipped = number % every == 0
        past.append(Step(number, 1.0, is_skipped, loss))
        if is_skipped:
            bad = NonfiniteGradient("fc.weight", (2,), "float32", 2 - nan, nan, 1.0)
            skips.append(Skip(number, 1.0, loss, (bad,)))
            loss /= 2 if falls else 1
    calls = {"by_hand": 3, **{f"by_hand {2**n}": 1 for n in range(9, 9 + scales)}}
    evidence = Evidence(
        120,
        len(skips),
        past=tuple(past),
        first=past[0],
        inspected=tuple(skips),
        events=Events().after(calls),
        backward=frozenset({"float16", "float32"}),
        has_scaler=False,
        scale=1.0,
    )
    text = judge(evidence).text
    assert ("own loss scale may settle so" in text) != is_told, text
