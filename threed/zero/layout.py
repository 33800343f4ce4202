"""Units, groups, buckets: where every parameter of a pipeline stage lies, and who owns which slice of it.

    layout = Layout.build(stage layers, ...)
    group   a flat buffer of parameters that are treated alike: same decay, same axes to sum gradients over
    bucket  a window of at most `bucket-mib` on a group; it may cut parameters
    slice   the part of a bucket that this rank owns: the r-th of its shard group S

Parameters lie in backward order, so that buckets complete one after the other while backward runs. What DESIGN calls
the axes of a run are here properties of a group: a bucket then needs one collective per axis, one optimizer launch and
one decision about who counts it in the norm. And with uneven vocabulary shards only parameters of one shape on all
tensor ranks may share a buffer with a tensor-parallel sum: else slices would not line up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from threed.sharding import Piece, ShardSpec, attach, spec_of
from threed.topology import Axis, Topology

ALIGN = 32  # elements: every parameter starts on a 64-byte line or better


@dataclass(frozen=True)
class Kind:
    """What parameters must have in common to share a flat buffer."""

    decay: bool
    replicated: str | None
    partial: str | None
    tied: tuple[int, ...]  # the pipeline stages that hold a copy of it, when there are several


@dataclass(eq=False)
class Slot:
    """A parameter and its place in its group: elements [first, last) of the flat buffer.

    places: the modules and attributes it sits in, one a use. units: the numbers of the units (layers) that use it.
    """

    param: nn.Parameter
    spec: ShardSpec
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    units: list[int] = field(default_factory=list)
    first: int = 0
    last: int = 0

    def settle(self, storage: Tensor) -> None:
        """Gives the parameter its storage, in every place it sits: from meta to a view of a flat buffer."""
        # `.data`: a version counter of its own. Else a gather that ends during the forward pass, of another bucket of
        # the same buffer, makes autograd think that a weight it has saved was changed.
        self.param = attach(nn.Parameter(storage.data, self.param.requires_grad), self.spec)
        for module, attribute in self.places:
            setattr(module, attribute, self.param)


@dataclass(frozen=True)
class Run:
    """A stretch of one piece in a bucket slice: elements [first, last) of the piece, at `offset` of the slice."""

    piece: Piece
    first: int
    last: int
    offset: int


@dataclass(eq=False)
class Bucket:
    """The window [first, last) of a group's buffer; this rank owns [own_first, own_last) of it."""

    group: Group
    first: int
    last: int
    own_first: int
    own_last: int

    def runs(self) -> Iterator[Run]:
        """The runs of this rank's slice, in storage order; padding belongs to none."""
        for slot in self.group.slots:
            for piece in slot.spec.pieces:
                at = slot.first + piece.offset
                lo, hi = max(at, self.own_first), min(at + piece.numel, self.own_last)
                if lo < hi:
                    yield Run(piece, lo - at, hi - at, lo - self.own_first)

    def slots(self) -> list[Slot]:
        """The parameters that lie in this bucket, wholly or in part."""
        return [slot for slot in self.group.slots if slot.first < self.last and slot.last > self.first]


@dataclass(eq=False)
class Group:
    """A flat buffer: parameters in the compute dtype and gradients in the gradient dtype, [numel] each.

    shard: the axis S that slices are spread over. sums: the axes a slice's gradient is summed over after that.
    owned: whether this rank's slice is the one copy that counts (gradient norm, checkpoint).
    """

    kind: Kind
    slots: list[Slot]
    numel: int
    shard: Axis
    sums: tuple[Axis, ...]
    owned: bool
    params: Tensor = field(init=False)
    grads: Tensor = field(init=False)
    buckets: list[Bucket] = field(init=False)

    def view(self, slot: Slot, buffer: Tensor) -> Tensor:
        """The parameter's part of a flat buffer, in its shape."""
        return buffer[slot.first : slot.last].view(slot.param.shape)


