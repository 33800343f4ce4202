"""What a step found out: numbers on the device, which become numbers of Python when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


class DataError(ValueError):
    """A batch that a step could not be made of: raised when the step's metrics are read."""


@dataclass(frozen=True, eq=False)
class StepMetrics:
    """What one step found out; reading a property waits for the device, and raises DataError where data were wrong.

    tokens: of the global batch. seconds: host time of the step's phases (fwd_bwd_s, dp_comm_s: what of the gradient
    reduction was left to wait for, optim_s).
    """

    step: int
    tokens: int
    _loss: Tensor
    _grad_norm: Tensor
    _lr: Tensor
    _loss_scale: Tensor
    _skipped: Tensor
    seconds: Mapping[str, float]
    _faults: Tensor | None = None
    _checks: tuple[str, ...] = ()
    _may_overflow: bool = False

    def _checked(self, value: Tensor) -> float:
        """A number of the step; DataError where the step's data were found wrong, or made the loss no number."""
        if self._faults is not None and bool(self._faults.any()):
            what = ", ".join(w for w, n in zip(self._checks, self._faults.tolist(), strict=True) if n)
            raise DataError(f"step {self.step}: the batch has {what}")
        if not self._may_overflow and bool(self._loss.isnan()):
            raise DataError(f"step {self.step}: the loss is no number (NaN); {int(self._skipped)} steps were skipped")
        return float(value)

    @property
    def loss(self) -> float:
        """The global batch's mean token loss before the update, in nats."""
        return self._checked(self._loss)

    @property
    def loss_tensor(self) -> Tensor:
        """The same as a scalar tensor, which nobody has to wait for."""
        return self._loss

    @property
    def grad_norm(self) -> float:
        """The global gradient norm before clipping."""
        return self._checked(self._grad_norm)

    @property
    def lr(self) -> float:
        """The learning rate of this update."""
        return float(self._lr)

    @property
    def loss_scale(self) -> float:
        """What the loss of this step was multiplied with for its backward."""
        return float(self._loss_scale)

    @property
    def skipped(self) -> int:
        """Steps skipped so far because a gradient was not finite."""
        return int(self._skipped)
