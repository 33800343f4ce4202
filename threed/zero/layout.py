"""Units, groups, buckets: where every parameter of a pipeline stage lies, and which rank owns which slice of it.

    layout = build(units, tied, topology, policy)
    unit    a pipeline layer, or a module of a wrapped model; its parameters are gathered and released together
    group   a flat buffer of parameters with the same options (rate, decay) and the same axes to sum gradients over
    bucket  a window of at most `bucket-mib` on a group; it may cut parameters
    slice   the part of a bucket that this rank owns: the r-th of its shard group S
    portion the part of a slice that this rank updates: all of it, unless other pipeline ranks have the same slice and
            all of them share the optimizer's states (bidirectional schedules)

Parameters lie in backward order, so that buckets complete one after the other while backward runs. The axes are those
of a group, not of a parameter: so a bucket needs one collective per axis, one call of the optimizer's rule and one
decision about which rank counts it in the norm. With uneven vocabulary shards, only parameters that have one shape on
all tensor ranks may share a buffer with a tensor-parallel sum: else slices would not align.

The ZeRO stages (arXiv 1910.02054) differ in what of a group exists in full. Under stage 3 each unit has groups of its
own, so that one can be whole while the others are slices; small parameters stay whole, as under stage 2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from threed.layers.contract import contract
from threed.memory.tiers import Drive, InMemory, Storage, Tier, memory_tier
from threed.ops.adam import Adam
from threed.ops.update import Rule
from threed.planner.cut import Tie
from threed.sharding import Piece, ShardSpec, attach, spec_of, split
from threed.topology import Axis, Topology, alone

CPU = torch.device("cpu")
ALIGN = 32  # elements: every parameter starts on a 64-byte line or better
PIECES = 8  # a group has at least so many buckets,
SMALLEST = 2**18  # unless they had fewer elements


@dataclass(frozen=True)
class GroupOptions:
    """The options of a parameter group: its rule, a factor on the learning rate, and the weight decay."""

    rule: Rule = field(default_factory=Adam)
    factor: float = 1.0
    decay: float = 0.0


@dataclass(frozen=True)
class DataAxes:
    """The axes of the data ranks that hold the same parameters.

    Attributes:
        shard: the axis S that slices are spread over.
        replicas: the axis R of ranks that hold the same slice.
        gather: S with the communicator for gathers.
    """

    shard: Axis
    replicas: Axis
    gather: Axis


@dataclass(frozen=True)
class Policy:
    """How a stage's parameters are laid out: which ranks have slices, and where they are stored.

    With a tier, parameters and states are slices also on one rank.

    Attributes:
        stage: of ZeRO, 0 to 3.
        data: the axes of parameters that all data ranks hold.
        bucket_bytes: the largest size of a bucket.
        param_dtype: of the layers.
        grad_dtype: of the summed gradients.
        resident: parameters with fewer elements stay whole under stage 3.
        options: returns the options of a parameter's group.
        arena: gradient buffers are kept from step to step, also under stage 3.
        params_tier: stores slices of parameters under stage 3; None for the device.
        optimizer_tier: stores the optimizer's states and, from stage 2 on, slices of gradients;
            None for the device.
        host: where a tier's values are worked on.
        states_once: pipeline ranks that hold the same parameters share the optimizer's states of
            them, each a part; not with tiers.
        versions: 2 if a step begins before the update of the one before it: of parameters, and a
            copy of the slices of gradients.
        early: updates begin in the backward, and write to second regions of the drive
            (`threed.zero.early`).
        delayed: an update runs during the next step, which uses the parameters from before it.
        dealt: the axes of the others, by `ShardSpec.over`.
    """

    stage: int
    data: DataAxes
    bucket_bytes: int
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    resident: int = 0
    options: Callable[[ShardSpec], GroupOptions] = lambda spec: GroupOptions()
    arena: bool = False
    params_tier: Tier | None = None
    optimizer_tier: Tier | None = None
    host: torch.device = CPU
    states_once: bool = False
    versions: int = 1
    early: bool = False
    delayed: bool = False
    dealt: Mapping[str, DataAxes] = field(default_factory=dict)

    def axes(self, over: str | None) -> DataAxes:
        """Returns the data axes of parameters with this `ShardSpec.over`."""
        return self.data if over is None else self.dealt[over]

    @property
    def drives(self) -> set[Drive]:
        """The drives among the tiers."""
        return {tier for tier in (self.params_tier, self.optimizer_tier) if isinstance(tier, Drive)}

    @property
    def slices_gradients(self) -> bool:
        """Whether gradients exist in full only bucket by bucket (stages 2 and 3)."""
        return self.stage >= 2 and (self.data.shard.size > 1 or self.optimizer_tier is not None)

    def slices_parameter(self, param: nn.Parameter) -> bool:
        """Returns whether a parameter is whole only while it is used (stage 3)."""
        spec = spec_of(param)
        spread = self.axes(spec.over).shard.size > 1 or self.params_tier is not None
        whole = param.numel() * spec.tile[1]  # of the whole matrix, for a tile
        return self.stage == 3 and spread and whole >= max(self.resident, 1)


@dataclass(frozen=True)
class GroupKey:
    """The properties that all parameters of a group share."""

    options: GroupOptions
    trainable: bool
    replicated: str | None
    partial: str | None
    tied: tuple[int, ...]  # the pipeline stages that hold a copy, if several do
    units: tuple[int, ...] | None  # the units that gather it, where it is kept as slices
    layers: tuple[int, ...] = ()  # of a tied and sliced one: all layers of the model that use it
    # the name of a tile, which is gathered by itself while its layer uses it
    tile: str | None = None
    chunks: tuple[int, ...] = (0,)  # this rank's chunks of the model that use it
    # of a tied one: the chunks of each of these stages that use it
    tied_chunks: tuple[tuple[int, ...], ...] = ()
    over: str | None = None


@dataclass(eq=False)
class Slot:
    """A parameter and its place in its group: elements [first, last) of the flat buffer.

    places: the modules and attributes that hold it, one for each use. units: the numbers of the units (layers) that use
    it. varies: whether one of these declares that it does not always run equally often. placeholder: the tensor that a
    sharded parameter points to while it is not gathered.
    """

    param: nn.Parameter
    spec: ShardSpec
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    units: list[int] = field(default_factory=list)
    varies: bool = False
    first: int = 0
    last: int = 0
    shape: torch.Size = field(init=False)
    placeholder: Tensor | None = None

    def __post_init__(self) -> None:
        self.shape = self.param.shape

    def settle(self, storage: Tensor) -> None:
        """Points the parameter at its view of a flat buffer, in every place that holds it.

        A parameter with values stays the same object, for others may refer to it; one on the meta device is replaced.
        """
        # `.data` has a version counter of its own. Otherwise the gather of another bucket of the same buffer, when it
        # ends during the forward, makes autograd believe that a weight it has saved was changed.
        if self.param.device.type != "meta":
            point(self.param, storage)
            return
        self.param = attach(nn.Parameter(storage.data, self.param.requires_grad), self.spec)
        for module, attribute in self.places:
            setattr(module, attribute, self.param)


@dataclass(frozen=True)
class Run:
    """A contiguous part of a piece in a rank's portion of a bucket: elements [first, last) of the piece, at `offset` of
    the portion."""

    piece: Piece
    first: int
    last: int
    offset: int

    def pieces(self) -> Iterator[Piece]:
        """Yields the boxes of the global tensor that the run consists of; offsets are those in the portion."""
        return split(self.piece, self.first, self.last, self.offset)


@dataclass(eq=False)
class Bucket:
    """The window [first, last) of a group's buffer; this rank owns [own_first, own_last) of it, and updates
    [portion_first, portion_last).

    storage: holds this rank's slice of the parameters, in the compute dtype. grad: holds its slice of the gradients.
    portion, portion_grad: what of these it updates; they are the same storages where that is all.
    """

    group: Group
    first: int
    last: int
    own_first: int
    own_last: int
    portion_first: int
    portion_last: int
    storage: Storage
    grad: Storage
    portion: Storage
    portion_grad: Storage

    @property
    def share(self) -> int:
        """Elements of this rank's slice."""
        return self.own_last - self.own_first

    @property
    def updates(self) -> int:
        """Elements of it that this rank updates."""
        return self.portion_last - self.portion_first

    @property
    def own(self) -> Tensor | None:
        """This rank's slice of the parameters, if it is in memory."""
        return self.storage.tensor if isinstance(self.storage, InMemory) else None

    def runs(self, first: int | None = None, last: int | None = None) -> Iterator[Run]:
        """Yields the runs of this rank's portion of the slice, in the order of the buffer.

        Padding belongs to no run.

        Args:
            first, last: Elements of the group that limit the runs; by default those of the portion.
        """
        first = self.portion_first if first is None else first
        last = self.portion_last if last is None else last
        for slot in self.group.slots:
            for piece in slot.spec.pieces:
                at = slot.first + piece.offset
                lo, hi = max(at, first), min(at + piece.numel, last)
                if lo < hi:
                    yield Run(piece, lo - at, hi - at, lo - self.portion_first)

    @functools.cached_property
    def earliest_unit(self) -> int:
        """The first unit that uses a parameter of this bucket; -1 if none does."""
        return min((min(slot.units) for slot in self.slots()), default=-1)

    def part(self, slot: Slot, window: Tensor) -> Tensor:
        """Returns the parameter's part of a tensor of the bucket's elements [last - first]."""
        return window[max(slot.first - self.first, 0) : slot.last - self.first]

    def slots(self) -> list[Slot]:
        """Returns the parameters that lie in this bucket, wholly or in part."""
        return [
            slot for slot in self.group.slots if slot.first < self.last and slot.last > self.first
        ]


