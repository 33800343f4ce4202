"""Which layers are computed again in the backward, and where their inputs are kept until then.

    recomputed = build(config, units, live, slicing, topology)      # what a Stage is told
    kept = recomputed.keeper.keep(x)                                # after a layer's forward
    keeper.fetch(kept) · keeper.bring(kept)                         # a few layers ahead of its backward
    x = keeper.take(kept)       ...     keeper.drop(kept)

Kept is the input itself; or a copy in a slot of an arena, in host memory beside a GPU, or on a drive. Where every
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
from threed.memory.tiers import Drive, Home, InMemory, Loan, OnDrive
from threed.topology import Axis, Topology

FETCH_AHEAD = 2  # inputs on their way from the drive
BRING_AHEAD = 1  # inputs being gathered, or on their way to the device
BUFFERS = 2 * FETCH_AHEAD + 2  # of the drive: read ahead, the one in use, written behind
MOST_ON_DRIVE = BUFFERS - FETCH_AHEAD  # tensors of one input: all of them are in use at once


class Homes(Protocol):
    """Places for inputs, used again and again."""

    def take(self, numel: int, dtype: torch.dtype) -> Home:
        """A place for so many numbers."""

    def give(self, home: Home) -> None:
        """The place is free."""


class InArena:
    """Slots of an arena."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def take(self, numel: int, dtype: torch.dtype) -> Home:
        return InMemory(self.arena.take(numel, dtype))

    def give(self, home: Home) -> None:
        assert isinstance(home, InMemory)
        self.arena.give(home.tensor)


