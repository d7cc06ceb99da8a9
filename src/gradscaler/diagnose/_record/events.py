"""What a monitor counts of a training's calls, beside its steps: who writes and who reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum


class Event(Enum):
    """A kind of call, or of what a sampled step shows, that suggests a mistake.

    Attributes:
        text: its name in a run file, where a place may follow it.
        writers: the modules of ``_monitor`` that count it.
        readers: the modules of ``_findings`` that look for it.
    """

    def __init__(self, text: str, writers: str, readers: str) -> None:
        self.text = text
        self.writers = {*writers.split()}
        self.readers = {*readers.split()}

    # Calls of a scaler, and their order.
    UNSTEPPED = "unstepped", "iterations", "calls"  # update() came after unscale_(), with no step
    LEFT_OUT = "left_out", "looks", "calls"  # such a step's gradients were zeroed
    # A step came after a step of another optimizer and an update(): UNSCALED if no loss was scaled.
    SWITCHED = "switched", "step_log", "calls evidence optimizers"
    UNSCALED = "unscaled", "step_log", "calls"
    LOSSLESS = "lossless", "iterations", "calls"  # an eager scaler stepped without a scaled loss
    MIXED = "mixed", "observer", "calls"  # a step used gradients of which a part was unscaled
    # A step took the gradients of a scaled loss as they were.
    UNDIVIDED = "undivided", "recorder", "optimizers"
    # A step took gradients that had left their dtype by the loss scale alone.
    UNSKIPPED = "unskipped", "recorder", "origins"
    # Samples: gradients were divided by the loss scale, or by more, and then by the scaler, too.
    SHRUNK = "shrunk", "observer", "calls"
    # Samples: no backward pass took the loss that was scaled, and a step found gradients.
    BYPASSED = "bypassed", "observer", "calls"
    REPEATED = "repeated", "observer recorder", "calls"  # the optimizer stepped beside its scaler
    # The gradients of a step that a script left out were not zeroed.
    KEPT = "kept", "loop_observer", "evidence"
    # After a step that failed, a communication hook's memory held an Inf or NaN: at that memory.
    KEPT_BY_HOOK = "kept_by_hook", "observer", "optimizers"
    # Backward passes after the step of a number, the last one, that found an Inf or NaN of an
    # earlier one in a gradient: at that number and the gradient's parameter.
    STAYED = "stayed", "step_log", "optimizers"
    # Samples: gradients that a backward pass made, and that were all 0 at the step.
    EMPTIED = "emptied", "loop_observer", "calls evidence"
    # Samples: the gradients of all backward passes but the last were zeroed, unused: at "7 of 8".
    ZEROED = "zeroed", "observer", "calls"
    # Gradients that a step had used were added to: at the module of the optimizer, too.
    UNZEROED = "unzeroed", "iterations", "calls"

    # Optimizers and their settings.
    NONFINITE = "nonfinite", "learning_rates", "optimizers"  # Inf or NaN, as "lr of group 0"
    UPHILL = "uphill", "learning_rates", "optimizers"  # a learning rate was negative
    STILL = "still", "learning_rates", "optimizers"  # all rates were 0: at what set them, once
    # Likewise: its schedule had made more steps than it had, as "80 times in 10 steps".
    HASTY = "hasty", "learning_rates", "optimizers"
    FADED = "faded", "learning_rates", "optimizers"  # all were below a millionth: likewise
    RESCHEDULED = "rescheduled", "learning_rates", "optimizers"  # as "1e-4 to 0.1", if resumed
    # The rate that an optimizer was made with, as "lr=0.5 of SGD": its groups had that of another.
    IGNORED = "ignored", "learning_rates", "learning"
    # It was its first step, though a schedule of its own had loaded a state: at that line.
    FORGOTTEN = "forgotten", "observer", "optimizers"
    LOADED = "loaded", "observer", "learning"  # and all of its weights were loaded: at that line
    RENEWED = "renewed", "observer", "optimizers"  # a step gave an optimizer its first state
    OVERWRITTEN = "overwritten", "iterations", "optimizers learning"  # weights, between two steps
    SHARED = "shared", "looks", "optimizers"  # as LOSS: it stepped another's parameters
    # No gradient in steps that follow others: at the number of the last, and why, if that is known.
    STOPPED = "stopped", "step_log", "optimizers"
    # Samples: a step moved parameters that are frozen, whose gradients are 0: at their number.
    MOVED_FROZEN = "moved_frozen", "observer", "optimizers"
    # A step left its weights as they were, which each one does: at "returned", "given", "dropped",
    # "copied", "zero" or "apart".
    UNMOVED = "unmoved", "recorded_loop", "losses optimizers"
    # It did since another one, as "16 some" of one whose gradients are not all 0.
    STOOD = "stood", "recorded_loop", "optimizers"
    # Its gradient is that of all results of a function together, as "value_and_grad()" takes it.
    SUMMED = "summed", "recorded_loop", "optimizers"
    UNCHANGED = "unchanged", "recorded_loop", "losses"  # or for a loss of Inf or NaN, by itself
    # A step returned a part of its state as given, though it computed a new one: at the part.
    STALE = "stale", "recorded_loop", "optimizers"
    # A module of the user's has a backward() that PyTorch never calls: at its class and line.
    UNCALLED = "uncalled", "observer", "calls"
    EVALUATING = "evaluating", "observer", "calls"  # a model that had been in training mode before

    # Losses, at samples; at an operation and its line, or at parameters, too.
    NEGATIVE = "negative", "scaled_losses", "loss_graphs"  # never so for targets as they should be
    # Losses of one kind, none of which is divided, whose gradients a step adds up: at their number.
    ADDED_UP = "added_up", "scaled_losses", "learning"
    # Multiplied by a power of 2 from 256 on: at that, too.
    BY_HAND = "by_hand", "scaled_losses", "calls evidence learning origins over_time"
    # A float16 divisor was Inf.
    ABSORBED = "absorbed", "scaled_losses", "loss_graphs gradient_values"
    FLOORED = "floored", "scaled_losses", "gradient_values"  # it is a constant that floors it
    ENDED = "ended", "scaled_losses", "loss_graphs"  # it is 0, and each way from it ends
    # It is not 0, each way from it ends, and a relu or a clamp on one is off for all its inputs.
    OFF = "off", "scaled_losses", "gradient_values"
    # It takes probabilities for logits.
    TWICE = "twice", "scaled_losses early_losses", "loss_graphs"
    CUT = "cut", "scaled_losses", "loss_graphs"  # a ReLU makes its logits
    LINEAR = "linear", "scaled_losses", "loss_graphs"  # kl_div takes probabilities for logarithms
    CONSTANT = "constant", "observer", "loss_graphs"  # its term depends on nothing that is trained
    # Its term is computed from integers or booleans that are made of what is trained: at that call.
    COUNTED = "counted", "observer", "loss_graphs"
    # Its term is computed from what detach() cuts off: at that call.
    DETACHED = "detached", "observer", "loss_graphs"
    # It reads the result of autograd.grad(), which has no graph: at that call.
    GRAPHLESS = "graphless", "observer", "loss_graphs"
    ACROSS = "across", "scaled_losses", "loss_graphs"  # it takes probabilities over the batch
    # An attention in it has its softmax along the queries, or along the batch.
    OVER_QUERIES = "over_queries", "scaled_losses", "loss_graphs"
    # It takes the last step, or the mean, of a recurrent layer along the batch.
    POOLED_BATCH = "pooled_batch", "scaled_losses", "loss_graphs"
    WHOLE_NORM = "whole_norm", "scaled_losses", "loss_graphs"  # it compares rows of one norm
    # It compares n outputs with n targets each.
    BROADCAST = "broadcast", "scaled_losses early_losses recorder", "loss_graphs"
    # A product in it meets n numbers with n others each.
    PAIRED = "paired", "scaled_losses", "loss_graphs"
    ZERO_MASKED = "zero_masked", "scaled_losses", "loss_graphs"  # scores, before a softmax
    # A product in it weighs what is trained by numbers without a gradient, such as rewards.
    WEIGHTED = "weighted", "scaled_losses", "learning"
    # It adds a sum over the batch to a mean, whose outputs are the same in all rows.
    SUMMED_TERM = "summed_term", "scaled_losses", "loss_graphs"
    # An operation, at its line, that passes no gradient on, in a step that lacks some.
    PASSES_NONE = "passes_none", "recorder observer", "__init__ gradient_values"
    # The calls that cut off all that an optimizer holds, in a step without a gradient of it.
    CUTS_OFF = "cuts_off", "observer", "optimizers"
    MARGIN = "margin", "scaled_losses", "learning"  # it is a mean of what a relu or clamp leaves
    FLAT = "flat", "scaled_losses", "learning"  # it is behind many of sigmoid and tanh in a row
    UNHELD = "unheld", "scaled_losses", "learning"  # it depends on what no model and optimizer has
    HELD_LATE = "held_late", "step_log", "learning"  # at the end: an optimizer holds that by now
    # In any step: it ends in another operation than that of the step before, or it is of another
    # optimizer: at the number of the step.
    CHANGED = "changed", "observer", "evidence learning"
    # It depends on those in a list of the model's.
    UNREGISTERED = "unregistered", "scaled_losses early_losses", "loss_graphs"

    # Calls of load_state_dict() between steps, at their line, from the module's own tensors.
    ONTO_ITSELF = "onto_itself", "observer", "calls"

    # Likewise from other tensors, to what an optimizer holds: at the next step and that line.
    RELOADED = "reloaded", "observer", "learning"

    # At the end: what the script's evaluation left as NaN, at its name.
    NAN_LEFT = "nan_left", "step_log", "__init__"

    # Likewise: layers that normalize by the statistics of their start, as "copy Net 3 bn1".
    AT_START = "at_start", "step_log", "calls"

    # Before the first step.
    UNFIT = "unfit", "observer", "calls"  # load_state_dict(strict=False) that loaded nothing
    RESUMED = (
        "resumed",
        "observer",
        "calls optimizers",
    )  # an optimizer had a state, but the scaler was new
    IDLE = "idle", "observer recorded_loop step_log", "calls optimizers"  # at a module, later too
    # The loss of such a step depends on what the optimizer lacks, or on parameters that it holds.
    ASTRAY = "astray", "observer step_log", "evidence"
    RAISED = "raised", "observer", "__init__"  # step() or unscale_() raised an error
    # At the end: backward passes, where no step of any optimizer came and the weights stood; at
    # "scheduled" or "alone", and the line that made the optimizer.
    UNTAKEN = "untaken", "loop_observer", "optimizers"
    STEPLESS = "stepless", "observer", "optimizers"  # parameters moved between two scaled losses
    DISABLED = "disabled", "loop_observer", "calls"  # the scaler is; a forward pass was in float16


_BY_TEXT = {event.text: event for event in Event}


@dataclass(frozen=True)
class Counted:
    """An event, where it was, and how often it was seen there.

    ``where`` is empty for all places together.
    """

    event: Event
    where: str = ""
    count: int = 1


def of_unzeroed(name: str) -> list[Counted]:
    """A backward pass that adds to gradients of a module, whose name may not be known."""
    return [Counted(Event.UNZEROED), *[Counted(Event.UNZEROED, name)] * bool(name)]


def texts_of(counted: Iterable[Counted]) -> dict[str, int]:
    """The counts by the texts of a run file, such as ``{"unzeroed": 3, "unzeroed head": 3}``."""
    counts = Counter[str]()
    for each in counted:
        counts[f"{each.event.text} {each.where}".rstrip()] += each.count
    return dict(counts)


@dataclass(frozen=True)
class Events:
    """How often each event was seen, and where.

    >>> seen = Events().after({"unzeroed": 2}).after({"unzeroed": 1, "unzeroed head": 1})
    >>> seen.count(Event.UNZEROED), seen.place(Event.UNZEROED), seen.count(Event.MIXED)
    (3, 'head', 0)
    """

    counts: Mapping[tuple[Event, str], int] = field(default_factory=dict)

    def after(self, texts: Mapping[str, int]) -> Events:
        """These events and those of a line; one that is not known, of a later version, is not."""
        if not texts:
            return self
        counts = Counter(self.counts)
        for text, count in texts.items():
            name, has_place, where = text.partition(" ")
            if name in _BY_TEXT and (where or not has_place):  # a place may have had no name
                counts[_BY_TEXT[name], where] += count
        return Events(counts)

    def count(self, event: Event) -> int:
        """How often an event was seen, in all places together."""
        return self.counts.get((event, ""), 0)

    def places(self, event: Event) -> dict[str, int]:
        """How often an event was seen in each place, the most frequent first."""
        found = {where: n for (each, where), n in self.counts.items() if each is event and where}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def place(self, event: Event) -> str:
        """The place where an event was seen most; empty if none is known."""
        return next(iter(self.places(event)), "")
