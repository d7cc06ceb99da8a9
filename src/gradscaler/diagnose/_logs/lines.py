"""What other tools print while they train: the lines, and what they add up to."""

from __future__ import annotations

import math
import re
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median

from gradscaler.diagnose._record.kinds import KINDS
from gradscaler.diagnose._record.thresholds import NOT_ROUNDED, QUIET_RECORDS

_N = r"[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf)(?![a-z_])"
_TRAINER = "transformers' Trainer"
PATTERNS = (
    ("DeepSpeed", "floor", "already at minimum", "Current loss scale already at minimum"),
    (
        "DeepSpeed",
        "skip",
        "overflow!",
        rf"\[\w+\] OVERFLOW!(?:.* scale: (?P<before>{_N}))?(?:.*reducing to (?P<after>{_N}))?",
    ),
    (
        "DeepSpeed",
        "skip",
        "reducing dynamic",
        rf"loss scale from (?P<before>{_N}) to (?P<after>{_N})",
    ),
    ("DeepSpeed", "steps", "skipped=", r"\bstep=\d+, skipped=\d+, lr="),
    ("apex", "skip", "skipping step", rf"overflow[.!]\s+Skipping step(?:.* to (?P<after>{_N}))?"),
    ("fairseq", "skip", "overflow det", rf"detected, .*scale to:?(?: to)? (?P<after>{_N})"),
    ("fairseq", "floor", "minimum loss", rf"loss scale reached \((?P<after>{_N})\)"),
    (
        "fairseq",
        "activations",
        "detected in",
        r"(?:NaN|Inf) detected in output of (?P<where>[\w.]+)",
    ),
    ("fairseq", "record", "num_updates", r"^(?!.*\bvalid\b)"),
    ("Megatron-LM", "loss", "in local forward", r"found (?:NaN|Inf) in local forward loss"),
    ("Megatron-LM", "nan", "in local grad", r"found (?:NaN|Inf) in local grad norm"),
    (
        "Megatron-LM",
        "record",
        "skipped it",
        r"skipped iterations: *(?P<skipped>\d{1,15})(?:.*\bnan iterations: *(?P<nan>\d{1,15}))?",
    ),
    (_TRAINER, "record", "loss", r"\{['\"]loss['\"]: "),
    ("MindSpore", "record", "loss is", r"\bepoch: *\d+,? +step: *\d+,? +loss is"),
    ("PaddleNLP", "record", "global_step", r"\bloss: .*\bglobal_step: *\d"),
    ("PaddleNLP", "record", "global step", r"\bglobal step \d+, epoch: \d+, batch: \d+, loss: "),
    ("Paddle", "record", "- loss: ", r"^\s*step +\d+/\d+ .*s/step"),
    ("ultralytics", "record", "ultralytics loss", ""),
    ("Keras", "loss", "invalid loss", "Invalid loss, terminating training"),
    ("Keras", "loss", "loss encountered", "NaN or Inf loss encountered at batch"),
    ("Keras", "record", " - loss: ", r"\d/(?:\d+|Unknown)\b"),
    ("Lightning", "loss", "loss returned", r"in `training_step` is (?:nan|inf)"),
    (
        "Lightning",
        "loss",
        "is not finite",
        r"metric \S{0,99}loss\S* = \S*(?:nan|inf)\S* is not finite",
    ),
    ("Lightning", "record", "loss", r"^\s*Epoch \d+.*(?:it/s|s/it)"),
    ("tqdm", "record", "loss", r"^(?!.*train_runtime).*(?:it/s|s/it)"),
    (
        "a loop of your own",
        "record",
        "loss",
        # A group in a lookahead is not left again: a long line takes no square of its length.
        r"^(?!.*(?:\bvalid\b|train_runtime))(?=(.*?\b(?:step|iter|iteration|epoch|batch)\b))\1.*"
        r"loss(?:\W{0,3}[:=]|\W{1,4}(?:\d+\.\d|nan|inf))",
    ),
    ("a loop of your own", "record", "loss", rf"^\W*loss\W{{1,4}}(?:tensor\()?{_N}"),
)
"""Lines that are understood: who prints one, what it is, words of it in lower case, by which it is
found fast, and how it looks. The first that fits reads a line. Lines that end a run have the name
of a kind of finding."""

