"""The flags of a command line of Megatron-LM, and what they are translated to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


class Untranslatable(ValueError):
    """Raised if flags cannot be translated; the message names them and what to do."""


@dataclass(frozen=True)
class Setting:
    """A value of a key of threed.

    Attributes:
        key: the key, as `group.key`.
        value: the value, as a user writes it.
        flags: the flags of Megatron-LM that determine the value, without hyphens; empty if the
            value is a default of Megatron-LM.
    """

    key: str
    value: str
    flags: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """The setting as words of a command line."""
        joined = self.value.startswith("-")
        return [f"--{self.key}={self.value}"] if joined else [f"--{self.key}", self.value]


@dataclass(frozen=True)
class Unused:
    """A flag of Megatron-LM that needs no replacement.

    Attributes:
        name: the flag without its hyphens.
        reason: why it needs no replacement.
    """

    name: str
    reason: str


Items = Iterator[Setting | Unused]


@dataclass(frozen=True)
class Given:
    """The flags of a command line of Megatron-LM.

    Attributes:
        values: the values of each flag, by name.
        world_size: number of ranks.
    """

    values: Mapping[str, tuple[str, ...]]
    world_size: int

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def among(self, *names: str) -> tuple[str, ...]:
        """Returns the names that are given."""
        return tuple(name for name in names if name in self)

    def text(self, name: str, default: str = "") -> str:
        """Returns the first value of a flag, or `default` if it is not given or has no value."""
        return (self.values.get(name) or (default,))[0]

    def number(self, name: str, default: float) -> float:
        """Returns the value of a flag as a number."""
        try:
            return float(self.text(name, str(default)))
        except ValueError:
            raise Untranslatable(f"--{name} {self.text(name)}: must be a number") from None

    def integer(self, name: str, default: int = 1) -> int:
        """Returns the value of a flag as a whole number of at least 1."""
        text = self.text(name, str(default))
        if not text.isdecimal() or int(text) < 1:
            raise Untranslatable(f"--{name} {text}: must be a whole number of at least 1")
        return int(text)

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks, at least 1."""
        names = [f"{axis}-parallel-size" for axis in ("tensor-model", "pipeline-model", "context")]
        return max(1, self.world_size // math.prod(map(self.integer, names)))

    @property
    def batch(self) -> int:
        """Sequences per step; by default, one micro-batch per data-parallel rank."""
        return self.integer("global-batch-size", self.integer("micro-batch-size") * self.data_ranks)

    @property
    def iterations(self) -> int:
        """Number of steps, or 0 if it is not given."""
        if "train-samples" in self:
            return self.integer("train-samples") // self.batch
        return self.integer("train-iters") if "train-iters" in self else 0

    @property
    def decay_iterations(self) -> int:
        """Number of steps over which the learning rate decays, or 0 if it is not given."""
        if "lr-decay-samples" in self:
            return self.integer("lr-decay-samples") // self.batch
        return self.integer("lr-decay-iters") if "lr-decay-iters" in self else self.iterations
