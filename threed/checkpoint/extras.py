"""Saves and restores persistent buffers, and torch's random generators for a wrapped module.

Each buffer is saved by one rank. The rank's file contains the values, and the manifest contains the
name, dtype and shape. For a wrapped module, every rank also saves the states of torch's default
generator and of its GPU's generator, because the module's dropout masks are drawn from these
generators. Models of `threed.layers` do not use them, so no generator states are saved for such
models. The generators of `random` and numpy belong to the user's program and are not saved.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from threed.checkpoint.compatibility import listed
from threed.core.device import rng_states, set_rng_states
from threed.distributed.topology import Topology
from threed.models.buffers import Buffers, bytes_of, dtype_name


@dataclass
class Extras:
    """The buffers and random generators of an engine, as saved in checkpoints.

    Attributes:
        buffers: the buffers of the model.
        topology: the parallel axes of the run, and this rank's position on them.
        generators: whether the states of torch's generators are saved and restored, too.
    """

    buffers: Buffers
    topology: Topology
    generators: bool
    _warned: set[str] = field(default_factory=set)

    def rewinding(self) -> Callable[[], None]:
        """Returns a function that restores the buffers and generators to their current state.

        Use this method if the same forward runs twice and must have the same results: call
        `rewinding` before the first run, and the returned function before the second run. Only
        buffers that forwards change are restored.
        """
        states, values = rng_states(self.topology.device), self.buffers.changing()

        def rewind() -> None:
            set_rng_states(states, self.topology.device)
            for place, value in values:
                place.store(value)

        return rewind

    def _synchronize(self) -> None:
        """Broadcasts the buffers that change in training from data rank 0. Collective.

        Warns, once per name, of buffers that differ between tensor ranks, and of modules with a
        state that is not saved.
        """
        self.buffers.agree()
        fix = (
            "make them equal, or register buffers that each rank can compute with persistent=False"
        )
        what = "buffers differ between tensor ranks, and the first one's are saved"
        self._warn(what, self.buffers.different(), fix)
        what = "the results of get_extra_state are not saved"
        fix = "keep the values in buffers, or save them with the argument extra"
        self._warn(what, self.buffers.extra_states(), fix)

    def _warn(self, what: str, names: Sequence[str], fix: str) -> None:
        new = [name for name in names if name not in self._warned]
        self._warned.update(new)
        if new and self.topology.data.index == self.topology.axis("tp").index == 0:
            warnings.warn(f"{what}: {listed(new)}; {fix}", stacklevel=6)

    def copied(self, any_copy: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns the buffers and generator states that this rank saves. Collective.

        Args:
            any_copy: whether ranks other than data rank 0 save their replicas of buffers, too.

        Returns:
            (about, copies). `about` describes the buffers and generators for the manifest. `copies`
            has a copy of each buffer and generator state, as a uint8 tensor [bytes] on the CPU, by
            the name under which the file stores it.
        """
        self._synchronize()
        owned = self.buffers.owned(any_copy)
        states = rng_states(self.topology.device) if self.generators else {}
        about = [[name, dtype_name(value), list(value.shape)] for name, value in owned.items()]
        tensors = {f"buffer/{name}": bytes_of(value) for name, value in owned.items()}
        tensors |= {f"generator/{name}": state for name, state in states.items()}
        copies = {key: value.to("cpu", copy=True) for key, value in tensors.items()}
        return {"buffers": about, "generators": list(states)}, copies

    def problems(
        self, saved: Mapping[str, tuple[str, str, tuple[int, ...]]], states: Mapping[str, Tensor]
    ) -> list[str]:
        """Returns the reasons why buffers or generator states cannot be restored on this rank.

        Args:
            saved: (name of the file, dtype, shape) of each saved buffer, by name.
            states: saved generator states by name; empty if they are not restored.
        """
        places = self.buffers.persistent().items()
        found = [(name, place.value, saved[name][1]) for name, place in places if name in saved]
        problems = [
            f"buffer {name} is {dtype} in the checkpoint and {dtype_name(value)} in the model"
            for name, value, dtype in found
            if value is not None
            and value.is_floating_point() != getattr(torch, dtype).is_floating_point
        ]
        return problems + (self._state_problems(states) if self.generators and states else [])

    def _state_problems(self, states: Mapping[str, Tensor]) -> list[str]:
        """Returns a list with an error text if torch rejects the states, else an empty list.

        To test the given generator states, this method sets them, and then sets the current states
        again.
        """
        device = self.topology.device
        before = rng_states(device)
        if not set(states) >= set(before):
            return []
        try:
            set_rng_states(states, device)
        except (RuntimeError, TypeError) as error:
            return [f"the states of its generators are not valid: {error}"]
        finally:
            set_rng_states(before, device)
        return []

    def restore_generators(self, saved: Mapping[str, Tensor], same: bool, seed: str) -> None:
        """Restores the generators, or seeds them if the checkpoint has a different topology.

        Args:
            saved: saved generator states by name: of this rank if the topology is the same, else of
                rank 0.
            same: whether the checkpoint was saved in this run's topology.
            seed: text from which each rank derives a different seed if states are not restored.
        """
        if not self.generators:
            return
        device, rank = self.topology.device, self.topology.rank
        now = rng_states(device)
        if same and set(saved) >= set(now):
            set_rng_states(saved, device)
            return
        # If rank 0 has the same states as the saved rank 0, no forward of the saved run has drawn
        # random numbers, unless the program seeds its generators otherwise.
        unused = all(name in saved and torch.equal(saved[name], now[name]) for name in now)
        digest = hashlib.sha256(f"{seed}/{rank}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:7], "little"))
        if rank == 0 and not unused:
            warnings.warn(
                "the checkpoint has no generator states for this topology: dropout masks of a wrapped module"
                " differ from those of the saved run",
                stacklevel=5,
            )
