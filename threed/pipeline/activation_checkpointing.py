"""Activation checkpointing: which layers are recomputed in the backward, and where their inputs are
saved until then.

    recomputed = build(config, units, live, slicing, topology, unlike)    # an argument of `Stage`
    store = recomputed.store
    saved = store.save(x)                          # after a layer's forward; x: input of the layer
    store.fetch(saved); store.prefetch(saved)      # a few layers before the layer's backward
    x = store.get(saved)                           # in the backward, before the input is used
    store.release(saved)                           # in the backward, after the input was used

A saved input is either the tensor itself, or a copy. A copy is in a slot of an arena (a
preallocated buffer, `threed.memory.arena`), in host memory or on a drive. If all tensor ranks have
the same input (`replicated_inputs`), each rank may save only its slice, and the slices are gathered
before the backward (ZeRO, arXiv 1910.02054, section 6.1: P_a, P_a+cpu). `fetch` starts to read the
input from the drive. `prefetch` starts to copy it to the device and to gather its slices. All
tensor ranks run the same layers in the same order, so they also start these gathers in the same
order.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from threed.config import Config, ConfigError
from threed.core.device import copy_stream, current_stream, is_accelerator, on_stream
from threed.distributed import collectives
from threed.distributed.collectives import Pending, overlaps_kernels
from threed.distributed.topology import Axis, Topology
from threed.layers.contract import contract
from threed.layers.linear import Product
from threed.layers.loss import LanguageModelHead
from threed.layers.mlp import MLP
from threed.layers.recompute import Selective
from threed.layers.slicing import Flag, Slicing
from threed.memory.arena import Arena
from threed.memory.io import BLOCK, Disk
from threed.memory.tiers import Drive, InMemory, OnDrive, StagedBuffer, Storage
from threed.models.wrapped import Wrapped
from threed.pipeline.replicated_inputs import ReplicatedInputs

META = torch.device("meta")
FETCH_AHEAD = 2  # number of inputs that are read from the drive ahead of their use
GATHER_AHEAD = 1  # number of inputs that are copied to the device, or gathered, ahead of their use
# Number of host buffers of a drive, for inputs that are being read, used or written.
BUFFERS = 2 * FETCH_AHEAD + 2
# Largest number of tensors in a layer's input, if inputs are saved on a drive. All tensors of an
# input are in use at the same time, each in one buffer. The other buffers are needed to read the
# inputs of other layers ahead.
MOST_ON_DRIVE = BUFFERS - FETCH_AHEAD
Part = TypeVar("Part", bound=nn.Module)
_NONE = object()  # the value of an attribute that does not exist


class StoragePool(Protocol):
    """A pool of reusable storages for saved inputs."""

    def take(self, numel: int, dtype: torch.dtype) -> Storage:
        """Returns a storage for `numel` values."""

    def give(self, storage: Storage) -> None:
        """Gives a storage back to the pool, for reuse."""


class InArena:
    """A pool of storages in memory; each storage is a slot of an arena."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def take(self, numel: int, dtype: torch.dtype) -> Storage:
        return InMemory(self.arena.take(numel, dtype))

    def give(self, storage: Storage) -> None:
        assert isinstance(storage, InMemory)
        self.arena.give(storage.tensor)


