"""Units, groups and buckets: the memory layout of a pipeline stage's parameters.

    layout = build(units, tied, topology, policy)

    unit     a pipeline layer, or a module of a wrapped model; its parameters are gathered and
             released together
    group    a flat buffer of parameters with the same options (learning rate, weight decay) and the
             same axes to sum gradients over
    bucket   a range of at most `zero.bucket-mib` in a group's buffer, which is reduced by one
             collective per axis; a parameter may span several buckets
    slice    the part of a bucket that this rank owns: each bucket is split evenly over the ranks of
             the shard group S, and the r-th rank of S owns the r-th part
    portion  the part of a slice that this rank updates. Usually this is the full slice. With
             bidirectional schedules two pipeline ranks have the same slice, and each keeps the
             optimizer states of one portion

Parameters are stored in backward order, so that buckets complete one after the other during the
backward. The gradients of all parameters of a group are reduced over the same axes. So a bucket
needs one collective per axis, one call of the update rule, and one owner that counts it in the
gradient norm. If the gradients of a group are summed over tensor ranks, the parameters of the group
have the same shapes on all of these ranks. Otherwise a slice would contain different elements on
different tensor ranks. Vocabulary shards can have different sizes on different tensor ranks, and
are therefore in separate groups.

The ZeRO stages (arXiv 1910.02054) differ in which tensors of a group are kept in full. Under stage
3 each unit has separate groups, so that units can be gathered one at a time. Only parameters with
fewer than `Policy.resident` elements stay unsharded under stage 3, as they do under stage 2.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from threed.distributed.sharding import Piece, ShardSpec, attach, point, spec_of, split
from threed.distributed.topology import Axis, Topology, alone
from threed.layers.contract import contract
from threed.memory.tiers import Drive, InMemory, Storage, Tier, memory_tier
from threed.models.pipeline_layout import Tie
from threed.ops.adam import Adam
from threed.ops.update import Rule

CPU = torch.device("cpu")
ALIGN = 32  # parameters start at multiples of 32 elements (64 bytes in bf16)
# An unsharded group is split into at least MIN_BUCKETS buckets, unless these would have fewer than
# MIN_BUCKET_NUMEL elements each.
MIN_BUCKETS = 8
MIN_BUCKET_NUMEL = 2**18


@dataclass(frozen=True)
class GroupOptions:
    """The options of a parameter group.

    Attributes:
        rule: update rule.
        rate: index of the group's learning rate in `Rates`.
        decay: weight decay.
        own_rule: whether the record of the parameters names the rule (`ShardSpec.rule`). Then they
            are kept in fp32 at least, and their gradient does not count in the gradient norm.
    """

    rule: Rule = field(default_factory=Adam)
    rate: int = 0
    decay: float = 0.0
    own_rule: bool = False


@dataclass(frozen=True)
class DataAxes:
    """The axes of the data ranks that hold the same parameters.

    Attributes:
        shard: shard group S, over which buckets are split into slices.
        replicas: replica group R: the data ranks that hold the same slice.
        gather: the same ranks as S. Under stage 3 this axis has a separate communicator, for
            gathers.
    """

    shard: Axis
    replicas: Axis
    gather: Axis


@dataclass(frozen=True)
class Policy:
    """How a stage's parameters are laid out: sharding, axes, dtypes and storage.

    If parameters or optimizer states are offloaded to a tier (`threed.memory.tiers`), they are kept
    as slices, even on a single rank.

    Attributes:
        stage: ZeRO stage, 0 to 3.
        data: data axes of the parameters that are not distributed over data ranks
            (`ShardSpec.over` is None).
        bucket_bytes: largest size of a bucket, in bytes of `grad_dtype`.
        param_dtype: dtype of the parameters that layers use.
        grad_dtype: dtype of the summed gradients.
        resident: parameters with fewer than this number of elements stay unsharded under stage 3.
        options: function from a parameter's `ShardSpec` to its group's options.
        arena: whether all gradient buffers of stages 2 and 3 are kept for reuse, so that later
            steps allocate no buffers. If False, buffers of parameters that span several buckets are
            allocated at every use, and stage 3 frees unused buffers at the end of each step.
        params_tier: tier that stores the slices of parameters under stage 3; None: they stay in
            the device's memory.
        optimizer_tier: tier that stores the optimizer's states and, from stage 2 on, the slices of
            gradients; None: they stay in the device's memory.
        host: device on which offloaded values are updated: the CPU, or "meta" for memory estimates.
        states_once: whether pipeline ranks that hold the same parameters split the optimizer
            states, so that each rank keeps the states of its portion. False with offload tiers.
        versions: number of versions of the parameters: 2 if a step begins before the update of the
            previous step (2BW), else 1. If 2, slices of gradients have separate memory, because the
            next step overwrites the full gradients before the update has read its slices.
        early: whether updates run during the backward and write to second regions of the drive
            (`threed.zero.early_updates`).
        trains: whether parameters with `requires_grad` are trained. If False, all parameters are laid
            out as frozen ones, without gradients and states.
        delayed: whether an update runs during the next step. That step still uses the parameters
            from before the update.
        dealt: data axes of the parameters that are distributed over data ranks, by the value of
            `ShardSpec.over`.
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
    trains: bool = True
    dealt: Mapping[str, DataAxes] = field(default_factory=dict)

    def dtype(self, options: GroupOptions) -> torch.dtype:
        """Returns the dtype of the parameters of a group with these options."""
        wide = torch.promote_types(self.param_dtype, torch.float32)
        return wide if options.own_rule else self.param_dtype

    def axes(self, over: str | None) -> DataAxes:
        """Returns the data axes of parameters with this `ShardSpec.over`."""
        return self.data if over is None else self.dealt[over]

    @property
    def drives(self) -> set[Drive]:
        """The drives on which parameters or optimizer states are stored."""
        return {tier for tier in (self.params_tier, self.optimizer_tier) if isinstance(tier, Drive)}

    @property
    def slices_gradients(self) -> bool:
        """Whether gradients are kept as slices (stages 2 and 3).

        Full gradients then exist only for buckets that are being filled or reduced.
        """
        return self.stage >= 2 and (self.data.shard.size > 1 or self.optimizer_tier is not None)

    def slices_parameter(self, param: nn.Parameter) -> bool:
        """Returns whether a parameter is sharded and gathered only while it is used (stage 3)."""
        spec = spec_of(param)
        spread = self.axes(spec.over).shard.size > 1 or self.params_tier is not None
        full_numel = param.numel() * spec.tile[1]  # for a tile, the size of the full matrix
        # a parameter with a rule of its own is small, and is read between steps
        shards = self.stage == 3 and spread and spec.rule is None and not spec.resident
        return shards and full_numel >= max(self.resident, 1)


