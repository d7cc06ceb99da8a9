"""What the report, the picture and the terminal say alike: words, numbers, tables, spectra."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gradscaler.diagnose import formats
from gradscaler.diagnose.runs import Bins, ParameterSample, Run, Sample, Shares, Skip

LATEST = 10  # skipped steps in the table

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Headline(NamedTuple):
    """A verdict in a few words, and how bad it is: "good", "warning" or "bad"."""

    level: str
    text: str


HEADLINES = {
    "normal": Headline("good", "Nothing unusual"),
    "underflow": Headline("warning", "The scale is too small"),
    "loss": Headline("bad", "The loss itself is NaN or Inf"),
    "parameter": Headline("bad", "A parameter is NaN or Inf"),
    "activations": Headline("bad", "Activations are too large"),
    "nan": Headline("bad", "A gradient is NaN at every scale"),
    "floor": Headline("bad", "Gradients overflow at the smallest scale"),
}


class Table(NamedTuple):
    """Texts in rows; all are numbers but those in the column of names."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    names: int


def headline(run: Run) -> Headline:
    """What is wrong, in a few words."""
    if not run.num_steps:
        return Headline("warning", "No step is recorded yet")
    kind = run.verdict.kind
    return HEADLINES.get(kind, Headline("bad", shown(kind, 40)))


def facts(run: Run) -> dict[str, str]:
    """What to know of a run at a glance, by name."""
    facts = {"Steps": f"{run.num_steps:,}", "Skipped": f"{len(run.skipped):,}"}
    if run.skipped:
        first, last = longest_skips(run)
        facts["Skipped"] += f" ({percent(len(run.skipped) / max(1, run.num_steps))})"
        facts["Most in a row"] = f"{last - first + 1:,}"
    _, scales = run.scales
    if scales:
        ends = (scales[0], scales[-1]) if scales[0] != scales[-1] else scales[:1]
        facts["Loss scale"] = " → ".join(map(number, ends))
    start = run.starts[-1]
    facts["Policy"] = shown(str(start.policy.get("name", "unknown")), 40)
    facts["Trained with"] = shown(f"{start.framework}, {start.dtype}", 40)
    return facts


def longest_skips(run: Run) -> tuple[int, int]:
    """The first and the last step of the longest run of skips, the latest of them; (0, -1)."""
    longest, first, previous = (0, -1), 0, -1
    for step in run.skipped:
        if step != previous + 1:
            first = step
        if step - first >= longest[1] - longest[0]:
            longest = first, step
        previous = step
    return longest


def losses(run: Run) -> dict[int, float]:
    """The unscaled loss by step, as far as it was seen."""
    lines: tuple[Sample | Skip, ...] = (*run.samples, *run.skips)
    return {line.step: line.loss for line in lines if line.loss is not None}


def norms(run: Run) -> dict[int, float]:
    """The norm of the unscaled gradients by step."""
    return {sample.step: sample.norm for sample in run.samples if sample.norm is not None}


def shares(run: Run) -> dict[int, Shares]:
    """What became of the gradients, by step."""
    return {sample.step: sample.shares for sample in run.samples if sample.shares is not None}


def tables(run: Run) -> list[Table]:
    """Those of the tables that have rows."""
    return [table for table in (worst(run), skips(run)) if table.rows]


def worst(run: Run) -> Table:
    """The parameters that lose most, in the latest sample."""
    headings = "Parameter", "NaN or Inf", "Flushed", "Subnormal", "Zero"
    sample = next((sample for sample in reversed(run.samples) if sample.parameters), None)
    if sample is None:
        return Table("Worst parameters", headings, [], names=0)
    rows = []
    for name in sample.worst:
        if (parameter := sample.parameters.get(name)) is not None:
            shares = parameter.nonfinite, parameter.flushed, parameter.subnormal, parameter.zero
            rows.append((shown(name), *map(percent, shares)))
    return Table(f"Worst parameters at step {sample.step:,}", headings, rows, names=0)


def skips(run: Run) -> Table:
    """The latest skipped steps that were looked into, the latest first."""
    rows = []
    for skip in reversed(run.skips[-LATEST:]):
        gradient, counts = "", ("", "", "")
        if skip.nonfinite:
            first, others = skip.nonfinite[0], len(skip.nonfinite) - 1 + skip.more
            shape = "x".join(map(str, first.shape))
            gradient = f"{shown(first.name)} ({shown(first.dtype, 20)} {shape})"
            gradient += f", {others:,} more" if others else ""
            rest = "none" if math.isnan(first.largest_finite) else number(first.largest_finite)
            counts = f"{first.num_inf:,}", f"{first.num_nan:,}", rest
        loss = "" if skip.loss is None else number(skip.loss)
        rows.append((f"{skip.step:,}", gradient, *counts, loss, number(skip.scale)))
    headings = "Step", "Gradient", "Inf", "NaN", "Largest finite", "Loss", "Scale"
    title = "Skipped steps"
    if len(run.skips) > LATEST:
        title += f": the latest {LATEST} of {len(run.skips):,} looked into"
    return Table(title, headings, rows, names=1)


