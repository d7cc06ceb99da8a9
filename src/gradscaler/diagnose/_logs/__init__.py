"""Judges the log of another tool by its sequence of loss scales and losses."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TextIO

from gradscaler.diagnose._logs.lines import TOOLS, Log
from gradscaler.diagnose._record.finding import Finding, Verdict, verdict_of
from gradscaler.diagnose._record.kinds import KINDS, kind_of
from gradscaler.diagnose._record.thresholds import (
    EXPLODED,
    FEW_EVENTS,
    MOST_SKIPPED,
    ROSE_IN_LOG,
    SANK_IN_LOG,
    STUCK_IN_LOG,
)
from gradscaler.diagnose.report._content import Content, Headline
from gradscaler.diagnose.report._words import ends, number, shown

NOT_UNDERSTOOD = f"no line looks as {', '.join(TOOLS[:-1])} or {TOOLS[-1]} prints it"

_LONGEST = 4096  # characters; these tools print shorter lines, and patterns are slow on long ones
_ASK = (
    "The log does not hold the cause: start the script, as it is, with python -m gradscaler run, "
)
_NAMES = "which names the operation and the line that make the first Inf or NaN."
_NAMES_STEP = (
    "which names the first bad step, and then with --watch STEP, which names the operation and the "
    "line."
)
_BACK = "go back to an earlier checkpoint, lower the learning rate or warm it up, clip gradients"


def may_be_log(path: Path) -> bool:
    """Whether a path is a file with a text that is not a run file."""
    start = start_of(path) if path.is_file() else b""
    return bool(start) and b'"gradscaler"' not in start and b'"kind"' not in start


def read_log(path: Path) -> Log | None:
    """Read a log; None if no line of it is understood."""
    is_utf_16 = start_of(path).startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    log = Log()  # PowerShell writes UTF-16
    with path.open(encoding="utf-16" if is_utf_16 else "utf-8", errors="replace") as text:
        for log.lines, line in _lines(text):
            log.add(line)
    return log if log.tools else None


def start_of(path: Path) -> bytes:
    """The first bytes of a file, enough to tell what it is."""
    with path.open("rb") as file:
        return file.read(_LONGEST)


def _lines(text: TextIO) -> Iterator[tuple[int, str]]:
    """Yield a text's lines with their numbers; a carriage return ends one, too."""
    count = 1
    for line in iter(lambda: text.readline(_LONGEST), ""):
        yield count, line
        count += line.endswith("\n")


def verdict_on(log: Log) -> Verdict:
    """The verdict on a log: what it shows, the gravest first, or that nothing is unusual."""
    detectors = _diverged, _not_finite, _stopped, _overflows, _goes_on, _of_evaluation
    found = [finding for detector in detectors if (finding := detector(log)) is not None]
    if found and found[0].kind in ("divergence", "loss"):  # explains the skips
        found = [each for each in found if each.kind not in ("floor", "data")]
    found.sort(key=lambda finding: [*KINDS].index(finding.kind))
    return verdict_of(found or [_normal(log)])


def content_of_log(log: Log) -> Content:
    """The report on a log."""
    verdict = verdict_on(log)
    facts = {"Printed by": ", ".join(log.tools), "Lines": f"{log.lines:,}"}
    facts["Skipped steps"] = f"{log.skips:,}"
    for name, values in (("Loss scale", log.scales), ("Loss", log.losses)):
        if values:
            facts[name] = ends([number(value) for value in values])
    summary = ". ".join(f"{name}: {shown(fact)}" for name, fact in facts.items()) + "."
    kind = kind_of(verdict.kind)
    return Content(Headline(kind.level, kind.headline), verdict.text, (), summary, {}, None, ())


def _ask(log: Log) -> str:
    """What names the cause, in the training's framework."""
    return _ASK + (_NAMES if log.framework in ("", "jax") else _NAMES_STEP)


def _is_at_lowest(log: Log) -> bool:
    """Whether steps still overflow at a scale that no longer enlarges gradients, or cannot fall."""
    scale = log.scales[-1] if log.scales else math.inf
    is_small = log.is_lowest or scale <= 1 or not log.scales
    return (
        "floor" in log.stops
        or (log.streak >= FEW_EVENTS and scale < 1)
        or (log.streak >= STUCK_IN_LOG and is_small)
    )


def _diverged(log: Log) -> Finding | None:
    """A loss that rose before the steps failed, or to many times what it was."""
    if len(log.recent) < FEW_EVENTS or not 0 < log.usual < math.inf:
        return None
    loss = median(log.recent)
    failed = bool(log.bad_now or log.stops) or _is_at_lowest(log)
    if loss < log.usual * (ROSE_IN_LOG if failed else EXPLODED):
        return None
    so = f", then NaN or Inf from {log.since} on" if log.bad_now else ""
    so = so or (", and then the steps failed" if failed else "")
    cause = f"The loss rose from {number(log.usual)} to {number(loss)}{so}."
    action = f"It diverges at any loss scale: {_BACK}. If it rose after one batch, look there."
    return Finding("divergence", cause, f"{action} {_ask(log)}", is_certain=failed)


