"""Rooms of experts (`--experts.room`) that grow after steps that were skipped for lack of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from threed.core.device import start_copy_out
from threed.layers import MixtureOfExperts
from threed.zero.step_metrics import Faults


class Rooms:
    """Enlarges the room of a mixture of experts whose rows did not fit.

    The room is doubled; if it is then still too small, it is multiplied by four. All ranks do so in
    the same step, the second one after the step that was skipped. By then the numbers of that step
    are on the host, so that the host does not wait for the last step.

    Args:
        layers: all layers of the model.
        faults: the counts of the layers' flags.

    Attributes:
        exist: whether any layer has a room.
    """

    def __init__(self, layers: Sequence[nn.Module], faults: Faults) -> None:
        parts = [part for layer in layers for part in layer.modules()]
        self._mixtures = [p for p in parts if isinstance(p, MixtureOfExperts) and p.limits.room]
        self.exist = bool(self._mixtures)
        places = {id(flag): place for place, flag in enumerate(faults.flags)}
        self._places = torch.tensor(
            [places[id(mixture.data_flags[0])] for mixture in self._mixtures], dtype=torch.int64
        )
        self._warns = faults.warns
        self._before = self._seen = [0.0] * len(self._mixtures)
        self._counts: Callable[[], Tensor] | None = None
        self._age = [3] * len(self._mixtures)  # checks since the last growth

    def read(self, counts: Tensor) -> None:
        """Starts to read the counts of the flags after a step, fp64 [number of flags]."""
        if self.exist:
            self._counts = start_copy_out(counts)

    def grow(self) -> None:
        """Enlarges the rooms that were too small, according to the last `read`."""
        if self._counts is None:
            return
        now, self._counts = self._counts()[self._places].tolist(), None
        for n, (mixture, count) in enumerate(zip(self._mixtures, now, strict=True)):
            self._age[n] += 1
            # at age 1, the step that was read last still had the smaller room
            if count > self._before[n] and self._age[n] > 1:
                # at age 2, the larger room was too small as well
                self._enlarge(mixture, 4 if self._age[n] == 2 else 2)
                self._age[n] = 0
        self._before = now

    def state(self) -> dict[str, Any]:
        """Returns {"rooms": room of each mixture, by name} for a checkpoint; {} without rooms."""
        rooms = {mixture.name: mixture.limits.room for mixture in self._mixtures}
        return {"rooms": rooms} if rooms else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Enlarges the rooms to those of a checkpoint; rooms that are larger already stay.

        Args:
            state: the dict that `state()` returned.
        """
        rooms = state.get("rooms", {})
        for mixture in self._mixtures:
            mixture.set_room(max(mixture.limits.room, rooms.get(mixture.name, 0.0)))

    def lacked(self, counts: Tensor) -> bool:
        """Returns whether rows did not fit since the last call; waits for the device.

        Args:
            counts: the counts of the flags, fp64 [number of flags].
        """
        before, self._seen = self._seen, counts.cpu()[self._places].tolist()
        return self._seen != before

    def _enlarge(self, mixture: MixtureOfExperts, factor: int) -> None:
        before = mixture.limits.room
        mixture.set_room(room := factor * before)
        if self._warns:
            warnings.warn(
                f"{mixture.name}: a step was skipped, because an expert rank would have got more rows than"
                f" --experts.room {before:g} allows; the room is {room:g} from now on",
                stacklevel=5,
            )
