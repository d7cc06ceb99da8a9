"""Findings about optimizers, and about the parameters that they hold or leave out."""

from __future__ import annotations

from statistics import median

from gradscaler.diagnose._findings.advice import at_any_scale
from gradscaler.diagnose._findings.detector import Phase, Role, detector
from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._record.events import Event, Events
from gradscaler.diagnose._record.finding import Finding
from gradscaler.diagnose._record.lines import UNOWNED
from gradscaler.diagnose._record.thresholds import (
    ALMOST_ALL,
    FEW_CALLS,
    FEW_SAMPLES,
    FEW_STILL,
    HALF,
    LATE,
    LONG,
    MANY,
    MOST,
    RATE_GREW,
    ROSE,
    SHRUNK,
    SOLVED,
    SOME_LOSSES,
    STAYED_PASSES,
    STOOD,
    UNSTEPPED_LOSSES,
)


@detector(Phase.WRITES_NAN, in_streak=Role.CAUSE, at_bad_step=Role.CAUSE)
def nonfinite(evidence: Evidence) -> Finding | None:
    """A learning rate, or another setting of an optimizer, that is NaN or Inf."""
    found = evidence.events.places(Event.NONFINITE)
    if not found:
        return None
    setting, count = next(iter(found.items()))
    steps = f"{count} {evidence.step_word}{'s' * (count > 1)}"
    return Finding(
        "divergence",
        f"The optimizer's {setting} was NaN or Inf in {steps} of {evidence.steps}, which wrote "
        "NaN into the parameters, or cannot move them.",
        f"Look at what sets {setting.split()[0]}, such as a schedule that divides by 0 (a phase of "
        "0 steps) or runs past its end (a power of a negative number), and go back to a "
        "checkpoint.",
    )


@detector(Phase.PARAMETER)
def statistic(evidence: Evidence) -> Finding | None:
    """A running statistic that is not finite, of a forward pass whose step was left out."""
    if evidence.statistic is None:
        return None
    return Finding(
        "parameter",
        f"The model's {evidence.statistic} is itself Inf or NaN, though no step used such "
        "gradients: a forward pass in training mode wrote it, also where its loss was left out. "
        "Evaluated with it, the model makes NaN.",
        "Leave a batch with Inf or NaN out before its forward pass, look for what makes it (a "
        "division by a deviation of 0), and reset the statistic or go back to an earlier "
        "checkpoint.",
        evidence.statistic,
    )


@detector(Phase.STATE, in_streak=Role.BESIDE)
def state(evidence: Evidence) -> Finding | None:
    """An optimizer's state that is not finite. Skipping steps does not repair it."""
    if evidence.state is None:
        return None
    taken = "whose gradients were not finite"
    if evidence.has_scaler:
        taken = (
            "that was taken without the scaler, or on gradients that were changed after unscale_()"
        )
    elif "_sq of" in evidence.state:
        taken += ", or beyond 1e19, as their squares leave float32 (normalize the inputs)"
    return Finding(
        "state",
        f"The optimizer's {evidence.state} is Inf or NaN, so each of its steps writes that into "
        "the parameter, or cannot move it.",
        at_any_scale(f"go back to an earlier checkpoint, and look for a step {taken}", evidence),
        evidence.state,
    )


@detector(Phase.AWAY, in_streak=Role.CAUSE, at_bad_step=Role.CAUSE)
def uphill(evidence: Evidence) -> Finding | None:
    """A learning rate that is negative."""
    count = evidence.events.count(Event.UPHILL)
    if count < FEW_CALLS:
        return None
    return Finding(
        "divergence",
        f"The learning rate was negative in {count} of {evidence.steps} steps, so they go uphill "
        "and the loss grows.",
        f"Give the schedule{evidence.at('schedule')} the true number of steps (warm-up, epochs, "
        "accumulation), or let it end at 0; go back to a checkpoint from before.",
        line=evidence.line_of("schedule"),
        count=count,
    )


