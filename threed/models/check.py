"""Checks the sharding records (`ShardSpec`) of a model's parameters, before the first step.

    check(model.layers(), model.slicing, topology)

The model is built from `threed.layers`. The checks are:
- Every parameter has a record.
- Within a layer, every name refers to one parameter.
- Layers that share a parameter by name (tied weights) have equal records of the parameter.
- The shards of the tensor ranks cover each global tensor exactly once.
- All ranks describe the same model.

Errors that only change computed values, such as a partial gradient that is not marked as partial,
are found by `threed verify`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from torch import nn

from threed.core.messages import counted
from threed.distributed import collectives
from threed.distributed.grid import parse, same_place
from threed.distributed.sharding import ModelError, ShardSpec, check_dense, intersect, is_managed
from threed.distributed.topology import Topology
from threed.layers.contract import contract, title
from threed.layers.slicing import Slicing

MAX_LISTED = 8  # maximum number of problems in one message
# start and size of a box, a rectangular part of a global tensor
Part = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Use:
    """A parameter with the layer that uses it.

    Attributes:
        layer: name of the layer.
        path: path of the parameter in the layer.
        param: the parameter.
        spec: its sharding record.
    """

    layer: str
    path: str
    param: nn.Parameter
    spec: ShardSpec

    def facts(self) -> dict[str, Any]:
        """Returns the properties of the parameter that all ranks and all layers must agree on."""
        spec = self.spec
        return {
            "global shape": [piece.shape for piece in spec.pieces],
            "initial values": [vars(piece.init) for piece in spec.pieces],
            "replicated": spec.replicated, "partial": spec.partial, "decay": spec.decay, "tiles": spec.tile[1],
            "requires_grad": self.param.requires_grad, "over": spec.over, "update rule": spec.rule,
        }  # fmt: skip


def check(layers: Sequence[nn.Module], slicing: Slicing, topology: Topology) -> None:
    """Raises ModelError on every rank if any rank finds a fault in the model's sharding records.
    Collective.

    Args:
        layers: all layers of the model.
        slicing: the model's slicing.
        topology: the topology of the run.
    """
    uses, problems = list[Use](), list[str]()
    tensor, world = topology.axis("tp"), topology.axis("world")
    if slicing.tp.size != tensor.size:
        problems.append(
            f"the model's Slicing has {counted(slicing.tp.size, 'tensor rank')}, the topology has {tensor.size}: build"
            " the model with Slicing(topology.axis('tp'), ...)"
        )
    context = topology.axis("cp")
    if slicing.context.size != context.size:
        problems.append(
            f"the model's Slicing has {counted(slicing.context.size, 'context rank')}, the topology has {context.size}:"
            " build the model with Slicing.of(topology, config)"
        )
    for number, layer in enumerate(layers):
        name = title(layer, number)
        if context.size > 1 and not contract(layer).context:
            problems.append(
                f"{name} does not state that it supports context parallelism: set `context = True` in its class if it"
                " acts on each position separately or uses layers.Attention, and gather sequences that it mixes"
                " otherwise by slicing.gather_sequence(x); or use --parallel.cp 1"
            )
        check_dense((f"{name}: buffer {path}", buffer) for path, buffer in layer.named_buffers())
        for path, param in layer.named_parameters(remove_duplicate=False):
            spec = getattr(param, "spec", None)
            if is_managed(param):
                problems.append(
                    f"{name}: parameter {path} belongs to another engine: build a new layer for this one"
                )
            elif param._backward_hooks or param._post_accumulate_grad_hooks:
                problems.append(
                    f"{name}: parameter {path} has a gradient hook, which would be lost, because the engine"
                    " replaces parameters on the meta device: register hooks after creating the engine"
                )
            if spec is not None and spec.over and not _divides_tokens(spec.over, topology):
                problems.append(
                    f"{name}: parameter {path} is sharded over {spec.over!r}: this must be {topology.data_name!r} or"
                    f" blocks of it, such as '{topology.data_name}/2', or the same with '{topology.data_name}*tp'"
                )
            if spec is not None:
                uses.append(Use(name, path, param, spec))
    problems += [
        *find_missing_records(layers),
        *_duplicate_names(uses),
        *_conflicting_records(uses),
    ]
    text = json.dumps([[u.layer, u.path, u.spec.over or u.spec.name, u.facts()] for u in uses])
    digest, description = hashlib.sha256(text.encode()).hexdigest(), json.loads(text)
    results = collectives.exchange([problems, digest], world)
    if any(other != digest for _, other in results):
        first = collectives.exchange(description if world.index == 0 else None, world)[0]
        own_differences = [] if world.index == 0 else _differences(first, description, world.index)
        results += [[found, ""] for found in collectives.exchange(own_differences, world)]
    found = list(dict.fromkeys(problem for theirs, _ in results for problem in theirs))
    if not found:
        topology.prepare({use.spec.over for use in uses if use.spec.over})
        found = collectives.problems_of_all(_partition_faults(uses, topology), world)
    if found:
        more = [f"... and {len(found) - MAX_LISTED} more"] if len(found) > MAX_LISTED else []
        raise ModelError("\n".join(found[:MAX_LISTED] + more))


def _divides_tokens(over: str, topology: Topology) -> bool:
    """Returns whether an axis name, without its blocks, contains all data ranks of a rank."""
    axes = set(parse(over)[0])
    return "pp" not in axes and axes >= {name for name in ("dp", "cp") if topology.sizes[name] > 1}


def find_missing_records(layers: Sequence[nn.Module]) -> Iterator[str]:
    """Yields a problem for each parameter without a sharding record."""
    for number, layer in enumerate(layers):
        for path, param in layer.named_parameters(remove_duplicate=False):
            if not hasattr(param, "spec"):
                yield (
                    f"{title(layer, number)}: parameter {path} has no sharding record: make it by threed.layers or"
                    " layers.parameter, or attach a record with layers.attach (docs/guide/own_models.md)"
                )


def _duplicate_names(uses: Iterable[Use]) -> Iterator[str]:
    """Yields a problem for each layer in which two different parameters have the same name."""
    seen: dict[tuple[str, str], Use] = {}
    for use in uses:
        first = seen.setdefault((use.layer, use.spec.name), use)
        if first.param is not use.param and first.path != use.path:
            yield (
                f"{use.layer}: parameters {first.path} and {use.path} have the same name {use.spec.name}, and would be"
                " one weight: give one of them another name, or put the same nn.Parameter into both places"
            )


def _conflicting_records(uses: Iterable[Use]) -> Iterator[str]:
    """Yields a problem for each parameter that layers share by name but describe differently."""
    seen: dict[str, Use] = {}
    for use in uses:
        first = seen.setdefault(use.spec.name, use)
        if first is use:
            continue
        here, there = use.facts(), first.facts()
        if unequal := [key for key in here if here[key] != there[key]]:
            differences = ", ".join(f"{key} {there[key]} and {here[key]}" for key in unequal)
            yield (
                f"{use.spec.name} is one weight of {first.layer} {first.path} and {use.layer} {use.path}, but they do"
                f" not agree: {differences}; give both the same, or different names"
            )
        elif first.spec != use.spec:
            yield f"{use.spec.name}: {first.layer} and {use.layer} hold different parts of it on one rank"


def _partition_faults(uses: Iterable[Use], topology: Topology) -> Iterator[str]:
    """Yields a problem for each global tensor that the ranks' shards do not cover exactly once.

    Either no rank holds some elements of the tensor, or several ranks hold the same elements,
    although the tensor's record does not mark them as replicated. Collective.
    """
    # If `over` contains the tensor axis, t is 0: each rank of `over` has a separate row.
    # The boxes that this rank holds: axis `ShardSpec.over` ("" if None) -> tensor name -> boxes.
    boxes: dict[str, dict[str, list[Part]]] = {}
    where: dict[str, Use] = {}
    for use in {(use.spec.name, use.spec.tile): use for use in uses}.values():
        if use.spec.numel + use.spec.padding != use.param.numel():
            yield f"{use.layer}: the pieces of {use.spec.name} do not fill its shape {tuple(use.param.shape)}"
        for piece in use.spec.pieces:
            own = boxes.setdefault(use.spec.over or "", {})
            own.setdefault(piece.name, []).append((piece.start, piece.size))
            where.setdefault(piece.name, use)
    # ranks[over][i][t]: the boxes (tensor name -> boxes) that one rank holds: the rank with index i
    # on the axis `over` and index t on the tensor axis. If `over` is "", only i = 0 exists.
    ranks: dict[str, list[Any]] = {}
    for over, own in sorted(boxes.items()):
        alone = over and "tp" in parse(over)[0]
        row = [own] if alone else collectives.exchange(own, topology.axis("tp"))
        ranks[over] = collectives.exchange(row, topology.axis(over)) if over else [row]
    for name, use in where.items():
        shape = next(piece.shape for piece in use.spec.pieces if piece.name == name)
        parts = [[of_rank.get(name, []) for of_rank in row] for row in ranks[use.spec.over or ""]]
        if fault := _partition_fault(shape, use.spec.replicated, parts):
            yield f"{use.layer}: {name} {list(shape)}: {fault}"


def _partition_fault(
    shape: tuple[int, ...], replicated: str | None, rows: Sequence[Sequence[Sequence[Part]]]
) -> str | None:
    """Returns the problem of one global tensor, or None.

    Args:
        shape: shape of the global tensor.
        replicated: name of the axis over which the tensor is replicated, or None.
        rows: rows[i][t] has the boxes (start, size) of the tensor on one rank: the rank with index
            i on the axis `ShardSpec.over` and index t on the tensor axis. There is one row if the
            tensor has no axis `ShardSpec.over`.
    """
    parts_by_rank = list[tuple[int, Part]]()
    for ranks in rows:
        first_of: dict[int, int] = {}
        for rank, parts in enumerate(ranks):
            first = first_of.setdefault(same_place(replicated, rank, len(ranks)), rank)
            if parts != ranks[first]:
                return f"marked as replicated over {replicated}, but tensor ranks {first} and {rank} hold different parts"
        parts_by_rank += [(rank, part) for rank in first_of.values() for part in ranks[rank]]
    for (a, (a_start, a_size)), (b, (b_start, b_size)) in combinations(parts_by_rank, 2):
        if intersect(a_start, a_size, b_start, b_size) is not None:
            holders = f"tensor ranks {a} and {b} hold" if a != b else "its parameters hold"
            return (
                f"{holders} the same elements, and its record is not marked as replicated: mark the record"
                " replicated=slicing.replicated, or shard it over the Slicing's tp axis (was the layer given a Slicing"
                " with the topology's tp axis?)"
            )
    found, expected = sum(math.prod(size) for _, (_, size) in parts_by_rank), math.prod(shape)
    if found != expected:
        return f"tensor ranks hold {found} of its {expected} elements: start and size of its pieces do not cover it"
    return None


def _differences(first: Sequence[Any], own: Sequence[Any], rank: int) -> list[str]:
    """Returns the first difference between the model descriptions of rank 0 and this rank.

    The list has one message, or none if the descriptions are equal.
    """
    for there, here in zip(first, own, strict=False):
        if there != here:
            layer, path, name, facts = here
            keys = (
                [k for k in facts if there[3].get(k) != facts[k]] if there[:3] == here[:3] else []
            )
            differences = (
                ", ".join(f"{k} {there[3][k]} and {facts[k]}" for k in keys)
                or f"{there[2]} and {name}"
            )
            text = (
                f"{layer}: parameter {path} is not the same on ranks 0 and {rank}: {differences}; a layer's definition must not"
                " depend on the rank (only start and size of its pieces may)"
            )
            return [text]
    if len(first) == len(own):
        return []
    return [f"rank {rank} has {len(own)} parameters, rank 0 has {len(first)}"]
