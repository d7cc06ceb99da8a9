"""A step that failed is told by its origin, in the same words whatever became of it."""

import math
from dataclasses import replace

import pytest

from gradscaler import NonfiniteGradient
from gradscaler.diagnose import Located
from gradscaler.diagnose._findings import judge
from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._findings.frameworks import framework_named
from gradscaler.diagnose._record.lines import BadStep, Skip
from gradscaler.diagnose._record.step import Step

NAN = (NonfiniteGradient("fc.weight", (2,), "float16", 0, 2, 1.0),)
LOG = Located(None, "forward", "", "float32", 1, 0, 8, 1.0, 0.5, operation="log", line="train.py:7")
SQRT = replace(LOG, kind="backward", operation="sqrt")
BATCH = replace(LOG, kind="input", operation="matmul", largest_input=math.nan)
OUTCOMES = {
    "in a row": "the last 20 steps were skipped",
    "now and then": "2 of 100 steps were skipped",
    "applied": "step 9 was applied with",
    "left out": "step 9 is nan, and no backward pass took it",
}


def evidence(outcome, located, loss):
    """The evidence of steps that failed at a place, by what became of them."""
    if outcome in ("applied", "left out"):
        is_left_out = outcome == "left out"
        bad = BadStep(9, loss, () if is_left_out else NAN, 0, located, is_left_out=is_left_out)
        return Evidence(9, 0, bad_step=bad, has_scaler=False)
    if outcome == "in a row":
        skips = tuple(Skip(80 + n, 1.0, loss, NAN) for n in range(1, 21))
        return Evidence(100, 20, skips_in_a_row=20, skips=skips, located=located, scale=1.0)
    past = tuple(Step(n, 1.0, n in (40, 41), loss if n in (40, 41) else 1.0) for n in range(1, 101))
    skips = Skip(40, 1.0, loss, NAN), Skip(41, 1.0, loss, NAN)
    return Evidence(100, 2, past=past, inspected=skips, watched=located, scale=1.0)


ORIGINS = [
    (LOG, math.nan, "makes 1 Inf in float32, by log at train.py:7, from finite inputs up to"),
    (SQRT, 0.5, "by the gradient of sqrt at train.py:7, though the loss is finite"),
    (None, math.nan, "loss is itself nan, so "),
]
CASES = [
    (*origin, outcome, clause)
    for origin in ORIGINS
    for outcome, clause in OUTCOMES.items()
    # A loss that is finite is not left out; a loss without a place is a bad batch's.
    if (outcome, origin[0]) not in (("left out", SQRT), ("now and then", None))
]


@pytest.mark.parametrize(("located", "loss", "origin", "outcome", "clause"), CASES)
def test_an_origin_has_one_text_and_an_outcome_one_clause(located, loss, origin, outcome, clause):
    text = judge(evidence(outcome, located, loss)).text
    assert origin in text
    if (outcome, located) == ("left out", None):  # the loss is named already
        clause = "so no backward pass took it in step 9"
    assert clause in text


def test_a_batch_that_is_given_is_no_operation_s_fault():
    for outcome in OUTCOMES:
        found = judge(evidence(outcome, BATCH, math.nan)).findings[0]
        assert "makes" not in found.cause
        assert found.line == "train.py:7" or outcome == "now and then"


def test_a_number_from_outside_of_the_framework_is_no_batch():
    number = replace(BATCH, operation="mul", size=1, is_number=True)
    for outcome in OUTCOMES:
        found = judge(evidence(outcome, number, math.nan)).findings[0]
        if outcome != "now and then":
            assert found.kind == "loss"
            assert "A number from outside of the framework, as of NumPy, is Inf" in found.cause
            assert found.line == "train.py:7"


def test_weights_are_not_called_lost_if_the_gradients_of_a_bad_loss_are_finite():
    """As behind a ReLU, whose gradient leaves a NaN out."""
    bad, framework = BadStep(9, math.nan, located=LOG), framework_named("jax", {})
    text = judge(Evidence(9, 0, bad_step=bad, has_scaler=False, framework=framework)).text
    assert "so the loss of step 9 is nan, and its gradients are finite" in text
    assert "lost" not in text


def test_a_replay_of_keras_explains_skips_whose_losses_are_unknown():
    past = tuple(Step(n, 64.0, n in (40, 41), None) for n in range(1, 101))
    exp = replace(LOG, operation="exp", dtype="float16")
    known = Evidence(100, 2, past=past, watched=exp, framework=framework_named("keras", {}))
    assert "by exp at train.py:7" in judge(known).text
    known = replace(known, past=tuple(step._replace(loss=0.5) for step in past))
    assert "by exp" not in judge(known).text
