"""Checks that all ranks have the same configuration, plan and buckets.

If the configuration, the plan or the buckets differed between ranks, the ranks would call different
collectives and hang. The same applies to forwards of a sharded module outside of steps, such as in
`generate`: `Forwards` checks that all ranks run the same number of them.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from threed.config import Config
from threed.config.schema import key_name, written
from threed.core.reminder import Reminder
from threed.distributed import collectives
from threed.distributed.purposes import FORWARD, UnequalCallsError
from threed.distributed.sharding import few
from threed.distributed.topology import Axis, Topology
from threed.schedules import Plan
from threed.zero.layout import Layout

WAIT_S = 60.0  # seconds after which a rank that waits for the forwards of other ranks warns


def check_configuration(config: Config, world: Axis, trains: bool = True) -> None:
    """Checks that all ranks have the same configuration. Collective.

    Ranks with different configurations would create different process groups or send tensors of
    different shapes. Their collectives would then hang, or gloo would abort the process.

    Args:
        config: this rank's configuration.
        world: axis of all ranks.
        trains: whether this rank's engine trains; compared, too.

    Raises:
        ValueError: the configurations differ; the message names the first rank that differs, and
            the first keys that differ, with both values.
    """
    keys = {"Engine(trains=...)": str(trains)} | {
        f"{group}.{key_name(name)}": written(value)
        for group, fields in config
        for name, value in fields
        if name != "nvme_path"  # may differ between machines
    }
    fix = "start all ranks with the same flags"
    _check_same(repr(keys), "has a different configuration", fix, world, keys)


def check_plan(plan: Plan, world: Axis) -> None:
    """Checks that all ranks have the same plan. Collective.

    A user-defined schedule may return different plans on different ranks, and so may a schedule
    search that uses measured times. Ranks would then wait for messages that are never sent.

    Args:
        plan: this rank's plan.
        world: axis of all ranks.

    Raises:
        ValueError: the plans differ; the message names the first rank that differs.
    """
    text = f"{plan.placement} {plan.ways}\n{plan}"
    fix = "its file or function must return the same plan on all ranks, also on different machines"
    _check_same(text, f"has a different plan of schedule {plan.name}", fix, world)


def _check_same(
    text: str, differs: str, fix: str, axis: Axis, keys: Mapping[str, str] | None = None
) -> None:
    """Raises ValueError if `text` differs between ranks; the message names the differing `keys`."""
    hashes = collectives.exchange(hashlib.sha256(text.encode()).hexdigest(), axis)
    index = next((at for at, other in enumerate(hashes) if other != hashes[0]), None)
    if index is None:
        return
    first, rank = axis.ranks[0], axis.ranks[index]
    everyone = collectives.exchange(dict(keys or {}), axis)
    here, there = everyone[0], everyone[index]
    values = [f"{key}: {here[key]!r} and {there[key]!r}" for key in here if here[key] != there[key]]
    which = f" ({few(values)})" if values else ""
    raise ValueError(f"rank {rank} {differs} than rank {first}{which}: {fix}")


def check_buckets(layout: Layout, topology: Topology) -> None:
    """Checks that ranks which reduce a bucket together have the same parameters in it. Collective.

    A rank that builds the model's layers in a different order may have buckets of the same sizes as
    the other ranks, but with different parameters. Without this check, gradients of different
    parameters would be added up without an error.

    Args:
        layout: groups and buckets of this rank's parameters.
        topology: the process topology.

    Raises:
        ValueError: the buckets differ; the message names the first rank that differs.
    """
    for axis in topology.shared_axes():
        buckets = [
            bucket
            for group in layout.groups
            if axis in (group.shard, *group.sums)
            for bucket in group.buckets
        ]
        data = axis is topology.data
        if data:  # data ranks must agree in all of their buckets
            buckets = [*layout.buckets, *layout.frozen]
        cuts = [
            (b.first, b.last, [(s.first, (data and s.spec.over) or s.spec.name) for s in b.slots])
            for b in buckets
        ]
        fix = "build the same layers, with the same names and shapes, on all ranks"
        _check_same(
            repr(cuts), "has other parameters, or a different order, in its buckets", fix, axis
        )


class GlobalTensor(NamedTuple):
    """Properties of a global weight: a tensor of the full model, before it is sharded.

    Attributes:
        shape: shape of the full tensor.
        trained: whether the weight is trained.
        has_moments: whether the weight is trained, and its update rule keeps moments.
        over: name of the axis of data ranks that hold different parts of the weight
            (`ShardSpec.over`); "" if all data ranks hold the same part.
    """

    shape: tuple[int, ...]
    trained: bool
    has_moments: bool
    over: str


def tensors_of_model(layout: Layout, topology: Topology) -> dict[str, GlobalTensor]:
    """Returns the properties of all weights of the full model. Collective.

    One rank has only some of the weights: pipeline stages and tensor ranks have different weights,
    and so do data ranks over which parameters are distributed (`ShardSpec.over`). The ranks
    therefore exchange the properties of their weights.

    Args:
        layout: layout of this rank's parameters.
        topology: the process topology.

    Returns:
        Name of each weight -> its properties; the same on all ranks.
    """
    found: dict[str, GlobalTensor] = {}
    for group in layout.groups:
        trained, moments = group.key.trainable, bool(group.key.options.rule.state_names)
        for piece in (piece for slot in group.slots for piece in slot.spec.pieces):
            if 0 not in piece.shape:  # empty parameters are not saved
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
    """Checks that all ranks gathered the same groups of parameters in the same order.

    Gathers are collective, so with different orders ranks would gather different parameters.

    Args:
        orders: per rank, `Gatherer.order`: a hash of the sequence of groups that the rank has
            gathered.

    Raises:
        RuntimeError: the hashes differ.
    """
    if len(set(orders)) > 1:
        raise RuntimeError(
            "ranks used different parameters in this step, or in a different order: ZeRO-3 gathers a parameter on all"
            " ranks at once; use the same parameters on all ranks, or --zero.stage 2"
        )


class Forwards:
    """Checks that all ranks run the same number of forwards of a sharded module outside of steps.

    Each forward gathers parameters, which is collective. If one rank ran more forwards than another
    rank, its gathers would meet other collectives of that rank: on gloo, messages of different
    sizes abort the process; with equal sizes, results are wrong. Forwards of a training step are
    not compared here, because the comparison waits for the device (`check_gathers` compares them).

    Args:
        axis: the ranks that run the same forwards.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        rank = axis.ranks[axis.index]
        self._began = f"rank {rank} began a forward of a sharded module outside of a training step"
        text = (
            f"{self._began}, and has waited {WAIT_S:g} s for the other ranks to begin one, too. It"
            f" waits until they do. {FORWARD.fix}"
        )
        self._reminder = Reminder(WAIT_S, partial(warnings.warn, text, stacklevel=2))
        self._ran = False  # whether a forward has run since the last call of `ended`

    def begin(self) -> None:
        """Checks that all ranks begin a forward. Collective.

        Warns once if another rank does not begin one for `WAIT_S` seconds, and continues to wait.

        Raises:
            RuntimeError: a rank does not begin one, or has ended.
        """
        ran, self._ran = self._ran, True
        try:
            with self._reminder:
                others = collectives.exchange(True, self.axis, FORWARD)
        except UnequalCallsError:
            self._ran = ran  # the other ranks have neither begun a forward nor called `ended`
            raise
        except RuntimeError as error:
            text = (
                f"{self._began}, but lost the connection to another rank, which has failed, or has ended"
                f" without this forward ({error}). {FORWARD.fix}"
            )
            raise RuntimeError(text) from error
        self._compare(others, True)

    def ended(self) -> None:
        """Checks that no rank begins another forward. Collective, if a forward has run.

        Raises:
            RuntimeError: a rank begins one.
        """
        if self._ran:
            self._ran = False
            self._compare(collectives.exchange(False, self.axis, FORWARD), False)

    def _compare(self, others: Sequence[bool], begins: bool) -> None:
        if any(other is not begins for other in others):
            self._ran = False  # all ranks raise, so they are in step again
            running = [rank for rank, other in zip(self.axis.ranks, others, strict=True) if other]
            ended = [rank for rank in self.axis.ranks if rank not in running]
            raise RuntimeError(FORWARD.unequal(running, ended))
