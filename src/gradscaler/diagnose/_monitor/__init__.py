"""A monitor of a training run with loss scaling."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import gmtime, strftime
from typing import Any, get_args
from weakref import WeakSet

from gradscaler._notebook import page_of, shell
from gradscaler.diagnose._findings import judge
from gradscaler.diagnose._findings.evidence import min_scale_of
from gradscaler.diagnose._findings.frameworks import framework_named
from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.guard import guard
from gradscaler.diagnose._monitor.fit_batches import callback_of
from gradscaler.diagnose._monitor.loop_observer import LoopObserver
from gradscaler.diagnose._monitor.models import one_model
from gradscaler.diagnose._monitor.observer import EagerObserver
from gradscaler.diagnose._monitor.plain_loop import PlainLoop
from gradscaler.diagnose._monitor.recorded_loop import RecordedLoop, Unscaled
from gradscaler.diagnose._monitor.recorder import Recorder
from gradscaler.diagnose._monitor.replay import Replay
from gradscaler.diagnose._monitor.start_line import (
    described,
    framework_of,
    rank_and_world_size,
    script,
    versions_of,
)
from gradscaler.diagnose._monitor.step_log import OnStuck, StepLog
from gradscaler.diagnose._monitor.traced_scalers import policy_of, state_of
from gradscaler.diagnose._record.events import Counted, of_unzeroed
from gradscaler.diagnose._record.finding import Finding, Verdict
from gradscaler.diagnose._record.formats import format_named
from gradscaler.diagnose._record.lines import Start
from gradscaler.diagnose._record.located import Located
from gradscaler.diagnose._record.step import Step
from gradscaler.diagnose._record.writer import Log, RunFile, ScalarLog
from gradscaler.policies import Scalar
from gradscaler.policies._checks import count

_open_monitors: WeakSet[Monitor] = WeakSet()


class Monitor:
    """Watches a scaler, or a loop without one: records its steps, and says what is wrong.

    The scalers of PyTorch, TensorPlay and Paddle announce their steps, so the training loop stays
    as it is. For JAX, Keras, tf-keras and MindSpore, call :meth:`record` after each step, or pass
    the :meth:`callback` to ``model.fit``.

    A loop of PyTorch without a scaler, as in bfloat16 or float32, is watched if only its model is
    given. A step is then a run of backward passes and the steps of optimizers that follow them. The
    monitor sees each loss at ``backward()``, and checks the gradients right after it. A step that
    is applied although they hold an Inf or a NaN is told at once, and is a line of the run file. On
    a device nothing waits for that: the check is read when it has arrived on the host.

    The monitor samples one step in every ``every`` steps, and some early ones. A sample holds the
    norm of the unscaled gradients, their exponents, the shares of ``gradients * scale`` that are
    flushed, subnormal or normal or that overflow in ``dtype``, and the worst parameters. Exponents
    and shares come from at most 4,096 elements of each gradient. The loss of every step is kept.

    The monitor warns of each kind of finding once it is sure
    (:class:`~gradscaler.diagnose.FindingWarning`), and again when ten times as many steps show it.
    It looks at the first six, the 8th, the 12th, the 16th ... failed step, and else for
    at most 1 % of the time. After ``stuck_after`` skips in a row, the
    monitor gives a verdict. The verdict rests on the losses, the skipped gradients and, in the last
    of these steps, the model's parameters and activations. While a lower scale may still end the
    skips, the monitor waits for more of them.

    In PyTorch the monitor finds the operation and the user's line that made the first Inf or NaN:

    - If a loss is not finite, its graph is read before its backward pass, in the first step that
      fails. The graph also tells an operation from a parameter or a batch that is bad itself.
    - If only gradients are not finite, and no loss scale fixes that, they bound the part of the
      graph where the first began. In the next steps, the monitor reads that part, and hooks its
      nodes where a slope is Inf. So the operation is found when such a step comes again. If it is
      the only one in that part whose slope can be Inf, the monitor names it at once, as likely.

    Lines come from the tracebacks of the first forward pass, for which PyTorch's anomaly mode is
    on, without its check. Until a failure, later steps are as without a monitor, except that a loss
    on a CPU is read. After it, reading graphs takes at most 5 % of the training time, and a second.

    A graph lacks the operations that record none, such as those that prepare a batch or a target,
    and those inside compiled code. From a failure on that began there, the monitor watches the
    calls of PyTorch's functions in the next five steps, until another failure shows the operation,
    or three show none. A mode of PyTorch sees them, below those that the script enters. Compiled
    code runs uncompiled in these steps. The watch adds at most 5 % of the training time, and a
    second.

    In TensorPlay and Paddle the monitor watches the operations of the steps after a failing one,
    until one that fails shows where the Inf or NaN began, in either pass. The first such watch has
    no limit, as its step is most likely lost. Later ones take at most 5 % of the training time, and
    a second. They see the operations of the thread that calls ``update()``. Any watch changes
    nothing, and breaks off if its time is used up.

    In PyTorch, if a parameter's gradient is all 0 or missing in a sample, the monitor examines
    three steps to find the operation that blocks the gradient, at most six times in a run.

    Values that may be on a device are read only at samples, once a second if there is a file, and
    on request. Nothing else waits for the device. With ``forensics``, each step's flag is also read
    at once if there are gradients to inspect. Without it, a verdict waits for the next reading; if
    the scaler announces its steps, the monitor then inspects one more step before the verdict.

    With several processes, each monitor reads and reports its own process' part of the losses,
    gradients, parameters and activations. It waits for no other process, so any of the ranks may
    have a monitor. All ranks skip a step that overflows on one rank. Given a file from each rank,
    ``python -m gradscaler explain`` names the rank that overflowed.

    An interrupt (Ctrl-C) loses at most the sample of its step. Do not repeat an interrupted
    :meth:`record`: it may have counted the step.

    Args:
        scaler: a scaler from gradscaler. For JAX, the scaler before the first step, or an optax
            state that holds one. For Keras 3, its own wrapper will do. For MindSpore, a manager, a
            functional scaler or a train step. None for a loop of PyTorch without a scaler; one that
            is disabled counts as None there.
        model: the source of the parameters' names; several models in a list, or in a dict by the
            names to give them, such as ``{"generator": generator, "critic": critic}``. In PyTorch,
            TensorPlay and Paddle, watched steps name its modules. Without a scaler, it is needed.
        every: the mean number of steps from one sample to the next. The sampled step of each
            ``every`` steps varies by a fixed rule, so that batches in a periodic order are all
            seen. If ``every`` is more than 50, steps 2, 5, 10, 20 and 50 are sampled too, so that a
            short run is judged.
        path: a run file to create or append to; see :mod:`gradscaler.diagnose._record.lines`.
            Training writes its new steps to the file at least once a second, and the rest when the
            process exits. Only one monitor at a time may write to a file. If the file already holds
            a run, the monitor continues it, says so in the log "gradscaler", and bases the verdict
            on the new steps. ``{rank}`` in the path becomes the process' rank, from
            torch.distributed, else from the environment variable ``RANK``, else 0.
        optimizers: without a scaler, the optimizers to watch; by default, all of ``torch.optim``
            that hold a parameter of the model.
        forensics: inspect every n-th skipped step; 0 disables.
        on_stuck: ``"warn"`` warns once in a streak of skips. ``"raise"`` raises before the scale
            moves, and the next ``update()`` continues. ``"continue"`` only writes the verdict, and
            warns of no other finding either. Each process decides for itself. If one raises, the
            others may wait for it until the launcher ends them.
        stuck_after: the number of consecutive skips of one optimizer that calls for a verdict. With
            1, there is no step in which activations can be inspected.
        dtype: the format that gradients are computed in: ``"float16"``, ``"bfloat16"``,
            ``"float32"``, ``"float8_e4m3"`` or ``"float8_e5m2"``. By default, it is float16 with a
            scaler, and else the narrowest that the first backward passes compute in.
        log: a function that gets numbers as they are sampled, as ``log(scalars, step=step)``, such
            as ``wandb.log`` or ``mlflow.log_metrics``. ``scalars`` is a dict of floats: of a sample
            ``gradscaler/loss_scale``, ``skipped_steps`` (since the last sample), ``loss``,
            ``gradient_norm``, and the shares ``zero``, ``flushed``, ``subnormal``, ``normal``,
            ``overflow`` and ``nonfinite``; of a verdict 1.0 for the kind of each finding, such as
            ``gradscaler/findings/floor``. If it raises, it is called no more.
        tell: a function that gets each :class:`~gradscaler.diagnose.Finding` in place of a warning.
            What it raises ends the training there, as an error from a scaler's call does.

    Raises:
        TypeError, ValueError: an argument is invalid, ``path`` is not a run file, or another
            monitor is writing to it.
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

    >>> with Monitor(model=model, tell=lambda finding: print(finding.kind)) as monitor:
    ...     optimizer.zero_grad()
    ...     (model(torch.ones(2)).sum() * torch.inf).backward()
    ...     optimizer.step()
    loss
    >>> monitor.bad_step
    1
    """

    def __init__(  # noqa: PLR0913, PLR0915 # each is an option of its own
        self,
        scaler: Any = None,
        model: object = None,
        every: int = 100,
        path: str | os.PathLike[str] | None = None,
        *,
        optimizers: Iterable[object] | None = None,
        forensics: int = 1,
        on_stuck: OnStuck = "warn",
        stuck_after: int = 20,
        dtype: str | None = None,
        log: Log | None = None,
        tell: Callable[[Finding], object] | None = None,
    ) -> None:
        every = count("every", every)
        forensics = count("forensics", forensics, least=0)
        stuck_after = count("stuck_after", stuck_after)
        if on_stuck not in get_args(OnStuck):
            choices = ", ".join(map(repr, get_args(OnStuck)))
            raise ValueError(f"on_stuck must be one of {choices}, got {on_stuck!r}")
        self._framework = "torch" if scaler is None else framework_of(scaler)
        is_recorded_loop = isinstance(scaler, Unscaled)
        self._versions = versions_of(self._framework)
        is_eager = scaler is None or hasattr(scaler, "add_observer")
        is_off = is_eager and scaler is not None and not scaler.observed.is_enabled
        is_loop = is_off and self._framework == "torch" and model is not None
        has_scaler = scaler is not None and not (is_loop or is_recorded_loop)
        if has_scaler and optimizers is not None:
            raise TypeError("optimizers must be None, as the scaler announces what it steps")
        self._dtype = format_named(dtype or ("float16" if has_scaler else "float32")).name
        _check(scaler, model, is_eager)
        model = one_model(model)
        is_given = has_scaler or is_recorded_loop
        self._scaler = scaler if is_given else PlainLoop(model, optimizers, is_loop)
        scaler = self._scaler
        rank, self._world_size = rank_and_world_size()
        is_enabled = not is_eager or scaler.observed.is_enabled
        if log is not None and not callable(log):
            raise TypeError(f"log must be a function or None, got {log!r}")
        file: RunFile | None = None
        self._path = _free(path, rank) if is_enabled else None
        try:
            start: Start | None = None
            if self._path is not None:
                start = Start(
                    self._framework,
                    self._dtype,
                    every,
                    step=0,
                    policy=described(policy_of(scaler)) if has_scaler else {},
                    time=strftime("%Y-%m-%dT%H:%M:%SZ", gmtime()),
                    rank=rank,
                    world_size=self._world_size,
                    script=script(),
                    versions=self._versions,
                )
                file = RunFile(self._path, start)
            writers: list[RunFile | ScalarLog] = [] if file is None else [file]
            if log is not None and is_enabled:
                writers.append(ScalarLog(log, has_scaler))
            step = 0 if file is None else file.step
            self._before = None if file is None else file.before
            self._log = StepLog(writers, step, on_stuck, stuck_after, self._judge, tell)
            source = _source_of(is_eager, has_scaler)
            settings = every, forensics, self._dtype, self._world_size
            self._source = source(scaler, self._framework, model, self._log, *settings)
            if isinstance(self._source, LoopObserver) and dtype is None:
                self._source.dtype_seen = partial(self._restart, file, start)
            self._is_open = True
            guard.add(self)
            self._process: int | None = os.getpid()
            _open_monitors.add(self)
            atexit.unregister(_close_all)
            atexit.register(_close_all)  # runs first at exit: the framework is still up
            if is_eager:  # last, so an interrupt leaves no observer behind
                scaler.add_observer(self._source)
        except BaseException:  # free the file for the next monitor
            self._process = None
            if file is not None:
                file.close()
            raise

    def record(
        self,
        *,
        scaler: object = None,
        finite: Scalar | None = None,
        gradients: object = None,
        loss: Scalar | None = None,
        parameters: object = None,
        replay: Replay | None = None,
    ) -> None:
        """Record a step of JAX, Keras or MindSpore once it is done and the scale has moved.

        Args:
            scaler: the new scaler or optax state, if the framework makes a new one at each step.
            finite: a boolean scalar, whether the gradients were finite. If left out, it is inferred
                from the number of steps that Keras' inner optimizer took, else from the scale and
                its counter. A fixed scale gives no evidence; the step is assumed to be finite.
            gradients: the unscaled gradients, in any structure. None stands for a parameter that
                has no gradient. Where your step holds scaled ones, divide them by the scale before
                the scaler moves it: in Keras by ``optimizer.loss_scale`` before ``apply()``. A list
                takes its names from the model. If left out, gradients are neither sampled nor
                inspected. If given, and with ``forensics``, each call waits for the device.
            loss: the unscaled loss.
            parameters: the model's parameters after the step, in any structure. They are inspected
                only if the run is stuck or a loss was not finite. If left out, the parameters of
                ``model`` are inspected.
            replay: a function that returns a tuple: the function and the arguments that
                :func:`locate_jax` takes, for this step; or the model and the closure that
                :func:`locate` takes. It is called in a failed step until a failure
                is located, and in the step of a verdict on a streak of skips; other steps only keep
                it unused. A step has failed if its loss is not finite, or if it was skipped with
                gradients of NaN without Inf, or at a scale of at most 1. Where ``gradients`` are
                left out, two more count: the second skip in a row, and the second one with a finite
                loss if each came after an applied step, and the scale did not grow between them. If
                the replay raises, there is a warning, or with ``tell`` a line on stderr, and it is
                called no more. On a device the monitor reads each step at once, as it must for a
                replay, only from the first failed step on that a later reading found.

        Raises:
            TypeError: the scaler announces its steps itself; ``scaler`` is not a scaler; or
                ``gradients`` or ``parameters`` hold something that is not an array.
            StuckError: the run is stuck, and ``on_stuck`` is ``"raise"``.
        """
        if not isinstance(self._source, Recorder):
            raise TypeError("this scaler announces each step by itself: do not call record()")
        if self._is_open:
            self._source.record(scaler, finite, gradients, loss, parameters, replay)

    def note_located(self, located: Located, *, is_left_out: bool = False) -> None:
        """Note where :func:`locate`, or a watch of one's own, found the failure of this step.

        The verdict names that place if the monitor itself saw only what read the Inf or NaN.

        Args:
            located: the place.
            is_left_out: whether the step left the weights as they were by itself. It counts in a
                loop that is recorded and has no scaler.
        """
        if self._is_open and isinstance(self._source, RecordedLoop):
            self._source.noted, self._source.is_left_out = located, is_left_out
        elif self._is_open:
            self._log.add_made(located)

    def note_applied(self, located: Located | None) -> None:
        """Note that the script applies the step that is recorded next in spite of an Inf or NaN.

        Args:
            located: where :func:`locate` found the first; None if that is not known.
        """
        if self._is_open and isinstance(self._source, Recorder):
            self._source.noted, self._source.is_applied = located, True

    def note_unzeroed(self, name: str = "") -> None:
        """Note that a backward pass adds to gradients that a step has used, before the next step.

        In PyTorch, and with a scaler where such gradients hold an Inf or a NaN, the monitor sees it
        by itself.

        Args:
            name: a module or a parameter whose gradient that is.
        """
        if self._is_open:
            self._source.note(of_unzeroed(name))

    def note_events(self, events: Iterable[Counted]) -> None:
        """Note what ``gradscaler run`` saw of the step that is not over."""
        if self._is_open:
            self._source.note(events)

    def at_samples(self, look: Callable[[], None]) -> None:
        """Call a function in each step of PyTorch that is sampled, when its optimizer begins it."""
        if isinstance(self._source, EagerObserver):
            self._source.at_sample = look

    def note_nan_left(self, name: str) -> None:
        """Note that what the script computes beside its steps, as by an evaluation, is NaN.

        The verdict says it of a run in which nothing else is wrong. Call it at the end.

        Args:
            name: the script's own name for it, such as ``"eval_loss"``.
        """
        if self._is_open:
            self._source.read()
            self._log.note_nan_left(name)

    def note_stayed(self, name: str, count: int) -> None:
        """Note backward passes without a step, in a loop without a scaler that is recorded.

        Args:
            name: a parameter whose gradient held the Inf or NaN of an earlier pass before them.
            count: how many passes there were since those that were noted before.
        """
        if self._is_open and isinstance(self._source, RecordedLoop):
            self._source.note_stayed(name, count)

    def note_operations(self, broadcast: str = "", passes_none: str = "") -> None:
        """Note operations of the step that is recorded next, where the loop is recorded.

        Args:
            broadcast: where it compares each output with each target, such as ``"sub at
                train.py:20 makes [n, n] of [n, 1]"``.
            passes_none: an operation that passes no gradient on, such as ``"round at
                train.py:12"``.
        """
        if self._is_open and isinstance(self._source, Recorder):
            self._source.note_operations(broadcast, passes_none)

    def note_repeated(self) -> None:
        """Note that the script calls an optimizer's step once more, beside that of its scaler.

        In PyTorch, the monitor sees it by itself.
        """
        if self._is_open:
            self._source.note_repeated()

    def leave_out(self, loss: Tensor) -> None:
        """Report a loss of PyTorch that is Inf or NaN, and for which the script makes no step.

        The monitor sees a loss at its backward pass. A script that ends before it, or that goes on
        with the next batch, calls this, which reads the loss and its graph. A finite loss is not
        reported.

        Raises:
            TypeError: the scaler is not PyTorch's.
        """
        if self._framework != "torch" or not isinstance(self._source, EagerObserver):
            raise TypeError(f"leave_out() is for PyTorch, but this scaler is {self._framework}'s")
        if self._is_open:
            self._source.leave_out(loss)

    @property
    def bad_step(self) -> int | None:
        """The first step that was applied although its gradients were Inf or NaN; else None.

        A loop without a scaler has such steps, and one of MindSpore whose script takes the step
        itself. It is set before the step's finding is told.
        """
        found = self._log.counts.evidence.bad_step
        return None if found is None or found.is_left_out else found.step

    @property
    def located(self) -> Located | None:
        """Where the first Inf or NaN of the latest failure began, as far as the run has seen it."""
        evidence = self._log.counts.evidence
        return evidence.watched if evidence.bad_step is None else evidence.bad_step.located

    def callback(self) -> Any:
        """A callback for ``model.fit`` that records each training step, without its gradients.

        Keras reports only the mean loss of the epoch so far, so the loss is left out, except that
        of the first batch of an epoch that makes this mean NaN or Inf. A failing batch is run again
        once, eagerly, and the operation is named. With several replicas, a verdict rests on the
        model's parameters and the scale alone in later steps. It cannot tell a NaN in the loss or
        an activation from one in a gradient then, and says that gradients are Inf or NaN.

        Raises:
            TypeError: the scaler is not for Keras or tf-keras.
        """
        if self._framework not in ("keras", "tf_keras"):
            raise TypeError(f"callback() is for Keras, but this is a scaler for {self._framework}")
        return callback_of(self._framework, self._source.scaler, self.record)

    @property
    def history(self) -> tuple[Step, ...]:
        """The latest 1,000 steps. Waits for the device if some were not read yet.

        Another thread or a signal handler may read the history and the verdict at any time.
        """
        return tuple(self._source.snapshot().history)

    @property
    def verdict(self) -> Verdict:
        """The verdict on the steps so far; see :class:`~gradscaler.diagnose.Verdict`."""
        log = self._source.snapshot()
        streak = log.stuck_streak
        if streak is not None and streak.verdict is not None:
            return streak.verdict.in_full
        return self._judge(log)

    def _repr_html_(self) -> str:
        """The report in a notebook's output, or the verdict if no report can be made."""
        self.flush()
        page = "" if self._path is None else page_of(self._path)
        return page or self.verdict._repr_html_()

    def flush(self) -> None:
        """Write the steps so far to the file, which a report may read then. Waits for the device.

        Training writes by itself at least once a second. Call this between steps.
        """
        if self._is_open:
            self._source.read()
            self._log.add_sample()

    def close(self) -> None:
        """Stop watching, write what is left, and close the files.

        A signal handler or another thread may call this method too. If the scaler is in a call, the
        monitor closes at the end of that call or the next one.
        """
        if self._is_open:
            self._source.close(self._finish)

    def break_off(self, reason: str) -> None:
        """Stop watching after an error of the monitor's own, which the verdict says."""
        if not self._is_open:
            return
        with suppress(Exception):
            self._log.break_off(reason)
        self._source.break_off()
        self._finish()

    def _restart(self, file: RunFile | None, start: Start | None, dtype: str) -> None:
        """Write the first line again, with the dtype that was seen."""
        self._dtype = dtype
        if file is not None and start is not None:
            file.write(replace(start, dtype=dtype, step=file.step))

    def _finish(self) -> None:
        try:
            self._log.close()
        finally:  # closing may raise where warnings are errors
            self._is_open = False
            guard.remove(self)
            _open_monitors.discard(self)

    def __del__(self) -> None:
        # Nobody could catch an error here. Warnings may be errors; and where the garbage collector
        # runs inside a compilation, PyTorch's operations raise.
        with suppress(Exception):
            self._close_if_own()

    def _close_if_own(self) -> None:
        """Close the monitor, unless this process is a fork of the one that opened it."""
        if getattr(self, "_process", None) == os.getpid():
            self.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _judge(self, log: StepLog) -> Verdict:
        streak, parameters = log.stuck_streak, self._source.parameters
        evidence = replace(
            log.evidence,
            dtype=self._dtype,
            has_scaler=not isinstance(self._source, (LoopObserver, RecordedLoop)),
            framework=framework_named(self._framework, self._versions),
            world_size=self._world_size,
            is_finite_here=bool(log.counts.is_finite_here),
            before=self._before,
            min_scale=min_scale_of(policy_of(self._scaler)),
            **parameters.of_optimizers(is_stuck=streak is not None),
        )
        if evidence.bad_and_applied or evidence.bad_and_skipped or streak is not None:
            bad = next(iter(parameters.nonfinite()), None)
            evidence = replace(evidence, parameter=None if bad is None else bad.name)
        if streak is not None:
            evidence = replace(
                evidence,
                skips_in_a_row=streak.length,
                first_scale=streak.first_scale,
                skips=streak.skips,
                located=self._source.located or evidence.found_before(streak.skips[-1]),
            )
        return judge(evidence)


