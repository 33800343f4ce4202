"""Checkpoint content besides weights and moments: persistent buffers, and torch's generators for a wrapped module.

Buffers are saved by their owner, as bytes, with name, dtype and shape in the manifest. The generators
are torch's default one and that of the rank's GPU, of every rank: a wrapped module draws its dropout from them, the
layers of this package do not. The generators of `random` and numpy are the program's own and are not saved.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from threed.buffers import Buffers, bytes_of, dtype_name
from threed.checkpoint.fit import listed
from threed.device import rng_states, set_rng_states
from threed.topology import Topology


@dataclass
class Extras:
    """Buffers of a model, and whether generators are saved with them."""

    buffers: Buffers
    topology: Topology
    generators: bool
    _told: set[str] = field(default_factory=set)

    def rewinding(self) -> Callable[[], None]:
        """Returns what sets changing buffers, and torch's generators, back to what they are now: for forwards that run
        again."""
        states, values = rng_states(self.topology.device), self.buffers.changing()

        def rewind() -> None:
            set_rng_states(states, self.topology.device)
            for place, value in values:
                place.store(value)

        return rewind

    def _agree(self) -> None:
        """Makes buffers equal on all ranks before they are saved; warns once if tensor ranks differ. Collective."""
        self.buffers.agree()
        names = set(self.buffers.different()) - self._told
        self._told |= names
        if names and self.topology.data.index == self.topology.axis("tp").index == 0:
            fix = "make them alike, or register what each rank can compute with persistent=False"
            what = "buffers differ between tensor ranks, and the first one's are saved"
            warnings.warn(f"{what}: {listed(names)}; {fix}", stacklevel=5)

    def copied(self, any_copy: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns this rank's entries of the manifest and copies of their values. Collective.

        Args:
            any_copy: See `Buffers.owned`.

        Returns:
            The entries, and uint8 [n] on the CPU by key.
        """
        self._agree()
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
        """Returns what of saved buffers (file, dtype, shape) and of generator states cannot be restored here."""
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
        """Returns why generators do not take these states, which only setting them tells."""
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
        """Restores the generators, or, in another topology, sets them to states that follow from `seed`."""
        if not self.generators:
            return
        device, rank = self.topology.device, self.topology.rank
        if same and set(saved) >= set(rng_states(device)):
            set_rng_states(saved, device)
            return
        digest = hashlib.sha256(f"{seed}/{rank}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:7], "little"))
        if rank == 0:
            warnings.warn(
                "the checkpoint has no generator states of this topology: dropout of a wrapped module goes on with"
                " other masks than where it was saved",
                stacklevel=5,
            )