@dataclass(frozen=True)
class GroupKey:
    """The properties that all parameters of a group share.

    Attributes:
        options: update rule, learning rate and weight decay.
        trainable: whether the parameters are trained.
        replicated: axis over which the parameters are replicated, or None; see `ShardSpec`.
        partial: axis over which the gradients are partial sums, or None; see `ShardSpec`. Always
            None if the parameters are not trainable.
        tied: for tied parameters, the pipeline ranks that hold a copy; else empty.
        units: for sharded parameters, indices of the units that use them; else None.
        layers: for parameters that are tied and sharded, indices of all layers of the model that
            use them; else empty.
        tile: name of the tile if the group is one tile of a linear layer's weight, which the layer
            gathers separately; else None.
        chunks: indices of this rank's chunks of the model that use the parameters.
        tied_chunks: for tied parameters, one tuple per rank in `tied`: indices of that rank's
            chunks that use the parameters; else empty.
        over: axis of data ranks that hold different parameters, or None; see `ShardSpec`.
    """

    options: GroupOptions
    trainable: bool
    replicated: str | None
    partial: str | None
    tied: tuple[int, ...]
    units: tuple[int, ...] | None
    layers: tuple[int, ...] = ()
    tile: str | None = None
    chunks: tuple[int, ...] = (0,)
    tied_chunks: tuple[tuple[int, ...], ...] = ()
    over: str | None = None


