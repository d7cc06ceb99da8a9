"""Which dtypes a backward pass computes in."""

from __future__ import annotations

from functools import partial
from typing import Any

_MOST_NODES = 10_000
_OPAQUE = "CompiledFunction", "CheckpointFunction"  # nodes that hide a graph of their own


def listen(loss: Any, dtypes: set[str]) -> None:
    """Add the dtypes of the gradients in a loss' next backward pass to ``dtypes``, by name.

    ``"unknown"`` is one of them if the graph is too large, or hides a part of itself. Nothing is
    computed, and no device waited for. Nothing happens where a framework's graph has no such
    hooks, as only PyTorch's does.
    """
    seen: set[Any] = set()
    waiting = [getattr(loss, "grad_fn", None)]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or not hasattr(node, "register_prehook"):
            continue
        if len(seen) == _MOST_NODES:
            dtypes.add("unknown")
            return
        seen.add(node)
        name = node.name()
        if name.startswith(_OPAQUE):
            dtypes.add("unknown")
        if "AccumulateGrad" not in name:  # parameters stay in float32 under autocast
            node.register_prehook(partial(_note, dtypes))
        waiting += [following for following, _ in node.next_functions]


def _note(dtypes: set[str], gradients: tuple[Any, ...]) -> None:
    dtypes.update(str(g.dtype).rpartition(".")[2] for g in gradients if g is not None)
