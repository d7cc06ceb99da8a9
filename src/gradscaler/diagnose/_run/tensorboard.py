"""Scalars of a run for TensorBoard, written by its own writer."""

from __future__ import annotations

import importlib
import os
from typing import Any

from gradscaler.diagnose._run.lines import Line, Sample


def load_writer() -> Any:
    """TensorBoard's ``Writer``; ImportError if it is not installed."""
    try:
        return importlib.import_module("tensorboard.summary").Writer
    except ImportError:
        raise ImportError("tensorboard= needs TensorBoard: pip install tensorboard") from None


class EventFile:
    """A directory of event files that holds the numbers of each sample under ``gradscaler/``."""

    def __init__(self, writer: Any, directory: str | os.PathLike[str]) -> None:
        self._writer = writer(os.fspath(directory))

    def write(self, line: Line) -> None:
        """Write the numbers of a sample; ignore other lines."""
        if not isinstance(line, Sample):
            return
        numbers = {
            "loss_scale": line.scale,
            "skipped_steps": len(line.skips),
            "loss": line.loss,
            "gradient_norm": line.norm,
            **({} if line.shares is None else vars(line.shares)),
        }
        scalars = [("loss_scale", scale, step) for step, scale in line.scales]
        scalars += [(name, n, line.step) for name, n in numbers.items() if n is not None]
        for name, number, step in scalars:
            self._writer.add_scalar(f"gradscaler/{name}", number, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