@dataclass(eq=False)
class Layout:
    """All groups of a stage, and their buckets in the order in which backward completes them."""

    groups: list[Group]
    buckets: list[Bucket]

    @property
    def slots(self) -> list[Slot]:
        """Every parameter of the stage, once."""
        return [slot for group in self.groups for slot in group.slots]

    @property
    def parameters(self) -> int:
        """Elements of all parameters, padding not counted."""
        return sum(slot.param.numel() for slot in self.slots)


def collect(units: Sequence[nn.Module]) -> list[Slot]:
    """Every parameter of the units once, in forward order, with the units that use it.

    Parameters with the same name are one (tied weights).
    """
    found: dict[str, Slot] = {}
    for number, unit in enumerate(units):
        for module in unit.modules():
            for attribute, param in list(module.named_parameters(recurse=False)):
                spec = spec_of(param)
                slot = found.setdefault(spec.name, Slot(param, spec))
                slot.places.append((module, attribute))
                slot.units.append(number)
    return list(found.values())


def build(
    units: Sequence[nn.Module],
    tied: Mapping[str, tuple[int, ...]],
    topology: Topology,
    *,
    shards: bool,
    bucket_bytes: int,
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
) -> Layout:
    """Lays the parameters of a stage out, allocates their buffers, and points every parameter into them.

    units: the stage's layers, on the meta device. tied: parameter name -> the stages that hold it, where there are
    several. shards: whether slices are spread over the data ranks (ZeRO-1) or every rank keeps all (ZeRO-0). Groups
    come in a fixed order on every rank.
    """
    kinds: dict[Kind, list[Slot]] = {}
    for slot in reversed(collect(units)):
        spec = slot.spec
        kind = Kind(spec.decay, spec.replicated, spec.partial, tied.get(spec.name, ()))
        kinds.setdefault(kind, []).append(slot)
    groups = [_group(kind, slots, topology, shards) for kind, slots in kinds.items()]
    for group in groups:
        _allocate(group, topology.device, param_dtype, grad_dtype)
        group.buckets = list(_windows(group, max(1, bucket_bytes // grad_dtype.itemsize)))
    return Layout(groups, _completion_order(groups))


def _group(kind: Kind, slots: list[Slot], topology: Topology, shards: bool) -> Group:
    data = topology.axis("dp")
    here = Axis("dp", (topology.rank,), 0, None, topology.traffic)
    shard, sums = (data, []) if shards else (here, [data])
    sums += [topology.axis(kind.partial)] if kind.partial else []
    copies = [topology.axis(kind.replicated)] if kind.replicated else []
    if kind.tied:
        same = topology.stages(kind.tied)
        sums.append(same)
        copies.append(same)
    end = 0
    for slot in slots:
        slot.first, slot.last = end, end + slot.param.numel()
        end += -(-slot.param.numel() // ALIGN) * ALIGN
    granule = shard.size * ALIGN
    owned = all(axis.index == 0 for axis in copies) and (shards or data.index == 0)
    return Group(kind, slots, max(granule, -(-end // granule) * granule), shard, tuple(sums), owned)


def _allocate(group: Group, device: torch.device, param_dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    group.params = torch.zeros(group.numel, dtype=param_dtype, device=device)
    group.grads = torch.zeros(group.numel, dtype=grad_dtype, device=device)
    for slot in group.slots:
        slot.settle(group.view(slot, group.params))


def _windows(group: Group, elements: int) -> Iterator[Bucket]:
    granule = group.shard.size * ALIGN
    step = max(granule, elements // granule * granule)
    for first in range(0, group.numel, step):
        last = min(first + step, group.numel)
        share = (last - first) // group.shard.size
        own = first + group.shard.index * share
        yield Bucket(group, first, last, own, own + share)


def _completion_order(groups: list[Group]) -> list[Bucket]:
    """Buckets by the earliest unit they hold, last first: a bucket is complete when its earliest unit's backward is."""
    buckets = [bucket for group in groups for bucket in group.buckets]
    earliest = [min((min(slot.units) for slot in bucket.slots()), default=-1) for bucket in buckets]
    return [buckets[i] for i in sorted(range(len(buckets)), key=lambda i: -earliest[i])]
