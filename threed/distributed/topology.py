"""The grid of ranks with its process groups, from the point of view of one rank.

    topo = Topology(pp=2, tp=2)        # dp is the remaining factor of the world size
    topo.axis("tp")                    # an Axis: ranks, index of this rank, process group
    topo.link(0, 1)                    # the channel of activations from pipeline stage 0 to stage 1
    Topology.on_meta(grid, rank)       # the same for any rank of any grid, without process groups

Only this module creates process groups. An axis of one rank has no group (`Axis.group is None`),
and collectives on it return at once. All ranks create groups in the same order. Neighboring
pipeline stages have one communicator per direction, so that a send never waits for a receive in the
other direction. With a single communicator, pp = 2 would deadlock, because a stage's previous stage
is also its next stage.
"""

from __future__ import annotations

import atexit
import itertools
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from threed.core import device as gpu
from threed.distributed.grid import AXES, Grid, parse
from threed.distributed.journal import Journal
from threed.distributed.launcher import adopt

# A channel between pipeline ranks: (source, target, whether it is for gradients).
Channel = tuple[int, int, bool]


@dataclass(frozen=True, eq=False)
class Axis:
    """A set of ranks that communicate with each other.

    For example, the axis "tp" consists of the ranks that differ from this rank only in the grid
    coordinate tp.

    Attributes:
        label: key in `traffic` under which the bytes sent over this axis are counted.
        ranks: global ranks, in order.
        index: position of this rank in `ranks`; -1 if it is not a member.
        group: process group; None if the axis has one rank, and on the meta device.
        traffic: bytes sent by this rank, by label; shared by all axes of a topology.
        journal: on the meta device, the collectives of this rank; shared by all axes of a topology.
    """

    label: str
    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None = None
    traffic: Counter[str] = field(default_factory=Counter)
    journal: Journal | None = None
    _of_streams: dict[torch.Stream, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def channel(self) -> dist.ProcessGroup | None:
        """The communicator for the current stream.

        It is the communicator that `give_channel` has set for this stream, otherwise `group`.
        """
        if not self._of_streams:
            return self.group
        return self._of_streams.get(gpu.current_stream(), self.group)

    def give_channel(self, stream: torch.Stream, twin: Axis) -> None:
        """Makes collectives on `stream` use a second communicator.

        NCCL runs the operations of one communicator in the order in which they are enqueued, even
        if they are on different streams. So collectives that should overlap need two communicators.

        Args:
            stream: a stream. Collectives over this axis that run on the stream use the communicator
                of `twin`.
            twin: an axis with the same ranks and a separate communicator.
        """
        if twin.group is not None:
            self._of_streams[stream] = twin.group

    def count(self, sent: int) -> None:
        """Adds `sent` bytes to the counter of this axis."""
        self.traffic[self.label] += sent

    def __deepcopy__(self, memo: object) -> Axis:
        return self  # so that copies of a layer share the axis and its process group


@dataclass(frozen=True, eq=False)
class Link:
    """A one-way channel of activations or gradients between two pipeline ranks.

    It has its own communicator, so that no message waits for one of another channel.

    Attributes:
        peer: global rank at the other end of the channel.
        axis: axis that consists of this rank and `peer`.
    """

    peer: int
    axis: Axis


def alone(label: str = "tp") -> Axis:
    """Returns an axis of one rank, for layers that are not sharded."""
    return Axis(label, (0,), 0)


def is_started() -> bool:
    """Returns whether the default process group exists."""
    return dist.is_available() and dist.is_initialized()


def everyone() -> Axis:
    """Returns the axis of all ranks of the default process group; one rank without a group."""
    if not is_started():
        return alone("world")
    size = dist.get_world_size()
    return Axis(
        "world", tuple(range(size)), dist.get_rank(), dist.group.WORLD if size > 1 else None
    )


TIMEOUT = timedelta(minutes=10)
# `axis + SECOND` is the name of an axis with the same ranks as `axis` but its own communicator.
SECOND = "@second"
# `axis@ep` has the ranks of `axis` and its own communicator, over which tokens travel to experts.
EXPERTS = "ep"


def start(
    device: torch.device | None = None, timeout: timedelta = TIMEOUT, backend: str | None = None
) -> None:
    """Creates the default process group from torchrun's environment variables.

    Does nothing if the group exists already or if the world has one rank.

    Args:
        device: device of this process.
        timeout: time limit of each collective, send and receive.
        backend: name of torch's backend. None means NCCL for a CUDA device, otherwise gloo.
    """
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        # On one machine, use the loopback interface, whatever the host name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    store = dist.PrefixStore(_agree_on_prefix(store, rank, size), store)
    cuda = device is not None and device.type == "cuda" and backend in (None, "nccl")
    dist.init_process_group(
        backend or ("nccl" if cuda else "gloo"), store=store, rank=rank, world_size=size,
        timeout=timeout, device_id=device if cuda else None,
    )  # fmt: skip


def start_always(
    backend: str | None = None, timeout: timedelta = TIMEOUT, init_method: str | None = None,
    rank: int = -1, world: int = -1,
) -> None:  # fmt: skip
    """Creates the default process group, also in a world of one rank. Collective.

    Does nothing if the group exists already. Rank and world size come from the variables of
    torchrun, srun or mpirun, except with `init_method`.

    Args:
        backend: name of torch's backend. None means NCCL on a GPU, otherwise gloo.
        timeout: time limit of each collective, send and receive.
        init_method: URL of a rendezvous, as in `torch.distributed.init_process_group`.
        rank: rank of this process; only for `init_method`.
        world: number of ranks; only for `init_method`.
    """
    if dist.is_initialized():
        return
    device = default_device()
    chosen = backend or ("nccl" if device.type == "cuda" else "gloo")
    if init_method is not None:
        dist.init_process_group(
            chosen, init_method=init_method, rank=rank, world_size=world, timeout=timeout
        )
        return
    adopt()
    gpu.use(device)
    start(device, timeout, backend)
    if not dist.is_initialized():
        dist.init_process_group(
            chosen, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )


def _agree_on_prefix(store: dist.Store, rank: int, size: int) -> str:
    """Returns a key prefix for the store, the same on all ranks and unique to this start.

    When torchrun restarts the ranks, its store keeps the keys of the earlier start, and ranks that
    read these old keys fail to connect. torchrun's restart count cannot be the prefix. The agents
    (one torchrun process per machine) count separately, and the count stays the same if machines
    join or leave. So each rank r > 0 publishes a random word and waits for an answer to it. Rank 0
    answers every word that it finds with its own random word, which is the prefix. Rank 0 also
    answers the words of an earlier start, but no rank reads these answers.
    """
    nonce = secrets.token_hex(8)
    if rank > 0:
        store.set(f"meet/{size}/{rank}", nonce)
        name = store.get(f"ask/{nonce}").decode()
        store.set(f"here/{name}/{rank}", "")
        return name
    words, answers = (
        [f"{key}/{other}" for other in range(1, size)] for key in (f"meet/{size}", f"here/{nonce}")
    )
    answered = set[bytes]()
    while not store.check(answers):
        for word in set(store.multi_get(words)) - answered:
            store.set(f"ask/{word.decode()}", nonce)
            answered.add(word)
        time.sleep(0.02)
    return nonce


def _wait_for_gloo_threads(timeout: float = 1.0) -> None:
    """Waits until gloo's threads have released the tensors of finished collectives.

    A gloo thread needs the GIL to release a tensor, possibly after `wait` of the collective has
    returned. If the interpreter is finalized at that moment, CPython before 3.14 ends the thread,
    and C++ aborts the process (exit code -6, "terminate called without an active exception"). So
    this function waits until no gloo thread is running. A thread that is not running has released
    its tensors, or it waits for the GIL, which it gets while this function sleeps.

    Args:
        timeout: time limit in seconds.
    """
    threads, end, idle = Path("/proc/self/task"), time.monotonic() + timeout, 0
    while idle < 2 and threads.exists() and time.monotonic() < end:
        time.sleep(0.001)
        idle += 1
        for thread in threads.iterdir():
            with suppress(OSError):  # the thread may have ended
                name, _, state = (thread / "stat").read_text().rpartition(") ")
                if name.endswith("(pt_gloo_runloop") and state[0] == "R":
                    idle = 0


def start_from_file(file: str, rank: int, world: int) -> None:
    """Creates the default process group of `world` gloo ranks on one machine, through a file.

    Does nothing for a world of one rank.

    Args:
        file: path in a folder that all ranks share; must not exist yet.
        rank: rank of this process.
        world: number of processes.
    """
    if world > 1:
        dist.init_process_group(
            "gloo", store=dist.FileStore(file, world), rank=rank, world_size=world
        )


def default_device() -> torch.device:
    """Returns this process's device: the GPU of its local rank, or the CPU.

    It is the CPU if the machine has no GPU, torch has no NCCL, or the process group uses gloo. In a
    block of `core.device.assume`, it is a GPU.
    """
    if gpu.assumed() is not None:
        return torch.device("cuda", 0)
    gloo = dist.is_initialized() and dist.get_backend() == "gloo"
    count = gpu.count()
    if count and dist.is_nccl_available() and not gloo:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % count)
    return torch.device("cpu")


