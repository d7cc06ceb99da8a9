"""Counts the all-reduces of ``torch.distributed``."""

from collections import Counter

import torch.distributed as dist


class CountedAllReduces:
    """A context that counts all-reduces: those from Python, not those of a framework's C++.

    Attributes:
        counts: the number of all-reduces by operation, "MAX" or "SUM".
    """

    def __enter__(self):
        self.counts, self._all_reduce = Counter(), dist.all_reduce

        def all_reduce(tensor, op=dist.ReduceOp.SUM, *args, **kwargs):
            self.counts["MAX" if op == dist.ReduceOp.MAX else "SUM"] += 1
            return self._all_reduce(tensor, op, *args, **kwargs)

        dist.all_reduce = all_reduce
        return self

    def __exit__(self, *_):
        dist.all_reduce = self._all_reduce

    @property
    def count(self):
        """The number of all-reduces."""
        return self.counts.total()