class OnDrives:
    """Regions of a swap file, each as large as the drive's buffers: whatever the shape, it fits into any of them."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self._drive: Drive | None = None
        self._free: list[OnDrive] = []

    def take(self, numel: int, dtype: torch.dtype) -> Home:
        drive = self._large_enough(numel * dtype.itemsize)
        home = self._free.pop() if self._free else drive(drive.nbytes, torch.uint8)
        home.hold(numel, dtype)
        return home

    def give(self, home: Home) -> None:
        assert isinstance(home, OnDrive)
        if home.drive is self._drive:
            self._free.append(home)
        else:
            self._release(home)

    def _large_enough(self, nbytes: int) -> Drive:
        """The drive; a new one where its buffers are too small, and larger by half at least: old regions are of no use
        to new inputs, but all of them together are not more than two new ones for each."""
        old = 0 if self._drive is None else self._drive.nbytes
        if self._drive is None or nbytes > old:
            self._drive = Drive(self.disk, max(1, -(-max(nbytes, old * 3 // 2) // BLOCK)) * BLOCK, BUFFERS)
            free, self._free = self._free, []
            for home in free:
                self._release(home)
        return self._drive

    def _release(self, home: OnDrive) -> None:
        if home.writing is not None:
            home.writing.wait()  # the next one's write must not be overtaken
        self.disk.release(home.offset, home.drive.nbytes)


@dataclass(eq=False)
class Kept:
    """A layer's input. value: on the device, whole or this rank's part. arrived: when it has come from the host."""

    shape: torch.Size
    home: Home | None = None
    value: Tensor | None = None
    arrived: torch.Event | None = None
    loan: Loan | None = None
    gathering: Pending | None = None


class Keeper:
    """Keeps inputs. axis: over which they are sliced, or None. homes: where copies go; None: inputs themselves stay.
    device: where layers run; homes in the memory of another one are reached by a stream of their own."""

    def __init__(self, axis: Axis | None, homes: Homes | None, device: torch.device, away: bool = False) -> None:
        self.axis, self.homes, self.device = axis, homes, device
        self._stream = torch.Stream(device) if away and device.type == "cuda" else None
        self._leaving: deque[tuple[torch.Event, Loan, Tensor]] = deque()

    def keep_all(self, given: Sequence[Tensor]) -> tuple[Kept, ...]:
        """Keeps the tensors of a layer's input."""
        if len(given) > MOST_ON_DRIVE and isinstance(self.homes, OnDrives):
            raise ValueError(
                f"--recompute.offload nvme keeps at most {MOST_ON_DRIVE} tensors of a layer's input, not {len(given)}:"
                " hand on fewer, or use --recompute.offload cpu"
            )
        return tuple(self.keep(x) for x in given)

    def keep(self, x: Tensor) -> Kept:
        """Keeps x [any shape]; it may be let go as soon as this returns."""
        kept, part, numel = Kept(x.shape), x.detach(), x.numel()
        if self.axis is not None:
            numel = -(-numel // self.axis.size)
            first = self.axis.index * numel
            part = part.reshape(-1)[first : first + numel]  # the last ranks' may be short
        if self.homes is None:
            kept.value = self._own(part, numel)
            return kept
        kept.home = self.homes.take(numel, x.dtype)
        loan = kept.home.blank()
        self._copy_out(part.reshape(-1), loan)
        return kept

    def _own(self, part: Tensor, numel: int) -> Tensor:
        """A tensor that keeps no more memory alive than its own: itself, or a copy of this rank's part."""
        if self.axis is None:
            return part if part.untyped_storage().nbytes() <= part.nbytes else part.clone()
        own = part.new_empty(numel)
        own[: part.numel()].copy_(part)
        return own

    def _copy_out(self, part: Tensor, loan: Loan) -> None:
        target = loan.values[: part.numel()]
        if self._stream is None:
            target.copy_(part)
            loan.store()
            return
        with beside(self._stream):
            target.copy_(part, non_blocking=True)
            self._leaving.append((self._stream.record_event(), loan, part))
        self._store_left(at_most=1)

    def _store_left(self, at_most: int) -> None:
        """What has come from the device may go on, and its memory there be used again; all but the last few are waited
        for: by the device, and by the host where it has to write them to a drive."""
        while self._leaving and (len(self._leaving) > at_most or self._leaving[0][0].query()):
            event, loan, _ = self._leaving.popleft()
            current_stream(self.device).wait_event(event)
            if not isinstance(loan, InMemory):
                event.synchronize()
            loan.store()

    def fetch(self, kept: Kept) -> None:
        """Begins to read it, if it is on a drive."""
        if kept.home is not None and kept.loan is None and kept.value is None:
            self._store_left(at_most=0)
            kept.loan = kept.home.fetch()

    def bring(self, kept: Kept) -> None:
        """Begins to make it whole on the device."""
        self.fetch(kept)
        with nullcontext() if self._stream is None else beside(self._stream):
            if kept.value is None:
                assert kept.loan is not None
                kept.value = kept.loan.wait().to(self.device, non_blocking=True)
                kept.arrived = None if self._stream is None else self._stream.record_event()
            if self.axis is not None and kept.gathering is None:
                kept.gathering = collectives.start_all_gather(kept.value, self.axis)

    def take(self, kept: Kept) -> Tensor:
        """The input, as it was; until `drop` it may lie in the place where it was kept."""
        self.bring(kept)
        assert kept.value is not None
        whole = kept.value
        if kept.arrived is not None:
            current_stream(self.device).wait_event(kept.arrived)
        if kept.gathering is not None:
            whole = kept.gathering.wait()
            self.drop(kept)
        return whole[: kept.shape.numel()].view(kept.shape) if self.axis is not None or kept.home else whole

    def drop(self, kept: Kept) -> None:
        """It is not needed any more; dropping it again does nothing."""
        if kept.gathering is not None:
            kept.gathering.wait()
        if kept.loan is not None:
            if self._stream is not None and not isinstance(kept.home, InMemory):
                self._stream.synchronize()  # the drive may fill the buffer anew, while it is read from
            kept.loan.drop()
        if kept.home is not None and self.homes is not None:
            self._store_left(at_most=0)
            self.homes.give(kept.home)
        kept.home = kept.value = kept.arrived = kept.loan = kept.gathering = None


@dataclass(frozen=True)
class Recomputed:
    """Units of a stage that are computed again: whole ones from what `keeper` has, or `selective`'s operations."""

    units: frozenset[int] = frozenset()
    keeper: Keeper | None = None
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
    homes, sliced = _homes(config, topology, len(units) * live), _sliced_over(config, slicing)
    return Recomputed(frozenset(units), Keeper(sliced, homes, topology.device, r.offload != "none"))


def on_paper(config: Config, numbers: Sequence[int], slicing: Slicing) -> Recomputed:
    """The same for layers that are only traced: inputs are kept nowhere else."""
    r = config.recompute
    if r.mode == "none" or not numbers:
        return Recomputed()
    if r.mode == "selective":
        return Recomputed(frozenset(numbers), selective=Selective(r.ops))
    return Recomputed(frozenset(numbers), Keeper(_sliced_over(config, slicing), None, torch.device("meta")))


def _sliced_over(config: Config, slicing: Slicing) -> Axis | None:
    return slicing.tp if config.recompute.partition and slicing.tp.size > 1 and not slicing.scattered else None


def _homes(config: Config, topology: Topology, inputs: int) -> Homes | None:
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