class Zone(NamedTuple):
    """A part of a format's range: the exponents from ``start`` up to ``stop``."""

    name: str
    start: float
    stop: float


@dataclass(frozen=True)
class Spectrum:
    """Where gradients, times the scale in use, lie in their format's range.

    Attributes:
        step: that they are of.
        scale: that it used.
        exponents: of the columns, from below the format's range to beyond it.
        shares: of the gradients in each column: a row for all of them, and one for each parameter.
        zero: by row, of those that are 0.
        nonfinite: by row, of those that are Inf or NaN.
        names: of the parameters.
        worst: names of the worst, the worst first.
        zones: of the range, from the smallest exponents to the largest.
    """

    step: int
    scale: float
    exponents: np.ndarray
    shares: np.ndarray
    zero: np.ndarray
    nonfinite: np.ndarray
    names: tuple[str, ...]
    worst: tuple[str, ...]
    zones: tuple[Zone, ...]

    def within(self, zone: Zone) -> np.ndarray:
        """Which columns are in a zone."""
        return (self.exponents >= zone.start) & (self.exponents < zone.stop)

    def share(self, zone: Zone) -> float:
        """Of all gradients, how many are in a zone."""
        return float(self.shares[0][self.within(zone)].sum())


def spectrum(run: Run) -> Spectrum | None:
    """The spectrum of the latest sample that has any finite gradients but zeros."""
    for sample in reversed(run.samples):
        if sample.shares and sample.histogram and any(sample.histogram.counts):
            return _spectrum(sample, sample.shares, sample.histogram, run.starts[-1].dtype)
    return None


def _spectrum(sample: Sample, shares: Shares, histogram: Bins, dtype: str) -> Spectrum:
    parts: list[tuple[Shares | ParameterSample, Bins]] = [(shares, histogram)]
    parts += [(parameter, parameter.histogram) for parameter in sample.parameters.values()]
    shift = round(math.log2(sample.scale)) if 0 < sample.scale < math.inf else 0
    zones = _zones(dtype)
    bottom, top = int(zones[0].stop), int(zones[-1].start)
    first, counts = histogram
    occupied = [first + shift + column for column, count in enumerate(counts) if count]
    left = max(min([bottom - 9, *occupied]), bottom - 40)
    right = min(max([top + 4, *(exponent + 1 for exponent in occupied)]), top + 40)
    rows = np.zeros((len(parts), right - left))
    for row, (part, (first, counts)) in zip(rows, parts, strict=True):
        columns = np.clip(first + shift + np.arange(len(counts)), left, right - 1) - left
        finite = max(0.0, 1 - part.zero - part.nonfinite)
        row += finite * np.bincount(columns, counts, right - left) / max(1, sum(counts))
    return Spectrum(
        sample.step,
        sample.scale,
        np.arange(left, right),
        rows,
        np.array([part.zero for part, _ in parts]),
        np.array([part.nonfinite for part, _ in parts]),
        tuple(sample.parameters),
        tuple(name for name in sample.worst if name in sample.parameters),
        zones,
    )


def _zones(dtype: str) -> tuple[Zone, ...]:
    form = formats.named(dtype)
    kept = form.min_exponent - form.mantissa_bits - 1  # rounded up to the smallest subnormal
    beyond = math.frexp(form.largest)[1]
    return (
        Zone("flushed", -math.inf, kept),
        Zone("subnormal", kept, form.min_exponent),
        Zone("normal", form.min_exponent, beyond),
        Zone("overflow", beyond, math.inf),
    )


def number(value: float) -> str:
    """A short text: powers of two as such where they are no longer easy to read."""
    fraction, exponent = math.frexp(value)
    if fraction == 0.5 and not -2 <= exponent <= 24:
        return power(2, exponent - 1)
    if not math.isfinite(value):
        return {math.inf: "Inf", -math.inf: "-Inf"}.get(value, "NaN")
    return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e9 else f"{value:.4g}"


def power(base: int, exponent: int) -> str:
    """Such as 2⁻²⁴."""
    return f"{base}{str(exponent).translate(_SUPERSCRIPTS)}"


def percent(share: float) -> str:
    """A share of 1, none and hardly any told apart."""
    return "0%" if share == 0 else "<0.1%" if share < 0.001 else f"{share:.1%}"


def shown(name: str, longest: int = 200) -> str:
    """A name of unknown origin, on one line and not too long: its middle is left out."""
    plain = "".join(letter if letter.isprintable() else "�" for letter in name)
    if len(plain) <= longest:
        return plain
    return f"{plain[: longest // 3]}…{plain[-(longest - 1 - longest // 3) :]}"
