"""The command line: ``python -m gradscaler COMMAND``."""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

from gradscaler import __version__
from gradscaler._frameworks import install_command

if TYPE_CHECKING:  # `run` must not import NumPy before the script has set its environment
    from gradscaler.diagnose.report._content import Content


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status.

    The status is 0 for success, 1 for a failure, 2 for wrong arguments and 130 for Ctrl-C. If the
    reader of the output has ended, such as ``| head -1``, it is 1, without a message. A script ends
    as under ``python``.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if given and given[0] == "run":
        return _run_script(given[1:])
    try:
        try:
            return _run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout when it exits, which would raise once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(arguments: Sequence[str] | None) -> int:
    parsed = _parser().parse_args(arguments)
    if "sources" in parsed:
        parsed.sources = [file for source in parsed.sources for file in _files_of(source)]
    try:
        parsed.run(parsed)
    except KeyboardInterrupt:
        return 130
    except _FailedError as error:
        _say(str(error))
        return 1
    return 0


def _files_of(source: Path) -> list[Path]:
    """The files of a pattern that no shell has expanded, as on Windows and between quotes."""
    found = [] if source.exists() else sorted(map(Path, glob(str(source))))  # noqa: PTH207 # absolute ones, too
    return found or [source]


_EXAMPLES = {
    "demo": " --seeds 1",
    "convert": " run.pt scaler.pdparams --to paddle",
    "report": " run.jsonl -o report.html",
    "explain": " run.jsonl",
    "compare": " a.jsonl b.jsonl",
    "watch": " run.jsonl",
    "simulate": " run.jsonl --policy torch --policy 'AmaxScale(margin=10)'",
    "doctor": "",
}
_LOGS = (
    "explain takes the run files of the ranks of one run, or a single log of another tool: explain "
    "each log by itself"
)
_RUNS = "the file to read, or one file of each rank"
_OUTPUT = "a page (.html) or a picture (.png) to write"


class _FailedError(Exception):
    """A command failed; the message says why."""


def _program() -> str:
    """How the command line was started."""
    return "gradscaler" if Path(sys.argv[0]).stem == "gradscaler" else "python -m gradscaler"


def _run_script(arguments: Sequence[str]) -> int:
    from gradscaler._run_script import run
    from gradscaler._run_script.options import add_options

    parser = argparse.ArgumentParser(prog=f"{_program()} run", allow_abbrev=False)
    add_options(parser)
    return run(parser, parser.parse_args(arguments))