@detector(Phase.AWAY)
def decayed(evidence: Evidence) -> Finding | None:
    """Weights that shrink to almost 0 while the loss stands: the decay outweighs the gradients."""
    weights = None if evidence.optimizers is None else evidence.optimizers.weights
    losses = [step.loss for step in evidence.past if step.loss is not None]
    if (
        weights is None
        or not 0 < weights[0] * SHRUNK >= weights[1]
        or len(losses) < 2 * SOME_LOSSES
    ):
        return None
    first, last = median(losses[:SOME_LOSSES]), median(losses[-SOME_LOSSES:])
    if not last >= STOOD * first > 0:
        return None
    return Finding(
        "divergence",
        f"The weights' norm fell from {weights[0]:g} to {weights[1]:g} while the loss stood at "
        f"{last:g}: they shrink to 0, and the outputs no longer depend on the inputs.",
        "Lower weight_decay, which outweighs the gradients, or the learning rate that it is "
        "multiplied by; go back to an earlier checkpoint.",
    )


def growth_of_rate(evidence: Evidence) -> str:
    """A clause that says how much the learning rate grew; empty if it did not."""
    if not evidence.rates:
        return ""
    first, last = evidence.rates[0][1], evidence.rates[-1][1]
    if not 0 < RATE_GREW * first <= last:
        return ""
    return f" while the learning rate grew from {first:g} to {last:g}"


@detector(Phase.MISUSE)
def still(evidence: Evidence) -> Finding | None:
    """A learning rate that is 0 in step after step, of an optimizer that was made with another."""
    count = evidence.events.count(Event.STILL)
    if count < max(FEW_STILL, MANY * evidence.steps):
        return None
    if evidence.sample and not Events().after(evidence.sample.calls).count(Event.STILL):
        return None  # something has raised it since
    still = f"The learning rate was 0 in {count} of {evidence.steps} steps, so they moved nothing"
    setting = evidence.events.place(Event.STILL)
    if setting and _HOLDS not in setting:
        return _zeroed(still, setting, count)
    # Where it began at 0, a warm-up may hold it there, be it for an epoch.
    began_at_0 = count == evidence.steps or (evidence.rates and evidence.rates[0][1] == 0)
    may_rise = bool(began_at_0 or evidence.events.count(Event.SWITCHED))
    calls = evidence.events.place(Event.HASTY)
    rather = (
        f": it was called {calls}, as if for each micro-batch"
        if calls
        else ", let the warm-up begin above 0, or give the schedule the true number of steps"
    )
    return Finding(
        "misuse",
        f"{still}, though the optimizer was made with another one{setting and f': {setting}'}.",
        f"{'Unless a schedule raises it later, c' if may_rise else 'C'}all scheduler.step() "
        f"{'once ' if calls else ''}after each step(optimizer){evidence.at('step')}{rather}.",
        line=evidence.line_of("step"),
        count=count,
        is_certain=not may_rise,
        lasts=LONG if may_rise else 0,
    )


_HOLDS = "ConstantLR"  # holds its factor for some steps, and ends with another rate


def _zeroed(seen: str, setting: str, count: int) -> Finding:
    """The finding that the setting of a schedule makes the learning rate 0."""
    return Finding(
        "misuse",
        f"{seen}: {setting} makes it 0.",
        "Set that to another number; if the rate is meant to end at 0, let the schedule count as "
        "many steps (or epochs) as the run has.",
        line=setting.partition(" at ")[2] or None,
        count=count,
    )


@detector(Phase.MISUSE)
def renewed(evidence: Evidence) -> Finding | None:
    """An optimizer that the loop makes again for each step, so that it never has a state."""
    count = evidence.events.count(Event.RENEWED)
    is_reset = evidence.events.count(Event.OVERWRITTEN) > 0  # its parameters are, too, on purpose
    if is_reset or not max(FEW_CALLS, ALMOST_ALL * evidence.steps) <= count <= evidence.steps:
        return None
    return Finding(
        "misuse",
        f"The optimizer was new in {count} of {evidence.steps} steps, so the moments and the count "
        "of steps that it keeps are lost each time.",
        "Make the optimizer and its schedule once, before the loop.",
        count=count,
    )


