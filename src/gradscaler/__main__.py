"""The command line: ``python -m gradscaler COMMAND``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 1 for a failure, 2 for a wrong call, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m gradscaler", description="Loss scaling for mixed-precision training."
    )
    parser.add_argument("--version", action="version", version=version("gradscaler"))
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands)
    parsed = parser.parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
    except KeyboardInterrupt:
        return 130
    return status


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="train one network in fp32, in fp16, and in fp16 with loss scaling",
        description="Train a deep sigmoid network on scikit-learn's handwritten digits three times "
        "from the same seed: in fp32, in fp16 without loss scaling, and in fp16 with gradscaler. "
        "Print a table and draw a picture of what happened.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--seed", type=int, default=0, help="of weights and batches")
    demo.add_argument("--steps", type=_positive, default=800, help="training steps of each run")
    demo.add_argument(
        "--output", type=_writable, default="gradscaler-demo.png", help="where the picture goes"
    )
    demo.add_argument(
        "--device", choices=("cpu", "cuda"), help="cuda where there is one, if left out"
    )
    demo.set_defaults(run=lambda parsed: _demo(demo, parsed))


def _demo(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    try:
        import torch

        from gradscaler.demo import run
    except ImportError as error:
        print(f"the demo needs {error.name}: pip install 'gradscaler[torch,demo]'", file=sys.stderr)
        return 1
    if parsed.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: there is no CUDA device here")
    device = parsed.device or ("cuda" if torch.cuda.is_available() else "cpu")
    run(parsed.seed, parsed.steps, parsed.output, device)
    return 0


def _positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return number


def _writable(text: str) -> Path:
    """A path that a PNG can be written to, tried before anything is trained."""
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
    return path


if __name__ == "__main__":
    sys.exit(main())
