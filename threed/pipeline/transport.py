"""How activations and gradients travel between stages: asynchronously, one in-order channel per pair and direction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from threed import collectives
from threed.collectives import Pending
from threed.models import Model, options_of
from threed.topology import Axis, Topology


class Transport(Protocol):
    """Sends to and receives from other pipeline ranks: the tensors of one message together.

    posts_ahead: whether a receive may be posted long before its message is sent, and has then more to gain.
    """

    posts_ahead: bool

    def send(self, tensors: Sequence[Tensor], source: int, target: int) -> list[Pending]:
        """Begins to send from pipeline rank `source` (this one) to `target`; until waited for the tensors must stay."""

    def receive(self, outs: Sequence[Tensor], source: int, target: int) -> list[Pending]:
        """Begins to receive into `outs` from pipeline rank `source` at `target` (this one)."""


class Links:
    """The transport of a topology: its links."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        # gloo asks for a message that nobody waits for: two ways more
        self.posts_ahead = topology.device.type == "cpu"

    def send(self, tensors: Sequence[Tensor], source: int, target: int) -> list[Pending]:
        """See `Transport`."""
        return collectives.send(tensors, self.topology.link(source, target))

    def receive(self, outs: Sequence[Tensor], source: int, target: int) -> list[Pending]:
        """See `Transport`."""
        return collectives.receive(outs, self.topology.link(source, target))


def is_sliced(tensor: Tensor, axis: Axis) -> bool:
    """Whether ranks of an axis that hold the same tensor send a slice of it each."""
    return axis.size > 1 and tensor.is_floating_point() and tensor.numel() % axis.size == 0


class SlicedLinks(Links):
    """Links of stages whose boundaries are the same on all tensor ranks: each sends its slice only, to the same tensor
    rank of the other stage, where the slices are gathered on arrival (arXiv 2104.04473, section 4.1)."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self.axis = topology.axis("tp")

    def send(self, tensors: Sequence[Tensor], source: int, target: int) -> list[Pending]:
        """See `Transport`."""
        return super().send([self._part(tensor) for tensor in tensors], source, target)

    def receive(self, outs: Sequence[Tensor], source: int, target: int) -> list[Pending]:
        """See `Transport`."""
        coming = super().receive([self._part(out) for out in outs], source, target)
        return [self._whole(part, out) for part, out in zip(coming, outs, strict=True)]

    def _whole(self, coming: Pending, out: Tensor) -> Pending:
        if not is_sliced(out, self.axis):
            return coming

        def gather() -> Tensor:
            collectives.start_all_gather(coming.wait(), self.axis, out=out.view(-1)).wait()
            return out

        return Pending(gather)

    def _part(self, tensor: Tensor) -> Tensor:
        """What is sent of a tensor."""
        sliced = is_sliced(tensor, self.axis)
        return tensor.reshape(-1).chunk(self.axis.size)[self.axis.index] if sliced else tensor


def links(model: Model, topology: Topology) -> Links:
    """The transport of a model's stages. One that says `boundaries_replicated` hands on the same tensors on all tensor
    ranks where sequences are not cut."""
    same = options_of(model).boundaries_replicated and not model.slicing.sequence_parallel
    return SlicedLinks(topology) if same and topology.tp > 1 else Links(topology)