@detector(Phase.RESTART)
def rescheduled(evidence: Evidence) -> Finding | None:
    """A schedule that begins again, of an optimizer that has the state of an earlier run."""
    jump = evidence.events.place(Event.RESCHEDULED)
    if not jump:
        return None
    is_new = evidence.has_scaler and evidence.events.count(Event.RESUMED)
    scaler = ", and of the scaler" if is_new else ""
    return Finding(
        "restart",
        "The optimizer has the state of an earlier run, and its schedule begins at its first rate: "
        f"it moves the learning rate from {jump}.",
        "Load the optimizer's state after its scheduler is made, which sets that rate, and then "
        f"the state_dict() of the scheduler{evidence.at('schedule')}{scaler}, too; to begin a new "
        "schedule, leave the optimizer's state out.",
        line=evidence.line_of("schedule"),
        is_certain=False,
    )


@detector(Phase.RESTART, at_bad_step=Role.BESIDE)
def forgotten(evidence: Evidence) -> Finding | None:
    """An optimizer that begins anew, though its schedule has the state of an earlier run."""
    if not evidence.events.count(Event.FORGOTTEN):
        return None
    line = evidence.events.place(Event.FORGOTTEN)
    at = f" (at {line})" if line else ""
    return Finding(
        "restart",
        f"The schedule has loaded the state of an earlier run{at}, and its optimizer has none: its "
        "moments begin at 0, so the first steps may undo what was learned.",
        "Save optimizer.state_dict() with the model and the schedule, and load it where they are "
        "loaded.",
        line=line or None,
        is_certain=False,
    )


@detector(Phase.MISUSE)
def faded(evidence: Evidence) -> Finding | None:
    """Learning rates that fell to almost 0 in the first quarter of a run, or in 100 steps."""
    count, first = evidence.events.count(Event.FADED), evidence.first
    losses = [step.loss for step in evidence.past if step.loss is not None]
    is_early = evidence.steps - count < LONG  # no training ends there
    if count < (LATE if is_early else MOST * evidence.steps):
        return None
    begin = abs(first.loss or 0.0) if first else 0.0
    if first is None or not losses:
        return None
    # Where optimizers take turns, the last loss is rather that of another one than the first.
    losses = [first.loss or 0.0] if evidence.takes_turns else losses
    if abs(losses[-1]) < SOLVED * begin:
        return None  # it has converged, and a schedule that waits for a plateau ends so
    if is_early and not abs(losses[-1]) <= ROSE * begin:
        return None  # the rate was lowered as the loss ran away
    seen = (
        f"In {count} of {evidence.steps} steps, the learning rate was less than a millionth of "
        "what it had been, so nothing moves any more"
    )
    if setting := evidence.events.place(Event.FADED):
        return _zeroed(seen, setting, count)
    return Finding(
        "misuse",
        f"{seen}.",
        f"Step a schedule that counts epochs{evidence.at('schedule')} once an epoch, not once a "
        "batch; give it the true number of steps, or let it end at a larger rate.",
        line=evidence.line_of("schedule"),
        count=count,
        is_certain=is_early,
    )


@detector(Phase.MISUSE, at_bad_step=Role.BESIDE)
def idle(evidence: Evidence) -> Finding | None:
    """An optimizer that never finds a gradient, beside others that step."""
    calls = evidence.events.places(Event.IDLE)
    found = {**calls, **({} if evidence.optimizers is None else evidence.optimizers.idle)}
    name, count = max(found.items(), key=lambda item: item[1], default=("", 0))
    if count < FEW_CALLS:
        return None
    cause = (
        f"The optimizer of {name} found no gradient in its first {count} steps, though others did, "
        "so it trains nothing"
    )
    if place := evidence.events.place(Event.CUTS_OFF):
        return Finding(
            "misuse",
            f"{cause}: {place} cuts off what it holds.",
            "Unless its part of the loss begins later, or that call is meant and a loss without it "
            "is missing, leave it out.",
            None if name == UNOWNED else name,
            place.rpartition(" at ")[2] if " at " in place else None,
            count=count,
        )
    where, (what, line) = None if name == UNOWNED else name, evidence.astray
    if what == "parameters":
        return Finding(
            "misuse",
            f"{cause}: the loss depends on parameters that no optimizer holds.",
            "Unless its part of the loss begins later, give it the parameters of the model that is "
            f"trained{line and f', at {line}'}: it holds those of another one, of a copy, or of "
            "layers that were replaced.",
            where,
            line or None,
            count=count,
        )
    return Finding(
        "misuse",
        f"{cause}.",
        "Unless its part of the loss begins later, look for detach(), .data, item() or no_grad() "
        "between its parameters and the loss; call zero_grad() before the backward pass; and make "
        "the optimizer of this model's layers, not a copy's or replaced ones.",
        where,
        count=count,
    )


