"""A grid with process groups, as one rank sees it: the only maker of process groups.

    topo = Topology(pp=2, tp=2)        # dp is what is left of the world
    topo.axis("tp")                    # an Axis: size, my index, the ranks, the group
    topo.link(0, 1)                    # the channel that carries activations from stage 0 to stage 1
    Topology.drawn(grid, rank)         # the same of any rank of any grid, without groups: for planning

A group of one rank is no group at all (`Axis.group is None`): collectives on it do nothing, on the same code path.
Groups are made in one fixed order, and a pair of pipeline neighbours gets one communicator per direction, so that a
send never waits behind a receive of the other direction (the deadlock of pp = 2, where the previous rank is also the
next).
"""

from __future__ import annotations

import atexit
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

from threed import device as gpu
from threed.launcher import adopt
from threed.planner.grid import AXES, Grid, parse


@dataclass(frozen=True, eq=False)
class Axis:
    """The ranks that differ from this one in one coordinate only: its line through the grid.

    `label` names the counter that its traffic (bytes sent by this rank) is added to.
    """

    label: str
    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None = None
    traffic: Counter[str] = field(default_factory=Counter)
    _of_streams: dict[torch.Stream, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def channel(self) -> dist.ProcessGroup | None:
        """The communicator for the current stream: `group`, or that of `give_channel`."""
        if not self._of_streams:
            return self.group
        return self._of_streams.get(gpu.current_stream(), self.group)

    def give_channel(self, stream: torch.Stream, twin: Axis) -> None:
        """Uses the communicator of `twin`, an axis of the same ranks, for collectives on `stream`.

        NCCL runs the operations of a communicator in the order in which they are enqueued, even if
        they are enqueued on different streams.
        """
        if twin.group is not None:
            self._of_streams[stream] = twin.group

    def count(self, sent: int) -> None:
        """Adds `sent` bytes to this axis's counter."""
        self.traffic[self.label] += sent

    def __deepcopy__(self, memo: object) -> Axis:
        return self  # a copy of a layer talks to the same ranks


@dataclass(frozen=True, eq=False)
class Link:
    """A one-way channel between two pipeline stages: its own communicator, and the rank at the other end."""

    peer: int
    axis: Axis


def alone(label: str = "tp") -> Axis:
    """An axis of one rank: what a layer gets when nothing is split."""
    return Axis(label, (0,), 0)


TIMEOUT = timedelta(minutes=10)
SECOND = "@second"  # after an axis's name: its ranks with a second communicator


def start(device: torch.device | None = None, timeout: timedelta = TIMEOUT) -> None:
    """Makes the default process group from torchrun's variables, unless there is one or this process is alone."""
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        # one machine: never depend on what its name resolves to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    store = dist.PrefixStore(_meet(store, rank, size), store)
    cuda = device is not None and device.type == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=rank, world_size=size, timeout=timeout,
        device_id=device if cuda else None,
    )  # fmt: skip


def _meet(store: dist.Store, rank: int, size: int) -> str:
    """Returns a name that the ranks of this start, and no others, have for it: a prefix for their keys in the store.

    After a restart torchrun's store still holds the keys of the attempt before, and connecting by them fails. Its count
    of restarts is no name: each agent has its own, and a change of the nodes counts for none. So each rank leaves a
    word that is new, and the first one asks at each such word until somebody answers: those of an earlier start do not.
    """
    mine = secrets.token_hex(8)
    if rank > 0:
        store.set(f"meet/{size}/{rank}", mine)
        name = store.get(f"ask/{mine}").decode()
        store.set(f"here/{name}/{rank}", "")
        return name
    words, answers = (
        [f"{key}/{other}" for other in range(1, size)] for key in (f"meet/{size}", f"here/{mine}")
    )
    asked = set[bytes]()
    while not store.check(answers):
        for word in set(store.multi_get(words)) - asked:
            store.set(f"ask/{word.decode()}", mine)
            asked.add(word)
        time.sleep(0.02)
    return mine


