"""Bytes of tensor storages that are alive, whoever holds them: seen as they are made, kept by weak reference."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """While entered, takes notice of every storage that an operation makes or touches."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, StorageWeakRef] = {}
        self._size: dict[int, int] = {}  # when it was last seen
        self.made = 0  # bytes of those seen for the first time, or larger than before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else every operation here goes through torch's compiler first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._look_at((args, out, kwargs.values() if kwargs else ()))
        return out

    def _look_at(self, values: Iterable[Any]) -> None:
        """Tensors among arguments or results, which operations have in lists at most."""
        for value in values:
            if isinstance(value, Tensor):
                if value.device.type != "meta":
                    storage = value.untyped_storage()
                    key = storage._cdata
                    nbytes = storage.nbytes()
                    known = self._seen.get(storage._cdata)
                    if known is None or known.expired():
                        self._seen[key], self._size[key] = StorageWeakRef(storage), 0
                    # memory may be freed, and allocated again
                    self.made += max(0, nbytes - self._size[key])
                    self._size[key] = nbytes
            elif not isinstance(value, str) and isinstance(value, Iterable):
                self._look_at(value)

    def sizes(self) -> list[int]:
        """Bytes of every storage that is alive and has any, in falling order."""
        found = []
        for key, ref in list(self._seen.items()):
            storage = None if ref.expired() else torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._seen[key]
                continue
            self._size[key] = storage.nbytes()
            if storage.nbytes():
                found.append(storage.nbytes())
        return sorted(found, reverse=True)

    def settled(self) -> list[int]:
        """The sizes once they have been the same for a fifth of a second. gloo's threads let go of a message a moment
        after it was waited for: beside other work its storages were still there at once in 78 of 3000 sums, and in none
        50 ms later. A process without a group has nothing to wait for."""
        if not dist.is_initialized():
            return self.sizes()
        end, found = time.monotonic() + 0.2, self.sizes()
        while time.monotonic() < end:
            time.sleep(0.02)
            if (now := self.sizes()) != found:
                end, found = time.monotonic() + 0.2, now
        return found

    def bytes(self) -> int:
        """The sum of the sizes once they are settled."""
        return sum(self.settled())

    def bytes_now(self) -> int:
        """The sum of the sizes at this moment, with messages that gloo is done with and has not let go of."""
        return sum(self.sizes())


class Peak(Live):
    """Looks after every operation; `most` is the largest sum of sizes there was."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._bound = 0  # no sum of sizes since the last look is above the bound

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._bound, self.made = self._bound + self.made, 0
        if self._bound > self.most:
            self._bound = self.bytes_now()
            self.most = max(self.most, self._bound)
        return out
