"""Metrics of a step: tensors on the device that become Python numbers when they are read."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from threed.distributed import collectives
from threed.distributed.topology import Axis
from threed.layers.slicing import Flag
from threed.zero.update import Later


class DataError(ValueError):
    """Raised for invalid data in a batch, such as token ids beyond the vocabulary.

    The step with that batch was skipped. The error is raised later: when the loss or gradient norm
    of that step or of a later step is read, or when a checkpoint is saved.
    """


class BadStepsError(RuntimeError):
    """Raised when the loss or gradient norm is read after too many consecutive skipped steps.

    The limit is `train.max_bad_steps`.
    """


class Faults:
    """Counts steps with invalid data, and reports them as errors or warnings.

    A layer sets its `Flag` if its data are invalid. The counts stay on the device. They are read
    and reported only when metrics are read or a checkpoint is saved, so that the host does not wait
    for the device in every step.

    Args:
        flags: the flags of all layers, the same list on every rank.
        device: device of the layers.
        warns: whether this rank issues the warnings for flags with `error=False`.
    """

    def __init__(self, flags: Sequence[Flag], device: torch.device, warns: bool) -> None:
        self.flags, self.warns = tuple(flags), warns
        self._count = torch.zeros(len(flags), dtype=torch.float64, device=device)
        self._reported = [0.0] * len(flags)
        # number of a step -> message of the error that every read of this step's metrics raises
        self._raised: dict[int, str] = {}

    def clear(self) -> None:
        """Resets the flags of the step in progress; the counts are kept."""
        for flag in self.flags:
            flag.swap(None)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Context manager that resets all flags, and restores their values when the block ends."""
        kept = [flag.swap(None) for flag in self.flags]
        try:
            yield
        finally:
            for flag, found in zip(self.flags, kept, strict=True):
                flag.swap(found)

    def appended_to(self, loss: Tensor) -> Tensor:
        """Returns the loss and the flags in one tensor, for a single all-reduce; resets the flags.

        Args:
            loss: this rank's term of the loss, fp64 [1].

        Returns:
            fp64 [1 + number of flags]: the loss, and a number per flag (`Flag.take`), usually 1.0
            if it is set, else 0.0.
        """
        return torch.cat((loss, *(flag.take(loss.device).view(1) for flag in self.flags)))

    def add(self, found: Tensor) -> Tensor:
        """Adds the flags of a step to the counts.

        Args:
            found: fp64 [number of flags]: per flag, the sum over all ranks, not 0 if it was set.

        Returns:
            A copy of the counts, fp64 [number of flags].
        """
        self._count += found.abs()
        return self._count.clone()

    def raise_new(self, step: int, counts: Tensor) -> None:
        """Reports the flags that were set up to and including `step`, unless already reported.

        A flag with `error=False` causes a warning. A flag with `error=True` causes a DataError,
        which a second call for the same step raises again.

        Args:
            step: number of the step.
            counts: the counts after that step, fp64 [number of flags].

        Raises:
            DataError: a flag with `error=True` was set and had not been reported, or an earlier
                call for the same step raised this error.
        """
        if what := self._new(counts):
            self._raised[step] = (
                f"up to step {step}, since metrics were last read: {', '.join(what)}"
            )
        if step in self._raised:
            raise DataError(self._raised[step])

    def raise_before_save(self, step: int, counts: Tensor, everyone: Axis) -> None:
        """Raises DataError before a save if invalid data were not reported yet. Collective.

        A rank has reported invalid data if it has raised an error for them, for example when it
        read metrics. If any rank still has to report invalid data, all ranks raise the error.

        Args:
            step: number of the last step.
            counts: the counts after that step, fp64 [number of flags].
            everyone: the axis of all ranks.

        Raises:
            DataError: a flag with `error=True` was set, and at least one rank had not reported it.
        """
        everywhere = collectives.exchange(self._new(counts), everyone)
        if what := dict.fromkeys(check for rank in everywhere for check in rank):
            raise DataError(
                f"nothing is saved; up to step {step}, since metrics were last read: {', '.join(what)}. Those steps"
                " were skipped: weights and moments are unchanged by them, and the next call saves them"
            )

    def _new(self, counts: Tensor) -> list[str]:
        """Returns a description of each error that was not reported yet; marks it as reported.

        Only flags with `error=True` are errors. For each other flag that was not reported yet, a
        warning is issued.
        """
        now = counts.tolist()
        new = [
            flag
            for flag, n, reported in zip(self.flags, now, self._reported, strict=True)
            if n > reported
        ]
        self._reported = [max(both) for both in zip(now, self._reported, strict=True)]
        for flag in new:
            if self.warns and not flag.error:
                warnings.warn(f"a step was skipped: {flag.what}", stacklevel=5)
        return [flag.what for flag in new if flag.error]


