"""Tables of invalid combinations of keys, which `threed.config.checks` evaluates.

`REFUSALS` lists features that are not implemented yet. `REQUIREMENTS` lists pairs of keys in which
the first key requires certain values of the second. `ASYNCHRONOUS` and `GRAPHS` list what
asynchronous schedules and CUDA graphs require.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from threed.config.groups import Config, RecomputeConfig, key_name, python_name
from threed.config.schema import written

# Schedules that `zero.order layer` allows. This order requires a single pipeline stage. With a
# single stage, no schedule has a bubble, so these two schedules are equivalent.
LAYER_MAJOR = ("1f1b", "gpipe")


def listed(numbers: Iterable[object]) -> str:
    """Joins items as "1, 2 or 3". More than 12 items are shortened to the first 11 and the last."""
    words = [str(number) for number in numbers]
    if len(words) > 12:
        words = [*words[:11], words[-1]]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


@dataclass(frozen=True)
class Refusal:
    """A key for which only some of the declared values are implemented.

    Attributes:
        group: group of the key.
        field: field name of the key.
        works: the implemented values.
        feature: name of the feature that other values need, for the message.
    """

    group: str
    field: str
    works: tuple[object, ...]
    feature: str

    def find(self, config: Config) -> str | None:
        """Returns the problem if `config` uses the missing feature, else None."""
        key = f"{self.group}.{key_name(self.field)}"
        value = value_of(config, key)
        if value in self.works:
            return None
        fix = " or ".join(written(works) for works in self.works)
        return f"--{key} {written(value)}: {self.feature} is not there yet; use --{key} {fix}"


@dataclass(frozen=True)
class Requirement:
    """A key that requires certain values of another key.

    Attributes:
        key: the key that has the requirement, as `group.key`.
        free: values of `key` that require nothing; the message suggests the first one.
        other: the other key, as `group.key`.
        works: values of `other` that meet the requirement.
        why: reason for the requirement, for the message.
    """

    key: str
    free: tuple[object, ...]
    other: str
    works: tuple[object, ...] | range
    why: str

    def find(self, config: Config) -> str | None:
        """Returns the problem if `config` does not meet the requirement, else None."""
        value, found = value_of(config, self.key), value_of(config, self.other)
        if value in self.free or found in self.works:
            return None
        given = f"--{self.key} {written(value)} with --{self.other} {written(found)}"
        several = isinstance(self.works, range)
        works = f"{self.works[0]} or more" if several else listed(map(written, self.works))
        fix = f"--{self.key} {written(self.free[0])}" if self.free else f"another --{self.key}"
        return f"{given}: {self.why}; use --{self.other} {works}, or {fix}"


def value_of(config: Config, key: str) -> Any:
    """Returns the value of a key, which is given as `group.key`."""
    group, _, name = key.partition(".")
    return getattr(getattr(config, group), python_name(name))


_ONE, _TWO = range(1, sys.maxsize), range(2, sys.maxsize)
_COPIES = "updates are one step late, and checkpoints in memory would wait for them"
_KEEPS = "it applies to the inputs that full recompute saves"
_CHANGE = "weights change before a step could be computed again"
_DEVICE = "it keeps copies of the states on the device"
_AT_THE_END = "then only the final state is saved"
_DRIVE = "it updates layers whose state is on a drive, layer by layer"
_MOVES = "a CUDA graph contains the addresses of parameters and gradients, which change there"
_BOUNDS = "it limits the measured partition over several pipeline ranks"
GRAPHS = tuple(
    Requirement("run.graphs", ("auto", False), *rest)
    for rest in (
        ("parallel.pp", (1,), "a CUDA graph cannot contain the messages between stages"),
        ("parallel.tp", (1,), "collectives inside layers are not captured yet"),
        ("parallel.cp", (1,), "collectives inside layers are not captured yet"),
        ("parallel.schedule", ("1f1b",), "each backward must follow its forward directly"),
        ("zero.stage", (0, 1), _MOVES),
        (
            "zero.offload-optimizer",
            ("none",),
            "the host takes part in a step with offloaded states",
        ),
        (
            "recompute.mode",
            ("none",),
            "recomputed layers read and set the state of random generators",
        ),
        (
            "recompute.mlp-chunks",
            (1,),
            "recomputed chunks read and set the state of random generators",
        ),
        ("run.compile", (False,), "compiled layers and CUDA graphs have not been combined yet"),
        ("run.recheck-bad-steps", (False,), "a replay does not repeat the checks on the host"),
        ("log.profile-steps", (None,), "a profile would show replays in place of layers"),
    )
)
"""Requirements of CUDA graphs, if `run.graphs` is true; `auto` uses graphs only if all are met."""


REQUIREMENTS = (
    Requirement("parallel.memory-limit-gib", (None,), "parallel.partition", ("measured",), _BOUNDS),
    Requirement("parallel.memory-limit-gib", (None,), "parallel.pp", _TWO, _BOUNDS),
    Requirement("parallel.optimistic-step", ("auto", False), "parallel.pp", _TWO, "no stage waits for another"),
    Requirement(
        "parallel.optimistic-step", ("auto", False), "zero.delayed-update", (False,),
        "both let the next step begin early",
    ),
    Requirement("parallel.optimistic-step", ("auto", False), "zero.offload-optimizer", ("none",), _DEVICE),
    Requirement("parallel.optimistic-step", ("auto", False), "zero.offload-params", ("none",), _DEVICE),
    Requirement(
        "parallel.cp", (1,), "run.compile", (False,), "attention over context ranks cannot be compiled yet"
    ),
    Requirement("parallel.cp-heads", ("auto", 1), "parallel.cp", _TWO, "there are no context ranks"),
    Requirement("parallel.symmetric-memory", (False,), "parallel.tp", _TWO, "it needs several tensor-parallel ranks"),
    Requirement(
        "parallel.symmetric-memory", (False,), "parallel.sequence", (None, True), "it serves sequence parallelism"
    ),
    Requirement(
        "parallel.symmetric-memory", (False,), "run.compile", (False,), "compiled layers do not split their products"
    ),
    Requirement("parallel.symmetric-memory", (False,), "zero.tile", (1,), "each part would gather all tiles"),
    Requirement("zero.shard-size", ("all",), "zero.stage", (1, 2, 3), "stage 0 shards nothing"),
    Requirement("zero.offload-optimizer", ("none",), "zero.stage", (1, 2, 3), "it moves the states that ZeRO shards"),
    Requirement("zero.offload-params", ("none",), "zero.stage", (3,), "lower stages do not shard parameters"),
    Requirement("zero.tile", (1,), "zero.stage", (3,), "lower stages gather no parameters"),
    Requirement("zero.compress-weights", ("none",), "zero.stage", (3,), "lower stages gather no parameters"),
    Requirement(
        "zero.delayed-update", (False,), "zero.offload-optimizer", ("cpu",), "it works on states in host memory"
    ),
    Requirement("zero.early-update", ("auto", False), "zero.order", ("layer",), _DRIVE),
    Requirement("zero.early-update", ("auto", False), "zero.offload-optimizer", ("nvme",), _DRIVE),
    Requirement("zero.early-update", ("auto", False), "zero.offload-params", ("nvme",), _DRIVE),
    Requirement(
        "zero.order", ("micro", "auto"), "zero.stage", (2, 3),
        "lower stages keep full parameters, and reduce gradients once per step anyway",
    ),
    Requirement(
        "zero.order", ("micro", "auto"), "parallel.pp", (1,),
        "a stage would have to wait for all micro-batches before its first layer",
    ),
    Requirement(
        "zero.order", ("micro", "auto"), "parallel.schedule", LAYER_MAJOR, "other schedules fix the order of micro-batches"
    ),
    Requirement("recompute.every", (1,), "recompute.mode", ("full", "selective"), "nothing is computed again"),
    Requirement(
        "recompute.ops", (RecomputeConfig().ops,), "recompute.mode", ("selective",), "other modes do not select operations"
    ),
    Requirement("recompute.partition", (False,), "recompute.mode", ("full",), _KEEPS),
    Requirement("recompute.offload", ("none",), "recompute.mode", ("full",), _KEEPS),
    Requirement("recompute.arena", (False,), "recompute.mode", ("full",), _KEEPS),
    Requirement("recompute.gathered", ("auto", False), "parallel.tp", _TWO, "it needs several tensor-parallel ranks"),
    Requirement("recompute.gathered", ("auto", False), "run.compile", (False,), "compiled layers keep gathered inputs"),
    Requirement("recompute.partition", (False,), "parallel.tp", _TWO, "it needs several tensor-parallel ranks"),
    Requirement("recompute.mlp-chunks", (1,), "run.compile", (False,), "a compiled MLP runs on the full sequence"),
    Requirement(
        "recompute.arena", (False,), "recompute.offload", ("none", "cpu"), "a drive already uses buffers of constant size"
    ),
    Requirement("precision.loss-scale", ("dynamic",), "precision.dtype", ("fp16",), "only fp16 needs its loss scaled"),
    Requirement("checkpoint.async", ("auto", False), "checkpoint.every", _ONE, _AT_THE_END),
    Requirement("checkpoint.keep-every", (0,), "checkpoint.every", _ONE, _AT_THE_END),
    Requirement("run.recheck-bad-steps", (False,), "zero.delayed-update", (False,), _CHANGE),
    Requirement("checkpoint.memory-every", (None, 0), "zero.delayed-update", (False,), _COPIES),
    Requirement("run.replicate", ("none",), "zero.delayed-update", (False,), _COPIES),
    *GRAPHS,
)  # fmt: skip
_LATE = "its update already overlaps with the next step"
_BOTH = "both versions of the weights are on the device"
ASYNCHRONOUS = (
    Requirement(
        "parallel.schedule", (), "zero.stage", (0, 1),
        "sharded gradients would be added to the gradients of the previous step",
    ),
    Requirement("parallel.schedule", (), "zero.offload-optimizer", ("none",), _BOTH),
    Requirement("parallel.schedule", (), "zero.offload-params", ("none",), _BOTH),
    Requirement("parallel.schedule", (), "zero.delayed-update", (False,), _LATE),
    Requirement("parallel.schedule", (), "parallel.optimistic-step", ("auto", False), _LATE),
    Requirement(
        "parallel.schedule", (), "precision.dtype", ("bf16", "fp32", "fp64"),
        "a loss scale would change between a batch's forwards and backwards",
    ),
    Requirement("parallel.schedule", (), "run.recheck-bad-steps", (False,), _CHANGE),
    Requirement("parallel.schedule", (), "checkpoint.memory-every", (None, 0), _COPIES),
    Requirement("parallel.schedule", (), "run.replicate", ("none",), _COPIES),
)  # fmt: skip
"""Requirements of an asynchronous schedule (2BW): steps overlap, and updates are one step late."""


REFUSALS = (Refusal("precision", "dtype", ("fp32", "bf16", "fp16", "fp64"), "this format"),)
"""Features that are not implemented yet. Delete a line when its feature is implemented."""
