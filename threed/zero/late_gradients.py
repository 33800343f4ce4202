"""Late gradients: gradients that arrive after the reduction of their bucket was launched.

Late gradients are kept in memory until the end of the step, and are then reduced.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from threed.distributed import collectives
from threed.memory.tiers import StagedBuffer
from threed.zero.agreement import check_gathers
from threed.zero.gather import Gatherer
from threed.zero.layout import Bucket, Layout, Slot
from threed.zero.reductions import GradientCodecs, early_sum, sum_over


class LateGradients:
    """Stores the late gradients of a step, and reduces them at the end of the step.

    Args:
        layout: parameters and their buckets.
        codecs: how gradients are encoded for communication.
        gatherer: the gatherer of the parameters. `reduce` checks that all ranks have gathered the
            same groups in the same order. If None, this check is skipped.
    """

    def __init__(self, layout: Layout, codecs: GradientCodecs, gatherer: Gatherer | None) -> None:
        self.layout, self.codecs, self.gatherer = layout, codecs, gatherer
        self._axes = [(bucket.group.shard, *early_sum(bucket)) for bucket in layout.buckets]
        self._gradients: dict[Slot, Tensor] = {}

    def add(self, slot: Slot, grad: Tensor) -> None:
        """Adds a late gradient to the sum of the parameter's late gradients of this step."""
        if slot in self._gradients:
            self._gradients[slot].add_(grad)
        else:
            copied = grad.to(self.layout.policy.grad_dtype, copy=True)
            # made contiguous, because `_window` flattens it; a transposed product is not contiguous
            self._gradients[slot] = copied.contiguous()

    def clear(self) -> None:
        """Drops all late gradients of the step."""
        self._gradients.clear()

    def reduce(self) -> Iterator[tuple[Bucket, StagedBuffer]]:
        """Sums late gradients over ranks, for each bucket with late gradients on any rank.

        Collective.

        Yields:
            (bucket, staged): `staged` is the staged buffer with this rank's slice of the bucket's
            gradients. The sum of the late gradients was added to it. The caller must store it.

        Raises:
            RuntimeError: if the ranks did not gather the same groups in the same order.
        """
        for number in self._agree_on_buckets():
            bucket = self.layout.buckets[number]
            window, shard = self._window(bucket), bucket.group.shard
            total = collectives.start_reduce_scatter(window, shard, codec=self.codecs.of(shard))
            staged = bucket.grad.fetch()
            own = staged.wait()
            summed = sum_over(total.wait(), early_sum(bucket), self.codecs).wait()
            own.add_(summed.to(own.device))
            yield bucket, staged
        self._gradients.clear()

    def _agree_on_buckets(self) -> list[int]:
        """Returns the indices of the buckets that have late gradients on any rank, ascending.

        Collective.
        """
        buckets, late = self.layout.buckets, set[int]()
        own = [
            number
            for number, bucket in enumerate(buckets if self._gradients else ())
            if any(slot in self._gradients for slot in bucket.slots)
        ]
        order = 0 if self.gatherer is None else self.gatherer.order
        shards = {bucket.group.shard for bucket in buckets}  # the axes over which gathers run
        for axis in dict.fromkeys(chain.from_iterable(self._axes)):
            answers = collectives.exchange([order, own], axis)
            if axis in shards:
                check_gathers([order for order, _ in answers])
            late |= {n for _, numbers in answers for n in numbers if axis in self._axes[n]}
        return sorted(late)

    def _window(self, bucket: Bucket) -> Tensor:
        """Returns the late gradients of a bucket as a flat tensor; all other elements are 0."""
        size, dtype = bucket.last - bucket.first, self.layout.policy.grad_dtype
        window = torch.zeros(size, dtype=dtype, device=bucket.group.params.device)
        for slot in bucket.slots:
            if slot in self._gradients:
                part = bucket.part(slot, window)
                begin = max(bucket.first - slot.first, 0)
                part.copy_(self._gradients[slot].view(-1)[begin : begin + len(part)])
        return window