@dataclass(eq=False)
class Slot:
    """A parameter and its position in its group: elements [first, last) of the flat buffer.

    Attributes:
        param: the parameter.
        spec: sharding record of the parameter.
        places: (module, attribute name) of each use of the parameter.
        units: indices of the units that use the parameter.
        varies: whether one of these units declares that it runs a data-dependent number of times
            (`runs_vary`).
        first: first element in the flat buffer.
        last: end of the range in the flat buffer (exclusive).
        shape: shape of the full parameter.
        placeholder: tensor to which a sharded parameter points while it is not gathered; None for
            an unsharded parameter.
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

    def bind(self, storage: Tensor) -> None:
        """Points the parameter at its view of a flat buffer, in every module that holds it.

        A parameter with values stays the same object, because other objects may refer to it. A
        parameter on the meta device is replaced.
        """
        # Setting `.data` gives the parameter its own version counter. If the parameter shared the
        # counter of the buffer, a gather of another bucket that ends during the forward would
        # increment it, and autograd would report that the weight was modified.
        if self.param.device.type != "meta":
            point(self.param, storage)
            return
        self.param = attach(nn.Parameter(storage.data, self.param.requires_grad), self.spec)
        for module, attribute in self.places:
            setattr(module, attribute, self.param)


@dataclass(frozen=True)
class Run:
    """The elements of one piece (`ShardSpec.pieces`) that are in this rank's portion of a bucket.

    The portion consists of the elements that this rank updates. In the piece, the elements of a run
    are a contiguous range [first, last).

    Attributes:
        piece: the piece of a global tensor.
        first: first element, counted from the start of the piece.
        last: end of the range (exclusive), counted from the start of the piece.
        offset: position of element `first` in the portion, in elements.
    """

    piece: Piece
    first: int
    last: int
    offset: int

    def pieces(self) -> Iterator[Piece]:
        """Yields the boxes of the global tensor that together contain the run's elements.

        The `offset` of each box is its position in the portion, in elements.
        """
        return split(self.piece, self.first, self.last, self.offset)


@dataclass(eq=False)
class Bucket:
    """A bucket: the window [first, last) of a group's flat buffer.

    All positions are in elements of the flat buffer; ends of ranges are exclusive.

    Attributes:
        group: the group.
        first: first element of the window.
        last: end of the window.
        own_first: first element of this rank's slice.
        own_last: end of this rank's slice.
        portion_first: first element of the portion of the slice that this rank updates.
        portion_last: end of this portion.
        storage: this rank's slice of the parameters, in the compute dtype.
        grad: this rank's slice of the gradients.
        portion: this rank's portion of `storage`; the object `storage` itself if this rank updates
            the full slice.
        portion_grad: this rank's portion of `grad`; the object `grad` itself if this rank updates
            the full slice.
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
        """Number of elements of this rank's slice."""
        return self.own_last - self.own_first

    @property
    def updates(self) -> int:
        """Number of elements that this rank updates."""
        return self.portion_last - self.portion_first

    @property
    def own(self) -> Tensor | None:
        """This rank's slice of the parameters, or None if it is on a drive."""
        return self.storage.tensor if isinstance(self.storage, InMemory) else None

    def runs(self, first: int | None = None, last: int | None = None) -> Iterator[Run]:
        """Yields one `Run` per piece in this rank's portion, in buffer order, without padding.

        Args:
            first: position in the flat buffer at which to begin; by default `portion_first`.
            last: position at which to end (exclusive); by default `portion_last`.
        """
        first = self.portion_first if first is None else first
        last = self.portion_last if last is None else last
        starts, pieces = self.group.pieces
        for index in range(max(bisect.bisect_left(starts, first) - 1, 0), len(starts)):
            at, piece = starts[index], pieces[index]
            if at >= last:
                break
            lo, hi = max(at, first), min(at + piece.numel, last)
            if lo < hi:
                yield Run(piece, lo - at, hi - at, lo - self.portion_first)

    @functools.cached_property
    def earliest_unit(self) -> int:
        """Lowest index of the units that use the bucket's parameters; -1 if it is all padding."""
        return min((min(slot.units) for slot in self.slots), default=-1)

    def part(self, slot: Slot, window: Tensor) -> Tensor:
        """Returns the elements of a parameter in this bucket, as a view of `window`.

        Args:
            slot: the parameter; it may be only partly in this bucket.
            window: tensor [last - first] with one value per element of the bucket.
        """
        return window[max(slot.first - self.first, 0) : slot.last - self.first]

    @functools.cached_property
    def slots(self) -> list[Slot]:
        """The parameters that are fully or partly in this bucket."""
        return [
            slot for slot in self.group.slots if slot.first < self.last and slot.last > self.first
        ]


