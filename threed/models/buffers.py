"""The buffers of the modules on a rank: their names, and their synchronization over data ranks.

    buffers = build(layers, stages, topology)
    buffers.begin()                                        # moves buffers to the device, broadcasts them
    buffers.begin_step(), buffers.end_step()               # at the start and the end of each step
    buffers.agree()                                        # before an evaluation or a checkpoint

A buffer's name is the layer's name and the path in the layer (`blocks.3.norm.running_mean`;
`layers.3.…` for a layer without a name), or the path in a wrapped module. Data rank 0 has the
authoritative values, as with DistributedDataParallel. Buffers that change in training are broadcast
from data rank 0 at the start of each step, before an evaluation and before a checkpoint. The first
step detects which buffers change; evaluations and checkpoints check again. A module may replace a
buffer by another tensor (`self.mean = new`), so the module's table of buffers is read on every
access.

The buffers of tensor ranks are assumed to be equal and are not broadcast. Layers with the same name
share weights. A checkpoint has one buffer per name, from the first layer with that name. So if a
buffer changes in training and several layers have a buffer of its name, an error is raised.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from threed.distributed import collectives
from threed.distributed.sharding import check_dense, few
from threed.distributed.topology import Topology
from threed.layers.contract import contract
from threed.models.pipeline_layout import PipelineLayout

Roots = Sequence[tuple[str, nn.Module]]


@dataclass(frozen=True, eq=False)
class BufferRef:
    """The location of a buffer.

    Attributes:
        name: name of the buffer in the model.
        owner: module that registered the buffer.
        key: name of the buffer in `owner`.
    """

    name: str
    owner: nn.Module
    key: str

    @property
    def value(self) -> Tensor | None:
        """The buffer's current tensor; None if the module has set the buffer to None."""
        return self.owner._buffers.get(self.key)

    @property
    def persistent(self) -> bool:
        """Whether the buffer is in the module's state dict."""
        return self.key not in self.owner._non_persistent_buffers_set

    def store(self, values: Tensor) -> None:
        """Sets the buffer's values, in place if the current tensor can be written to."""
        old = self.value
        repeated = old is not None and any(
            n > 1 and step == 0 for n, step in zip(old.shape, old.stride(), strict=True)
        )
        if old is None or repeated or old.is_inference():
            self.owner._buffers[self.key] = values.clone()
        else:
            old.detach().copy_(values)


@dataclass(frozen=True, eq=False)
class Observation:
    """The state of a buffer at one time, for a later comparison with its current state.

    Attributes:
        tensor: weak reference to the buffer's tensor.
        version: the tensor's version counter.
        copy: copy of the values; None if only the tensor and the version are compared.
    """

    tensor: weakref.ref[Tensor]
    version: int
    copy: Tensor | None


def find(roots: Roots) -> list[BufferRef]:
    """Returns all buffers of some modules.

    If a module has several names, its buffers are listed once, under the name that is found first.

    Args:
        roots: (name prefix, module) pairs.
    """
    places, memo = [], set[nn.Module]()
    for prefix, root in roots:
        for path, owner in root.named_modules(memo, prefix):
            places += [
                BufferRef(f"{path}.{key}" if path else key, owner, key) for key in owner._buffers
            ]
    return places


def bytes_of(value: Tensor) -> Tensor:
    """Returns the bytes of a tensor's values in row-major order, uint8 [number of bytes]."""
    return value.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)


def of_bytes(data: Tensor, dtype: str, shape: Sequence[int]) -> Tensor:
    """Returns a new tensor from its bytes; the inverse of `bytes_of`.

    Args:
        data: the bytes of the values in row-major order, uint8 [number of bytes].
        dtype: name of the tensor's dtype, such as "float32".
        shape: shape of the tensor.
    """
    # `data` may be a slice that is not aligned for the dtype, so it is cloned
    return data.clone().view(getattr(torch, dtype)).view(tuple(shape))


def dtype_name(value: Tensor) -> str:
    """Returns the name of a tensor's dtype, such as "float32"."""
    return str(value.dtype).removeprefix("torch.")