TOOLS = tuple(dict.fromkeys(tool for tool, *_ in PATTERNS))
_TRAPS = {
    _TRAINER: "Trainer prints 0.0 or an old mean for a NaN, unless logging_nan_inf_filter=False",
    "Megatron-LM": "Megatron-LM leaves a loss of NaN out, and counts only skipped NaN iterations",
    "Keras": "Keras prints the mean of the epoch so far: a single NaN stays until the epoch ends",
}


def _field(name: str, value: str = _N) -> re.Pattern[str]:
    """A pattern for a value after a name, as ``name: 1``, ``name=1``, ``name 1``, ``name is 1``."""
    return re.compile(rf"{name}['\"]?(?:\s*[:=]\s*|\s+(?:is\s+)?)['\"]?(?:tensor\()?({value})")


_COMPILED = [
    (tool, what, word, re.compile(text, re.IGNORECASE)) for tool, what, word, text in PATTERNS
]
# Each begins with letters, which makes it fast. What must stand before them is checked after them.
_OF_TRAINING = "|".join(f"(?<={name}.loss)" for name in ("train", "training", "total", "lm"))
_NO_OTHERS = "".join(f"(?<!{name} loss)" for name in ("val", "valid", "eval", "test"))
_LOSS = _field(rf"loss(?:(?<![a-z_/]loss)|{_OF_TRAINING}){_NO_OTHERS}(?:_step)?")
_EVALUATED = _field("(?:val|valid|validation|eval|test)[ _/]loss", "[-+]?(?:nan|inf)(?![a-z_])")
_NORM = _field("norm(?:(?<=grad.norm)|(?<=gnorm))")
_SCALE = _field("scale(?<=loss.scale)")
_STEP = _field("(?:step|iteration|iter|num_updates)", r"\d{1,15}\b")
_NOISE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x08")  # colours, and bars that are redrawn
_RANK = re.compile(r"\s*(?:\[\d+,(\d+)\]<\w+>:|\[(?:rank|default)(\d+)\]:|(?:worker-)?(\d+): )")
# What a program that trains in a framework prints of it, such as the path of a warning.
_MENTIONS = re.compile(r"\b(jax|paddle|mindspore|keras|tensorflow)\b")
_OF_TOOLS = {"MindSpore": "mindspore", "PaddleNLP": "paddle", "Paddle": "paddle", "Keras": "keras"}
_CELL = re.compile(r"\s*(\d+)/\d+\s")  # the first of a row of ultralytics' columns


