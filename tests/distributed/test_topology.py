"""The grid of ranks: coordinates, axes, links of a direction each, blocks, ties, and errors that name the factors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.harness import run_ranks
from threed.distributed.grid import AXES, Grid
from threed.distributed.topology import Topology

GRIDS_ON_PAPER = [
    Grid(*sizes) for sizes in itertools.product((1, 2, 3), (1, 2, 3), (1, 2), (1, 2, 4))
]
GRIDS = [(2, 2, 2), (4, 1, 2), (1, 2, 4), (3, 2, 1), (2, 1, 1), (8, 1, 1)]  # pp, dp, tp


def test_places_and_ranks_are_one_to_one() -> None:
    for grid in GRIDS_ON_PAPER:
        places = [grid.coordinates(rank) for rank in range(grid.world)]
        assert [grid.rank_of(place) for place in places] == list(range(grid.world))
        assert len({tuple(place.items()) for place in places}) == grid.world
        assert all(0 <= place[axis] < grid.sizes[axis] for place in places for axis in AXES)


def test_tensor_ranks_are_next_to_each_other_and_stages_far_apart() -> None:
    grid = Grid(pp=2, dp=3, tp=4)
    strides = {
        axis: grid.rank_of({**dict.fromkeys(AXES, 0), axis: 1}) for axis in ("tp", "dp", "pp")
    }
    assert strides == {"tp": 1, "dp": 4, "pp": 12}


def test_a_place_is_told_without_axes_of_one() -> None:
    assert [Grid(pp=2, tp=2).label(rank) for rank in range(4)] == [
        "pp0 tp0",
        "pp0 tp1",
        "pp1 tp0",
        "pp1 tp1",
    ]
    assert Grid().label(0) == "alone"


def test_products_and_blocks_of_axes() -> None:
    """On 2 x 4 x 2 x 2 ranks (pp, dp, cp, tp): rank 5 is the place dp 1, tp 1."""
    grid = Grid(pp=2, dp=4, cp=2, tp=2)
    assert grid.ranks(5, "dp") == (1, 5, 9, 13)
    assert grid.ranks(5, "cp") == (5, 7)
    assert grid.ranks(5, "dp*cp") == (1, 3, 5, 7, 9, 11, 13, 15)
    assert grid.ranks(5, "dp/2") == grid.ranks(5, "dp/2@gather") == (1, 5)
    assert grid.ranks(5, "dp%2") == (5, 13)
    assert grid.ranks(5, "dp*cp/4") == (1, 3, 5, 7)
    assert grid.ranks(5, "dp*cp%4") == (5, 13)
    assert grid.stage_ranks(5, (0, 1)) == (5, 21)
    with pytest.raises(ValueError, match=r"axis 'dp/3': 4 ranks, not a multiple of 3"):
        grid.ranks(5, "dp/3")
    with pytest.raises(ValueError, match=r"there is no axis 'xp'"):
        grid.ranks(5, "xp")


def test_every_rank_of_a_derived_axis_names_the_same_ranks() -> None:
    for grid in GRIDS_ON_PAPER:
        for name in ("tp", "dp*cp", "pp*tp", "dp*cp*tp"):
            lines = {grid.ranks(rank, name) for rank in range(grid.world)}
            assert sorted(rank for line in lines for rank in line) == list(range(grid.world))
            assert all(grid.ranks(rank, name) == line for line in lines for rank in line)


def test_a_topology_on_paper_is_that_of_a_run_without_groups() -> None:
    grid = Grid(pp=4, dp=512, tp=8)
    topology = Topology.on_meta(grid, 12345)
    topology.prepare(["dp/8", "dp%8", "dp/8@gather"], [(0, 3)])
    assert topology.axis("tp").ranks == grid.ranks(12345, "tp")
    assert topology.axis("dp%8").size == 64
    assert (topology.axis("world").size, topology.axis("world").index) == (16384, 12345)
    assert all(axis.group is None for axis in topology.shared_axes())
    assert (topology.stages((0, 3)).ranks, topology.stages((0, 3)).index) == ((57, 12345), 1)


# ---------------------------------------------------------------------------------------------------------- errors


@given(
    st.integers(1, 64),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 3),
    st.none() | st.integers(1, 5),
)
def test_sizes_make_up_the_world_or_are_refused(
    world: int, pp: int, tp: int, cp: int, dp: int | None
) -> None:
    fits = world == pp * tp * cp * dp if dp else world % (pp * tp * cp) == 0
    if fits:
        grid = Grid.of(world, pp=pp, dp=dp, cp=cp, tp=tp)
        assert grid.world == world
        assert dp in (None, grid.dp)
    else:
        with pytest.raises(
            ValueError, match=f"world size {world} is not tp {tp} x pp {pp} x cp {cp}"
        ) as caught:
            Grid.of(world, pp=pp, dp=dp, cp=cp, tp=tp)
        needed = pp * tp * cp * (dp or 1)
        assert f"start {needed} rank{'' if needed == 1 else 's'}, or" in str(caught.value)
        assert dp is None or f"x dp {dp} = {pp * tp * cp * dp}" in str(caught.value)


def test_a_lone_process_is_refused_sizes_it_has_not() -> None:
    with pytest.raises(ValueError, match="world size 1 is not tp 2 x pp 1 x cp 1 = 2, times dp"):
        Topology(tp=2)


@pytest.mark.parametrize("sizes", [{"tp": 0}, {"pp": -1}, {"cp": "2"}, {"dp": 0}, {"tp": 1.0}])
def test_sizes_are_whole_numbers_from_1(sizes: dict[str, Any]) -> None:
    ((name, value),) = sizes.items()
    with pytest.raises(ValueError, match=f"{name} {value!r}: pass an integer of at least 1"):
        Topology(**sizes)


def test_a_lone_process_has_every_axis_and_no_group() -> None:
    topology = Topology()
    topology.prepare(["tp"], [])
    for name in (*AXES, "world"):
        axis = topology.axis(name)
        assert (axis.size, axis.index, axis.ranks, axis.group) == (1, 0, (0,), None)


# ------------------------------------------------------------------------------------------------------------ axes


def brute_force_line(rank: int, name: str, grid: Grid) -> tuple[int, ...]:
    """All ranks whose place differs from mine in this coordinate at most, in order."""
    mine = grid.coordinates(rank)
    others = [axis for axis in AXES if axis != name]
    return tuple(
        r
        for r in range(grid.world)
        if all(grid.coordinates(r)[axis] == mine[axis] for axis in others)
    )


def members_met(group: dist.ProcessGroup | None, size: int, rank: int) -> tuple[int, ...]:
    """Who is in a group, found out by talking over it."""
    if group is None:
        return (rank,)
    out = torch.zeros(size, dtype=torch.int64)
    dist.all_gather(list(out.split(1)), torch.tensor([rank]), group=group)
    return tuple(out.tolist())


def check_axes(pp: int, dp: int, tp: int) -> None:
    topology = Topology(pp=pp, tp=tp)
    assert topology.sizes == {"pp": pp, "dp": dp, "cp": 1, "tp": tp}
    assert (topology.pp, topology.dp, topology.tp) == (pp, dp, tp)
    for name in AXES:
        axis = topology.axis(name)
        assert axis.ranks == brute_force_line(topology.rank, name, topology.grid)
        assert axis.ranks[axis.index] == topology.rank
        assert axis.index == topology.coordinates[name]
        assert axis.label == name
        assert (axis.group is None) == (axis.size == 1)
        assert members_met(axis.group, axis.size, topology.rank) == axis.ranks
    assert topology.axis("world").ranks == tuple(range(pp * dp * tp))


@pytest.mark.parametrize(("pp", "dp", "tp"), GRIDS)
def test_axes_are_the_lines_of_the_grid_and_their_groups_meet(pp: int, dp: int, tp: int) -> None:
    run_ranks(pp * dp * tp, check_axes, pp, dp, tp)


def check_links(pp: int, tp: int) -> None:
    topology = Topology(pp=pp, tp=tp)
    stage, line = topology.axis("pp").index, topology.axis("pp").ranks
    for low in range(pp - 1):
        for source, target in ((low, low + 1), (low + 1, low)):
            if stage not in (source, target):
                with pytest.raises(KeyError):
                    topology.link(source, target, source > target)
                continue
            link = topology.link(source, target, source > target)
            assert link.peer == line[target if stage == source else source]
            assert link.axis.label == "pp"
            assert set(link.axis.ranks) == {line[source], line[target]}
    mine = [
        topology.link(a, b, a > b).axis.group
        for a in range(pp)
        for b in (a - 1, a + 1)
        if 0 <= b < pp and stage in (a, b)
    ]
    assert len({id(group) for group in mine}) == len(mine)  # one communicator a direction
    assert None not in mine
    talk(topology, stage, pp)


def talk(topology: Topology, stage: int, pp: int) -> None:
    """Every stage sends both ways before it receives anything."""
    neighbors = [n for n in (stage - 1, stage + 1) if 0 <= n < pp]
    works = []
    for n in neighbors:
        link = topology.link(stage, n, stage > n)
        works.append(
            dist.isend(torch.tensor([100.0 * stage + n]), link.peer, group=link.axis.group)
        )
    for n in neighbors:
        link, got = topology.link(n, stage, n > stage), torch.zeros(1)
        dist.recv(got, link.peer, group=link.axis.group)
        assert got.item() == 100.0 * n + stage
    for work in works:
        work.wait()


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (3, 1), (4, 1), (5, 1), (2, 2), (4, 2)])
def test_neighbors_have_one_channel_a_direction(pp: int, tp: int) -> None:
    """pp = 2 is the trap: the previous rank is also the next, and one channel for both would mix them up."""
    run_ranks(pp * tp, check_links, pp, tp)


# ------------------------------------------------------------------------------------------------ blocks and ties


def check_blocks() -> None:
    topology = Topology(tp=4)
    topology.prepare(["tp", "tp/2"], [])
    if topology.rank == 0:
        topology.prepare(["tp/2"], [])  # exists: nothing is sent, so other ranks need not take part
    block, tp = topology.axis("tp/2"), topology.axis("tp")
    first = tp.index // 2 * 2
    assert block.ranks == tp.ranks[first : first + 2]
    assert block.index == tp.index % 2
    assert block.label == "tp"
    assert members_met(block.group, 2, topology.rank) == block.ranks


def test_a_block_of_an_axis_is_its_neighbors() -> None:
    run_ranks(4, check_blocks)
    run_ranks(8, check_blocks)  # with dp 2


def check_after_other_groups() -> None:
    """torch names groups by how many a process has: a program's own, of some ranks only, must not make ranks wait."""
    dist.new_group([0])
    topology = Topology(pp=2)
    for _ in range(2):
        dist.new_group([3])
    topology.prepare(["dp@other"], [(0, 1)])
    for axis in (
        topology.axis("pp"),
        topology.axis("dp"),
        topology.axis("dp@other"),
        topology.stages((0, 1)),
    ):
        assert members_met(axis.group, axis.size, topology.rank) == axis.ranks