@dataclass(frozen=True, eq=False)
class StepMetrics:
    """The metrics of one optimizer step.

    Reading a property waits for the device, except for `loss_tensor`. After an optimistic or
    asynchronous update, the first read also waits for the other ranks. Reading `loss` or
    `grad_norm` may raise the errors below. `repr(metrics)` never waits for other ranks.

    Attributes:
        step: number of the step, from 1.
        tokens: number of tokens of the global batch.
        seconds: host seconds by phase: 'fwd_bwd_s' (forwards and backwards), 'dp_comm_s' (waiting
            for gradient reductions after the last backward), 'optim_s' (update).
        max_bad_steps: number of consecutive skipped steps at which BadStepsError is raised; 0 for
            no limit.
        has_loss: False if the program called `loss.backward()` itself, so that the engine does not
            know the loss.

    Raises:
        DataError: (a ValueError) the data of this step were invalid, or the data of an earlier
            step were invalid and no error has been raised for them yet.
        BadStepsError: (a RuntimeError) at least `max_bad_steps` consecutive steps were skipped (see
            `bad_steps`).

    Example:

        metrics = engine.step(batch)
        print(metrics.step, metrics.loss, metrics.grad_norm, metrics.lr)
    """

    step: int
    tokens: int
    _numbers: Later
    seconds: Mapping[str, float]
    _faults: Faults
    max_bad_steps: int = 0
    has_loss: bool = True

    def __repr__(self) -> str:
        """Returns the metrics as text.

        A value for which this rank would have to wait for other ranks is shown as "<not read yet>".
        """
        numbers = self._numbers.found
        names = ("loss", "grad_norm", "lr", "loss_scale")
        parts = [f"step={self.step}", f"tokens={self.tokens}"]
        if numbers is None:
            parts += [f"{name}=<not read yet>" for name in names]
        else:
            update = numbers.update
            values = self.loss_tensor, update.grad_norm, update.lr, update.loss_scale
            parts += [f"{n}={float(v):.6g}" for n, v in zip(names, values, strict=True)]
            parts += [f"skipped={int(update.skips)}", f"bad_steps={int(update.in_a_row)}"]
        parts += [f"{name}={seconds:.3g}" for name, seconds in self.seconds.items()]
        return f"StepMetrics({', '.join(parts)})"

    def _checked(self, value: Tensor) -> float:
        """Returns a value as a number, unless DataError or BadStepsError must be raised.

        Raises:
            DataError: see `StepMetrics`.
            BadStepsError: see `StepMetrics`.
        """
        numbers = self._numbers()
        self._faults.raise_new(self.step, numbers.counts)
        if 0 < self.max_bad_steps <= self.bad_steps:
            what = (
                f"loss {float(numbers.loss):g}, gradient norm {float(numbers.update.grad_norm):g}"
            )
            raise BadStepsError(
                f"{self.bad_steps} steps in a row up to step {self.step} were skipped ({what} in the last one);"
                " the weights have not changed since. Resume from an earlier checkpoint with a lower --optim.lr"
                " (or a larger --experts.room, if it is set), or look for non-finite values in the data or"
                " the model; --train.max-bad-steps 0 removes the limit"
            )
        return float(value)

    @property
    def loss(self) -> float:
        """Mean loss of the global batch, computed with the weights before the update.

        For a model of pipeline layers it is the mean cross entropy of the valid labels, in nats per
        token. For a wrapped module it is the mean of the losses that its forward returned, in the
        unit of these losses. In this mean, each micro-batch is weighted by its number of items: the
        number of labels that are at least 0, or the number of rows if the labels are not integers.
        In a custom loop (`ModuleEngine.backward`) the loss is the weighted sum of the losses passed
        to `backward`, by default their mean; NaN if the program called `loss.backward()` instead.
        """
        return self._checked(self.loss_tensor)

    @property
    def loss_tensor(self) -> Tensor:
        """The loss as a scalar tensor, fp64; the host does not wait for its value.

        NaN if the data of the step were invalid, or without `has_loss`.
        """
        loss = self._numbers().loss
        return loss if self.has_loss else torch.full_like(loss, torch.nan)

    @property
    def grad_norm(self) -> float:
        """Norm of the global batch's gradient with respect to all parameters, before clipping."""
        return self._checked(self._numbers().update.grad_norm)

    @property
    def lr(self) -> float:
        """Learning rate of the step's update, for parameters that no parameter group matches."""
        return float(self._numbers().update.lr)

    @property
    def loss_scale(self) -> float:
        """Factor by which the loss was multiplied in the step's backward (fp16 loss scaling)."""
        return float(self._numbers().update.loss_scale) if self.has_loss else 1.0

    @property
    def skipped(self) -> int:
        """Number of steps skipped so far.

        A step is skipped if its loss or gradient norm is not finite, if its gradient norm is a
        spike (`train.max_norm_spike`), or if its data are invalid.
        """
        return int(self._numbers().update.skips)

    @property
    def bad_steps(self) -> int:
        """Number of consecutive skipped steps up to this one.

        Overflows do not count while a dynamic loss scale is above its minimum, because the scale
        then falls until no overflow occurs.
        """
        return int(self._numbers().update.in_a_row)
