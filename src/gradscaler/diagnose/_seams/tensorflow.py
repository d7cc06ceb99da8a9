"""The operations of one step of TensorFlow, which runs eagerly meanwhile."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial, reduce, wraps
from importlib import import_module
from inspect import currentframe, unwrap
from pathlib import Path
from threading import Lock, get_ident
from traceback import walk_stack
from types import FrameType
from typing import Any

from gradscaler.diagnose._gradients.reading import Reading, Tensor, read
from gradscaler.diagnose._graph.call_site import users_line
from gradscaler.diagnose._graph.masks import Value
from gradscaler.diagnose._graph.site import Site
from gradscaler.diagnose._operations.rows import canonical
from gradscaler.diagnose._record.located import Located
from gradscaler.diagnose._seams.judge import Judge, JudgedSeam, Owned

Tensors = Sequence[Tensor]

_SCALERS = tuple(
    str(Path(__file__).parents[2] / name) for name in ("keras", "tf_keras", "_keras_like")
)


class TensorFlowSeam(JudgedSeam):
    """Judges the operations that a thread runs between ``start()`` and ``stop()``.

    TensorFlow calls back after each operation. It says neither on which line the operation ran nor
    in which pass, but the frames of the call do. Functions of ``tf.function`` run eagerly, in all
    threads, as long as one thread is watched.

    Args:
        modules: the modules of the model, by name.
        parameters: its parameters; the tensor of each is a ``tf.Variable``.
        is_step: whether a step of the training runs, which must keep its bits: what
            ``tf.function`` compiled stays compiled, and is one operation.
    """

    def __init__(
        self, modules: Mapping[str, Any], parameters: Iterable[Owned], is_step: bool = False
    ) -> None:
        self._patches = [_PASSES] if is_step else [_PASSES, _FUNCTIONS]
        self._judge = Judge(modules, (), _identity)
        # An operation reads a variable by its handle.
        self._owned = {
            replica.handle._id: (each, replica)
            for each in parameters
            for replica in _replicas(each.tensor)
        }
        # By the handle of a variable: the Inf or NaN that was written to it.
        self._written: dict[int, tuple[Tensor, Located]] = {}
        self._makers: dict[int, Site] = {}  # of each tensor, by its number
        self._readers: dict[int, Site] = {}  # the first of each tensor
        self._calls: dict[str, list[tuple[list[int], Site]]] = {}  # by the operation: its inputs
        self._depth = 0  # of the backward passes that run
        self._is_judging = False  # to read a variable is an operation, too
        self.thread = get_ident()

    def start(self) -> None:
        """Begin to judge the operations of this thread."""
        self.thread = get_ident()
        for each in self._patches:
            each.add(self)
        _module("framework.op_callbacks").add_op_callback(self._see)

    def stop(self) -> None:
        """Judge no more."""
        with suppress(KeyError):  # it was not started
            _module("framework.op_callbacks").remove_op_callback(self._see)
        for each in self._patches:
            each.remove(self)

    def end_in(self, results: object) -> None:
        """Note the results of a pass. An Inf or NaN that reaches none of them does no harm."""
        with suppress(Exception):
            leaves = import_module("tensorflow").nest.flatten(results, expand_composites=True)
            self._judge.end_in(_floating(leaves))

    def differentiate(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass. What it differentiates, and the gradients, are results."""
        is_outermost = self._depth == 0
        if is_outermost:
            self.end_in(kwargs.get("target", args[1:2]))
        self._depth += 1
        try:
            gradients = run(*args, **kwargs)
        finally:
            self._depth -= 1
        if is_outermost:
            self.end_in(gradients)
        return gradients

    def _see(
        self,
        name: str | bytes,  # TensorFlow gives both
        inputs: Sequence[Any],
        _: Any,
        outputs: Sequence[Any],
        op_name: str | None = None,
        graph: Any = None,
    ) -> None:
        """Judge an operation that ran, not one that was added to a graph."""
        if graph is not None or self._is_judging:
            return
        self._is_judging = True
        try:
            with suppress(Exception):  # it would look like an error of the user's operation
                called = name if isinstance(name, str) else name.decode()
                self._judge_run(currentframe(), called, inputs, outputs)
        finally:
            self._is_judging = False

    def _judge_run(
        self, frame: FrameType | None, name: str, inputs: Tensors, outputs: Tensors
    ) -> None:
        handle = next((each._id for each in inputs if each.dtype.name == "resource"), None)
        if handle is not None:
            self._access(handle, inputs, outputs)
            return
        own, made = _floating(inputs), _floating(outputs)
        for each in own:
            self._add_copy(each)
        if self._depth:
            site, own, values = self._in_backward(frame, name, own)
            self._judge.see(site, "backward", own, values, made)
        elif _is_of_scaler(frame):
            return
        else:
            site = self._judge.site_at(frame, _called(name))
            self._judge.see(site, "forward", own, self._judge.before(own, site), made)
        numbers = [each._id for each in inputs]
        self._makers |= {each._id: site for each in outputs}
        self._readers |= {each: self._readers.get(each, site) for each in numbers}
        self._calls.setdefault(name, []).append((numbers, site))

    def _in_backward(
        self, frame: FrameType | None, name: str, inputs: list[Tensor]
    ) -> tuple[Site, list[Tensor], list[Value[Located]]]:
        """The site of an operation of a backward pass, and what it reads.

        TensorFlow computes most gradients in a function that holds the forward operation, and the
        gradients of its outputs. Numbers of the forward pass count as finite there, unless the
        gradients of the outputs are finite and another operation made an Inf or NaN that it read.
        """
        backward = unwrap(_module("eager.imperative_grad").imperative_grad).__code__
        function = _module("eager.backprop")._gradient_function.__code__
        lines = list[tuple[str, int]]()
        while frame is not None and frame.f_code is not backward:
            if frame.f_code is function:
                call = frame.f_locals
                given, made = _present(call["inputs"]), _present(call["outputs"])
                site = self._site_of(call["op_name"], given, made)
                own, results = {each._id for each in given}, {each._id for each in made}
                gradients = _floating(_present(call["out_grads"]))
                if any(read(each).bad for each in gradients):
                    results |= own
                inputs = [*inputs, *gradients]
                values = [
                    Value(Reading("finite")) if each._id in results else value
                    for each, value in zip(inputs, self._judge.before(inputs, site), strict=True)
                ]
                return site, inputs, values
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        # A function of its own computes this gradient, such as one of the user's.
        line = users_line(lines)
        known = (self._readers.get(each._id) for each in inputs)
        site = Site(_called(name), line)
        if line is None:
            site = next(filter(None, known), site)
        return site, inputs, self._judge.before(inputs, site)

    def _site_of(self, name: str, inputs: Tensors, outputs: Tensors) -> Site:
        """The site of an operation, by those of its tensors that its gradient reads."""
        made = (self._makers[each._id] for each in outputs if each._id in self._makers)
        wanted = {each._id for each in inputs}
        calls = reversed(self._calls.get(name, []))
        called = (site for numbers, site in calls if wanted.issubset(numbers))
        return next(made, None) or next(called, Site(_called(name)))

    def _access(self, handle: int, inputs: Tensors, outputs: Tensors) -> None:
        """Follow an Inf or NaN into a variable and out of it."""
        if not outputs:
            for value in _floating(inputs):
                if (origin := self._judge.origin_of(value)) is not None:
                    self._written[handle] = value, origin
        for output in _floating(outputs):
            if handle in self._written and read(output).bad:
                self._judge.note(output, self._written[handle][1])
            elif handle in self._owned and read(output).bad:
                self._judge.add(self._owned[handle][0]._replace(tensor=output))

    def _add_copy(self, tensor: Tensor) -> None:
        """Know a tensor that holds what a variable does: some operations read theirs unseen.

        So does one that was made of numbers which Python or NumPy has read.
        """
        if tensor._id in self._makers or self._judge.origin_of(tensor) or not read(tensor).bad:
            return
        self._judge.note(tensor, self._judge.origin_of_values(tensor.numpy()))
        for value, origin in self._written.values():
            if _is_same(value, tensor):
                self._judge.note(tensor, origin)
        for owned, variable in self._owned.values():
            if _is_same(variable, tensor):
                self._judge.add(owned._replace(tensor=tensor))


