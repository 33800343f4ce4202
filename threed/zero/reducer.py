"""Gradients on their way: from the layers into flat buffers, and bucket by bucket over the ranks.

Every parameter gets a `Sink`. Linear layers and embeddings write into it while backward computes; the rest comes
through autograd's post-accumulate hook. A bucket is ready by count: when every parameter in it has had
(uses x micro-batches) contributions. Ready buckets leave in one fixed order, the same on every rank, while the
backward of the layers before them goes on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from threed import collectives
from threed.collectives import Pending
from threed.ops import matmul
from threed.topology import Axis
from threed.zero.layout import Bucket, Layout, Slot


class Sink:
    """Collects one parameter's gradient in its flat buffer; the first contribution of a step overwrites."""

    def __init__(self, reducer: Reducer, slot: Slot, grad: Tensor) -> None:
        self.reducer, self.slot, self.grad = reducer, slot, grad
        self.due = self.expected = 0

    def begin(self, microbatches: int) -> None:
        """Expects a step's contributions: one for each use and micro-batch."""
        self.due = self.expected = len(self.slot.places) * microbatches

    @property
    def fresh(self) -> bool:
        """Whether nothing has been added in this step yet."""
        return self.due == self.expected

    def add(self, grad: Tensor) -> None:
        """Adds a whole gradient."""
        if self.fresh:
            self.grad.copy_(grad)
        else:
            self.grad.add_(grad)
        self._arrived()

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Adds the matrix product a @ b; in the buffer itself where the dtypes allow."""
        if a.dtype != self.grad.dtype:
            return self.add(torch.mm(a, b))
        matmul.add_product_(self.grad, a, b, fresh=self.fresh)
        return self._arrived()

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Adds rows [n h] at row numbers [n]."""
        if self.fresh:
            self.grad.zero_()
        if self.grad.shape[0]:
            self.grad.index_add_(0, index, rows.to(self.grad.dtype))
        self._arrived()

    def take(self, param: Tensor) -> None:
        """Autograd's hook: moves `param.grad` here."""
        if param.grad is not None:
            grad, param.grad = param.grad, None
            self.add(grad)

    def _arrived(self) -> None:
        if self.due == 0:
            raise RuntimeError(
                f"{self.slot.spec.name}: a gradient came after its {self.expected} expected contributions of this step;"
                " a layer that is run more than once per micro-batch is not supported yet"
            )
        self.due -= 1
        if self.due == 0:
            self.reducer.arrived(self.slot)


class Reducer:
    """Sums every bucket's gradients over the ranks that share it.

    begin(microbatches) before the first backward; finish() after the last gives each bucket's slice of the sum.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.sinks: list[Sink] = []
        self._buckets_of: dict[int, list[int]] = {}
        for group in layout.groups:
            for slot in group.slots:
                sink = Sink(self, slot, group.view(slot, group.grads))
                slot.param.sink = sink  # type: ignore[attr-defined]
                slot.param.register_post_accumulate_grad_hook(sink.take)
                self.sinks.append(sink)
        for number, bucket in enumerate(layout.buckets):
            for slot in bucket.slots():
                self._buckets_of.setdefault(id(slot), []).append(number)
        self._missing: list[int] = []
        self._started: list[Pending] = []

    def begin(self, microbatches: int) -> None:
        """Expects the gradients of a step."""
        for sink in self.sinks:
            sink.begin(microbatches)
        self._missing = [len(bucket.slots()) for bucket in self.layout.buckets]
        self._started = []

    def arrived(self, slot: Slot) -> None:
        """A parameter's gradient is complete; starts what has become ready, in the fixed order."""
        for number in self._buckets_of.get(id(slot), ()):  # a vocabulary shard of nothing may lie in no bucket
            self._missing[number] -= 1
        while len(self._started) < len(self._missing) and self._missing[len(self._started)] == 0:
            self._start()

    def _start(self) -> None:
        bucket = self.layout.buckets[len(self._started)]
        window = bucket.group.grads[bucket.first : bucket.last]
        if bucket.group.shard.size > 1:
            self._started.append(collectives.start_reduce_scatter(window, bucket.group.shard))
        else:
            self._started.append(_sum_over(window, _early(bucket)))

    def flush(self, chunk: int = 0) -> None:
        """No more gradients will come: what never got one counts as zero, and every bucket leaves."""
        for sink in self.sinks:
            if sink.fresh and sink.due:
                sink.grad.zero_()
            sink.due = 0
        while len(self._started) < len(self.layout.buckets):
            self._start()

    def finish(self) -> list[Tensor]:
        """Each bucket's slice of the summed gradients, in bucket order."""
        self.flush()
        slices = [pending.wait() for pending in self._started]
        return [_sum_over(part, _rest(bucket)).wait() for part, bucket in zip(slices, self.layout.buckets, strict=True)]


def _early(bucket: Bucket) -> tuple[Axis, ...]:
    """The sum that may leave while backward runs: over data ranks, whose buckets are the same.

    Tensor ranks need not cut alike (their vocabulary shards differ in size), and their layers talk on the same axis
    all the while: a sum over them that leaves at the first chance would meet another message on another rank.
    """
    first = bucket.group.sums[:1]
    return first if bucket.group.shard.size == 1 and first and first[0].label == "dp" else ()


def _rest(bucket: Bucket) -> tuple[Axis, ...]:
    """The sums that are left after the one a bucket starts with."""
    return bucket.group.sums[len(_early(bucket)) :]


def _sum_over(tensor: Tensor, axes: tuple[Axis, ...]) -> Pending:
    for axis in axes[:-1]:
        tensor = collectives.all_reduce(tensor, axis)
    return collectives.start_all_reduce(tensor, axes[-1]) if axes else collectives.done(tensor)
