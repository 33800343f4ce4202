"""The buffers of the modules that a rank holds: their names, and the same values on all data ranks.

    buffers = build(layers, cut, topology)
    buffers.begin()                                        # on the device, and alike on all data ranks
    buffers.begin_step() · buffers.end_step() · buffers.agree()

A name is the layer's and the path in it (`blocks.3.norm.running_mean`; `layers.3.…` where a layer has no name), or the
path in a wrapped module. What counts is the value of data rank 0, as with DistributedDataParallel: buffers that change
in training are sent from there at the start of each step, before an evaluation and before a checkpoint. Which ones
those are is found out in the first step, and looked up again before an evaluation or a checkpoint. A module may put
another tensor in a buffer's place (`self.mean = new`), so its table is read whenever a value is needed.

Tensor ranks count as copies of each other too, but nothing is sent over them. Layers of one name share their weights,
and a saved buffer of that name is the first one's: so one that changes in several of them is refused.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from threed import collectives
from threed.layers.contract import contract
from threed.planner.cut import Cut
from threed.sharding import check_dense, few
from threed.topology import Topology

Roots = Sequence[tuple[str, nn.Module]]


@dataclass(frozen=True, eq=False)
class Place:
    """Where a buffer is: `key` of `owner`'s table."""

    name: str
    owner: nn.Module
    key: str

    @property
    def value(self) -> Tensor | None:
        """What is there now."""
        return self.owner._buffers.get(self.key)

    @property
    def persistent(self) -> bool:
        """Whether it is a part of the module's state."""
        return self.key not in self.owner._non_persistent_buffers_set

    def store(self, values: Tensor) -> None:
        """Takes values; the tensor that is there stays the same object if it can be written to."""
        old = self.value
        repeated = old is not None and any(
            n > 1 and step == 0 for n, step in zip(old.shape, old.stride(), strict=True)
        )
        if old is None or repeated or old.is_inference():
            self.owner._buffers[self.key] = values.clone()
        else:
            old.detach().copy_(values)


@dataclass(frozen=True, eq=False)
class Seen:
    """What was in a place: the tensor, its version counter, and a copy of its values where one was made."""

    tensor: weakref.ref[Tensor]
    version: int
    copy: Tensor | None


def find(roots: Roots) -> list[Place]:
    """Every buffer of some modules, each module once, by the first name it has."""
    places, memo = [], set[nn.Module]()
    for prefix, root in roots:
        for path, owner in root.named_modules(memo, prefix):
            places += [
                Place(f"{path}.{key}" if path else key, owner, key) for key in owner._buffers
            ]
    return places


def bytes_of(value: Tensor) -> Tensor:
    """A tensor's memory, uint8 [n], in row-major order."""
    return value.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)


def of_bytes(data: Tensor, dtype: str, shape: Sequence[int]) -> Tensor:
    """The tensor [*shape] of dtype (such as "float32") whose memory `data` is."""
    # cloned, for it may begin at an odd byte
    return data.clone().view(getattr(torch, dtype)).view(tuple(shape))


def dtype_name(value: Tensor) -> str:
    """A tensor's dtype as text."""
    return str(value.dtype).removeprefix("torch.")


