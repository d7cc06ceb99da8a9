"""How the cost of loss scaling grows with the number of tensors and with their bytes.

    python benchmarks/torch_curves.py

The times are those that scaling and clipping add to a bare step of fused AdamW, with gradscaler and
with PyTorch's scaler. The number of tensors goes from 10 to 10,000 at 64 MB in all, and the bytes
from 1 MB to 1 GB in 100 tensors.
"""

from __future__ import annotations

import argparse
from functools import partial

import eager
import paired
import torch
import torch_scaler

MB = 2**20
COUNTS = (10, 100, 1000, 10_000)
SIZES = (1, 10, 100, 1000)


def workload(tensors: int, megabytes: int) -> eager.Workload:
    """Return float32 gradients of ``megabytes`` in all."""
    shape = (megabytes * MB // 4 // tensors,)
    name = f"{tensors:,} tensors, {megabytes:,} MB"
    return eager.Workload(name, [shape] * tensors, calls=max(1, 20 // megabytes))


WORKLOADS = [
    *(workload(count, 64) for count in COUNTS),
    *(workload(100, size) for size in SIZES),
]


def main() -> None:
    """Time every workload."""
    arguments = paired.parse(
        argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    )
    setting = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    eager.run(arguments, setting, [partial(torch_scaler.compare_added, True)], WORKLOADS)


if __name__ == "__main__":
    main()