@dataclass(eq=False)
class Group:
    """A flat buffer of parameters [numel], in the compute dtype.

    Attributes:
        shard: the axis S that slices are spread over.
        gather: S with the communicator for gathers.
        sums: the axes that a slice's gradient is summed over after that.
        holders: the pipeline ranks that each update a portion of the same slice; the last of `sums`
            if they are several.
        copies: the axes over which ranks hold the same portion.
        granule: every bucket has a multiple of so many elements.
        params: the buffer; of a sliced group a new one for every gather, and [0] between gathers.
        previous: the buffer of the version before, if there are two versions; else `params`.
        grads: all gradients, in their dtype, if they are kept in full, else [0].
    """

    key: GroupKey
    slots: list[Slot]
    numel: int
    shard: Axis
    gather: Axis
    sums: tuple[Axis, ...]
    holders: Axis
    copies: tuple[Axis, ...]
    granule: int
    params: Tensor
    previous: Tensor
    grads: Tensor
    buckets: list[Bucket] = field(default_factory=list)

    @property
    def owned(self) -> bool:
        """Whether this rank's portion, among its copies, is the one that counts (in the gradient norm, say)."""
        return all(axis.index == 0 for axis in self.copies)

    @property
    def sliced(self) -> bool:
        """Whether its parameters are whole only while they are used."""
        return self.key.units is not None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the parameters take between steps."""
        held = [self.params] if not self.sliced else [bucket.own for bucket in self.buckets]
        held += [self.previous] if self.previous is not self.params else []
        return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)

    def view(self, slot: Slot, buffer: Tensor) -> Tensor:
        """Returns the parameter's part of a flat buffer, in its shape."""
        return buffer[slot.first : slot.last].view(slot.shape)

    def allocate(self) -> None:
        """Allocates `params` with undefined values, and points the parameters to views of it."""
        self.params = torch.empty(self.numel, dtype=self.params.dtype, device=self.params.device)
        for slot in self.slots:
            point(slot.param, self.view(slot, self.params))

    def turn(self) -> None:
        """Exchanges the buffers of the two versions."""
        self.params, self.previous = self.previous, self.params

    def free(self) -> None:
        """Drops `params` and points the parameters to their placeholders. The memory is freed with its last view."""
        self.params = self.params.new_empty(0)
        for slot in self.slots:
            assert slot.placeholder is not None
            point(slot.param, slot.placeholder)