def test_a_program_may_have_groups_of_its_own() -> None:
    run_ranks(4, check_after_other_groups, timeout=60)


UNEVEN: dict[str, Callable[[int], object]] = {
    "none": lambda rank: None,
    "of two ranks": lambda rank: dist.new_group([0, 1]),
    "of two ranks that only they make": lambda rank: dist.new_group(
        [0, 1], use_local_synchronization=True
    ),
    "three of one rank": lambda rank: [
        dist.new_group([rank], use_local_synchronization=True) for _ in range(rank)
    ],
    "subgroups": lambda rank: dist.new_subgroups(2),
}


@contextmanager
def bound_to_a_device(everyone: Any) -> Iterator[list[int]]:
    """Has all ranks meet at every group of the world's own backend, as under NCCL where the world is bound to a device:
    it splits the world's communicator. A rank that waits alone gives up after some seconds. Yields how many there were.
    """
    new_group, made = dist.new_group, [0]

    def splitting(*arguments: Any, backend: str | None = None, **keywords: Any) -> Any:
        if backend is None:
            made[0] += 1
            dist.barrier(everyone)
        return new_group(*arguments, backend=backend, **keywords)

    with mock.patch.object(dist, "new_group", splitting):
        yield made


def groups_of_uneven_programs() -> dict[str, int]:
    """How many groups of the world's backend a topology makes on this rank, by what its program made before."""
    # Made first: torch 2.14 cannot make a group of all ranks after groups that only some ranks have made.
    found, everyone = {}, dist.new_group(timeout=timedelta(seconds=20))
    for name, uneven in UNEVEN.items():
        uneven(dist.get_rank())
        with bound_to_a_device(everyone) as made:
            topology = Topology(pp=2)
        uneven(dist.get_rank())
        with bound_to_a_device(everyone) as more:
            topology.prepare(["dp@other"], [(0, 1)])
            topology.host_links([(0, 1)])
        for axis in (
            topology.axis("pp"),
            topology.axis("dp"),
            topology.axis("dp@other"),
            topology.stages((0, 1)),
        ):
            assert members_met(axis.group, axis.size, topology.rank) == axis.ranks, name
        found[name] = made[0] + more[0]
    return found