def _settle(timeout: float = 1.0) -> None:
    """Waits until gloo's threads have released the tensors of finished collectives: at most `timeout` seconds.

    A thread takes the GIL to release a tensor, which may be after the wait for its collective has returned. If the
    interpreter is finalized by then, CPython before 3.14 ends the thread, and C++ aborts the process: exit code -6,
    "terminate called without an active exception". A thread that is not running has released its tensors or waits for
    the GIL, and gets it while this function sleeps.
    """
    threads, end, idle = Path("/proc/self/task"), time.monotonic() + timeout, 0
    while idle < 2 and threads.exists() and time.monotonic() < end:
        time.sleep(0.001)
        idle += 1
        for thread in threads.iterdir():
            with suppress(OSError):  # it may end meanwhile
                name, _, state = (thread / "stat").read_text().rpartition(") ")
                if name.endswith("(pt_gloo_runloop") and state[0] == "R":
                    idle = 0


def start_from_file(file: str, rank: int, world: int) -> None:
    """Makes the default process group of `world` gloo ranks on this machine that meet in a file; one alone needs none.

    file: of a folder that they share; it must not exist yet.
    """
    if world > 1:
        dist.init_process_group(
            "gloo", store=dist.FileStore(file, world), rank=rank, world_size=world
        )


def default_device() -> torch.device:
    """The device of this process: its local GPU where there is one, unless its ranks talk by gloo; else the CPU."""
    gloo = dist.is_initialized() and dist.get_backend() == "gloo"
    count = gpu.count()
    if count and dist.is_nccl_available() and not gloo:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % count)
    return torch.device("cpu")


def backends() -> list[str]:
    """The communication backends this torch was built with."""
    built = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return [name for name, there in built.items() if there]