_STOPPED = {  # why an optimizer finds no gradient any more, and what to do
    "replaced": (
        ": the model holds none of its parameters any more",
        "Make the optimizer again after layers are replaced, of the new parameters, or give it "
        "these by add_param_group().",
    ),
    "frozen": (
        ": all of its parameters have requires_grad=False",
        "Leave out of the freeze what should be trained, such as a head that its pattern of names "
        "takes along.",
    ),
    "": (
        "",
        "Look for what changed after that step: a model that was replaced and not its optimizer, "
        "backward passes that are left out, or detach() before the loss.",
    ),
}


@detector(Phase.MISUSE)
def moved_frozen(evidence: Evidence) -> Finding | None:
    """Frozen parameters that an optimizer moves all the same."""
    which = evidence.events.place(Event.MOVED_FROZEN)
    if not which:
        return None
    return Finding(
        "misuse",
        f"The optimizer moves {which} with requires_grad=False: the gradients there are 0 and "
        "not None, so momentum and weight decay go on.",
        "Set p.grad = None for each parameter p that is frozen, or leave these out of the optimizer"
        f"{evidence.at('optimizer')}.",
        line=evidence.line_of("optimizer"),
        count=evidence.events.count(Event.MOVED_FROZEN),
    )


@detector(Phase.MISUSE)
def stopped(evidence: Evidence) -> Finding | None:
    """Steps without a gradient at the end of a run that had made others."""
    last = str(evidence.past[-1].step) if evidence.past else ""
    stops = (
        (why, count)
        for where, count in evidence.events.places(Event.STOPPED).items()
        for step, _, why in [where.partition(" ")]
        if step == last
    )
    why, count = next(stops, ("", 0))
    if not count:
        return None
    because, action = _STOPPED.get(why, _STOPPED[""])
    return Finding(
        "misuse",
        f"The optimizer found no gradient in {count} calls of step() after step {last}, so nothing "
        f"is trained any more{because}.",
        action,
        count=count,
    )


FROM_TARGETS = (
    "Look at whether the loss uses what the model returns, or the targets alone, and for "
    "detach(), argmax, rounding or a comparison on the way."
)
_UNMOVED = {  # where the new weights get lost, and what to do
    "returned": (
        "the weights that the step returns are those that it was given, though it takes their "
        "gradient and makes new ones",
        "Return the weights that optax.apply_updates() returns, or the state that "
        "apply_gradients() returns, in place of the old ones.",
    ),
    "given": (
        "the weights whose gradient is taken are the same arrays as in the step before, though "
        "optax.apply_updates() made new ones of them",
        "Keep what it returns: params = optax.apply_updates(params, updates), and take the next "
        "gradient of these.",
    ),
    "dropped": (
        "the weights that are given are the same arrays as in the step before, though the step "
        "returned new ones, which nothing took",
        "Assign what the step returns to the names that it is given: params, opt_state, ... = "
        "step(params, opt_state, ...).",
    ),
    "copied": (
        "what changes is a copy of the model: jax.jit makes one of each nnx.Module and "
        "nnx.Optimizer that it is given, and drops its updates",
        "Compile the step by nnx.jit in place of jax.jit; or return model and optimizer from it, "
        "and assign them.",
    ),
    "zero": (
        "all gradients of the weights are exactly 0",
        "Look for what has no slope between the weights and the loss: units that are all off, a "
        "saturated function, a softmax of one number, a clamp, a mask of 0; or for a loss that is "
        "computed from other weights, or from the targets alone.",
    ),
    "apart": (
        "all gradients are exactly 0, as the loss does not depend on the weights",
        FROM_TARGETS,
    ),
}


