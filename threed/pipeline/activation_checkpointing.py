"""Which layers are computed again in the backward, and where their inputs are kept until then.

    recomputed = build(config, units, live, slicing, topology)      # what a Stage is told
    kept = recomputed.store.save(x)                                # after a layer's forward
    store.fetch(kept) · store.prefetch(kept)                         # a few layers ahead of its backward
    x = store.get(kept)       ...     store.release(kept)

SavedInput is the input itself; or a copy in a slot of an arena, in host memory beside a GPU, or on a drive. Where every
tensor rank has the same input each keeps its part of it, and they are gathered again (ZeRO, arXiv 1910.02054, section
6.1: P_a, P_a+cpu). `fetch` begins to read from the drive, `bring` begins to move to the device and to gather; all
tensor ranks run the same layers in the same order, so their gathers meet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from threed import collectives
from threed.collectives import Pending
from threed.config import Config, ConfigError
from threed.device import beside, current_stream
from threed.layers.recompute import Selective
from threed.layers.slicing import Slicing
from threed.memory.arena import Arena
from threed.memory.io import BLOCK, Disk
from threed.memory.tiers import Drive, InMemory, OnDrive, StagedBuffer, Storage
from threed.topology import Axis, Topology

FETCH_AHEAD = 2  # inputs on their way from the drive
GATHER_AHEAD = 1  # inputs being gathered, or on their way to the device
BUFFERS = 2 * FETCH_AHEAD + 2  # of the drive: read ahead, the one in use, written behind
MOST_ON_DRIVE = BUFFERS - FETCH_AHEAD  # tensors of one input: all of them are in use at once


class StoragePool(Protocol):
    """Places for inputs, used again and again."""

    def take(self, numel: int, dtype: torch.dtype) -> Storage:
        """A place for so many numbers."""

    def give(self, storage: Storage) -> None:
        """The place is free."""


class InArena:
    """Slots of an arena."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def take(self, numel: int, dtype: torch.dtype) -> Storage:
        return InMemory(self.arena.take(numel, dtype))

    def give(self, storage: Storage) -> None:
        assert isinstance(storage, InMemory)
        self.arena.give(storage.tensor)


