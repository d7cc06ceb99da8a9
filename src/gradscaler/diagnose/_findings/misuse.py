"""Calls of a scaler that have no error, and do not do what they should."""

from __future__ import annotations

import math

from gradscaler.diagnose._findings.evidence import Evidence, Verdict

_FEW = 5
_ALMOST_ALL = 0.9
_MANY = 0.25
_SAME = 2e-5  # relative difference of norms that are clipped to one number
_LARGEST_LIMIT = 1e3  # to which gradients are clipped


def wrong_calls(evidence: Evidence) -> Verdict | None:
    """Clipping before unscaling, and ``update`` where it does not belong."""
    return unzeroed(evidence) or _clipped_while_scaled(evidence) or _updated_too_often(evidence)


def unzeroed(evidence: Evidence) -> Verdict | None:
    """Gradients that were not cleared after a step, also after one that was skipped."""
    count, steps = evidence.calls.get("unzeroed", 0), evidence.steps
    if count < max(_FEW, _MANY * steps):
        return None
    return Verdict(
        "misuse",
        f"In {count} of {steps} steps, the backward pass added scaled gradients to the unscaled "
        "ones that the step before had used, so each step uses a sum of unlike parts, and an Inf "
        "or a NaN stays. Call step(optimizer) and update() once, after the last micro-batch's "
        "backward pass, and optimizer.zero_grad() after each step.",
    )


def _clipped_while_scaled(evidence: Evidence) -> Verdict | None:
    samples = evidence.measured
    norms = [sample.norm for sample in samples]
    largest = [sample.largest for sample in samples if sample.largest is not None]
    what, function = "norm", "clip_grad_norm_"
    limit = _one_limit(norms)
    if limit is None and len(largest) > 1:
        what, function = "largest magnitude", "clip_grad_value_"
        limit = _one_limit(largest)
    if limit is None or _one_limit([limit / samples[-1].scale]) is not None:
        return None  # the second: they are clipped after unscaling, and the scale did not move
    scale = samples[-1].scale
    return Verdict(
        "misuse",
        f"The {what} of the gradients is {limit:g} in each sample while they are still multiplied "
        f"by the loss scale, so they are clipped to {limit:g} / {scale:g} = {limit / scale:g}, and "
        "the training hardly moves. Call scaler.unscale_(optimizer) after the backward pass and "
        f"before {function}, or scaler.clip_grad_norm_(optimizer, max_norm) in its place.",
    )


def _one_limit(values: list[float]) -> float | None:
    """The number of two digits that all values are, as those that people clip to; else None."""
    if not values or not 0 < min(values) <= max(values) < math.inf:
        return None
    limit = float(f"{values[0]:.2g}")
    is_one = all(abs(value - limit) <= _SAME * limit for value in values)
    return limit if is_one and limit <= _LARGEST_LIMIT else None


def _updated_too_often(evidence: Evidence) -> Verdict | None:
    calls, steps = evidence.calls, evidence.steps
    unstepped = calls.get("unstepped", 0)
    if unstepped >= max(_FEW, _MANY * (unstepped + steps)):
        return Verdict(
            "misuse",
            f"update() was called {unstepped} times after unscale_(optimizer) and without a step, "
            f"and {steps} times after one: gradients that are accumulated over micro-batches are "
            "divided by the loss scale again and again. Call unscale_(optimizer), step(optimizer) "
            "and update() once each, after the last micro-batch's backward pass.",
        )
    switched, unscaled = calls.get("switched", 0), calls.get("unscaled", 0)
    if unscaled < max(_FEW, _MANY * steps) and switched < max(_FEW, _ALMOST_ALL * steps):
        return None
    harm = "growth_interval counts each iteration twice, and a skip of one lowers it for both"
    if unscaled:
        harm = "the next optimizer's gradients are unscaled by another scale once it moves"
    return Verdict(
        "misuse",
        f"update() is called after the step of each of several optimizers: {harm}. Step all "
        "optimizers, then call update() once at the end of the iteration; or give each optimizer "
        "and its loss a scaler of its own.",
    )


def full_precision(evidence: Evidence) -> Verdict | None:
    """Backward passes without float16."""
    dtypes = evidence.backward
    if evidence.dtype != "float16" or not dtypes or dtypes & {"float16", "unknown"}:
        return None
    if "bfloat16" in dtypes:
        return Verdict(
            "misuse",
            f"The backward pass computes in {_listed(dtypes)} and nothing in float16, and bfloat16 "
            "has the range of float32: loss scaling gains nothing, and a skip loses a step. Leave "
            "the scaler out (enabled=False), or run autocast with dtype=torch.float16.",
        )
    return Verdict(
        "misuse",
        f"The backward pass computes in {_listed(dtypes)} and nothing in float16, so loss scaling "
        "has nothing to protect. Run the forward pass and the loss under torch.autocast(device, "
        "dtype=torch.float16), or leave the scaler out (enabled=False).",
    )


def _listed(dtypes: frozenset[str]) -> str:
    return " and ".join(sorted(dtypes))