@dataclass
class Log:
    """What a log's lines add up to. Its size does not grow with them."""

    tools: dict[str, None] = field(default_factory=dict)
    lines: int = 0
    ranks: dict[tuple[str, str], str] = field(default_factory=dict)  # the first that printed it
    stops: dict[str, tuple[str, str | None]] = field(default_factory=dict)  # kind: tool and module
    scales: tuple[float, ...] = ()  # the first and the latest
    settled: float | None = None  # the scale after the first streak of skips
    is_lowest: bool = False  # the latest skip did not lower the scale
    skips: int = 0
    late: int = 0  # skips after the first streak
    streak: int = 0  # skips since a step was applied
    quiet: int = 0  # records since the latest skip
    latest: tuple[str, int] = "", 0  # the latest skip's text and line
    steps: tuple[int, ...] = ()  # the first and the latest number
    losses: tuple[float, ...] = ()  # the first and the latest
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=5))  # finite losses
    usual: float = math.inf  # the lowest median of these
    bad: int = 0  # losses that are not finite
    bad_now: int = 0  # those since the latest finite one
    since: str = ""  # where these began
    good: int = 0  # skips until then
    trap: str = ""  # of the tool that printed the latest of these
    columns: tuple[int, ...] = ()  # of ultralytics' losses
    mentioned: str = ""  # the framework that a line names first
    evaluated: int = 0  # the first line with a loss of an evaluation that is not finite

    def add(self, line: str) -> None:
        """Take in one line. A line of several ranks counts on the first that printed its like."""
        if "\x1b" in line or "\x08" in line:
            line = _NOISE.sub("", line)
        line = self._in_words(line)
        low = line.lower()
        if not self.mentioned and (named := _MENTIONS.search(low)):
            self.mentioned = named[1]
        if not self.evaluated and ("nan" in low or "inf" in low) and _EVALUATED.search(low):
            self.evaluated = self.lines
        rank = _RANK.match(line)
        who = next(filter(None, rank.groups()), "") if rank else ""
        for tool, what, word, pattern in _COMPILED:
            found = pattern.search(line) if word in low else None
            if found and (what != "record" or "skipped it" in low or _LOSS.search(low)):
                self.tools[tool] = None
                given = found.groupdict()
                if what in KINDS:
                    self.stops.setdefault(what, (tool, given.get("where")))
                elif self.ranks.setdefault((tool, what), who) != who:
                    pass
                elif what == "skip":
                    self._add_skip(found[0], given)
                else:
                    self.bad += int(given.get("nan") or 0)  # which were skipped
                    self._add_steps(tool, what, low, int(given.get("skipped") or 0))
                return

    @property
    def framework(self) -> str:
        """The framework of the training, if a tool or a line names one that is not PyTorch."""
        return next((_OF_TOOLS[tool] for tool in self.tools if tool in _OF_TOOLS), self.mentioned)

    def _in_words(self, line: str) -> str:
        """A row of ultralytics' columns as a line with their sum; other lines as they are."""
        if "_loss" in line and "Epoch" in line and "GPU_mem" in line:
            self.columns = tuple(n for n, w in enumerate(line.split()) if w.endswith("_loss"))
        row = _CELL.match(line) if self.columns else None
        cells = line.split()
        if row is None or len(cells) <= self.columns[-1]:
            return line
        with suppress(ValueError):
            total = sum(float(cells[place]) for place in self.columns)
            return f"epoch {row[1]} ultralytics loss: {total}"
        return line

    def _add_skip(self, text: str, given: dict[str, str | None]) -> None:
        before, after = (float(given.get(key) or math.nan) for key in ("before", "after"))
        last = self.scales[-1] if self.scales else math.inf
        self.is_lowest = before == after or after == last <= 1
        if (text, self.lines - 1) == self.latest and not self.is_lowest:
            self.latest = text, self.lines  # another rank's
            return
        if after >= last and not self.is_lowest:  # it has grown since
            self._end_streak()
        self._add_scale(before)
        self._add_scale(after)
        self._skipped(1)
        self.latest = text, self.lines

    def _skipped(self, count: int) -> None:
        self.late += count if self.settled is not None else 0
        self.skips, self.streak, self.quiet = self.skips + count, self.streak + count, 0

    def _end_streak(self) -> None:
        if self.streak and self.settled is None:
            self.settled = self.scales[-1] if self.scales else math.nan
        self.streak = 0

    def _add_scale(self, scale: float) -> None:
        if math.isfinite(scale):
            self.scales = (*self.scales[:1], scale)

    def _add_steps(self, tool: str, what: str, line: str, skipped: int) -> None:
        found = (each.search(line) for each in (_LOSS, _NORM, _SCALE, _STEP))
        loss, norm, scale, step = (each and float(each[1]) for each in found)
        taken = 1
        if step is not None:
            taken = max(1, int(step) - self.steps[-1]) if self.steps else 1
            self.steps = (*self.steps[:1], int(step))
        if what == "record":
            self._add_scale(math.nan if scale is None else scale)
            overflowed = norm is not None and not math.isfinite(norm)
            if loss is None or (loss == 0 and tool == _TRAINER and self._is_filtered(norm)):
                loss = math.nan
            elif overflowed and math.isfinite(loss) and not self.scales:
                skipped = 1  # by a scaler that prints nothing
            self._count(skipped, taken)
            if skipped < taken or math.isfinite(loss):
                self._add_loss(loss, step, _TRAPS.get(tool, ""))

    def _is_filtered(self, norm: float | None) -> bool:
        """Whether Trainer's loss of 0 hides a NaN: its norm says so, or it was not small before."""
        return self.usual > NOT_ROUNDED if not norm else not math.isfinite(norm)

    def _count(self, skipped: int, taken: int) -> None:
        if skipped:
            self._skipped(skipped)
        self.quiet += not skipped
        if self.quiet >= QUIET_RECORDS or 0 < skipped < taken:
            self._end_streak()

    def _add_loss(self, loss: float, step: float | None, trap: str) -> None:
        self.losses = (*self.losses[:1], loss)
        if math.isfinite(loss):
            self.bad_now, self.good = 0, self.skips
            self.recent.append(loss)
            if len(self.recent) == self.recent.maxlen:
                self.usual = min(self.usual, median(self.recent))
            return
        if not self.bad_now:
            self.since = f"line {self.lines:,}" + ("" if step is None else f" (step {int(step):,})")
        self.bad, self.bad_now, self.trap = self.bad + 1, self.bad_now + 1, trap