class _Patch:
    """What changes in all of TensorFlow as long as a thread is watched.

    Args:
        change: makes the change for a list of seams, and returns what undoes it.
    """

    def __init__(
        self, change: Callable[[list[TensorFlowSeam]], list[Callable[[], object]]]
    ) -> None:
        self._change = change
        self._lock = Lock()
        self._seams: list[TensorFlowSeam] = []
        self._undo: list[Callable[[], object]] = []

    def add(self, seam: TensorFlowSeam) -> None:
        """Change TensorFlow for a seam; for a second one, nothing is left to change."""
        with self._lock:
            self._seams.append(seam)
            if len(self._seams) == 1:
                self._undo = self._change(self._seams)

    def remove(self, seam: TensorFlowSeam) -> None:
        """Leave TensorFlow as it was, after the last seam."""
        with self._lock:
            if seam in self._seams:
                self._seams.remove(seam)
            while self._undo and not self._seams:
                self._undo.pop()()


def _show_passes(seams: list[TensorFlowSeam]) -> list[Callable[[], object]]:
    """Let seams run the backward passes of their threads."""
    passes = _module("eager.imperative_grad")
    original = passes.imperative_grad

    @wraps(original)
    def imperative_grad(*args: Any, **kwargs: Any) -> Any:
        own = [each for each in seams if each.thread == get_ident()]
        run = reduce(lambda run, seam: partial(seam.differentiate, run), own, original)
        return run(*args, **kwargs)

    passes.imperative_grad = imperative_grad
    return [partial(setattr, passes, "imperative_grad", original)]


