"""Finds the inputs of recomputed layers that are the same on all tensor ranks, so that each rank
may save only a slice of such an input.

    inputs = ReplicatedInputs(axis, flag)
    inputs.is_replicated(place, x)   # whether the input x at `place` (layer, index of the tensor)
                                     # is the same on all ranks; the first call per place compares x
                                     # between ranks and is collective
    sample = inputs.sample(x)        # some elements of x, saved together with the slice
    inputs.check(sample, x)          # x, gathered from the slices: sets the flag if it differs from
                                     # the sample

A layer may return a tensor that differs between tensor ranks, such as the outputs of the rank's
attention heads. If such a tensor is the input of a recomputed layer, each rank must save it in
full. So the inputs of the first micro-batch are compared between the ranks. Constant inputs are
saved in full too: an input may be all zeros in the first micro-batch and differ between ranks
later. Inputs of later micro-batches are checked on the device, and the host does not wait for the
result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from threed.distributed import collectives
from threed.distributed.topology import Axis
from threed.layers.slicing import Flag

# The number of elements of an input that are compared between ranks.
SAMPLED = 256
# The k-th sampled element has the index (k * GOLDEN modulo 1) * (number of elements), rounded down.
# These indices are spread evenly, and do not align with the tensor's dimensions.
GOLDEN = 0.6180339887498949
# Two replicas of an input count as equal if their elements differ by at most this number times the
# dtype's eps times the largest element.
ROUNDINGS = 8


def unlike_inputs() -> Flag:
    """Returns the flag to pass to `ReplicatedInputs`; its message describes the fix."""
    return Flag(
        "inputs of recomputed layers that differ between tensor ranks, but were equal in the first micro-batch:"
        " --recompute.partition true cannot slice them; leave it out, or set `recomputable = False` on the layers"
    )


class ReplicatedInputs:
    """Finds the inputs that are the same on all tensor ranks ("replicated").

    Args:
        axis: the tensor ranks, between which inputs are compared.
        flag: set on the device if an input that was replicated in the first micro-batch is not
            replicated in a later one.
    """

    def __init__(self, axis: Axis, flag: Flag) -> None:
        self.axis, self.flag = axis, flag
        self._replicated: dict[tuple[int, int], bool] = {}
        self._indices: dict[int, Tensor] = {}

    def is_replicated(self, place: tuple[int, int], x: Tensor) -> bool:
        """Returns whether an input is replicated.

        The first call for a `place` compares x between the ranks, which is collective. Later calls
        return the result of the first call.

        Args:
            place: (index of the layer, index of the tensor in the layer's input).
            x: the input tensor on this rank, of any shape.
        """
        if place not in self._replicated:
            self._replicated[place] = self._compare(x)
        return self._replicated[place]

    def _compare(self, x: Tensor) -> bool:
        """Returns whether x is equal on all ranks in size and sampled values, and not constant.

        Collective.
        """
        own_sample = (
            self.sample(x).double()
            if x.numel()
            else torch.zeros(SAMPLED, dtype=torch.float64, device=x.device)
        )
        numel = torch.full((1,), float(x.numel()), dtype=torch.float64, device=x.device)
        rows = collectives.all_gather(torch.cat((numel, own_sample)), self.axis).view(
            self.axis.size, -1
        )
        sizes_differ, samples = (rows[:, 0] != rows[0, 0]).any(), rows[:, 1:]
        constant = (samples == samples[:, :1]).all(1).any()
        return not bool(sizes_differ | constant | _differ(samples, samples[0], x.dtype).any())

    def sample(self, x: Tensor) -> Tensor:
        """Returns `SAMPLED` elements of x, at positions that depend only on the size of x."""
        if x.numel() not in self._indices:
            parts = (torch.arange(SAMPLED, dtype=torch.float64, device=x.device) * GOLDEN).frac()
            self._indices[x.numel()] = (parts * x.numel()).long()
        return x.detach().reshape(-1)[self._indices[x.numel()]]

    def check(self, sample: Tensor, x: Tensor) -> None:
        """Sets the flag if x differs from the input that was saved.

        Args:
            sample: result of `sample` for the input, computed before the input was sliced.
            x: the input, gathered from the slices.
        """
        self.flag.note(_differ(self.sample(x).double(), sample.double(), x.dtype))


def _differ(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a mask of the elements of `a` that differ from `b` by more than rounding errors.

    Args:
        a: fp64 tensor.
        b: fp64 tensor of a shape that broadcasts to the shape of `a`.
        dtype: dtype of the input, which determines the size of rounding errors.

    Returns:
        A bool tensor of the shape of `a`.
    """
    if not dtype.is_floating_point:
        return a != b
    largest = torch.where(b.isfinite(), b, 0.0).abs().max()
    near = (a - b).abs() <= ROUNDINGS * torch.finfo(dtype).eps * largest
    return ~(near | (a == b) | (a.isnan() & b.isnan()))
