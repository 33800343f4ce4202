"""Decides which inputs of recomputed layers are the same on all tensor ranks, so that a rank may save a slice of them.

    inputs = ReplicatedInputs(axis, flag)
    inputs.are(place, x)             whether the input at a place is replicated; the first x decides (collective)
    sample = inputs.sample(x)        some elements, saved with the slice
    inputs.check(sample, x)          after the slices are gathered: sets the flag if x does not have these elements

A layer may pass on a tensor that differs per rank, such as the values of the rank's heads; it must be saved in full. So
the inputs of the first micro-batch are compared over the ranks. Constant inputs are saved in full too: an input that
differs per rank may be constant at first (zeros). Later inputs are checked on the device, without a host read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from threed import collectives
from threed.layers.slicing import Flag
from threed.topology import Axis

SAMPLED = 256  # elements
GOLDEN = 0.6180339887498949  # its multiples modulo 1 are spread evenly, and do not follow a dimension of the tensor
ROUNDINGS = 8  # of the largest element: by so much may replicas differ


def unlike_inputs() -> Flag:
    """Returns the flag of inputs that are not replicated."""
    return Flag(
        "inputs of recomputed layers that are not the same on all tensor ranks, though they were at first:"
        " --recompute.partition true cannot slice them; leave it out, or set `recomputable = False` on the layers"
    )


class ReplicatedInputs:
    """Finds replicated inputs.

    Args:
        axis: the tensor ranks.
        flag: set on the device for inputs that were replicated in the first micro-batch and no longer are.
    """

    def __init__(self, axis: Axis, flag: Flag) -> None:
        self.axis, self.flag = axis, flag
        self._found: dict[tuple[int, int], bool] = {}
        self._indices: dict[int, Tensor] = {}

    def are(self, place: tuple[int, int], x: Tensor) -> bool:
        """Returns whether the input at a place (layer, number of the tensor) is replicated. Collective the first
        time."""
        if place not in self._found:
            self._found[place] = self._compare(x)
        return self._found[place]

    def _compare(self, x: Tensor) -> bool:
        """Returns whether x has as many elements on all ranks, and the same, which are not constant. Collective."""
        mine = (
            self.sample(x).double()
            if x.numel()
            else torch.zeros(SAMPLED, dtype=torch.float64, device=x.device)
        )
        numel = torch.full((1,), float(x.numel()), dtype=torch.float64, device=x.device)
        rows = collectives.all_gather(torch.cat((numel, mine)), self.axis).view(self.axis.size, -1)
        other_size, samples = (rows[:, 0] != rows[0, 0]).any(), rows[:, 1:]
        constant = (samples == samples[:, :1]).all(1).any()
        return not bool(other_size | constant | _differ(samples, samples[0], x.dtype).any())

    def sample(self, x: Tensor) -> Tensor:
        """Returns some elements of x [SAMPLED], the same places for tensors of one size."""
        if x.numel() not in self._indices:
            parts = (torch.arange(SAMPLED, dtype=torch.float64, device=x.device) * GOLDEN).frac()
            self._indices[x.numel()] = (parts * x.numel()).long()
        return x.detach().reshape(-1)[self._indices[x.numel()]]

    def check(self, sample: Tensor, x: Tensor) -> None:
        """Sets the flag if x is not the tensor of the sample."""
        self.flag.note(_differ(self.sample(x).double(), sample.double(), x.dtype))


def _differ(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns where samples differ by more than rounding, bool [SAMPLED]."""
    if not dtype.is_floating_point:
        return a != b
    largest = torch.where(b.isfinite(), b, 0.0).abs().max()
    near = (a - b).abs() <= ROUNDINGS * torch.finfo(dtype).eps * largest
    return ~(near | (a == b) | (a.isnan() & b.isnan()))
