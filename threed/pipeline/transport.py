"""Sends activations and gradients between pipeline stages, asynchronously.

Between two ranks, activations and gradients of each direction have a channel of their own, in which
messages keep their order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from threed.core.device import is_accelerator
from threed.distributed import collectives
from threed.distributed.collectives import Pending
from threed.distributed.topology import Axis, Topology
from threed.models import Model, options_of


class Transport(Protocol):
    """Exchanges messages with other pipeline ranks; a message is a list of tensors.

    Attributes:
        posts_ahead: before a compute action, the number of receives per channel that are posted
            although the plan has them after the action. 0 if `receive` blocks until the message
            arrives.
    """

    posts_ahead: int

    def send(
        self, tensors: Sequence[Tensor], source: int, target: int, gradients: bool = False
    ) -> list[Pending]:
        """Starts to send a message.

        The tensors must not change until the caller has waited for the returned handles.

        Args:
            tensors: the tensors of the message.
            source: pipeline rank of this process.
            target: pipeline rank of the receiver.
            gradients: whether the message has gradients, not activations.

        Returns:
            One handle per tensor.
        """

    def receive(
        self, outs: Sequence[Tensor], source: int, target: int, gradients: bool = False
    ) -> list[Pending]:
        """Starts to receive a message.

        Args:
            outs: tensors that receive the message; their shapes and dtypes must fit it.
            source: pipeline rank of the sender.
            target: pipeline rank of this process.
            gradients: whether the message has gradients, not activations.

        Returns:
            One handle per tensor; its `wait()` returns the received tensor.
        """


class Links:
    """The transport over the point-to-point links of a topology."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        # With gloo, a message takes an additional round trip if its receive is posted after its
        # send. NCCL begins to receive when the kernels that were enqueued before have run. There, a
        # second receive of the same channel waits for the first one. While it waits, it would block
        # the compute action if both streams share a hardware queue of the GPU; and the first
        # message may depend on that action.
        self.posts_ahead = 1 if is_accelerator(topology.device) else sys.maxsize

    def send(
        self, tensors: Sequence[Tensor], source: int, target: int, gradients: bool = False
    ) -> list[Pending]:
        """See `Transport`."""
        return collectives.send(tensors, self.topology.link(source, target, gradients))

    def receive(
        self, outs: Sequence[Tensor], source: int, target: int, gradients: bool = False
    ) -> list[Pending]:
        """See `Transport`."""
        return collectives.receive(outs, self.topology.link(source, target, gradients))


def is_sliced(tensor: Tensor, axis: Axis) -> bool:
    """Returns whether a tensor can be sent in slices, one from each rank of an axis.

    Every rank of the axis must have the same tensor.
    """
    return axis.size > 1 and tensor.is_floating_point() and tensor.numel() % axis.size == 0


class SlicedLinks(Links):
    """Links between stages whose outputs and inputs are the same on all tensor ranks.

    Each rank sends only its slice of a tensor, to the rank with the same tensor-parallel index in
    the other stage. The tensor ranks of the receiving stage then gather the slices (arXiv
    2104.04473, section 4.1).
    """

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self.axis = topology.axis("tp")

    def send(
        self, tensors: Sequence[Tensor], source: int, target: int, gradients: bool = False
    ) -> list[Pending]:
        """See `Transport`."""
        return super().send([self._slice(tensor) for tensor in tensors], source, target, gradients)

    def receive(
        self, outs: Sequence[Tensor], source: int, target: int, gradients: bool = False
    ) -> list[Pending]:
        """See `Transport`."""
        pending = super().receive([self._slice(out) for out in outs], source, target, gradients)
        return [self._gathered(part, out) for part, out in zip(pending, outs, strict=True)]

    def _gathered(self, pending: Pending, out: Tensor) -> Pending:
        if not is_sliced(out, self.axis):
            return pending

        def gather() -> Tensor:
            collectives.start_all_gather(pending.wait(), self.axis, out=out.view(-1)).wait()
            return out

        return Pending(gather)

    def _slice(self, tensor: Tensor) -> Tensor:
        sliced = is_sliced(tensor, self.axis)
        return tensor.reshape(-1).chunk(self.axis.size)[self.axis.index] if sliced else tensor


def links(model: Model, topology: Topology) -> Links:
    """Returns the transport for a model's stages.

    If the values that stages exchange are the same on all tensor ranks, each tensor rank sends only
    a slice of them. They are the same if the model sets `boundaries_replicated` and does not use
    sequence parallelism.
    """
    replicated = options_of(model).boundaries_replicated and not model.slicing.sequence_parallel
    return SlicedLinks(topology) if replicated and topology.tp > 1 else Links(topology)
