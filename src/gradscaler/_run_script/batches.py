"""The code that prepares batches before PyTorch sees them: that of a dataset."""

from __future__ import annotations

import sys
from typing import Any

from gradscaler._in_memory import in_memory
from gradscaler.diagnose._graph.call_site import shown_line


def prepared_by(step: int, in_workers: bool = False) -> str:
    """What made numbers of a batch before the process' operations; empty if no loader is in use.

    Args:
        step: the step whose batch it is.
        in_workers: whether worker processes have to prepare the batches.
    """
    module: Any = sys.modules.get("torch.utils.data.dataloader")
    kind = getattr(module, "_BaseDataLoaderIter", None)
    if kind is None:
        return ""
    loading = in_memory(kind)
    if in_workers:
        loading = [each for each in loading if getattr(each, "_num_workers", 0)]
    places = {_place_of(getattr(each, "_dataset", None)) for each in loading}
    if not places:
        return ""
    at = f" ({', '.join(sorted(filter(None, places)))})" if any(places) else ""
    return f"made before PyTorch saw it, by the code that prepares the batch of step {step}{at}"


def _place_of(dataset: Any) -> str:
    """Where a dataset makes an item, such as ``Rows at data.py:12``; empty if that is no Python."""
    while type(dataset).__module__.startswith("torch.") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset  # a part of another one
    kind = type(dataset)
    makes = getattr(kind, "__getitem__", None) or getattr(kind, "__iter__", None)
    code = getattr(makes, "__code__", None)
    if code is None or kind.__module__.startswith("torch."):
        return ""
    return f"{kind.__name__} at {shown_line(code.co_filename, code.co_firstlineno)}"