@dataclass(eq=False)
class Group:
    """A flat buffer of parameters [numel], in the compute dtype.

    Attributes:
        key: the properties that the parameters of the group share.
        slots: the parameters of the group.
        numel: number of elements, with padding.
        shard: shard group S, over which buckets are split into slices.
        gather: the same ranks as S; see `DataAxes`.
        sums: axes over which a slice's gradient is summed after the reduction over S.
        holders: axis of the pipeline ranks that each update one portion of the same slice. If it
            has several ranks, it is also the last axis of `sums`.
        copies: axes over which portions are replicated: all ranks of such an axis hold the same
            values.
        granule: the number of elements of every bucket is a multiple of this number.
        params: the buffer [numel]. A sharded group gets a new buffer for every gather; while the
            group is not gathered, this is an empty tensor.
        previous: buffer of the previous version if there are two versions, else `params`.
        grads: gradients [numel] if they are kept in full, else an empty tensor.
        buckets: the buckets of the group.
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

    @functools.cached_property
    def pieces(self) -> tuple[list[int], list[Piece]]:
        """The first element of each piece in the buffer, in ascending order, and the pieces."""
        found = [
            (slot.first + piece.offset, piece) for slot in self.slots for piece in slot.spec.pieces
        ]
        return [at for at, _ in found], [piece for _, piece in found]

    @property
    def owned(self) -> bool:
        """Whether this rank saves the group in checkpoints: the first of the ranks with replicas."""
        return all(axis.index == 0 for axis in self.copies)

    @property
    def in_norm(self) -> bool:
        """Whether this rank counts the group in the gradient norm."""
        return self.owned and not self.key.options.own_rule

    @property
    def sliced(self) -> bool:
        """Whether the parameters are sharded, and gathered only while they are used (stage 3)."""
        return self.key.units is not None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the parameters occupy between steps."""
        tensors = [self.params] if not self.sliced else [bucket.own for bucket in self.buckets]
        tensors += [self.previous] if self.previous is not self.params else []
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def view(self, slot: Slot, buffer: Tensor) -> Tensor:
        """Returns a parameter's elements of a flat buffer, as a view with the parameter's shape."""
        return buffer[slot.first : slot.last].view(slot.shape)

    def allocate(self) -> None:
        """Allocates `params` with undefined values and points the parameters at views of it."""
        self.params = torch.empty(self.numel, dtype=self.params.dtype, device=self.params.device)
        for slot in self.slots:
            point(slot.param, self.view(slot, self.params))

    def swap_versions(self) -> None:
        """Swaps the buffers of the two versions of the parameters."""
        self.params, self.previous = self.previous, self.params

    def free(self) -> None:
        """Drops `params` and points the parameters at their placeholders.

        The memory is freed when no other tensor shares it.
        """
        self.params = self.params.new_empty(0)
        for slot in self.slots:
            assert slot.placeholder is not None
            point(slot.param, slot.placeholder)


@dataclass(eq=False)
class Layout:
    """The parameters of a pipeline stage and their memory layout.

    Attributes:
        policy: how the parameters are laid out.
        groups: all groups.
        buckets: buckets of trainable parameters, in the order in which the backward completes them.
        frozen: buckets of frozen parameters.
    """

    policy: Policy
    groups: list[Group]
    buckets: list[Bucket]
    frozen: list[Bucket]

    @property
    def slots(self) -> list[Slot]:
        """All parameters of the stage, each of them once."""
        return [slot for group in self.groups for slot in group.slots]

    @property
    def slices_parameters(self) -> bool:
        """Whether any group is sharded (stage 3)."""
        return any(group.sliced for group in self.groups)

    @property
    def nbytes(self) -> int:
        """Bytes of memory for parameters between steps, and for buffers of drives."""
        buffers = sum(drive.nbytes * drive.count for drive in self.policy.drives)
        return buffers + sum(group.nbytes for group in self.groups)

    @property
    def parameters(self) -> int:
        """Number of elements of all parameters, without padding."""
        return sum(slot.param.numel() for slot in self.slots)


class HasModules(Protocol):
    """Interface of a unit: a pipeline layer, or a set of modules of a wrapped model."""

    def modules(self) -> Iterator[nn.Module]: ...