def _not_finite(log: Log) -> Finding | None:
    """Losses that are NaN or Inf at the end of the log: applied, or skipped."""
    if not log.bad_now:
        return None
    skips = log.skips - log.good
    since = f"The loss is NaN or Inf from {log.since} on, in {log.bad_now:,} line"
    since += "s" * (log.bad_now > 1)
    trap = f" ({log.trap})" if log.trap else ""
    if skips:
        cause = f"{since}{trap}, and {_were(skips)} skipped since then."
        action = f"No loss scale fixes a loss that is NaN before it is scaled. {_ask(log)}"
        return Finding("loss", cause, action, count=log.bad_now, is_certain=False)
    cause = f"{since}{trap}, and no line says that a step was skipped."
    action = (
        "If the NaN was applied, all weights are NaN: later steps repair nothing, so stop the run, "
        f"and go back to a checkpoint from before. {_ask(log)}"
    )
    return Finding("loss", cause, action, count=log.bad_now, is_certain=log.bad_now >= FEW_EVENTS)


def _stopped(log: Log) -> Finding | None:
    """A tool's own error that says more than that the scale is at its minimum."""
    for kind, (tool, where) in log.stops.items():
        if kind != "floor":
            what = {
                "loss": "a loss that is NaN or Inf, before it was scaled",
                "nan": "a gradient that is NaN or Inf on one rank, before the ranks' sum",
                "activations": f"the first NaN or Inf in the output of {where}",
            }[kind]
            return Finding(
                kind, f"{tool} found {what}.", f"No loss scale fixes this. {_ask(log)}", where
            )
    return None


def _overflows(log: Log) -> Finding | None:
    """Steps that are skipped at the smallest scale."""
    if not _is_at_lowest(log):
        return None
    scale = f" at a loss scale of {number(log.scales[-1])}" if log.scales else ""
    fell = f", which fell from {number(log.scales[0])}" if len(log.scales) > 1 else ""
    tool = log.stops["floor"][0] if "floor" in log.stops else ""
    stop = f" {tool} stopped, as the scale is at its minimum." if tool else ""
    when = "after steps that were applied" if log.settled is not None else "from the first skip on"
    return Finding(
        "floor",
        f"Gradients still overflow{scale}{fell}: the last {log.streak:,} skips are in a row, "
        f"{when}.{stop}",
        "A lower minimum only delays this: the loss or the weights may be NaN, or the training "
        f"diverges. {_ask(log)}",
        count=log.streak,
        is_certain=False,
    )


def _goes_on(log: Log) -> Finding | None:
    """Skips or bad losses that go on after the scale has settled."""
    steps = log.steps[-1] - log.steps[0] if len(log.steps) > 1 else 0
    are_often = steps > 0 and log.late > MOST_SKIPPED * steps
    sank = log.settled is not None and log.settled >= SANK_IN_LOG * (log.scales or (math.inf,))[-1]
    bad = log.bad - log.bad_now
    if max(bad, log.late if are_often or sank else 0) < FEW_EVENTS:
        return None
    of = f" of {steps:,}" if steps else ""
    scale = f", at a loss scale that went {ends([*map(number, log.scales)])}" if log.scales else ""
    cause = f"{_were(log.late, of)} skipped after the loss scale had settled{scale}"
    if bad >= FEW_EVENTS:
        cause = f"{bad:,} losses were NaN or Inf, with finite ones between them"
    action = "Some batches are bad: look there for NaN, Inf, empty masks and outliers."
    return Finding("data", f"{cause}.", f"{action} {_ask(log)}", is_certain=False)


def _of_evaluation(log: Log) -> Finding | None:
    """An evaluation's loss that is not finite, though all of the training's are."""
    if not log.evaluated or log.bad:
        return None
    cause = (
        f"The loss of an evaluation is NaN or Inf in line {log.evaluated:,}, and the training's "
        "losses are finite."
    )
    action = "Look there for a mean of no elements, a bad sample, and an overflow of float16."
    return Finding("loss", cause, action, is_certain=False)


def _normal(log: Log) -> Finding:
    """Nothing unusual: no skip, the first descent of the scale, or a try of a higher one."""
    noted = f" {log.bad:,} of its losses were NaN or Inf, and later ones finite." if log.bad else ""
    if not log.skips:
        cause = f"No line tells of a skipped step.{noted}"
        return Finding("normal", cause, "A log does not show gradients that are flushed to zero.")
    first = log.skips - log.late
    cause = f"{_were(first)} skipped while the loss scale settled"
    cause += f", and {log.late:,} later, now and then." if log.late else "."
    action = (
        "A skipped step changes no weight: the scaler tried a scale that was too high, and lowered "
        "it. That is no problem unless the scale falls to 1 or the loss becomes NaN."
    )
    if log.streak >= STUCK_IN_LOG:
        action += " It is still falling: start from a lower scale to get there sooner."
    return Finding("normal", f"{cause}{noted}", action)


def _were(count: int, of: str = "") -> str:
    """The subject and the verb of a sentence on skipped steps."""
    return f"1{of} step was" if count == 1 else f"{count:,}{of} steps were"