@dataclass(eq=False)
class Layout:
    """All groups of a stage, and the buckets of trainable parameters in the order in which backward completes them.

    frozen: the buckets of parameters that are not trained.
    """

    policy: Policy
    groups: list[Group]
    buckets: list[Bucket]
    frozen: list[Bucket]

    @property
    def slots(self) -> list[Slot]:
        """Every parameter of the stage, once."""
        return [slot for group in self.groups for slot in group.slots]

    @property
    def slices_parameters(self) -> bool:
        """Whether some parameters are whole only while they are used."""
        return any(group.sliced for group in self.groups)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that parameters, and a drive's buffers, take between steps."""
        buffers = sum(drive.nbytes * drive.count for drive in self.policy.drives)
        return buffers + sum(group.nbytes for group in self.groups)

    @property
    def parameters(self) -> int:
        """Elements of all parameters, padding not counted."""
        return sum(slot.param.numel() for slot in self.slots)


class HasModules(Protocol):
    """A unit: a layer, or some modules of a wrapped one."""

    def modules(self) -> Iterator[nn.Module]: ...


def point(param: nn.Parameter, values: Tensor) -> None:
    """Sets the data of a parameter without `__torch_function__`; the object and its autograd history are unchanged."""
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.data.__set__(param, values.data)  # type: ignore[attr-defined]


