"""Scalars of a run for TensorBoard, written by its own writer."""

from __future__ import annotations

import importlib
import os
from typing import Any

from gradscaler.diagnose.run.lines import Line, Sample


def load_writer() -> Any:
    """TensorBoard's ``Writer``.

    Raises:
        ImportError: TensorBoard is not installed.
    """
    try:
        return importlib.import_module("tensorboard.summary").Writer
    except ImportError:
        raise ImportError("tensorboard= needs TensorBoard: pip install tensorboard") from None


class EventFile:
    """A directory of event files that holds the numbers of each sample under ``gradscaler/``.

    Args:
        writer: what :func:`load_writer` returned.
        directory: created if it does not exist.
    """

    def __init__(self, writer: Any, directory: str | os.PathLike[str]) -> None:
        self._writer = writer(os.fspath(directory))

    def write(self, line: Line) -> None:
        """Write the numbers of a sample; ignore other lines."""
        if not isinstance(line, Sample):
            return
        for step, scale in line.scales:
            self._add("loss_scale", scale, step)
        numbers = {
            "loss_scale": line.scale,
            "skipped_steps": len(line.skips),
            "loss": line.loss,
            "gradient_norm": line.norm,
            **({} if line.shares is None else vars(line.shares)),
        }
        for name, number in numbers.items():
            if number is not None:
                self._add(name, number, line.step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _add(self, name: str, number: float, step: int) -> None:
        self._writer.add_scalar(f"gradscaler/{name}", number, step)