def _run_eagerly(_: object) -> list[Callable[[], object]]:
    """Run functions eagerly, with random numbers that the training does not miss."""
    config: Any = import_module("tensorflow").config
    undo: list[Callable[[], object]] = [
        partial(config.run_functions_eagerly, config.functions_run_eagerly())
    ]
    config.run_functions_eagerly(True)
    context = _module("eager.context").context()
    seed, generator = context._seed, getattr(context, "_rng", None)
    if generator is None:  # no seed was set
        return undo
    # Seeds of operations are drawn from elsewhere meanwhile, so that none is used up. An
    # operation goes on with the numbers of its seed, so a seed may not be drawn twice.
    undo.append(partial(setattr, context, "_rng", generator))
    undo.append(partial(setattr, context, "_seed", seed))
    context._rng = random.Random()
    context._rng.setstate(generator.getstate())
    context._rng.seed(context._rng.random())
    return undo


_PASSES, _FUNCTIONS = _Patch(_show_passes), _Patch(_run_eagerly)


def _module(name: str) -> Any:
    """A module of TensorFlow that has no public name."""
    return import_module(f"tensorflow.python.{name}")


def _called(operation: str) -> str:
    """The name that users know for an operation.

    >>> _called("RealDiv"), _called("GatherV2"), _called("SegmentMean")
    ('div', 'gather', 'segment_mean')

    That of a compiled function is its own.

    >>> _called("__inference_loss_of_55"), _called("__forward_step_7_12")
    ('loss_of', 'step')
    """
    if compiled := re.fullmatch(r"__(?:inference|forward|backward)_(.+?)(?:_\d+)+", operation):
        return compiled[1]
    known = canonical(operation)
    if known != operation:
        return known
    words = r"(?<=[a-z0-9])(?=[A-Z])"
    return re.sub(words, "_", re.sub(r"V\d$", "", operation)).lower()


def _identity(tensor: Tensor) -> int:
    """The number of a tensor, which no other gets."""
    return int(tensor._id)


def _is_same(value: Any, tensor: Tensor) -> bool:
    """Whether a variable or a tensor has the values of another tensor, bit for bit."""
    is_like = (value.dtype, value.shape) == (tensor.dtype, tensor.shape)
    return is_like and value.numpy().tobytes() == tensor.numpy().tobytes()


def _replicas(variable: Any) -> Sequence[Any]:
    """The variables that one of a strategy stands for; else the variable itself."""
    return getattr(variable, "values", None) or [variable]


def _present(tensors: Iterable[Any] | None) -> list[Tensor]:
    """The tensors among what a gradient reads: an input that it does not need is None."""
    return [each for each in tensors or () if hasattr(each, "_id")]


def _floating(values: Iterable[Any]) -> list[Tensor]:
    """The floating-point and complex tensors that hold numbers."""
    found = [each for each in values if hasattr(each, "_id") and hasattr(each, "numpy")]
    return [each for each in found if each.dtype.is_floating or each.dtype.is_complex]


def _is_of_scaler(frame: FrameType | None) -> bool:
    """Whether a scaler of gradscaler calls an operation, such as to multiply a loss."""
    for each, line in walk_stack(frame):
        if each.f_code.co_filename.startswith(_SCALERS):
            return True
        if users_line([(each.f_code.co_filename, line)]) is not None:
            return False
    return False