class Topology:
    """The grid of ranks and this rank's axes through it.

    pp, dp, cp, tp: sizes; dp defaults to what is left of the world. timeout: of every group; an operation that takes
    longer fails. Ranks are torchrun's, or those of srun or mpirun (`threed.launcher`). Raises ValueError when the sizes
    do not make up the world, naming each factor. Collective: every rank of the world makes the same topologies in the
    same order.
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
        atexit.unregister(_settle)
        atexit.register(_settle)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a Topology, and an Engine, which has one, cannot be copied or pickled: write an engine with"
            " engine.save(path), or copy engine.module inside `with engine.gathered():`"
        )

    @classmethod
    def drawn(cls, grid: Grid, rank: int) -> Topology:
        """What a rank of a grid sees, on paper: its axes have no groups, and its tensors have shapes and no values."""
        topology = cls.__new__(cls)
        topology.device = torch.device("meta")
        topology._set_up(grid, rank, groups=False)
        return topology

    def _set_up(self, grid: Grid, rank: int, groups: bool) -> None:
        self.grid, self.world, self.rank, self.on_paper = grid, grid.world, rank, not groups
        self._even_out()
        self.sizes, self.coordinates = grid.sizes, grid.coordinates(rank)
        self.pp = grid.pp
        self.dp = grid.dp
        self.tp = grid.tp
        self.traffic: Counter[str] = Counter()
        self._ties: dict[tuple[int, ...], Axis] = {}
        self._axes = {name: self._line(name, grid.ranks(rank, name)) for name in AXES}
        everyone = dist.group.WORLD if groups and self.world > 1 else None
        self.data_name = "dp" if grid.cp == 1 else "dp*cp"
        if grid.cp > 1:
            self._axes[self.data_name] = self._line("dp", grid.ranks(rank, self.data_name))
        self._axes["world"] = Axis("world", tuple(range(self.world)), rank, everyone, self.traffic)
        self._links: dict[tuple[int, int], Link] = {}
        self._linked: set[tuple[int, int]] = set()
        self._link((stage, stage + 1) for stage in range(grid.pp - 1))

    def prepare(
        self,
        blocks: Iterable[str] = (),
        ties: Iterable[tuple[int, ...]] = (),
        links: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Makes the groups that a model asks for beyond the grid's lines. Collective over the world, same arguments.

        blocks: axes such as "tp/2" (the block of two neighbours on the tp axis that this rank is in), "dp%2" (every
        second rank of dp, from this one's block on: the same place in every block of two), and either of them, or a
        whole axis, with "@name": the same ranks with a communicator of their own. ties: pipeline stages that hold
        copies of one weight; the ranks of these stages in one column of the grid become an axis. links: pairs of
        pipeline ranks that talk; neighbours are linked already.
        """
        self._even_out()
        for name in sorted(set(blocks) - set(self._axes)):
            self._axes[name] = self._line(parse(name)[0][0], self.grid.ranks(self.rank, name))
        for stages in sorted(set(ties) - set(self._ties)):
            self._ties[stages] = self._line("pp", self.grid.stage_ranks(self.rank, stages))
        self._link(links)

    def axis(self, name: str) -> Axis:
        """The axis called pp, dp, cp, tp or world, or a block of one such as "tp/2" that was prepared."""
        return self._axes[name]

    def second(self, name: str) -> Axis | None:
        """Returns `axis(name)` with a second communicator; None if none was prepared."""
        return self._axes.get(name + SECOND)

    def stages(self, stages: tuple[int, ...]) -> Axis:
        """The ranks of the given pipeline stages in my column of the grid, prepared for a weight they all hold."""
        return self._ties[stages]

    def link(self, source: int, target: int) -> Link:
        """The channel from stage `source` to stage `target`, of which this rank is one end."""
        return self._links[source, target]

    def host_links(self, pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Link]:
        """Makes channels for tensors in the host's memory, (source, target) each; returns those of this rank. Their
        bytes count for no axis. Collective over the world, same pairs."""
        self._even_out()
        links = dict[tuple[int, int], Link]()
        for mine in _in_turns(sorted(pairs), self.rank):
            group = dist.new_group(
                list(mine or (self.rank,)), timeout=self.timeout, backend="gloo",
                use_local_synchronization=True,
            )  # fmt: skip
            if mine is not None:
                axis = Axis("host", mine, mine.index(self.rank), group)
                links[mine] = Link(mine[1 - axis.index], axis)
        return links

    def shared_axes(self) -> list[Axis]:
        """The axes that gradients may be summed over and this rank is on, in one order that all ranks share."""
        others = {"pp", "world", *(name for name in self._axes if "@" in name)}
        lines = [self._axes[name] for name in sorted(self._axes.keys() - others)]
        ties = [self._ties[stages] for stages in sorted(self._ties)]
        return [axis for axis in (*lines, *ties) if axis.size > 1 and axis.index >= 0]

    @property
    def data(self) -> Axis:
        """The axis of ranks that hold copies of the same parameters and sum their gradients: dp × cp.

        The axis "dp" has only the ranks with different samples.
        """
        return self._axes[self.data_name]

    def _even_out(self) -> None:
        """Makes groups until all ranks have made the same number, since a program may have made some before: see
        `_line`.

        These groups use gloo. If NCCL's world is bound to a device, making an NCCL group splits the world's
        communicator, a collective of all ranks, and only some ranks make a group here.
        """
        if self.on_paper or self.world == 1:
            return
        made = len(dist.distributed_c10d._world.pg_names)
        most = torch.tensor(made, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        for _ in range(int(most) - made):
            dist.new_group([self.rank], backend="gloo", use_local_synchronization=True)

    def _line(self, label: str, ranks: tuple[int, ...]) -> Axis:
        """The axis of `ranks`. A rank that is not among them makes a group of its own meanwhile; it is of no use.

        Only the members meet, for at a thousand ranks the collective way costs thousands of store rounds. torch then
        names a group by its ranks and the number of groups this process has: so every rank has to make one each time.
        """
        member = self.rank in ranks
        index = ranks.index(self.rank) if member else -1
        if len(ranks) == 1 or self.on_paper:
            return Axis(label, ranks, index, None, self.traffic)
        mine = list(ranks) if member else [self.rank]
        group = dist.new_group(mine, timeout=self.timeout, use_local_synchronization=True)
        return Axis(label, ranks, index, group if member else None, self.traffic)

    def _link(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Makes a channel for each direction of some pairs of stages; on all ranks the same pairs."""
        line, missing = self._axes["pp"], sorted(set(pairs) - self._linked)
        self._linked.update(missing)
        for mine in _in_turns(missing, line.index) if not self.on_paper else ():
            for direction in (1, -1):
                axis = self._line("pp", tuple(line.ranks[stage] for stage in mine or ()))
                if mine is not None:
                    source, target = mine[::direction]
                    peer = target if line.index == source else source
                    self._links[source, target] = Link(line.ranks[peer], axis)


def _in_turns(pairs: Sequence[tuple[int, int]], member: int) -> Iterator[tuple[int, int] | None]:
    """Yields for each turn the pair that has this member, if any; the pairs of a turn have no common member, so that
    every rank has one group at most to make in it."""
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