class Buffers:
    """The buffers of this rank's modules.

    Args:
        stages: for each pipeline rank, (name prefix, module) pairs of its modules.
        topology: the topology, with the pipeline, data and tensor axes of this rank.
        recomputed: names of buffers in layers that are recomputed in full.
        two_holders: whether every layer is on two pipeline ranks (bidirectional schedules).

    Attributes:
        exist: whether this rank's modules have buffers. If several persistent buffers have the same
            name, or `recomputed` is not empty, all ranks exchange which buffers change. In this
            case: whether the modules of any rank have buffers.
    """

    def __init__(
        self,
        stages: Sequence[Roots],
        topology: Topology,
        recomputed: Collection[str] = (),
        two_holders: bool = False,
    ) -> None:
        self.topology = topology
        self._recomputed = frozenset(recomputed)
        self._two_holders = two_holders
        self._stage, self._data = topology.axis("pp").index, topology.data
        self._roots = stages[self._stage]
        self._first: dict[str, int] = {}
        counts: Counter[str] = Counter()
        for stage, roots in enumerate(stages):
            for place in find(roots):
                self._first.setdefault(place.name, stage)
                counts[place.name] += place.persistent
        self._shared = {name for name, count in counts.items() if count > 1}
        self._axis = topology.axis("world") if self._shared or self._recomputed else self._data
        # `exist` has the same value on all ranks of the axis.
        self.exist = bool(self._first if self._axis is not self._data else find(self._roots))
        self._searched = not self.exist
        self._seen: dict[tuple[nn.Module, str], Observation] | None = None
        # (buffer, meta tensor of its shape and dtype)
        self._changing: list[tuple[BufferRef, Tensor]] = []

    # ------------------------------------------------------------------------------------------------------ data ranks

    def begin(self) -> None:
        """Moves buffers to the device and broadcasts them from data rank 0. Collective.

        Raises:
            ValueError: if names, dtypes or shapes differ between data ranks.
        """
        for place in find(self._roots):
            if place.value is not None:
                place.owner._buffers[place.key] = place.value.to(self.topology.device)
        values = self._values()
        own = [[place.name, dtype_name(value), list(value.shape)] for place, value in values]
        records = collectives.exchange(own, self._data) if values else []
        for rank, other in zip(self._data.ranks, records, strict=False):
            if other != own:
                different = [b for b in (*own, *other) if b not in own or b not in other]
                names = few(sorted({str(name) for name, *_ in different}))
                raise ValueError(
                    f"buffers differ between rank {rank} and rank {self.topology.rank}: {names}"
                )
        self._broadcast(values)

    def begin_step(self) -> None:
        """Broadcasts the buffers that change in training from data rank 0. Collective."""
        if self._seen is None:
            self._seen = self._observe(copy=not self._searched and self._axis.size > 1)
        self._broadcast(self._changing)

    def end_step(self) -> None:
        """Detects which buffers change, in the first step only. Collective in the first step.

        Raises:
            ValueError: if a buffer changed that must not change. Such a buffer either belongs to a
                recomputed layer, or is one of several persistent buffers with the same name.
        """
        if not self._searched:
            self._find_changes()
            self._searched = True

    def agree(self) -> None:
        """Searches for buffers that change in training, then broadcasts them. Collective."""
        if self._seen is not None:
            self._find_changes()
        self._broadcast(self._changing)

    def changing(self) -> list[tuple[BufferRef, Tensor]]:
        """Returns the buffers that are known to change in training, with copies of their values."""
        return [
            (place, place.value.clone()) for place, *_ in self._changing if place.value is not None
        ]

    def _values(self) -> list[tuple[BufferRef, Tensor]]:
        values = [(place, place.value) for place in find(self._roots) if place.value is not None]
        check_dense((place.name, value) for place, value in values)
        return values

    def _observe(self, copy: bool) -> dict[tuple[nn.Module, str], Observation]:
        return {
            (place.owner, place.key): Observation(
                weakref.ref(value), _version(value), value.clone() if copy else None
            )
            for place, value in self._values()
        }

    def _find_changes(self) -> None:
        """Finds the buffers that changed on any rank since the last `_observe`. Collective."""
        seen, values = self._seen or {}, self._values()
        pairs = [(place, value, seen.get((place.owner, place.key))) for place, value in values]
        # The kernels of batch_norm change buffers without advancing their version counters. So the
        # first step compares values. Later steps compare only versions. batch_norm advances the
        # version of one buffer, num_batches_tracked. Therefore, if one buffer of a module has
        # changed, the module's other buffers count as changed, too.
        owners = {place.owner for place, value, before in pairs if _changed(value, before)}
        # If a non-persistent buffer was replaced by another tensor, it is assumed to be a cache. It
        # is skipped, because a cache's shape may differ between ranks.
        own = {
            place.name for place, value, before in pairs
            if place.owner in owners and (place.persistent or (before is not None and before.tensor() is value))
        }  # fmt: skip
        found = {name for rank in collectives.exchange(sorted(own), self._axis) for name in rank}
        self._check_changes(found)
        known = {(place.owner, place.key) for place, *_ in self._changing}
        new = [(p, v) for p, v in values if p.name in found and (p.owner, p.key) not in known]
        self._changing += [(place, torch.empty_like(value, device="meta")) for place, value in new]
        self._seen = self._observe(copy=False)

    def _check_changes(self, found: set[str]) -> None:
        """Raises ValueError if `found` contains a buffer that must not change; see `end_step`.

        Args:
            found: names of the buffers that changed on any rank.
        """
        if shared := sorted(found & self._shared):
            two_ranks = "on the two ranks that hold the layer; use a schedule with each layer on one rank (1f1b, zb-v)"
            same_name = "in several layers with that name; give each layer its own name"
            raise ValueError(
                f"{few(shared)}: changes in training, {two_ranks if self._two_holders else same_name}, or register"
                " the buffer with persistent=False"
            )
        if recomputed := sorted(found & self._recomputed):
            raise ValueError(
                f"{few(recomputed)}: changes in the forward of a layer that is recomputed, so it would change twice;"
                " set the layer's `recomputable = False`, or --recompute.mode none"
            )

    def _broadcast(self, wanted: Iterable[tuple[BufferRef, Tensor]]) -> None:
        """Broadcasts values from data rank 0 in one message. Collective over data ranks.

        Values are sorted by dtype width, widest first, so that every value is aligned.

        Args:
            wanted: buffers, each with a tensor of the shape and dtype that its value must have.
        """
        chosen = sorted(wanted, key=lambda one: -one[1].itemsize) if self._data.size > 1 else []
        values = []
        for place, like in chosen:
            value = place.value
            if value is None or (value.shape, value.dtype) != (like.shape, like.dtype):
                now = "None" if value is None else f"{value.dtype} {list(value.shape)}"
                raise RuntimeError(
                    f"buffer {place.name} was {like.dtype} {list(like.shape)} and is now {now}:"
                    " keep its shape and dtype"
                )
            values.append(bytes_of(value))
        if not values:
            return
        flat = collectives.broadcast(torch.cat(values), self._data, 0)
        parts = flat.split([len(value) for value in values])
        for (place, like), part in zip(chosen, parts, strict=True):
            if self._data.index > 0:
                place.store(part.view(like.dtype).view(like.shape))

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def persistent(self) -> dict[str, BufferRef]:
        """Returns this rank's persistent buffers by name: the first buffer of each name."""
        places = reversed(find(self._roots))
        return {place.name: place for place in places if place.persistent}

    def owned(self, any_copy: bool = False) -> dict[str, Tensor]:
        """Returns the persistent buffers that this rank writes to a checkpoint.

        Args:
            any_copy: whether ranks other than data rank 0 return their replicas, too. The replicas
                of all data ranks are equal after `agree`.
        """
        if (self._data.index > 0 and not any_copy) or self.topology.axis("tp").index > 0:
            return {}
        return {
            name: value
            for name, place in sorted(self.persistent().items())
            if self._first.get(name, self._stage) == self._stage
            if (value := place.value) is not None
        }

    def shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Returns the shapes of the persistent buffers of all pipeline ranks, by name. Collective.

        The shape is None for a buffer that its module has set to None.
        """
        own = {n: None if p.value is None else p.value.shape for n, p in self.persistent().items()}
        return {
            name: None if shape is None else tuple(shape)
            for stage in collectives.exchange(own, self.topology.axis("pp"))
            for name, shape in stage.items()
        }

    def different(self) -> list[str]:
        """Returns the names of persistent buffers that differ between tensor ranks. Collective."""
        axis, places = self.topology.axis("tp"), self.persistent()
        if axis.size == 1 or not places:
            return []
        values = {name: place.value for name, place in places.items() if place.value is not None}
        ranks = collectives.exchange({name: _digest(v) for name, v in values.items()}, axis)
        return sorted(name for name in places if len({rank.get(name) for rank in ranks}) > 1)

    def extra_states(self) -> list[str]:
        """Returns the names of this rank's modules that have a state besides parameters and buffers.

        These are modules of a class that defines `get_extra_state`.
        """
        modules = [
            pair for prefix, root in self._roots for pair in root.named_modules(prefix=prefix)
        ]
        names = {n for n, m in modules if type(m).get_extra_state is not nn.Module.get_extra_state}
        return sorted(names)

    def restore(self, names: Collection[str], source: Callable[[str], Tensor]) -> None:
        """Sets each persistent buffer with a name in `names` to the values `source(name)`."""
        for place in find(self._roots):
            if place.persistent and place.name in names:
                place.store(source(place.name).to(self.topology.device))
        # The restored values do not count as a change by the model, so later comparisons start from
        # the restored values.
        self._seen = None

    def collect(self) -> dict[str, Tensor]:
        """Returns all persistent buffers by name on rank 0; an empty dict elsewhere. Collective."""
        axis, own = self.topology.axis("pp"), self.owned()
        if self._data.index > 0 or self.topology.axis("tp").index > 0:
            return {}
        records = collectives.exchange(
            [[n, dtype_name(v), list(v.shape), v.nbytes] for n, v in own.items()], axis
        )
        empty = torch.empty(0, dtype=torch.uint8, device=self.topology.device)
        flats = collectives.gather_to_first(torch.cat([empty, *map(bytes_of, own.values())]), axis)
        out: dict[str, Tensor] = {}
        for stage, flat in zip(records, flats, strict=False):
            parts = flat.split([nbytes for *_, nbytes in stage])
            out |= {
                name: of_bytes(part, dtype, shape)
                for (name, dtype, shape, _), part in zip(stage, parts, strict=True)
            }
        return out


def _digest(value: Tensor) -> str:
    return hashlib.sha256(bytes_of(value).cpu().numpy().data).hexdigest()


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version


def _changed(value: Tensor, before: Observation | None) -> bool:
    """Returns whether a buffer was replaced or its values changed."""
    if before is None or before.tensor() is not value or before.version != _version(value):
        return True
    return before.copy is not None and bool((before.copy != value).any())


def build(
    layers: Sequence[nn.Module], stages: PipelineLayout, topology: Topology, recomputed: Collection[int] = (),
    wrapped: nn.Module | None = None,
) -> Buffers:  # fmt: skip
    """Returns the buffers of a wrapped module, or of a model's pipeline layers.

    Args:
        layers: all layers of the model.
        stages: the layers of each stage.
        topology: the topology, with the pipeline, data and tensor axes of this rank.
        recomputed: indices of the layers that are recomputed in full.
        wrapped: the wrapped module; `layers` is then ignored.

    Raises:
        ValueError: if a layer's buffer is on the meta device.
    """
    if wrapped is not None:
        return Buffers([[("", wrapped)]], topology)
    roots = [
        (contract(layer).name or f"layers.{number}", layer) for number, layer in enumerate(layers)
    ]
    empty = [place.name for place in find(roots) if place.value is not None and place.value.is_meta]
    if empty:
        raise ValueError(
            f"buffers on the meta device have no values: {', '.join(empty[:10])}; create them with device='cpu',"
            " and the engine moves them"
        )
    names = {place.name for number in recomputed for place in find([roots[number]])}
    numbers = [[n for chunk in stages.chunks(rank) for n in chunk] for rank in range(topology.pp)]
    return Buffers(
        [[roots[number] for number in stage] for stage in numbers],
        topology,
        names,
        stages.ways == 2,
    )