@detector(Phase.MISUSE)
def unmoved(evidence: Evidence) -> Finding | None:
    """Steps that all leave the weights as they were, as the script loses the new ones."""
    count = evidence.events.count(Event.UNMOVED)
    where = evidence.events.place(Event.UNMOVED)
    enough = LATE if where == "dropped" else FEW_CALLS  # several tasks may begin where others do
    if count < max(enough, ALMOST_ALL * (evidence.steps - 1)):  # the first has none before it
        return None
    if where == "zero" and evidence.past and evidence.past[-1].loss == 0:
        return None  # it may have nothing left to improve
    if where == "apart" and evidence.bad_and_applied >= HALF * count:
        return None  # `silent` says it of these losses
    why, action = _UNMOVED[where]
    return Finding(
        "misuse",
        f"In {count} of {evidence.steps} steps, {why}, so nothing is trained.",
        action,
        count=count,
    )


@detector(Phase.STATE, in_streak=Role.CAUSE, at_bad_step=Role.CAUSE)
def kept_by_hook(evidence: Evidence) -> Finding | None:
    """An Inf or NaN in what a communication hook adds to each gradient."""
    memory, latest = evidence.events.place(Event.KEPT_BY_HOOK), evidence.past[-2:]
    if not memory or not all(step.skipped or step.has_bad_loss for step in latest):
        return None  # a step was applied since, so it is over
    return Finding(
        "nan",
        f"The memory of a communication hook, {memory}, holds an Inf or NaN: PowerSGD adds it to "
        "each gradient, so all of them are NaN, though the losses are finite.",
        "Clear error_dict, p_memory_dict and q_memory_dict of the hook's state after such a step, "
        "as no skip and no lower scale does; and leave a bad batch out before its backward pass.",
    )


@detector(Phase.MISUSE)
def stayed(evidence: Evidence) -> Finding | None:
    """Gradients of Inf or NaN that are zeroed only after a step, which never comes any more."""
    last = evidence.past[-1].step if evidence.past else 0
    seen = (
        (name, count)
        for where, count in evidence.events.places(Event.STAYED).items()
        for step, _, name in [where.partition(" ")]
        if step == str(last) and count >= STAYED_PASSES
    )
    name, count = next(seen, ("", 0))
    if not count:
        return None
    since = f" after step {last}" if last else ""
    return Finding(
        "misuse",
        f"No step was taken in {count} backward passes{since}: before each that was looked at, the "
        f"gradient of {name} held the Inf or NaN of an earlier one, to which a pass adds.",
        "Call optimizer.zero_grad() also where a step is left out: a lower loss scale cures no "
        "gradient that stays.",
        name,
        count=count,
    )


@detector(Phase.MISUSE)
def stood(evidence: Evidence) -> Finding | None:
    """Weights that all later steps, or all of them, return as they were, to the bit.

    Those that have converged do so, too: by a loss that is near 0, or the same one in each step.
    """
    places = {
        where: count
        for where, count in evidence.events.places(Event.STOOD).items()
        if where.split()[0].isdecimal()
    }
    first = max((int(where.split()[0]) for where in places), default=0)
    latest = {where: n for where, n in places.items() if where.split()[0] == str(first)}
    count, gradients = sum(latest.values()), max(latest, default="").partition(" ")[2]
    losses = [step.loss for step in evidence.past if step.loss is not None]
    begin = abs(evidence.first.loss or 0.0) if evidence.first else 0.0
    # Less than half may be those of an accumulation, of which the last one moves the weights.
    if first == 1 and count > max(LATE, evidence.steps - FEW_CALLS):  # the first are not searched
        return Finding(
            "misuse",
            f"The weights have not changed in any of {evidence.steps} steps, though gradients are "
            "not 0.",
            _RATE_FROM_0,
            count=count,
        )
    if count < max(LATE, HALF * evidence.steps) or first + count <= evidence.steps:
        return None
    if not losses or abs(losses[-1]) < SOLVED * begin or len(set(losses[-LATE:])) < FEW_CALLS:
        return None
    though, action = {
        "some": (", though gradients are not 0", _RATE_OF_0),
        "zero": (", and all gradients are exactly 0", _UNMOVED["zero"][1]),
    }.get(gradients, ("", _RATE_OF_0))
    return Finding(
        "misuse",
        f"The weights have not changed from step {first} on, in {count} of {evidence.steps} "
        f"steps{though}.",
        action,
        count=count,
    )


