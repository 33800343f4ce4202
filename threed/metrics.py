"""What a step found out: numbers on the device, which become numbers of Python when they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class DataError(ValueError):
    """A batch that a step could not be made of: raised when the metrics of that step, or of a later one, are read."""


class BadStepsError(RuntimeError):
    """Too many steps in a row were skipped: raised when metrics are read, on every rank alike."""


class Faults:
    """What was found wrong with the data of steps, on the device, until somebody reads a step's metrics.

    checks: what each number of `count` stands for.
    """

    def __init__(self, checks: Sequence[str], device: torch.device) -> None:
        self.checks = tuple(checks)
        self._count = torch.zeros(len(checks), dtype=torch.float64, device=device)
        self._told = [0.0] * len(checks)
        self._raised: dict[int, str] = {}  # by step, for whoever reads a second number of its metrics

    def add(self, found: Tensor) -> Tensor:
        """Counts what a step found [number of checks]; gives the counts so far."""
        self._count += found
        return self._count.clone()

    def tell(self, step: int, counts: Tensor) -> None:
        """Raises DataError where something was found up to this step that nobody was told of before."""
        now = counts.tolist()
        what = [check for check, n, told in zip(self.checks, now, self._told, strict=True) if n > told]
        self._told = [max(both) for both in zip(now, self._told, strict=True)]
        if what:
            self._raised[step] = f"up to step {step}, since metrics were last read: {', '.join(what)}"
        if step in self._raised:
            raise DataError(self._raised[step])


@dataclass(frozen=True, eq=False)
class Numbers:
    """A step's numbers, as scalar tensors: see `StepMetrics`. found: what is wrong with the data so far; none without
    checks."""

    loss: Tensor
    grad_norm: Tensor
    lr: Tensor
    loss_scale: Tensor
    skipped: Tensor
    in_a_row: Tensor
    found: Tensor


class Later:
    """Numbers that are found when somebody asks for them; `find` is called once, and let go of."""

    def __init__(self, find: Callable[[], Numbers]) -> None:
        self._find: Callable[[], Numbers] | None = find
        self._found: Numbers | None = None

    def __call__(self) -> Numbers:
        if self._find is not None:
            self._found, self._find = self._find(), None
        assert self._found is not None
        return self._found

    @property
    def found(self) -> Numbers | None:
        """The numbers, if they were found before."""
        return self._found


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
        """The values, without the errors that properties raise; "not read yet" where finding them needs other ranks."""
        numbers = self._numbers.found
        names = ("loss", "grad_norm", "lr", "loss_scale")
        parts = [f"step={self.step}", f"tokens={self.tokens}"]
        if numbers is None:
            parts += [f"{name}=<not read yet>" for name in names]
        else:
            parts += [f"{name}={float(getattr(numbers, name)):.6g}" for name in names]
            parts += [f"skipped={int(numbers.skipped)}", f"bad_steps={int(numbers.in_a_row)}"]
        parts += [f"{name}={seconds:.3g}" for name, seconds in self.seconds.items()]
        return f"StepMetrics({', '.join(parts)})"

    def _checked(self, value: Tensor) -> float:
        numbers = self._numbers()
        self._faults.tell(self.step, numbers.found)
        if 0 < self.max_bad_steps <= self.bad_steps:
            what = f"loss {float(numbers.loss):g}, gradient norm {float(numbers.grad_norm):g}"
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
        return self._checked(self._numbers().grad_norm)

    @property
    def lr(self) -> float:
        """The learning rate of this update."""
        return float(self._numbers().lr)

    @property
    def loss_scale(self) -> float:
        """What the loss of this step was multiplied with for its backward."""
        return float(self._numbers().loss_scale)

    @property
    def skipped(self) -> int:
        """Steps skipped so far because their loss or gradient norm was not finite, or a spike."""
        return int(self._numbers().skipped)

    @property
    def bad_steps(self) -> int:
        """How many of them ended the run so far, in a row; while the loss scale still falls, none counts."""
        return int(self._numbers().in_a_row)
