"""Each threshold of a finding at both of its sides, by evidence without a training.

A case is what is told, evidence that it is told of, and evidence at the other side of a threshold,
of which its first words are not told. Other words, and what a finding holds else, follow " ... ".
"""

import math
from dataclasses import replace
from importlib import import_module
from itertools import accumulate, chain
from operator import eq, sub
from pathlib import Path
from unittest import mock

import pytest

from gradscaler import NonfiniteGradient
from gradscaler.diagnose import Located, _findings
from gradscaler.diagnose._findings import judge
from gradscaler.diagnose._findings.evidence import Evidence, Way
from gradscaler.diagnose._findings.frameworks import framework_named
from gradscaler.diagnose._record import thresholds
from gradscaler.diagnose._record.events import Events
from gradscaler.diagnose._record.lines import (
    BadStep,
    Bins,
    Optimizers,
    ParameterSample,
    Sample,
    Shares,
    Skip,
    Targets,
)
from gradscaler.diagnose._record.step import Before, Step

NAN = NonfiniteGradient("fc.weight", (2,), "float32", 0, 2, 1.0)
INF = NonfiniteGradient("fc.weight", (2,), "float32", 2, 0, 1.0)
LOG = Located(None, "forward", "", "float32", 1, 0, 8, 1.0, 255.0, operation="log", line="a.py:7")


LOADED = {"events": Events().after({"loaded": 1, "loaded a.py:7": 1})}
MARGIN = {"events": Events().after({"margin": 2, "margin relu": 2})}
IDLE = {"optimizers": Optimizers(idle={"head": 5})}
ADDED_UP = {"added_up": 2, "added_up 16": 2}
CALLS = "step", "backward", "clip", "eval", "zero", "schedule", "optimizer"
LINES = Optimizers(lines={call: f"{call}.py:7" for call in CALLS})


def counted(steps, more=None, **counts):
    """Steps, and what was counted of calls or seen in samples."""
    known = {"optimizers": LINES, **(more or {})}
    return Evidence(steps, 0, events=Events().after(counts), **known)


def with_losses(losses, **more):
    """Steps that were applied."""
    past = tuple(Step(n, 1.0, skipped=False, loss=loss) for n, loss in enumerate(losses, 1))
    known = {"steps": len(past), "skipped": 0, "past": past, "first": past[0]}
    return Evidence(**{**known, **more})


def skipping(steps, skipped, loss=math.inf, scale=1024.0, **more):
    """Steps, some of which were skipped, by their numbers."""
    past = tuple(Step(n, scale, n in skipped, loss if n in skipped else 1.0) for n in steps)
    count = len(skipped) * (not math.isfinite(loss))
    known = {"past": past, "bad_and_skipped": count, "scale": scale, **more}
    return Evidence(len(past), len(skipped), **known)


def sampled(step=50, scale=1.0, **more):
    return Sample(step, scale, (), step, (), **more)


def gradients(zero, first=-9, flushed=0.0):
    """A parameter's, the exponent of which is known, if not all are 0."""
    return ParameterSample(zero, flushed, 0.0, 0.0, Bins(first, (9,) * (zero < 1)))


def shares(zero=0.0, flushed=0.0, subnormal=0.0):
    return Shares(zero, flushed, subnormal, 1 - zero - flushed - subnormal, 0.0, 0.0)


def unwritten(steps, skipped=0, norm=1.0):
    found = {"a.weight": gradients(0.0), "a.bias": gradients(0.0)}
    sample = sampled(norm=norm, parameters=found)
    return Evidence(50, skipped, sample=sample, optimizers=Optimizers(stood=steps))