def _source_of(is_eager: bool, has_scaler: bool) -> type[EagerObserver | Recorder]:
    """What adds the steps of a scaler, or of a loop without one, to the log."""
    if is_eager:
        return EagerObserver if has_scaler else LoopObserver
    return Recorder if has_scaler else RecordedLoop


def _free(path: str | os.PathLike[str] | None, rank: int) -> Path | None:
    """The file of a rank. In a notebook, its monitor is closed, as that one's cell runs again."""
    own = None if path is None else Path(os.fspath(path).replace("{rank}", str(rank)))
    if own is not None and shell() is not None:
        for monitor in list(_open_monitors):
            if monitor._path is not None and monitor._path.absolute() == own.absolute():
                monitor.close()
    return own


def _close_all() -> None:
    """Close all open monitors at exit, as many scripts never close theirs."""
    for monitor in list(_open_monitors):
        monitor._close_if_own()


def _check(scaler: object, model: object, is_eager: bool) -> None:
    if not is_eager or (scaler is None and model is None):
        state_of(scaler)
    names = ("named_parameters",) if is_eager else ("trainable_params", "trainable_variables")
    if isinstance(model, (list, tuple, Mapping)):
        for each in model.values() if isinstance(model, Mapping) else model:
            _check(scaler, each, is_eager)
    elif model is not None and not any(
        hasattr(type(model), name) or hasattr(model, name)
        for name in names  # or tf_keras raises an error where a model has no weights yet
    ):
        rest = "" if is_eager else "; for JAX, use record(parameters=...)"
        raise TypeError(f"model must have {' or '.join(names)}, got {type(model).__name__}{rest}")