def world_axis() -> Axis:
    """Returns the axis of all ranks. Creates the default process group if necessary.

    Collective if the group does not exist yet.
    """
    if not dist.is_initialized():
        adopt()
        device = default_device()
        gpu.use(device)
        start(device)
    return everyone()


def backend() -> str | None:
    """Returns the backend of the default process group; None without a process group."""
    return dist.get_backend() if dist.is_initialized() else None


def backends() -> list[str]:
    """Returns the names of the communication backends that torch was built with."""
    built = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return [name for name, available in built.items() if available]


class Topology:
    """The grid of ranks, and this rank's axes in it. Collective.

    All ranks must create the same topologies in the same order. Rank and world size come from the
    default process group, or from the variables of torchrun, srun or mpirun
    (`threed.distributed.launcher`).

        topo = threed.Topology(pp=2, tp=2)
        topo.axis("tp").index                # position of this rank on the tensor axis

    Args:
        pp: number of pipeline stages.
        tp: number of tensor-parallel ranks.
        cp: number of context-parallel ranks.
        dp: number of data-parallel ranks; by default the world size divided by pp × tp × cp.
        device: device of this process; by default `default_device()`.
        timeout: time limit of each collective, send and receive in all process groups.

    Attributes:
        world: number of ranks.
        rank: global rank of this process.
        pp: number of pipeline stages.
        dp: number of data-parallel ranks.
        cp: number of context-parallel ranks.
        tp: number of tensor-parallel ranks.
        grid: the sizes of all axes.
        coordinates: name of each axis -> position of this rank on this axis.
        traffic: bytes sent by this rank, by label of the axis.
        journal: on the meta device, the collectives of this rank in order; otherwise None.
        is_meta: whether `Topology.on_meta` created the topology, which then has no process groups.

    Raises:
        ValueError: if a size is not an integer of at least 1, or the product of the sizes is not the
            world size.
    """

    def __init__(
        self, pp: int = 1, tp: int = 1, cp: int = 1, dp: int | None = None, device: torch.device | None = None,
        timeout: timedelta = TIMEOUT,
    ) -> None:  # fmt: skip
        if not dist.is_initialized():
            adopt()
        self.device, self.timeout = device or default_device(), timeout
        gpu.use(self.device)
        start(self.device, timeout)
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self._set_up(Grid.of(world, pp=pp, dp=dp, cp=cp, tp=tp), rank, groups=True)
        atexit.unregister(_wait_for_gloo_threads)
        atexit.register(_wait_for_gloo_threads)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a Topology and an Engine, which contains one, cannot be copied or pickled: save an engine with"
            " engine.save(path), or copy engine.module inside `with engine.gathered():`"
        )

    @classmethod
    def on_meta(cls, grid: Grid, rank: int) -> Topology:
        """Returns the topology of one rank of `grid` on the meta device, without process groups.

        It is used for planning: tensors have shapes but no values, and collectives only count
        bytes.

        Args:
            grid: sizes and order of the axes.
            rank: global rank whose topology is returned.
        """
        topology = cls.__new__(cls)
        topology.device = torch.device("meta")
        topology._set_up(grid, rank, groups=False)
        return topology

    def _set_up(self, grid: Grid, rank: int, groups: bool) -> None:
        self.grid, self.world, self.rank, self.is_meta = grid, grid.world, rank, not groups
        self._align_group_counts()
        self.sizes, self.coordinates = grid.sizes, grid.coordinates(rank)
        self.pp = grid.pp
        self.dp = grid.dp
        self.cp = grid.cp
        self.tp = grid.tp
        self.traffic: Counter[str] = Counter()
        self.journal = None if groups else Journal()
        self._ties: dict[tuple[int, ...], Axis] = {}
        self._axes = {name: self._make_axis(name, grid.ranks(rank, name)) for name in AXES}
        everyone = dist.group.WORLD if groups and self.world > 1 else None
        self.data_name = "dp" if grid.cp == 1 else "dp*cp"
        if grid.cp > 1:
            self._axes[self.data_name] = self._make_axis("dp", grid.ranks(rank, self.data_name))
        self._axes["world"] = Axis("world", tuple(range(self.world)), rank, everyone, self.traffic)
        self._links: dict[Channel, Link] = {}
        self._linked: set[Channel] = set()
        line = range(grid.pp - 1)
        self._link([*((s, s + 1, False) for s in line), *((s + 1, s, True) for s in line)])

    def prepare(
        self,
        blocks: Iterable[str] = (),
        ties: Iterable[tuple[int, ...]] = (),
        links: Iterable[Channel] = (),
    ) -> None:
        """Creates the additional process groups that a model needs. Collective over the world.

        All ranks must pass the same arguments. If all groups exist, nothing is sent.

        Args:
            blocks: names of derived axes. "tp/2" is the block of two neighboring tp ranks that
                contains this rank. "dp%2" consists of the dp ranks at an even distance from this
                rank. A name followed by "@word" denotes the same ranks with a separate
                communicator.
            ties: tuples of pipeline stages that hold replicas of one weight. For each tuple an axis
                is created: the ranks on these stages whose other coordinates equal this rank's.
            links: channels (source, target, gradients), as in `link`. Channels of activations
                to the next pipeline rank, and of gradients back, always exist.
        """
        names = sorted(set(blocks) - set(self._axes))
        tied, channels = sorted(set(ties) - set(self._ties)), set(links) - self._linked
        if not (names or tied or channels):
            return
        self._align_group_counts()
        for name in names:
            label = EXPERTS if EXPERTS in name.split("@") else parse(name)[0][0]
            self._axes[name] = self._make_axis(label, self.grid.ranks(self.rank, name))
        for stages in tied:
            self._ties[stages] = self._make_axis("pp", self.grid.stage_ranks(self.rank, stages))
        self._link(channels)

    def axis(self, name: str) -> Axis:
        """Returns an axis by its name.

        Args:
            name: "pp", "dp", "cp", "tp" or "world", or a derived axis that `prepare` created, such
                as "tp/2".
        """
        return self._axes[name]

    def second(self, name: str) -> Axis | None:
        """Returns `axis(name)` with a second communicator; None if `prepare` did not create it."""
        return self._axes.get(name + SECOND)

    def twins(self) -> list[tuple[Axis, Axis]]:
        """Returns (axis, axis with a second communicator) for each axis that has the latter."""
        names = [name for name in self._axes if name + SECOND in self._axes]
        return [(self._axes[name], self._axes[name + SECOND]) for name in names]

    def stages(self, stages: tuple[int, ...]) -> Axis:
        """Returns the axis of the ranks that have replicas of a tied weight.

        Args:
            stages: the pipeline stages that hold the weight; see `ties` in `prepare`.
        """
        return self._ties[stages]

    def link(self, source: int, target: int, gradients: bool = False) -> Link:
        """Returns a channel between two pipeline ranks, of which this rank must be one.

        Args:
            source: pipeline rank that sends.
            target: pipeline rank that receives.
            gradients: whether the channel is for gradients; else it is for activations.
        """
        return self._links[source, target, gradients]

    def host_links(self, pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Link]:
        """Creates gloo channels for tensors in host memory. Collective over the world.

        Bytes that are sent over these channels are not counted in `traffic`.

        Args:
            pairs: (source, target) global ranks; the same on all ranks.

        Returns:
            (source, target) -> channel, for all channels that begin or end at this rank.
        """
        self._align_group_counts()
        links = dict[tuple[int, int], Link]()
        for pair in _disjoint_rounds(sorted(pairs), self.rank):
            group = dist.new_group(
                list(pair or (self.rank,)), timeout=self.timeout, backend="gloo",
                use_local_synchronization=True,
            )  # fmt: skip
            if pair is not None:
                axis = Axis("host", pair, pair.index(self.rank), group)
                links[pair] = Link(pair[1 - axis.index], axis)
        return links

    def shared_axes(self) -> list[Axis]:
        """Returns the axes over which gradients may be reduced, in the same order on all ranks."""
        excluded = {"pp", "world", *(name for name in self._axes if "@" in name)}
        axes = [self._axes[name] for name in sorted(self._axes.keys() - excluded)]
        ties = [self._ties[stages] for stages in sorted(self._ties)]
        return [axis for axis in (*axes, *ties) if axis.size > 1 and axis.index >= 0]

    @property
    def data(self) -> Axis:
        """The axis of ranks that hold the same parameters and reduce their gradients: dp × cp.

        Ranks on "dp" have different samples; ranks on "cp" have different parts of the same
        sequences.
        """
        return self._axes[self.data_name]

    def _align_group_counts(self) -> None:
        """Creates unused groups until torch counts the same number of groups on all ranks.

        torch derives the name of a group from this number (see `_make_axis`). If the program has
        created groups on some ranks only, the numbers differ, and without this method the ranks of
        a new group would give it different names.

        The unused groups use gloo instead of NCCL, because only some ranks create them. If the
        world's NCCL communicator is bound to a device, creating an NCCL group splits this
        communicator, and the split is a collective of all ranks.
        """
        if self.is_meta or self.world == 1:
            return
        groups = dist.distributed_c10d._world
        # torch 2.14 counts created groups, and earlier versions those of which the rank is a member
        count = groups.group_count if torch.__version__ >= "2.14" else len(groups.pg_names)
        largest = torch.tensor(count, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        for _ in range(int(largest) - count):
            dist.new_group([self.rank], backend="gloo", use_local_synchronization=True)

    def _make_axis(self, label: str, ranks: tuple[int, ...]) -> Axis:
        """Returns the axis of `ranks`.

        Only the members synchronize (`use_local_synchronization`), because a collective of a
        thousand ranks takes thousands of round trips to the store. With this option torch derives
        the name of a group from its ranks and the number of groups that the process has created. So
        every rank must create one group in each call; a rank outside of the axis creates an unused
        group of one rank.
        """
        member = self.rank in ranks
        index = ranks.index(self.rank) if member else -1
        if len(ranks) == 1 or self.is_meta:
            return Axis(label, ranks, index, None, self.traffic, self.journal)
        members = list(ranks) if member else [self.rank]
        group = dist.new_group(
            members, timeout=self.timeout, use_local_synchronization=True,
            pg_options=_options(self.timeout),
        )  # fmt: skip
        return Axis(label, ranks, index, group if member else None, self.traffic)

    def _link(self, channels: Iterable[Channel]) -> None:
        """Creates channels. All ranks must pass the same channels."""
        line, missing = self._axes["pp"], set(channels) - self._linked
        self._linked |= missing
        for upward, gradients in itertools.product((True, False), repeat=2):
            pairs = sorted(
                (min(a, b), max(a, b)) for a, b, g in missing if (a < b, g) == (upward, gradients)
            )
            for pair in _disjoint_rounds(pairs, line.index) if not self.is_meta else ():
                axis = self._make_axis("pp", tuple(line.ranks[stage] for stage in pair or ()))
                if pair is not None:
                    source, target = pair if upward else pair[::-1]
                    peer = target if line.index == source else source
                    self._links[source, target, gradients] = Link(line.ranks[peer], axis)


def _options(timeout: timedelta) -> Any:
    """Returns options for a new group of the default backend: with NCCL, high-priority streams.

    On a stream of normal priority, a collective starts only when no thread blocks of the kernels
    that were launched before it are left to schedule.
    """
    if dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # else torch warns that it differs from the argument `timeout`
    return options


def _disjoint_rounds(
    pairs: Sequence[tuple[int, int]], member: int
) -> Iterator[tuple[int, int] | None]:
    """Divides pairs into rounds such that the pairs of one round have no member in common.

    So each rank creates at most one group per round. For each round the function yields the pair
    that contains `member`, or None.
    """
    while pairs:
        seen, later, own = set[int](), list[tuple[int, int]](), None
        for pair in pairs:
            if not seen.isdisjoint(pair):
                later.append(pair)
                continue
            seen.update(pair)
            own = pair if member in pair else own
        yield own
        pairs = later
