"""Checks that ranks have the same configuration, plan and buckets, before any collective depends on it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from threed import collectives
from threed.config import Config
from threed.schedules import Plan
from threed.topology import Axis, Topology
from threed.zero.layout import Layout


def check_configuration(config: Config, world: Axis) -> None:
    """Checks that all ranks have the same configuration. Collective.

    A rank that makes other groups or sends other shapes hangs gloo, or aborts the process.

    Raises:
        ValueError: naming the rank.
    """
    text = config.model_dump_json(exclude={"zero": {"nvme_path"}})  # machines have their own drives
    fix = "start all ranks with the same flags"
    _check_same(text, "runs another configuration", fix, world)


def check_plan(plan: Plan, world: Axis) -> None:
    """Checks that all ranks have the same plan. Collective.

    A user's file or a search by times may give different ones. Each waits for messages that the
    other never sends.

    Raises:
        ValueError: naming the rank.
    """
    text = f"{plan.placement} {plan.ways}\n{plan}"
    fix = "its file or function, or the machines' arithmetic, must give the same on all ranks"
    _check_same(text, f"has another plan of schedule {plan.name}", fix, world)


def _check_same(text: str, differs: str, fix: str, axis: Axis) -> None:
    everyone = collectives.exchange(hashlib.sha256(text.encode()).hexdigest(), axis)
    for rank, other in zip(axis.ranks, everyone, strict=True):
        if other != everyone[0]:
            raise ValueError(f"rank {rank} {differs} than rank {axis.ranks[0]}: {fix}")


def check_buckets(layout: Layout, topology: Topology) -> None:
    """Checks that ranks have the same parameters in each bucket, along every axis: a model that one rank builds in
    another order has buckets of the same sizes with other parameters. Raises ValueError naming the rank. Collective.
    """
    for axis in topology.shared_axes():
        buckets = [
            bucket
            for group in layout.groups
            if axis in (group.shard, *group.sums)
            for bucket in group.buckets
        ]
        data = axis is topology.data
        if data:  # in the order of completion
            buckets = [*layout.buckets, *layout.frozen]
        cuts = [
            (b.first, b.last, [(s.first, (data and s.spec.over) or s.spec.name) for s in b.slots()])
            for b in buckets
        ]
        fix = "build the same layers, with the same names and shapes, on all ranks"
        _check_same(repr(cuts), "has other parameters in its buckets, or another order,", fix, axis)


class GlobalTensor(NamedTuple):
    """A tensor of the whole model.

    Attributes:
        trained: whether it is trained.
        has_moments: whether its rule keeps moments of it.
        over: the axis that its parameter is dealt over, or "".
    """

    shape: tuple[int, ...]
    trained: bool
    has_moments: bool
    over: str


def tensors_of_model(layout: Layout, topology: Topology) -> dict[str, GlobalTensor]:
    """Returns the weights of the whole model, by name. Collective.

    Names differ between stages, tensor ranks, and the ranks that parameters are dealt over.
    """
    found: dict[str, GlobalTensor] = {}
    for group in layout.groups:
        trained, moments = group.key.trainable, bool(group.key.options.rule.state_names)
        for piece in (piece for slot in group.slots for piece in slot.spec.pieces):
            if 0 not in piece.shape:  # such parameters are not saved
                about = piece.shape, trained, trained and moments, group.key.over or ""
                found[piece.name] = GlobalTensor(*about)

    def join(axis: Axis) -> None:
        for some in collectives.exchange(found, axis):
            found.update({n: GlobalTensor(tuple(s), *rest) for n, (s, *rest) in some.items()})

    join(topology.axis("pp"))
    join(topology.axis("tp"))
    for over in sorted({tensor.over for tensor in found.values()} - {""}):
        join(topology.axis(over))
    return found


def check_gathers(orders: Sequence[int]) -> None:
    """Raises RuntimeError unless all ranks gathered the same groups in the same order. orders: `Gatherer.order` of each
    rank."""
    if len(set(orders)) > 1:
        raise RuntimeError(
            "ranks used different parameters in this step, or in another order: ZeRO-3 gathers a parameter on all"
            " ranks at once; route in the same way on all ranks, or use --zero.stage 2"
        )