class OnDrives:
    """Regions of a swap file, each as large as the drive's buffers: whatever the shape, it fits into any of them."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self._drive: Drive | None = None
        self._free: list[OnDrive] = []

    def take(self, numel: int, dtype: torch.dtype) -> Storage:
        drive = self._large_enough(numel * dtype.itemsize)
        storage = self._free.pop() if self._free else drive(drive.nbytes, torch.uint8)
        storage.hold(numel, dtype)
        return storage

    def give(self, storage: Storage) -> None:
        assert isinstance(storage, OnDrive)
        if storage.drive is self._drive:
            self._free.append(storage)
        else:
            self._release(storage)

    def _large_enough(self, nbytes: int) -> Drive:
        """The drive; a new one where its buffers are too small, and larger by half at least: old regions are of no use
        to new inputs, but all of them together are not more than two new ones for each."""
        old = 0 if self._drive is None else self._drive.nbytes
        if self._drive is None or nbytes > old:
            self._drive = Drive(self.disk, max(1, -(-max(nbytes, old * 3 // 2) // BLOCK)) * BLOCK, BUFFERS)
            free, self._free = self._free, []
            for storage in free:
                self._release(storage)
        return self._drive

    def _release(self, storage: OnDrive) -> None:
        if storage.writing is not None:
            storage.writing.wait()  # the next one's write must not be overtaken
        self.disk.release(storage.offset, storage.drive.nbytes)


@dataclass(eq=False)
class SavedInput:
    """A layer's input. value: on the device, whole or this rank's part. arrived: when it has come from the host."""

    shape: torch.Size
    storage: Storage | None = None
    value: Tensor | None = None
    arrived: torch.Event | None = None
    staged: StagedBuffer | None = None
    gathering: Pending | None = None


class ActivationStore:
    """Keeps inputs. axis: over which they are sliced, or None. storages: where copies go; None: inputs themselves stay.
    device: where layers run; storages in the memory of another one are reached by a stream of their own."""

    def __init__(
        self, axis: Axis | None, storages: StoragePool | None, device: torch.device, away: bool = False
    ) -> None:
        self.axis, self.storages, self.device = axis, storages, device
        self._stream = torch.Stream(device) if away and device.type == "cuda" else None
        self._leaving: deque[tuple[torch.Event, StagedBuffer, Tensor]] = deque()

    def save_all(self, given: Sequence[Tensor]) -> tuple[SavedInput, ...]:
        """Keeps the tensors of a layer's input."""
        if len(given) > MOST_ON_DRIVE and isinstance(self.storages, OnDrives):
            raise ValueError(
                f"--recompute.offload nvme keeps at most {MOST_ON_DRIVE} tensors of a layer's input, not {len(given)}:"
                " hand on fewer, or use --recompute.offload cpu"
            )
        return tuple(self.save(x) for x in given)

    def save(self, x: Tensor) -> SavedInput:
        """Keeps x [any shape]; it may be let go as soon as this returns."""
        kept, part, numel = SavedInput(x.shape), x.detach(), x.numel()
        if self.axis is not None:
            numel = -(-numel // self.axis.size)
            first = self.axis.index * numel
            part = part.reshape(-1)[first : first + numel]  # the last ranks' may be short
        if self.storages is None:
            kept.value = self._own(part, numel)
            return kept
        kept.storage = self.storages.take(numel, x.dtype)
        staged = kept.storage.empty()
        self._copy_out(part.reshape(-1), staged)
        return kept

    def _own(self, part: Tensor, numel: int) -> Tensor:
        """A tensor that keeps no more memory alive than its own: itself, or a copy of this rank's part."""
        if self.axis is None:
            return part if part.untyped_storage().nbytes() <= part.nbytes else part.clone()
        own = part.new_empty(numel)
        own[: part.numel()].copy_(part)
        return own

    def _copy_out(self, part: Tensor, staged: StagedBuffer) -> None:
        target = staged.values[: part.numel()]
        if self._stream is None:
            target.copy_(part)
            staged.store()
            return
        with beside(self._stream):
            target.copy_(part, non_blocking=True)
            self._leaving.append((self._stream.record_event(), staged, part))
        self._store_left(at_most=1)

    def _store_left(self, at_most: int) -> None:
        """What has come from the device may go on, and its memory there be used again; all but the last few are waited
        for: by the device, and by the host where it has to write them to a drive."""
        while self._leaving and (len(self._leaving) > at_most or self._leaving[0][0].query()):
            event, staged, _ = self._leaving.popleft()
            current_stream(self.device).wait_event(event)
            if not isinstance(staged, InMemory):
                event.synchronize()
            staged.store()

    def fetch(self, kept: SavedInput) -> None:
        """Begins to read it, if it is on a drive."""
        if kept.storage is not None and kept.staged is None and kept.value is None:
            self._store_left(at_most=0)
            kept.staged = kept.storage.fetch()

    def prefetch(self, kept: SavedInput) -> None:
        """Begins to make it whole on the device."""
        self.fetch(kept)
        with nullcontext() if self._stream is None else beside(self._stream):
            if kept.value is None:
                assert kept.staged is not None
                kept.value = kept.staged.wait().to(self.device, non_blocking=True)
                kept.arrived = None if self._stream is None else self._stream.record_event()
            if self.axis is not None and kept.gathering is None:
                kept.gathering = collectives.start_all_gather(kept.value, self.axis)

    def get(self, kept: SavedInput) -> Tensor:
        """The input, as it was; until `drop` it may lie in the place where it was kept."""
        self.prefetch(kept)
        assert kept.value is not None
        whole = kept.value
        if kept.arrived is not None:
            current_stream(self.device).wait_event(kept.arrived)
        if kept.gathering is not None:
            whole = kept.gathering.wait()
            self.release(kept)
        return whole[: kept.shape.numel()].view(kept.shape) if self.axis is not None or kept.storage else whole

    def release(self, kept: SavedInput) -> None:
        """It is not needed any more; dropping it again does nothing."""
        if kept.gathering is not None:
            kept.gathering.wait()
        if kept.staged is not None:
            if self._stream is not None and not isinstance(kept.storage, InMemory):
                self._stream.synchronize()  # the drive may fill the buffer anew, while it is read from
            kept.staged.drop()
        if kept.storage is not None and self.storages is not None:
            self._store_left(at_most=0)
            self.storages.give(kept.storage)
        kept.storage = kept.value = kept.arrived = kept.staged = kept.gathering = None


@dataclass(frozen=True)
class Recomputed:
    """Units of a stage that are computed again: whole ones from what `store` has, or `selective`'s operations."""

    units: frozenset[int] = frozenset()
    store: ActivationStore | None = None
    selective: Selective | None = None


def choose(layers: Sequence[nn.Module], every: int) -> list[int]:
    """The numbers of the layers to compute again: of those that may be (`recomputable` is not False), every n-th.

    Counted over the whole model, so that it does not depend on how it is cut into stages.
    """
    return [n for n, layer in enumerate(layers) if getattr(layer, "recomputable", True)][::every]


def with_recompute(costs: Sequence[float], again: Sequence[int]) -> Sequence[float]:
    """FLOPs of layers, forward and backward, when those numbered `again` run their forward once more: a third of it."""
    return [cost + cost / 3 if number in again else cost for number, cost in enumerate(costs)]


def build(
    config: Config, units: Mapping[int, nn.Module], live: int, slicing: Slicing, topology: Topology
) -> Recomputed:
    """What a rank's stages compute again.

    units: by number those that are computed again, as a whole or in part. live: micro-batches whose inputs are kept at
    the worst moment.
    """
    r = config.recompute
    if r.mode == "none" or not units:
        return Recomputed()
    if r.mode == "selective":
        selective = Selective(r.ops)
        for layer in units.values():
            selective.install(layer)
        return Recomputed(frozenset(units), selective=selective)
    storages, sliced = _storages(config, topology, len(units) * live), _sliced_over(config, slicing)
    return Recomputed(frozenset(units), ActivationStore(sliced, storages, topology.device, r.offload != "none"))


def on_paper(config: Config, numbers: Sequence[int], slicing: Slicing) -> Recomputed:
    """The same for layers that are only traced: inputs are kept nowhere else."""
    r = config.recompute
    if r.mode == "none" or not numbers:
        return Recomputed()
    if r.mode == "selective":
        return Recomputed(frozenset(numbers), selective=Selective(r.ops))
    return Recomputed(frozenset(numbers), ActivationStore(_sliced_over(config, slicing), None, torch.device("meta")))


def _sliced_over(config: Config, slicing: Slicing) -> Axis | None:
    return slicing.tp if config.recompute.partition and slicing.tp.size > 1 and not slicing.sequence_parallel else None


def _storages(config: Config, topology: Topology, inputs: int) -> StoragePool | None:
    """Where inputs are kept; None where they stay what they are. Host memory beside a CPU is where they are already."""
    r, on_gpu = config.recompute, topology.device.type == "cuda"
    if r.offload == "nvme":
        return OnDrives(Disk(str(config.zero.nvme_path), f"activations-rank{topology.rank}"))
    pinned = r.offload == "cpu" and on_gpu
    if not (r.arena or pinned):
        return None
    device = torch.device("cpu") if pinned else topology.device
    return InArena(Arena(inputs, device, pinned=pinned))


def enable(module: nn.Module, config: Config) -> None:
    """Recompute in a module that is not built from `threed.layers`: its own checkpointing, if it has one.

    Raises ConfigError for what such a module cannot do.
    """
    r, kind = config.recompute, type(module).__name__
    if r.mode == "none":
        return
    fix = "wrap its blocks by torch.utils.checkpoint yourself, or build it from threed.layers"
    named = (getattr(module, f"{what}_checkpointing_enable", None) for what in ("activation", "gradient"))
    found = next((method for method in named if method is not None), None)  # the second is the older name
    if r.mode == "selective":
        raise ConfigError([f"--recompute.mode selective: {kind} has no operations known by name; use full, or {fix}"])
    more = [("every", r.every != 1), ("partition", r.partition), ("offload", r.offload != "none"), ("arena", r.arena)]
    if asked := [f"--recompute.{name}" for name, given in more if given]:
        raise ConfigError([f"{', '.join(asked)}: {kind} is not built from threed.layers; leave out, or {fix}"])
    if found is None:
        raise ConfigError([f"--recompute.mode full: {kind} has no gradient_checkpointing_enable(); {fix}"])
    found({"use_reentrant": False})
