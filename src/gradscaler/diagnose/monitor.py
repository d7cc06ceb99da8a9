"""A monitor of a training with loss scaling."""

from __future__ import annotations

import os
import sys
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, get_args

from gradscaler._eager.scaler import EagerScaler
from gradscaler._frameworks import FRAMEWORKS
from gradscaler.diagnose import formats, readings
from gradscaler.diagnose.eager import EagerObserver
from gradscaler.diagnose.explicit import Recorder
from gradscaler.diagnose.journal import Journal, OnStuck, Step
from gradscaler.diagnose.run_file import RunFile, now
from gradscaler.diagnose.runs import Sink, Start
from gradscaler.diagnose.tensorboard import Events, load_writer
from gradscaler.diagnose.verdict import Evidence, Verdict, judge
from gradscaler.policies import FixedScale, checks


class Monitor:
    """Watches a scaler: writes down what happens, looks into skips, and says what is wrong.

    The scalers of PyTorch, TensorPlay and Paddle tell it of their steps; nothing is to be called
    in the training loop. For JAX, Keras, tf-keras and MindSpore call :meth:`record` after each
    step, or give ``model.fit`` the :meth:`callback`.

    At each ``every``-th step it takes a sample: the norm of the unscaled gradients; what becomes
    of gradients times scale in ``dtype``, from at most 16,384 elements of each; the worst
    parameters. After ``stuck_after`` skips in a row it gives its verdict, from the losses, from
    what the skipped gradients held and, in the last of these steps, from the model's parameters
    and activations. While a lower scale may still cure them, it waits for more.

    What may be on a device is read only at samples and when asked for, so nothing waits for the
    device meanwhile; but with ``forensics`` each step's flag is read at once, where there are
    gradients to look into. Without, a verdict waits for the next sample; scalers that tell of
    their steps are then looked into for one step more.

    An interrupt (Ctrl-C) costs the sample of its step at most. Do not repeat a :meth:`record` that
    it stopped, which may have counted the step.

    Args:
        scaler: any of gradscaler's; of JAX the one before the first step, or an optax state that
            holds one; of MindSpore a manager, a functional scaler or a train step.
        model: whose parameters' names are used. Of PyTorch and TensorPlay its activations are
            looked at in the last of ``stuck_after`` steps.
        every: steps from one sample to the next.
        path: of a run file, which is made or appended to; see :mod:`gradscaler.diagnose.runs`. A
            file is for one process at a time: of several, give it to that of rank 0 alone, or each
            its own.
        forensics: look into each skip (1), each n-th (n) or none (0).
        on_stuck: ``"warn"`` warns, once in a row of skips; ``"raise"`` raises, before the scale
            moves, and the next ``update()`` goes on; ``"continue"`` only writes the verdict.
        stuck_after: how many skips in a row of one optimizer are too many. 1 leaves no step to
            look at activations in.
        dtype: what gradients are computed in: ``"float16"``, ``"bfloat16"``, ``"float8_e4m3"`` or
            ``"float8_e5m2"``.
        tensorboard: a directory for scalars that TensorBoard shows.

    Raises:
        TypeError, ValueError: an argument cannot work, or ``path`` is of a file of another kind.
        ImportError: TensorBoard is not installed.
        OSError: a file cannot be written.

    >>> import torch
    >>> from gradscaler.torch import GradScaler
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> scaler = GradScaler()
    >>> with Monitor(scaler, model) as monitor:
    ...     scaler.scale(model(torch.full((2,), torch.inf)).sum()).backward()
    ...     scaler.step(optimizer)
    ...     scaler.update()
    >>> (step,) = monitor.history
    >>> step.scale, step.skipped, step.nonfinite[0].name, step.nonfinite[0].num_inf
    (65536.0, True, 'weight', 2)
    """

    def __init__(
        self,
        scaler: Any,
        model: Any = None,
        every: int = 100,
        path: str | os.PathLike[str] | None = None,
        *,
        forensics: int = 1,
        on_stuck: OnStuck = "warn",
        stuck_after: int = 20,
        dtype: str = "float16",
        tensorboard: str | os.PathLike[str] | None = None,
    ) -> None:
        every = checks.count("every", every)
        forensics = checks.count("forensics", forensics, least=0)
        stuck_after = checks.count("stuck_after", stuck_after)
        if on_stuck not in get_args(OnStuck):
            choices = ", ".join(map(repr, get_args(OnStuck)))
            raise ValueError(f"on_stuck must be one of {choices}, got {on_stuck!r}")
        self._dtype = formats.named(dtype).name
        self._scaler = scaler
        self._framework = _framework_of(scaler)
        is_eager = isinstance(scaler, EagerScaler)
        _check(scaler, model, is_eager)
        sinks: list[Sink] = []
        step = 0
        if not is_eager or scaler._enabled:
            start = Start(self._framework, self._dtype, every, 0, _describe(self._policy), now())
            sinks, step = _open(start, path, tensorboard)
        self._journal = Journal(sinks, step, on_stuck, stuck_after, self._judge)
        arguments = scaler, model, self._journal, every, forensics, self._dtype
        self._source = EagerObserver(*arguments) if is_eager else Recorder(*arguments)
        self._is_open = True
        if isinstance(self._source, EagerObserver):  # last: an interrupt before leaves no observer
            scaler._observers.append(self._source)

    def record(
        self,
        *,
        scaler: Any = None,
        finite: Any = None,
        gradients: Any = None,
        loss: Any = None,
        parameters: Any = None,
    ) -> None:
        """Tell of a step, once it is done and the scale has moved: for JAX, Keras and MindSpore.

        Args:
            scaler: the new one, or the new optax state, where the framework makes a new one.
            finite: whether the gradients were, a boolean scalar. If it is left out it is told by
                the steps that Keras' inner optimizer took; else by the scale and its counter,
                which say nothing where the scale does not move.
            gradients: unscaled, in any structure; for a list, the model gives the names. Without
                them there are neither samples of gradients nor forensics, and with them and
                ``forensics`` each call waits for the device.
            loss: unscaled.
            parameters: of the model, after the step, in any structure; looked at only when a
                verdict is asked for in a row of skips that is too long. Left out, they are the
                model's.

        Raises:
            TypeError: the scaler is one that tells the monitor by itself; ``scaler`` is none; or
                ``parameters`` holds something else than arrays.
            StuckError: if ``on_stuck`` is ``"raise"``.
        """
        if not isinstance(self._source, Recorder):
            raise TypeError(
                "this scaler tells its monitor of each step by itself: leave record out"
            )
        if self._is_open:
            self._source.record(scaler, finite, gradients, loss, parameters)

    def callback(self) -> Any:
        """A callback for ``model.fit`` that records each training step, its gradients unseen.

        The loss that Keras tells is a mean over the epoch so far, and is left out. So a verdict
        knows the model's parameters and the scale alone: a NaN in the loss, an activation or a
        gradient is told as gradients that are Inf or NaN.

        Raises:
            TypeError: the scaler is neither Keras' nor tf-keras'.
        """
        if self._framework not in ("keras", "tf_keras"):
            raise TypeError(f"callback() is for Keras, and the scaler is of {self._framework}")
        keras: Any = sys.modules[self._framework]
        monitor = self

        class Recording(keras.callbacks.Callback):  # type: ignore[misc] # untyped base
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                _ = self.model  # on JAX, this gives the optimizer's variables their new values
                monitor.record()

        return Recording()

    @property
    def history(self) -> tuple[Step, ...]:
        """The latest 1,000 steps; reads what was not read yet, and waits for the device."""
        self._source.read()
        return tuple(self._journal.history)

    @property
    def verdict(self) -> Verdict:
        """What the steps so far say: see :class:`~gradscaler.diagnose.Verdict`."""
        self._source.read()
        return self._judge(self._journal)

    def close(self) -> None:
        """Watch no more, write what is left, and close the files."""
        if self._is_open:
            self._source.close()
            self._journal.close()
        self._is_open = False

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _policy(self) -> Any:
        scaler = self._scaler
        if isinstance(scaler, EagerScaler) and not scaler._scale_moves():
            return FixedScale(float(scaler._host_state().scale))
        return readings.policy_of(scaler)

    def _judge(self, journal: Journal) -> Verdict:
        evidence = Evidence(
            journal.num_steps,
            journal.num_skipped,
            self._dtype,
            scale=journal.history[-1].scale if journal.history else None,
            sample=journal.latest,
        )
        row = journal.row
        if row is not None:
            parameters = self._source.nonfinite_parameters()
            evidence = replace(
                evidence,
                skips_in_a_row=row.number,
                first_scale=row.first_scale,
                skips=tuple(row.skips),
                min_scale=_min_scale(self._policy),
                parameter=parameters[0].name if parameters else None,
                located=self._source.located,
            )
        return judge(evidence)