@detector(Phase.MISUSE)
def unwritten(evidence: Evidence) -> Finding | None:
    """Parameters with gradients to which nothing writes, as an optimizer steps other tensors."""
    sample = evidence.sample
    steps = 0 if evidence.optimizers is None else evidence.optimizers.stood
    if sample is None or not sample.norm or steps - evidence.skipped < LATE:
        return None
    return Finding(
        "misuse",
        f"None of the {len(sample.parameters)} parameters with a gradient that the optimizer holds "
        f"has moved in {steps} steps, though step() was called: nothing has written to them.",
        "Look for other tensors that are stepped in their place: those of a copy that pickle, "
        "deepcopy or load_state_dict() made of an optimizer within the optimizer, or of a model "
        "that was replaced. Make the inner optimizer again, of these parameters.",
        count=steps,
    )


_RATE_FROM_0 = (
    "Look at the learning rate: it may be 0 (optax.scale(0.), a schedule that begins at 0 and "
    "counts steps), too small to move any weight, or a mask may leave all of them out."
)
_RATE_OF_0 = (
    "Look at the learning rate's schedule: it may have ended, as decay_steps and transition_steps "
    "of optax count steps, not epochs; or the rate is too small to move any weight."
)


@detector(Phase.MISUSE)
def stale(evidence: Evidence) -> Finding | None:
    """A part of a state, such as running statistics, that each step returns as it was given."""
    count = evidence.events.count(Event.STALE)
    if count < max(FEW_CALLS, ALMOST_ALL * evidence.steps):
        return None
    part = evidence.events.place(Event.STALE)
    return Finding(
        "misuse",
        f"In {count} of {evidence.steps} steps, the step returns {part} as given, and drops what "
        "it computes in place of that.",
        "Return the new one: of running statistics, what apply(..., mutable=['batch_stats']) gives "
        "beside the outputs, in a TrainState by replace(batch_stats=...). Else an evaluation uses "
        "those that it began with.",
        part.partition(" and ")[0],
        count=count,
    )


@detector(Phase.MISUSE)
def shared(evidence: Evidence) -> Finding | None:
    """Two optimizers that step the same parameters with the same gradients."""
    count = evidence.events.count(Event.SHARED)
    if count < FEW_SAMPLES:
        return None
    so = "which moves each parameter twice"
    if evidence.has_scaler:
        so = "divided by the loss scale once more"
    return Finding(
        "misuse",
        f"Two optimizers hold the same parameters, and in {count} sampled steps the second stepped "
        f"with the gradients that the first had used, {so}.",
        "Give each optimizer the parameters of its own part of the model, or keep one of them.",
        count=count,
    )


@detector(Phase.MISUSE, at_bad_step=Role.BESIDE)
def outside(evidence: Evidence) -> Finding | None:
    """Parameters with a gradient that no optimizer holds."""
    names = () if evidence.optimizers is None else evidence.optimizers.outside
    if not names:
        return None
    return Finding(
        "misuse",
        f"In no optimizer that is stepped: {_listed(names)}, in spite of a gradient, so nothing "
        "moves it.",
        f"Call step() with the optimizer that holds it, or give it to one{_made_at(evidence)}, "
        "which must be made after layers are added or replaced; or call requires_grad_(False) on "
        "it.",
        names[0],
        evidence.line_of("optimizer"),
        is_certain=False,
    )


@detector(Phase.SIZE)
def outweighed(evidence: Evidence) -> Finding | None:
    """Gradients below the eps of Adam, which then says how small its steps are."""
    eps = None if evidence.optimizers is None else evidence.optimizers.eps
    shares = [s.histogram.share_below(eps) for s in evidence.measured if s.histogram]
    if len(shares) < FEW_SAMPLES or min(shares) < ALMOST_ALL or not evidence.has_stood:
        return None
    return Finding(
        "eps",
        f"{min(shares):.0%} of the gradients are below the optimizer's eps of {eps:g}, so that is "
        "what divides them, not their size: the steps are tiny, and the loss does not fall.",
        "Multiply the loss by a constant, or lower eps; another loss scale does not help.",
        is_certain=False,
    )


