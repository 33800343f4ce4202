"""What a step found out: numbers on the device, which become numbers of Python when they are read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from threed import collectives
from threed.layers.slicing import Flag
from threed.topology import Axis
from threed.zero.update import Update


class DataError(ValueError):
    """Raised for invalid data in a batch, such as token ids beyond the vocabulary.

    The batch's step was skipped. The error is raised when metrics of that step or of a later one are read, or when the
    state is saved.
    """


class BadStepsError(RuntimeError):
    """Too many steps in a row were skipped: raised when metrics are read, on every rank alike."""


class Faults:
    """Collects errors in the data of steps, on the device, until metrics are read or the state is saved.

    Args:
        flags: of all layers, the same on every rank.
        device: of the layers.
        warns: whether this rank gives the warnings for flags with `error` false.
    """

    def __init__(self, flags: Sequence[Flag], device: torch.device, warns: bool) -> None:
        self.flags, self.warns = tuple(flags), warns
        self._count = torch.zeros(len(flags), dtype=torch.float64, device=device)
        self._told = [0.0] * len(flags)
        self._raised: dict[int, str] = {}  # by step, so that every property of its metrics raises

    def clear(self) -> None:
        """Clears the records of all flags."""
        for flag in self.flags:
            flag.swap(None)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Clears the flags for the block, and restores the records of a step in progress after it."""
        kept = [flag.swap(None) for flag in self.flags]
        try:
            yield
        finally:
            for flag, found in zip(self.flags, kept, strict=True):
                flag.swap(found)

    def appended_to(self, loss: Tensor) -> Tensor:
        """Takes the flags and returns them behind the loss [1], fp64 [1 + number of flags], for one sum over ranks."""
        return torch.cat((loss, *(flag.take(loss.device).view(1) for flag in self.flags)))

    def add(self, found: Tensor) -> Tensor:
        """Counts the flags of a step, summed over all ranks [number of flags]; returns the counts so far."""
        self._count += found
        return self._count.clone()

    def raise_new(self, step: int, counts: Tensor) -> None:
        """Raises DataError for errors up to this step that were not raised before; warns of other flags."""
        if what := self._new(counts):
            self._raised[step] = (
                f"up to step {step}, since metrics were last read: {', '.join(what)}"
            )
        if step in self._raised:
            raise DataError(self._raised[step])

    def raise_before_save(self, step: int, counts: Tensor, everyone: Axis) -> None:
        """Raises DataError on every rank if some rank has not yet raised an error of a step up to this one. Collective
        over `everyone`."""
        everywhere = collectives.exchange(self._new(counts), everyone)
        if what := dict.fromkeys(check for rank in everywhere for check in rank):
            raise DataError(
                f"nothing is saved; up to step {step}, since metrics were last read: {', '.join(what)}. Those steps"
                " were skipped: weights and moments are unchanged by them, and the next call saves them"
            )

    def _new(self, counts: Tensor) -> list[str]:
        """Returns the errors that were not counted before; warns of other new flags."""
        now = counts.tolist()
        new = [flag for flag, n, told in zip(self.flags, now, self._told, strict=True) if n > told]
        self._told = [max(both) for both in zip(now, self._told, strict=True)]
        for flag in new:
            if self.warns and not flag.error:
                warnings.warn(f"a step was skipped: {flag.what}", stacklevel=5)
        return [flag.what for flag in new if flag.error]


def loss_of(sums: Tensor) -> Tensor:
    """Returns the loss from sums over all ranks [1 + number of flags]; NaN if a flag is set."""
    return torch.where(sums[1:].any(), torch.nan, sums[0])


@dataclass(frozen=True, eq=False)
class Numbers:
    """The results of a step's update, and the counts of all flags up to this step."""

    update: Update
    counts: Tensor

    @property
    def loss(self) -> Tensor:
        """The mean loss of the global batch; NaN if its data are invalid."""
        return loss_of(self.update.sums)


class Later:
    """The numbers of a step, computed at the first call.

    Args:
        update: returns the results of the step's update; called once, and released.
        faults: counts the flags of the step.

    Attributes:
        found: the numbers, None before the first call.
    """

    def __init__(self, update: Callable[[], Update], faults: Faults) -> None:
        self._update: Callable[[], Update] | None = update
        self._faults = faults
        self.found: Numbers | None = None

    def __call__(self) -> Numbers:
        if self._update is not None:
            update, self._update = self._update(), None
            self.found = Numbers(update, self._faults.add(update.sums[1:]))
        assert self.found is not None
        return self.found


@dataclass(frozen=True, eq=False)
class StepMetrics:
    """What one step found out; reading a property waits for the device, and raises DataError where data were wrong, and
    BadStepsError where `max_bad_steps` in a row were skipped.

    tokens: of the global batch. seconds: host time of the step's phases (fwd_bwd_s, dp_comm_s: what of the gradient
    reduction was left to wait for, optim_s). After an optimistic update reading waits for the other ranks too.
    """

    step: int
    tokens: int
    _numbers: Later
    seconds: Mapping[str, float]
    _faults: Faults
    max_bad_steps: int = 0

    def __repr__(self) -> str:
        """Returns the values without raising errors; "not read yet" for values that would require a collective."""
        numbers = self._numbers.found
        names = ("loss", "grad_norm", "lr", "loss_scale")
        parts = [f"step={self.step}", f"tokens={self.tokens}"]
        if numbers is None:
            parts += [f"{name}=<not read yet>" for name in names]
        else:
            update = numbers.update
            values = numbers.loss, update.grad_norm, update.lr, update.loss_scale
            parts += [f"{n}={float(v):.6g}" for n, v in zip(names, values, strict=True)]
            parts += [f"skipped={int(update.skips)}", f"bad_steps={int(update.in_a_row)}"]
        parts += [f"{name}={seconds:.3g}" for name, seconds in self.seconds.items()]
        return f"StepMetrics({', '.join(parts)})"

    def _checked(self, value: Tensor) -> float:
        numbers = self._numbers()
        self._faults.raise_new(self.step, numbers.counts)
        if 0 < self.max_bad_steps <= self.bad_steps:
            what = (
                f"loss {float(numbers.loss):g}, gradient norm {float(numbers.update.grad_norm):g}"
            )
            raise BadStepsError(
                f"{self.bad_steps} steps in a row up to step {self.step} were skipped ({what} in the last one);"
                " the weights have not changed since. Go on from an earlier checkpoint with a lower"
                " --optim.lr, or look for what is not finite in the data or the model; --train.max-bad-steps 0 goes on"
            )
        return float(value)

    @property
    def loss(self) -> float:
        """The global batch's mean token loss before the update, in nats."""
        return self._checked(self._numbers().loss)

    @property
    def loss_tensor(self) -> Tensor:
        """The same as a scalar tensor; the host does not wait for its value."""
        return self._numbers().loss

    @property
    def grad_norm(self) -> float:
        """The global gradient norm before clipping."""
        return self._checked(self._numbers().update.grad_norm)

    @property
    def lr(self) -> float:
        """The learning rate of this update."""
        return float(self._numbers().update.lr)

    @property
    def loss_scale(self) -> float:
        """What the loss of this step was multiplied with for its backward."""
        return float(self._numbers().update.loss_scale)

    @property
    def skipped(self) -> int:
        """Steps skipped so far because their loss or gradient norm was not finite, or a spike."""
        return int(self._numbers().update.skips)

    @property
    def bad_steps(self) -> int:
        """How many of them ended the run so far, in a row; while the loss scale still falls, none counts."""
        return int(self._numbers().update.in_a_row)