def _check(scaler: Any, model: Any, is_eager: bool) -> None:
    if not is_eager:
        readings.read(scaler)
    names = ("named_parameters",) if is_eager else ("trainable_params", "trainable_variables")
    if model is not None and not any(hasattr(model, name) for name in names):
        rest = "" if is_eager else "; what JAX has for one, give record(parameters=...)"
        raise TypeError(f"model must have {' or '.join(names)}, got {type(model).__name__}{rest}")


def _open(
    start: Start,
    path: str | os.PathLike[str] | None,
    tensorboard: str | os.PathLike[str] | None,
) -> tuple[list[Sink], int]:
    """What to write to, and how many steps there were before."""
    writer = None if tensorboard is None else load_writer()
    sinks: list[Sink] = []
    step = 0
    if path is not None:
        file = RunFile(Path(path), start)
        step = file.step
        sinks.append(file)
    if tensorboard is not None:
        sinks.append(Events(writer, tensorboard))
    return sinks, step


def _min_scale(policy: Any) -> float | None:
    for name in ("min_scale", "minimum_scale", "min_loss_scale"):  # the latter flax's and jmp's
        scale = getattr(policy, name, None)
        if scale is not None:
            return float(scale)
    return None


def _describe(policy: Any) -> dict[str, Any]:
    """A policy by its name and its parameters."""
    parameters = vars(policy) if is_dataclass(policy) else {}
    plain = {
        key: value for key, value in parameters.items() if isinstance(value, (int, float, str))
    }
    return {"name": type(policy).__name__, **plain}


def _framework_of(scaler: Any) -> str:
    """The folder of gradscaler that a scaler, or the one that a state holds, comes from."""
    for base in type(scaler).__mro__:
        package, _, rest = base.__module__.partition(".")
        framework = rest.partition(".")[0]
        if package == "gradscaler" and framework in FRAMEWORKS:
            return framework
    return "jax"  # the state of an optax optimizer