def test_all_ranks_make_groups_equally_often_whatever_their_program_made_before() -> None:
    """Else a rank would wait for ever in NCCL's split of the world, which all ranks have to call."""
    first, *others = run_ranks(4, groups_of_uneven_programs, timeout=120)
    assert set(first) == set(UNEVEN)
    assert min(first.values()) > 0
    assert others == [first] * 3


def test_groups_of_nccl_have_streams_of_high_priority() -> None:
    made = list[Any]()
    nccl = SimpleNamespace(Options=lambda **options: SimpleNamespace(**options))
    with (
        mock.patch.object(dist, "get_backend", return_value="nccl"),
        mock.patch.object(dist, "ProcessGroupNCCL", nccl, create=True),
        mock.patch.object(dist, "new_group", lambda *_, **keywords: made.append(keywords)),
    ):
        topology = Topology.on_meta(Grid.of(2, dp=2), 0)
        topology.is_meta, topology.timeout = False, timedelta(seconds=9)
        topology._make_axis("dp", (0, 1))
    assert made[0]["timeout"] == made[0]["pg_options"]._timeout == timedelta(seconds=9)
    assert made[0]["pg_options"].is_high_priority_stream


def check_ties(pp: int, tp: int, ties: list[tuple[int, ...]]) -> None:
    topology = Topology(pp=pp, tp=tp)
    topology.prepare([], ties)
    line = topology.axis("pp")
    for stages in ties:
        axis = topology.stages(stages)
        assert axis.ranks == tuple(line.ranks[stage] for stage in stages)
        assert axis.label == "pp"
        if line.index in stages:
            assert axis.index == stages.index(line.index)
            assert members_met(axis.group, len(stages), topology.rank) == axis.ranks
        else:
            assert (axis.index, axis.group) == (-1, None)


def test_tied_stages_meet_in_their_own_column() -> None:
    run_ranks(8, check_ties, 4, 2, [(0, 3), (1, 2), (0, 1, 3)])
    run_ranks(3, check_ties, 3, 1, [(0, 2)])
    run_ranks(2, check_ties, 2, 1, [(0, 1)])


@pytest.mark.parametrize("cp", [1, 2])
def test_the_data_axis_has_the_ranks_that_hold_copies(cp: int) -> None:
    grid = Grid(pp=2, dp=4 // cp, cp=cp, tp=2)
    for rank in range(grid.world):
        data = Topology.on_meta(grid, rank).data
        same = [r for r in range(grid.world) if place_of(grid, r) == place_of(grid, rank)]
        assert (list(data.ranks), data.ranks[data.index], data.label) == (same, rank, "dp")


def place_of(grid: Grid, rank: int) -> tuple[int, int]:
    """The coordinates that decide which parameters a rank has."""
    place = grid.coordinates(rank)
    return place["pp"], place["tp"]