def _parser() -> argparse.ArgumentParser:
    from gradscaler import checkpoint
    from gradscaler._run_script.options import add_options

    parser = argparse.ArgumentParser(
        prog=_program(), description="Loss scaling for mixed-precision training."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="run a training script as it is, and say why it fails")
    add_options(run)

    demo = commands.add_parser(
        "demo",
        help="train one network in fp32, in fp16, and in fp16 with loss scaling",
        description="Train a deep autoencoder on scikit-learn's two photographs three times from "
        "the same seed: in fp32, in fp16 without loss scaling, and in fp16 with gradscaler. Repeat "
        "this with other seeds. Print a table, draw a picture of the results, and write a report "
        "on the first run with gradscaler.",
    )
    for option, number, default, text in (
        ("--seed", _seed, 0, "the first seed of weights and batches"),
        ("--seeds", _positive, 2, "how many seeds to train with"),
        ("--steps", _positive, 250, "training steps of each run"),
    ):
        demo.add_argument(option, type=number, default=default, help=f"{text} (%(default)s)")
    threads = "numbers of threads, each at most 256; all runs are repeated with each number (1)"
    demo.add_argument(
        "--threads", type=_threads, nargs="+", default=(1,), metavar="N", help=threads
    )
    output = "gradscaler-demo.png"
    beside = "the picture to write; the report is written beside it (%(default)s)"
    demo.add_argument("--output", type=_writable, default=output, help=beside)
    demo.add_argument(
        "--device", choices=("cpu", "cuda"), help="where to train (cuda if there is such a device)"
    )
    demo.set_defaults(run=partial(_demo, demo))

    convert = commands.add_parser(
        "convert",
        help="convert the state dict of one framework's scaler to another framework's format",
        description="Read a loss scaler's state dict from a file: JSON, or a file that torch or "
        "Paddle saved. The file may also hold models and optimizers. Write only the state dict, in "
        "another format: as JSON (.json), or as torch (.pt, .pth) or Paddle (.pdparams) saves it. "
        "No code in the file is run.",
    )
    convert.add_argument("source", type=Path, metavar="IN", help="the file to read")
    convert.add_argument("target", type=Path, metavar="OUT", help="the file to write")
    convert.add_argument("--to", required=True, choices=checkpoint.FORMATS, help="the format")
    convert.add_argument(
        "--key",
        help="the key of the state dict in the file, such as scaler or state.scaler; needed if the "
        "file holds several",
    )
    convert.add_argument(
        "--lossy", action="store_true", help="leave out values that have no place in the format"
    )
    convert.set_defaults(run=_convert)

    report = commands.add_parser(
        "report",
        help="draw a run, and say what is wrong with it",
        description="Read the file that a gradscaler.diagnose.Monitor wrote, or the files of "
        "several ranks of one run. Write a self-contained page (.html), or a picture (.png), with "
        "the verdict, where the first Inf or NaN was made, the loss scale, the skips and the "
        "gradients over time, and the loss scales that fit, if another may help. With several "
        "ranks, the gradients are those of the rank at fault.",
    )
    report.add_argument("sources", type=Path, nargs="+", metavar="RUN", help=_RUNS)
    report.add_argument("-o", "--output", type=Path, required=True, help=_OUTPUT)
    report.set_defaults(run=_report)

    explain = commands.add_parser(
        "explain",
        help="print a summary of a run or of a tool's log, and what is wrong with it",
        description="Read the file that a gradscaler.diagnose.Monitor wrote, or the files of "
        "several ranks of one run, and print the contents of the report as text. Or read what "
        "DeepSpeed, apex, fairseq, Megatron-LM, transformers' Trainer, Lightning, Keras, "
        "MindSpore, Paddle, ultralytics or a loop of your own printed, and judge it by its loss "
        "scales and losses.",
    )
    explain.add_argument("sources", type=Path, nargs="+", metavar="RUN", help=f"{_RUNS}, or a log")
    explain.set_defaults(run=_explain)

    compare = commands.add_parser(
        "compare",
        help="print the differences between runs",
        description="Read the files of several runs. Print their differences first, then the loss "
        "scales, losses and skips side by side, and last what they have in common. With -o, also "
        "draw the scales, the skips and the losses of all runs on the same axes.",
    )
    compare.add_argument("sources", type=Path, nargs="+", metavar="RUN", help="two files or more")
    compare.add_argument("-o", "--output", type=Path, help=_OUTPUT)
    compare.set_defaults(run=partial(_compare, compare))

    doctor = commands.add_parser(
        "doctor",
        help="say which frameworks are installed, and whether loss scaling works with them",
        description="Skip one step and take one with every framework that is installed, each in "
        "its own process. Say what works, on which devices, and what to do about the rest.",
    )
    doctor.set_defaults(run=_doctor)

    watch = commands.add_parser(
        "watch",
        help="show a run in the terminal while it trains",
        description="Show the latest verdict, the loss scale, the loss and the skipped steps in "
        "the file that a gradscaler.diagnose.Monitor is writing. Redraw them as the file grows, "
        "until Ctrl-C. If the file does not exist yet, say so and wait for it.",
    )
    watch.add_argument("source", type=Path, metavar="RUN", help="the file to read")
    watch.set_defaults(run=_watch)

    simulate = commands.add_parser(
        "simulate",
        help="replay a run with other policies",
        description="Read the file that a gradscaler.diagnose.Monitor with every=1 wrote, and "
        "replay policies on its gradients. Print a table: steps skipped, gradients flushed to "
        "zero, the share of the gradients' total magnitude that is lost or becomes subnormal, and "
        "the steps until the scale recovers from bad batches or a spike. The gradients are a "
        "recording, so the table does not show how other steps would have changed the training.",
    )
    simulate.add_argument("source", type=Path, metavar="RUN", help="the file to read")
    simulate.add_argument(
        "--policy",
        action="append",
        metavar="POLICY",
        help="a preset such as torch or paddle, or a call such as 'AmaxScale(margin=10)'; repeat "
        "the option for more policies (torch and AmaxScale)",
    )
    simulate.add_argument("-o", "--output", type=Path, help=_OUTPUT)
    simulate.set_defaults(run=partial(_simulate, simulate))

    for name, example in _EXAMPLES.items():
        command = commands.choices[name]
        command.epilog = f"example: {command.prog}{example}"
    return parser