class Buffers:
    """The buffers of this rank's modules.

    stages: the named modules of every pipeline stage. again: names of buffers whose layers are recomputed as a whole.
    twice: whether every layer is on two pipeline ranks.
    """

    def __init__(
        self,
        stages: Sequence[Roots],
        topology: Topology,
        again: Collection[str] = (),
        twice: bool = False,
    ) -> None:
        self.topology, self._again, self._twice = topology, frozenset(again), twice
        self._stage, self._data = topology.axis("pp").index, topology.data
        self._roots = stages[self._stage]
        self._first: dict[str, int] = {}
        counts: Counter[str] = Counter()
        for stage, roots in enumerate(stages):
            for place in find(roots):
                self._first.setdefault(place.name, stage)
                counts[place.name] += place.persistent
        self._shared = {name for name, count in counts.items() if count > 1}
        self._axis = topology.axis("world") if self._shared or self._again else self._data
        # on some rank of the axis, alike on all of them
        self.exist = bool(self._first if self._axis is not self._data else find(self._roots))
        self._searched = not self.exist
        self._seen: dict[tuple[nn.Module, str], Seen] | None = None
        self._changing: list[tuple[Place, Tensor]] = []  # each with a tensor of its shape and dtype

    # ------------------------------------------------------------------------------------------------------ data ranks

    def begin(self) -> None:
        """Moves buffers to the device and gives all data ranks the first one's values. Collective."""
        for place in find(self._roots):
            if place.value is not None:
                place.owner._buffers[place.key] = place.value.to(self.topology.device)
        held = self._held()
        about = [[place.name, dtype_name(value), list(value.shape)] for place, value in held]
        others = collectives.exchange(about, self._data) if held else []
        for rank, other in zip(self._data.ranks, others, strict=False):
            if other != about:
                unlike = [b for b in (*about, *other) if b not in about or b not in other]
                names = few(sorted({str(name) for name, *_ in unlike}))
                raise ValueError(
                    f"rank {rank} has other buffers than rank {self.topology.rank}: {names}"
                )
        self._send(held)

    def begin_step(self) -> None:
        """Broadcasts the values of changing buffers from the first data rank to the others. Collective."""
        if self._seen is None:
            self._seen = self._look(copy=not self._searched and self._axis.size > 1)
        self._send(self._changing)

    def end_step(self) -> None:
        """Finds out what changes, in the first step. Collective then; ValueError naming what must not."""
        if not self._searched:
            self._search()
            self._searched = True

    def agree(self) -> None:
        """Looks for more that changes, and gives all data ranks the first one's values. Collective."""
        if self._seen is not None:
            self._search()
        self._send(self._changing)

    def changing(self) -> list[tuple[Place, Tensor]]:
        """The buffers that forwards change, as far as known, with copies of their values."""
        return [
            (place, place.value.clone()) for place, *_ in self._changing if place.value is not None
        ]

    def _held(self) -> list[tuple[Place, Tensor]]:
        held = [(place, place.value) for place in find(self._roots) if place.value is not None]
        check_dense((place.name, value) for place, value in held)
        return held

    def _look(self, copy: bool) -> dict[tuple[nn.Module, str], Seen]:
        return {
            (place.owner, place.key): Seen(
                weakref.ref(value), _version(value), value.clone() if copy else None
            )
            for place, value in self._held()
        }

    def _search(self) -> None:
        """Finds what changed since `_look`; what one rank finds counts on all."""
        seen, held = self._seen or {}, self._held()
        pairs = [(place, value, seen.get((place.owner, place.key))) for place, value in held]
        # The kernels of batch_norm leave version counters as they are: so values are compared in the first step, and
        # later a module's other buffers are taken for changed with the one that says so (num_batches_tracked).
        owners = {place.owner for place, value, before in pairs if _changed(value, before)}
        # A buffer that is no state and is another tensor now is a cache, whose shape may be each rank's own.
        mine = {
            place.name for place, value, before in pairs
            if place.owner in owners and (place.persistent or (before is not None and before.tensor() is value))
        }  # fmt: skip
        found = {name for rank in collectives.exchange(sorted(mine), self._axis) for name in rank}
        self._refuse(found)
        known = {(place.owner, place.key) for place, *_ in self._changing}
        new = [(p, v) for p, v in held if p.name in found and (p.owner, p.key) not in known]
        self._changing += [(place, torch.empty_like(value, device="meta")) for place, value in new]
        self._seen = self._look(copy=False)

    def _refuse(self, found: set[str]) -> None:
        if shared := sorted(found & self._shared):
            several = "on the two ranks that hold the layer; take a schedule that holds each layer once (1f1b, zb-v)"
            alike = "in several layers of that name; give each layer a name of its own"
            raise ValueError(
                f"{few(shared)}: changes in training, {several if self._twice else alike}, or register the buffer"
                " with persistent=False"
            )
        if again := sorted(found & self._again):
            raise ValueError(
                f"{few(again)}: changes in the forward of a layer that is recomputed, which changes it twice; set"
                " the layer's `recomputable = False`, or --recompute.mode none"
            )

    def _send(self, wanted: Iterable[tuple[Place, Tensor]]) -> None:
        """Data rank 0's values to all data ranks, in one message; widest first, so that all lie at whole elements.

        Args:
            wanted: places, each with a tensor of the shape and dtype that its value must have.
        """
        chosen = sorted(wanted, key=lambda one: -one[1].itemsize) if self._data.size > 1 else []
        values = []
        for place, like in chosen:
            value = place.value
            if value is None or (value.shape, value.dtype) != (like.shape, like.dtype):
                now = "nothing" if value is None else f"{value.dtype} {list(value.shape)}"
                raise RuntimeError(
                    f"buffer {place.name} was {like.dtype} {list(like.shape)} and is {now} now: keep its shape"
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

    def persistent(self) -> dict[str, Place]:
        """The places of this stage's persistent buffers, by name, the first of each."""
        places = reversed(find(self._roots))
        return {place.name: place for place in places if place.persistent}

    def owned(self, any_copy: bool = False) -> dict[str, Tensor]:
        """The persistent buffers whose value here is the one that counts. any_copy: or those of any data rank, which
        are the same once they agree."""
        if (self._data.index > 0 and not any_copy) or self.topology.axis("tp").index > 0:
            return {}
        return {
            name: value
            for name, place in sorted(self.persistent().items())
            if self._first.get(name, self._stage) == self._stage
            if (value := place.value) is not None
        }

    def shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Every persistent buffer of the model and its shape, None where it has no value. Collective."""
        own = {n: None if p.value is None else p.value.shape for n, p in self.persistent().items()}
        return {
            name: None if shape is None else tuple(shape)
            for stage in collectives.exchange(own, self.topology.axis("pp"))
            for name, shape in stage.items()
        }

    def different(self) -> list[str]:
        """The persistent buffers whose values are not the same on all tensor ranks. Collective."""
        line, places = self.topology.axis("tp"), self.persistent()
        if line.size == 1 or not places:
            return []
        values = {name: place.value for name, place in places.items() if place.value is not None}
        ranks = collectives.exchange({name: _digest(v) for name, v in values.items()}, line)
        return sorted(name for name in places if len({rank.get(name) for rank in ranks}) > 1)

    def restore(self, names: Collection[str], source: Callable[[str], Tensor]) -> None:
        """Sets the persistent buffers among `names` from `source(name)`."""
        for place in find(self._roots):
            if place.persistent and place.name in names:
                place.store(source(place.name).to(self.topology.device))
        self._seen = None  # what was stored is no change of the model's

    def collect(self) -> dict[str, Tensor]:
        """Name -> value of every persistent buffer, on rank 0's CPU; an empty dict elsewhere. Collective."""
        line, mine = self.topology.axis("pp"), self.owned()
        if self._data.index > 0 or self.topology.axis("tp").index > 0:
            return {}
        about = collectives.exchange(
            [[n, dtype_name(v), list(v.shape), v.nbytes] for n, v in mine.items()], line
        )
        empty = torch.empty(0, dtype=torch.uint8, device=self.topology.device)
        flats = collectives.gather_to_first(torch.cat([empty, *map(bytes_of, mine.values())]), line)
        out: dict[str, Tensor] = {}
        for stage, flat in zip(about, flats, strict=False):
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


def _changed(value: Tensor, before: Seen | None) -> bool:
    """Returns whether a buffer is another tensor than before, or its values changed."""
    if before is None or before.tensor() is not value or before.version != _version(value):
        return True
    return before.copy is not None and bool((before.copy != value).any())


def build(
    layers: Sequence[nn.Module], cut: Cut, topology: Topology, recomputed: Collection[int] = (),
    wrapped: nn.Module | None = None,
) -> Buffers:  # fmt: skip
    """The buffers of a wrapped module, else of a model's pipeline layers, of which some are `recomputed`, by number.

    ValueError naming those of layers that are on the meta device.
    """
    if wrapped is not None:
        return Buffers([[("", wrapped)]], topology)
    roots = [
        (contract(layer).name or f"layers.{number}", layer) for number, layer in enumerate(layers)
    ]
    empty = [place.name for place in find(roots) if place.value is not None and place.value.is_meta]
    if empty:
        raise ValueError(
            f"buffers on the meta device have no values: {', '.join(empty[:10])}; make them with device='cpu', the"
            " engine moves them"
        )
    again = {place.name for number in recomputed for place in find([roots[number]])}
    held = [[n for chunk in cut.chunks(rank) for n in chunk] for rank in range(topology.pp)]
    return Buffers(
        [[roots[number] for number in numbers] for numbers in held], topology, again, cut.ways == 2
    )
