"""How activations and gradients travel between stages: asynchronously, one in-order channel per pair and direction."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from threed import collectives
from threed.collectives import Pending
from threed.topology import Topology


class Transport(Protocol):
    """Sends to and receives from other pipeline ranks."""

    def send(self, tensor: Tensor, source: int, target: int) -> Pending:
        """Begins to send from pipeline rank `source` (this one) to `target`; until waited for the tensor must stay."""

    def receive(self, out: Tensor, source: int, target: int) -> Pending:
        """Begins to receive into `out` from pipeline rank `source` at `target` (this one)."""


class Links:
    """The transport of a topology: its links."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def send(self, tensor: Tensor, source: int, target: int) -> Pending:
        """See `Transport`."""
        return collectives.send(tensor, self.topology.link(source, target))

    def receive(self, out: Tensor, source: int, target: int) -> Pending:
        """See `Transport`."""
        return collectives.receive(out, self.topology.link(source, target))