def collect(units: Sequence[HasModules]) -> list[Slot]:
    """Returns one `Slot` for each parameter of the units, in forward order.

    Parameters with the same name are one parameter (tied weights), with several `Slot.places`.
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
    """Lays out the parameters of a stage, allocates buffers, and points the parameters at them.

    Args:
        units: this rank's layers, on the meta device, or the units of a wrapped module.
        tied: name -> `Tie`, for parameters that several pipeline ranks hold. Groups of tied
            parameters come after all other groups. All ranks of a tie must have the same groups of
            tied parameters in the same order. Otherwise the slices on these ranks would not align,
            and the ranks would call the collectives that sum the gradients in different orders.
            `GroupKey` therefore includes the chunks of every such rank (`tied_chunks`).
        topology: the process topology.
        policy: how the parameters are laid out.
        chunks: per unit, the number of the chunk of the model that contains the unit; by default
            all units are in one chunk. Chunks have separate buffers, because the gradients of a
            chunk are reduced when the backwards of that chunk have ended.

    Returns:
        The layout.
    """
    keys: dict[GroupKey, list[Slot]] = {}
    for slot in _backward_order(collect(units), tied):
        spec = slot.spec
        trainable = policy.trains and slot.param.requires_grad
        sliced = policy.slices_parameter(slot.param)
        tie = tied.get(spec.name)
        key = GroupKey(
            policy.options(spec) if trainable else GroupOptions(own_rule=spec.rule is not None),
            trainable, spec.replicated,
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
    # A bucket is complete when the backward of its earliest unit has ended.
    trained.sort(key=lambda bucket: -bucket.earliest_unit)
    return Layout(policy, groups, trained, frozen)


def _backward_order(slots: list[Slot], tied: Mapping[str, Tie]) -> list[Slot]:
    """Returns untied parameters in backward order, then tied ones by descending `Tie.number`."""
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
    granule = data.shard.size * holders.size * ALIGN  # so that portions start at multiples of ALIGN
    numel = max(1, -(-end // granule)) * granule
    several = tuple(axis for axis in sums if axis.size > 1)
    axes = data.shard, data.gather, several, holders, tuple(copies)
    buffers = _buffers(key, numel, topology.device, policy)
    group = Group(key, slots, numel, *axes, granule, *buffers)
    for slot in slots:
        if group.sliced:
            slot.placeholder = _placeholder(slot, policy.dtype(key.options), topology.device)
            slot.bind(slot.placeholder)
        else:
            slot.bind(group.view(slot, group.params))
    group.buckets.extend(_buckets(group, topology.device, policy))
    return group


def _buffers(
    key: GroupKey, numel: int, device: torch.device, policy: Policy
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates `params`, `previous` and `grads` of a group."""
    unsharded = numel if key.units is None else 0
    params = torch.zeros(unsharded, dtype=policy.dtype(key.options), device=device)
    twice = key.trainable and policy.versions > 1
    previous = torch.zeros_like(params) if twice else params
    full = numel if key.trainable and not policy.slices_gradients else 0
    return params, previous, torch.zeros(full, dtype=policy.grad_dtype, device=device)


def _placeholder(slot: Slot, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a read-only tensor of the parameter's shape with NaN values.

    All its elements share the memory of a single element.
    """
    if device.type == "meta":
        return torch.empty(slot.shape, dtype=dtype, device=device)
    nan = torch.full((), torch.nan, dtype=dtype, device=device)
    torch._C._set_throw_on_mutable_data_ptr(nan)
    return nan.expand(slot.shape)


def _buckets(group: Group, device: torch.device, policy: Policy) -> Iterator[Bucket]:
    """Splits a group into buckets and allocates the storages of this rank's slices."""
    shard, holders, memory = group.shard, group.holders, memory_tier(device)
    params, optimizer = policy.params_tier or memory, policy.optimizer_tier or memory
    apart = group.key.trainable and (policy.slices_gradients or policy.versions > 1)
    elements = max(1, policy.bucket_bytes // policy.grad_dtype.itemsize)
    if group.key.units is None:  # sharded groups are small, so they need no MIN_BUCKETS
        elements = min(elements, max(group.numel // MIN_BUCKETS, MIN_BUCKET_NUMEL))
    step = max(group.granule, elements // group.granule * group.granule)
    for first in range(0, group.numel, step):
        last = min(first + step, group.numel)
        share = (last - first) // shard.size
        part = share // holders.size
        own = slice(first + shard.index * share, first + (shard.index + 1) * share)
        portion = slice(holders.index * part, (holders.index + 1) * part)
        storage = (
            params(share, policy.dtype(group.key.options))
            if group.sliced
            else InMemory(group.params[own])
        )
        grad = optimizer(share, policy.grad_dtype) if apart else InMemory(group.grads[own])
        yield Bucket(
            group, first, last, own.start, own.stop, own.start + portion.start, own.start + portion.stop,
            storage, grad, _portion(storage, portion, holders), _portion(grad, portion, holders),
        )  # fmt: skip


def _portion(storage: Storage, portion: slice, holders: Axis) -> Storage:
    """Returns the part of a slice's storage that this rank updates."""
    return storage if holders.size == 1 else InMemory(storage.fetch().wait()[portion])