def of_calls():
    def following(count, power=1.0, ratio=2.0):
        scales = [2.0**40 / ratio**n for n in range(count)]
        past = [Step(n, scale, True, scale**power) for n, scale in enumerate(scales, 1)]
        return Evidence(100, count, past=tuple(past), scale=scales[-1])

    def recorded(beyond, of, samples=2, scale=1024.0):
        found = {f"w{n}": gradients(0.0, first=10 if n < beyond else -20) for n in range(of)}
        sample = sampled(scale=scale, norm=1.0, largest=1024.0, parameters=found)
        return Evidence(50, 0, measured=(sample,) * samples, framework=framework_named("jax", {}))

    def clipped(*norms, scale=512.0, largest=None):
        seen = [sampled(scale=scale, norm=each / scale, largest=largest) for each in norms]
        return Evidence(50, 0, measured=tuple(seen), optimizers=LINES)

    def divided(*norms, has_scaler=False, **others):
        """Norms at the step, of gradients with a norm of 2 at a scale of 256."""
        calls = {"by_hand": 1, "by_hand 256": 1, **others}
        held = [Optimizers(used=each, lines=LINES.lines) for each in norms]
        seen = [sampled(norm=2.0 * 256, optimizers=each, calls=calls) for each in held]
        known = {"optimizers": held[-1], "has_scaler": has_scaler}
        return Evidence(50, 0, measured=tuple(seen), **known)

    twice, clipped_at = 2.0 / 256, 1.5 / 256

    def resumed(ratio, loss=1.0):
        before, first = Before(1024.0, 3.0, 1.0), Step(9, 1024.0 * ratio, skipped=False, loss=loss)
        return Evidence(9, 0, before=before, first=first)

    def in_single(steps, dtype="float32", **more):
        return Evidence(steps, 0, scale=1.0, backward=frozenset({dtype}), **more)

    def zeroed(count, of):
        seen = [sampled(norm=1.0, calls={"zeroed": 1} if n < count else {}) for n in range(of)]
        more = {"optimizers": LINES, "measured": tuple(seen)}
        return counted(50, more, **{"zeroed": count, "zeroed 7 of 8": count})

    overflowed = {"first": Step(1, 2.0**16, skipped=True)}
    fine = {"first": Step(1, 2.0**16, skipped=False)}
    return [
        (
            "7 of 8 backward passes ... at zero.py:7, so ... count=3",
            [zeroed(3, 3), zeroed(3, 4)],
            [zeroed(2, 2), zeroed(3, 5), zeroed(7, 10)],
        ),
        ("called 5 times beside ... count=5", [counted(9, repeated=5)], [counted(9, repeated=4)]),
        (
            "took the loss that scale() returned ... by 1024 all the same ... count=2",
            [counted(9, {"scale": 1024.0}, bypassed=2)],
            [counted(9, {"scale": 1024.0}, bypassed=1)],
        ),
        (
            "divided the gradients by 1024, which is the loss scale ... count=2",
            [counted(9, {"scale": 1024.0}, shrunk=2)],
            [counted(9, {"scale": 1024.0}, shrunk=1)],
        ),
        (
            "called 1 time beside ... count=1",
            [counted(9, {"bad_step": BadStep(1, 1.0, (NAN,))}, repeated=1)],
            [counted(9, {"bad_step": BadStep(1, 1.0, (NAN,), is_left_out=True)}, repeated=1)],
        ),
        (
            "5 forward passes computed in float16 ... count=5",
            [counted(0, disabled=5)],
            [counted(0, disabled=4), counted(1, disabled=5)],
        ),
        (
            "added scaled gradients to the unscaled ones that ... a sum of unlike parts ... each "
            "step at step.py:7; with micro-batches, call step(optimizer) and update() once ... "
            "where=None, line='step.py:7', steps=(), count=5",
            [counted(20, unzeroed=5), counted(20, {"scale": 1.0}, unzeroed=5)],
            [counted(21, unzeroed=5), counted(20, {"scale": 1.0, "min_scale": 1.0}, unzeroed=5)],
        ),
        (
            "added to the gradients (those of fc) that ... the sum of all ... (for fc) at "
            "step.py:7; with micro-batches, call optimizer.step() once ... where='fc'",
            [counted(20, {"has_scaler": False}, **{"unzeroed": 5, "unzeroed fc": 5})],
            [],
        ),
        (
            "steps, the optimizer was given ... and each step is that much too large ... "
            "Call scaler.unscale_(optimizer) after the backward pass ... count=2",
            [counted(8, undivided=2), replace(counted(9, undivided=2), skipped=1)],
            [counted(9, undivided=2), counted(8, undivided=0)],
        ),
        (
            "The loss falls with the loss scale ... steps=(1, 5), count=5",
            [following(5), following(5, power=1.25), following(5, ratio=1.35)],
            [following(4), following(5, power=1.35), following(5, ratio=1.25)],
        ),
        (
            "most of the recorded gradients, of up to 1024 ... steps=(50, 50), count=2, "
            "is_certain=False",
            [recorded(3, of=5)],
            [recorded(1, of=2), recorded(3, of=5, samples=1), recorded(3, of=5, scale=1.0)],
        ),
        (
            "before clip_grad_norm_ at clip.py:7 ... line='clip.py:7'",
            [clipped(1.0, 1 + 1.9e-5)],
            [clipped(1.0, 1 + 22e-6)],
        ),
        (
            "loss scale, 256 now, has divided the gradients twice before the step at step.py:7 ... "
            "norm is 5.1e+02 after the backward pass ... line='step.py:7', steps=(), count=2",
            [
                divided(1.009 * twice, 0.991 * twice),
                divided(clipped_at, twice),
                divided(clipped_at, clipped_at),
            ],
            [
                divided(twice),
                divided(1.011 * twice, twice),
                divided(0.989 * twice, 0.97 * twice),
                divided(clipped_at, 0.9 * clipped_at),
                divided(0.0025, 0.0025),  # clipped to that, once divided
                divided(2.0, 2.0),
                divided(twice, twice, has_scaler=True),
                divided(twice, twice, **{"by_hand 512": 1}),
            ],
        ),
        ("The norm of the gradients is 1000", [clipped(1000.0)], [clipped(1000.0, scale=10.0)]),
        ("The norm of the gradients is 1200", [], [clipped(1200.0)]),
        (
            "The largest magnitude of the gradients is 512",
            [],
            [clipped(1.234, 5.678), clipped(1.234, largest=1.0)],
        ),
        (
            "The largest magnitude of the gradients is 510 in ... before clip_grad_value_ at "
            "clip.py:7",
            [clipped(1.234, 5.678, largest=510 / 512)],
            [],
        ),
        (
            "called 5 times after unscale_(optimizer) without a step, ... count=5",
            [
                counted(15, unstepped=5),
                counted(0, unstepped=5),
                counted(15, unstepped=6, left_out=1),
            ],
            [
                counted(16, unstepped=5),
                counted(0, unstepped=4),
                counted(15, unstepped=5, left_out=1),
            ],
        ),
        (
            "the loss does not depend on the tensors that it holds, but ... Look for detach(), "
            "... of the optimizer (made at a.py:7) and the loss: ... Or give ... line='a.py:7'",
            [counted(0, idle=9, **{"astray others at a.py:7": 9})],
            [counted(0, idle=9, **{"astray parameters at a.py:7": 9})],
        ),
        (
            "after the step of each of several optimizers",
            [counted(20, unscaled=5), counted(20, switched=18), counted(5, switched=5)],
            [
                counted(21, unscaled=5),
                counted(4, unscaled=4),
                counted(20, switched=17),
                counted(4, switched=4),
            ],
        ),
        (
            "no loss was given to scale() ... loss.backward() at backward.py:7. ... "
            "line='backward.py:7', steps=(), count=",
            [counted(20, lossless=18), counted(5, lossless=5)],
            [counted(20, lossless=17), counted(4, lossless=4)],
        ),
        (
            "The run before ended at a loss scale of 1024 ... in step 9 ... steps=(9,)",
            [resumed(4.0), resumed(0.25), resumed(4.0, 1.9), resumed(4.0, 0.1)],
            [resumed(3.5), resumed(1 / 3.5), resumed(4.0, 2.1), resumed(4.0, -0.1)],
        ),
        (
            "overflows in its first step",
            [counted(9, overflowed, resumed=1)],
            [counted(9, fine, resumed=1), counted(9, overflowed)],
        ),
        (
            "the model was in evaluation mode ... (it is called at eval.py:7) ... "
            "line='eval.py:7', steps=(), count=5, is_certain=False",
            [counted(20, evaluating=5), counted(5, evaluating=5)],
            [counted(21, evaluating=5), counted(4, evaluating=4)],
        ),
        (
            "60% of the 16-bit parameters did not move ... is_certain=False",
            [Evidence(50, 0, unmoved=(0.1, 0.5, 0.6))],
            [Evidence(50, 0, unmoved=each) for each in ((0.6, 0.45), (0.45, 0.6))],
        ),
        (
            "computes in float32 and nothing in float16, so loss scaling has nothing ... "
            "is_certain=False",
            [in_single(31)],
            [in_single(30), in_single(31, min_scale=1.0), in_single(31, "bfloat16")],
        ),
        (
            "load_state_dict() at a.py:7 copied a model onto itself ... line='a.py:7', "
            "steps=(), count=3, is_certain=False",
            [counted(9, **{"onto_itself": 3, "onto_itself a.py:7": 3})],
            [counted(9, **{"onto_itself": 2, "onto_itself a.py:7": 2})],
        ),
        (
            "In 1 of 9 steps, the backward pass of a scaled loss came ... count=1",
            [counted(9, mixed=1)],
            [counted(9)],
        ),
    ]


def of_gradient_values():
    def behind_relu(loss):
        found = sampled(loss=loss, shares=shares(1.0), parameters={"a.weight": gradients(1.0)})
        return with_losses([1.0] * 9, sample=found, cut={"a.weight": "relu"}, has_scaler=False)

    def zeros(zero, scale=2.0**16, **more):
        found = {"a.w": gradients(1.0), "b.w": gradients(1.0), "c.w": gradients(zero)}
        return Evidence(
            50, 0, sample=sampled(scale=scale, shares=shares(zero), parameters=found), **more
        )

    def unfed(steps, bias=0.85, weight=1.0, name="a.bias"):
        found = {"a.weight": gradients(weight), name: gradients(bias)}
        seen = [sampled(step, norm=1.0, parameters=found) for step in steps]
        return Evidence(50, 0, measured=tuple(seen))

    def alike(*names):
        own = [Optimizers(alike=each) for each in names]
        return Evidence(50, 0, measured=tuple(sampled(norm=1.0, optimizers=each) for each in own))

    def small(lost, first=-20, scale=1.0, **more):
        found = sampled(scale=scale, shares=lost, histogram=Bins(first, (1,)))
        return Evidence(50, 0, sample=found, **more)

    def none_left(absorbed, scale=1.0, loss=1.0):
        found = sampled(scale=scale, loss=loss, shares=shares(1.0), histogram=Bins(0, ()))
        return counted(50, {"sample": found}, absorbed=absorbed)

    def far_apart(loss):
        found = {"a": gradients(0.0, first=10), "b": gradients(0.0, first=-40)}
        seen = sampled(
            scale=1.0, loss=loss, shares=shares(), parameters=found, histogram=Bins(-40, (9,) * 51)
        )
        return Evidence(50, 0, sample=seen, sizes=(seen,))

    in_time, too_early = (10, 11, 12, 13), (9, 10, 11, 12)
    return [
        (
            "1 of 1 parameters, a.weight first, are exactly 0, because they pass relu ... "
            "where='a'",
            [behind_relu(0.95)],
            [behind_relu(0.9), behind_relu(0.85)],
        ),
        (
            "2 of 3 parameters, a.w first, are exactly 0 in step 50, at a loss scale of 65536, "
            "and no gradient is small ... look for an operation ... where='b'",
            [zeros(0.9), zeros(0.95)],
            [zeros(0.85), zeros(1.0)],
        ),
        (
            "All gradients are exactly 0 in step 50 ... look for zero_grad() between ... "
            "is_certain=False",
            [zeros(1.0, 1024.0), zeros(1.0, 8.0, peaks=((50, 0.125),))],
            [zeros(1.0, 1000.0), zeros(1.0, 8.0, peaks=((50, 0.12),))],
        ),
        (
            "The gradient of a.weight is exactly 0 in step ... 13, and ... as in 4 samples ... A "
            "larger scale would not help: ... where='a', line=None, steps=(), count=0, "
            "is_certain=False",
            [unfed(in_time)],
            [
                unfed(too_early),
                unfed(in_time, bias=0.9),
                unfed(in_time, weight=0.99),
                unfed(in_time, name="b.bias"),
                unfed(in_time, name="a.weight"),
            ],
        ),
        (
            "All units of b.w have ... in the latest 2 samples ... where='b'",
            [alike(("a.w", "b.w"), ("b.w",)), alike((), ("b.w",), ("b.w",))],
            [alike(("a.w",), ("b.w",)), alike(("b.w",)), alike(("b.w",), ())],
        ),
        (
            "kind='underflow' ... zero in float16 and ... subnormal, in step 50. ... "
            "is_certain=False",
            [
                small(shares(flushed=0.05)),
                small(shares(0.05, subnormal=0.3)),
                small(shares(flushed=0.3), first=10),
                none_left(1),
                none_left(0, 1000.0, 0.0),
            ],
            [
                small(shares(flushed=0.045)),
                small(shares(0.045, subnormal=0.3)),
                small(shares(0.05, subnormal=0.2)),
                small(shares(flushed=0.3), first=11),
                none_left(2),
                none_left(0, 1024.0, 0.0),
            ],
        ),
        ("Divide the term that makes the loss", [far_apart(7e4)], [far_apart(6e4)]),
        ("No loss scale fits", [far_apart(7e4), far_apart(6e4)], []),
    ]