@detector(Phase.MISUSE, needs_scaler=True)
def unscaled(evidence: Evidence) -> Finding | None:
    """Parameters whose gradients come from a loss that was not scaled, beside one that was."""
    names = () if evidence.optimizers is None else evidence.optimizers.unscaled
    if not names:
        return None
    return Finding(
        "misuse",
        f"The gradient of {_listed(names)} comes from no loss that was given to scale(), and "
        "step() divides it by the loss scale all the same, so it is that much too small.",
        "Scale each loss: scaler.scale(first).backward() and scaler.scale(second).backward(), or "
        "scale their sum.",
        names[0],
        is_certain=False,
    )


def _made_at(evidence: Evidence) -> str:
    """A clause with the line that made the optimizer; empty if it is unknown."""
    line = evidence.line_of("optimizer")
    return f" (one is made at {line})" if line else ""


def _listed(names: tuple[str, ...]) -> str:
    """The number of some parameters, and the name of the first."""
    return f"{len(names)} parameters ({names[0]} first)" if len(names) > 1 else names[0]


@detector(Phase.MISUSE, in_streak=Role.CAUSE, at_bad_step=Role.CAUSE)
def undivided(evidence: Evidence) -> Finding | None:
    """Steps with gradients of a scaled loss that nobody divided by the scale."""
    count = evidence.events.count(Event.UNDIVIDED)
    if not count or count < MANY * (evidence.steps - evidence.skipped):
        return None
    return Finding(
        "misuse",
        f"In {count} of {evidence.steps} steps, the optimizer was given the gradients of the "
        "scaled loss as they were: they are still multiplied by the loss scale, and each step is "
        "that much too large.",
        "Call scaler.unscale_(optimizer) after the backward pass, before the gradients are checked "
        "and used; go back to a checkpoint from before.",
        count=count,
    )


@detector(Phase.MISUSE, in_streak=Role.CAUSE, at_bad_step=Role.CAUSE)
def summed(evidence: Evidence) -> Finding | None:
    """Gradients of a function's other results, which were added to those of its loss."""
    count = evidence.events.count(Event.SUMMED)
    if not count or count < MANY * evidence.steps:
        return None
    return Finding(
        "misuse",
        f"In {count} of {evidence.steps} steps, value_and_grad() or grad() was given a function "
        "that returns more than its loss, without has_aux=True: the gradients are those of the sum "
        "of all its results, such as the logits, so training makes that sum small.",
        "Pass has_aux=True, or return the loss alone.",
        count=count,
    )


@detector(Phase.MISUSE)
def untaken(evidence: Evidence) -> Finding | None:
    """Backward passes, and never a step of an optimizer."""
    count = evidence.events.count(Event.UNTAKEN)
    if evidence.steps or not count:
        return None
    kind, _, line = evidence.events.place(Event.UNTAKEN).partition(" ")
    made = f" of the optimizer that is made at {line}" if line else ""
    why, then = "", ""
    if kind == "scheduled":
        why, then = ", and scheduler.step() moves none", ", and then scheduler.step()"
    return Finding(
        "misuse",
        f"optimizer.step() was never called, in {count} backward passes, so no weight has "
        f"moved{why}.",
        f"Call optimizer.step(){made} after the backward pass{then}.",
        line=line or None,
        count=count,
        is_certain=False,
    )


@detector(Phase.MISUSE, needs_scaler=True)
def stepless(evidence: Evidence) -> Finding | None:
    """Losses that are scaled, and an optimizer that steps without the scaler."""
    count = evidence.events.count(Event.STEPLESS)
    if evidence.steps or count < UNSTEPPED_LOSSES - 1:
        return None
    return Finding(
        "misuse",
        f"{count + 1} losses were scaled and the parameters moved, but no step(optimizer) of the "
        "scaler came: the optimizer uses gradients that are multiplied by the loss scale.",
        "Call scaler.step(optimizer) in place of optimizer.step(), and then scaler.update().",
        count=count + 1,
    )
