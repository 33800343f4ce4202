"""The stream on which gradients are reduced, and the limit of memory that reductions may hold.

On an accelerator, every reduction is launched, waited for and added to its slice on the reduction
stream. So the stream of the backward does not wait for a reduction that it has just launched:

    launch    the reduction stream waits for the backward, which has filled the window
    wait      the reduction stream waits for the collective and adds the sum to the slice; an event
              is recorded
    reuse     the stream of the backward waits for the event, and the window's memory is released
    join      at the end of a step, the stream of the backward waits for the reduction stream

Windows are reused in launch order, when the windows of finished reductions and the next one exceed
the limit. The limit is the gradients of a layer, or of the layer before it in the backward if that
layer is larger. At most `BUCKETS_IN_FLIGHT` reductions, and as many copies to the host, are not
finished; their windows come in addition. So a layer never waits for one of its own reductions, and the memory does not grow
with the number of layers. Under stages 0 and 1 windows are never released, so there is no limit.

On a CPU, there is only one stream, and `Reductions` releases a window when it has waited for its
reduction.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from threed.core.device import copy_stream, current_stream, is_accelerator, on_stream
from threed.distributed.topology import default_device
from threed.zero.layout import CPU, Bucket, Layout


class ReductionStream:
    """Runs reductions on a separate stream, and releases the windows of finished reductions.

    Args:
        layout: parameters and their buckets.
        release: function that releases the memory of a window for reuse.

    Attributes:
        needed: whether there is a separate stream or a limit; False on a CPU.
    """

    def __init__(self, layout: Layout, release: Callable[[Tensor], None]) -> None:
        communicates = any(b.group.shard.size > 1 or b.group.sums for b in layout.buckets)
        device = layout.buckets[0].group.params.device if communicates else CPU
        self._stream = copy_stream(device, "reduce") if is_accelerator(device) else None
        # a memory forecast runs on the meta device
        limited = is_accelerator(default_device() if device.type == "meta" else device)
        limited &= layout.policy.slices_gradients
        self._limits = limits(layout) if limited else Counter[int]()
        self.needed = self._stream is not None or limited
        self._release = release
        # windows of finished reductions, in launch order; with the event of the reduction, and the
        # stream on which the window was filled
        self._finished = deque[tuple[Tensor, torch.Event | None, torch.Stream | None]]()
        self._bytes = 0  # bytes of these windows

    @contextmanager
    def current(self) -> Iterator[torch.Stream | None]:
        """Context manager that makes the reduction stream the current stream.

        The reduction stream first waits for the work that is enqueued on the current stream.

        Yields:
            The stream that was current before; None for a CPU.
        """
        if self._stream is None:
            yield None
            return
        before = current_stream(self._stream.device)
        with on_stream(self._stream):
            yield before

    def release_later(self, window: Tensor, filled_on: torch.Stream | None) -> None:
        """Releases a window once its reduction, which the current stream has finished, has run.

        Args:
            window: the window. If there is no limit, it is released immediately.
            filled_on: the stream on which the window was filled; None for a CPU.
        """
        if not self._limits:
            self._release(window)
            return
        event = None if self._stream is None else current_stream(window.device).record_event()
        self._finished.append((window, event, filled_on))
        self._bytes += window.nbytes

    def make_room(self, bucket: Bucket) -> None:
        """Releases windows until the limit permits to launch the reduction of a bucket.

        The current stream waits for the reductions of the windows that are released.
        """
        size = (bucket.last - bucket.first) * bucket.grad.dtype.itemsize
        while self._finished and self._bytes + size > self._limits[bucket.earliest_unit]:
            self._release_oldest()

    def _release_oldest(self) -> None:
        window, event, filled_on = self._finished.popleft()
        self._bytes -= window.nbytes
        if event is not None and filled_on is not None:
            # The memory belongs to the stream on which the window was filled. If a forward and a
            # backward run on two streams, this may be the stream on which the forward runs now.
            for stream in {filled_on, current_stream(window.device)}:
                stream.wait_event(event)
        self._release(window)

    def join(self) -> None:
        """Makes the current stream wait for all reductions, and releases their windows."""
        if self._stream is not None:
            current_stream(self._stream.device).wait_stream(self._stream)
        while self._finished:
            self._release_oldest()


def limits(layout: Layout) -> Counter[int]:
    """Returns the limit of bytes of gradients in flight, for each unit.

    It applies to a launch during the backward of the unit, and includes the bucket that is
    launched.
    """
    sizes = Counter[int]()  # bytes of the buckets that are complete after a unit, in backward order
    for bucket in layout.buckets:
        nbytes = (bucket.last - bucket.first) * layout.policy.grad_dtype.itemsize
        sizes[bucket.earliest_unit] += nbytes
    previous = [0, *sizes.values()]
    return Counter(dict(zip(sizes, map(max, sizes.values(), previous), strict=True)))