def of_failures():
    def made(number, steps=9, largest=1e4, **more):
        located = Located(
            *("fc", "forward", "Linear", "float32", 1, 0, 8, 1.0, largest),
            operation="log",
        )
        evidence = skipping(range(1, steps + 1), range(5, 5 + number), **more)
        return replace(evidence, watched=located)

    def nan(loss):
        return skipping(range(1, 10), (5,), loss, 1.0, inspected=(Skip(5, 1.0, loss, (NAN,)),))

    return [
        (
            "The forward pass of fc makes 1 Inf",
            [made(1, largest=255.0), made(2, 90), made(2)],
            [made(1, largest=260.0), made(2, 100), made(1)],
        ),
        (
            "The gradient of fc.weight is NaN ... NaN, though the loss is finite: 1 of 9 steps was",
            [nan(6e4)],
            [nan(7e4)],
        ),
    ]


def steps_with(losses, **more):
    """Steps of a loop without a scaler, in which nothing else is found."""
    known = {"sample": sampled(), "missing": (), "has_scaler": False, **more}
    return with_losses(losses, **known)


def with_targets(factor, last=1.0, samples=6, steps=120, variance=2.0, sizes=(1.0, 1.0)):
    """Samples whose mean square errors are their targets' variance times factors."""

    def seen(ratio):
        return sampled(norm=1.0, targets=Targets(2.0 * ratio, variance, *sizes))

    late = [*[seen(factor)] * (samples - 3), seen(factor * last)]
    return steps_with([2.0] * steps, measured=(sampled(norm=1.0), seen(7.0), *late))


def with_tiny_targets(size, samples=6):
    """A loss that falls, of targets of a size, whose first outputs are of size 2."""
    seen = [Targets(1.0, None, size, outputs) for outputs in (2.0, *[size] * (samples - 1))]
    measured = tuple(sampled(norm=1.0, targets=each) for each in seen)
    return steps_with([2.0] * 60 + [1e-6] * 60, measured=measured)