def collect(units: Sequence[HasModules]) -> list[Slot]:
    """Returns every parameter of the units once, in forward order, with the units that use it.

    Parameters with the same name are one (tied weights).
    """
    found: dict[str, Slot] = {}
    for number, unit in enumerate(units):
        for module in unit.modules():
            for attribute, param in module.named_parameters(recurse=False, remove_duplicate=False):
                spec = spec_of(param)
                slot = found.setdefault(spec.name, Slot(param, spec))
                slot.places.append((module, attribute))
                slot.units.append(number)
                slot.varies |= isinstance(unit, nn.Module) and contract(unit).runs_vary
    return list(found.values())


def build(
    units: Sequence[HasModules], tied: Mapping[str, Tie], topology: Topology, policy: Policy,
    chunks: Sequence[int] | None = None,
) -> Layout:  # fmt: skip
    """Lays the parameters of a stage out, allocates their buffers, and points every parameter into them.

    units: the rank's layers, on the meta device. chunks: the chunk of the model that each is in, by default all in one;
    chunks have buffers of their own, since each is reduced when its own backwards have ended. tied: by name, the
    parameters that several stages hold. Their groups come last. All stages group them in the same way and order, by the
    chunks of every stage: so slices align, and sums over stages are called in the same order.
    """
    keys: dict[GroupKey, list[Slot]] = {}
    for slot in _backward_order(collect(units), tied):
        spec = slot.spec
        trainable = slot.param.requires_grad
        sliced = policy.slices_parameter(slot.param)
        tie = tied.get(spec.name)
        key = GroupKey(
            policy.options(spec) if trainable else GroupOptions(), trainable, spec.replicated,
            spec.partial if trainable else None, tie.stages if tie else (),
            tuple(sorted(set(slot.units))) if sliced else None, tie.layers if tie and sliced else (),
            spec.name if sliced and spec.tile[1] > 1 else None,
            (0,) if chunks is None else tuple(sorted({chunks[unit] for unit in slot.units})),
            tie.chunks if tie else (), spec.over,
        )  # fmt: skip
        keys.setdefault(key, []).append(slot)
    groups = [_group(key, slots, topology, policy) for key, slots in keys.items()]
    trained = [bucket for group in groups if group.key.trainable for bucket in group.buckets]
    frozen = [bucket for group in groups if not group.key.trainable for bucket in group.buckets]
    # A bucket is complete when the backward of its earliest unit is.
    trained.sort(key=lambda bucket: -bucket.earliest_unit)
    return Layout(policy, groups, trained, frozen)


def _backward_order(slots: list[Slot], tied: Mapping[str, Tie]) -> list[Slot]:
    """Returns slots in the order in which backward completes them, then the tied ones, the last tie first."""
    shared = [slot for slot in slots if slot.spec.name in tied]
    own = [slot for slot in slots if slot.spec.name not in tied]
    return [*reversed(own), *sorted(shared, key=lambda slot: -tied[slot.spec.name].number)]