def _demo(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    try:
        from gradscaler.demo import run
    except ImportError as error:
        raise _FailedError(str(error)) from None
    import torch

    if parsed.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: there is no CUDA device here")
    device = parsed.device or ("cuda" if torch.cuda.is_available() else "cpu")
    seeds = range(parsed.seed, parsed.seed + parsed.seeds)
    run(seeds, parsed.steps, parsed.output, device, parsed.threads)


def _convert(parsed: argparse.Namespace) -> None:
    from gradscaler import checkpoint
    from gradscaler.checkpoint import _files

    place = parsed.source
    try:
        saved = _files.load(place, parsed.key)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            converted = checkpoint.convert(saved.values, parsed.to, lossy=True)
        if warned and not parsed.lossy:
            raise ValueError(f"{warned[0].message}; --lossy leaves that out")
        place = parsed.target
        if not saved.is_all and place.exists() and place.samefile(parsed.source):
            raise ValueError(
                "holds more than a scaler's state, and would be replaced by the state "
                "alone; name another file"
            )
        _files.save(place, converted)
    except OSError as error:
        raise _failed(error, place) from None
    except (TypeError, ValueError) as error:
        raise _FailedError(f"{place}: {error}") from None
    for warning in warned:
        _say(f"{parsed.source}: {warning.message}")
    key = "" if saved.key is None else f"{saved.key:.80}, "
    read = f"{parsed.source}: {key}{checkpoint.detect(saved.values)}'s format"
    _say(f"{read} -> {parsed.target}, {parsed.to}'s format")


def _report(parsed: argparse.Namespace) -> None:
    place = None
    try:
        from gradscaler.diagnose import read_run, report

        run = read_run(*parsed.sources)
        place = parsed.output
        report.write(run, place)
        _say(f"wrote {place}")
    except (ImportError, OSError, ValueError) as error:
        raise _failed(error, place) from None


def _explain(parsed: argparse.Namespace) -> None:
    try:
        from gradscaler.diagnose.report._plain import print_content

        print_content(_content_of(parsed.sources), sys.stdout)
    except (ImportError, OSError, ValueError) as error:
        raise _failed(error) from None


def _content_of(sources: Sequence[Path]) -> Content:
    """The content of a report on the files of one run, or on the log of another tool."""
    from gradscaler.diagnose import _logs, read_run
    from gradscaler.diagnose.report._content import content_of

    if len(sources) > 1 and any(map(_logs.may_be_log, sources)):
        raise ValueError(_LOGS)
    if not _logs.may_be_log(sources[0]):
        return content_of(read_run(*sources))
    log = _logs.read_log(sources[0])
    if log is not None:
        return _logs.content_of_log(log)
    if not _logs.start_of(sources[0]).startswith(b"{"):
        raise ValueError(f"{sources[0]}: {_logs.NOT_UNDERSTOOD}")
    try:
        return content_of(read_run(*sources))
    except ValueError as error:
        raise ValueError(f"{error}; and {_logs.NOT_UNDERSTOOD}") from None


def _compare(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    if len(parsed.sources) == 1:
        parser.error("argument RUN: give the files of at least two runs, got one")
    place = None
    try:
        from gradscaler.diagnose import report
        from gradscaler.diagnose.report._content import content_of_runs, read_each
        from gradscaler.diagnose.report._plain import print_content

        content = content_of_runs(read_each(parsed.sources))
        print_content(content, sys.stdout)
        if parsed.output is not None:
            place = parsed.output
            report.write(content, place)
            _say(f"wrote {place}")
    except (ImportError, OSError, ValueError) as error:
        raise _failed(error, place) from None


def _doctor(parsed: argparse.Namespace) -> None:
    from gradscaler import _doctor as doctor

    print(doctor.heading(), flush=True)
    failed = []
    for finding in doctor.examine():
        print(doctor.line(finding), flush=True)
        if finding.works is False:
            failed.append(finding.name)
    if failed:
        raise _FailedError(f"loss scaling does not work with {', '.join(failed)}")


def _watch(parsed: argparse.Namespace) -> None:
    try:
        from gradscaler.diagnose.report._terminal import console_of
        from gradscaler.diagnose.report._watch import watch

        watch(parsed.source, console_of(sys.stdout))
    except (ImportError, OSError, ValueError) as error:
        raise _failed(error) from None


def _simulate(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    from gradscaler.diagnose.simulate import Trace, replay
    from gradscaler.diagnose.simulate._command import content_of_replays, policy_of
    from gradscaler.diagnose.simulate._replay import at_scales
    from gradscaler.diagnose.simulate._trace import scales_of

    try:
        policies = {text: policy_of(text) for text in parsed.policy or ("torch", "AmaxScale")}
    except ValueError as error:
        parser.error(f"argument --policy: {error}")
    place = None
    try:
        from gradscaler.diagnose import read_run, report
        from gradscaler.diagnose.report._terminal import Printed, console_of

        run = read_run(parsed.source)
        try:
            trace = Trace.of_run(run)
        except ValueError as error:
            raise ValueError(f"{parsed.source}: {error}") from None
        replays = {"the run itself": at_scales(scales_of(run), trace)}
        replays |= {text: replay(policy, trace) for text, policy in policies.items()}
        content, console = content_of_replays(replays), console_of(sys.stdout)
        console.width = max(console.width, 80)  # rich leaves out what does not fit
        console.print(Printed(content))
        known = {sample.step for sample in run.samples if sample.histogram} | set(run.skipped)
        if len(known) < run.num_steps:
            _say(
                f"{parsed.source}: only {len(known):,} of {run.num_steps:,} steps have recorded "
                "gradients; the others are replayed with those of the last recorded step before "
                "them. A Monitor with every=1 records all steps"
            )
        if parsed.output is not None:
            place = parsed.output
            report.write(content, place)
            _say(f"wrote {place}")
    except (ImportError, OSError, ValueError) as error:
        raise _failed(error, place) from None


def _failed(error: Exception, place: Path | None = None) -> _FailedError:
    """The failure for an error in reading a run or writing a report at ``place``."""
    if isinstance(error, ImportError):
        return _FailedError(f"this needs {error.name}: {install_command('diagnose')}")
    if isinstance(error, BrokenPipeError):
        raise error
    if isinstance(error, OSError):
        return _FailedError(f"{place or error.filename}: {error.strerror or error}")
    return _FailedError(str(error))


def _say(text: str) -> None:
    """Print a text on stderr as one printable line, if stderr can be written to.

    Of a long text, the middle is left out.
    """
    if len(text) > 600:
        text = f"{text[:300]} ... {text[-300:]}"
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    if sys.stderr is not None:
        with suppress(OSError):
            print(" ".join(shown.split()), file=sys.stderr)


def _whole_number(text: str, limits: str, least: int, most: float = math.inf) -> int:
    """A whole number from ``least`` to ``most``; ``limits`` describes that range for an error."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"must be a whole number {limits}, got {text!r}")
    return number


_positive = partial(_whole_number, limits="of at least 1", least=1)
_threads = partial(_whole_number, limits="of at least 1 and at most 256", least=1, most=256)
# PyTorch's generators take this seed and the next ones.
_seed = partial(_whole_number, limits="from 0 to 2**32 - 1", least=0, most=2**32 - 1)


def _writable(text: str) -> Path:
    """A path for a PNG and for the run beside it, checked before the training starts."""
    path = Path(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"must end in .png, got {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}")
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {error.strerror}") from None
    if not existed:
        path.unlink()
    record = path.with_suffix(".jsonl")
    try:
        if record.exists():
            from gradscaler.diagnose import read_run

            read_run(record)  # only a run may be replaced
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"would replace {str(record)!r}: {error}") from None
    return path


if __name__ == "__main__":
    sys.exit(main())