class OnDrives:
    """A pool of storages in a swap file.

    All storages are as large as the drive's host buffers. So any free storage can hold any input.
    """

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
        """Returns a drive whose buffers have at least `nbytes` bytes.

        If the buffers of the current drive are too small, a drive with larger buffers replaces it.
        From then on, saved inputs use regions of the new size in the swap file. Smaller regions are
        released, but the swap file reuses a region only for the same size, so their space may stay
        unused. To bound this space, new buffers are at least 1.5 times as large as the old ones:
        all smaller regions together take at most twice the space of the new ones.
        """
        old = 0 if self._drive is None else self._drive.nbytes
        if self._drive is None or nbytes > old:
            self._drive = Drive(
                self.disk, max(1, -(-max(nbytes, old * 3 // 2) // BLOCK)) * BLOCK, BUFFERS
            )
            free, self._free = self._free, []
            for storage in free:
                self._release(storage)
        return self._drive

    def _release(self, storage: OnDrive) -> None:
        if storage.writing is not None:
            storage.writing.wait()  # the region may be reused only after this write has ended
        self.disk.release(storage.offset, storage.drive.nbytes)


@dataclass(eq=False)
class SavedInput:
    """One saved input tensor of a layer.

    Attributes:
        shape: shape of the input.
        axis: the ranks over which the input is sliced; None if it is saved in full.
        sample: some elements of the full input, to check the input after slices are gathered; None
            if the input is not sliced or not checked.
        storage: storage of the copy; None if the tensor itself is saved.
        value: the full input, or this rank's slice of it, on the device; None while only `storage`
            has the values.
        arrived: event recorded after the copy from host memory to the device; None without a copy.
        staged: buffer into which the input is read from its storage; None before `fetch` is called.
        gathering: the all-gather of the slices while it is in flight, else None.
    """

    shape: torch.Size
    axis: Axis | None = None
    sample: Tensor | None = None
    storage: Storage | None = None
    value: Tensor | None = None
    arrived: torch.Event | None = None
    staged: StagedBuffer | None = None
    gathering: Pending | None = None


class ActivationStore:
    """Saves inputs of layers until their backward.

    Args:
        axis: ranks over which inputs are sliced; None to save inputs in full.
        storages: pool of storages for copies; None to save the inputs themselves.
        device: device of the layers.
        away: whether the storages are not on `device`. Copies then use a separate stream.
        replicated: object that determines which inputs are equal on all tensor ranks; only these
            are sliced. None if all inputs are equal on all tensor ranks.
    """

    def __init__(
        self, axis: Axis | None, storages: StoragePool | None, device: torch.device, away: bool = False,
        replicated: ReplicatedInputs | None = None,
    ) -> None:  # fmt: skip
        self.axis, self.storages, self.device, self.replicated = axis, storages, device, replicated
        self._stream = (
            copy_stream(device, "activations") if away and is_accelerator(device) else None
        )
        self._outgoing: deque[tuple[torch.Event, StagedBuffer, Tensor]] = deque()

    def save_all(self, unit: int, given: Sequence[Tensor]) -> tuple[SavedInput, ...]:
        """Saves the input tensors of layer `unit`.

        Raises:
            ValueError: if inputs are saved on a drive and there are more than `MOST_ON_DRIVE`
                tensors.
        """
        if len(given) > MOST_ON_DRIVE and isinstance(self.storages, OnDrives):
            raise ValueError(
                f"--recompute.offload nvme saves at most {MOST_ON_DRIVE} tensors of a layer's input, not {len(given)}:"
                " pass fewer, or use --recompute.offload cpu"
            )
        return tuple(self.save(x, (unit, number)) for number, x in enumerate(given))

    def save(self, x: Tensor, place: tuple[int, int] = (0, 0)) -> SavedInput:
        """Saves a tensor; the caller may drop it as soon as this method returns.

        Args:
            x: the tensor, of any shape.
            place: (index of the layer, index of the tensor in the layer's input).
        """
        saved, part, numel = SavedInput(x.shape), x.detach(), x.numel()
        if self.axis is not None and (
            self.replicated is None or self.replicated.is_replicated(place, x)
        ):
            saved.axis = self.axis
            saved.sample = None if self.replicated is None else self.replicated.sample(x)
            numel = -(-numel // self.axis.size)
            first = self.axis.index * numel
            # the slices of the last ranks may be shorter than `numel`
            part = part.reshape(-1)[first : first + numel]
        if self.storages is None:
            saved.value = self._own(part, numel, saved.axis is not None)
            return saved
        saved.storage = self.storages.take(numel, x.dtype)
        staged = saved.storage.empty()
        self._copy_out(part.reshape(-1), staged)
        return saved

    def _own(self, part: Tensor, numel: int, sliced: bool) -> Tensor:
        """Returns `part`, or a copy of it if `part` would keep more memory alive than it needs.

        If `sliced`, `part` is always copied, and padded to `numel` elements: the slices of the last
        ranks may be shorter.
        """
        if not sliced:
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
        with on_stream(self._stream):
            target.copy_(part, non_blocking=True)
            self._outgoing.append((self._stream.record_event(), staged, part))
        self._store_left(at_most=1)

    def _store_left(self, at_most: int) -> None:
        """Calls `store` of the staged buffers that `_copy_out` has begun to fill, oldest first.

        The newest `at_most` buffers are stored only if their copies have finished. The device's
        current stream waits for each copy, so that the memory of the copied tensor can be reused.
        The host waits for a copy only if it is written to a drive.
        """
        while self._outgoing and (len(self._outgoing) > at_most or self._outgoing[0][0].query()):
            event, staged, _ = self._outgoing.popleft()
            current_stream(self.device).wait_event(event)
            if not isinstance(staged, InMemory):
                event.synchronize()
            staged.store()

    def fetch(self, saved: SavedInput) -> None:
        """Starts to read a saved input from the drive, if it is on a drive."""
        if saved.storage is not None and saved.staged is None and saved.value is None:
            self._store_left(at_most=0)
            saved.staged = saved.storage.fetch()

    def prefetch(self, saved: SavedInput) -> None:
        """Starts to copy a saved input to the device, and to gather its slices.

        Collective if the input is sliced.
        """
        self.fetch(saved)
        with nullcontext() if self._stream is None else on_stream(self._stream):
            if saved.value is None:
                assert saved.staged is not None
                saved.value = saved.staged.wait().to(self.device, non_blocking=True)
                saved.arrived = None if self._stream is None else self._stream.record_event()
            if saved.axis is not None and saved.gathering is None:
                saved.gathering = collectives.start_all_gather(saved.value, saved.axis)

    def get(self, saved: SavedInput, own: bool = False) -> Tensor:
        """Returns a saved input in full. Collective if the input is sliced.

        Args:
            saved: the result of `save`.
            own: whether the result must stay valid after `release`; if False, it may be a view of
                the storage.
        """
        self.prefetch(saved)
        assert saved.value is not None
        full = saved.value
        if saved.arrived is not None:
            current_stream(self.device).wait_event(saved.arrived)
        if saved.gathering is not None:
            full = saved.gathering.wait()[: saved.shape.numel()]
            if self.replicated is not None and saved.sample is not None:
                self.replicated.check(saved.sample, full)
            self.release(saved)
        elif own and saved.storage is not None and saved.arrived is None:
            full = full.clone()
        if saved.axis is not None or saved.storage:
            return full[: saved.shape.numel()].view(saved.shape)
        return full

    def release(self, saved: SavedInput) -> None:
        """Frees a saved input. May be called repeatedly."""
        if saved.gathering is not None:
            saved.gathering.wait()
        if saved.staged is not None:
            if self._stream is not None and not isinstance(saved.storage, InMemory):
                # the stream must have read the buffer before the drive reuses it
                self._stream.synchronize()
            saved.staged.drop()
        if saved.storage is not None and self.storages is not None:
            self._store_left(at_most=0)
            self.storages.give(saved.storage)
        saved.storage = saved.value = saved.arrived = saved.staged = saved.gathering = (
            saved.sample
        ) = None


@dataclass(frozen=True)
class Recomputed:
    """The units (layers) that are recomputed in the backward.

    Attributes:
        units: indices of the units.
        store: store for the inputs of the units, if the units are recomputed in full; else None.
        selective: the operations to recompute, if the units are recomputed only in part; else None.
    """

    units: frozenset[int] = frozenset()
    store: ActivationStore | None = None
    selective: Selective | None = None


def choose(layers: Sequence[nn.Module], every: int) -> list[int]:
    """Returns the indices of the layers to recompute.

    Only layers whose attribute `recomputable` is not False can be recomputed. Of these layers, the
    result contains the first one, and every `every`-th one after it. Layers are counted over the
    full model, so that the choice does not depend on the pipeline stages.
    """
    return [n for n, layer in enumerate(layers) if contract(layer).recomputable][::every]


def recomputed_layers(config: Config, layers: Sequence[nn.Module]) -> list[int]:
    """Returns the indices of the layers that are recomputed in full or in part."""
    return [] if config.recompute.mode == "none" else choose(layers, config.recompute.every)


def fully_recomputed(config: Config, layers: Sequence[nn.Module]) -> list[int]:
    """Returns the indices of the layers that are recomputed in full."""
    return recomputed_layers(config, layers) if config.recompute.mode == "full" else []


def configure(config: Config, layers: Sequence[nn.Module]) -> None:
    """Sets how layers recompute parts of themselves.

    Column-parallel layers gather their inputs again in the backward, and MLPs run on chunks of the
    sequence. Chunks of the loss are only checked here, because a head reads their number from the
    micro-batch.

    Args:
        config: the configuration, with the section `recompute`.
        layers: all layers of the model.

    Raises:
        ConfigError: if heads or MLPs are to run on chunks, and the model has none, or an MLP that
            cannot.
    """
    chosen, full = config.recompute.gathered, fully_recomputed(config, layers)
    if config.recompute.loss_chunks > 1 and not _find(LanguageModelHead, layers):
        given, what = f"--recompute.loss-chunks {config.recompute.loss_chunks}", _title(layers)
        fix = "use --recompute.loss-chunks 1"
        raise ConfigError([f"{given}: {what} has no layers.LanguageModelHead; {fix}"])
    again = _set_chunks(config.recompute.mlp_chunks, layers)
    for number, layer in enumerate(layers):
        for module in layer.modules():
            if isinstance(module, Product) and module.gather:
                # A layer that is recomputed saves the gathered input only until its backward.
                kept = number in full or module in again
                automatic = not kept and overlaps_kernels(module.axis)
                module.set_regather(automatic if chosen == "auto" else bool(chosen))


def _find(kind: type[Part], layers: Sequence[nn.Module]) -> list[Part]:
    """Returns the modules of a class in all layers."""
    return [part for layer in layers for part in layer.modules() if isinstance(part, kind)]


def _title(layers: Sequence[nn.Module]) -> str:
    """Returns how error messages refer to the model with these layers."""
    return "a wrapped module" if isinstance(layers[0], Wrapped) else "this model"


def _set_chunks(chunks: int, layers: Sequence[nn.Module]) -> set[nn.Module]:
    """Sets the number of chunks of all MLPs; returns the modules that chunks compute again."""
    mlps = _find(MLP, layers)
    given, fix = f"--recompute.mlp-chunks {chunks}", "use --recompute.mlp-chunks 1"
    if chunks > 1 and not mlps:
        what = _title(layers)
        raise ConfigError([f"{given}: {what} has no layers.MLP or layers.GatedMLP; {fix}"])
    for mlp in mlps:
        if chunks > 1 and getattr(mlp.forward, "__func__", None) is not MLP.forward:
            kind = type(mlp).__name__
            raise ConfigError([f"{given}: {kind} replaces the forward of layers.MLP; {fix}"])
        mlp.set_chunks(chunks)
    return {part for mlp in mlps if chunks > 1 for part in mlp.modules()}


def with_recompute(costs: Sequence[float], again: Sequence[int]) -> Sequence[float]:
    """Returns the FLOPs of each layer, forward and backward together, with recomputation.

    Args:
        costs: FLOPs per layer without recomputation; the forward takes a third of them.
        again: indices of the layers that are recomputed in full; their forward runs twice.
    """
    return [cost + cost / 3 if number in again else cost for number, cost in enumerate(costs)]


def build(
    config: Config,
    units: Mapping[int, nn.Module],
    live: int,
    slicing: Slicing,
    topology: Topology,
    unlike: Flag,
) -> Recomputed:
    """Returns the recomputation settings of a rank's stages.

    Args:
        config: the configuration, with the section `recompute`.
        units: the layers of this rank that are recomputed in full or in part. The key of a layer is
            its index among the layers of this rank.
        live: largest number of micro-batches for which inputs are saved at the same time.
        slicing: the model's slicing, with its tensor ranks.
        topology: the process topology, with the device of this rank.
        unlike: flag that is set if an input was sliced although it differs between tensor ranks.
    """
    r = config.recompute
    if r.mode == "none" or not units:
        return Recomputed()
    if r.mode == "selective":
        selective = Selective(r.ops)
        for layer in units.values():
            selective.install(layer)
        return Recomputed(frozenset(units), selective=selective)
    storages, sliced = _storages(config, topology, len(units) * live), sliced_over(config, slicing)
    replicated = None if sliced is None else ReplicatedInputs(sliced, unlike)
    store = ActivationStore(sliced, storages, topology.device, r.offload != "none", replicated)
    return Recomputed(frozenset(units), store)


def for_tracing(
    config: Config, numbers: Sequence[int], slicing: Slicing, device: torch.device = META
) -> Recomputed:
    """Returns the recomputation settings of layers that are traced or timed one by one.

    Their store saves the inputs themselves, not copies.

    Args:
        config: the configuration, with the section `recompute`.
        numbers: indices of the recomputed layers in the model.
        slicing: the model's slicing, with its tensor ranks.
        device: device of the layers.
    """
    r = config.recompute
    if r.mode == "none" or not numbers:
        return Recomputed()
    if r.mode == "selective":
        return Recomputed(frozenset(numbers), selective=Selective(r.ops))
    return Recomputed(
        frozenset(numbers), ActivationStore(sliced_over(config, slicing), None, device)
    )


def sliced_over(config: Config, slicing: Slicing) -> Axis | None:
    """Returns the tensor ranks over which saved inputs are sliced; None to save them in full."""
    if config.recompute.partition and slicing.tp.size > 1 and not slicing.sequence_parallel:
        return slicing.tp
    return None


def _storages(config: Config, topology: Topology, inputs: int) -> StoragePool | None:
    """Returns the pool for copies of inputs, or None if the inputs themselves are saved.

    If the device is a CPU, `--recompute.offload cpu` has no effect.

    Args:
        config: the configuration, with the section `recompute`.
        topology: the process topology, with the device of this rank.
        inputs: largest number of inputs that are saved at the same time.
    """
    r, on_gpu = config.recompute, is_accelerator(topology.device)
    if r.offload == "nvme":
        return OnDrives(Disk(str(config.zero.nvme_path), f"activations-rank{topology.rank}"))
    pinned = r.offload == "cpu" and on_gpu
    if not (r.arena or pinned):
        return None
    device = torch.device("cpu") if pinned else topology.device
    return InArena(Arena(inputs, device, pinned=pinned))


def enable(module: nn.Module, config: Config) -> Callable[[], None]:
    """Enables recomputation in a module that is not built from `threed.layers`.

    Calls the module's method `activation_checkpointing_enable` or, if it does not exist,
    `gradient_checkpointing_enable`. Has no effect with `--recompute.mode none`.

    Returns:
        A function that sets the attributes and hooks of all submodules back that the method has
        changed, unless they were changed again since.

    Raises:
        ConfigError: if the module does not support the configured recomputation.
    """
    r, kind = config.recompute, type(module).__name__
    if r.mode == "none":
        return lambda: None
    fix = "wrap its blocks by torch.utils.checkpoint yourself, or build it from threed.layers"
    named = (
        getattr(module, f"{what}_checkpointing_enable", None) for what in ("activation", "gradient")
    )
    # `gradient_checkpointing_enable` is the older name, used if the newer one does not exist
    found = next((method for method in named if method is not None), None)
    if r.mode == "selective":
        raise ConfigError(
            [f"--recompute.mode selective: {kind} has no named operations; use full, or {fix}"]
        )
    more = [
        ("every", r.every != 1),
        ("partition", r.partition),
        ("offload", r.offload != "none"),
        ("arena", r.arena),
    ]
    if refused := [f"--recompute.{name}" for name, given in more if given]:
        raise ConfigError(
            [f"{', '.join(refused)}: {kind} is not built from threed.layers; leave out, or {fix}"]
        )
    if found is None:
        raise ConfigError(
            [f"--recompute.mode full: {kind} has no gradient_checkpointing_enable(); {fix}"]
        )
    before = _attributes(module)
    found({"use_reentrant": False})
    return functools.partial(_set_back, list(_changes(before, _attributes(module))))


def _attributes(module: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """Returns the attributes of all submodules; dicts, such as those with hooks, are copied."""
    return {
        part: {k: dict(v) if isinstance(v, dict) else v for k, v in vars(part).items()}
        for part in module.modules()
    }


def _changes(
    before: Mapping[nn.Module, Mapping[str, Any]], after: Mapping[nn.Module, Mapping[str, Any]]
) -> Iterator[tuple[dict[Any, Any], Any, Any, Any]]:
    """Yields the differences between two results of `_attributes`.

    Yields:
        (dict, key, old value, new value): the `__dict__` of a module, or a dict in it, and a key
        whose value was changed or added. The old value of an added key is `_NONE`.
    """
    for part, attributes in after.items():
        for name, value in attributes.items():
            old = before.get(part, {}).get(name, _NONE)
            if isinstance(value, dict) and isinstance(old, dict):
                pairs = ((k, old.get(k, _NONE), v) for k, v in value.items())
                yield from ((vars(part)[name], k, o, v) for k, o, v in pairs if o is not v)
            elif old is not value:
                yield vars(part), name, old, value


def _set_back(changes: Sequence[tuple[dict[Any, Any], Any, Any, Any]]) -> None:
    """Undoes the changes from `_changes`, except values that were changed again since."""
    for values, key, old, new in changes:
        if values.get(key, _NONE) is not new:
            continue
        if old is _NONE:
            del values[key]
        else:
            values[key] = old