def _group(key: GroupKey, slots: list[Slot], topology: Topology, policy: Policy) -> Group:
    data, holders = policy.axes(key.over), alone("pp")
    copies = [data.replicas]
    sums = [data.replicas, *([topology.axis(key.partial)] if key.partial else [])]
    copies += [topology.axis(key.replicated)] if key.replicated else []
    if key.tied:
        same = topology.stages(key.tied)
        sums.append(same)
        if policy.states_once and key.trainable:
            holders = same
        else:
            copies.append(same)
    end = 0
    for slot in slots:
        slot.first, slot.last = end, end + slot.param.numel()
        end += -(-slot.param.numel() // ALIGN) * ALIGN
    granule = data.shard.size * holders.size * ALIGN  # so that all portions are aligned
    numel = max(1, -(-end // granule)) * granule
    several = tuple(axis for axis in sums if axis.size > 1)
    axes = data.shard, data.gather, several, holders, tuple(copies)
    buffers = _buffers(key, numel, topology.device, policy)
    group = Group(key, slots, numel, *axes, granule, *buffers)
    for slot in slots:
        if group.sliced:
            slot.placeholder = _placeholder(slot, policy.param_dtype, topology.device)
            slot.settle(slot.placeholder)
        else:
            slot.settle(group.view(slot, group.params))
    group.buckets.extend(_buckets(group, topology.device, policy))
    return group


def _buffers(
    key: GroupKey, numel: int, device: torch.device, policy: Policy
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates `params`, `previous` and `grads` of a group."""
    whole = numel if key.units is None else 0
    params = torch.zeros(whole, dtype=policy.param_dtype, device=device)
    twice = key.trainable and policy.versions > 1
    previous = torch.zeros_like(params) if twice else params
    full = numel if key.trainable and not policy.slices_gradients else 0
    return params, previous, torch.zeros(full, dtype=policy.grad_dtype, device=device)


def _placeholder(slot: Slot, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor of the parameter's shape with one NaN as its storage, which torch refuses to write."""
    if device.type == "meta":
        return torch.empty(slot.shape, dtype=dtype, device=device)
    nan = torch.full((), torch.nan, dtype=dtype, device=device)
    torch._C._set_throw_on_mutable_data_ptr(nan)
    return nan.expand(slot.shape)


def _buckets(group: Group, device: torch.device, policy: Policy) -> Iterator[Bucket]:
    """Cuts a group into buckets, and allocates the storages of this rank's slices."""
    shard, holders, memory = group.shard, group.holders, memory_tier(device)
    params, optimizer = policy.params_tier or memory, policy.optimizer_tier or memory
    apart = group.key.trainable and (policy.slices_gradients or policy.versions > 1)
    elements = max(1, policy.bucket_bytes // policy.grad_dtype.itemsize)
    if group.key.units is None:  # a unit's groups are small already
        elements = min(elements, max(group.numel // PIECES, SMALLEST))
    step = max(group.granule, elements // group.granule * group.granule)
    for first in range(0, group.numel, step):
        last = min(first + step, group.numel)
        share = (last - first) // shard.size
        part = share // holders.size
        own = slice(first + shard.index * share, first + (shard.index + 1) * share)
        portion = slice(holders.index * part, (holders.index + 1) * part)
        storage = params(share, policy.param_dtype) if group.sliced else InMemory(group.params[own])
        grad = optimizer(share, policy.grad_dtype) if apart else InMemory(group.grads[own])
        yield Bucket(
            group, first, last, own.start, own.stop, own.start + portion.start, own.start + portion.stop,
            storage, grad, _portion(storage, portion, holders), _portion(grad, portion, holders),
        )  # fmt: skip


def _portion(storage: Storage, portion: slice, holders: Axis) -> Storage:
    """Returns the part of a slice's storage that this rank updates."""
    return storage if holders.size == 1 else InMemory(storage.fetch().wait()[portion])
