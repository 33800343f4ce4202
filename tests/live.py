"""Measures the bytes of all live tensor storages, through weak references."""

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
    """A dispatch mode that records every storage that an operation reads or creates inside it."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, StorageWeakRef] = {}
        self._size: dict[int, int] = {}  # bytes of each storage when it was last seen
        self.made = 0  # bytes of new storages, and of growth of known ones

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return (
            False  # otherwise torch's compiler would process every operation inside the mode first
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._look_at((args, out, tuple(kwargs.values()) if kwargs else ()))
        return out

    def _look_at(self, values: Iterable[Any]) -> None:
        """Records the storages of tensors among arguments or results, and of tensors in lists."""
        for value in values:
            if isinstance(value, Tensor):
                if not value.is_meta:
                    storage = value.untyped_storage()
                    key = storage._cdata
                    nbytes = storage.nbytes()
                    known = self._seen.get(key)
                    if known is None or known.expired():
                        self._seen[key], self._size[key] = StorageWeakRef(storage), 0
                    # a storage's memory may have been freed and allocated again
                    self.made += max(0, nbytes - self._size[key])
                    self._size[key] = nbytes
            elif isinstance(value, (list, tuple)):
                self._look_at(value)

    def sizes(self) -> list[int]:
        """Returns the bytes of every live storage that is not empty, in falling order."""
        found = []
        for key, ref in list(self._seen.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:  # it no longer exists
                del self._seen[key]
                continue
            self._size[key] = nbytes = storage.nbytes()
            if nbytes:
                found.append(nbytes)
        return sorted(found, reverse=True)

    def settled(self) -> list[int]:
        """Returns the sizes once they have stayed the same for 0.2 s.

        gloo's threads release a message shortly after it was waited for: on a busy machine, 78 of
        3000 sums still had their storages right after the wait, and none had them 50 ms later.
        Without a process group there is nothing to wait for.
        """
        if not dist.is_initialized():
            return self.sizes()
        end, found = time.monotonic() + 0.2, self.sizes()
        while time.monotonic() < end:
            time.sleep(0.02)
            if (now := self.sizes()) != found:
                end, found = time.monotonic() + 0.2, now
        return found

    def bytes(self) -> int:
        """Returns the bytes of all live storages once they have settled."""
        return sum(self.settled())

    def bytes_now(self) -> int:
        """Returns the bytes of all live storages at this moment.

        They include messages that gloo has not released yet.
        """
        return sum(self.sizes())


class Peak(Live):
    """Measures after every operation; `most` is the largest number of live bytes so far."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._bound = 0  # upper bound of the live bytes since the last measurement

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._bound, self.made = self._bound + self.made, 0
        if self._bound > self.most:
            self._bound = self.bytes_now()
            self.most = max(self.most, self._bound)
        return out
