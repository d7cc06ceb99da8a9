"""Run files written by hand: lines in JSON, which the public ``read_run`` reads."""

import json
import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from gradscaler.diagnose import read_run

CLASSES = "zero", "flushed", "subnormal", "normal", "overflow", "nonfinite"
SAMPLED = "step", "scale", "scales", "steps", "skips", "loss", "norm", "shares", "histogram"
POLICY = {"name": "DynamicScale", "init_scale": 65536.0}

HEADLINES = {
    "ranks": ("bad", "The ranks do not decide together"),
    "parameter": ("bad", "A parameter is NaN or Inf"),
    "divergence": ("bad", "The training diverges"),
    "activations": ("bad", "A module makes NaN or Inf"),
    "loss": ("bad", "The loss itself is NaN or Inf"),
    "nan": ("bad", "A gradient is NaN or Inf"),
    "floor": ("bad", "Gradients overflow at the smallest scale"),
    "state": ("bad", "The optimizer's state is NaN or Inf"),
    "data": ("bad", "Some batches are bad"),
    "silent": ("bad", "The loss is NaN or Inf, and the gradients are finite"),
    "misuse": ("bad", "The training loop has a mistake"),
    "restart": ("warning", "The run was continued without a part of its state"),
    "dead": ("bad", "Gradients are exactly 0"),
    "stalled": ("bad", "Parameters in 16 bits no longer move"),
    "eps": ("warning", "The optimizer's eps outweighs the gradients"),
    "range": ("warning", "No scale fits all parameters"),
    "underflow": ("warning", "The scale is too small"),
    "elsewhere": ("bad", "Another rank's gradients are Inf or NaN"),
    "normal": ("good", "Nothing unusual"),
}
"""The level and the headline of each kind of verdict, from the gravest to the most harmless."""


def start(**changes):
    """The first line of a file."""
    fields = {"framework": "torch", "dtype": "float16", "every": 100, "step": 0, "policy": POLICY}
    time = "2026-01-01T00:00:00Z"
    return {"gradscaler": 1, "kind": "start", **fields, "time": time, **changes}


def sample(*values, **more):
    """A sample; its first values may be given by position."""
    return {"kind": "sample", **dict(zip(SAMPLED, values, strict=False)), **more}


def skip(step, scale, loss=None, nonfinite=None, more=0):
    """A skipped step."""
    found = {"loss": loss, "nonfinite": nonfinite, "more": more}
    return {"kind": "skip", "step": step, "scale": scale, **found}


def bad_step(step, loss=None, nonfinite=(), located=None):
    """A step that was applied with gradients of Inf or NaN."""
    found = {"loss": loss, "nonfinite": nonfinite, "located": located}
    return {"kind": "bad_step", "step": step, **found}


def verdict(step, kind, text, where=None):
    """A verdict that the monitor gave."""
    return {"kind": "verdict", "step": step, "verdict": kind, "text": text, "where": where}


def watched(step, located, **more):
    """A step whose operations or modules were watched."""
    return {"kind": "watched", "step": step, "located": located, **more}


def shares(*values):
    """The share of gradients of each class."""
    return dict(zip(CLASSES, values, strict=True))


def parameter(zero, flushed, subnormal, nonfinite, histogram):
    """One parameter's part of a sample."""
    lost = {"zero": zero, "flushed": flushed, "subnormal": subnormal, "nonfinite": nonfinite}
    return {**lost, "histogram": histogram}


def text_of(line):
    """The text of a line, given as the functions above or ``read_run`` return it."""
    if is_dataclass(line):
        version = {"gradscaler": 1} if line.kind == "start" else {}
        line = {**version, "kind": line.kind, **vars(line)}
    return json.dumps(_plain(line)) + "\n"


def append(path, *lines):
    """Append lines to a file, and return its path."""
    path = Path(path)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(map(text_of, lines)))
    return path


def append_run(path, run):
    """Append all lines of a run to a file, and return its path."""
    lines = *run.starts, *run.samples, *run.skips, *run.bad_steps, *run.watched, *run.verdicts
    return append(path, *lines)


def run_of(*lines):
    """The run of a file with these lines, after a start line if they have none."""
    is_started = bool(lines) and json.loads(text_of(lines[0]))["kind"] == "start"
    with TemporaryDirectory() as folder:
        path = append(Path(folder) / "run.jsonl", *(() if is_started else (start(),)), *lines)
        return read_run(path)


def _plain(value):
    """A value for JSON: numbers that are not finite become texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if is_dataclass(value):
        return _plain(vars(value))
    return [*map(_plain, value)] if isinstance(value, (tuple, list)) else value