def begun(first, then, steps=24):
    """A cross entropy of ten classes, in guesses, whose steps after the first half have others."""
    chance = math.log(10)
    losses = [first, *[2.0] * (steps // 2 - 1), *[then] * (steps - steps // 2)]
    return steps_with([chance * loss for loss in losses], sample=sampled(chance=chance))


def peaked(peak, end, added=0, first=1.0):
    """A cross entropy of ten classes, in guesses, that rises at once and comes back."""
    chance = math.log(10)
    losses = [first, *[peak] * 9, *[0.5 * peak] * 20, *[end] * 30]
    events = Events().after({"added_up": added, "added_up 16": added})
    guesses = [chance * loss for loss in losses]
    return steps_with(guesses, sample=sampled(chance=chance), events=events)


def vanished(low, flat=0, is_first=False, later=None):
    found = {"a.w": gradients(0.0, first=0), "b.w": gradients(0.0, first=low)}
    found = dict(reversed(found.items())) if is_first else found
    events = Events().after({"flat": flat, "flat tanh at a.py:7 and 3 more": flat})
    seen = sampled(parameters=found, norm=1.0)
    if later is None:
        return steps_with([2.0] * 120, sample=seen, events=events)
    alike = sampled(parameters={"a.w": gradients(0.0, first=0)}, norm=later)
    return steps_with([2.0] * 120, sample=alike, measured=(seen, alike), events=events)


def crawls(weight=1.004, end=1.0, start=0.0, rate=1e-4, steps=120, **more):
    """A mean square error near the variance of its targets, which falls to a share of itself.

    A part of the fall is in the first half.
    """
    half, fall = steps // 2, 1.0 - end
    slopes = [(0.5 + start) * fall / half] * half + [(0.5 - start) * fall / half] * half
    losses = [2.0 * each for each in accumulate(slopes[1:], sub, initial=1.0)]
    seen = with_targets(1.0).measured
    found = Optimizers(weights=(1.0, weight))
    rates = ((2, 1e-4), (steps, rate))
    return steps_with(losses, measured=seen, optimizers=found, rates=rates, **more)


def of_learning():
    told, meaning = steps_with, with_targets

    def at_margin(usual, other, **more):
        losses = [*[usual] * 11, *[other] * 4, *[0.6] * 5] * 5
        return told([0.9] * 20 + losses, **{**MARGIN, **more})

    def clipped(weight, norm, samples=2):
        found = Optimizers(weights=(1.0, weight), used=1.0)
        seen = (sampled(norm=norm, optimizers=found),) * samples
        return told([2.0] * 120, optimizers=found, measured=seen)

    def slow(weight, losses=(2.0,) * 120, rates=((1, 1e-6),)):
        found = Optimizers(weights=(1.0, weight))
        return told([*losses], optimizers=found, measured=(sampled(norm=1.0),), rates=rates)

    def tiny(norm, more=0.0, samples=2):
        return told([1.0, 1.0 + more] * 60, measured=(sampled(norm=norm),) * samples)

    def guessed(factor):
        chance = math.log(10)
        return told([factor * chance] * 120, sample=sampled(chance=chance))

    def of_event(**counts):
        return told([2.0] * 120, events=Events().after(counts))

    def kinds(step):
        return of_event(changed=1, **{f"changed {step}": 1})

    low, high = [10.0] * 20 + [2.0] * 60, [12.0] * 30
    ramp = [[2.0 + 10 * n / steps for n in range(1, steps)] for steps in (9, 10)]
    return [
        (
            "the loss went from 2 to 1.8, its mean from 2 to 1.9",
            [told([2.0] * 100 + [2.0, 1.8] * 10)],
            [told([2.0] * 119 + [1.95])],
        ),
        (
            "lower the learning rate.",
            [
                told([1.0] * 119 + [2.2]),
                told([1.0] * 100 + [2.2, 1.9] * 5 + [2.2] * 10),
                told([1.0] + [2.2] * 119),
            ],
            [
                told([1.0] * 119 + [1.8]),
                told([1.0] * 100 + [2.2, 1.7] * 10 + [2.2]),
                told([1.0] + [1.4, 3.0] * 60),
            ],
        ),
        (
            ", its mean from 1.85 to 1.2",
            [told([1.0] + [1.9, 2.0] * 40 + [1.2] * 19 + [2.2])],
            [told([1.0] + [1.9, 2.0] * 40 + [1.2] * 19 + [1.8])],
        ),
        (
            "went from 1 to 2.2, its mean from 1.85 to 1.8",
            [told([1.0] + [1.9, 2.0] * 40 + [1.8] * 19 + [2.2])],
            [told([1.0] + [1.9, 2.0] * 40 + [1.8] * 19 + [1.9])],
        ),
        (
            "steps are too few to say more",
            [told([1.0] * 8 + [45.0])],
            [told([1.0] * 8 + [55.0]), told([1.0] * 9 + [45.0])],
        ),
        (
            "look for a term with the wrong sign",
            [told([1.0] * 119 + [-1100.0]), told([0.5] * 119 + [-1100.0])],
            [told([1.0] * 119 + [-900.0]), told([2.0] * 119 + [-1100.0])],
        ),
        (
            "Nothing else was judged",
            [
                told([2.0] * 5),
                told([2.0, 2.1] * 50),
                told([2.0] * 50 + [1.91] * 50),
                told([2.0] * 79 + [-0.3] + [2.0] * 20),
            ],
            [
                told([2.0] * 50 + [1.89] * 50),
                told([2.0, 2.002] * 40 + [-0.2] + [2.0] * 19),
                told([2.0] * 9 + [4.0] + [2.085, 2.084] * 45),
            ],
        ),
        (
            "too few to say whether it falls",
            [told([2.0] * 4), told([2.1] + [2.1, 2.0] * 49), told([2.0] * 9 + [1.91])],
            [told([2.0] * 5), told([2.0, 2.1] * 50), told([2.0] * 9 + [1.89])],
        ),
        (
            "load the states of their optimizer and its schedule",
            [told([0.1] + [1.1] * 5 + [0.05] * 60)],
            [
                told([0.1] + [0.9] * 5 + [0.05] * 60),
                told([0.1] + [1.05] * 4 + [0.05] * 60),
                told([0.1] + [1.1] * 11 + [1.2] * 5 + [0.05] * 60),
            ],
        ),
        (
            "The weights were loaded at a.py:7",
            [told([0.5] + [0.58] * 5 + [0.3] * 60, **LOADED)],
            [
                told([0.5] + [0.57] * 5 + [0.3] * 60, **LOADED),
                told([0.5] + [0.58] * 5 + [0.24] * 60, **LOADED),
                told([0.5] + [0.49] + [0.7] * 4 + [0.3] * 60, **LOADED),
                told([0.5] + [0.58] * 5 + [0.3] * 60),
            ],
        ),
        (
            "the outputs do not depend on them any more",
            [told([2.0] * 20 + [1.0, 1.0, 1.0, 0.9] * 25), told([95.0] * 20 + [1.0] * 120)],
            [
                told([2.0] * 20 + [1.0, 1.0, 0.9] * 40),
                told([2.0] * 20 + [1.0 + 4e-6 * (n % 3) for n in range(120)]),
                told([110.0] * 20 + [1.0] * 120),
            ],
        ),
        (
            "losses of several kinds, or several optimizers, follow one another",
            [kinds(102)],
            [kinds(101)],
        ),
        (
            "which may be its margin",
            [at_margin(0.5024, 0.5024), at_margin(0.5, 0.5085)],
            [
                at_margin(0.503, 0.503),
                at_margin(0.5, 0.511),
                at_margin(0.5024, 0.5024, events=Events()),
                at_margin(0.5024, 0.5024, events=Events().after({"margin": 1})),
            ],
        ),
        (
            "If it should have fallen, look at the learning rate",
            [told([0.5] + [0.79] * 9 + [0.49, 0.48] * 50)],
            [
                told([0.5] + [0.77] * 9 + [0.49, 0.48] * 50),
                told([0.5] + [0.79] * 9 + [0.47, 0.46] * 50),
            ],
        ),
        (
            "If it should have stayed there",
            [told([10.0] * 10 + [2.0] * 60 + [4.2] * 60)],
            [told([12.0] * 10 + [2.0] * 60 + [4.2] * 60)],
        ),
        (
            "and rose at step",
            [told([*low, *[7.5] * 20, *high]), told([*low, *ramp[0], *high])],
            [told([*low, *[6.5] * 20, *[9.5] * 20, *high]), told([*low, *ramp[1], *high])],
        ),
        (
            "gradients are clipped from a norm",
            [clipped(1.0009, 110.0)],
            [clipped(1.0011, 110.0), clipped(1.0009, 90.0), clipped(1.0009, 110.0, samples=1)],
        ),
        (
            "the weights hardly move at a learning rate of 1e-06: their norm has changed by",
            [slow(1.00009)],
            [
                slow(1.00011),
                slow(1.00009, rates=()),
                slow(1.00009, losses=[2.0] * 60 + [1.0] * 60),
            ],
        ),
        (
            "the gradients are so small",
            [tiny(0.9e-4), tiny(0.9e-4, 0.9e-6)],
            [tiny(1.1e-4), tiny(0.9e-4, 1.1e-6), tiny(0.9e-4, samples=1)],
        ),
        (
            "a guess among 10 classes",
            [guessed(1.019), guessed(0.981)],
            [guessed(1.021), guessed(0.979)],
        ),
        (
            "its mean square error stays near 2, the variance of its targets",
            [meaning(1.045), meaning(0.955), meaning(1.05, 0.86), meaning(1.0, steps=100)],
            [
                *(meaning(1.055), meaning(0.945), meaning(1.05, 0.85), meaning(1.0, steps=99)),
                *(meaning(1.0, samples=4), meaning(1.0, variance=None)),
            ],
        ),
        (
            "and it falls steadily, but the norm of the weights has changed by ... 0.4% in 1 ... "
            "at a learning rate of 0.0001. If it should fall faster, raise that rate",
            [crawls(end=0.99), crawls(end=0.91, start=0.1), crawls(end=0.99, steps=100)],
            [
                *(crawls(1.006, end=0.99), crawls(end=0.99, start=0.25), crawls(end=1.001)),
                *(crawls(end=0.88), crawls(end=0.99, rate=1.1e-4), crawls(end=0.99, steps=98)),
                crawls(end=0.99, **LOADED),
            ],
        ),
        (
            "(step 2) on the way. If it should have fallen further",
            [peaked(3.3, 0.9), peaked(3.3, 0.51), peaked(3.4, 0.9, first=0.6)],
            [peaked(3.1, 0.9), peaked(3.3, 0.49), peaked(2.5, 0.9, first=0.6)],
        ),
        (
            "Each step adds up the gradients of 16 backward passes: divide each loss by 16",
            [peaked(3.3, 0.9, 2), peaked(3.3, 6.0, 2), of_event(**ADDED_UP)],
            [peaked(3.3, 0.9, 1), peaked(3.3, 0.1, 2)],
        ),
        (
            "If targets of some 0.00",
            [with_tiny_targets(0.0019)],
            [
                with_tiny_targets(0.0021),
                with_tiny_targets(0.0),
                with_tiny_targets(0.001, samples=1),
            ],
        ),
        (
            "its targets are some",
            [meaning(9.0, sizes=(500.0, 4.9)), meaning(1.0, sizes=(110.0, 0.1))],
            [meaning(9.0, sizes=(500.0, 5.1)), meaning(9.0, sizes=(90.0, 0.1))],
        ),
        (
            "its first was far above 2.3, that of a guess among 10 classes",
            [begun(3.1, 1.1), begun(3.1, 1.1, steps=20)],
            [begun(2.9, 1.1), begun(3.1, 1.1, steps=19)],
        ),
        (
            "classes, which it took 12 steps to reach",
            [begun(3.1, 0.9)],
            [begun(3.1, 1.1), begun(3.1, 0.9, steps=23)],
        ),
        (
            "gradients vanish on their way: those of b.w",
            [vanished(-20), vanished(-20, later=0.5)],
            [vanished(-19), vanished(-20, later=1.5), vanished(-19, flat=1)],
        ),
        (
            "vanish on their way through tanh at a.py:7 and 3 more: those of b.w",
            [vanished(-10, 1, is_first=True)],
            [vanished(-9, 1, is_first=True), vanished(-10, 0, is_first=True), vanished(-10, 1)],
        ),
        (
            "and the lr=0.5 of SGD has no effect ... its own rate into them",
            [of_event(**{"ignored lr=0.5 of SGD": 1})],
            [of_event()],
        ),
        ("weights change between the steps", [of_event(overwritten=2)], [of_event(overwritten=1)]),
    ]


def of_loss_graphs():
    def in_turns(samples):
        found = {"actor.weight": gradients(1.0), "critic.weight": gradients(0.0)}
        each = sampled(norm=1.0, parameters=found)
        more = {"sample": each, "measured": (each,) * samples}
        calls = {"switched": 40, "ended": 2, "ended factor mul at a.py:7": 2}
        return with_losses([0.0, 1.0] * 20, events=Events().after(calls), **more)

    def by_class(*classes):
        measured = tuple(sampled(norm=1.0, classes=each) for each in classes)
        return Evidence(50, 0, measured=measured)

    def seen(name, count, more=None):
        return counted(50, more, **{name: count, f"{name} relu at a.py:7 makes it": count})

    def summed(samples=4, steps=200, last=None):
        text = "summed_term sum at a.py:7 makes one number of [64, 4]"
        calls = {"summed_term": 1, text: 1}
        measured = [sampled(norm=1.0, calls=calls)] * samples + [sampled(norm=1.0)] * bool(last)
        return Evidence(steps, 0, measured=tuple(measured), events=Events().after(calls))

    places = (
        "absorbed",
        "twice",
        "cut",
        "across",
        "over_queries",
        "pooled_batch",
        "whole_norm",
        "linear",
        "constant",
        "counted",
        "detached",
        "graphless",
        "broadcast",
        "paired",
        "unregistered",
    )
    return [
        ("line='a.py:7', steps=(), count=2", [seen(each, 2) for each in places], []),
        ("a.py:7", [], [seen(each, 1) for each in places]),
        ("A cross entropy is negative", [counted(9, negative=2)], [counted(9, negative=1)]),
        ("The loss of actor is 0", [in_turns(4)], [in_turns(3)]),
        ("lasts=100", [in_turns(4)], []),
        (
            "sum at a.py:7 makes one number of [64, 4]. The sum may outweigh",
            [summed()],
            [summed(3), summed(steps=199), summed(last="other")],
        ),
        ("in order (class 1, then 2, then 0)", [by_class((0,), (1,), (2,), (0,))], []),
        (
            "the data is sorted by class",
            [by_class((0,), (1,), (2,), (0,))],
            [
                *(by_class((1,), (2,), (0,)), by_class((0,), (1,), (0,), (1,))),
                *(by_class((0,), (0,), (1,), (2,), (0,)), by_class((), (1,), (2,), (0,))),
            ],
        ),
    ]


def of_losses():
    def fails(number, last=100.0, first=1.0):
        """A loss that explodes in step 61, and skips among the latest 20 steps."""
        losses = [first] * 60 + [last] * 20
        past = tuple(Step(n, 8.0, n > 80 - number, loss) for n, loss in enumerate(losses, 1))
        return Evidence(80, number, past=past, first=past[0], scale=8.0)

    def at_once(first, then):
        losses = [first, then, then, *[math.inf] * 3]
        past = tuple(Step(n, 8.0, n > 3, loss) for n, loss in enumerate(losses, 1))
        return Evidence(6, 3, past=past, first=past[0], scale=8.0, bad_and_skipped=3)

    def away(number=20, last=1.6, weights=(1.0, 11.0), low=30.0, first=1.0, sign=-1.0):
        since = [sign * 1100.0] * (number - 1) + [sign * 1100.0 * last]
        optimizers = Optimizers(weights=weights)
        return with_losses([first, *[low] * 40, *since], optimizers=optimizers, has_scaler=False)

    def near_0(last):
        optimizers = Optimizers(weights=(1.0, 11.0))
        return with_losses([1e-3, *[0.9] * 40, *[last] * 20], optimizers=optimizers)

    def died(peak, at=6, weight=1.6):
        losses = [1.0] * (at - 1) + [peak] + [1.0] * (60 - at)
        seen = sampled(shares=shares(1.0), parameters={"a.w": gradients(1.0)})
        optimizers = Optimizers(weights=(1.0, weight))
        return with_losses(losses, sample=seen, optimizers=optimizers, has_scaler=False)

    def stays_above(skipped, last=1.1):
        past = with_losses([1.0] * 9 + [last] * 30).past
        past = tuple(step._replace(skipped=step.step <= skipped) for step in past)
        return Evidence(39, skipped, past=past, first=past[0], weights=(1.0, 11.0))

    silent = with_losses([math.inf] * 8, bad_and_applied=8)

    def kept(count):
        return replace(silent, events=Events().after({"unchanged": count}))

    return [
        (
            "The weights' norm grew from 1 to 11",
            [stays_above(4)],
            [stays_above(3), stays_above(4, last=0.9)],
        ),
        ("steps=(6, 7, 8), count=8", [silent], []),
        ("each step, and the steps are applied", [silent, kept(7)], [kept(8)]),
        ("each step, and these steps left the weights as they were", [kept(8)], [kept(7)]),
        (
            "The loss grew from 1 (step",
            [fails(7), fails(7, 55.0)],
            [fails(6), fails(7, 45.0), fails(7, 0.0), fails(7, 100.0, 100.0)],
        ),
        (
            "The loss is too large from the start",
            [at_once(1.1e9, 1e12)],
            [at_once(0.9e9, 1e12)],
        ),
        ("The loss grew from 0.01 (step 1) to", [at_once(0.01, 5.5)], [at_once(0.01, 4.5)]),
        (
            "and neither comes back ... (step 61) and the weights' norm from 1 to 11 ... count=20, "
            "is_certain=False",
            [away(), away(last=1.0, sign=1.0)],
            [
                away(19),
                away(last=1.4),
                away(weights=(1.0, 9.0)),
                away(weights=(0.0, 9.0)),
                away(low=20.0),
                away(first=2.0),
            ],
        ),
        ("neither comes back ... from 0.001", [near_0(5.5)], [near_0(4.5)]),
        (
            "a step that is too large left units",
            [died(55.0), died(1100.0, at=40)],
            [died(45.0), died(55.0, weight=1.4), died(900.0, at=40), died(55.0, at=7)],
        ),
    ]


def of_nan_skips():
    def fixed(peak):
        skips = tuple(Skip(100 + n, 1024.0, 2.5, (NAN,)) for n in range(20))
        known = {"skips_in_a_row": 20, "skips": skips, "min_scale": 1024.0}
        return Evidence(119, 21, peaks=((90, peak),), **known)

    def mixed(nan, inf):
        steps = range(10, 10 * (nan + inf + 1), 10)
        found = [NAN] * nan + [INF] * inf
        skips = [Skip(n, 0.5, 2.5, (each,)) for n, each in zip(steps, found, strict=True)]
        return skipping(range(1, 121), steps, 2.5, 0.5, inspected=tuple(skips), min_scale=0.5)

    return [
        (
            "The gradient of fc.weight is NaN and none is Inf at a scale of 1024, though the loss"
            " is ... locate() names the operation ... where='fc.weight', line=None, steps=(), "
            "count=20, is_certain=False",
            [fixed(1.9)],
            [fixed(2.0)],
        ),
        (
            "cause='The loss scale is 0.5: the gradients overflow ... count=2, is_certain=False",
            [mixed(1, 1)],
            [mixed(3, 2)],
        ),
    ]


def of_optimizers():
    def decayed(weight=1.9, number=10, last=0.95):
        weights = Optimizers(weights=(100.0, weight))
        return with_losses([1.0] * 10 + [last] * number, optimizers=weights)

    def grown(rate):
        past = tuple(Step(n, 8.0, n > 70, 1.0 if n < 61 else 99.0) for n in range(1, 81))
        return Evidence(80, 10, past=past, rates=((1, 1e-3), (60, rate)))

    def unmoved(count, steps, why):
        return counted(steps, **{"unmoved": count, f"unmoved {why}": count})

    def stood(first, count, losses=(1.0, 0.9, 1.1, 0.8, 1.2), then=0):
        seen = {f"stood {first}": 1, f"stood {first} some": count - 1, "stood 2": 1}
        seen["stood"] = sum(seen.values())
        past = [1.0] * (first - 1) + [losses[n % len(losses)] for n in range(count + then)]
        return with_losses(past, events=Events().after(seen))

    def still(count, steps):
        seen = {"stood": count, "stood 1 some": count}
        return with_losses([1.0] * steps, events=Events().after(seen))

    def stale(count, steps):
        part = "stale state['mean'] and 1 more"
        return counted(steps, **{"stale": count, part: count})

    def stopped(place, **more):
        events = Events().after({"stopped": 3, f"stopped {place}": 3})
        return with_losses([1.0] * 9, **{"events": events, **more})

    def at(event, place):
        return counted(9, **{event: 2, f"{event} {place}": 2})

    def faded(count, steps, last=0.5, **where):
        found = Events().after({"faded": count, **where})
        more = {"steps": steps, "events": found, "optimizers": LINES}
        return with_losses([1.0] * 30 + [last], **more)

    return [
        (
            "was negative in 5 of 9 ... schedule at schedule.py:7 the ... line='schedule.py:7', "
            "steps=(), count=5",
            [counted(9, uphill=5)],
            [],
        ),
        ("The learning rate was negative in 4 of", [], [counted(9, uphill=4)]),
        (
            "The weights' norm fell from 100",
            [decayed()],
            [decayed(2.2), decayed(number=9), decayed(last=0.85), decayed(0.0, last=0.0)],
        ),
        ("while the learning rate grew from", [grown(1.1e-2)], [grown(0.9e-2)]),
        (
            "The learning rate was 0 in 3 of ... step(optimizer) at step.py:7, let ... "
            "line='step.py:7', steps=(), count=3",
            [counted(12, still=3)],
            [counted(13, still=3)],
        ),
        (
            "The learning rate was 0",
            [counted(12, {"sample": sampled(12, calls={"still": 1})}, still=3)],
            [counted(2, still=2), counted(12, {"sample": sampled(12)}, still=3)],
        ),
        (
            "The learning rate was 0 in 12 of ... Unless a schedule raises it later ... lasts=100",
            [
                counted(12, still=12),
                counted(12, still=12, **{"still factor=0 of ConstantLR": 1}),
                counted(24, still=12, switched=23),
                counted(13, {"rates": ((2, 0.0), (10, 0.0))}, still=12),
            ],
            [],
        ),
        (
            "The learning rate was 0 in 3 of 12 steps, so they moved nothing: gamma=0 of StepLR at "
            "a.py:7 makes ... line='a.py:7', steps=(), count=3",
            [counted(12, **{"still": 3, "still gamma=0 of StepLR at a.py:7": 1})],
            [counted(12, still=3)],
        ),
        (
            "The optimizer was new in",
            [counted(20, renewed=18), counted(5, renewed=5)],
            [
                counted(20, renewed=17),
                counted(4, renewed=4),
                counted(20, renewed=21),
                counted(20, renewed=18, overwritten=1),
            ],
        ),
        (
            "nothing moves any more: end_factor=0 of LinearLR makes it 0",
            [faded(20, 119, **{"faded end_factor=0 of LinearLR": 1})],
            [faded(19, 60, **{"faded end_factor=0 of LinearLR": 1}), faded(20, 119)],
        ),
        (
            "less than a millionth ... epochs at schedule.py:7 once ... line='schedule.py:7'",
            [
                faded(20, 119),
                faded(300, 400),
                faded(20, 119, 0.0105),
                faded(20, 119, 1.9),
                faded(20, 119, 0.0095, switched=60),  # the loss of another optimizer
            ],
            [
                faded(20, 120),
                faded(19, 60),
                faded(290, 400),
                faded(20, 119, 0.0095),
                faded(20, 119, 2.2),
            ],
        ),
        (
            "The optimizer of head found no gradient in its first 5 steps ... where='head', "
            "line=None, steps=(), count=5",
            [counted(9, {"optimizers": Optimizers(idle={"head": 5})})],
            [],
        ),
        (
            "so it trains nothing: the loss depends on parameters that no optimizer holds. ... "
            "at a.py:7: it holds those of another one ... where='head', line='a.py:7'",
            [counted(9, IDLE, **{"astray parameters at a.py:7": 2, "astray held": 1})],
            [counted(9, IDLE, **{"astray tensors at a.py:7": 2}), counted(9, IDLE)],
        ),
        (
            "it trains nothing: detach() at a.py:7 cuts off ... where='head', line='a.py:7'",
            [counted(9, IDLE, **{"cuts_off detach() at a.py:7": 1})],
            [counted(9, IDLE)],
        ),
        (
            "so it trains nothing: detach() cuts off what it holds. ... where='head', line=None",
            [counted(9, IDLE, **{"cuts_off detach()": 1})],
            [counted(9, IDLE)],
        ),
        (
            "found no gradient in its first",
            [],
            [counted(9, {"optimizers": Optimizers(idle={"head": 4})}), counted(9)],
        ),
        (
            "None of the 2 parameters with a gradient ... has moved in 20 steps, ... count=20",
            [unwritten(20)],
            [unwritten(19), unwritten(20, skipped=1), unwritten(20, norm=0.0)],
        ),
        (
            "sampled steps the second stepped with the gradients that the first had used, divided",
            [counted(9, shared=2)],
            [counted(9, shared=1), counted(9, {"has_scaler": False}, shared=2)],
        ),
        ("in 2 sampled steps ... count=2", [counted(9, shared=2)], []),
        (
            "In 3 of 9 steps, ... has_aux=True ... count=3",
            [counted(9, summed=3)],
            [counted(9, summed=2)],
        ),
        (
            "steps, the weights that the step returns ... apply_gradients() ... count=",
            [unmoved(5, 5, "returned"), unmoved(18, 21, "returned")],
            [unmoved(4, 4, "returned"), unmoved(17, 21, "returned")],
        ),
        (
            "In 5 of 6 steps, the weights whose gradient is taken are the same arrays ... params = "
            "optax.apply_updates(params, updates) ... count=5",
            [unmoved(5, 6, "given")],
            [unmoved(4, 5, "given")],
        ),
        (
            "In 5 of 6 steps, what changes is a copy of the model ... nnx.jit in place of",
            [unmoved(5, 6, "copied")],
            [unmoved(4, 5, "copied")],
        ),
        (
            "In 5 of 6 steps, all gradients of the weights are exactly 0, so ... no slope",
            [unmoved(5, 6, "zero")],
            [replace(unmoved(5, 6, "zero"), past=(Step(6, 1.0, skipped=False, loss=0.0),))],
        ),
        ("0, as the loss does not depend on the weights, so", [unmoved(5, 6, "apart")], []),
        (
            "In 20 of 22 steps, the weights that are given are the same arrays as in the step "
            "before, though the step returned new ones ... Assign what ... count=20",
            [unmoved(20, 22, "dropped")],
            [unmoved(19, 21, "dropped"), unmoved(20, 24, "dropped")],
        ),
        (
            "The weights have not changed in any of 25 steps, though gradients are not 0. ... "
            "optax.scale(0.) ... count=21",
            [still(21, 25)],
            [still(20, 24), still(21, 26)],
        ),
        (
            "weights have not changed from step ... 21 on, in 20 of 40 steps, though gradients are "
            "not 0. ... decay_steps and transition_steps of optax count steps ... count=20",
            [stood(21, 20)],
            [
                stood(22, 20),  # less than half
                stood(4, 19),
                stood(21, 20, then=1),  # they moved again
                stood(21, 20, losses=(0.009, 0.008, 0.007, 0.006, 0.005)),
                stood(21, 20, losses=(1.0, 0.9, 1.1, 0.8)),
            ],
        ),
        (
            "steps, the step returns state['mean'] and 1 more as given ... replace(batch_stats=...)"
            " ... where=\"state['mean']\", line=None, steps=(), count=",
            [stale(5, 5), stale(18, 20)],
            [stale(4, 4), stale(18, 21)],
        ),
        (
            "found no gradient in 3 calls of step() after step 9 ... requires_grad=False. ... "
            "count=3",
            [stopped("9 frozen")],
            [stopped("8 frozen"), stopped("9 frozen", past=())],
        ),
        ("after step 9, so nothing is trained any more. ... detach()", [stopped("9")], []),
        (
            "backward passes: before each ... of fc.weight held ... zero_grad() also ... count=50",
            [Evidence(0, 0, events=Events().after({"stayed 0 fc.weight": 50}))],
            [
                Evidence(0, 0, events=Events().after({"stayed 0 fc.weight": 49})),
                with_losses([1.0] * 9, events=Events().after({"stayed 0 fc.weight": 50})),
            ],
        ),
        (
            "No step was taken in 60 backward passes after step 9: ... of fc.weight held",
            [with_losses([1.0] * 9, events=Events().after({"stayed 9 fc.weight": 60}))],
            [with_losses([1.0] * 9, events=Events().after({"stayed 8 fc.weight": 60}))],
        ),
        (
            "The optimizer's lr of group 0 was NaN or Inf in 2 steps of 9 ... sets lr, such",
            [at("nonfinite", "lr of group 0")],
            [],
        ),
        (
            "moves the learning rate from 1 to 9 ... at schedule.py:7, too; ... "
            "line='schedule.py:7', steps=(), count=0, is_certain=False",
            [at("rescheduled", "1 to 9")],
            [counted(9)],
        ),
        (
            "has loaded the state of an earlier run (at a.py:7), and its optimizer has none ... "
            "line='a.py:7', steps=(), count=0, is_certain=False",
            [at("forgotten", "a.py:7")],
            [counted(9)],
        ),
        (
            "In no optimizer that is stepped: 2 parameters (a first) ... (one is made at "
            "optimizer.py:7) ... where='a', line='optimizer.py:7', steps=(), count=0, "
            "is_certain=False",
            [counted(9, {"optimizers": replace(LINES, outside=("a", "b"))})],
            [counted(9)],
        ),
        (
            "The gradient of a comes from no loss ... where='a', line=None, steps=(), count=0, "
            "is_certain=False",
            [counted(9, {"optimizers": replace(LINES, unscaled=("a",))})],
            [counted(9)],
        ),
        (
            "never called, in 9 backward passes, so no weight has moved, and scheduler.step() "
            "moves none ... Call optimizer.step() of the optimizer that is made at a.py:7 after "
            "the backward pass, and then scheduler.step(). ... line='a.py:7'",
            [counted(0, **{"untaken": 9, "untaken scheduled a.py:7": 9})],
            [
                counted(0, **{"untaken": 9, "untaken alone a.py:7": 9}),
                counted(1, **{"untaken": 9, "untaken scheduled a.py:7": 9}),
            ],
        ),
        (
            "cause='10 losses were scaled ... count=10",
            [counted(0, stepless=9)],
            [counted(1, stepless=9)],
        ),
        ("losses were scaled and the parameters moved", [], [counted(0, stepless=8)]),
    ]


def of_origins():
    def within(largest, first=1.0):
        bad = BadStep(9, math.nan, (NAN,), evaluated=(first, largest))
        return Evidence(9, 0, bad_step=bad, has_scaler=False)

    def from_start(loss):
        bad = BadStep(9, math.nan, (NAN,), located=LOG)
        return with_losses([loss] * 8, steps=9, bad_step=bad, has_scaler=False)

    def at_floor(scale, gradients, loss=2.5, lowest=None, count=20):
        skips = tuple(Skip(n, scale, loss, gradients) for n in range(120 - count, 120))
        lowest = scale if lowest is None else lowest
        return Evidence(119, 21, skips_in_a_row=count, skips=skips, scale=scale, min_scale=lowest)

    def updated(operation, dtype="float16", by="optax.scale_by_adam", loss=2.5):
        known = {"operation": operation, "line": "a.py:7", "optimizer": by}
        located = Located(None, "forward", "", dtype, 0, 2, 2, 1.0, 0.0, **known)
        bad = BadStep(9, loss, (NAN,), located=located)
        jax = {"has_scaler": False, "framework": framework_named("jax", {})}
        return with_losses([2.5] * 9, bad_step=bad, **jax)

    def scaled_by_hand(by, dtype="float16", bad=NAN):
        located = (
            None if by is None else Located(None, "backward", "", "float32", 0, 2, 2, 1.0, 1.0)
        )
        located = located and replace(located, operation=by, line="a.py:7", is_likely=True)
        seen = Events().after({"by_hand": 1, "by_hand 4294967296": 1})
        known = {"has_scaler": False, "events": seen, "backward": frozenset([dtype])}
        return Evidence(9, 0, bad_step=BadStep(9, 2.5, (bad,), located=located), **known)

    left_out = BadStep(9, 2.5, (NAN,), is_left_out=True)
    past = (Step(9, 1.0, skipped=True),)
    return [
        (
            "if NaN is left at a scale of 1, it is no overflow",
            [at_floor(2.0, (NAN,))],
            [at_floor(1.0, (NAN,), 1e6), at_floor(2.0, (INF,))],
        ),
        (
            "Allow a lower scale (min_scale, or DynamicScale if it is fixed), or divide the loss",
            [at_floor(2.0, (INF,))],
            [at_floor(2.0, (NAN,)), at_floor(1.0, (INF,))],
        ),
        ("Divide the loss", [at_floor(1.0, (INF,)), at_floor(1.0, (NAN,), 1e6)], []),
        (
            "a loss scale of 2, which something sets again after each skip",
            [at_floor(2.0, (INF,), lowest=1.0), at_floor(2.0, (NAN,), lowest=0.0, count=5)],
            [at_floor(2.0, (INF,)), at_floor(2.0, (INF,), lowest=1.0, count=4)],
        ),
        (
            "multiplies its loss by 4.29497e+09, which makes gradients larger than the 65504",
            [*map(scaled_by_hand, (None, "nll_loss")), scaled_by_hand(None, bad=INF)],
            [scaled_by_hand("sqrt"), scaled_by_hand("_Mish"), scaled_by_hand(None, "float32")],
        ),
        (
            "The gradient of fc.weight is NaN, though the loss is finite: the script left out",
            [Evidence(9, 1, past=past, bad_step=left_out, has_scaler=False)],
            [],
        ),
        (
            "optax.scale_by_adam at a.py:7 makes fc.weight NaN in float16, and step 9 was applied "
            "with it: an eps below 3e-8 is 0 there ... in float32 ... or set eps to 1e-4.",
            [updated("div"), updated("rsqrt", loss=math.nan)],
            [updated("mul"), updated("div", "float32"), updated("div", by=None)],
        ),
        (
            "makes fc.weight NaN in float32, and step 9 was applied with it: it divides 0 by 0 ... "
            "set eps to 1e-8.",
            [updated("div", "float32")],
            [updated("mul", "float32"), updated("div")],
        ),
        (
            "squares of gradients beyond 255 are Inf there. ... keep the parameters in float32",
            [updated("mul")],
            [updated("mul", "float32"), updated("div")],
        ),
        (
            "within step 9, which ... steps=(9,), count=1, is_certain=True",
            [within(55.0), within(-55.0)],
            [within(45.0), within(0.0, 0.0)],
        ),
        (
            "too large from the start ... first loss is 1.1e+09 ... by log at a.py:7, so step 9 "
            "was applied ... line='a.py:7'",
            [from_start(1.1e9)],
            [from_start(0.9e9)],
        ),
    ]


def of_over_time():
    def bad(*skipped, steps=1000):
        return skipping(range(1, steps + 1), skipped)

    def falling(size, loss=1.0):
        """Each tenth step is skipped and halves the scale; gradients times the scale are known."""
        past, peaks = [], []
        for step in range(1, 101):
            scale = 2.0 ** (24 - (step - 1) // 10)
            past.append(Step(step, scale, step % 10 == 0, 1.0 if step % 10 else loss))
            peaks.append((step, size / scale))
        return Evidence(100, 10, past=tuple(past), peaks=tuple(peaks), scale=scale)

    return [
        (
            "each with a loss of inf ... is_certain=True",
            [bad(500, 700, 900), bad(9, 20, steps=90), bad(*range(500, 505))],
            [bad(500, 900), bad(9, 20, steps=100), bad(*range(500, 504))],
        ),
        (
            "kind='data' ... 10 of 100 steps were skipped, every 10 steps (such as 80, 90, 100), "
            "with losses as usual; the loss scale is 32768 now ... steps=(80, 90, 100), count=10, "
            "is_certain=False",
            [falling(1900.0)],
            [falling(2100.0)],
        ),
        (
            "whose loss is about ... about 11 (elsewhere about 1)",
            [falling(1900.0, 11.0)],
            [falling(1900.0, 9.0)],
        ),
        (
            "every 6 steps",
            [bad(7, 13, 16, 19, 25, steps=60)],
            [
                bad(7, 13, 19, 31, 49, 52, steps=60),
                bad(*range(7, 44, 6), 46, 52, 58, steps=60),
            ],
        ),
        ("in bursts every 6 steps", [bad(7, 8, 13, 14, 19, 20, *range(25, 44, 6), steps=60)], []),
    ]


def of_evidence():
    def clipped(others):
        """The latest samples are clipped to one norm."""
        evidence = Evidence(0, 0)
        for step, norm in enumerate((1.234, *[1.0] * others), 1):
            evidence = evidence.after(Sample(step, 512.0, (), 1, (), norm=norm / 512))
        return evidence

    def kept(count):
        past = tuple(Step(n, 1.0, n > 3) for n in range(1, 9))
        more = {"past": past, "has_scaler": False, "skipped": 5}
        return replace(counted(8, kept=count), **more)

    def ended(zeros, others=0):
        more = {"events": Events().after({"ended": 2, "ended margin hinge at a.py:7": 2})}
        seen = sampled(loss=0.0, shares=shares(1.0))
        return with_losses([0.0] * zeros + [1.0] * others, sample=seen, **more)

    def changed(count, fails=False):
        losses = [1.0] * 60 + [100.0] * 20
        past = tuple(Step(n, 8.0, fails and n > 73, loss) for n, loss in enumerate(losses, 1))
        counts = {"changed": count, "changed 61": 1} if count else {}
        skipped = 7 * fails
        return Evidence(
            *(80, skipped), past=past, first=past[0], scale=8.0, events=Events().after(counts)
        )

    def in_turns(steps, switched):
        return with_losses([1.0] * steps, events=Events().after({"switched": switched}))

    def grows(ends, others=1.0, switched=79):
        """The losses of two optimizers, of which the first one's is NaN in step 81."""
        losses = chain(*zip([1.0] * (40 - len(ends)) + ends, [others] * 40, strict=True))
        events, bad = Events().after({"switched": switched}), BadStep(81, math.nan)
        return with_losses([*losses], events=events, bad_step=bad, has_scaler=False)

    rising = [60.0, 70.0, 80.0, 90.0, 100.0]

    def stood(*losses):
        seen = sampled(norm=1e-7, histogram=Bins(-24, (1, 9)))
        held = Optimizers(eps=2.0**-20)
        return with_losses(losses, measured=(seen, seen), optimizers=held, has_scaler=False)

    def ends(moves, turns, rounding=0.0):
        """A loss that falls, turns now and then, and ends at one number, but for a rounding."""
        rises = {*range(4, 4 * turns, 8), *[0] * (turns % 2)}
        falls = [0.01 * (-1 if n in rises else 1) for n in range(moves - 1)]
        end = [0.5, 0.5 + 0.5 * rounding] * 60
        losses = [*accumulate(falls, sub, initial=2.0), *end]
        known = {"sample": sampled(), "missing": (), "has_scaler": False}
        return with_losses(losses, way=Way().after(losses), **known)

    return [
        (
            "it was 0.5 in",
            [ends(19, 0), ends(100, 25), ends(50, 0, rounding=1.1e-6)],
            [ends(20, 0), ends(100, 24), ends(50, 0, rounding=0.9e-6)],
        ),
        (
            "the backward pass made gradients that are not 0, ... at step.py:7, so "
            "... line='step.py:7', steps=(), count=2, is_certain=True",
            [counted(9, {"sample": sampled(shares=shares(1.0))}, emptied=2)],
            [
                counted(9, {"sample": sampled(shares=shares(1.0))}, emptied=1),
                counted(9, {"sample": sampled(shares=shares(0.9))}, emptied=2),
            ],
        ),
        ("The norm of the gradients is 1 in each", [clipped(10)], [clipped(9)]),
        (
            "kind='data'",
            [Evidence(50, 21), Evidence(300, 31)],
            [Evidence(50, 20), Evidence(300, 30)],
        ),
        ("nothing has zeroed the gradients", [kept(2)], [kept(1)]),
        (
            "each term is beyond its margin",
            [ended(18, 2), ended(20)],
            [ended(17, 3), ended(19)],
        ),
        (
            "losses of several kinds, or several optimizers, follow one another",
            [changed(21)],
            [changed(20)],
        ),
        ("The loss grew from 1 (step", [changed(0, fails=True)], [changed(1, fails=True)]),
        (
            "as optimizers take turns",
            [in_turns(100, 25), in_turns(12, 5)],
            [in_turns(100, 24), in_turns(12, 4)],
        ),
        (
            "The loss grew from 1 (step",
            [grows(rising), grows(rising, switched=72)],
            [grows([], 100.0), grows(rising, switched=70)],
        ),
        (
            "below the optimizer's eps",
            [stood(*[1.0] * 20), stood(*[1.0] * 20, *[0.95] * 20)],
            [
                stood(*[1.0] * 19),
                stood(*[1.0] * 20, *[0.85] * 20),
                stood(*[1.0] * 9, 2.0, *[0.985] * 40),
            ],
        ),
    ]


def of___init__():
    def bad(steps, then=(1.0,)):
        losses = [*[1.0] * (steps - 1 - len(then)), math.inf, *then]
        mean = replace(LOG, operation="mean", num_inf=0, num_nan=1, size=1, largest_input=0.0)
        return with_losses(losses, bad_and_applied=1, has_scaler=False, watched=mean)

    return [
        ("So few batches do no harm ... steps=(49,)", [bad(50)], [bad(48), bad(50, then=())]),
        (
            "In these batches, the mean of no elements is 0 / 0",
            [bad(48), bad(50, then=())],
            [bad(50)],
        ),
        ("Too short to judge", [Evidence(50, 0)], [Evidence(51, 0)]),
    ]


TABLES = {
    name.removeprefix("of_"): each for name, each in globals().items() if name.startswith("of_")
}


def module_named(name):
    return import_module(f"{_findings.__name__}.{name}") if name != "__init__" else _findings


def told(name):
    """For each piece of evidence of a module, whether the first words of its case are told."""
    for words, *sides in TABLES[name]():
        for evidence in chain(*sides):
            yield words.partition(" ... ")[0] in repr(judge(evidence).findings)


@pytest.mark.parametrize("name", TABLES)
def test_evidence_at_one_side_of_a_threshold_is_told_and_that_at_the_other_is_not(name):
    for words, at_one, at_other in TABLES[name]():
        first, *more = words.split(" ... ")
        for evidence in at_one:
            found = repr(judge(evidence).findings)
            assert [each for each in (first, *more) if each not in found] == [], found
        for number, evidence in enumerate(at_other):
            assert first not in repr(judge(evidence).findings), number


def changed(name):
    """The thresholds of a module by their names, each with a smaller and with a larger one."""
    for threshold, value in vars(module_named(name)).items():
        if threshold in vars(thresholds) and threshold.isupper():
            yield threshold, value - 1 if isinstance(value, int) else value / 1.25
            yield threshold, value + 1 if isinstance(value, int) else value * 1.25


@pytest.mark.parametrize(
    "path", sorted(Path(_findings.__file__).parent.glob("*.py")), ids=lambda path: path.stem
)
def test_another_threshold_changes_what_is_told(path):
    module, usual, unnoticed = module_named(path.stem), None, []
    for threshold, other in [*changed(path.stem)]:
        usual = usual or [*told(path.stem)]
        with mock.patch.object(module, threshold, other):
            if all(map(eq, usual, told(path.stem))):
                unnoticed.append((threshold, other))
    assert unnoticed == []
